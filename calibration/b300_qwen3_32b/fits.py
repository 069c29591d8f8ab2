"""Fitted models on the same measurements: what they answer for points and rounds that they have not seen."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

import fpmjax
from calibration.b300_qwen3_32b.holdouts import LIVE, composed, lattices, qwen3_32b, rounds
from fpmjax import Observations, Status, learned, learned_fleet, regression

SPLITS, FITTED, NARROW, LEVEL = 5, 0.7, 64, 0.9
SHARE, HALF = 0.6, 0.5  # of each kind of live work, of the drain
EVERY = 4  # of the many live decode rounds to fit beside prefill and mixed ones, one in so many
KINDS = ("decode", "mixed", "prefill")


class Told(NamedTuple):
    """Answers beside measurements, float64 [n]; NaN where a model refuses, and of what it does not state.

    flagged: 1 where the model says of its answer that it is extrapolated, 0 where it says that it is not.
    status: int8 [n], `Status` of each answer.
    """

    predicted: np.ndarray
    measured: np.ndarray
    low: np.ndarray
    high: np.ndarray
    flagged: np.ndarray
    status: np.ndarray

    def where(self, which: np.ndarray) -> Told:
        return Told(*(x[which] for x in self))


def told(model: Any, seen: Observations) -> Told:
    answer: Any = fpmjax.estimate(model, seen.work, check=False)
    ok = answer.status == Status.OK
    said = [answer.latency_ms, *([np.nan] * 3)]
    if answer.interval is not None:
        said[1:] = answer.interval.low_ms, answer.interval.high_ms, answer.support.extrapolated
    predicted, low, high, flagged = (np.where(ok, x, np.nan) for x in said)
    return Told(predicted, np.asarray(seen.wall_ms), low, high, flagged, np.asarray(answer.status))


def together(parts: list[Told]) -> Told:
    return Told(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def on_lattices() -> dict[str, dict[str, dict[str, Told]]]:
    """Lattice -> model -> "narrow" | "wide": a share `FITTED` of the points up to `NARROW` fitted, in seeded splits.

    `narrow` are the other points up to there, `wide` all beyond.  The composed lattice is fitted with the others.
    """
    found = (*lattices(), composed())
    splits = [(x, seed) for x in found for seed in range(SPLITS)]
    masks = [fitted(x.points.batch, seed) for x, seed in splits]
    seen = [x.seen.where(mask) for (x, _), mask in zip(splits, masks, strict=True)]
    fleet: Any = learned_fleet(seen, role="decode", hardware=[x.hardware for x, _ in splits], level=LEVEL)
    out: dict[str, dict[str, dict[str, list[Told]]]] = {}
    for i, ((lattice, _), mask) in enumerate(zip(splits, masks, strict=True)):
        narrow = lattice.points.batch <= NARROW
        models = {
            "learned": jax.tree.map(lambda x: x[i], fleet),  # noqa: B023
            "regression": regression(seen[i], role="decode"),
        }
        for name, model in models.items():
            own = out.setdefault(lattice.name, {}).setdefault(name, {"narrow": [], "wide": []})
            answers = told(model, lattice.seen)
            for question, which in (("narrow", narrow & ~mask), ("wide", ~narrow)):
                own[question].append(answers.where(which))
    return {a: {b: {c: together(x) for c, x in d.items()} for b, d in e.items()} for a, e in out.items()}


def fitted(batch: np.ndarray, seed: int) -> np.ndarray:
    """bool [n]: the points that a split fits."""
    narrow = np.flatnonzero(batch <= NARROW)
    mask = np.zeros(len(batch), bool)
    mask[np.random.default_rng(seed).permutation(narrow)[: round(FITTED * len(narrow))]] = True
    return mask


def on_live_rounds() -> dict[str, dict[str, dict[str, Told]]]:
    """Run -> model -> kind of work: of its first `SHARE` in time order some are fitted, and all the rest is asked.

    Fitted are every prefill and mixed round, and of decode one in `EVERY`.
    """
    out: dict[str, dict[str, dict[str, Told]]] = {}
    for tp in LIVE:
        seen, kind, _ = rounds(tp)
        fit, rest = np.zeros((2, len(kind)), bool)
        for name in KINDS:
            rows = np.flatnonzero(kind == name)
            count = int(SHARE * len(rows))
            fit[rows[: count : EVERY if name == "decode" else 1]] = True
            rest[rows[count:]] = True
        for model, found in models_of(seen.where(fit), tp, "aggregated").items():
            answers = told(found, seen.where(rest))
            out.setdefault(f"TP{tp}", {})[model] = {name: answers.where(kind[rest] == name) for name in KINDS}
    return out


def on_the_drain() -> dict[str, dict[str, Told]]:
    """Run -> model: the first half of live decode is fitted, the rest, which drains, is asked."""
    out: dict[str, dict[str, Told]] = {}
    for tp in LIVE:
        before, after = halves(tp)
        out[f"TP{tp}"] = {name: told(model, after) for name, model in models_of(before, tp, "decode").items()}
    return out


def halves(tp: int) -> tuple[Observations, Observations]:
    """The decode of a live run without the sweep that it begins with, in two."""
    seen, kind, segment = rounds(tp)
    decode = seen.where((kind == "decode") & (segment == "real"))
    half = int(HALF * len(decode))
    return decode[:half], decode[half:]


def share_at_most(seen: Observations) -> tuple[int, float]:
    """(the largest batch, percent of the rounds that have it)."""
    batch = np.asarray(seen.work.decode_requests)[:, 0]
    return int(batch.max()), 100 * float((batch == batch.max()).mean())


def models_of(seen: Observations, tp: int, role: str) -> dict[str, Any]:
    mine = learned(seen, role=role, hardware=qwen3_32b(tp), level=LEVEL)
    return {"learned": mine, "regression": regression(seen, role=role)}
