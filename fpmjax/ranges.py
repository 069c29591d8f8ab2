"""Whether the numbers of a model that comes from elsewhere are ones that its own code puts there.

What is looked at is what would stop the code later, send it to a place that is not there, or pass for an answer:
counts below zero, no bins, times that are none.  Whether the numbers go together with what was observed, nobody can
tell any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from fpmjax.observe.retain import CELL_LIMIT, Grid

Range = tuple[Callable[[np.ndarray], Any], str]


class UnfitError(ValueError):
    """Arrays that do not make up a model; the message says which."""


def least(low: int) -> Range:
    return (lambda x: (x >= low) & (x < np.inf)), f"at least {low}"


COUNT, SOME = least(0), least(1)
FINITE: Range = np.isfinite, "finite"
POSITIVE: Range = (lambda x: (x > 0) & (x < np.inf)), "above zero"
SHARE: Range = (lambda x: (x > 0) & (x <= 1)), "above 0, at most 1"
BOUND: Range = (lambda x: x >= 0), "at least 0"

GRID: dict[str, Range] = {
    "z": FINITE,
    "cell": COUNT,
    "crowd": COUNT,
    "order": COUNT,
    "bins": SOME,
    "capacity": SOME,
}
LEARNER: dict[str, Range] = {
    "x": FINITE,
    "y": COUNT,
    "plane.std": POSITIVE,
    "accepted": COUNT,
    "since": COUNT,
    "changes": COUNT,
    "searches": COUNT,
    "searched": COUNT,
}
SPLINE: dict[str, Range] = {"knots": BOUND, "slopes": COUNT, "scale": POSITIVE}
RULES: dict[str, Range] = {
    "min_observations": SOME,
    "ridge": COUNT,
    "interval": COUNT,
    "relative": COUNT,
    "absolute_ms": COUNT,
    "window": SOME,
    "trigger": SOME,
    "cooldown": SOME,
    "startup": SOME,
    "step": COUNT,
}
LOCAL: dict[str, Range] = {
    "z": FINITE,
    "ratio": POSITIVE,
    "recent": POSITIVE,
    "seen_at": least(-1),
    "seen": COUNT,
    "bins": SOME,
    "window": SOME,
    "budget": COUNT,
}
CHOSEN: dict[str, Range] = {
    "error": ((lambda x: ~(x < 0) & (x < np.inf) | np.isnan(x)), "NaN or at least 0"),
    "count": COUNT,
    "streak": COUNT,
    "active": ((lambda x: (x == 0) | (x == 1)), "0 or 1"),
    "alpha": SHARE,
    "margin": ((lambda x: (x >= 0) & (x < 1)), "at least 0, below 1"),
    "warmup": SOME,
    "persistence": SOME,
}
INTERVALS: dict[str, Range] = {
    "divisor": ((lambda x: np.isnan(x) | (x > 0) & (x < np.inf)), "NaN or above zero"),
    "count": COUNT,
}
COMMITTEE: dict[str, Range] = {
    "theta": FINITE,
    "refinement.centres": FINITE,
    "refinement.weights": FINITE,
    "box": FINITE,
    "largest": COUNT,
    "quantile": BOUND,
    "calibrated": COUNT,
    "rows": COUNT,
}


def check_ranges(value: Any, ranges: Mapping[str, Range], name: str = "") -> None:
    """UnfitError for the first array that holds a number outside its range."""
    for path, (holds, words) in ranges.items():
        x = np.asarray(attrgetter(path)(value))
        require(np.all(holds(x)), f"{name}{path} holds a number that is not {words}")


def require(holds: Any, what: str) -> None:
    if not holds:
        raise UnfitError(what)


def cells_of(bins: Any) -> np.ndarray:
    """int64 [...]: the product of bins [..., axes], which are some; a number too large stays too large."""
    product = np.prod(np.asarray(bins, np.float64), axis=-1)
    require(np.all(product < CELL_LIMIT), "a grid has too many cells")
    return product.astype(np.int64)


def check_grid(grid: Grid, name: str) -> None:
    """A grid, or grids stacked on leading axes, whose rows lie inside it and leave as many as may stay."""
    check_ranges(grid, GRID, name)
    crowd, capacity = np.asarray(grid.crowd), np.asarray(grid.capacity)
    used = crowd > 0
    require(np.all(capacity <= crowd.shape[-1]), f"{name}capacity is more than there are slots")
    require(np.all(used.sum(-1) <= capacity), f"{name}crowd counts more rows than may stay")
    require(np.all(np.asarray(grid.cell) < cells_of(grid.bins)[..., None]), f"{name}cell is none of the grid")
    require(np.all(crowd <= crowd.shape[-1]), f"{name}crowd is more than there are slots")
    require(np.all(np.asarray(grid.order) < 2**32), f"{name}order is no age")
    check_bounds(grid.lo, grid.hi, used, name)


def check_bounds(lo: Any, hi: Any, used: np.ndarray, name: str) -> None:
    """Finite ones [..., axes], or those of no rows at all."""
    lo, hi = np.asarray(lo), np.asarray(hi)
    bounded = (np.isfinite(lo) & np.isfinite(hi) & (lo <= hi)).all(-1)
    fresh = ((lo == np.inf) & (hi == -np.inf)).all(-1) & ~used.any(-1)
    require(np.all(bounded | fresh), f"{name}lo and {name}hi are no bounds")


def check_learners(learners: Any, rules: Any, weights: Any) -> None:
    """The stores of a regression, stacked behind the axes of its rules."""
    check_grid(learners.grid, "learners.grid.")
    check_ranges(learners, LEARNER, "learners.")
    check_ranges(rules, RULES, "rules.")
    require(np.all(np.isfinite(weights)) and np.all(np.asarray(weights) > 0), "weights are not above zero")
    if learners.spline is not None:
        check_ranges(learners.spline, SPLINE, "learners.spline.")
    ring = np.shape(learners.missed)[-1]
    require(not ring or np.all(np.asarray(rules.window) <= ring), "rules.window is more than is remembered")
    enough = np.asarray(rules.min_observations)[..., None]
    require(np.all(enough <= np.asarray(learners.grid.capacity)), "rules.min_observations are more than may stay")


def check_corrections(model: Any) -> None:
    """The stores and boxes of a correction, or of a stack of them."""
    require(np.all(np.asarray(model.min_observations) >= 1), "min_observations is below 1")
    low, high = np.moveaxis(np.asarray(model.bounds), -1, 0)
    require(np.all((low >= 0) & (low <= 1) & (high >= 1)), "bounds do not hold 1")
    check_ranges(model.boxes, {"factor": POSITIVE, "otherwise": POSITIVE}, "boxes.")
    for k, store in enumerate(model.fixed or ()):
        check_grid(store.grid, f"fixed[{k}].grid.")
        check_ranges(store, {"ratio": POSITIVE}, f"fixed[{k}].")
        check_room(model, store.grid.bins, store.ratio)
        require(np.all(np.asarray(store.grid.lo) == 0), f"fixed[{k}].grid is no box")
    for k, store in enumerate(model.local or ()):
        name = f"local[{k}]."
        check_ranges(store, LOCAL, name)
        check_room(model, store.bins, store.ratio)
        window, budget, seen = (np.asarray(x) for x in (store.window, store.budget, store.seen))
        slots = store.ratio.shape[-1]
        require(np.all(window <= slots) and np.all(budget < slots), f"{name}window or budget is more than its slots")
        require(np.all(np.asarray(store.seen_at) < seen[..., None]), f"{name}seen_at has not come yet")
        used = np.asarray(store.seen_at) >= 0
        require(np.all(used.sum(-1) <= budget), f"{name}seen_at counts more rows than may stay")
        check_bounds(store.lo, store.hi, used, name)


def check_room(model: Any, bins: Any, ratio: Any) -> None:
    occupied = np.minimum(cells_of(bins), np.shape(ratio)[-1])
    require(np.all(occupied <= model.room), "a grid has more cells than there is room for factors")
