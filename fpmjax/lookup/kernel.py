"""The device side of the lookup: find two knots, read two curves, cross them.  Pure, never raises, O(1) a query.

Bits: answers equal the peer's on the CPU.  Along a curve the product is formed before the quotient, so no FMA can
arise; across curves the peer rounds the weight first, and a select stands between product and sum because XLA
would contract them.  Counts are subtracted as integers and cast afterwards: int32 / int32 is float32 in jax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fpmjax.answer import Array
from fpmjax.lookup.axis import locate, take
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.prefill import PrefillTable


class Support(NamedTuple):
    """Where an answer comes from: knot `lo` (and lo + 1) crossed with knot `hi` (and hi + 1); -1 = refused.

    across: weight of the upper curve; along_lo, along_hi: weight of the second knot on each curve.
    """

    lo: Array
    hi: Array
    across: Array
    along_lo: Array
    along_hi: Array


def find_decode(table: DecodeTable, batch: Array, kv: Array) -> tuple[Array, Array]:
    """Knots (lo, hi) of uint32 queries, int32, -1 where refused."""
    known = jnp.minimum(batch, jnp.uint32(table.row.shape[-1] - 1)).astype(jnp.int32)
    cell = take(table.row, known) + locate(table.kv, kv)
    return take(table.lo, cell), take(table.hi, cell)


def find_prefill(table: PrefillTable, batch, tokens, kv) -> tuple[Array, Array]:
    """Knots (lo, hi) of uint32 queries, int32, -1 where refused."""
    known = jnp.minimum(batch, jnp.uint32(table.site.shape[-1] - 1)).astype(jnp.int32)
    site = take(table.site, known)
    row = take(table.row.reshape(-1), site * table.row.shape[-1] + locate(table.tokens, tokens))
    column = take(table.column.reshape(-1), site * table.column.shape[-1] + locate(table.kv, kv))
    return take(table.lo, row + column), take(table.hi, row + column)


def read_curve(knots: Knots, p: Array, q: Array) -> tuple[Array, Array]:
    """Milliseconds of a curve at q between knots p and p + 1, and the weight of p + 1."""
    x, ms = take(knots.x, p), take(knots.ms, p)
    dx, gap = (q - x).astype(ms.dtype), (take(knots.x, p + 1) - x).astype(ms.dtype)
    gap = divisor(knots, gap, ms)
    return ms + (take(knots.ms, p + 1) - ms) * dx / gap, dx / gap


def divisor(knots: Knots, gap: Array, ms: Array) -> Array:
    """The gap, made to depend on the latencies where those may be traced while the query is a constant.

    XLA would turn the division by a constant into a product with its reciprocal, which loses the last bit.
    """
    return jnp.where(jnp.isnan(ms), 1.0, gap) if knots.checked else gap  # what is NaN is refused anyway


def cross(u: Array, v: Array, two: Array, step: Array) -> Array:
    """u, or u + step where two curves answer; the select keeps XLA from fusing a product into the sum."""
    return u + jnp.where(two, step, 0.0)


def read(
    knots: Knots, lo: Array, hi: Array, q: Array, r: Array, curve_order: Array | None = None
) -> tuple[Array, Support]:
    """Two curves read at q and crossed at r -> (milliseconds, NaN where refused; their support).

    lo, hi: int32 [...], knots at or below q on the lower and the upper curve; lo is -1 where refused, and hi equals
        lo where one curve answers alone.
    q, r: uint32 [...], the query's coordinate along the curves and across them.
    curve_order: bool [...], where the crossing is evaluated like a curve (KV-first); elsewhere, as where it is None,
        the weight is rounded first.
    """
    found = lo >= 0
    p, p_hi = jnp.where(found, lo, 0), jnp.where(found, hi, 0)
    (u, along_lo), (v, along_hi) = read_curve(knots, p, q), read_curve(knots, p_hi, q)
    at = take(knots.at, p)
    dx = (r - at).astype(u.dtype)
    gap = jnp.maximum(take(knots.at, p_hi) - at, jnp.uint32(1)).astype(u.dtype)  # one curve alone: 0 / 1
    gap = divisor(knots, gap, u)
    across = dx / gap
    step = (v - u) * across
    if curve_order is not None:
        step = jnp.where(curve_order, (v - u) * dx / gap, step)
    ms = cross(u, v, p != p_hi, step)
    if knots.checked:  # the peer refuses what overflows
        found = found & (ms > 0) & (ms < jnp.inf)
        lo = jnp.where(found, lo, -1)
    return jnp.where(found, ms, jnp.nan), Support(lo, p_hi, across, along_lo, along_hi)


def look_up_decode(table: DecodeTable, batch, kv) -> tuple[Array, Support]:
    """Decode of `batch` requests over `kv` past tokens in total (uint32, one shape) -> (ms, support)."""
    return read(table.knots, *find_decode(table, batch, kv), kv, batch)


def look_up_prefill(table: PrefillTable, batch, tokens, kv) -> tuple[Array, Support]:
    """Prefill of `tokens` new tokens beside `kv` cached ones (uint32, one shape) -> (ms, support)."""
    lo, hi = find_prefill(table, batch, tokens, kv)
    along_kv = lo >= table.split
    return read(table.knots, lo, hi, jnp.where(along_kv, kv, tokens), jnp.where(along_kv, tokens, kv), along_kv)


def decode_baseline(table: DecodeTable, support: Support) -> Array:
    """Mixed passes: the curves that answered the decode query, each at its own first point, crossed alike."""
    knots = table.knots
    found = support.lo >= 0
    lo, hi = jnp.where(found, support.lo, 0), support.hi
    u, v = take(knots.ms, take(knots.head, lo)), take(knots.ms, take(knots.head, hi))
    return jnp.where(found, cross(u, v, lo != hi, (v - u) * support.across), jnp.nan)
