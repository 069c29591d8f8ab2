"""Few points of narrow decode, asked about the rest of their lattice and about batches beyond it.

Four measured lattices of batch and context: Qwen3-32B on B300 at TP 1, 2 and 4, Llama-3.1-8B on RTX 4090
(`data/NOTICE.md`).  20 seeded splits; in each, 70 % of the points with B <= 64 are fitted, and two questions are
asked: the other points with B <= 64, and all with B >= 128.  Then two points of every wide batch, drawn by the same
seed, are fitted too (anchors), and the other wide points are asked again.  Medians over the splits of the mean
absolute percentage error.

    committee, hardware     `learned(..., hardware=Hardware(...))`, what the datasheet says
    committee               the same without it
    roofline, hardware      one form of the committee alone, under both priors
    regression              `regression(observations, role="decode")`
    linear fit              nonnegative least squares of relative errors on 1, B, K
    boosted trees           scikit-learn's HistGradientBoosting, 600 trees, log of ms, the five features of requests
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from accuracy_common import (
    DATA,
    boosted,
    count,
    errors,
    linear,
    llama31_8b_on_rtx4090,
    markdown,
    number,
    qwen3_32b_on_b300,
    share,
)
from pyarrow import csv

import fpmjax
from fpmjax import Hardware, Observations, Status, Work, learned_fleet, regression
from fpmjax.progress import Progress

SPLITS, FITTED, NARROW, ANCHORS = 20, 0.7, 64, 2
DRAFTS = (1, 2, 3, 4)
LEVEL = 0.9
COMMITTEES: dict[str, tuple[str, bool]] = {
    "committee, hardware": ("committee", True),
    "committee": ("committee", False),
    "roofline, hardware": ("roofline", True),
}
RIVALS = {
    "regression": lambda seen: partial(ask, regression(seen, role="decode")),
    "linear fit": linear,
    "boosted trees": boosted,
}
ASKED = {"narrow": 2.0, "wide": 7.0, "anchored": 3.5}  # percent
TITLES = {
    "narrow": "B <= 64, held out",
    "narrow anchored": "the same, with anchors",
    "wide": "B >= 128",
    "anchored": "B >= 128, with anchors",
}


class Lattice(NamedTuple):
    """Every measured point, and the datasheet."""

    name: str
    seen: Observations
    hardware: Hardware

    @property
    def batch(self) -> np.ndarray:
        return count(self.seen.work, "decode_requests")


class Split(NamedTuple):
    """bool [n]: the points that are fitted, and those that are fitted as well when there are anchors."""

    fitted: np.ndarray
    anchors: np.ndarray


class Answers(NamedTuple):
    """float64 [splits, 2, n] over a whole lattice, without and with anchors; NaN where a way does not say."""

    ms: np.ndarray
    low: np.ndarray
    high: np.ndarray
    distance: np.ndarray


@cache
def lattices() -> list[Lattice]:
    """The four of them."""
    b300, tp = decode_points("b300_vllm0201_grid_decode_qwen3_32b.csv.gz")
    rtx, _ = decode_points("llmservingsim_rtx4090_llama31_8b_decode.csv.gz")
    return [
        *(Lattice(f"B300 TP {n}", b300.where(tp == n), qwen3_32b_on_b300(n)) for n in (1, 2, 4)),
        Lattice("RTX 4090", rtx, llama31_8b_on_rtx4090()),
    ]


def decode_points(name: str) -> tuple[Observations, np.ndarray]:
    """(the points of a file, the tensor parallel size of each); the totals, as one of them has KV per request too."""
    table = csv.read_csv(DATA / name)
    batch, kv, wall_ms, tp = (table[c].to_numpy() for c in ("batch_size", "total_kv_read_tokens", "latency_ms", "tp"))
    return Observations.of(Work.decode(batch, kv), wall_ms), tp


def split(batch: np.ndarray, seed: int) -> Split:
    """What is fitted of points with these batches, drawn by the seed."""
    rng = np.random.default_rng(seed)
    fitted, anchors = np.zeros(len(batch), bool), np.zeros(len(batch), bool)
    narrow = np.flatnonzero(batch <= NARROW)
    fitted[rng.permutation(narrow)[: round(FITTED * len(narrow))]] = True
    for wide in np.unique(batch[batch > NARROW]):
        anchors[rng.choice(np.flatnonzero(batch == wide), ANCHORS, replace=False)] = True
    return Split(fitted, anchors)


def splits(lattice: Lattice) -> list[Split]:
    return [split(lattice.batch, seed) for seed in range(SPLITS)]


def stages(lattice: Lattice) -> Iterable[Observations]:
    """What each split fits without anchors, then what it fits with them."""
    for one in splits(lattice):
        yield lattice.seen.where(one.fitted)
        yield lattice.seen.where(one.fitted | one.anchors)


def fitted(all_of_them: list[Lattice], family: str, known: bool) -> list[list[Any]]:
    """For every lattice the models of its stages; all of them are one fit."""
    seen = [(x, lattice.hardware) for lattice in all_of_them for x in stages(lattice)]
    hardware = [datasheet for _, datasheet in seen] if known else None
    fleet = learned_fleet([x for x, _ in seen], role="decode", family=family, hardware=hardware, level=LEVEL)
    models = [jax.tree.map(lambda x: x[i], fleet) for i in range(len(seen))]  # noqa: B023
    each = len(seen) // len(all_of_them)
    return [models[i : i + each] for i in range(0, len(models), each)]


def answers_of(models: list[Any], lattice: Lattice) -> Answers:
    """The models of all stages, each asked about the whole lattice."""
    told: list[Any] = [fpmjax.estimate(model, lattice.seen.work, check=False) for model in models]
    each = [(x.latency_ms, x.interval.low_ms, x.interval.high_ms, x.support.distance) for x in told]
    return Answers(*(np.stack(x).reshape(SPLITS, 2, -1) for x in zip(*each, strict=True)))


def ask(model: Any, work: Work) -> np.ndarray:
    return fpmjax.estimate(model, work, check=False).latency_ms


def answers_of_rival(fit: Any, lattice: Lattice, bar: Any) -> Answers:
    ms = []
    for seen in stages(lattice):
        ms.append(fit(seen)(lattice.seen.work))
        bar()
    told = np.stack(ms).reshape(SPLITS, 2, -1)
    return Answers(told, *([np.full_like(told, np.nan)] * 3))


def held(lattice: Lattice) -> dict[str, tuple[int, np.ndarray]]:
    """Question -> (stage that is asked, bool [splits, n] points that are scored)."""
    wide, own = lattice.batch > NARROW, splits(lattice)
    narrow = np.stack([~wide & ~one.fitted for one in own])
    rest = np.stack([wide & ~one.anchors for one in own])
    return {
        "narrow": (0, narrow),
        "narrow anchored": (1, narrow),
        "wide": (0, np.broadcast_to(wide, rest.shape)),
        "anchored": (1, rest),
    }


def mape(lattice: Lattice, answers: Answers, question: str) -> float:
    """Median over splits of the mean of |error|, percent; NaN if any answer is missing."""
    stage, scored = held(lattice)[question]
    error = np.abs(errors(answers.ms[:, stage], np.asarray(lattice.seen.wall_ms)))
    return float(np.median([row[which].mean() for row, which in zip(error, scored, strict=True)]))


def calibration(lattice: Lattice, answers: Answers, question: str) -> np.ndarray:
    """float64 [points, 3] over all splits: whether the interval held it, its half width in percent, whether flagged."""
    stage, scored = held(lattice)[question]
    ms, low, high, distance = (x[:, stage][scored] for x in answers)
    wall = np.broadcast_to(np.asarray(lattice.seen.wall_ms), scored.shape)[scored]
    return np.stack([(low <= wall) & (wall <= high), 50.0 * (high - low) / ms, distance > 0], -1)


def widened(models: list[Any], lattice: Lattice) -> np.ndarray:
    """float64 [2, 3]: without and with anchors, of queries that a draft length widens beyond B = 64: their number,
    percent refused, percent of the answered that are flagged."""
    depth, point = (x.ravel() for x in np.meshgrid(DRAFTS, np.flatnonzero(lattice.batch <= NARROW), indexing="ij"))
    beyond = lattice.batch[point] * (depth + 1) > NARROW
    work, depth = jax.tree.map(lambda x: x[point[beyond]], lattice.seen.work), depth[beyond]
    told: list[Any] = [fpmjax.estimate(model, work, draft_length=depth, check=False) for model in models]
    answered = np.stack([x.status == Status.OK for x in told])
    far = np.stack([x.support.distance > 0 for x in told])
    return np.array([(len(depth), share(~answered[i::2]), share(far[i::2][answered[i::2]])) for i in (0, 1)], float)


def section() -> str:
    """All tables of the study."""
    found = lattices()
    told: dict[str, list[Answers]] = {}
    drafts: list[np.ndarray] = []
    total = len(COMMITTEES) + len(RIVALS) * len(found) * 2 * SPLITS
    with Progress("lattices", total, unit="fits") as bar:
        done = iter(range(1, total + 1))
        for name, (family, known) in COMMITTEES.items():
            own = list(zip(fitted(found, family, known), found, strict=True))
            told[name] = [answers_of(*one) for one in own]
            drafts = drafts or [widened(*one) for one in own]
            bar(next(done))
        for name, fit in RIVALS.items():
            told[name] = [answers_of_rival(fit, lattice, lambda: bar(next(done))) for lattice in found]
    return "\n\n".join(
        [
            accuracy_table(found, told),
            "What was asked for, and what the committee with hardware reaches; * marks what falls short:",
            asked_table(found, told),
            f"Intervals of {LEVEL:.0%} of the committee over all splits, with hardware and without: share of points "
            "inside, mean half width in percent of the answer, share flagged `extrapolated`:",
            interval_table(found, told),
            f"Measured points with B <= {NARROW} and draft lengths {DRAFTS[0]} to {DRAFTS[-1]}, where the widened "
            f"batch is beyond {NARROW}; share refused, and of the answered the share flagged:",
            draft_table(found, drafts),
        ]
    )


def accuracy_table(found: list[Lattice], told: dict[str, list[Answers]]) -> str:
    rows: list[tuple[str, ...]] = [("MAPE %, median of splits", "model", *(x.name for x in found))]
    for question, title in TITLES.items():
        for name, answers in told.items():
            values = [number(mape(x, a, question)) for x, a in zip(found, answers, strict=True)]
            rows.append((title, name, *values))
    return markdown(rows)


def asked_table(found: list[Lattice], told: dict[str, list[Answers]]) -> str:
    def of(name: str, question: str) -> np.ndarray:
        return np.array([mape(x, a, question) for x, a in zip(found, told[name], strict=True)])

    def line(what: str, values: np.ndarray, low: float, high: float) -> tuple[str, ...]:
        return (what, *(f"{v:.2f}{'' if low <= v <= high else ' *'}" for v in values))

    ours, rivals = "committee, hardware", ("linear fit", "boosted trees")
    best = {q: np.min([of(name, q) for name in rivals], axis=0) for q in TITLES}
    rows: list[tuple[str, ...]] = [("asked", *(x.name for x in found))]
    for question, limit in ASKED.items():
        rows.append(line(f"{TITLES[question]}: at most {limit:g} %", of(ours, question), 0.0, limit))
    narrow, wide = (of(ours, q) / best[q] for q in ("narrow", "wide"))
    rows.append(line("B <= 64: at most 1.1 of the better of linear fit and trees", narrow, 0.0, 1.1))
    rows.append(line("B >= 128: below both", wide, 0.0, 1.0))
    rows.append(line("B >= 128, with anchors: below both", of(ours, "anchored") / best["anchored"], 0.0, 1.0))
    inside = [calibration(x, a, "narrow")[:, 0] for x, a in zip(found, told[ours], strict=True)]
    pooled = share(np.concatenate(inside))
    mark = "" if 85.0 <= pooled <= 95.0 else " *"
    rows.append(line("B <= 64: 90 % intervals hold 85 to 95 %", np.array([share(x) for x in inside]), 85.0, 95.0))
    return markdown(rows) + f"\n\nPooled over the four, intervals hold {pooled:.1f} %{mark} of the points with B <= 64."


def interval_table(found: list[Lattice], told: dict[str, list[Answers]]) -> str:
    names = ("committee, hardware", "committee")
    columns = ("inside %", "half width %", "flagged %")
    header = ("points", "lattice", *(f"{x}{w}" for x in ("", "no hardware: ") for w in columns))
    rows: list[tuple[str, ...]] = [header]
    for question in ("narrow", "wide", "anchored"):
        each = {n: [calibration(x, a, question) for x, a in zip(found, told[n], strict=True)] for n in names}
        for i, name in enumerate([*(x.name for x in found), "all four"]):
            parts = [np.concatenate(each[n]) if i == len(found) else each[n][i] for n in names]
            cells = [number(v, 1) for x in parts for v in (share(x[:, 0]), x[:, 1].mean(), share(x[:, 2]))]
            rows.append((TITLES[question], name, *cells))
    return markdown(rows)


def draft_table(found: list[Lattice], drafts: list[np.ndarray]) -> str:
    rows: list[tuple[str, ...]] = [
        ("lattice", "queries", "refused %", "flagged %", "with anchors: refused %", "flagged %")
    ]
    for lattice, ((n, refused, far), (_, refused_anchored, far_anchored)) in zip(found, drafts, strict=True):
        cells = (number(v, 1) for v in (refused, far, refused_anchored, far_anchored))
        rows.append((lattice.name, f"{n:.0f}", *cells))
    return markdown(rows)
