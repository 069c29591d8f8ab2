"""`regression`: ordinary iterations that an engine ran, fitted as they come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64, x64
from fpmjax.answer import Estimate
from fpmjax.errors import FpmError, OptionError
from fpmjax.guard import check_concrete, check_one_model, check_work, is_model, is_stacked, is_traced
from fpmjax.iteration import IDLE, INVALID, OK, askable
from fpmjax.models.intake import NO_LISTS, Rows, check_observations, joined_timing, rows_of, wrong_role
from fpmjax.models.learner import Learner, Rules, absorb, absorb_rows, absorb_stacked
from fpmjax.models.settings import DEFAULT_AXES, ErrorThreshold, Knots, Settings
from fpmjax.observe.features import (
    KINDS,
    ROLES,
    breaks_role,
    iteration_features,
    lacks_lists,
    need_lists,
    project,
)
from fpmjax.observe.observations import Observations
from fpmjax.observe.record import UNSPECIFIED
from fpmjax.status import Status
from fpmjax.work import Array, Work

M = TypeVar("M")

FLOOR_MS = 1e-6  # the peer's smallest answer
NOT_READY = np.int8(Status.NOT_READY)
SIZES = (1, 8, 64, 512, 4096, 32768)  # compiled numbers of rows; more rows go in several calls
PLAIN = 512  # rows up to which plain loops beat compiling


def regression(
    observations: Observations | None = None,
    *,
    role: str,
    feature_axes: Sequence[str] = DEFAULT_AXES,
    sampling_axes: Sequence[str] = DEFAULT_AXES,
    bins_per_axis: Sequence[int] = (4, 4),
    max_observations: int = 64,
    min_observations: int = 5,
    non_negative: bool = True,
    singular_ridge_scale: float = 1e-9,
    rebuild_interval: int | None = None,
    lazy: ErrorThreshold | None = None,
    spline: Knots | None = None,
    attention_kv_weight: float = 1.0,
    prefill_attention_pair_weight: float = 1.0,
    ffn_token_weight: float = 1.0,
) -> Regression:
    """A model of ordinary iterations of one worker, made of what it was seen to take.

    role: "decode" and "prefill" workers have one store, of pure decode or prefill iterations; an "aggregated" one
        has four, by what an iteration holds.  No store ever answers for another.
    feature_axes, sampling_axes: 1 to 6 names of `fpmjax.observe.features.AXES` that are fitted, and that spread the
        retained rows over `bins_per_axis` cells each (of log1p of the axis).
    max_observations: rows retained per store; min_observations: rows before it answers.
    non_negative: no slope falls; singular_ridge_scale: ridge for faces that are singular without it.
    lazy: refit only where predictions miss; rebuild_interval: and after so many insertions and evictions.
    spline: knots on both default axes beside the linear fit, which answers outside the retained rows.
    The three weights scale the work of KV reads, of prefill pairs and of FFN tokens.

    Observations are of ordinary decoding (one row per request) and of one clock, which the model remembers; `None`, or
    none of a kind: that store is not ready.  No answer is below 1e-6 ms, a floor that falling slopes (`non_negative`
    False) can reach outside of what was observed; such an answer says only that the fit does not hold there.
    Raises OptionError (code: the option) and what `Regression.update` raises.
    """
    weights = (attention_kv_weight, prefill_attention_pair_weight, ffn_token_weight)
    settings = Settings(
        role=role,
        feature_axes=feature_axes,
        sampling_axes=sampling_axes,
        bins_per_axis=bins_per_axis,
        max_observations=max_observations,
        min_observations=min_observations,
        non_negative=non_negative,
        singular_ridge_scale=singular_ridge_scale,
        rebuild_interval=rebuild_interval,
        lazy=lazy,
        spline=spline,
        weights=weights,
    )
    stores = jax.tree.map(lambda x: np.stack([x] * len(ROLES[role])), settings.store)
    every = lazy is not None or spline is not None
    axes = tuple(settings.feature_axes), tuple(settings.sampling_axes)
    model = Regression(stores, settings.rules, np.array(weights, np.float64), role, *axes, every)
    return model if observations is None else model.update(observations)


@pytree("role", "feature_axes", "sampling_axes", "every", "timing")
class Regression:
    """Fitted stores, stacked on a leading axis in the order of `ROLES[role]`; call it with `Work`.

    weights: float64 [3]; every: whether the fit depends on more than the rows that are retained (lazy, spline).
    timing:  the clock of what was observed, "unspecified" as long as no observations named one.
    """

    learners: Learner
    rules: Rules
    weights: Array
    role: str
    feature_axes: tuple[str, ...]
    sampling_axes: tuple[str, ...]
    every: bool
    timing: str = UNSPECIFIED

    composition = "whole_forward"
    execution = "autoregressive"
    verify_width = 1
    by_rank = False  # ranks are reduced before the fit: no rank is the slowest

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"lists"} if need_lists(self.feature_axes) else ())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The workload kind of each store."""
        return ROLES[self.role]

    @property
    def ready(self) -> bool:
        """Whether some store answers."""
        check_concrete(self, "ready", "inside jit look at the status of an answer")
        return bool(np.any(self.learners.plane.ready))

    @property
    def stores(self) -> tuple[dict[str, Any], ...]:
        """Per store: workload_kind, ready, retained_observations, and with knots what became of them."""
        check_one_model(self, "stores")
        check_concrete(self, "stores", "look at them outside of jit")
        return tuple(self._diagnose(i) for i in range(len(self.kinds)))

    def _diagnose(self, i: int) -> dict[str, Any]:
        store = self._store(i)
        retained = int(np.sum(store.grid.used))
        shown: dict[str, Any] = {"workload_kind": self.kinds[i], "ready": bool(store.plane.ready)}
        shown["retained_observations"] = retained
        if store.spline is not None:
            shown["spline"] = {
                "initialized": bool(store.spline.ready),
                "ready": bool(store.spline.rises),
                "accepted_observations": int(store.accepted),
                "knot_searches": int(store.searches),
                "last_search_observation": int(store.searched) if store.searches else None,
                "numerical_rebuilds": 0,  # the peer's running sums; every fit here is made from the rows
                "batch_fallbacks": 0,
            }
        return shown

    def _store(self, i: int) -> Learner:
        return jax.tree.map(lambda x: x[i], self.learners)

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: an estimate of every query in `work`, any batch shape; there is no evidence to add."""
        require_x64()
        return self._answer(jnp, work)

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries in NumPy: the same bits and no compile."""
        with np.errstate(all="ignore"):
            return self._answer(np, work)

    def _answer(self, xp: Any, work: Work) -> Estimate:
        check_work(work, "a model")
        check_one_model(self, "a call")
        asked, status = askable(xp, work)
        features = iteration_features(xp, asked, tuple(self.weights[i] for i in range(3)))
        busy = features.kind >= 0
        malformed = breaks_role(xp, asked, self.role)
        if need_lists(self.feature_axes):
            malformed = malformed | (lacks_lists(xp, asked) & busy[..., None])
        refusal = first_refusal(xp, xp.where((status == OK) & malformed, INVALID, status))
        x = project(xp, asked, features, self.feature_axes)
        ms: Any = xp.full(busy.shape, np.nan)
        for i, kind in enumerate(self.kinds):
            ms = xp.where(features.kind == KINDS.index(kind), predict(xp, self._store(i), x), ms)
        status = xp.where(busy, xp.where(xp.isnan(ms), NOT_READY, OK), IDLE)
        fine = refusal == OK
        ms = xp.where(fine, xp.where(busy, ms, 0.0), np.nan)
        return Estimate(ms, xp.where(fine, status, refusal), xp.full(busy.shape, np.int32(-1)))

    @np.errstate(all="ignore")
    def explain(self, reason: Status, work: Work) -> str:
        """Why one iteration (fields [r]) has no answer."""
        asked, _ = askable(np, work)
        kind = KINDS[int(iteration_features(np, asked).kind)]
        store = self._store(self.kinds.index(kind))
        retained, least = int(np.sum(store.grid.used)), int(self.rules.min_observations)
        have = f"{retained} of its kind, {kind}, are retained"
        if retained < least:
            return f"{reason.sentence}: {have}\nhint: it takes at least {least}, which differ in their work"
        rows = store.grid.used
        squares = np.square(store.x)[rows].sum(0), np.square(store.y)[rows].sum()
        if not all(np.isfinite(total).all() for total in squares):
            fix = "fit again without them, and with weights of work nearer to 1"
            return f"{reason.sentence}: {have}, but some are too large to be fitted\nhint: {fix}"
        return f"{reason.sentence}: {have}, but latency rises with none of their features\nhint: observe varied work"

    def malformed(self, work: Work) -> tuple[str, str]:
        """(code, message) for one iteration that this model cannot take."""
        if breaks_role(np, askable(np, work)[0], self.role).any():
            return "role", wrong_role(self.role)
        if (askable(np, work)[1] != OK).any():
            invalid = Status.INVALID_WORK
            return invalid.code, f"{invalid.sentence}\nhint: build work with `fpmjax.Work.of`, which checks it"
        return "lists_needed", NO_LISTS

    def update(self, observations: Observations) -> Regression:
        """The model after these observations, in order; this one stays as it is.  All of them or, on error, none.

        Wall times that no pass can have taken (zero, not finite, three years) are left out.

        Raises MetricsError: `role` (work that a worker of this role does not do), `lists_needed` (a selected axis
        needs request lists that an active rank does not carry), `payload` for what is no observations; OptionError
        `timing` (another clock than so far, see `Observations.timing`); FpmError `stacked` (use `update_many`),
        `traced`.
        """
        check_one_model(self, "update")
        check_observations(observations, self)
        timing = joined_timing(self.timing, observations.timing)
        rows = rows_of(observations, self.role, self.feature_axes, self.sampling_axes, self.weights)
        learners = self.learners
        for i in np.unique(rows.store).tolist():
            learned = feed(self._store(i), self.rules, rows.of(rows.store == i), self.every)
            learners = jax.tree.map(lambda whole, part: put(whole, i, part), learners, learned)  # noqa: B023
        return replace(self, learners=learners, timing=timing)

    def __repr__(self) -> str:
        shown = f"Regression(role={self.role!r}, axes={'/'.join(self.feature_axes)}, timing={self.timing!r}"
        if is_stacked(self):
            return f"{shown}, {np.shape(self.weights)[0]} models)"
        return f"{shown}{'' if is_traced(self) else f', {int(np.sum(self.learners.grid.used))} retained'})"


def predict(xp: Any, store: Learner, x: Array) -> Array:
    """float64 [...]: milliseconds at features x [..., axes], NaN where the store is not ready."""
    ms = store.plane(xp, x)
    if store.spline is not None:
        used = store.grid.used[:, None]
        low = xp.where(used, store.x, np.inf).min(0)
        high = xp.where(used, store.x, -np.inf).max(0)
        inside = store.spline.rises
        for axis in range(x.shape[-1]):
            inside = inside & (x[..., axis] >= low[axis]) & (x[..., axis] <= high[axis])
        curve = store.spline(xp, x)
        ms = xp.where(inside & ~xp.isnan(curve) & ~xp.isnan(ms), curve, ms)
    return xp.maximum(ms, FLOOR_MS)


def first_refusal(xp: Any, status: Array) -> Array:
    """int8 [n...]: the first status [n..., r] other than OK, or OK."""
    first = xp.expand_dims(xp.argmax(status != OK, axis=-1), -1)
    return xp.take_along_axis(status, first, -1)[..., 0]


def put(whole: Array, i: int, part: Array) -> Array:
    """The array with one entry replaced."""
    whole = np.array(whole)
    whole[i] = part
    return whole


def feed(store: Learner, rules: Rules, rows: Rows, every: bool) -> Learner:
    """One store after its rows: a few in plain NumPy, more of them compiled, in a few sizes."""
    if len(rows.y) <= PLAIN:
        with np.errstate(all="ignore"):
            learned, settled = absorb(np, store, rules, *rows[1:], len(rows.y), every=every)
            return learned if settled else absorb(np, store, rules, *rows[1:], len(rows.y), every=True)[0]
    with x64():
        for start in range(0, len(rows.y), SIZES[-1]):
            part = [a[start : start + SIZES[-1]] for a in rows[1:]]
            count = np.int64(len(part[-1]))
            part = [pad(a, size_for(len(a))) for a in part]
            learned, settled = absorb_rows(store, rules, *part, count, every=every)
            store = learned if settled else absorb_rows(store, rules, *part, count, every=True)[0]
    return jax.tree.map(np.asarray, store)


def size_for(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def pad(x: Array, size: int) -> Array:
    """Zeros behind the first axis, up to `size`."""
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def positions(which: Any, n: int, count: int) -> Array:
    """int64 [n], each below `count`; OptionError `which`."""
    check_concrete(which, "update_many", "update outside of jit; it compiles for itself")
    try:
        found = np.asarray(which)
    except Exception:  # a ragged list, or whatever else an object raises that is no array
        found = np.empty(())
    whole = found.dtype.kind in "iu" or not n  # an empty list is of floats
    if found.shape == (n,) and whole and ((found >= 0) & (found < count)).all():
        return found.astype(np.int64)
    raise OptionError(
        f"which must name one of the {count} models for each of the {n} observations\n"
        "hint: an integer array of the shape of wall_ms, counted from 0",
        code="which",
    )


def stack(models: Iterable[M]) -> M:
    """Models of one kind, role, axes and padded sizes as one, a leading axis on every leaf.

    It answers under `vmap`: `jax.vmap(lambda model, work: model(work))(stack(models), work)` inside `fpmjax.x64()`;
    `jax.tree.map(lambda x: x[i], stack)` is the i-th one again.

    Raises FpmError `not_a_model`, `stacked`, `traced`, and OptionError `models` where there are none or they differ,
    be it in the clock that they were fitted to.
    """
    models = list(models) if isinstance(models, Iterable) else [models]
    if not models:
        raise OptionError("a stack needs at least one model\nhint: stack([model, ...])", code="models")
    for i, model in enumerate(models):
        if not is_model(model):
            what = f"models[{i}] is a {type(model).__name__}"
            raise FpmError(f"stack takes a list of models, but {what}\nhint: stack([model, ...])", code="not_a_model")
        check_one_model(model, "an entry of a stack")
        check_concrete(model, "stack", "inside jit: jax.tree.map(lambda *x: jax.numpy.stack(x), *models)")
        if found := difference(model, models[0]):
            raise OptionError(
                f"models[{i}] does not go on a stack with models[0]: {found}\n"
                "hint: a stack holds models of one kind, role, axes and size; make a stack of each",
                code="models",
            )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *models)


def difference(model: Any, other: Any) -> str:
    """What keeps two models from standing on one stack; empty: nothing."""
    if type(model) is not type(other):
        return f"a {type(model).__name__} and a {type(other).__name__}"
    for field in fields(model):
        mine, its = getattr(model, field.name), getattr(other, field.name)
        if jax.tree.structure(mine) != jax.tree.structure(its):
            return f"they differ in {field.name}"
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
            if isinstance(x, (str, bool, int)) and x != y:
                return f"{field.name} is {mine!r} and {its!r}"
            if np.shape(x) != np.shape(y):
                return f"arrays in {field.name} are of shape {np.shape(x)} and {np.shape(y)}"
    return ""


def update_many(models: Regression, observations: Observations, which: Any) -> Regression:
    """A `stack` of models after these observations, in order; which: int [n], the model that each one is for.

    One compiled call for all of them.  Raises as `Regression.update` does, and then nothing changes; OptionError
    `models` for what is no such stack, `which` for other positions.
    """
    if not isinstance(models, Regression) or np.ndim(models.weights) != 2:
        found = f"{'one' if is_model(models) else 'a'} {type(models).__name__}"
        raise OptionError(
            f"update_many takes a stack of regressions, not {found}\n"
            "hint: stack([model, ...]); one model learns by itself, model.update(observations)",
            code="models",
        )
    check_observations(observations, models)
    timing = joined_timing(models.timing, observations.timing)
    which = positions(which, len(observations), count := len(models.weights))
    rows = rows_of(observations, models.role, models.feature_axes, models.sampling_axes, models.weights, which)
    kinds = len(models.kinds)
    flat: Learner = jax.tree.map(lambda x: x.reshape(count * kinds, *x.shape[2:]), models.learners)
    rules = jax.tree.map(lambda x: np.repeat(x, kinds, 0), models.rules)
    order = np.argsort(rows.store, kind="stable")
    counts = np.bincount(rows.store, minlength=count * kinds)
    begin = np.cumsum(counts) - counts
    with x64():
        for start in range(0, int(counts.max(initial=0)), SIZES[-2]):
            now = np.clip(counts - start, 0, SIZES[-2])
            size = size_for(int(now.max()))
            place = np.arange(size)[None, :]
            there = place < now[:, None]
            index = order[np.where(there, begin[:, None] + start + place, 0)]
            part = [np.where(there.reshape(there.shape + (1,) * (a.ndim - 1)), a[index], 0.0) for a in rows[1:]]
            learned, settled = absorb_stacked(flat, rules, *part, now, every=models.every)
            if not np.all(settled):
                exact, _ = absorb_stacked(flat, rules, *part, now, every=True)
                learned = exact
            flat = learned
    learners = jax.tree.map(lambda x: np.asarray(x).reshape(count, kinds, *x.shape[1:]), flat)
    return replace(models, learners=learners, timing=timing)
