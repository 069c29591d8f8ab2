"""One store of a regression: the rows it retains, the fit over them, and when the fit is made again.

Pure functions over the array namespace, a row at a time: plain loops in NumPy for a few rows, a compiled loop in jax
for many, `vmap` over stacked stores.  The rules are the peer's; the fit is made from the retained rows themselves
instead of running sums, which drift when a row of great weight leaves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree
from fpmjax.models.plane import Plane, fit_plane
from fpmjax.models.spline import Spline, refit, search
from fpmjax.observe.retain import Grid, insert, repeat, when
from fpmjax.work import Array

FIRST_SEARCH = 32  # accepted rows before the first search for knots


@pytree()
class Rules:
    """Numbers that steer a store: int64 [], float64 [] or bool []; none of them changes compiled code.

    lazy:       refit only where the last rows were missed, else after every row; the next six steer it, and
                the relative and absolute tolerance, window, trigger and cooldown also an adaptive search.
    interval:   insertions and evictions after which a lazy store refits regardless; 0: never.
    step:       accepted rows between two searches for knots; 0: adaptive.
    """

    min_observations: Array
    ridge: Array
    non_negative: Array
    interval: Array
    lazy: Array
    relative: Array
    absolute_ms: Array
    window: Array
    trigger: Array
    cooldown: Array
    startup: Array
    step: Array


@pytree()
class Learner:
    """State of one store.

    grid:      the retained rows' places; x: float64 [slots, axes] their fitted features, y: [slots] ms.
    plane:     the linear fit.
    spline:    the fit with knots beside it, or None.
    accepted:  int64 [], rows taken so far.
    since:     int64 [], rows since the last usable refit; changes: insertions and evictions since the last regular
               refit.  Only a lazy store counts them.
    missed:    bool [ring], whether the last rows were predicted outside the tolerance, newest last (lazy, spline).
    searches, searched: how often knots were searched, and after how many accepted rows last.
    """

    grid: Grid
    x: Array
    y: Array
    plane: Plane
    spline: Spline | None
    accepted: Array
    since: Array
    changes: Array
    missed: Array
    searches: Array
    searched: Array

    @staticmethod
    def new(grid: Grid, axes: int, ring: int, knots: int) -> Learner:
        zero, slots = np.zeros((), np.int64), len(grid.crowd)
        return Learner(
            grid,
            np.zeros((slots, axes)),
            np.zeros(slots),
            Plane.none(axes),
            Spline.none(knots) if knots else None,
            *(zero, zero, zero),
            np.zeros(ring, bool),
            *(zero, zero),
        )


def file(xp: Any, store: Learner, x: Array, z: Array, y: Array) -> tuple[Learner, Array]:
    """The store with one row more, its fit as it was; int64 [], insertions and evictions."""
    filed = insert(xp, store.grid, z)
    here = np.arange(store.y.shape[0]) == filed.slot
    rows = xp.where(here[:, None], x[None, :], store.x), xp.where(here, y, store.y)
    store = replace(store, grid=filed.grid, x=rows[0], y=rows[1], accepted=store.accepted + 1)
    return store, xp.where(filed.evicted, np.int64(2), np.int64(1))


def linear_fit(xp: Any, store: Learner, rules: Rules) -> tuple[Plane, Array]:
    """(fit, whether it is usable); not ready with fewer rows than `min_observations`."""
    plane, usable = fit_plane(xp, store.x, store.y, store.grid.used, rules.ridge, rules.non_negative)
    enough = store.grid.used.sum() >= rules.min_observations
    return replace(plane, ready=plane.ready & enough), usable & enough


def adopt(xp: Any, store: Learner, rules: Rules) -> tuple[Learner, Array, Array]:
    """The store with a new linear fit, whether that is usable, and whether it was taken: not if no slope is left."""
    plane, usable = linear_fit(xp, store, rules)
    taken = usable | ~plane.ready
    plane = jax.tree.map(lambda new, old: xp.where(taken, new, old), plane, store.plane)
    return replace(store, plane=plane), usable, taken


def learn(xp: Any, store: Learner, rules: Rules, x: Array, z: Array, y: Array) -> Learner:
    """One row, and what the store makes of it at once."""
    forward = store.plane if store.spline is None else store.spline
    prior = forward(xp, x)
    known = ~xp.isnan(prior)
    store, changed = file(xp, store, x, z, y)
    watched = known if store.spline is not None else known & rules.lazy
    miss = xp.abs(prior - y) > xp.maximum(rules.absolute_ms, rules.relative * y)
    ring = xp.where(watched, xp.concatenate([store.missed[1:], miss[None]]), store.missed)
    position = np.arange(store.missed.shape[0])
    misses = (ring & (position >= len(position) - rules.window)).sum()
    store = replace(store, missed=ring)
    if store.spline is not None:
        return learn_spline(xp, store, rules, misses)
    store = replace(
        store, since=xp.where(rules.lazy, store.since + 1, 0), changes=store.changes + xp.where(rules.lazy, changed, 0)
    )
    regular = (rules.interval > 0) & (store.changes >= rules.interval)
    due = regular | ~rules.lazy | ~known | (store.accepted <= rules.startup)
    due = due | ((misses >= rules.trigger) & (store.since >= rules.cooldown))

    def fit() -> Learner:
        fitted, usable, _ = adopt(xp, store, rules)
        return replace(
            fitted,
            changes=xp.where(regular, np.int64(0), store.changes),
            since=xp.where(usable, np.int64(0), store.since),
            missed=store.missed & ~usable,
        )

    return when(xp, due, fit, lambda: store)


def learn_spline(xp: Any, store: Learner, rules: Rules, misses: Array) -> Learner:
    """The linear fit, cleared where it is not usable, and the knots: searched where due, else refitted."""
    plane, usable = linear_fit(xp, store, rules)
    used, spline = store.grid.used, store.spline
    assert spline is not None
    first = store.accepted >= xp.maximum(rules.min_observations, FIRST_SEARCH)
    adaptive = (store.accepted - store.searched >= rules.cooldown) & (misses >= rules.trigger)
    again = xp.where(rules.step > 0, store.accepted % xp.maximum(rules.step, 1) == 0, adaptive)
    due = (used.sum() >= rules.min_observations) & xp.where(store.searches > 0, again, first)
    rows = store.x, store.y, used
    moved = refit(xp, when(xp, due, lambda: search(xp, spline, *rows), lambda: spline), *rows)
    return replace(
        store,
        plane=replace(plane, ready=usable),
        spline=moved,
        searches=xp.where(due, store.searches + 1, store.searches),
        searched=xp.where(due, store.accepted, store.searched),
        missed=store.missed & ~due,
    )


def absorb(
    xp: Any, store: Learner, rules: Rules, x: Array, z: Array, y: Array, count: Array, *, every: bool
) -> tuple[Learner, Array]:
    """The store after the first `count` rows of x [m, axes], z [m, sampling axes], y [m] ms, in order; and whether
    it is what fitting after every row gives.

    every: fit after every row.  Otherwise only after the last one, which is the same (and far cheaper) for a store
    without laziness or knots, unless that last fit has no slope at all: then the fit before it counts.
    """
    if every:
        after = repeat(xp, count, lambda i, s: learn(xp, s, rules, x[i], z[i], y[i]), store)
        return after, xp.ones((), bool)
    filed = repeat(xp, count, lambda i, s: file(xp, s, x[i], z[i], y[i])[0], store)
    fitted, _, taken = adopt(xp, filed, rules)
    return fitted, taken | (count <= 1)


absorb_rows = jax.jit(partial(absorb, jnp), static_argnames="every")
absorb_stacked = jax.jit(
    lambda stores, rules, *rows, every: jax.vmap(partial(absorb, jnp, every=every))(stores, rules, *rows),
    static_argnames="every",
)
