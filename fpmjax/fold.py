"""What the device does with a block of lines (`fpmjax.lines`): answer every cell, and fold each line.

Every function leaves what `leave` says, from any of three ways to answer: cell by cell, along thin axes, along rays.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fpmjax.grid import DECODE, DRAFT, work_of
from fpmjax.lookup.kernel import look_up_decode
from fpmjax.lookup.outer import read_rows
from fpmjax.lookup.rays import read_pieces
from fpmjax.metrics import U32_MAX
from fpmjax.speculative import for_draft, speculate

KV_AXIS, PER_REQUEST, FACTOR = "decode_kv", "kv_per_request", "factor"
LANES = (1, 32)  # cells of a line that are folded side by side: where lines run down a block, and across it
UNROLL = 4  # steps of that loop at once: what is left so far comes from memory and goes back, each time
STEPS = 8  # at least
ANSWERED = 2**16  # of a count that holds two: answered cells above this, those within the limit below
MANTISSA = 7  # bits of it that a bin of a histogram keeps
SHIFT = 52 - MANTISSA
FLOOR = (1023 - 30) << MANTISSA  # first bin: everything below 2**-30 ms


@partial(jax.jit, static_argnames=("length", "plain", "published", "ordinary"), donate_argnames="state")
def fold_cells(
    model: Any,
    state: Any,
    limit: Any,
    bins: Any,
    *,
    columns: dict[str, Any],
    stretch: dict[str, Any],
    left: Any,
    length: int,
    plain: bool,
    published: bool,
    ordinary: bool,
) -> Any:
    """Cells [length, lines] of a grid.

    columns: values [1, lines] of the axes across the lines; stretch: those [length, lines] of the one along them.
    left: int32 [1, lines], how many cells are real on each line.
    """
    shape = (length, left.shape[1])
    columns = columns | stretch
    flat = answer_plainly(model, columns, shape) if plain else answer(model, columns, shape, published, ordinary)
    ms = flat.reshape(shape)
    real = lax.broadcasted_iota(jnp.int32, ms.shape, 0) < left
    return leave(jnp.where(real, ms, jnp.nan), 0, state, limit, bins)


def answer(model: Any, columns: dict[str, Any], shape: tuple[int, int], published: bool, ordinary: bool) -> Any:
    """Any model: milliseconds, flat, of columns of a grid that broadcast to the shape; NaN where refused.

    ordinary: whether a draft length may be 0, which is asked of the model as it is."""
    flat = {name: spread(x, shape) for name, x in columns.items()}
    factor = flat.pop(FACTOR, None)
    work, depth = work_of(flat)
    if depth is None:
        return model(work).latency_ms
    ms = speculate(jnp, for_draft(model), work, depth, factor, published).latency_ms
    return jnp.where(depth == 0, model(work).latency_ms, ms) if ordinary else ms


def answer_plainly(model: Any, columns: dict[str, Any], shape: tuple[int, int]) -> Any:
    """The direct rule where `is_plain` found that nothing else can happen."""
    requests, factor = columns[DECODE], columns.get(FACTOR)
    kv = columns[PER_REQUEST] * requests if PER_REQUEST in columns else columns[KV_AXIS]
    width = columns[DRAFT].astype(jnp.int64) + 1 if DRAFT in columns else model.verify_width
    batch = jnp.minimum(requests.astype(jnp.int64) * width, U32_MAX).astype(jnp.uint32)
    ms, _ = look_up_decode(model.decode, spread(batch, shape), spread(kv, shape))
    return ms if factor is None else spread(factor, shape) * ms


def spread(x: Any, shape: tuple[int, int]) -> Any:
    """Flat: a trailing axis costs XLA much of its speed."""
    return jnp.broadcast_to(x, shape).reshape(-1)


@partial(jax.jit, donate_argnames="state")
def fold_rows(rows: Any, state: Any, limit: Any, bins: Any, *, of: Any, batch: Any, factor: Any) -> Any:
    """Lines of `batch` [lines] over the KV totals that `rows` was found for."""
    ms = read_rows(rows, of, batch)
    return leave(ms if factor is None else factor[:, None] * ms, 1, state, limit, bins)


@partial(jax.jit, static_argnames="length", donate_argnames="state")
def fold_rays(knots: Any, state: Any, limit: Any, bins: Any, *, factor: Any, length: int, **pieces: Any) -> Any:
    """Pieces of rays, as `read_pieces` takes them."""
    ms = read_pieces(knots, length=length, **pieces)
    return leave(ms if factor is None else factor[None] * ms, 0, state, limit, bins)


def leave(ms: Any, axis: int, state: Any, limit: Any, bins: Any) -> Any:
    """What every line of a block leaves, of which `axis` runs along the lines.

    Without `bins` (minimum, its first offset, maximum, sum, how many are answered, how many lie within the limit), all
    [lines].  With them (row [lines], first bin, bins a row) the histograms `state`, the block counted in.

    The loop folds lanes side by side, and makes XLA compute every latency once: fused reductions would do so each.
    """
    if bins is not None:
        row, first, width = bins
        code = jnp.maximum(lax.bitcast_convert_type(ms, jnp.int64) >> SHIFT, FLOOR) - first
        at = jnp.where(ms == ms, jnp.expand_dims(row, axis) * width + code, state.shape[0])
        return state.at[at.reshape(-1).astype(jnp.int32)].add(1, mode="drop")
    n = ms.shape[axis]
    lanes = min(LANES[axis], n // STEPS)
    one, other = jnp.int32(ANSWERED + 1), jnp.int32(ANSWERED)

    def step(i: Any, left: Any) -> Any:
        x = lax.dynamic_slice_in_dim(ms, i * lanes, lanes, axis)
        low, at, high, total, counts = left
        found, lower = x == x, x < low
        return (
            jnp.where(lower, x, low),
            jnp.where(lower, i.astype(jnp.int32), at),
            jnp.where(x > high, x, high),
            total + jnp.where(found, x, 0.0),
            counts + jnp.where(found, jnp.where(x <= limit, one, other), jnp.int32(0)),
        )

    none, zero = (jnp.zeros_like(lax.slice_in_dim(ms, 0, lanes, axis=axis), t) for t in (ms.dtype, jnp.int32))
    left = lax.fori_loop(0, n // lanes, step, (none + jnp.inf, zero, none - jnp.inf, none, zero), unroll=UNROLL)
    low, at, high, total, counts = left if axis == 0 else (x.T for x in left)
    at = at * lanes + lax.broadcasted_iota(jnp.int32, at.shape, 0)
    while lanes > 1:
        lanes //= 2
        (a, b), (i, j) = ((x[:lanes], x[lanes:]) for x in (low, at))
        second = (b < a) | ((b == a) & (j < i))
        low, at = jnp.where(second, b, a), jnp.where(second, j, i)
        high = jnp.maximum(high[:lanes], high[lanes:])
        total, counts = (x[:lanes] + x[lanes:] for x in (total, counts))
    return low[0], at[0], high[0], total[0], counts[0] // ANSWERED, counts[0] % ANSWERED
