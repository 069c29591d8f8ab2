"""What an online correction keeps: observed over native time, by the kind and size of the work, in bounded stores.

An iteration is placed by one rank, the one with the largest coordinate sum (the later of equal ones):

    prefill  P > 0, no decode   (P, 0)      P computed tokens, B decode requests, K decode KV tokens
    decode   no tokens, B > 0   (B, K)
    mixed    both               (P, K)

Each kind has a store of its own.  A store is filled row by row (`Fixed.file`, `Local.file`, over the array
namespace) and read as boxes (`Boxes`): rectangles of integers with the factor that holds in each.  A query therefore
only compares integers; whatever a logarithm or a quotient decides is decided once, on the host.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fpmjax._jax import pytree
from fpmjax.iteration import has_decode, has_prefill
from fpmjax.metrics import U32_MAX
from fpmjax.observe.retain import CELL_LIMIT, LAST, Grid, cell_of, crowds, insert
from fpmjax.work import Array, Work

KINDS = ("prefill", "decode", "mixed")
PREFILL, DECODE, MIXED, NONE = (np.int8(i) for i in (0, 1, 2, -1))
PRIOR = 20.0  # rows that the recent median counts for beside a cell's own (the peer's, found by probing)
NOTHING = np.uint32(1), np.uint32(0)  # (low, high) of a box that holds no integer


class Place(NamedTuple):
    """kind: int8 [n...], an index of `KINDS`, -1 where idle; x, y: uint32 [n...], its coordinates."""

    kind: Array
    x: Array
    y: Array


def place(xp: Any, work: Work) -> Place:
    """Where every iteration counts; fields of traced work that no engine could have meant are not looked at."""
    shape = (*work.shape, work.ranks)
    fields = (work.prefill_tokens, work.decode_requests, work.decode_kv)
    tokens, requests, kv = (xp.zeros(shape, np.uint32) if x is None else x.astype(np.uint32) for x in fields)
    prefill, decode = (tokens > 0), (requests > 0)
    kind = xp.where(prefill, xp.where(decode, MIXED, PREFILL), xp.where(decode, DECODE, NONE))
    ranks = Place(kind, xp.where(prefill, tokens, requests), xp.where(decode, kv, np.uint32(0)))
    if work.ranks == 1:
        return Place(*(a[..., 0] for a in ranks))
    size = xp.where(kind == NONE, np.int64(-1), ranks.x.astype(np.int64) + ranks.y.astype(np.int64))
    last = work.ranks - 1 - xp.expand_dims(xp.argmax(size[..., ::-1], axis=-1), -1)
    return Place(*(xp.take_along_axis(a, last, -1)[..., 0] for a in ranks))


def kinds_in(work: Work) -> tuple[int, ...]:
    """Kinds that the work can hold, by the phases that are there at all."""
    if has_prefill(work) is None:
        return (int(DECODE),)
    return (int(PREFILL),) if has_decode(work) is None else tuple(range(len(KINDS)))


@pytree()
class Boxes:
    """The factor of every place, [kinds, boxes]: that of the first box that holds it, else `otherwise`.

    low, high: uint32 [kinds, boxes, 2], both inclusive; an unused box holds nothing.
    factor:    float64 [kinds, boxes].
    otherwise: float64 [kinds].
    """

    low: Array
    high: Array
    factor: Array
    otherwise: Array

    @staticmethod
    def of(kinds: list[list[tuple[Cells, int]]], otherwise: list[float]) -> Boxes:
        """Per kind its layers, the first one first, each with the number of boxes that it may come to have."""
        room = sum(limit for _, limit in kinds[0])
        low, high = (np.full((len(kinds), room, 2), x) for x in NOTHING)
        factor = np.ones((len(kinds), room))
        for k, layers in enumerate(kinds):
            at = 0
            for cells, limit in layers:
                rows = slice(at, at + len(cells.factor))
                low[k, rows], high[k, rows], factor[k, rows] = cells.low, cells.high, cells.factor
                at += limit
        return Boxes(low, high, factor, np.asarray(otherwise))

    def look_up(self, xp: Any, work: Work) -> Array:
        """float64 [n...]: the factor of every iteration; 1 where idle."""
        kind, x, y = (a.reshape(-1) for a in place(xp, work))
        factor = xp.ones(kind.shape)
        for k in kinds_in(work):
            factor = xp.where(kind == k, self._of_kind(xp, k, x, y), factor)
        return factor.reshape(work.shape)

    def _of_kind(self, xp: Any, k: int, x: Array, y: Array) -> Array:
        boxes = self.factor.shape[1]
        low, high, factor = (xp.asarray(a)[k] for a in (self.low, self.high, self.factor))

        def inside(i: Any, x: Array, y: Array) -> Array:
            return (x >= low[i, 0]) & (x <= high[i, 0]) & (y >= low[i, 1]) & (y <= high[i, 1])

        if xp is np:  # a few queries: all boxes at once
            every = inside(slice(None), x[:, None], y[:, None])
            found = np.where(every.any(-1), every.argmax(-1), boxes) if boxes else np.zeros(x.shape, np.int32)
        else:  # many queries: box by box, the first one last, a tenth of the time
            found = lax.fori_loop(
                np.int32(0),
                np.int32(boxes),
                lambda i, found: jnp.where(inside(boxes - 1 - i, x, y), boxes - 1 - i, found),
                jnp.full(x.shape, np.int32(boxes)),
            )
        return xp.concatenate([factor, xp.asarray(self.otherwise)[k, None]])[found]


class Cells(NamedTuple):
    """Occupied cells of a store: uint32 [cells, 2] their first and last integers; float64 [cells] their factors."""

    low: np.ndarray
    high: np.ndarray
    factor: np.ndarray


NO_CELLS = Cells(np.zeros((0, 2), np.uint32), np.zeros((0, 2), np.uint32), np.zeros(0))


@pytree()
class Fixed:
    """Ratios over a known box of raw coordinates: `Grid` retention, the median of each cell.

    ratio: float64 [slots].
    """

    grid: Grid
    ratio: Array

    @staticmethod
    def empty(bins: tuple[int, ...], capacity: int, box: tuple[int, int]) -> Fixed:
        grid = Grid.empty(bins, capacity, lo=np.zeros(2), hi=np.asarray(box, np.float64), slots=slots_for(capacity))
        return Fixed(grid, np.ones(len(grid.crowd)))

    def file(self, xp: Any, x: Array, ratio: Array) -> Fixed:
        """One row more; x: float64 [2], raw, inside the box."""
        filed = insert(xp, self.grid, x)
        here = np.arange(self.ratio.shape[0]) == filed.slot
        return Fixed(filed.grid, xp.where(here, ratio, self.ratio))

    def holds(self, x: np.ndarray) -> np.ndarray:
        """bool [n]: whether coordinates [n, 2] lie inside the box."""
        return ((x >= self.grid.lo) & (x <= self.grid.hi)).all(-1)

    @property
    def retained(self) -> int:
        return int(np.asarray(self.grid.used).sum())

    def cells(self, min_observations: int) -> Cells:
        """Its factors; none before `min_observations` rows are retained."""
        if self.retained < min_observations:
            return NO_CELLS
        grid = self.grid
        used = np.asarray(grid.used)
        cell, median, _ = medians(np.asarray(grid.cell)[used], np.asarray(self.ratio)[used])
        return Cells(*integers_of(cell, grid.lo, grid.hi, grid.bins, RAW), median)

    def whole(self) -> Cells:
        """The box itself: 1 where no cell says otherwise."""
        hi = np.minimum(self.grid.hi, U32_MAX).astype(np.uint32)[None]
        return Cells(np.zeros_like(hi), hi, np.ones(1))


@pytree()
class Local:
    """Ratios over a grid that grows with what is seen, shrunk toward the median of the newest ones.

    z:        float64 [slots, 2], log1p of the coordinates; lo, hi: [2], their bounds over all rows so far.
    ratio:    float64 [slots]; seen_at: int64 [slots], when a row came, -1 where the slot is free.
    recent:   float64 [slots], the newest ratios as a ring of `window`; seen: int64 [], rows so far.
    bins:     int64 [2]; window, budget: int64 [], how many newest ratios and how many local rows are kept.
    """

    z: Array
    lo: Array
    hi: Array
    ratio: Array
    seen_at: Array
    recent: Array
    seen: Array
    bins: Array
    window: Array
    budget: Array

    @staticmethod
    def empty(bins: tuple[int, ...], capacity: int, min_observations: int) -> Local:
        slots = slots_for(capacity)
        window = min(capacity, max(min_observations, capacity // 4))
        none, ones = np.full(slots, -1), np.ones(slots)
        numbers = (np.asarray(n, np.int64) for n in (0, bins, window, capacity - window))
        return Local(np.zeros((slots, 2)), np.full(2, np.inf), np.full(2, -np.inf), ones, none, ones, *numbers)

    def file(self, xp: Any, z: Array, ratio: Array) -> Local:
        """One row more; what is too old goes, then the oldest row of a fullest cell (the smallest of equal ones)."""
        slots = np.arange(self.ratio.shape[0])
        lo, hi = xp.minimum(self.lo, z), xp.maximum(self.hi, z)
        alive = self.seen - self.seen_at < 2 * (self.window + self.budget)
        seen_at = xp.where(alive, self.seen_at, np.int64(-1))
        here = slots == xp.argmin(seen_at)  # a free slot: there are more of them than `budget`
        rows, seen_at = xp.where(here[:, None], z[None, :], self.z), xp.where(here, self.seen, seen_at)
        used = seen_at >= 0
        cell = cell_of(xp, rows, lo, hi, self.bins)
        crowd = crowds(xp, xp.where(used, cell, np.int64(-1)))
        fullness = xp.where(used, crowd * CELL_LIMIT - cell, np.int64(-1))
        oldest = xp.argmin(xp.where(fullness == fullness.max(), seen_at, LAST))
        leaves = (used.sum() > self.budget) & (slots == oldest)
        return replace(
            self,
            z=rows,
            lo=lo,
            hi=hi,
            ratio=xp.where(here, ratio, self.ratio),
            seen_at=xp.where(leaves, np.int64(-1), seen_at),
            recent=xp.where(slots == self.seen % self.window, ratio, self.recent),
            seen=self.seen + 1,
        )

    @property
    def retained(self) -> int:
        """Rows in the grid or among the newest."""
        seen_at = np.asarray(self.seen_at)
        newest = min(int(self.seen), int(self.window))
        return newest + int(((seen_at >= 0) & (seen_at < int(self.seen) - newest)).sum())

    def general(self, min_observations: int) -> float | None:
        """The median of the newest ratios; None before there are `min_observations` of them."""
        newest = min(int(self.seen), int(self.window))
        return None if newest < min_observations else float(median(np.asarray(self.recent)[:newest]))

    def cells(self, min_observations: int) -> Cells:
        """Factors g (m / g)^(n / (n + 20)) of cells with n rows of median m; g the general one."""
        general, used = self.general(min_observations), np.asarray(self.seen_at) >= 0
        if general is None or used.sum() < min_observations:
            return NO_CELLS
        lo, hi, bins, z, ratio = (np.asarray(a) for a in (self.lo, self.hi, self.bins, self.z, self.ratio))
        cell, own, rows = medians(cell_of(np, z[used], lo, hi, bins), ratio[used])
        return Cells(*integers_of(cell, lo, hi, bins, LOG), general * (own / general) ** (rows / (rows + PRIOR)))


def slots_for(capacity: int) -> int:
    """The next power of two, so that capacities share compiled code."""
    return 1 << (capacity - 1).bit_length()


def boxes_for(bins: tuple[int, ...], capacity: int) -> int:
    """Cells that can be occupied at once."""
    return min(prod(bins), slots_for(capacity))


class Scale(NamedTuple):
    """From counts to what a grid divides into equal bins, and back; on the host, where both are libm's."""

    up: Any
    down: Any


RAW, LOG = Scale(np.positive, np.positive), Scale(np.log1p, np.expm1)


def median(x: np.ndarray) -> Any:
    """The mean of the middle two."""
    x = np.sort(x)
    return (x[(len(x) - 1) // 2] + x[len(x) // 2]) / 2.0


def medians(cell: np.ndarray, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cells int64 [cells] in increasing order, the median ratio of each, its number of rows)."""
    ordered = ratio[np.lexsort((ratio, cell))]
    cells, start, rows = np.unique(np.sort(cell), return_index=True, return_counts=True)
    return cells, (ordered[start + (rows - 1) // 2] + ordered[start + rows // 2]) / 2.0, rows


def integers_of(cell: np.ndarray, lo: Any, hi: Any, bins: Any, scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    """uint32 [cells, 2]: the first and the last integer coordinates that `cell_of` files in each cell.

    What is filed where grows with the integers, so each end is found by bisection, near a guess where that holds.
    """
    lo, hi, bins = (np.asarray(a)[None] for a in (lo, hi, bins))
    index = np.stack(np.divmod(cell, bins[0, 1]), -1)
    bin_index = np.stack([index, index + 1])

    def reached(x: np.ndarray) -> np.ndarray:
        """Whether x [2, cells, 2] lies in the bins from `bin_index` on, or above the last."""
        z = scale.up(x.astype(np.float64))
        return np.where(bin_index == 0, z >= lo, (z > hi) | (cell_of(np, z[..., None], lo, hi, bins) >= bin_index))

    guess = np.rint(scale.down(lo + (hi - lo) * bin_index / bins)).astype(np.int64)
    low, high = (np.clip(guess + step, 0, U32_MAX + 1) for step in (-2, 2))
    low, high = np.where(reached(low), 0, low), np.where(reached(high), high, U32_MAX + 1)
    while (low < high).any():
        middle = (low + high) // 2
        yes = reached(middle) | (middle > U32_MAX)
        low, high = np.where(yes, low, middle + 1), np.where(yes, middle, high)
    return low[0].astype(np.uint32), (low[1] - 1).astype(np.uint32)
