"""What comes back: milliseconds, a status per query, and on request the evidence behind every number."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import Any

import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree

Array = Any  # np.ndarray from `estimate`, jax.Array inside the caller's own jit


class Resolution(IntEnum):
    """How a lookup was answered; `word` is the peer's name for it."""

    word: str

    def __new__(cls, value: int, word: str):
        member = int.__new__(cls, value)
        member._value_ = value
        member.word = word
        return member

    NONE = -1, "none"
    EXACT = 0, "exact_lookup"
    WITHIN = 1, "within_curve_interpolation"
    ACROSS_BATCH = 2, "cross_batch_interpolation"
    ACROSS_KV = 3, "cross_kv_interpolation"
    ACROSS_TOKENS = 4, "kv_first_interpolation"


@pytree()
class Evidence:
    """What carries one lookup, per rank.

    resolution: int8 [n..., r], a `Resolution`; NONE where nothing was asked or the query was refused.
    rows:       four int32 [n..., r], zero-based rows of the Parquet file, -1 where unused.
    weights:    four float64 [n..., r], their weights; they sum to 1.

    The order is the peer's: the lower curve first, on it the lower point first.  The four are kept apart because
    interleaving them costs more than finding them; `row` and `weight` stack them on demand.
    """

    resolution: Array
    rows: tuple[Array, ...]
    weights: tuple[Array, ...]

    @property
    def row(self) -> Array:
        """int32 [n..., r, 4]"""
        return stack_last(self.rows)

    @property
    def weight(self) -> Array:
        """float64 [n..., r, 4]"""
        return stack_last(self.weights)


def stack_last(planes: tuple[Array, ...]) -> Array:
    return (np if all(isinstance(x, np.ndarray) for x in planes) else jnp).stack(planes, axis=-1)


def no_evidence(xp: Any, shape: tuple[int, ...]) -> Evidence:
    """Evidence of a lookup that was not made, as views of one element each."""
    resolution, row, weight = (
        xp.broadcast_to(x, shape) for x in (np.int8(Resolution.NONE), np.int32(-1), np.float64(0))
    )
    return Evidence(resolution, (row,) * 4, (weight,) * 4)


@pytree()
class Parts:
    """The pieces an iteration is composed of, per rank; milliseconds are NaN where nothing was asked or found.

    A mixed rank takes prefill_ms + max(decode_ms - baseline_ms, 0).  A model called directly leaves the fields of a
    phase None where the work statically has none of it; `estimate` fills them in.
    """

    prefill_ms: Array
    decode_ms: Array
    baseline_ms: Array
    prefill: Evidence | None
    decode: Evidence | None
    baseline: Evidence | None


@pytree()
class Correction:
    """What an online correction did: float64 [n...] milliseconds before it, and the factor it applied."""

    native_ms: Array
    factor: Array


@pytree("level")
class Interval:
    """Where the measured time is expected beside each answer, from errors of the model on rows it was not fitted on.

    low_ms, high_ms: float64 [n...]; NaN where there is no answer, or nothing to calibrate with.
    count: int64 [n...], held-out rows behind it.
    level: share of such rows inside; a promise for queries like them only (`Support.extrapolated` says which are not).
    """

    low_ms: Array
    high_ms: Array
    count: Array
    level: float


@pytree()
class Support:
    """How far a query lies from what a learned model was fitted on, and how far its members disagree.

    distance: float64 [n...], e-folds outside the training box, 0 inside; NaN where there is no answer.
    model_spread: float64 [n...], half the range between its families, in log space (0.02: they are 4 % apart).
    """

    distance: Array
    model_spread: Array

    @property
    def extrapolated(self) -> Array:
        """bool [n...]: outside the training box."""
        return self.distance > 0


@pytree()
class Estimate:
    """Answers to a batch of queries, one entry per iteration.

    latency_ms: float64 [n...]; NaN where refused, 0 where idle.
    status:     int8 [n...], a `fpmjax.Status`.
    rank:       int32 [n...], first of the slowest ranks; -1 where idle or refused.
    parts:      per-rank pieces and evidence, or None unless asked for.
    correction: None from a model that corrects nothing.
    interval:   None from a model that was not calibrated.
    support:    None from a model that never leaves what was measured.
    """

    latency_ms: Array
    status: Array
    rank: Array
    parts: Parts | None = None
    correction: Correction | None = None
    interval: Interval | None = None
    support: Support | None = None

    def scaled(self, factor: Array) -> Interval | None:
        """The interval, multiplied."""
        if self.interval is None:
            return None
        return replace(self.interval, low_ms=factor * self.interval.low_ms, high_ms=factor * self.interval.high_ms)

    @property
    def native_ms(self) -> Array:
        """float64 [n...], the answer before any online correction."""
        return self.latency_ms if self.correction is None else self.correction.native_ms

    @property
    def factor(self) -> Array:
        """float64 [n...], the online correction; ones where there is none."""
        if self.correction is not None:
            return self.correction.factor
        return np.broadcast_to(np.float64(1), np.shape(self.latency_ms))


@pytree()
class SpeculativeEstimate:
    """Answers with a draft length: one whole round, draft and verification, not a time per accepted token.

    latency_ms:     float64 [n...], scaling_factor * stp.latency_ms.
    draft_length:   [n...], as asked.
    scaling_factor: float64 [n...].
    calibrated:     bool [n...], inside the published study (B <= 8, K <= 4096 B, depth 1..4; TP1, BF16).
    stp:            the ordinary, unscaled answer at the widened work, evidence included.
    """

    latency_ms: Array
    draft_length: Array
    scaling_factor: Array
    calibrated: Array
    stp: Estimate

    @property
    def status(self) -> Array:
        """int8 [n...], a `fpmjax.Status`."""
        return self.stp.status

    @property
    def rank(self) -> Array:
        """int32 [n...], first of the slowest ranks; -1 where idle or refused."""
        return self.stp.rank

    @property
    def interval(self) -> Interval | None:
        """That of the ordinary answer, scaled: it holds the error of the model, not that of the rule."""
        return self.stp.scaled(self.scaling_factor)

    @property
    def support(self) -> Support | None:
        """That of the widened work."""
        return self.stp.support
