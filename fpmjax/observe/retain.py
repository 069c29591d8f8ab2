"""The bounded store of an online model: a grid whose fullest cell gives up its oldest row.

Coordinates fall into `bins` equal cells per axis between running bounds that only grow (the peer's rule, with its
deterministic ties).  When a bound moves, the rows are re-filed: the old cells in row-major order, each from its
oldest row.  When more than `capacity` rows are there, the oldest row of a fullest cell goes; of several fullest
cells, the one with the largest index.  The newest row can be the one that goes.

Pure functions over the array namespace: plain loops in NumPy, `lax.scan` and `vmap` in jax.  What stands beside a
row (features, target, ratio) is the caller's: it writes it where `insert` says.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from fpmjax._jax import pytree
from fpmjax.work import Array

CELL_LIMIT = 2**31  # cells of a grid, so that cell and order fit one 64-bit key
PAIRWISE = 256  # slots up to which counting pairs is faster than sorting
LAST = np.int64(2**63 - 1)


@pytree()
class Grid:
    """Which rows are retained; slots beyond `capacity` are padding, so that capacities share compiled code.

    z:        float64 [slots, axes], coordinates.
    cell:     int64 [slots], row-major cell index.
    crowd:    int64 [slots], rows in the same cell; 0 marks a free slot.
    order:    int64 [slots], age inside a cell: smaller is older.
    lo, hi:   float64 [axes], bounds so far.
    bins:     int64 [axes].
    capacity: int64 [], rows retained at most.
    """

    z: Array
    cell: Array
    crowd: Array
    order: Array
    lo: Array
    hi: Array
    bins: Array
    capacity: Array

    @staticmethod
    def empty(bins: tuple[int, ...], capacity: int, *, lo: Any = None, hi: Any = None, slots: int = 0) -> Grid:
        """No rows.  lo, hi: bounds that are known beforehand (None: none yet); prod(bins) is below `CELL_LIMIT`."""
        assert prod(bins) < CELL_LIMIT
        slots, axes = max(slots, capacity), len(bins)
        none = np.zeros(slots, np.int64)
        lo = np.full(axes, np.inf) if lo is None else np.asarray(lo, np.float64)
        hi = np.full(axes, -np.inf) if hi is None else np.asarray(hi, np.float64)
        return Grid(
            np.zeros((slots, axes)),
            none,
            none,
            none,
            lo,
            hi,
            np.asarray(bins, np.int64),
            np.asarray(capacity, np.int64),
        )

    @property
    def used(self) -> Array:
        """bool [slots]: slots that hold a row."""
        return self.crowd > 0


class Filed(NamedTuple):
    """What became of an inserted row.

    slot:    int64 [], where it stands; -1 where it went at once.
    evicted: bool [], whether a row went, the new one or another.
    """

    grid: Grid
    slot: Array
    evicted: Array


def cell_of(xp: Any, z: Array, lo: Array, hi: Array, bins: Array) -> Array:
    """int64 [...]: row-major cell of coordinates [..., axes]; what lies outside counts to the nearest cell."""
    cell: Any = xp.zeros(z.shape[:-1], np.int64)
    for axis in range(z.shape[-1]):
        low, high, count = lo[axis], hi[axis], bins[axis]
        inside = (high > low) & (z[..., axis] > low)
        # The divisor depends on each dividend: XLA divides by a common one through its reciprocal, a bit off.
        at = (z[..., axis] - low) / xp.where(inside, high - low, 1.0) * count.astype(np.float64)
        at = xp.minimum(at, (count - 1).astype(np.float64)).astype(np.int64)
        cell = cell * count + xp.where(inside, at, 0)
    return cell


def insert(xp: Any, grid: Grid, z: Array) -> Filed:
    """File one row of finite coordinates, float64 [axes]; bounds grow, and a row goes where there are too many."""
    grew = (z < grid.lo).any() | (z > grid.hi).any()
    lo, hi = xp.minimum(grid.lo, z), xp.maximum(grid.hi, z)
    used = grid.used

    def refiled() -> tuple[Array, Array, Array]:
        order = ranks(xp, xp.where(used, grid.cell * 2**32 + grid.order, LAST))
        cell = cell_of(xp, grid.z, lo, hi, grid.bins)
        return cell, xp.where(used, crowds(xp, xp.where(used, cell, -1)), 0), order

    cell, crowd, order = when(xp, grew, refiled, lambda: (grid.cell, grid.crowd, grid.order))
    new = cell_of(xp, z[None, :], lo, hi, grid.bins)[0]
    neighbours = used & (cell == new)
    crowd = xp.where(neighbours, crowd + 1, crowd)
    size = neighbours.sum() + 1

    # The fullest cell with the largest index, and in it the oldest row; the new row only where it is alone.
    full = used.sum() >= grid.capacity
    fullness = xp.where(used, crowd * CELL_LIMIT + cell, -1)
    own = size * CELL_LIMIT + new
    fullest = fullness.max()
    stays = ~full | (own <= fullest)
    oldest = xp.argmin(xp.where(fullness == fullest, order, LAST))
    leaves = full & stays
    thinned = cell[oldest]
    crowd = xp.where(leaves & used & (cell == thinned), crowd - 1, crowd)
    size = xp.where(leaves & (new == thinned), size - 1, size)
    slot = xp.where(stays, xp.where(full, oldest, xp.argmin(used)), -1)

    here = np.arange(grid.crowd.shape[0]) == slot
    age = xp.where(used, order, -1).max() + 1
    rows = Grid(
        xp.where(here[:, None], z[None, :], grid.z),
        xp.where(here, new, cell),
        xp.where(here, size, crowd),
        xp.where(here, age, order),
        lo,
        hi,
        grid.bins,
        grid.capacity,
    )
    return Filed(rows, slot, full)


def ranks(xp: Any, key: Array) -> Array:
    """int64 [n]: how many keys are smaller; distinct keys are numbered in order."""
    if key.shape[0] <= PAIRWISE:
        return count(xp, key, lambda other, own: other < own)
    return xp.searchsorted(xp.sort(key), key, side="left").astype(np.int64)


def crowds(xp: Any, cell: Array) -> Array:
    """int64 [n]: how many entries are equal to each one."""
    if cell.shape[0] <= PAIRWISE:
        return count(xp, cell, lambda other, own: other == own)
    ordered = xp.sort(cell)
    up_to, below = (xp.searchsorted(ordered, cell, side=side) for side in ("right", "left"))
    return (up_to - below).astype(np.int64)


def count(xp: Any, entries: Array, holds: Callable[[Array, Array], Array]) -> Array:
    """int64 [n]: for each entry, the entries with which `holds(other, own)` is true."""
    if xp is np:
        return holds(entries[:, None], entries[None, :]).sum(0)
    # One by one: XLA vectorises these sums of n entries, but not the one over n x n pairs, 15 times slower.
    one_more = lambda i, sums: sums + holds(entries[i], entries).astype(np.int64)  # noqa: E731
    return repeat(xp, len(entries), one_more, xp.zeros(len(entries), np.int64))


def when(xp: Any, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`lax.cond` in jax, an ordinary branch in NumPy; both branches give the same dtypes."""
    if xp is np:
        return then() if condition else otherwise()
    return lax.cond(condition, then, otherwise)


def choose(xp: Any, condition: Array, then: Any, otherwise: Any) -> Any:
    """Leaf by leaf: one of two pytrees of the same shapes."""
    if xp is np:
        return then if condition else otherwise
    return jax.tree.map(lambda a, b: xp.where(condition, a, b), then, otherwise)


def repeat(xp: Any, times: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` in jax, an ordinary loop in NumPy: state = body(i, state) for i below `times`."""
    if xp is not np:
        return lax.fori_loop(0, times, body, state)
    for i in range(times):
        state = body(i, state)
    return state


def repeat_while(xp: Any, goes_on: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
    """`lax.while_loop` in jax, an ordinary loop in NumPy."""
    if xp is not np:
        return lax.while_loop(goes_on, body, state)
    while goes_on(state):
        state = body(state)
    return state
