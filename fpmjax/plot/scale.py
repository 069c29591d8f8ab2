"""Numbers on axes and colours: where axis values stand, which of them are named, and how values become colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SPANS = 8.0  # from this ratio on an axis of sizes is logarithmic
DECADES = 10.0  # the same of colours and contours
TICKS, SIGNED = 11, 8  # at most along an axis, about so many of a signed colour bar
OUTLIERS = 0.01  # share of values at either end that does not stretch a signed scale


def plain(value: float) -> str:
    """At most four digits, in groups of three: 0.0123, 13.76, 4,096, 65,536, 2.1M."""
    size = abs(value)
    if size >= 1e9 or (size and size < 1e-4):
        return f"{value:.3g}"
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass(frozen=True, eq=False)
class Places:
    """Where the values of one axis stand.

    at: float64 [n], increasing; a 0 on a logarithmic axis stands half a step below the least of the others.
    edges: float64 [n + 1], of the cells around them.  log: whether the axis is logarithmic.
    """

    values: np.ndarray
    at: np.ndarray
    edges: np.ndarray
    log: bool

    def ticks(self) -> tuple[list[float], list[str]]:
        """(positions, words) of a few values, far enough apart to be read."""
        values, at = self.values, self.at
        chosen = np.ones(len(values), bool)
        if len(values) > TICKS:
            powers = (values & (values - 1)) == 0 if self.log else values % nice_step(values) == 0
            chosen = powers if powers.sum() >= 3 else chosen
        along = np.log(at) if self.log else at
        gap = (along[-1] - along[0]) / TICKS
        kept: list[int] = []
        for i in np.flatnonzero(chosen).tolist():
            if not kept or along[i] - along[kept[-1]] >= gap * 0.999:
                kept.append(i)
        return at[kept].tolist(), [plain(float(values[i])) for i in kept]


def places_of(values: np.ndarray, *, even: bool = False) -> Places:
    """values: int64 [n], increasing and not negative; even: linear, whatever they span."""
    at = values.astype(np.float64)
    positive = at[at > 0]
    log = not even and len(positive) > 1 and bool(positive[-1] >= SPANS * positive[0])
    if log and at[0] == 0:
        at[0] = positive[0] ** 2 / positive[1] if len(positive) > 1 else positive[0] / 2
    x = np.log(at) if log else at
    if len(x) == 1:
        return Places(values, at, np.array([at[0] - 0.5, at[0] + 0.5]), False)
    middle = (x[1:] + x[:-1]) / 2
    edges = np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])
    return Places(values, at, np.exp(edges) if log else edges, log)


def nice_step(values: np.ndarray) -> int:
    """1, 2 or 5 times a power of ten, for about ten ticks."""
    span = max(int(values[-1] - values[0]), 1) / 8
    power = 10 ** math.floor(math.log10(span)) if span >= 1 else 1
    return max(1, int(next(m * power for m in (1, 2, 5, 10) if m * power >= span)))


def set_axis(axes: Any, which: str, places: Places, label: str) -> None:
    """which: "x" or "y"."""
    from matplotlib.ticker import NullLocator

    if places.log:
        getattr(axes, f"set_{which}scale")("log", base=2)
    axis = getattr(axes, f"{which}axis")
    positions, words = places.ticks()
    axis.set_ticks(positions, words)
    axis.set_minor_locator(NullLocator())
    getattr(axes, f"set_{which}label")(label)


# Colours and contours


@dataclass(frozen=True, eq=False)
class Shades:
    """How the values of one quantity become colours: a colour map, a norm, what lies beyond its ends (as a colour bar
    has it), contour levels among the values, and the ticks of the bar."""

    cmap: Any
    norm: Any
    extend: str
    levels: np.ndarray
    ticks: np.ndarray


def shades_of(values: np.ndarray, *, signed: bool) -> Shades | None:
    """Of all the values of a quantity, float64; None where there are none."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm, Normalize

    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    diverging = signed and low < 0
    ends = low, high
    if signed and not diverging:
        ends = low, float(np.quantile(known, 1 - OUTLIERS)) or high
    elif diverging:
        top = float(np.quantile(np.abs(known), 1 - OUTLIERS)) or max(-low, high)
        ends, low, high = (-top, top), max(low, -top), min(high, top)
    slack = 1e-9 * (ends[1] - ends[0])
    beyond = float(known.min()) < ends[0] - slack, float(known.max()) > ends[1] + slack
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[beyond]
    if diverging:
        return Shades(
            colormaps["PuOr_r"], Normalize(*ends), extend, linear_levels(low, high), linear_levels(*ends, SIGNED)
        )
    low, high = ends
    cmap = colormaps["YlGnBu"]
    if high <= low:  # one value, one colour
        one = ListedColormap([colormaps["PuOr_r" if signed else "YlGnBu"](0.5 if signed else 0.3)])
        return Shades(one, Normalize(low - 0.5, low + 0.5), extend, np.array([]), np.array([low]))
    if low > 0 and high >= DECADES * low:
        levels = log_levels(low, high)
        return Shades(cmap, LogNorm(low, high), extend, levels, levels)
    levels = linear_levels(low, high, 5 if signed else 8)
    return Shades(cmap, Normalize(low, high), extend, levels, levels)


def linear_levels(low: float, high: float, about: int = 5) -> np.ndarray:
    """Round numbers strictly between."""
    from matplotlib.ticker import MaxNLocator

    found = np.asarray(MaxNLocator(about, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
    found = found[(found > low) & (found < high)]
    return np.where(np.abs(found) < 1e-12 * max(abs(low), abs(high)), 0.0, found)


def log_levels(low: float, high: float) -> np.ndarray:
    """1, 2, 5 of every power of ten between, or powers of ten alone where that would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = len(powers) > 5
    found = [m * 10.0**p for p in powers for m in ((1,) if few else (1, 2, 5))]
    return np.array([x for x in found if low < x < high])
