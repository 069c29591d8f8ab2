"""From the lookups of every rank to one iteration: composition, statuses, the slowest rank.

Written against the array namespace (`numpy` or `jax.numpy`), so that the host path and the kernel share it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fpmjax.answer import Estimate, Parts
from fpmjax.errors import MetricsError
from fpmjax.metrics import U32_MAX
from fpmjax.status import Status
from fpmjax.work import COUNTS, PAIRS, Array, Work

OK, IDLE, INVALID, OVERFLOW = (np.int8(s) for s in (Status.OK, Status.IDLE, Status.INVALID_WORK, Status.COUNT_OVERFLOW))
PHASES = (COUNTS[:3], COUNTS[3:])  # the fields of prefill, those of decode


class Lookups(NamedTuple):
    """Lookups of every rank in milliseconds, NaN where refused; None for a phase that no query has.

    prefill_refusal, decode_refusal: int8 [], what a missing answer of that phase means.
    """

    prefill_ms: Array
    decode_ms: Array
    baseline_ms: Array
    prefill_refusal: Any
    decode_refusal: Any


def has_prefill(work: Work) -> Array:
    """bool [n..., r]: tokens are computed; a fully cached request computes none and takes no time."""
    return None if work.prefill_tokens is None else work.prefill_tokens > 0


def has_decode(work: Work) -> Array:
    """bool [n..., r]"""
    return None if work.decode_requests is None else work.decode_requests > 0


def askable(xp: Any, work: Work, width: int = 1) -> tuple[Work, Array]:
    """The work with uint32 counts and `width` decode rows per request; and its refusals, int8 of its full shape.

    Work made by its constructors is valid; traced work is checked here.  What a refused rank holds afterwards is
    of no consequence: `compose` lets the refusal win.

    Raises MetricsError (`u32`, `payload`) for fields that are no integer arrays of one shape.
    """
    counts = {name: getattr(work, name) for name in COUNTS}
    shape = shape_of(counts)
    for phase in PHASES:  # a phase is there as a whole or not at all
        if any(counts[name] is not None for name in phase):
            counts |= {name: xp.zeros(shape, np.uint32) for name in phase if counts[name] is None}
    status = xp.full(shape, OK) if work.refusal is None else work.refusal
    for name, x in counts.items():
        if x is not None and x.dtype != np.uint32:
            wide = x.astype(np.int64)  # a bound of 2**32 - 1 would wrap in int32; what exceeds int64 turns negative
            status = xp.where((wide < 0) | (wide > U32_MAX), INVALID, status)
            counts[name] = x.astype(np.uint32)
    for requests, totals, _ in PAIRS:
        r, t = counts[requests], counts[totals]
        if r is not None and t is not None:
            status = xp.where((r == 0) & (t > 0), INVALID, status)
    if width > 1 and counts["decode_requests"] is not None:
        requests = counts["decode_requests"]
        status = xp.where((status == OK) & (requests > np.uint32(U32_MAX // width)), OVERFLOW, status)
        counts["decode_requests"] = requests * np.uint32(min(width, U32_MAX))
    return replace(work, **counts), status


def shape_of(counts: dict[str, Array]) -> tuple[int, ...]:
    """The one shape of all counts that are there; MetricsError where they are no integer arrays of one shape."""
    there = {name: x for name, x in counts.items() if x is not None}
    hint = "hint: build it with `fpmjax.Work.decode`, `.prefill` or `.of`, which check and broadcast"
    for name, x in there.items():
        kind = getattr(x, "dtype", None)
        if kind is None or np.dtype(kind).kind not in "iu":
            found = type(x).__name__ if kind is None else f"an array of {kind}"
            raise MetricsError(f"{name} is {found}, but counts are integer arrays\n{hint}", code="u32")
    shapes = {x.shape for x in there.values()}
    if len(shapes) != 1 or () in shapes:
        said = ", ".join(f"{name} {x.shape}" for name, x in there.items()) or "no field at all"
        raise MetricsError(f"work needs fields of one shape [n..., ranks], but has {said}\n{hint}", code="payload")
    return shapes.pop()


def compose(xp: Any, work: Work, status: Array, found: Lookups) -> tuple[Array, Array]:
    """(milliseconds, status) of every rank: a mixed rank adds its decode time above the baseline.

    status: int8, refusals that are known before any lookup; they win.  Then prefill comes before decode.  The
    outgoing status is read off the finished milliseconds: XLA would otherwise compute the lookups twice, once
    for each output.
    """
    prefill, decode = has_prefill(work), has_decode(work)
    ms: Any = xp.zeros(status.shape)
    busy = xp.zeros(status.shape, bool)
    missing = found.decode_refusal
    if decode is not None:
        decode_ms = found.decode_ms
        if prefill is not None:
            decode_ms = xp.where(prefill, xp.maximum(decode_ms - found.baseline_ms, 0.0), decode_ms)
        ms, busy = xp.where(decode, decode_ms, 0.0), decode
    if prefill is not None:
        ms, busy = xp.where(prefill, found.prefill_ms, 0.0) + ms, busy | prefill
        missing = xp.where(prefill & xp.isnan(found.prefill_ms), found.prefill_refusal, missing)
    ms = xp.where(status == OK, ms, np.nan)
    answered = xp.where(busy, OK, IDLE)
    return ms, xp.where(xp.isnan(ms), xp.where(status == OK, missing, status), answered)


def slowest_rank(xp: Any, ms: Array, status: Array) -> tuple[Array, Array, Array]:
    """Per rank [n..., r] -> per query: (milliseconds, status, slowest rank int32); the first refusing rank decides."""
    if status.shape[-1] == 1:
        ms, status = ms[..., 0], status[..., 0]
        return ms, status, xp.where(status == OK, np.int32(0), np.int32(-1))
    refused = status > IDLE
    first = xp.expand_dims(xp.argmax(refused, axis=-1), -1)
    answered = xp.where((status == OK).any(-1), OK, IDLE)
    slowest = xp.argmax(ms, axis=-1).astype(np.int32)
    ms = xp.where(refused.any(-1), np.nan, ms.max(-1))
    status = xp.where(refused.any(-1), xp.take_along_axis(status, first, -1)[..., 0], answered)
    return ms, status, xp.where(status == OK, slowest, np.int32(-1))


def estimate_of(xp: Any, ms: Array, status: Array, parts: Parts | None = None) -> Estimate:
    """Per rank [n..., r] -> the estimate of a model without correction."""
    latency, status, rank = slowest_rank(xp, ms, status)
    return Estimate(latency, status, rank, parts)
