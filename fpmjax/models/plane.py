"""A plane through points: standardised least squares, its slopes nonnegative unless asked otherwise.

Every subset of the axes that vary is a *face*: the intercept and the slopes of the subset, solved by normal equations
and kept where no slope is negative.  The face of the smallest squared error is the fit, the first one of equals.
With at most six axes all faces are solved at once, exactly, in NumPy or under `jit` and `vmap`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from fpmjax._jax import pytree
from fpmjax.observe.retain import repeat
from fpmjax.work import Array

# Bounds of the peer: an axis varies above the first, relative to its mean; a pivot below the second is singular.
VARIES = 1e-12
PIVOT = 1e-12


@pytree()
class Plane:
    """intercept + sum of slopes * (x - mean) / std; float64 [] and [axes]; std is 1 where an axis does not vary.

    ready: bool [], whether there is a fit at all.
    """

    intercept: Array
    slopes: Array
    mean: Array
    std: Array
    ready: Array

    @staticmethod
    def none(axes: int) -> Plane:
        zero = np.zeros(axes)
        return Plane(np.zeros(()), zero, zero, np.ones(axes), np.zeros((), bool))

    def __call__(self, xp: Any, x: Array) -> Array:
        """float64 [...]: the plane at x [..., axes] >= 0, NaN where there is no fit or no finite value."""
        value: Any = self.intercept
        for axis in range(x.shape[-1]):
            at = x[..., axis]
            # Divided last and by a divisor of each point: the same bits in every compiled form.
            rise = self.slopes[axis] * (at - self.mean[axis])
            value = value + rise / xp.where(at >= 0.0, self.std[axis], 1.0)
        return xp.where(self.ready & xp.isfinite(value), value, np.nan)


def fit_plane(xp: Any, x: Array, y: Array, used: Array, ridge: Array, non_negative: Array) -> tuple[Plane, Array]:
    """(fit, whether it is usable) of the rows `used` among x [rows, axes] and y [rows].

    ridge: scale of the ridge with which a singular face, and no other, is solved again; 0 leaves it out.
    non_negative: bool []; False takes the face of all varying axes whatever its signs.
    The fit is not ready where no axis varies or no face is left.  It is usable with a slope other than zero, or
    where there are no more rows than varying axes.
    """
    axes = x.shape[1]
    weight = used.astype(np.float64)
    count = xp.maximum(weight.sum(), 1.0)
    mean = xp.where(used[:, None], x, 0.0).sum(0) / count
    away = xp.where(used[:, None], x - mean[None, :], 0.0)
    std = xp.sqrt((away * away).sum(0) / count)
    varies = xp.isfinite(std) & (std > VARIES * xp.maximum(1.0, xp.abs(mean)))
    std = xp.where(varies, std, 1.0)
    design = xp.concatenate([weight[:, None], xp.where(varies[None, :], away / std[None, :], 0.0)], 1)
    target = xp.where(used, y, 0.0)

    faces = np.array([face[::-1] for face in product((False, True), repeat=axes)])  # bit 0 is the first axis
    inside = np.concatenate([np.ones((len(faces), 1), bool), faces], 1)
    moments, moment = design.T @ design, design.T @ target
    normal = xp.where(inside[:, :, None] & inside[:, None, :], moments[None], np.eye(axes + 1)[None])
    right = xp.where(inside, moment[None, :], 0.0)
    trace = xp.where(inside, xp.abs(xp.diagonal(moments))[None, :], 0.0).sum(-1)
    slope_diagonal = np.eye(axes + 1)[None] * np.concatenate([np.zeros((len(faces), 1)), faces], 1)[:, None, :]
    ridged = normal + (ridge * xp.maximum(1.0, trace))[:, None, None] * slope_diagonal
    found, solved = solve(xp, xp.concatenate([normal, ridged]), xp.concatenate([right, right]))
    half = len(faces)
    found = xp.where(solved[:half, None], found[:half], found[half:])
    residual = found @ design.T - target[None, :]
    error = (residual * residual).sum(-1)

    kept = (solved[:half] | solved[half:]) & xp.isfinite(found).all(-1) & xp.isfinite(error)
    kept = kept & (~faces | varies[None, :]).all(-1)
    kept = kept & xp.where(non_negative, (found[:, 1:] >= 0.0).all(-1), (faces == varies[None, :]).all(-1))
    best = xp.argmin(xp.where(kept, error, np.inf))
    ready = kept.any() & varies.any()
    coefficients = xp.where(ready, found[best], 0.0)
    slopes = coefficients[1:]
    usable = ready & ((used.sum() <= varies.sum()) | (slopes != 0.0).any())
    return Plane(coefficients[0], slopes, mean, std, ready), usable


def solve(xp: Any, a: Array, b: Array) -> tuple[Array, Array]:
    """(solutions [n, k], whether each system is regular) of n systems a [n, k, k], b [n, k].

    Gauss-Jordan with partial pivoting, a pivot below `PIVOT` is singular.  An excluded unknown is a row and a
    column of the identity: it is never chosen as another's pivot.
    """
    row = np.arange(a.shape[-1])

    def eliminate(column: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        table, regular = state
        below = xp.where((row >= column)[None, :], xp.abs(table[:, :, column]), -1.0)
        chosen = (row[None, :] == xp.argmax(below, -1)[:, None])[:, :, None]
        pivot = xp.where(chosen, table, 0.0).sum(1)
        table = xp.where(chosen, table[:, column, None, :], table)
        value = pivot[:, column]
        regular = regular & (xp.abs(value) >= PIVOT)
        pivot = pivot / xp.where(regular, value, 1.0)[:, None]
        table = table - table[:, :, column, None] * pivot[:, None, :]
        return xp.where((row == column)[None, :, None], pivot[:, None, :], table), regular

    table, regular = repeat(xp, len(row), eliminate, (xp.concatenate([a, b[..., None]], -1), xp.ones(a.shape[0], bool)))
    return table[..., -1], regular
