"""The direct decode rule along rays: `requests` whose KV total is requests * kv, over an ascending axis of kv.

Along a ray the KV total only rises, so the four knots that answer change at a few turns, which depend on the class of
the batch alone.  The host finds where on the axis they lie, and cuts rays there into pieces; the device reads a piece
with the coefficients of its knots at hand, and the bits of the query-by-query lookup.

A cell takes a dozen operations, two of them divisions, writes 8 bytes, and reads none of the table: one gather from the
axis, and some 80 bytes of coefficients of its piece, which lie in the second cache because neighbouring pieces are read
side by side (so that folding them needs no shuffling).  Neither the divider nor that cache is busy half of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax.answer import Array
from fpmjax.lookup.axis import cell_begins, take
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.kernel import cross
from fpmjax.metrics import U32_MAX


class Turns(NamedTuple):
    """Where the knots that answer change as the KV total rises, class by class (host).

    first: int64 [classes + 1], first turn of each class, at a KV total of 0.
    begin: int64 [turns], smallest KV total behind each turn.  lo, hi: int32 [turns], the knots there, lo -1 if refused.
    """

    first: np.ndarray
    begin: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


def turns_of(table: DecodeTable) -> Turns:
    begins = cell_begins(table.kv)
    begins = begins[begins <= U32_MAX]  # without the padding, as in the rest
    size = int(np.max(table.row)) + len(begins)
    lo, hi = (np.asarray(x)[:size].reshape(-1, len(begins)) for x in (table.lo, table.hi))
    new = np.ones(lo.shape, bool)
    new[:, 1:] = (lo[:, 1:] != lo[:, :-1]) | (hi[:, 1:] != hi[:, :-1])
    return Turns(np.append(0, np.cumsum(new.sum(1))), begins[np.nonzero(new)[1]], lo[new], hi[new])


class Pieces(NamedTuple):
    """Stretches of rays, in order, on which the same knots answer (host): int64 [n] each.

    ray: number of the ray; turn: the turn before; start, left: first position on the axis, and how many.
    """

    ray: np.ndarray
    turn: np.ndarray
    start: np.ndarray
    left: np.ndarray


def cut_rays(turns: Turns, of: np.ndarray, requests: np.ndarray, kv: np.ndarray, length: int) -> Pieces:
    """Rays of `requests`, whose batches are of the classes `of` [n], over an ascending axis of KV totals per request:
    pieces of at most `length` positions.  Refused stretches are left out."""
    requests, kv = requests.astype(np.int64), kv.astype(np.int64)
    count = np.diff(turns.first)[of]
    ray, turn = np.repeat(np.arange(len(of)), count), ramp(turns.first[of], count)
    start = np.searchsorted(kv, -(-turns.begin[turn] // requests[ray]))
    stop = np.append(start[1:], 0)
    stop[np.cumsum(count) - 1] = len(kv)
    some = (stop > start) & (turns.lo[turn] >= 0)
    ray, turn, start, stop = (x[some] for x in (ray, turn, start, stop))
    count = -(-(stop - start) // length)
    start = ramp(start, count, length)
    ray, turn, stop = (np.repeat(x, count) for x in (ray, turn, stop))
    return Pieces(ray, turn, start, np.minimum(stop - start, length))


def ramp(first: np.ndarray, count: np.ndarray, step: int = 1) -> np.ndarray:
    """first, first + step, ..., `count` of them, for each; int64."""
    done = np.cumsum(count) - count
    return np.repeat(first - step * done, count) + step * np.arange(count.sum())


class Side(NamedTuple):
    """One curve between two knots: where it begins, milliseconds there, their rise, and over how many tokens."""

    x: Array
    ms: Array
    rise: Array
    gap: Array


def side(knots: Knots, p: Array) -> Side:
    x, ms = take(knots.x, p), take(knots.ms, p)
    return Side(x, ms, take(knots.ms, p + 1) - ms, (take(knots.x, p + 1) - x).astype(ms.dtype))


def read_pieces(
    knots: Knots, lo: Array, hi: Array, batch: Array, requests: Array, kv: Array, start: Array, left: Array, length: int
) -> Array:
    """Milliseconds float64 [length, n] along n pieces, NaN behind their ends; all [n] but the axis `kv`, on which
    `length` positions have to follow every start."""
    lo, hi, batch, requests, start, left = (x[None] for x in (lo, hi, batch, requests, start, left))
    at, two = take(knots.at, lo), lo != hi
    gap = jnp.maximum(take(knots.at, hi) - at, jnp.uint32(1)).astype(knots.ms.dtype)
    across = (batch - at).astype(gap.dtype) / gap
    # As arrays, or XLA would gather them again for every cell.
    held = jax.lax.optimization_barrier((side(knots, lo), side(knots, hi), across, two))
    lower, upper, across, two = held
    offset = jax.lax.broadcasted_iota(jnp.int32, (length, left.shape[1]), 0)
    real = offset < left
    q = requests * take(kv, start + offset)

    def read(side: Side) -> Array:
        # The select also keeps the divisor from being one of a whole column, for which XLA would take a reciprocal.
        return side.ms + side.rise * (q - side.x).astype(side.ms.dtype) / jnp.where(real, side.gap, jnp.nan)

    u, v = read(lower), read(upper)
    ms = cross(u, v, two, (v - u) * across)
    return jnp.where((ms > 0) & (ms < jnp.inf), ms, jnp.nan) if knots.checked else ms
