"""A committee: the same rows fitted by several families and bootstrap members, refined where rows are, calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import own_scope, pytree
from fpmjax.models.fitting import CROWD, MEMBERS, first_guesses, fit, member_weights, padded_rows, thin
from fpmjax.models.refine import FADE, Refinement, cells_for, place, refine
from fpmjax.models.roofline import NAMES, Hardware, broad_prior, datasheet_prior, linear_prior, log_ms
from fpmjax.observe.sizes import BOX, Sizes, cells_of
from fpmjax.work import Array

# Families by name: whether the form is linear, and the prior from the typical latency and the hardware.
FAMILIES: dict[str, tuple[bool, Callable[[float, Any], np.ndarray]]] = {
    "linear": (True, lambda ms, hardware: linear_prior(ms)),
    "broad": (False, lambda ms, hardware: broad_prior(ms)),
    "datasheet": (False, datasheet_prior),
}
COMMITTEES = {"committee": ("linear", "broad"), "roofline": ("broad",), "linear": ("linear",)}
LEAST_ROWS = 16
# How many distinct values of these coordinates the rows of a kind need at least.
VARIED: dict[str, dict[tuple[str, ...], int]] = {
    "pure_decode": {("decode_rows",): 4, ("decode_kv_per_request",): 4},
    "pure_prefill": {("prefill_tokens", "prefill_kv"): 3},
    "contains_locally_mixed": {("decode_kv",): 4, ("prefill_tokens", "prefill_kv"): 3},
    "cross_rank_aggregated": {("decode_kv",): 4, ("prefill_tokens", "prefill_kv"): 3},
}
DISBELIEF, MOST_DISBELIEVED = 0.3, 0.2  # log residual of a row that is not believed, and their largest share
NOISE_FLOOR = 0.02  # log error of which the interval is never surer, in units of its quantile


class Rows(NamedTuple):
    """What one store of one deployment has seen: sizes [n], their coordinates [n, 7], wall_ms [n], the hardware."""

    kind: str
    sizes: Sizes
    at: np.ndarray
    wall_ms: np.ndarray
    hardware: Hardware | None


@pytree()
class Store:
    """One fitted kind of work.

    theta:      float64 [families, members, 13].
    refinement: the surface through the residuals.
    box:        float64 [2, 7], least and largest coordinates (`sizes.BOX`).
    largest:    float64 [], most decode requests of one rank.
    quantile:   float64 [], of the held-out errors over their scales; inf where too few rows were held out.
    calibrated, rows: int64 [], held-out rows, observations.
    ready:      bool [].
    """

    theta: Array
    refinement: Refinement
    box: Array
    largest: Array
    quantile: Array
    calibrated: Array
    rows: Array
    ready: Array

    @staticmethod
    def empty(families: int, rows: int = 0) -> Store:
        zero = np.zeros(())
        return Store(
            np.zeros((families, MEMBERS, len(NAMES))),
            Refinement(np.zeros((cells_for(0), 4)), np.zeros(cells_for(0))),
            np.zeros((2, len(BOX))),
            *(zero, np.array(np.inf), np.zeros((), np.int64), np.array(rows, np.int64), np.zeros((), bool)),
        )


def families_of(family: str, hardware: Hardware | None) -> tuple[str, ...]:
    chosen = COMMITTEES[family]
    return (*chosen, "datasheet") if hardware is not None and "broad" in chosen else chosen


def committee(xp: Any, logs: Sequence[Array]) -> tuple[Array, Array]:
    """(median, half the range) of one, two or three families' logs."""
    if len(logs) == 1:
        return logs[0], xp.zeros_like(logs[0])
    a, b = logs[0], logs[1]
    low, high = xp.minimum(a, b), xp.maximum(a, b)
    if len(logs) == 2:
        return 0.5 * (low + high), 0.5 * (high - low)
    c = logs[2]
    middle = xp.maximum(low, xp.minimum(high, c))
    return middle, 0.5 * (xp.maximum(high, c) - xp.minimum(low, c))


def families_at(store: Store, sizes: Sizes, families: Sequence[str]) -> list[Array]:
    """Each family's log milliseconds float64 [n...]: the mean of its members."""

    def mean(theta: Array, linear: bool) -> Array:
        return jax.vmap(lambda member: log_ms(jnp, member, sizes, linear))(theta).mean(0)

    return [mean(store.theta[i], FAMILIES[name][0]) for i, name in enumerate(families)]


def box_of(at: np.ndarray) -> np.ndarray:
    """float64 [2, 7]: least and largest of coordinates [n, 7]."""
    return np.stack([at.min(0), at.max(0)])


def outside(xp: Any, box: Array, at: Array) -> Array:
    """float64 [n...]: e-folds that coordinates [n..., 7] lie outside the box, 0 inside."""
    low, high = box.reshape(2, *(1,) * (at.ndim - 1), -1)
    return xp.maximum(xp.maximum(low - at, at - high).max(-1), 0.0)


def fading(xp: Any, distance: Array) -> Array:
    """What is left of the refinement there: 1 inside the box, 0 from `FADE` on."""
    return 1.0 - xp.minimum(distance / FADE, 1.0)


def suffices(rows: Rows) -> bool:
    """Whether these rows are enough, and varied enough, to be fitted."""
    return len(rows.wall_ms) >= LEAST_ROWS and all(
        distinct(rows.at[:, [BOX.index(name) for name in names]], least) == least
        for names, least in VARIED[rows.kind].items()
    )


def varied(kind: str) -> str:
    """What the rows of a kind have to have, in words."""
    return " and ".join(f"{least} distinct {' or '.join(names)}" for names, least in VARIED[kind].items())


def distinct(at: np.ndarray, most: int) -> int:
    """How many distinct rows [n, k] there are, counted up to `most`."""
    found = 0
    while len(at) and found < most:
        at, found = at[(at != at[0]).any(1)], found + 1
    return found


def fit_stores(parts: Sequence[Rows], families: tuple[str, ...], seed: Sequence[int], level: float) -> list[Store]:
    """The fitted store of each part; one without enough rows is not ready.  All parts are one compiled fit."""
    stores = [Store.empty(len(families), len(rows.wall_ms)) for rows in parts]
    usable = [i for i, rows in enumerate(parts) if suffices(rows)]
    if not usable:
        return stores
    prepared = [prepare(parts[i], families, np.random.default_rng(seed)) for i in usable]
    size = padded_rows(max(len(p.log_y) for p in prepared))
    room = 1 << (len(prepared) - 1).bit_length()
    padded = [p.padded(size) for p in prepared]
    batch = jax.tree.map(lambda *x: np.stack(x), *padded, *padded[:1] * (room - len(padded)))
    # Inside the caller's jit too, of what is not traced there; optax mixes types, which some do not let jax do.
    with own_scope(), jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        theta, fitted = map(np.asarray, fit(*batch, linear=tuple(FAMILIES[name][0] for name in families)))
    for j, i in enumerate(usable):
        found = prepared[j]
        stores[i] = finish(parts[i], found, theta[j], fitted[j, :, :, : len(found.log_y)], level)
    return stores


class Prepared(NamedTuple):
    """Thinned rows (`kept`, their positions) with their weights, priors and first guesses."""

    kept: np.ndarray
    first: np.ndarray
    prior: np.ndarray
    sizes: Sizes
    at: np.ndarray
    log_y: np.ndarray
    weight: np.ndarray
    weights: np.ndarray
    fold: np.ndarray

    def padded(self, size: int) -> tuple[Any, ...]:
        """The arguments of `fit`; padding repeats the first row with weight zero, which has finite logarithms."""
        more = size - len(self.log_y)
        sizes = Sizes(*(np.concatenate([x, np.repeat(x[:1], more)]) for x in self.sizes))
        log_y = np.concatenate([self.log_y, np.repeat(self.log_y[:1], more)])
        return self.first, self.prior, sizes, log_y, np.pad(self.weights, [(0, 0), (0, more)])


def prepare(rows: Rows, families: tuple[str, ...], draw: np.random.Generator) -> Prepared:
    kept, weight = thin(rows.at)
    weight = weight / weight.mean()
    wall = rows.wall_ms[kept]
    typical = float(np.median(wall))
    prior = np.stack([FAMILIES[name][1](typical, rows.hardware) for name in families])
    first = first_guesses(draw, prior)
    weights, fold = member_weights(draw, weight, np.column_stack([rows.at[kept], wall]))
    sizes = Sizes(*(x[kept] for x in rows.sizes))
    return Prepared(kept, first, prior, sizes, rows.at[kept], np.log(wall), weight, weights, fold)


def finish(rows: Rows, found: Prepared, theta: np.ndarray, fitted: np.ndarray, level: float) -> Store:
    """Refinement and calibration of one fit; fitted: float64 [families, members + folds, n] log milliseconds."""
    at, z = found.at, place(np, found.sizes)
    answer, spread = committee(np, list(fitted[:, :MEMBERS].mean(1)))
    refinement = refine(z, found.log_y - answer, found.weight)
    error = np.empty(len(answer))
    for fold in range(fitted.shape[1] - MEMBERS):
        held, seen = found.fold == fold, found.fold != fold
        other, _ = committee(np, list(fitted[:, MEMBERS + fold]))
        surface = refine(z[seen], (found.log_y - other)[seen], found.weight[seen])
        far = outside(np, box_of(at[seen]), at[held])
        guess = other[held] + fading(np, far) * surface(np, z[held])
        error[held] = np.abs(guess - found.log_y[held])
    quantile = conformal(error / np.hypot(NOISE_FLOOR, spread), found.weight, level)
    seen = believable(rows, found, answer)
    return Store(
        theta[:, :MEMBERS],
        refinement,
        box_of(rows.at[seen]),
        np.array(rows.sizes.decode[seen].max()),
        np.array(quantile),
        np.array(len(error), np.int64),
        np.array(len(rows.wall_ms), np.int64),
        np.array(bool(np.isfinite(theta).all() and np.isfinite(answer).all())),
    )


def believable(rows: Rows, found: Prepared, answer: np.ndarray) -> np.ndarray:
    """bool [n]: rows that count as observed: all but those the fit disbelieves, as long as these are few.

    A cold start is no evidence of how long such work takes, so it must not stretch the training box.
    """
    far = np.abs(found.log_y - answer) > DISBELIEF
    seen = np.ones(len(rows.wall_ms), bool)
    if 0 < far.mean() <= MOST_DISBELIEVED:
        seen[found.kept[far]] = False
        if len(far) < len(seen):  # rows that were thinned out are judged by their neighbours
            cell, _ = cells_of(rows.at, CROWD)
            believed = np.isin(cell, cell[found.kept[~far]])
            seen &= believed | ~np.isin(cell, cell[found.kept[far]])
    return seen


def conformal(score: np.ndarray, weight: np.ndarray, level: float) -> float:
    """The split-conformal quantile of weighted scores: the next row's stays below it with probability `level`."""
    order = np.argsort(score)
    total = np.cumsum(weight[order])
    need = level * (total[-1] + weight.max())
    at = int(np.searchsorted(total, need * (1.0 - 1e-12)))
    return float(score[order[at]]) if at < len(score) else float("inf")
