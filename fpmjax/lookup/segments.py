"""Where a line through the decode table first meets, or first misses, a limit; exact, without reading every integer.

A line asks batch = batch + batch_step x and KV = kv + kv_step x for integers x.  Between two changes of the KV cell and
of the batch's class the same four knots answer, and the answer is bilinear in batch and KV: over a whole segment it
lies between its smallest and its largest corner.  So a walk decides segments by their corners, halves those that it
cannot decide, and reads a single integer with the lookup itself.  Nothing has to be monotone.

Rounding: four knots of at most m ms give an answer within a few units of the last place of m, so corners are trusted
up to `SLACK` of m.  What that leaves open is read one by one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.lookup.axis import locate, take
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.kernel import read

SLACK = 2.0**-44  # of the largest knot or of a factor: hundreds of roundings, where a dozen occur
WHOLE = 2.0**40  # a stride beyond every segment


@pytree()
class Line:
    """batch + batch_step x decode rows with kv + kv_step x KV tokens, int64 [n] each; steps are not negative."""

    batch: Array
    batch_step: Array
    kv: Array
    kv_step: Array

    def at(self, x: Array) -> tuple[Array, Array]:
        """(batch, KV), uint32 [n]"""
        batch, kv = self.batch + self.batch_step * x, self.kv + self.kv_step * x
        return batch.astype(np.uint32), kv.astype(np.uint32)


def runs(table: DecodeTable) -> tuple[np.ndarray, np.ndarray]:
    """First and last batch of the run of equal behaviour around each tabulated batch (host), int64 [batches]."""
    row = np.asarray(table.row)
    cuts = np.flatnonzero(np.diff(row)) + 1
    sizes = np.diff(np.concatenate([[0], cuts, [len(row)]]))
    first = np.repeat(np.append(0, cuts), sizes)
    return first, first + np.repeat(sizes, sizes) - 1


@jax.jit
def search(
    table: DecodeTable,
    edges: Array,
    line: Line,
    limit_ms: Array,
    factor: Array,
    start: Array,
    stop: Array,
    patience: Array,
    up: Array,
    within: Array,
) -> tuple[Array, Array, Array]:
    """The first x from `start` on to `stop` (both included, int64 [n]) that is within the limit, or that is not.

    edges: int64 [batches], where runs end in this direction (`runs`).
    limit_ms, factor: float64 [n]; x is within where it is covered and factor * lookup <= limit_ms.
    patience: int64 [], how many questions may be left open; the others need not wait for the longest walk.
    up, within: bool [], from small to large; which of both is looked for.

    Returns x, one beyond `stop` where there is none; the lookup there, float64 [n], NaN where refused; and bool [n],
    whether the question was left open, with x as the next start.
    The line has to stay inside 32 bits, and inside the batches that are tabulated, between start and stop.
    """
    line, start, stop = jax.tree.map(lambda x: x.astype(np.float64), (line, start, stop))
    sign = jnp.where(up, 1.0, -1.0)

    def ahead(x: Array, y: Array) -> Array:
        """Whichever comes first."""
        return sign * jnp.minimum(sign * x, sign * y)

    def reach(edge: Array, base: Array, step: Array) -> Array:
        """The last x at which base + step x has not passed the edge; exact, as both stay far below 2**52."""
        x = (edge - base) / jnp.maximum(step, 1.0)
        return jnp.where(step > 0.0, sign * jnp.floor(sign * x), sign * WHOLE)

    def segment(x: Array) -> tuple[Array, Array, Array]:
        """(knot, other knot, last x that they answer) from x on."""
        batch, kv = line.at(x)
        known = jnp.minimum(batch, np.uint32(table.row.shape[-1] - 1)).astype(np.int32)  # closed questions lie beyond
        cell = locate(table.kv, kv)
        at = take(table.row, known) + cell
        last = take(table.kv.last, jnp.where(up, cell, jnp.maximum(cell - 1, 0))).astype(np.float64)
        kv_edge = jnp.where(up, last, jnp.where(cell > 0, last + 1.0, 0.0))
        end = ahead(
            reach(take(edges, known).astype(np.float64), line.batch, line.batch_step),
            reach(kv_edge, line.kv, line.kv_step),
        )
        return take(table.lo, at), take(table.hi, at), ahead(end, stop)

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        x, ms, stride, again, open_ = state
        lo, hi, end = segment(jnp.where(open_, x, start))
        y = ahead(end, x + sign * (stride - 1.0))
        (b0, k0), (b1, k1) = line.at(x), line.at(y)
        here, there, *others = (read(table.knots, lo, hi, k, b)[0] for b, k in ((b0, k0), (b1, k1), (b0, k1), (b1, k0)))
        low, high = jnp.minimum(here, there), jnp.maximum(here, there)
        for corner in others:
            low, high = jnp.minimum(low, corner), jnp.maximum(high, corner)
        found = lo >= 0
        p, q = jnp.where(found, lo, 0), jnp.where(found, hi, 0)
        knots = [take(table.knots.ms, i) for i in (p, p + 1, q, q + 1)]
        slack = SLACK * jnp.maximum(jnp.maximum(knots[0], knots[1]), jnp.maximum(knots[2], knots[3]))
        beyond = ~found | (factor * (low - slack) * (1.0 - SLACK) > limit_ms)
        passed = jnp.where(within, beyond, found & (factor * (high + slack) * (1.0 + SLACK) <= limit_ms))
        hit = (found & (factor * here <= limit_ms)) == within
        skip = passed | (y == x)
        length = jnp.abs(y - x) + 1.0
        # An open segment is cut where a straight line would cross the limit; one that stays open is halved.
        share = (limit_ms / factor - here) / (there - here)
        half = jnp.floor(length * 0.5)
        guess = jnp.floor(jnp.clip(share, 0.0, 1.0) * (length - 1.0)) + 1.0
        guess = jnp.where(again | ~(share > 0.0) | (guess >= length), half, guess)
        next_stride = jnp.where(skip, jnp.where(y == end, WHOLE, 2.0 * length), guess)
        x, ms = jnp.where(open_ & skip & ~hit, y + sign, x), jnp.where(open_, here, ms)
        return x, ms, next_stride, ~skip, open_ & ~hit & (sign * x <= sign * stop)

    nothing = jnp.full(start.shape, jnp.nan)
    open_ = sign * start <= sign * stop
    first = (start, nothing, jnp.full(start.shape, WHOLE), jnp.zeros(start.shape, bool), open_)
    x, ms, *_, open_ = jax.lax.while_loop(lambda state: state[-1].sum() > patience, step, first)
    return x.astype(np.int64), jnp.where(sign * x <= sign * stop, ms, jnp.nan), open_
