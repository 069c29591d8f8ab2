"""What a committee misses near the rows it has seen: a smooth surface through its residuals, which fades outside."""

from __future__ import annotations

from typing import Any

import numpy as np

from fpmjax._jax import pytree
from fpmjax.observe.sizes import Sizes, cells_of
from fpmjax.work import Array

REACH = 1.0  # width of the kernel, in e-folds
NOISE = 2.0  # variance of one cell's mean over that of the surface: a cell alone is followed by a third
CELL = 0.25  # side of the cells whose rows are averaged, in e-folds
MOST_CELLS = 256
BLOCKS = 5  # stretches of rows that have to confirm the others
FADE = 0.5  # e-folds outside the training box at which nothing is left
OUTLIER = 0.03  # residual at which a row starts to lose weight
SMALL_KV, SMALL_PROMPT = 8192.0, 64.0  # tokens below which sizes look alike


@pytree()
class Refinement:
    """A radial surface: centres float64 [c, 4] in the coordinates of `place`, weights [c]; padded ones weigh 0."""

    centres: Array
    weights: Array

    def __call__(self, xp: Any, at: Array) -> Array:
        """float64 [n...] at coordinates [n..., 4]."""
        norms = (self.centres * self.centres).sum(-1).reshape((1,) * (at.ndim - 1) + (-1,))
        gap = (at * at).sum(-1)[..., None] + norms - 2.0 * (at @ self.centres.T)
        return xp.exp(gap * (-0.5 / REACH**2)) @ self.weights


def place(xp: Any, sizes: Sizes) -> Array:
    """float64 [n..., 4]: logarithms of rows, KV, prompt tokens and cached prompt KV."""
    axes = (sizes.rows, sizes.kv + SMALL_KV, sizes.tokens + SMALL_PROMPT, sizes.cached + SMALL_KV)
    return xp.log(xp.maximum(xp.stack(axes, -1), 1.0))


def refine(at: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> Refinement:
    """The surface through residuals [n] in log space at coordinates [n, 4], in the order in which they were seen.

    It is scaled by the share of it that later rows confirm: each of `BLOCKS` stretches of rows is compared with the
    surface through the others.  An engine that drifts confirms little.
    """
    trust = weight / (1.0 + (residual / OUTLIER) ** 2 / 4.0) ** 2
    block = np.arange(len(at)) * BLOCKS // len(at)
    told = np.zeros(len(at))
    for b in range(BLOCKS):
        held = block == b
        centres, weights = surface(at[~held], residual[~held], trust[~held])
        told[held] = Refinement(centres, weights)(np, at[held])
    share = np.clip((trust * residual * told).sum() / max((trust * told * told).sum(), 1e-300), 0.0, 1.0)
    centres, weights = surface(at, residual, trust)
    padding = cells_for(len(weights)) - len(weights)
    return Refinement(np.pad(centres, [(0, padding), (0, 0)]), np.pad(share * weights, (0, padding)))


def surface(at: np.ndarray, residual: np.ndarray, trust: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(centres [c, 4], weights [c]): ridge over the means of the cells, of rows that are trusted so much."""
    side = CELL
    cell, count = cells_of(at, side)
    while len(count) > MOST_CELLS:
        side *= 1.5
        cell, count = cells_of(at, side)
    cells = len(count)
    total = np.maximum(np.bincount(cell, trust, cells), 1e-12)
    centres = np.stack([np.bincount(cell, trust * x, cells) for x in at.T], -1) / total[:, None]
    mean = np.bincount(cell, trust * residual, cells) / total
    gap = ((centres[:, None] - centres[None]) ** 2).sum(-1)
    kernel = np.exp(gap * (-0.5 / REACH**2))
    return centres, np.linalg.solve(kernel + np.diag(NOISE / np.minimum(total, 1.0)), mean)


def cells_for(cells: int) -> int:
    """The compiled size for so many centres."""
    return max(32, 1 << max(cells - 1, 1).bit_length())
