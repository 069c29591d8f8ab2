"""`learned`: few observations, wide questions; a committee of fitted forms that says where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Estimate, Interval, Support
from fpmjax.errors import OptionError
from fpmjax.guard import check_concrete, check_one_model, check_work
from fpmjax.iteration import IDLE, INVALID, OK, askable
from fpmjax.metrics import refuse
from fpmjax.models.committee import (
    COMMITTEES,
    LEAST_ROWS,
    NOISE_FLOOR,
    Rows,
    Store,
    committee,
    fading,
    families_at,
    families_of,
    fit_stores,
    outside,
    varied,
)
from fpmjax.models.intake import check_observations, refuse_first, wrong_role
from fpmjax.models.refine import Refinement, place
from fpmjax.models.regression import FLOOR_MS, first_refusal
from fpmjax.models.roofline import Hardware
from fpmjax.observe.features import KINDS, ROLES, breaks_role, iteration_features
from fpmjax.observe.observations import Observations
from fpmjax.observe.record import UNSPECIFIED
from fpmjax.observe.sizes import BOX, Sizes, coordinates, ladder_of, sizes_of
from fpmjax.status import Status
from fpmjax.work import Array, Work

NOT_READY = np.int8(Status.NOT_READY)
LEVEL = 0.9
ANCHOR = 2.0  # a widened batch needs an observation of at least half its size; the rule of readiness, judged there
EDGE = 1e-9  # e-folds: what rounding may cost at the edge of the box


def learned(
    observations: Observations,
    *,
    role: str,
    family: str = "committee",
    hardware: Hardware | None = None,
    cuda_graph_batch_sizes: Sequence[int] | None = None,
    key: Any = 0,
    level: float = LEVEL,
    allow_extrapolation: bool = False,
) -> Learned:
    """A model of ordinary iterations of one worker, fitted once by optax.

    role: as for `regression`: a "decode" or "prefill" worker has one store, an "aggregated" one four.
    family: "committee", the median of a nonnegative linear form and the roofline form under one or two priors;
        "roofline" or "linear" alone.
    hardware: what is known of the deployment, per rank; it adds a prior, which holds what narrow work cannot show.
    cuda_graph_batch_sizes: batch sizes that the engine captured; decode runs at the next of them.
    key: an int or a jax key.  The same key and observations give the same model on the same machine.
    level: share of work like the observed whose time the interval of an answer holds.
    allow_extrapolation: answer draft lengths too whose widened batch is more than twice the largest observed one
        (of a rank).

    A store takes at least 16 observations, of decode with 4 distinct batches and 4 distinct contexts, of other work
    with 3 distinct prompts (`committee.VARIED`); with fewer it is not ready.
    Observations far from the others (cold starts) hardly count.  Raises OptionError (code: the option) and
    MetricsError `role`, `payload`.
    """
    options = role, family, [hardware], cuda_graph_batch_sizes, key, level, allow_extrapolation
    return fit_models([observations], *options)[0]


def learned_fleet(
    fleet: Iterable[Observations],
    *,
    role: str,
    family: str = "committee",
    hardware: Hardware | Sequence[Hardware] | None = None,
    cuda_graph_batch_sizes: Sequence[int] | None = None,
    key: Any = 0,
    level: float = LEVEL,
    allow_extrapolation: bool = False,
) -> Learned:
    """`learned` for many deployments at once: one compiled fit, and one stack of models as `stack` makes it.

    hardware: one for all, or one per deployment.  Every deployment is fitted as it would be alone.

    Raises as `learned` does, and OptionError `fleet`, `hardware`, `timing` (their clocks differ).
    """
    several = isinstance(fleet, Iterable) and not isinstance(fleet, Observations)
    fleet = list(fleet) if several else []
    if not fleet:
        raise OptionError(
            "a fleet is the observations of one or more deployments\nhint: learned_fleet([a, b], ...)", code="fleet"
        )
    if len(clocks := {seen.timing for seen in fleet if isinstance(seen, Observations)}) > 1:
        raise OptionError(
            f"a fleet is one stack of models of one clock, but these are of {', '.join(sorted(clocks))}\n"
            "hint: make a fleet of each clock",
            code="timing",
        )
    each = list(hardware) if isinstance(hardware, Sequence) else [hardware] * len(fleet)
    if len(each) != len(fleet):
        raise OptionError(
            f"hardware names {len(each)} deployments of {len(fleet)}\nhint: give one for all, or one for each",
            code="hardware",
        )
    models = fit_models(fleet, role, family, each, cuda_graph_batch_sizes, key, level, allow_extrapolation)
    room = max(len(m.stores.refinement.weights[0]) for m in models)
    return jax.tree.map(lambda *x: np.stack(x), *(m._padded(room) for m in models))


def fit_models(
    fleet: Sequence[Observations],
    role: str,
    family: str,
    hardware: Sequence[Hardware | None],
    graph_sizes: Sequence[int] | None,
    key: Any,
    level: float,
    allow_extrapolation: bool,
) -> list[Learned]:
    """One model for each of the fleet; hardware: one for each."""
    check_options(role, family, hardware, level, allow_extrapolation)
    ladder, seed = ladder_of(graph_sizes), seed_of(key)
    families = families_of(family, hardware[0])
    parts = [rows for seen, known in zip(fleet, hardware, strict=True) for rows in split(seen, role, known, ladder)]
    stores = fit_stores(parts, families, seed, float(level))
    anchor = np.array(np.inf if allow_extrapolation else ANCHOR)
    models, kinds = [], len(ROLES[role])
    for i, seen in enumerate(fleet):
        mine = stores[i * kinds : (i + 1) * kinds]
        room = max(len(s.refinement.weights) for s in mine)
        whole = jax.tree.map(lambda *x: np.stack(x), *(pad_store(s, room) for s in mine))
        models.append(Learned(whole, anchor, ladder, str(role), families, float(level), False, seen.timing))
    return models


def split(seen: Observations, role: str, hardware: Hardware | None, ladder: np.ndarray | None) -> list[Rows]:
    """The observations of every store of a role."""
    if not isinstance(seen, Observations):
        refuse(
            "payload",
            f"learned takes Observations, not a {type(seen).__name__}",
            "Observations.of, .read or read_trace",
        )
    check_concrete(seen, "learned", "fit outside of jit; it compiles for itself")
    check_observations(seen)
    work = jax.tree.map(np.asarray, seen.work)
    asked, refusal = askable(np, work)
    refuse_first(0, breaks_role(np, asked, role).any(-1), "role", wrong_role, role)
    kind = iteration_features(np, asked).kind
    sizes = sizes_of(np, asked, ladder)
    at = coordinates(np, sizes)
    wall = np.asarray(seen.wall_ms, np.float64)
    sound = np.isfinite(wall) & (wall > 0) & (refusal == OK).all(-1)
    out = []
    for name in ROLES[role]:
        mine = sound & (kind == KINDS.index(name))
        out.append(Rows(name, Sizes(*(x[mine] for x in sizes)), at[mine], wall[mine], hardware))
    return out


def pad_store(store: Store, room: int) -> Store:
    """With room for more centres in its refinement."""
    more = room - store.refinement.weights.shape[-1]
    centres, weights = store.refinement.centres, store.refinement.weights
    lead = [(0, 0)] * (weights.ndim - 1)
    wider = Refinement(np.pad(centres, [*lead, (0, more), (0, 0)]), np.pad(weights, [*lead, (0, more)]))
    return replace(store, refinement=wider)


@pytree("role", "families", "level", "draft", "timing")
class Learned:
    """Fitted stores, stacked on a leading axis in the order of `ROLES[role]`; call it with `Work`.

    anchor:      float64 [], a widened batch is at most so many times the largest observed one; inf allows any.
    graph_sizes: int64 [g], captured batch sizes, or None.
    families:    names of the committee's members; level: of the interval.
    draft:       whether it is asked for the widened work of a draft length, where the rule of anchors holds.
    timing:      the clock of what it was fitted to.
    """

    stores: Store
    anchor: Array
    graph_sizes: Array | None
    role: str
    families: tuple[str, ...]
    level: float
    draft: bool
    timing: str = UNSPECIFIED

    composition = "whole_forward"
    execution = "autoregressive"
    verify_width = 1
    by_rank = False  # ranks are reduced before the fit: no rank is the slowest
    reads = frozenset()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The workload kind of each store."""
        return ROLES[self.role]

    @property
    def ready(self) -> bool:
        """Whether some store answers."""
        check_concrete(self, "ready", "inside jit look at the status of an answer")
        return bool(np.any(self.stores.ready))

    @property
    def for_draft(self) -> Learned:
        """The model that answers the widened work of a draft length."""
        return replace(self, draft=True)

    @property
    def box(self) -> dict[str, dict[str, tuple[float, float]]]:
        """What was observed: of every ready store the least and largest of each coordinate."""
        check_one_model(self, "box")
        check_concrete(self, "box", "look at it outside of jit")
        edges = np.round(np.exp(np.asarray(self.stores.box)), 6)
        return {
            kind: {name: (float(edges[i, 0, j]), float(edges[i, 1, j])) for j, name in enumerate(BOX)}
            for i, kind in enumerate(self.kinds)
            if self.stores.ready[i]
        }

    @property
    def diagnostics(self) -> tuple[dict[str, Any], ...]:
        """Per store: workload_kind, ready, observations, calibrated_on, largest_batch, and the box."""
        box = self.box
        return tuple(
            {
                "workload_kind": kind,
                "ready": bool(self.stores.ready[i]),
                "observations": int(self.stores.rows[i]),
                "calibrated_on": int(self.stores.calibrated[i]),
                "largest_batch": int(self.stores.largest[i]),
                "box": box.get(kind, {}),
            }
            for i, kind in enumerate(self.kinds)
        )

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: an estimate of every query in `work`, any batch shape; there is no evidence to add."""
        require_x64()
        check_work(work, "a model")
        check_one_model(self, "a call")
        xp = jnp
        asked, status = askable(xp, work)
        kind = iteration_features(xp, asked).kind
        busy = kind >= 0
        refusal = first_refusal(xp, xp.where((status == OK) & breaks_role(xp, asked, self.role), INVALID, status))
        sizes = sizes_of(xp, asked, self.graph_sizes)
        at, z = coordinates(xp, sizes), place(xp, sizes)

        def ask(store: Store) -> tuple[Array, ...]:
            """(whether it answers, ms, spread, distance, half the log width of the interval) of every query."""
            log, spread = committee(xp, families_at(store, sizes, self.families))
            far = outside(xp, store.box, at)
            far = xp.where(far > EDGE, far, 0.0)
            ms = xp.exp(log + fading(xp, far) * store.refinement(xp, z))
            half = store.quantile * xp.hypot(NOISE_FLOOR, spread) + xp.where(far > 0, 2.0 * spread, 0.0)
            answers = store.ready & xp.isfinite(ms)
            if self.draft:
                answers = answers & (sizes.decode <= self.anchor * store.largest)
            return answers, xp.maximum(ms, FLOOR_MS), spread, far, half

        asks = np.array([i for i, name in enumerate(self.kinds) if not self._never(name, asked)], int)
        stores: Store = jax.tree.map(lambda x: x[asks], self.stores)
        answers, *each = jax.lax.map(ask, stores)  # one after another: one compiled body, one set of temporaries
        found = [xp.full(busy.shape, np.nan)] * len(each)
        count = xp.zeros(busy.shape, np.int64)
        for j, i in enumerate(asks):
            mine = answers[j] & (kind == KINDS.index(self.kinds[i]))
            found = [xp.where(mine, x[j], y) for x, y in zip(each, found, strict=True)]
            count = xp.where(mine, stores.calibrated[j], count)
        ms, spread, distance, half = found
        status = xp.where(busy, xp.where(xp.isnan(ms), NOT_READY, OK), IDLE)
        fine = refusal == OK
        ms = xp.where(fine, xp.where(busy, ms, 0.0), np.nan)
        answered = fine & busy
        spread, distance, half = (xp.where(answered & ~xp.isnan(ms), x, np.nan) for x in (spread, distance, half))
        alone = len(self.families) == 1  # nobody says how wrong one family may be where nothing was observed
        half = xp.where(xp.isinf(half) | ((distance > 0) & alone), np.nan, half)
        interval = Interval(ms * xp.exp(-half), ms * xp.exp(half), xp.where(answered, count, 0), self.level)
        rank = xp.full(busy.shape, np.int32(-1))
        return Estimate(ms, xp.where(fine, status, refusal), rank, interval=interval, support=Support(distance, spread))

    def _never(self, kind: str, work: Work) -> bool:
        """Whether work statically has none of this kind."""
        lacks_prefill, lacks_decode = work.prefill_tokens is None, work.decode_requests is None
        return (lacks_prefill and kind != "pure_decode") or (lacks_decode and kind != "pure_prefill")

    def explain(self, reason: Status, work: Work) -> str:
        """Why one iteration (fields [r]) has no answer."""
        asked, _ = askable(np, work)
        kind = KINDS[int(iteration_features(np, asked).kind)]
        i = self.kinds.index(kind)
        rows, largest = int(self.stores.rows[i]), int(self.stores.largest[i])
        if not self.stores.ready[i]:
            return (
                f"{reason.sentence}: {rows} observations of {kind} are not enough, or too much alike\n"
                f"hint: a fit takes at least {LEAST_ROWS}, with {varied(kind)}"
            )
        batch = int(sizes_of(np, asked, self.graph_sizes).decode)
        return (
            f"{reason.sentence}: {batch} decode rows a rank, but at most {largest} were learned\n"
            f"hint: observe a batch of at least {-(-batch // int(ANCHOR))} (fpmjax.recommend_anchors names few "
            "points), or fit with allow_extrapolation"
        )

    def malformed(self, work: Work) -> tuple[str, str]:
        """(code, message) for one iteration of valid counts that this model cannot take."""
        return "role", wrong_role(self.role)

    def _padded(self, room: int) -> Learned:
        return replace(self, stores=pad_store(self.stores, room))

    def __repr__(self) -> str:
        return f"Learned(role={self.role!r}, families={self.families})"


def seed_of(key: Any) -> tuple[int, ...]:
    """What seeds the draws: the words of an int, or of a jax key of either style; OptionError `key`."""
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return divmod(int(key) % 2**64, 2**32)  # those of jax.random.key
    if isinstance(key, (jax.Array, np.ndarray)) and not isinstance(key, Tracer):
        words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
        if words.dtype == np.uint32 and words.ndim == 1 and words.size:
            return tuple(np.asarray(words).tolist())
    raise OptionError(f"key is {key!r}\nhint: give one int, or one key such as jax.random.key(0)", code="key")


def check_options(role: Any, family: Any, hardware: Sequence[Any], level: Any, allow: Any) -> None:
    def require(holds: Any, name: str, value: Any, words: str) -> None:
        if not holds:
            raise OptionError(f"{name} is {value!r}\nhint: give {words}", code=name)

    require(isinstance(role, str) and role in ROLES, "role", role, f"one of {', '.join(ROLES)}")
    require(isinstance(family, str) and family in COMMITTEES, "family", family, f"one of {', '.join(COMMITTEES)}")
    for one in hardware:
        require(one is None or isinstance(one, Hardware), "hardware", one, "fpmjax.Hardware(...) of one rank")
    alike = len({one is None for one in hardware}) == 1
    require(alike, "hardware", "given for some deployments", "that of every deployment, or of none")
    sound = isinstance(level, (float, np.floating)) and 0.0 < level < 1.0
    require(sound, "level", level, "a share between 0 and 1, such as 0.9")
    require(isinstance(allow, (bool, np.bool_)), "allow_extrapolation", allow, "True or False")
