"""The one fit of `learned`: every deployment, family, bootstrap member and fold in one jitted optax scan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fpmjax.models.roofline import NAMES, log_ms
from fpmjax.observe.sizes import Sizes, cells_of
from fpmjax.work import Array

STEPS, RATE, CLIP = 600, 0.1, 5.0  # Adam with a cosine schedule
MEMBERS, FOLDS = 4, 5  # bootstrap members of a family; folds that calibrate the interval
SCALE, LINEAR_SCALE, FREEDOM = 0.03, 0.2, 4.0  # Student-t noise on log latency; the linear form is cruder
JITTER = 0.5  # spread of the first guesses, in widths of the prior
MOST_ROWS = 2048  # rows of one fit; more are thinned out where they crowd
LEAST_ROWS = 64  # smallest padded size
TOGETHER = 4  # deployments that step together; more of them leave the cache
CROWD = 0.05  # side of the cells in which rows crowd, in e-folds


def loss(theta: Array, sizes: Sizes, log_y: Array, weight: Array, prior: Array, *, linear: bool) -> Array:
    """Negative log posterior per row: Student-t on log residuals, Gaussian prior on theta."""
    residual = (log_ms(jnp, theta, sizes, linear) - log_y) / (LINEAR_SCALE if linear else SCALE)
    miss = weight * (FREEDOM + 1.0) / 2.0 * jnp.log1p(residual * residual / FREEDOM)
    pull = (theta - prior[0]) / prior[1]
    return (jnp.sum(miss) + 0.5 * jnp.sum(pull * pull)) / jnp.maximum(jnp.sum(weight), 1.0)


def descend(objective: Callable[..., Array], theta: Array, *data: Any) -> Array:
    """The minimum of objective(theta, *data); the data is carried, as jax 0.4 leaks what a scan closes over."""
    optimiser = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adam(optax.cosine_decay_schedule(RATE, STEPS, alpha=0.0))
    )

    def step(carry: Any, _: None) -> Any:
        theta, state, data = carry
        update, state = optimiser.update(jax.grad(objective)(theta, *data), state, theta)
        return (optax.apply_updates(theta, update), state, data), None

    return jax.lax.scan(step, (theta, optimiser.init(theta), data), None, length=STEPS)[0][0]


@partial(jax.jit, static_argnames="linear")
def fit(
    first: Array, prior: Array, sizes: Sizes, log_y: Array, weights: Array, *, linear: tuple[bool, ...]
) -> tuple[Array, Array]:
    """(theta, log milliseconds of every row) of every family and member of every deployment.

    first, theta: float64 [d, families, members, 13]; prior: [d, families, 2, 13]; sizes, log_y: [d, rows];
    weights: [d, members, rows], zero for padding and for rows that a member must not see.
    linear: for every family whether it has the linear form; families of one form are one batch.
    """

    def member(form: bool, theta: Array, prior: Array, sizes: Sizes, log_y: Array, weight: Array) -> tuple[Array, ...]:
        found = descend(partial(loss, linear=form), theta, sizes, log_y, weight, prior)
        return found, log_ms(jnp, found, sizes, form)

    out: dict[int, tuple[Array, ...]] = {}
    for form in sorted(set(linear)):
        which = [i for i, f in enumerate(linear) if f == form]
        each = jax.vmap(partial(member, form), in_axes=(0, None, None, None, 0))  # members
        each = jax.vmap(each, in_axes=(0, 0, None, None, None))  # families
        rows = first[:, np.array(which)], prior[:, np.array(which)], sizes, log_y, weights
        if len(log_y) <= TOGETHER:  # deployments
            found = jax.vmap(each)(*rows)
        else:
            found = jax.lax.map(lambda x: each(*x), rows, batch_size=TOGETHER)  # noqa: B023
        out |= {i: tuple(x[:, j] for x in found) for j, i in enumerate(which)}
    theta, fitted = zip(*(out[i] for i in range(len(linear))), strict=True)
    return jnp.stack(theta, 1), jnp.stack(fitted, 1)


def thin(at: np.ndarray, most: int = MOST_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """(kept rows, their weights) of at most `most` rows of coordinates [n, axes], in their order.

    Rows crowd in cells of `CROWD` e-folds; every cell keeps rows evenly spaced over its own, as many as the largest
    common quota allows, and each kept row weighs as many as it stands for.
    """
    if len(at) <= most:
        return np.arange(len(at)), np.ones(len(at))
    cell, count = cells_of(at, CROWD)
    low, high = 0, int(count.max())
    while low < high:  # the largest quota that fits
        quota = (low + high + 1) // 2
        low, high = (quota, high) if np.minimum(count, quota).sum() <= most else (low, quota - 1)
    order = np.argsort(cell, kind="stable")
    if low == 0:  # more cells than rows to keep
        kept = np.sort(order[np.linspace(0, len(order) - 1, most).astype(np.int64)])
        return kept, np.full(most, len(at) / most)
    position = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    share = np.minimum(count, low)[cell[order]] / count[cell[order]]
    chosen = np.floor((position + 1) * share + 1e-9) > np.floor(position * share + 1e-9)
    kept = np.sort(order[chosen])
    return kept, (count / np.minimum(count, low))[cell[kept]]


def padded_rows(count: int) -> int:
    """The compiled size for so many rows."""
    return max(LEAST_ROWS, 1 << (count - 1).bit_length())


def first_guesses(draw: np.random.Generator, prior: np.ndarray) -> np.ndarray:
    """float64 [families, members + folds, 13] around the centres of prior [families, 2, 13]."""
    noise = draw.standard_normal((len(prior), MEMBERS + FOLDS, len(NAMES)))
    return prior[:, None, 0] + JITTER * noise * np.minimum(prior[:, None, 1], 0.8)


def member_weights(draw: np.random.Generator, weight: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights [members + folds, n], fold of every row [n]) of rows [n, columns].

    Members see every row with the weight of a Bayesian bootstrap; the model of a fold sees all but its own rows.
    Copies of a row share a fold: held out, none of them has been seen.
    """
    drawn = draw.standard_exponential((MEMBERS, len(weight)))
    drawn = drawn / drawn.mean(1, keepdims=True)
    _, first, copy = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    fold = draw.permutation(len(weight))[first[copy.reshape(-1)]] % FOLDS
    seen = np.arange(FOLDS)[:, None] != fold[None, :]
    return np.concatenate([drawn, seen]) * weight, fold
