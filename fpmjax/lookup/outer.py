"""The direct decode rule over thin axes: batches on one side, KV totals on the other, the same bits as query by query.

Batches that behave alike share a class (`lookup.decode`), so everything but the crossing weight depends on (class,
KV total) alone: it is found once for each class, and a batch then reads one row of it from end to end, with a
product and a division a cell instead of a dozen gathers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.lookup.axis import locate, take
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.kernel import cross, divisor, read_curve

MULTIPLE = 8  # classes are padded to it


class Classes(NamedTuple):
    """Batches that behave alike (host).

    offset: int32 [classes], first cell of each class in the table; repeats at the end.
    of:     int32 [largest batch + 2], class of each batch; the last one refuses every larger batch.
    """

    offset: np.ndarray
    of: np.ndarray

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """Class of each batch, int32."""
        return self.of[np.minimum(batch, len(self.of) - 1)]


def batch_classes(table: DecodeTable) -> Classes:
    offset, of = np.unique(np.asarray(table.row), return_inverse=True)
    offset = np.pad(offset, (0, -len(offset) % MULTIPLE), mode="edge")
    return Classes(offset.astype(np.int32), of.reshape(-1).astype(np.int32))


@pytree("checked")
class ClassRows:
    """What every class answers with at every KV total of a thin axis, all [classes, n].

    lower: float64, milliseconds of the lower curve, NaN where refused.  rise: float64, those of the upper curve above
    them.  at, gap: float64, batch of the lower curve and the distance to the upper one.  two: bool, two curves answer.
    """

    lower: Array
    rise: Array
    at: Array
    gap: Array
    two: Array
    checked: bool


def read_classes(table: DecodeTable, offset: Array, kv: Array, count: Array) -> ClassRows:
    """Every class at KV totals uint32 [n], of which those from `count` on are padding, and refused."""
    knots = table.knots
    cell = offset[:, None] + jax.lax.optimization_barrier(locate(table.kv, kv))[None]
    lo, hi = take(table.lo, cell), take(table.hi, cell)
    found = lo >= 0
    p, p_hi = jnp.where(found, lo, 0), jnp.where(found, hi, 0)
    q = jnp.broadcast_to(kv[None], p.shape)
    (u, _), (v, _) = read_curve(knots, p, q), read_curve(knots, p_hi, q)
    at = take(knots.at, p)
    gap = divisor(knots, jnp.maximum(take(knots.at, p_hi) - at, jnp.uint32(1)).astype(u.dtype), u)
    found = found & (jnp.arange(kv.shape[0], dtype=jnp.int32) < count)[None]
    return ClassRows(jnp.where(found, u, jnp.nan), v - u, at.astype(u.dtype), gap, p != p_hi, knots.checked)


def read_rows(rows: ClassRows, of: Array, batch: Array) -> Array:
    """Milliseconds of batches uint32 [r], whose classes are int32 [r]: float64 [r, n], NaN where refused.

    `rows` has to lie in memory (an argument of the jitted function), or it would be found again for every batch.
    """
    lower, rise, at, gap, two = (take(x, of) for x in (rows.lower, rows.rise, rows.at, rows.gap, rows.two))
    across = (batch.astype(lower.dtype)[:, None] - at) / gap
    ms = cross(lower, lower, two, rise * across)
    return jnp.where((ms > 0) & (ms < jnp.inf), ms, jnp.nan) if rows.checked else ms


find_rows = jax.jit(read_classes)
_read_rows = jax.jit(read_rows)


def outer_decode(model: Any, batch: np.ndarray, kv: np.ndarray) -> Array:
    """Decode of each of uint32 [r] batches over each of uint32 [n] KV totals by a `Direct`: float64 [r, n] on the
    device, NaN where refused; batches are 1 or more rows as the engine schedules them.  Under `fpmjax.x64()`."""
    classes = model.walk_classes
    batch, kv = (np.asarray(x, np.uint32) for x in (batch, kv))
    rows = find_rows(model.decode, classes.offset, kv, np.int32(len(kv)))
    return _read_rows(rows, classes(batch), batch)
