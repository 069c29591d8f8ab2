"""From a 32-bit coordinate to its cell, in a fixed number of steps and without a search loop.

An axis cuts the integers 0 .. 2**32 - 1 into cells.  The exponent and the leading mantissa bits of
`float32(q) + 1` name a bucket; a table gives the first cell that can hold a value of that bucket, and a few exact
integer comparisons finish.  The float only chooses where to start, so its rounding never decides an answer.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.metrics import U32_MAX

MANTISSA_BITS = (6, 9, 12)  # the few table sizes in use, so that different tables share compiled code
STEPS = 2  # comparisons that are still cheaper than a larger bucket table (benchmarks/lookup.py)


@pytree("steps")
class Axis:
    """Cells of one coordinate.

    last:  uint32 [cells], largest integer of each cell; the final one is 2**32 - 1.
    start: int32 [32 * 2**m + 1], first cell that can hold a value of each bucket.
    steps: most cell ends inside one bucket.
    """

    last: Array
    start: Array
    steps: int


def compile_axis(begins: np.ndarray) -> Axis:
    """Cells that start at 0 and at each of `begins`; the smallest bucket table that needs few comparisons."""
    begins = np.unique(np.asarray(begins, np.int64))
    last = np.append(begins[(begins > 0) & (begins <= U32_MAX)] - 1, U32_MAX).astype(np.uint32)
    for bits in MANTISSA_BITS:
        count = np.bincount(bucket(last[:-1], bits), minlength=(32 << bits) + 1)
        if count.max() <= STEPS:
            break
    steps = max(STEPS, 1 << int(count.max() - 1).bit_length())
    return Axis(last, np.append(0, np.cumsum(count)[:-1]).astype(np.int32), steps)


def cell_begins(axis: Axis) -> np.ndarray:
    """First integer of each cell, int64 [cells]."""
    return np.append(0, np.asarray(axis.last)[:-1].astype(np.int64) + 1)


def mantissa_bits(axis: Axis) -> int:
    return ((axis.start.shape[-1] - 1) // 32).bit_length() - 1


def bucket(q, bits: int):
    """Monotone bucket of a uint32 array: exponent and `bits` mantissa bits of float32(q) + 1, in 0 .. 32 << bits."""
    f = q.astype(np.float32) + np.float32(1)
    pattern = f.view(np.int32) if isinstance(f, np.ndarray) else lax.bitcast_convert_type(f, jnp.int32)
    return (pattern >> (23 - bits)) - (127 << bits)


def locate(axis: Axis, q: Array) -> Array:
    """Cell of each uint32 coordinate, int32 of the same shape."""
    cell = take(axis.start, bucket(q, mantissa_bits(axis)))
    for _ in range(axis.steps):
        cell = cell + (q > take(axis.last, cell)).astype(jnp.int32)
    return cell


def take(x: Array, i: Array) -> Array:
    """x[i] without bounds handling: every index here is made by the host's tables and lies inside."""
    try:
        return jnp.asarray(x).at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)
    except TypeError:  # jax 0.4.x has no such argument
        return jnp.asarray(x).at[i].get(mode="promise_in_bounds")
