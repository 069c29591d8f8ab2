"""F(b, K): what an ordinary pass takes, from a study's own ordinary rounds or from a model.

`measured`            repetition 0, each exact batch, median of equal K, piecewise linear in K, nothing beyond
`interpolated_batch`  the same, and linear in b between the two neighbouring measured batches: public anchors only
`estimator`           any fpmjax model; its own error is in every number then

Anchors without KV (`total_kv_tokens` of -1) have curves of their own with one point per batch, the median of that
batch's rounds: rounds without KV are looked up in them, at their batch alone, and rounds with KV never are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.study.columns import REFERENCE
from fpmjax.study.read import Study
from fpmjax.study.rules import coded

MODES = ("measured", "interpolated_batch", "estimator")
U32_MAX = 2**32 - 1


class Curves:
    """Milliseconds over KV, one curve for each engine and batch.

    engine, batch, kv: int64 [m]; latency_ms: float64 [m], in any order.  Measurements at one KV become their median.
    """

    def __init__(self, engine: np.ndarray, batch: np.ndarray, kv: np.ndarray, latency_ms: np.ndarray):
        order = np.lexsort((latency_ms, kv, batch, engine))
        engine, batch, kv, latency_ms = (x[order] for x in (engine, batch, kv, latency_ms))
        key = (engine << 32) + batch
        new_curve = np.ones(len(key), bool)
        new_curve[1:] = key[1:] != key[:-1]
        new_knot = new_curve.copy()
        new_knot[1:] |= kv[1:] != kv[:-1]
        first = np.flatnonzero(new_knot)
        count = np.diff(np.append(first, len(key)))
        # Halved before the sum, which is exact and does not overflow.
        self.ms = latency_ms[first + (count - 1) // 2] / 2 + latency_ms[first + count // 2] / 2
        self.kv = kv[first]
        self.key = key[new_curve]
        """int64 [c], engine * 2**32 + batch of each curve, ascending"""
        curve = np.cumsum(new_curve)[first] - 1
        self.start = np.searchsorted(curve, np.arange(len(self.key) + 1))
        """int64 [c + 1], first knot of each curve"""
        self.levels = np.unique(self.kv)
        self.place = curve * (len(self.levels) + 1) + np.searchsorted(self.levels, self.kv)

    def find(self, engine: np.ndarray, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(curve at or below, curve at or above) the batch in its engine, int64 [n] each; -1 where there is none."""
        key = (engine << 32) + batch
        low = np.searchsorted(self.key, key, "right") - 1
        high = np.searchsorted(self.key, key, "left")
        return self._same(low, engine), self._same(high, engine)

    def _same(self, curve: np.ndarray, engine: np.ndarray) -> np.ndarray:
        inside = (curve >= 0) & (curve < len(self.key))
        inside[inside] = self.key[curve[inside]] >> 32 == engine[inside]
        return np.where(inside, curve, -1)

    def along(self, curve: np.ndarray, kv: np.ndarray) -> np.ndarray:
        """float64 [n], linear between the knots around each KV, exact at a knot; NaN outside, and for curve -1."""
        ms = np.full(len(curve), np.nan)
        if not len(self.key):
            return ms
        level = np.searchsorted(self.levels, kv, "right") - 1
        knot = np.searchsorted(self.place, curve * (len(self.levels) + 1) + level, "right") - 1
        inside = np.flatnonzero((curve >= 0) & (knot >= self.start[curve]))
        knot, kv = knot[inside], kv[inside]
        last = knot + 1 == self.start[curve[inside] + 1]
        above = np.where(last, knot, knot + 1)
        span = np.where(last, 1, self.kv[above] - self.kv[knot])
        part = (kv - self.kv[knot]) / span
        value = self.ms[knot] + (self.ms[above] - self.ms[knot]) * part
        ms[inside] = np.where(last & (kv != self.kv[knot]), np.nan, value)
        return ms

    def bounds(self, curve: int) -> tuple[int, int]:
        """(least, most KV) of a curve."""
        return int(self.kv[self.start[curve]]), int(self.kv[self.start[curve + 1] - 1])


def engines(study: Study) -> np.ndarray:
    """int64 [rows]: equal where one curve may serve both rows; less than 2**31."""
    columns = [study.columns[name] for name in REFERENCE]
    return np.unique(coded([*columns, study.columns["total_kv_tokens"] < 0]), return_inverse=True)[1].astype(np.int64)


def curves_of(study: Study, kept: np.ndarray) -> Curves:
    """The curves of the kept ordinary rounds of repetition 0."""
    c = study.columns
    rows = np.flatnonzero(kept & ~study.sd & (c["repetition"] == 0))
    return Curves(engines(study)[rows], c["batch_size"][rows], c["total_kv_tokens"][rows], c["latency_ms"][rows])


def reference_of(
    study: Study, kept: np.ndarray, *, mode: str = "measured", model: Any = None, curves: Curves | None = None
) -> np.ndarray:
    """float64 [rows]: F((d+1)B, K) of every row in ms, NaN where there is no reference.

    kept: bool [rows], rows that the reference may be made of.
    model: for `estimator`, an fpmjax model, or a mapping from (gpu, tp, model) to the model of each deployment.
    curves: `curves_of(study, kept)`, where it is at hand.

    Raises OptionError `study_reference`.
    """
    if mode not in MODES:
        refuse_option("study_reference", f"reference is {mode!r}", f"it is one of {', '.join(MODES)}")
    if (mode == "estimator") != (model is not None):
        what = "the reference estimator needs a model" if model is None else f"the reference {mode} takes no model"
        refuse_option("study_reference", what, "reference='estimator' and model=... go together")
    c = study.columns
    batch, kv = (c["draft_length"] + 1) * c["batch_size"], c["total_kv_tokens"]
    if mode != "interpolated_batch" and (kv < 0).any():
        refuse_option(
            "study_reference",
            f"{study.label}, {study.place(int((kv < 0).argmax()))} has no total_kv_tokens",
            "anchors without KV have the reference interpolated_batch only",
        )
    if mode == "estimator":
        return estimated(study, model, batch, kv)
    curves = curves or curves_of(study, kept)
    low, high = curves.find(engines(study), batch)
    if mode == "measured":
        return curves.along(np.where(low == high, low, -1), kv)
    below, above = curves.along(low, kv), curves.along(high, kv)
    at = curves.key[np.stack([low, high])] & U32_MAX if len(curves.key) else np.zeros((2, len(low)), np.int64)
    part = (batch - at[0]) / np.maximum(at[1] - at[0], 1)
    return np.where(low == high, below, below + (above - below) * part)


def estimated(study: Study, model: Any, batch: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """float64 [rows], what each deployment's model answers for ordinary decoding; NaN where it refuses."""
    from fpmjax.estimate import estimate
    from fpmjax.work import Work

    c, names = study.columns, ("gpu", "tp", "model")
    place = coded([c[name] for name in names])
    _, first, code = np.unique(place, return_index=True, return_inverse=True)
    deployments = [
        (study.words["gpu"][c["gpu"][row]], int(c["tp"][row]), study.words["model"][c["model"][row]])
        for row in first.tolist()
    ]
    if not isinstance(model, Mapping):
        if len(deployments) > 1:
            shown = ", ".join(map(str, deployments[:3]))
            refuse_option(
                "study_reference",
                f"one model for the {len(deployments)} deployments of {study.label} ({shown})",
                "pass model={(gpu, tp, model): ...} with a model for each, or study one deployment",
            )
        model = {deployments[0]: model}
    if absent := [key for key in deployments if key not in model]:
        refuse_option("study_reference", f"no model for {absent[0]}", f"the keys are {deployments[:3]}")
    ms = np.full(study.rows, np.nan)
    for i, key in enumerate(deployments):
        rows = np.flatnonzero((code == i) & (kv <= U32_MAX))
        points, back = np.unique(np.stack([batch[rows], kv[rows]], 1), axis=0, return_inverse=True)
        answer = np.asarray(estimate(model[key], Work.decode(points[:, 0], points[:, 1]), check=False).latency_ms)
        ms[rows] = answer[back.reshape(-1)]
    return ms
