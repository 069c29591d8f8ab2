"""A sum of two piecewise linear curves of rising segments, with learned knots.

Per axis, segments from zero through the knots to infinity, over x / scale; a free intercept and nonnegative segment
slopes, found exactly by pivoting on the Gram matrix of the at most eight segments.  Knots are searched one at a time
over a fixed set of candidates (the peer's), all candidates of a knot at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fpmjax._jax import pytree
from fpmjax.observe.retain import choose, repeat, repeat_while
from fpmjax.work import Array

AXES = 2
# The peer's constants: candidates per axis, margin between knots, gain of a move, smallest column.
QUANTILES = np.array([0.05 * (i + 1) for i in range(19)])
GEOMETRIC = np.array([i / 18.0 for i in range(1, 18)])
MARGIN, GAIN, COLUMN = 1e-10, 1e-12, 1e-12
SWEEPS = 2
DEPENDENT = 1e-13  # what a column of norm 1 has left beside those that are on; below, it stays off
SLACK = 1e-13  # of the largest moment: rounding, not a negative slope or a rising gradient


@pytree()
class Spline:
    """knots: float64 [2, k] on the raw axes, rising, unused ones +inf; slopes: [2, k + 1] per segment of x / scale;
    scale: [2]; intercept: []; ready: bool [], whether knots were ever searched."""

    knots: Array
    slopes: Array
    scale: Array
    intercept: Array
    ready: Array

    @staticmethod
    def none(k: int) -> Spline:
        return Spline(
            np.full((AXES, k), np.inf), np.zeros((AXES, k + 1)), np.ones(AXES), np.zeros(()), np.zeros((), bool)
        )

    def __call__(self, xp: Any, x: Array) -> Array:
        """float64 [...] at raw x [..., 2] >= 0; NaN where there is no fit."""
        value: Any = self.intercept
        for axis in range(AXES):
            at = x[..., axis]
            # Divided last and by a divisor of each point: the same bits in every compiled form.
            scale = xp.where(at >= 0.0, self.scale[axis], 1.0)
            for j, part in enumerate(segments(xp, at, self.knots[axis])):
                value = value + self.slopes[axis, j] * part / scale
        return xp.where(self.ready & xp.isfinite(value), value, np.nan)

    @property
    def rises(self) -> Array:
        """bool []: some segment has a slope."""
        return self.ready & (self.slopes > 0.0).any((-1, -2))


def segments(xp: Any, x: Array, knots: Array) -> list[Array]:
    """The length of each segment that x covers, k + 1 arrays; knots [..., k] lead by the axes of x or have none."""
    parts, left = [], xp.zeros_like(knots[..., 0])
    for j in range(knots.shape[-1] + 1):
        there = xp.isfinite(left)
        start = xp.where(there, left, 0.0)
        part = xp.maximum(x - start, 0.0)
        if j < knots.shape[-1]:
            part = xp.minimum(part, knots[..., j] - start)
            left = knots[..., j]
        parts.append(xp.where(there, part, 0.0))
    return parts


def fit_segments(xp: Any, x: Array, y: Array, used: Array, knots: Array) -> tuple[Array, Array, Array]:
    """(slopes [c, 2, k + 1], intercept [c], squared error [c]) of x [rows, 2] for c sets of knots [c, 2, k]."""
    sets, _, k = knots.shape
    columns = []
    for axis in range(AXES):
        columns += segments(xp, x[None, :, axis], knots[:, None, axis, :])
    design = xp.where(used[None, :, None], xp.stack([xp.broadcast_to(c, (sets, len(y))) for c in columns], -1), 0.0)
    count = xp.maximum(used.sum().astype(np.float64), 1.0)
    target = xp.where(used, y, 0.0)
    level = target.sum() / count
    mean = design.sum(1) / count
    centred = xp.where(used[None, :, None], design - mean[:, None, :], 0.0)
    norm = xp.sqrt((centred * centred).sum(1))
    kept = norm > COLUMN * xp.sqrt(count)
    norm = xp.where(kept, norm, 1.0)
    unit = xp.where(kept[:, None, :], centred / norm[:, None, :], 0.0)
    away = xp.where(used, target - level, 0.0)
    gram, moment = xp.swapaxes(unit, 1, 2) @ unit, xp.swapaxes(unit, 1, 2) @ away
    slopes = non_negative(xp, gram, moment) / norm
    intercept = level - (slopes * mean).sum(-1)
    residual = xp.where(
        used[None, :], target[None, :] - intercept[:, None] - (design * slopes[:, None, :]).sum(-1), 0.0
    )
    return slopes.reshape(sets, AXES, k + 1), intercept, (residual * residual).sum(-1)


def non_negative(xp: Any, gram: Array, moment: Array) -> Array:
    """[c, p]: the nonnegative least squares of c Gram matrices [c, p, p] and moments [c, p]; columns of norm 1 or 0.

    Principal pivoting (Murty's rule): the first unknown that is on and negative, or off with a rising gradient, is
    swept out or in, until there is none; that ends for independent columns.  A column that depends on those that
    are on stays off: its gradient is zero but for rounding.
    """
    sets, size = moment.shape
    start = xp.concatenate([gram, moment[..., None]], -1)
    slack = SLACK * xp.maximum(1.0, xp.abs(moment).max(-1))[:, None]
    unknown = np.arange(size)

    def wrong(table: Array, on: Array) -> Array:
        last, own = table[..., -1], xp.diagonal(table[..., :-1], 0, 1, 2)
        return xp.where(on, last < -slack, (last > slack) & (own > DEPENDENT))

    def pivot(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        table, on, turn = state
        bad = wrong(table, on)
        this = (unknown[None, :] == xp.argmax(bad, -1)[:, None]) & bad
        swept = sweep(xp, table, this)
        return xp.where(this.any(-1)[:, None, None], swept, table), on ^ this, turn + 1

    def unsettled(state: tuple[Array, Array, Array]) -> Array:
        table, on, turn = state
        return wrong(table, on).any() & (turn < 4 * 2**size)

    _, on, _ = repeat_while(xp, unsettled, pivot, (start, xp.zeros((sets, size), bool), xp.zeros((), np.int64)))

    def enter(j: Array, table: Array) -> Array:
        """Once more from the start, without the rounding of what went in and out."""
        this = on & (unknown == j)[None, :]
        own = xp.diagonal(table[..., :-1], 0, 1, 2)
        fine = (this & (own > DEPENDENT)).any(-1)
        return xp.where(fine[:, None, None], sweep(xp, table, this), table)

    solved = repeat(xp, size, enter, start)[..., -1]
    return xp.where(on, xp.maximum(solved, 0.0), 0.0)


def sweep(xp: Any, table: Array, this: Array) -> Array:
    """Tableaus [c, p, p + 1] with one unknown each, `this` bool [c, p], turned from off to on or back."""
    whole = xp.concatenate([this, xp.zeros_like(this[:, :1])], 1)
    row = xp.where(this[:, :, None], table, 0.0).sum(1)
    column = xp.where(whole[:, None, :], table, 0.0).sum(2)
    own = xp.where(this, column, 0.0).sum(1)
    own = xp.where(own != 0.0, own, 1.0)[:, None]
    row, inverse = row / own, xp.where(this, 1.0, -column) / own
    swept = xp.where(this[:, :, None], row[:, None, :], table - column[:, :, None] * row[:, None, :])
    return xp.where(whole[:, None, :], inverse[:, :, None], swept)


def refit(xp: Any, spline: Spline, x: Array, y: Array, used: Array) -> Spline:
    """The same knots and scale, slopes and intercept from the rows as they are now; x raw [rows, 2]."""
    scale = spline.scale
    slopes, intercept, _ = fit_segments(xp, x / scale[None, :], y, used, (spline.knots / scale[:, None])[None])
    return replace(spline, slopes=slopes[0], intercept=intercept[0])


def search(xp: Any, spline: Spline, x: Array, y: Array, used: Array) -> Spline:
    """New scale and knots from the rows x raw [rows, 2], to be refitted; the old knots start it if they do better."""
    k = spline.knots.shape[-1]
    scale = xp.maximum(1.0, xp.where(used[:, None], x, 0.0).max(0))
    x = x / scale[None, :]
    distinct = [distinct_values(xp, x[:, axis], used) for axis in range(AXES)]
    start = xp.stack([first_knots(xp, values, count, k) for values, count in distinct])
    before = spline.knots / scale[:, None]
    comparable = spline.ready & (xp.isfinite(before).sum(-1) == xp.isfinite(start).sum(-1)).all()
    _, _, errors = fit_segments(xp, x, y, used, xp.stack([start, xp.where(comparable, before, start)]))
    better = comparable & (errors[1] < errors[0])
    knots, error = xp.where(better, before, start), xp.where(better, errors[1], errors[0])
    candidates = xp.stack([candidate_knots(xp, values, count) for values, count in distinct])
    top = xp.where(used[:, None], x, 0.0).max(0)

    def move(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Try every candidate for knot i % k of axis i // k % 2."""
        knots, error = state
        axis, j = i // k % AXES, i % k
        own = knots[axis]
        low = xp.where(j > 0, own[xp.maximum(j - 1, 0)], 0.0)
        after = own[xp.minimum(j + 1, k - 1)]
        high = xp.where((j + 1 < k) & xp.isfinite(after), after, top[axis])
        trial = candidates[axis]
        fits = (low + MARGIN < trial) & (trial < high - MARGIN) & xp.isfinite(own[j])
        this = (np.arange(AXES)[:, None] == axis) & (np.arange(k)[None, :] == j)
        tried = xp.where(this[None], trial[:, None, None], knots[None])
        _, _, errors = fit_segments(xp, x, y, used, xp.where(fits[:, None, None], tried, knots[None]))

        def consider(c: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            gains = fits[c] & (errors[c] < best[1] - GAIN)
            return choose(xp, gains, (tried[c], errors[c]), best)

        return repeat(xp, len(QUANTILES) + len(GEOMETRIC), consider, (knots, error))

    knots, _ = repeat(xp, SWEEPS * AXES * k, move, (knots, error))
    return replace(spline, knots=knots * scale[:, None], scale=scale, ready=xp.ones_like(spline.ready))


def distinct_values(xp: Any, x: Array, used: Array) -> tuple[Array, Array]:
    """(rising distinct values, padded with +inf; how many there are)."""
    ordered = xp.sort(xp.where(used, x, np.inf))
    fresh = xp.concatenate([ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1]]) & xp.isfinite(ordered)
    return xp.sort(xp.where(fresh, ordered, np.inf)), fresh.sum()


def quantile(xp: Any, values: Array, count: Array, q: Array) -> Array:
    """Between the distinct values, linearly."""
    at = (count - 1).astype(np.float64) * q
    low, high = (xp.clip(f(at), 0.0, None).astype(np.int64) for f in (xp.floor, xp.ceil))
    return values[low] + (values[high] - values[low]) * (at - xp.floor(at))


def first_knots(xp: Any, values: Array, count: Array, k: int) -> Array:
    """[k]: even quantiles, one fewer than there are distinct values at most; +inf where there is none."""
    knots = xp.minimum(count - 1, k)
    number = np.arange(1, k + 1)
    q = number.astype(np.float64) / (knots + 1).astype(np.float64)
    return xp.where(number <= knots, quantile(xp, values, count, xp.minimum(q, 1.0)), np.inf)


def candidate_knots(xp: Any, values: Array, count: Array) -> Array:
    """[36], rising: quantiles, and geometric steps from the smallest positive value to the largest."""
    largest = values[xp.maximum(count - 1, 0)]
    smallest = xp.where(values > 0.0, values, np.inf).min()
    positive = xp.isfinite(smallest) & (largest > 0.0)
    low, high = (xp.log(xp.where(positive, v, 1.0)) for v in (xp.maximum(smallest, 1e-8), largest))
    steps = xp.exp(low + GEOMETRIC * (high - low))
    return xp.sort(xp.concatenate([quantile(xp, values, count, QUANTILES), xp.where(positive, steps, np.inf)]))
