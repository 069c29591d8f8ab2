"""One query at a time over the compiled tables, in plain Python numbers: the kernel's bits without a compile.

A dispatched kernel costs tens of microseconds however few its queries; this walk costs a few.  Python's floats
are IEEE float64 and never fused, so the operation order alone gives the same bits.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

from fpmjax.answer import Resolution
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.prefill import PrefillTable


class Answer(NamedTuple):
    """One lookup: milliseconds (None where refused), how, and the numbers its support is made of."""

    ms: float | None
    resolution: Resolution
    lo: int
    hi: int
    across: float
    along_lo: float
    along_hi: float


REFUSED = Answer(None, Resolution.NONE, -1, -1, 0.0, 0.0, 0.0)


def view(array: Any) -> memoryview:
    """Indexing a memoryview gives Python numbers, four times as fast as indexing an array."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).data)


class KnotWalk:
    """Plain-number view of `Knots`."""

    def __init__(self, knots: Knots):
        self.x, self.ms, self.at = view(knots.x), view(knots.ms), view(knots.at)
        self.head, self.row = view(knots.head), view(knots.row)

    def curve(self, p: int, q: int) -> tuple[float, float]:
        """`kernel.read_curve` at one point."""
        x, ms = self.x[p], self.ms[p]
        if q == x:
            return ms, 0.0
        dx, gap = float(q - x), float(self.x[p + 1] - x)
        return ms + (self.ms[p + 1] - ms) * dx / gap, dx / gap

    def read(self, lo: int, hi: int, q: int, r: int, crossing: Resolution) -> Answer:
        """`kernel.read` at one point."""
        u, along_lo = self.curve(lo, q)
        if lo == hi:
            resolution = Resolution.EXACT if along_lo == 0 else Resolution.WITHIN
            return sound(Answer(u, resolution, lo, hi, 0.0, along_lo, along_lo))
        v, along_hi = self.curve(hi, q)
        at = self.at[lo]
        dx, gap = float(r - at), float(self.at[hi] - at)
        across = dx / gap
        step = (v - u) * dx / gap if crossing is Resolution.ACROSS_TOKENS else (v - u) * across
        return sound(Answer(u + step, crossing, lo, hi, across, along_lo, along_hi))

    def corners(self, answer: Answer) -> list[tuple[int, float]]:
        """(knot, weight) of the four corners of an answer in the peer's order; a weight of 0 marks an unused one."""
        w, lo, hi = answer.across, answer.along_lo, answer.along_hi
        return [
            (answer.lo, (1.0 - w) * (1.0 - lo)),
            (answer.lo + 1, (1.0 - w) * lo),
            (answer.hi, w * (1.0 - hi)),
            (answer.hi + 1, w * hi),
        ]


def sound(answer: Answer) -> Answer:
    """Differences of absurd latencies may overflow; the peer refuses such a value."""
    return answer if answer.ms is not None and 0.0 < answer.ms < float("inf") else REFUSED


class DecodeWalk:
    """Plain-number view of a `DecodeTable`."""

    def __init__(self, table: DecodeTable):
        self.knots = KnotWalk(table.knots)
        self.last, self.row, self.lo, self.hi = view(table.kv.last), view(table.row), view(table.lo), view(table.hi)
        self.largest = len(self.row) - 1
        self.rows = int(table.rows)

    def __call__(self, batch: int, kv: int) -> Answer:
        """Decode of `batch` requests over `kv` past tokens in total (both 0 .. 2**32 - 1)."""
        cell = self.row[min(batch, self.largest)] + bisect_left(self.last, kv)
        lo = self.lo[cell]
        if lo < 0:
            return REFUSED
        return self.knots.read(lo, self.hi[cell], kv, batch, Resolution.ACROSS_BATCH)

    def baseline(self, answer: Answer) -> Answer:
        """Mixed passes: the curves of a decode answer, each at its own first point."""
        if answer.ms is None:
            return REFUSED
        knots = self.knots
        lo, hi = knots.head[answer.lo], knots.head[answer.hi]
        u, v = knots.ms[lo], knots.ms[hi]
        if lo == hi:
            return Answer(u, Resolution.EXACT, lo, hi, 0.0, 0.0, 0.0)
        return Answer(u + (v - u) * answer.across, Resolution.ACROSS_BATCH, lo, hi, answer.across, 0.0, 0.0)


class PrefillWalk:
    """Plain-number view of a `PrefillTable`."""

    def __init__(self, table: PrefillTable):
        self.knots = KnotWalk(table.knots)
        self.tokens, self.kv = view(table.tokens.last), view(table.kv.last)
        self.site, self.row, self.column = view(table.site), view(table.row), view(table.column)
        self.row_width, self.column_width = table.row.shape[-1], table.column.shape[-1]
        self.lo, self.hi, self.split = view(table.lo), view(table.hi), int(table.split)
        self.largest = len(self.site) - 1
        self.rows = int(table.rows)

    def __call__(self, batch: int, tokens: int, kv: int) -> Answer:
        """Prefill of `tokens` new tokens beside `kv` cached ones (all 0 .. 2**32 - 1)."""
        site = self.site[min(batch, self.largest)]
        row = self.row[site * self.row_width + bisect_left(self.tokens, tokens)]
        cell = row + self.column[site * self.column_width + bisect_left(self.kv, kv)]
        lo = self.lo[cell]
        if lo < 0:
            return REFUSED
        if lo >= self.split:
            return self.knots.read(lo, self.hi[cell], kv, tokens, Resolution.ACROSS_TOKENS)
        return self.knots.read(lo, self.hi[cell], tokens, kv, Resolution.ACROSS_KV)
