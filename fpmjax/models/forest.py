"""`load_forest`: the peer's learned artifact, regression trees over features of an iteration."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Estimate
from fpmjax.errors import OptionError
from fpmjax.iteration import IDLE, INVALID, OK, askable
from fpmjax.models.forest_file import read_artifact
from fpmjax.models.trees import Cuts, Masks, Walk, compile_trees, of_type
from fpmjax.observe.features import KINDS, ROLES, breaks_role, iteration_features
from fpmjax.observe.forest_features import LOGARITHMS, NAMES, features_of, need_lists, raw_features, usable_lists
from fpmjax.status import Status
from fpmjax.work import Array, Work

FLOOR_MS = 1e-6  # the peer's smallest answer
NOT_READY = np.int8(Status.NOT_READY)
OF_VARIANCE = {"var_prefill_length", "var_decode_kv_tokens", "sum_decode_kv_squared", "log1p_sum_decode_kv_squared"}
NO_LISTS = (
    "learned artifact uses per-request features but the iteration carries no aligned, consistent "
    "extend_lengths/past_kv_lengths on every active rank\n"
    "hint: have the engine list its requests, or train on features of totals: the presets v1 and fpm5"
)
ROUTE = "hint: route each worker's iterations to a model of its own, or train an aggregated one"


def load_forest(source: str | os.PathLike[str]) -> Forest:
    """The model of a learned artifact, `aic_fpm_learned_forward_perf` version 1: a path, or its JSON text.

    Answers are those of the peer within 1e-12.  A workload kind without a store is not ready, and none answers for
    another.  Trees know no wider work than they were trained on: a draft length is answered by their outermost leaves.

    Raises ModelFileError: `unreadable`, `too_large`, `json`, `malformed`, where the peer refuses the artifact too.
    """
    artifact = read_artifact(source)
    kinds = tuple(kind for kind in KINDS if kind in artifact.stores)
    stores = [artifact.stores[kind] for kind in kinds]
    looked_at = [tree.feature[~tree.leaf] for store in stores for tree in store.trees]
    used = tuple(np.unique(np.concatenate([*looked_at, np.empty(0, np.int64)])).tolist()) or (0,)
    cuts, trees = compile_trees(stores, used)
    names = artifact.features
    raw = [[of_argument(names[i], cut) for i, cut in zip(used, mine, strict=True)] for mine in cuts]
    baseline = np.array([store.baseline for store in stores])
    return Forest(padded(cuts), padded(raw), baseline, trees, artifact.role, artifact.target, names, kinds, used)


@pytree("role", "target", "features", "kinds", "used")
class Forest:
    """A frozen learned model; call it with `Work`.

    cuts: thresholds on the features as the artifact names them; raw_cuts: the same, where a feature is a logarithm on
    what log1p is taken of.  baseline: float64 [stores], in the order of `kinds`.  target: what trees add up to, "ms" or
    "log_ms".  features: their names; used: positions of those that some tree looks at.
    """

    cuts: Cuts
    raw_cuts: Cuts
    baseline: Array
    trees: Masks | Walk
    role: str
    target: str
    features: tuple[str, ...]
    kinds: tuple[str, ...]
    used: tuple[int, ...]

    composition = "whole_forward"
    execution = "autoregressive"
    verify_width = 1
    by_rank = False  # ranks are reduced to features: no rank is the slowest
    ready = True  # an artifact has at least one store

    @property
    def reads(self) -> frozenset[str]:
        lists = {"lists"} if need_lists(self.features) else set()
        return frozenset(lists | ({"variance"} if OF_VARIANCE & {self.features[i] for i in self.used} else set()))

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: an estimate of every query in `work`, any batch shape; there is no evidence to add."""
        require_x64()
        return on_device(self)._answer(jnp, work)

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries in NumPy, trees summed in the peer's order; equal within 1e-12."""
        return self._answer(np, work)

    def predict(self, kind: str, features: Array) -> Array:
        """Milliseconds, float64 [n...], of feature rows [n..., features] in the artifact's order and units.

        Pure jax under `fpmjax.x64()`.  NaN features take the side that their node states; NaN comes back where a
        prediction is not finite.  Raises OptionError (`kind`) where no store is of this workload kind.
        """
        require_x64()
        if kind not in self.kinds:
            raise OptionError(
                f"{kind!r} is no store of this forest\nhint: it has {', '.join(self.kinds)}",
                code="kind",
            )
        model, features = on_device(self), jnp.asarray(features)[..., np.array(self.used)]
        store = jnp.full(features.shape[:-1], self.kinds.index(kind), np.int32)
        return self._milliseconds(jnp, model._sum(jnp, model.cuts, store, features))

    def _answer(self, xp: Any, work: Work) -> Estimate:
        asked, status = askable(xp, work)
        kind = iteration_features(xp, asked).kind
        place = [self.kinds.index(k) if k in self.kinds else -1 for k in KINDS]
        store = xp.asarray(np.array([*place, -1], np.int32))[kind]  # kind -1, idle, is the last entry
        stored = store >= 0
        malformed = breaks_role(xp, asked, self.role)
        if need_lists(self.features):  # a kind without a store needs no lists either
            malformed = malformed | (~usable_lists(xp, asked) & stored[..., None])
        status = xp.where((status == OK) & malformed, INVALID, status)
        first = xp.expand_dims(xp.argmax(status != OK, axis=-1), -1)
        refusal = xp.take_along_axis(status, first, -1)[..., 0]
        x = raw_features(xp, asked, [self.features[i] for i in self.used])
        ms = self._milliseconds(xp, self._sum(xp, self.raw_cuts, xp.maximum(store, np.int32(0)), x))
        answered = xp.where(stored, xp.where(xp.isnan(ms), INVALID, OK), xp.where(kind < 0, IDLE, NOT_READY))
        status = xp.where(refusal == OK, answered, refusal)
        ms = xp.where(status == OK, ms, xp.where(status == IDLE, 0.0, np.nan))
        return Estimate(ms, status, xp.full(ms.shape, np.int32(-1)))

    def _sum(self, xp: Any, cuts: Cuts, store: Array, x: Array) -> Array:
        """float64 [n...]: baseline and trees of store [n...] at x [n..., used], before the link."""
        flat = store.reshape(-1)
        codes = cuts.codes(xp, flat, x.reshape(len(flat), -1))
        return self.trees.total(xp, self.baseline[flat], flat, codes).reshape(store.shape)

    def _milliseconds(self, xp: Any, total: Array) -> Array:
        with np.errstate(over="ignore"):
            ms = xp.exp(total) if self.target == "log_ms" else total
        return xp.where(xp.isfinite(ms), xp.maximum(ms, FLOOR_MS), np.nan)

    def explain(self, reason: Status, work: Work) -> str:
        """Why one iteration (fields [r]) has no answer."""
        kind = KINDS[int(iteration_features(np, askable(np, work)[0]).kind)]
        have = ", ".join(self.kinds)
        return f"the learned artifact has no store of {kind}\nhint: it has {have}; train on iterations of this kind too"

    def malformed(self, work: Work) -> tuple[str, str]:
        """(code, message) for one iteration of valid counts that this model cannot take."""
        asked, _ = askable(np, work)
        if breaks_role(np, asked, self.role).any():
            other = {"prefill": "decode", "decode": "prefill"}[self.role]
            return "role", f"a {self.role} worker's learned model received scheduled {other} work\n{ROUTE}"
        if need_lists(self.features) and not usable_lists(np, asked).all():
            return "lists_needed", NO_LISTS
        kind = KINDS[int(iteration_features(np, asked).kind)]
        x = features_of(work, [self.features[i] for i in self.used])
        total = self._sum(np, self.cuts, np.array(self.kinds.index(kind), np.int32), x)
        found = f" ({total:g} before the link)" if np.isnan(self._milliseconds(np, total)) else ""
        return (
            "not_finite",
            f"learned forward-pass prediction for {kind} is not finite{found}\nhint: train the model again: no pass "
            "takes so long",
        )

    def __repr__(self) -> str:
        return f"<Forest: {self.role}, {len(self.features)} features, stores {', '.join(self.kinds)}>"


def on_device(model: Forest) -> Forest:
    """The same arrays as those of jax: NumPy's cannot be indexed by what is traced."""
    return jax.tree.map(jnp.asarray, model)


def padded(cuts: list[list[np.ndarray]]) -> Cuts:
    """One array for all; a power of two of columns, the last of which is +inf for every feature."""
    width = 1 << max(len(cut) for mine in cuts for cut in mine).bit_length()
    at = np.full((len(cuts), len(cuts[0]), width), np.inf)
    for s, mine in enumerate(cuts):
        for f, cut in enumerate(mine):
            at[s, f, : len(cut)] = cut
    return Cuts(at)


def of_argument(name: str, cuts: np.ndarray) -> np.ndarray:
    """Thresholds on a feature, for a logarithm those on what it is taken of.

    log1p(x) <= t is x <= the largest x for which that holds, since log1p rises.  So which logarithm it was, libm's or a
    vectorised one that differs in the last bit, decides no branch, on the host or compiled.
    """
    if name not in LOGARITHMS:
        return cuts
    low = np.full(len(cuts), -1, np.int64)  # bits of nonnegative floats rise as they do; -1: no x at all
    high = np.full(len(cuts), np.float64(np.inf).view(np.int64))
    while (wide := high - low > 1).any():
        middle = np.where(wide, low + (high - low) // 2, np.maximum(low, 0))
        logs = np.fromiter(map(math.log1p, middle.view(np.float64).tolist()), np.float64, len(cuts))
        below = wide & (logs <= cuts)
        low, high = np.where(below, middle, low), np.where(wide & ~below, middle, high)
    return np.where(low < 0, -1.0, np.maximum(low, 0).view(np.float64))


def check_forest(model: Forest) -> None:
    """ValueError where arrays or options from elsewhere do not make up a forest; indices that no walk may follow."""
    stores, features = len(model.kinds), len(model.used)
    known = model.role in ROLES and model.target in ("ms", "log_ms") and set(model.features) <= set(NAMES)
    rising = features and list(model.used) == sorted({i for i in model.used if 0 <= i < len(model.features)})
    if not known or not rising or tuple(k for k in KINDS if k in model.kinds) != model.kinds:
        raise ValueError("its options are not those of a forest")
    if not stores or not set(model.kinds) <= set(ROLES[model.role]):
        raise ValueError(f"its stores are not those of the role {model.role}")
    of_type(model.baseline, "baseline", np.float64, stores)
    width = np.shape(model.cuts.at)[-1]
    for name in ("cuts", "raw_cuts"):
        at = of_type(getattr(model, name).at, name, np.float64, stores, features, width)
        if (
            width & (width - 1)
            or not width
            or not (at[..., -1] == np.inf).all()
            or not (at[..., 1:] >= at[..., :-1]).all()
        ):
            raise ValueError(f"{name} do not rise to an infinite last one")
    most = np.maximum(*(np.isfinite(cuts.at).sum(-1) for cuts in (model.cuts, model.raw_cuts)))
    model.trees.check(stores, features, most)
