"""What the lines of a grid leave, joined on the host: totals and histograms of every kept combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.fold import FLOOR, MANTISSA, SHIFT
from fpmjax.grid import Grid
from fpmjax.lines import Axes, Block, fill

NOWHERE = 2**62
LARGEST_HISTOGRAM = 2**25  # bins of 8 bytes
HISTOGRAMS = (2**16, 2**20, LARGEST_HISTOGRAM)


class Totals:
    """What is left of every kept combination; arrays [kept].

    cells: of each; answered, under: int64; low, high, total: float64 ms; first: int64, position of the first minimum
    among the reduced cells.
    """

    def __init__(self, grid: Grid, keep: Sequence[str]):
        self.keep, self.axes = tuple(keep), Axes(grid, keep)
        self.kept, self.cells = self.axes.cells(self.keep), self.axes.cells(self.axes.reduced)
        self.answered, self.under = np.zeros((2, self.kept), np.int64)
        self.low, self.high = np.full(self.kept, np.inf), np.full(self.kept, -np.inf)
        self.total, self.first = np.zeros(self.kept), np.full(self.kept, NOWHERE)

    def ask(self, block: Block, limit: np.float64) -> Any:
        return block.ask(None, limit, None)

    def add(self, block: Block, left: Any) -> None:
        low, at, high, total, answered, under = (np.asarray(x)[: len(block.kept)] for x in left)
        row = block.kept
        np.add.at(self.total, row, total)  # in the order of the lines
        np.add.at(self.answered, row, answered.astype(np.int64))  # other types take ten times as long
        np.add.at(self.under, row, under.astype(np.int64))
        np.maximum.at(self.high, row, high)
        self.first[row[low < self.low[row]]] = NOWHERE
        np.minimum.at(self.low, row, low)
        lowest = (low == self.low[row]) & (low < np.inf)
        np.minimum.at(self.first, row[lowest], block.where(at.astype(np.int64))[lowest])

    def kept_columns(self) -> dict[str, np.ndarray]:
        """Values of the kept axes, int64 [kept]."""
        return {n: self.axes.values[n][x] for n, x in self.digits(self.keep, np.arange(self.kept))}

    def best_columns(self) -> dict[str, np.ndarray]:
        """Values of the reduced axes at the first minimum, int64 [kept]; the first ones where there is none."""
        first = np.where(self.first < NOWHERE, self.first, 0)
        return {n: self.axes.values[n][x] for n, x in self.digits(self.axes.reduced, first)}

    def digits(self, names: Sequence[str], flat: np.ndarray) -> list[tuple[str, np.ndarray]]:
        found = self.axes.digits(names, flat)
        return [(name, found[name]) for name in names]


class Histogram:
    """Latencies of every kept combination, counted in bins of equal ratio: an exponent and 7 bits of mantissa."""

    ERROR = 2.0 ** -(MANTISSA + 1)  # half a bin beside its lower edge

    def __init__(self, totals: Totals):
        self.axes, self.totals = totals.axes, totals
        some = totals.answered > 0
        self.base = bin_of(totals.low[some]).min(initial=2**62)
        self.width = int(bin_of(totals.high[some]).max(initial=self.base)) - int(self.base) + 1
        bins = totals.kept * self.width
        if bins > LARGEST_HISTOGRAM:
            most = LARGEST_HISTOGRAM // self.width
            refuse_option(
                "quantiles",
                f"quantiles of {totals.kept:,} combinations do not fit in memory",
                f"keep fewer axes: these latencies allow {most:,} combinations",
            )
        size = next(s for s in HISTOGRAMS if s >= bins)
        self.state: list[Any] = [jax.device_put(np.zeros(size, np.int64), device) for device in jax.local_devices()]

    def ask(self, block: Block, limit: np.float64) -> Any:
        bins = fill(block.kept, block.lines), np.int64(self.base), np.int64(self.width)
        self.state[block.device] = block.ask(self.state[block.device], limit, bins)

    def add(self, block: Block, left: Any) -> None:
        """The block counted itself in."""

    def quantile(self, q: float) -> np.ndarray:
        """float64 [kept]: the middle of the bin of rank ceil(q * answered), not outside of minimum and maximum."""
        totals = self.totals
        bins = totals.kept * self.width
        count = np.sum([np.asarray(x)[:bins] for x in self.state], 0).reshape(totals.kept, self.width)
        rank = np.maximum(np.ceil(q * totals.answered), 1)
        found = (count.cumsum(1) >= rank[:, None]).argmax(1) + self.base
        middle = ((found << SHIFT) + (1 << (SHIFT - 1))).view(np.float64)
        middle = np.where(found <= FLOOR, totals.low, middle)
        with np.errstate(invalid="ignore"):
            return np.clip(middle, totals.low, np.maximum(totals.high, totals.low))


def bin_of(ms: np.ndarray) -> np.ndarray:
    return np.maximum(ms.view(np.int64) >> SHIFT, FLOOR)
