"""Real engines: a few narrow points, asked about the rest of their lattice and about wide batches.

The small version of `benchmarks/accuracy.py`: one split of each lattice (notice: `cases/lattices.NOTICE.md`).
"""

from __future__ import annotations

import csv
import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fitted import the

from fpmjax import Estimate, Hardware, Observations, Status, Work, estimate, learned_fleet

FILE = Path(__file__).parent / "cases" / "lattices.csv.gz"
NARROW, FITTED, ANCHORS = 64, 0.7, 2
HARDWARE = {
    **{("b300", tp): Hardware(65.5e9 / tp, 65.5e9 / tp, 262_144 / tp, 8e12, 2.25e15) for tp in (1, 2, 4)},
    ("rtx4090", 1): Hardware(16.1e9, 16.1e9, 131_072, 1.008e12, 1.65e14),
}
LATTICES = list(HARDWARE)


class Asked(NamedTuple):
    """A question, the answer, and what was measured."""

    work: Work
    answer: Estimate
    ms: np.ndarray

    @property
    def mape(self) -> float:
        return float(100 * np.abs(self.answer.latency_ms / self.ms - 1).mean())

    @property
    def held(self) -> np.ndarray:
        interval = self.answer.interval
        assert interval is not None
        return (interval.low_ms <= self.ms) & (self.ms <= interval.high_ms)


@cache
def asked() -> dict[tuple[str, int, str, str], Asked]:
    """By lattice, without ("narrow") or with ("anchors") wide points in the fit, and "inside" or "wide"."""
    rows = list(csv.DictReader(gzip.decompress(FILE.read_bytes()).decode().splitlines()))
    fleet, hardware, questions = [], [], []
    for gpu, tp in LATTICES:
        mine = [r for r in rows if (r["gpu"], int(r["tp"])) == (gpu, tp)]
        batch, kv = (np.array([int(r[name]) for r in mine]) for name in ("batch_size", "kv_tokens"))
        ms = np.array([float(r["latency_ms"]) for r in mine])
        rng = np.random.default_rng(0)
        narrow, wide = rng.permutation(np.flatnonzero(batch <= NARROW)), np.flatnonzero(batch > NARROW)
        seen, held = np.split(narrow, [int(FITTED * len(narrow))])
        anchors = np.concatenate([rng.choice(wide[batch[wide] == b], ANCHORS, False) for b in np.unique(batch[wide])])
        for name, more in (("narrow", anchors[:0]), ("anchors", anchors)):
            fitted = np.concatenate([seen, more])
            fleet.append(Observations.of(Work.decode(batch[fitted], kv[fitted]), ms[fitted]))
            hardware.append(HARDWARE[gpu, tp])
            for question, which in (("inside", held), ("wide", np.setdiff1d(wide, more))):
                questions.append(((gpu, tp, name, question), Work.decode(batch[which], kv[which]), ms[which]))
    models = learned_fleet(fleet, role="decode", hardware=hardware)
    out = {}
    for i, (name, work, ms) in enumerate(questions):
        out[name] = Asked(work, estimate(the(models, i // 2), work), ms)
        if name[2:] == ("narrow", "wide"):
            requests = Work.decode(np.asarray(work.decode_requests)[:, 0] // 4, np.asarray(work.decode_kv)[:, 0])
            status = estimate(the(models, i // 2), requests, draft_length=3, check=False).status
            ready = np.asarray(work.decode_requests)[:, 0] <= 2 * NARROW
            assert np.array_equal(status == Status.OK, ready) and (status[~ready] == Status.NOT_READY).all()
    return out


@pytest.mark.parametrize(("gpu", "tp"), LATTICES)
def test_errors(gpu, tp):
    found = asked()
    assert found[gpu, tp, "narrow", "inside"].mape <= 2.0
    assert found[gpu, tp, "narrow", "wide"].mape <= 7.0
    assert found[gpu, tp, "anchors", "inside"].mape <= 2.0
    assert found[gpu, tp, "anchors", "wide"].mape <= 3.5


@pytest.mark.parametrize(("gpu", "tp"), LATTICES)
def test_what_is_wide_is_flagged(gpu, tp):
    answer = asked()[gpu, tp, "narrow", "wide"].answer
    assert answer.support is not None and answer.support.extrapolated.all()
    answer = asked()[gpu, tp, "anchors", "wide"].answer
    assert answer.support is not None and answer.support.distance.max() < np.log(64)


def test_intervals_hold_nine_of_ten():
    """Pooled over the lattices; two standard errors are the sampling error of so few points."""
    held = np.concatenate([asked()[gpu, tp, "narrow", "inside"].held for gpu, tp in LATTICES])
    slack = 2 * np.sqrt(0.9 * 0.1 / len(held))
    assert len(held) > 80 and 0.85 - slack <= held.mean() <= min(0.95 + slack, 1.0)
