"""What an answer hangs on: one more KV token, one more request, and each measured row.

`sensitivity` differentiates in the question, `row_sensitivity` in the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import own_scope
from fpmjax.answer import Array
from fpmjax.errors import CoverageError, MetricsError, OptionError
from fpmjax.estimate import check_arguments, device_copy, estimate, only_what_is_there, pad_ranks, rows, spread
from fpmjax.given import depths
from fpmjax.lookup.axis import take
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.kernel import find_decode
from fpmjax.metrics import U32_MAX, show
from fpmjax.models.direct import Direct
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import common_shape, require_eligible, speculative
from fpmjax.status import Status
from fpmjax.work import COUNTS, Work

BLOCK = 1 << 16  # queries and ranks summed together; fixed, so that no other size shows in a sum
PHASES = ("decode", "prefill")


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Answers of `sensitivity`, float64 [n...] of NumPy; NaN where one of the lookups behind a number is refused.

    latency_ms:         F(B, K), as `estimate` answers.
    per_kv_token:       d F / d K, K being the KV tokens of all requests together.
    next_same_context:  F(B + 1, K + K / B) - F(B, K): one more request with as many KV tokens as the others have.
    next_same_total:    F(B + 1, K) - F(B, K): the same KV tokens split over one more request.
    """

    latency_ms: Any
    per_kv_token: Any
    next_same_context: Any
    next_same_total: Any


def sensitivity(
    model: Any, work: Work, *, draft_length: Any = None, rule: SpeculativeRule | None = None
) -> Sensitivity:
    """How each answer of pure decode on one rank changes with one more KV token and with one more request.

    draft_length, rule: as `estimate` takes them; everything is then of whole rounds.  Among several draft lengths 0 is
    ordinary decoding.

    Of a table, `per_kv_token` is the slope between the measured points on both sides of K, exact, crossed between
    batches as the answer itself is; at a measured K the segment above counts, at the end of a curve the one below,
    and a curve of one point has none (NaN).  Of any other model it is F(B, K + 1) - F(B, K).
    Where K / B is no integer, the next request gets the nearest one.

    Raises MetricsError (`not_pure_decode`) for other work, and what `estimate` raises for models, rules, draft lengths.
    """
    check_arguments(model, work, rule)
    batch, kv = decode_of(work)
    depth = None
    if draft_length is not None:
        require_eligible(model)
        depth = depths(draft_length)
        shape = common_shape(batch.shape, depth.shape)
        batch, kv, depth = (np.broadcast_to(x, shape) for x in (batch, kv, depth))
        if not depth.all():
            out, plain = np.empty((4, *shape)), depth == 0
            out[:, plain] = changes(model, batch[plain], kv[plain], None, None)
            if not plain.all():
                out[:, ~plain] = changes(model, batch[~plain], kv[~plain], depth[~plain], rule)
            return Sensitivity(*out)
    return Sensitivity(*(x[()] for x in changes(model, batch, kv, depth, rule)))


def changes(
    model: Any, batch: np.ndarray, kv: np.ndarray, depth: np.ndarray | None, rule: SpeculativeRule | None
) -> tuple[np.ndarray, ...]:
    """The four numbers of `Sensitivity`, of one shape; depth: above 0, or None for ordinary decoding."""
    share = (2 * kv + batch) // np.maximum(2 * batch, 1)
    requests = np.stack([batch, batch + 1, batch + 1, batch])
    tokens = np.stack([kv, kv + share, kv, kv + 1])
    if isinstance(model, Direct):
        requests, tokens = requests[:3], tokens[:3]
    askable = (requests > 0) & (requests <= U32_MAX) & (tokens <= U32_MAX)
    asked = Work.decode(np.where(askable, requests, 0), np.where(askable, tokens, 0))
    found = estimate(model, asked, draft_length=depth, rule=rule, check=False).latency_ms
    ms, *others = np.where(askable | (requests == 0), found, np.nan)
    context, total = others[0] - ms, others[1] - ms
    if isinstance(model, Direct):
        width = model.verify_width if depth is None else depth + 1
        slope = slopes(model, batch * width, kv)
        if depth is not None:
            slope = slope * np.asarray((rule or PUBLISHED).factor(depth))
        slope = np.where(np.isnan(ms), np.nan, slope)
    else:
        slope = others[2] - ms
    return ms, slope, context, total


def decode_of(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Requests and KV tokens, int64 [n...]; MetricsError where there is anything else."""
    if work.ranks != 1 or any(np.any(x) for x in (getattr(work, name) for name in COUNTS[:3]) if x is not None):
        raise MetricsError(
            "sensitivity is for pure decode on one rank\nhint: Work.decode(requests, kv_tokens)", code="not_pure_decode"
        )
    zero = np.zeros((*work.shape, 1), np.int64)
    batch, kv = (zero if x is None else np.asarray(x).astype(np.int64) for x in (work.decode_requests, work.decode_kv))
    return batch[..., 0], kv[..., 0]


def slopes(model: Direct, batch: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """Milliseconds per KV token at batch decode rows and kv tokens, int64 of one shape; NaN where refused."""
    beyond = model.decode.row.shape[-1] - 1  # refused, as every larger batch is
    flat_batch, flat_kv = np.minimum(batch, beyond).astype(np.uint32).ravel(), kv.astype(np.uint32).ravel()
    out = np.empty(flat_kv.size)
    with own_scope():
        table = device_copy(model).decode
        for where, short in blocks(out.size):
            part = (np.pad(x[where], (0, short)) for x in (flat_batch, flat_kv))
            out[where] = np.asarray(slope_at(table, *part))[: BLOCK - short]
    return out.reshape(kv.shape)


@jax.jit
def slope_at(table: DecodeTable, batch: Array, kv: Array) -> Array:
    """d ms / d KV of decode lookups (uint32 [n]), from the knots that answer them; NaN where refused."""
    lo, hi = find_decode(table, batch, kv)
    found = lo >= 0
    lo, hi = jnp.where(found, lo, 0), jnp.where(found, hi, 0)
    at = take(table.knots.at, lo)
    gap = jnp.maximum(take(table.knots.at, hi) - at, np.uint32(1)).astype(np.float64)
    across = (batch - at).astype(np.float64) / gap
    u, v = slope_after(table.knots, lo), slope_after(table.knots, hi)
    return jnp.where(found, u + jnp.where(lo != hi, (v - u) * across, 0.0), jnp.nan)


def slope_after(knots: Knots, p: Array) -> Array:
    """Slope of a curve between knots p and p + 1; before p where p is its last point, NaN where it is its only one."""
    last = take(knots.row, p + 1) == take(knots.row, p)  # the closing knot repeats the last point
    alone = last & (take(knots.head, p) == p)
    p = jnp.where(last & ~alone, p - 1, p)
    rise = take(knots.ms, p + 1) - take(knots.ms, p)
    slope = rise / (take(knots.x, p + 1) - take(knots.x, p)).astype(rise.dtype)
    return jnp.where(alone, jnp.nan, slope)


def row_sensitivity(
    model: Direct,
    work: Work,
    weights: Any = None,
    *,
    draft_length: Any = None,
    rule: SpeculativeRule | None = None,
) -> np.ndarray:
    """d (mean ms) / d (ms measured in each row): which measurements carry a workload, and how much.

    weights: how often each query occurs, numbers not below 0 that broadcast against `work.shape`; None: all alike.
    draft_length, rule: as `estimate` takes them; among several draft lengths 0 is ordinary decoding.

    Returns float64 [rows of the Parquet file, up to the last one that the model reads], as `with_latencies` takes them;
    its sum is 1 for pure decode or prefill without a draft length.  The mean is over the queries that are answered.
    Where ranks are equally slow, each carries its share.  Sums are made in fixed blocks, in order.

    Raises OptionError (`model`, `weights`) for another model and bad weights, CoverageError where no query with any
    weight is answered, and what `estimate` raises for work, rules and draft lengths.
    """
    check_arguments(model, work, rule)
    if not isinstance(model, Direct):
        raise OptionError(
            f"row_sensitivity asks which measured rows count, and a {type(model).__name__} holds none\n"
            "hint: fpmjax.direct(cell)",
            code="model",
        )
    depth = None
    if draft_length is not None:
        require_eligible(model)
        depth = depths(draft_length)
    elif rule is not None:
        raise OptionError("a rule scales speculative rounds\nhint: give draft_length too", code="rule")
    shape = work.shape if depth is None else common_shape(work.shape, depth.shape)
    shape = shape or (1,)
    weight = as_weights(weights, shape)
    if weight.ndim:  # one weight for all stays a scalar, which costs no input
        weight = np.broadcast_to(weight, shape)
    if depth is not None and depth.ndim:
        depth = np.broadcast_to(depth, shape)
    parts: list[Any] = [(depth, weight, rule)]
    if depth is not None and not depth.all():  # ordinary passes and rounds apart, each with no weight for the others
        plain = depth == 0
        parts = [(None, np.where(plain, weight, 0.0), None)]
        if not plain.all():
            parts.append((np.maximum(depth, 1), np.where(plain, 0.0, weight), rule))
    pulls, sum_weight = jax.tree.map(lambda *x: sum(x), *(pulls_of(model, work, shape, *part) for part in parts))
    if not sum_weight > 0:
        raise CoverageError("no query that counts is answered, so nothing carries their mean\nhint: see `estimate`")
    knots = [getattr(model, phase).knots for phase in PHASES]
    size = 1 + max(int(np.max(k.row)) for k in knots)
    by_row = np.zeros(size)
    for k, pulled in zip(knots, pulls, strict=True):
        by_row += np.bincount(np.asarray(k.row), pulled, minlength=size)
    return by_row / float(sum_weight)


def pulls_of(
    model: Direct,
    work: Work,
    shape: tuple[int, ...],
    depth: np.ndarray | None,
    weight: np.ndarray,
    rule: SpeculativeRule | None,
) -> Any:
    """`pull` of queries [shape], summed over fixed blocks."""
    ranks = 1 << (work.ranks - 1).bit_length()
    asked = spread(only_what_is_there(work, needs_lists=depth is not None, model=model), shape)
    arrays = (asked, depth, weight)
    total: Any = None
    with own_scope():
        on_device = device_copy(model)
        for where, size in blocks_of(math.prod(shape), max(1, BLOCK // ranks)):
            part = jax.tree.map(lambda x: rows(x, where, size, len(shape)), arrays)  # noqa: B023
            part = (pad_ranks(part[0], ranks), *part[1:])
            found = jax.tree.map(np.asarray, pull(on_device, *part, np.int64(where.stop - where.start), rule))
            total = found if total is None else jax.tree.map(np.add, total, found)
    if total is None:  # no query at all
        total = [np.zeros(np.shape(getattr(model, phase).knots.ms)) for phase in PHASES], np.float64(0.0)
    return total


@partial(jax.jit, static_argnames="rule")
def pull(model: Direct, work: Work, depth: Any, weight: Array, count: Array, rule: SpeculativeRule | None) -> Any:
    """(d (weighted sum of ms) / d (ms of every knot) of decode and prefill, sum of the weights that are answered).

    count: int64 [], queries that are there; the others fill the block.
    """
    weight = jnp.where(jnp.arange(work.shape[0]) < count, weight, 0.0)

    def ask(model: Direct, work: Work) -> Any:
        return model(work) if depth is None else speculative(model, work, depth, rule)

    def weighted(ms: list[Array]) -> tuple[Array, Array]:
        changed = {}
        for phase, values in zip(PHASES, ms, strict=True):
            table = getattr(model, phase)
            changed[phase] = replace(table, knots=replace(table.knots, ms=values))
        result = ask(replace(model, **changed), work)
        answered = result.status <= Status.IDLE
        counted = jnp.where(answered, weight, 0.0)
        return (jnp.where(answered, result.latency_ms, 0.0) * counted).sum(), counted.sum()

    if work.ranks > 1:  # the slowest of no numbers has no derivative, so refused queries become idle, and count nothing
        answered = ask(model, work).status <= Status.IDLE
        weight = jnp.where(answered, weight, 0.0)
        counts = {name: getattr(work, name) for name in COUNTS}
        idle = {name: jnp.where(answered[:, None], x, 0) for name, x in counts.items() if x is not None}
        work = replace(work, **idle, lists=None)
    return jax.grad(weighted, has_aux=True)([getattr(model, phase).knots.ms for phase in PHASES])


def blocks(count: int) -> Iterator[tuple[slice, int]]:
    """(queries, how many are missing) of each block."""
    for where, size in blocks_of(count, BLOCK):
        yield where, size - (where.stop - where.start)


def blocks_of(count: int, size: int) -> Iterator[tuple[slice, int]]:
    """(queries, size) of each block."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count)), size


def as_weights(weights: Any, shape: tuple[int, ...]) -> np.ndarray:
    """float64 that broadcasts to the shape, the largest below 1: only ratios count, and sums of these stay finite.

    Raises OptionError (`weights`)."""
    if weights is None:
        return np.ones(())
    hint = f"give numbers from 0 that broadcast to the queries, of shape {shape}"
    try:
        found = np.asarray(weights)
        if found.dtype.kind not in "iuf" or np.ma.is_masked(weights):
            raise ValueError
        np.broadcast_to(found, shape)
    except ValueError:
        raise OptionError(f"weights is {show(weights)}\nhint: {hint}", code="weights") from None
    with np.errstate(over="ignore"):  # numbers wider than float64
        found = found.astype(np.float64)
    if not (np.isfinite(found) & (found >= 0)).all():
        wrong = found[~(np.isfinite(found) & (found >= 0))][0]
        raise OptionError(f"weights hold {wrong}, which is no weight\nhint: {hint}", code="weights")
    _, exponent = np.frexp(found.max(initial=0.0))
    return np.ldexp(found, -exponent)  # by a power of two, which is exact
