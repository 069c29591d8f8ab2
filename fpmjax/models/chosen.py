"""`chosen`: of two models the one that has lately been nearer to what was observed, for each kind of work.

The rule of the peer's causal selector.  Both experts predict an observation before it is admitted, and for its kind
of work each keeps a moving error

    x = |predicted - observed| / observed        error = x at first, then alpha x + (1 - alpha) error

Once a kind has `warmup` observations, every one of them at which challenger < (1 - margin) incumbent, strictly, adds
to a streak and every other one ends it; at `persistence` the two change places and the streak begins again.  The
incumbent is the expert that answers; at first that is the stable one.

The peer counts by store and by type of query (prefill, decode, mixed).  Its stores are the kinds of work, and a kind
has one type, so both are the one index used here: `fpmjax.observe.features.KINDS`.

An observation that either expert has no number for scores neither: errors of different observations would be compared.
Nor does the other expert step in where the one that answers refuses: what comes back is always the chosen one's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Correction, Estimate, Interval, Support
from fpmjax.errors import FpmError, MetricsError, OptionError
from fpmjax.estimate import estimate
from fpmjax.guard import check_concrete, check_one_model, check_work, is_model, is_stacked, is_traced
from fpmjax.iteration import OK, askable
from fpmjax.metrics import show
from fpmjax.models.intake import check_observations, is_duration, joined_timing
from fpmjax.observe.features import KINDS, iteration_features
from fpmjax.observe.observations import Observations
from fpmjax.observe.record import UNSPECIFIED
from fpmjax.refusal import HINTS, describe, explained
from fpmjax.speculative import for_draft
from fpmjax.status import Status
from fpmjax.work import Array, Work

STABLE, CHALLENGER = 0, 1
NAMES = ("stable", "challenger")


def chosen(
    stable: Any,
    challenger: Any,
    observations: Observations | None = None,
    *,
    alpha: float = 0.4,
    margin: float = 0.05,
    warmup: int = 5,
    persistence: int = 1,
) -> Chosen:
    """Both models as one, and which of them answers as the observations so far decide; `update` adds to them.

    alpha: weight of the newest error, in (0, 1].
    margin: by how much the challenger has to be better, in [0, 1).
    warmup: observations of a kind before its expert can change; persistence: such ones in a row for a change.

    Raises FpmError (`not_a_model`, `stacked`), OptionError for a value outside its range, and where the two do not
    answer the same question: `composition`, `execution`, `verify_width`, `timing` (they learned from different clocks).
    """
    check_together(stable, challenger)
    for name, value, holds, words in (
        ("alpha", alpha, is_number(alpha) and 0 < alpha <= 1, "a number above 0, at most 1"),
        ("margin", margin, is_number(margin) and 0 <= margin < 1, "a number from 0, below 1"),
        ("warmup", warmup, is_count(warmup), "an integer of at least 1"),
        ("persistence", persistence, is_count(persistence), "an integer of at least 1"),
    ):
        if not holds:
            what = f"{name} is {show(value)}, but it has to be {words}"
            raise OptionError(f"{what}\nhint: leave it out for the usual value", code=name)
    nobody = np.zeros(len(KINDS), np.int64)
    model = Chosen(
        stable,
        challenger,
        np.full((len(NAMES), len(KINDS)), np.nan),
        nobody,
        nobody,
        nobody.astype(np.int8),
        np.asarray(alpha, np.float64),
        np.asarray(margin, np.float64),
        np.asarray(warmup, np.int64),
        np.asarray(persistence, np.int64),
        joined_timing(*(getattr(expert, "timing", UNSPECIFIED) for expert in (stable, challenger))),
    )
    return model if observations is None else model.update(observations)


def check_together(stable: Any, challenger: Any) -> None:
    """Raise unless these are two single models that answer the same question."""
    for name, model in zip(NAMES, (stable, challenger), strict=True):
        if not is_model(model):
            what = f"chosen takes two models, but {name} is a {type(model).__name__}"
            raise FpmError(f"{what}\nhint: e.g. chosen(direct(cell), regression(observations))", code="not_a_model")
        check_one_model(model, "chosen")
        if model.composition != "whole_forward":
            what = f"chosen compares times of whole passes, but {name} is a model of `{model.composition}`"
            raise OptionError(f"{what}\nhint: use tables, regressions or learned models", code="composition")
    for code, words in (("execution", "execution"), ("verify_width", "rows per request")):
        of = [getattr(model, code, 1) for model in (stable, challenger)]
        if of[0] != of[1]:
            what = f"the two models answer different questions: {words} {of[0]} and {of[1]}"
            raise OptionError(f"{what}\nhint: build both over the same kind of passes", code=code)


@pytree("timing")
class Chosen:
    """Two models, which it changes only where they learn, and who of them answers each of `KINDS`.

    error:  float64 [experts, kinds], moving relative errors; NaN before the first observation of a kind.
    count:  int64 [kinds], observations that scored both.
    streak: int64 [kinds], how many of the last ones the challenger won in a row.
    active: int8 [kinds], 0 where the stable expert answers, 1 where the other one does.
    alpha, margin: float64 []; warmup, persistence: int64 [].
    timing: the clock of what was observed, "unspecified" as long as nothing named one.
    """

    stable: Any
    challenger: Any
    error: Array
    count: Array
    streak: Array
    active: Array
    alpha: Array
    margin: Array
    warmup: Array
    persistence: Array
    timing: str = UNSPECIFIED

    composition = "whole_forward"

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: the estimate of the chosen expert, query by query; both are asked.

        What only one expert adds is NaN beside the answers of the other, a factor 1; parts are there where both have
        them.  Raises OptionError `level` where their intervals are of different levels.
        """
        require_x64()
        check_work(work, "a model")
        check_one_model(self, "a call")
        return self._merge(jnp, work, *(expert(work, evidence=evidence) for expert in self.experts))

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries: the same bits, and no compile where the experts need none."""
        check_work(work, "a model")
        asks: Any = [
            getattr(expert, "on_host", None) or partial(estimate, expert, check=False) for expert in self.experts
        ]
        return self._merge(np, work, *(ask(work, evidence=evidence) for ask in asks))

    def _merge(self, xp: Any, work: Work, a: Estimate, b: Estimate) -> Estimate:
        kind = iteration_features(xp, askable(xp, work)[0]).kind
        stable = (xp.asarray(self.active)[xp.maximum(kind, np.int8(0))] == STABLE) | (kind < 0)
        pick = partial(xp.where, stable)
        parts = correction = None
        if a.parts is not None and b.parts is not None:
            parts = jax.tree.map(partial(xp.where, stable[..., None]), a.parts, b.parts)
        if a.correction is not None or b.correction is not None:
            correction = Correction(pick(a.native_ms, b.native_ms), pick(a.factor, b.factor))
        return Estimate(
            pick(a.latency_ms, b.latency_ms),
            pick(a.status, b.status),
            pick(a.rank, b.rank),
            parts,
            correction,
            merge_intervals(xp, pick, a.interval, b.interval),
            merge_support(xp, pick, a.support, b.support),
        )

    def update(self, observations: Observations) -> Chosen:
        """The model after these observations, in their order; this one stays as it is.  All of them or, on error, none.

        An expert that learns is asked and taught one observation at a time, as a score is of what was not yet seen;
        one that does not is asked once for all of them.  Idle iterations, and wall times that no pass can have
        taken, neither score nor teach.

        Raises MetricsError `payload` for what is no observations, OptionError `timing` for those of another clock,
        FpmError (`stacked`, `traced`), and what the experts raise when they learn.
        """
        check_one_model(self, "update")
        check_observations(observations, self)
        timing = joined_timing(self.timing, observations.timing)
        whole: Observations = jax.tree.map(np.asarray, observations)
        kind = np.asarray(iteration_features(np, askable(np, whole.work)[0]).kind)
        wall_ms = whole.wall_ms.astype(np.float64)
        kept = np.flatnonzero((kind >= 0) & is_duration(wall_ms))
        learned, predicted = zip(*(predict(expert, whole, kept) for expert in self.experts), strict=True)
        with np.errstate(all="ignore"):
            errors = np.abs(np.stack(predicted) - wall_ms[kept]) / wall_ms[kept]
        scored = np.isfinite(errors).all(0)
        after = replace(self, stable=learned[STABLE], challenger=learned[CHALLENGER], timing=timing)
        return after._score(kind[kept][scored], errors[:, scored])

    def _score(self, kind: np.ndarray, errors: np.ndarray) -> Chosen:
        """The rule, in plain numbers: kind int [n], relative errors float64 [experts, n]."""
        state = self.error, self.count, self.streak, self.active
        error, count, streak, active = (np.asarray(x).tolist() for x in state)
        alpha, margin, warmup, persistence = map(float, (self.alpha, self.margin, self.warmup, self.persistence))
        for k, *pair in zip(kind.tolist(), *errors.tolist(), strict=True):
            for expert, x in enumerate(pair):
                error[expert][k] = alpha * x + (1.0 - alpha) * error[expert][k] if count[k] else x
            count[k] += 1
            if count[k] < warmup:
                continue
            better = error[1 - active[k]][k] < (1.0 - margin) * error[active[k]][k]
            streak[k] = streak[k] + 1 if better else 0
            if streak[k] >= persistence:
                active[k], streak[k] = 1 - active[k], 0
        return replace(
            self,
            error=np.array(error, np.float64),
            count=np.array(count, np.int64),
            streak=np.array(streak, np.int64),
            active=np.array(active, np.int8),
        )

    # On the host

    @property
    def experts(self) -> tuple[Any, Any]:
        return self.stable, self.challenger

    @property
    def diagnostics(self) -> tuple[dict[str, Any], ...]:
        """Per kind of work: active, stable_error and challenger_error (None: not scored), observations, streak."""
        check_one_model(self, "diagnostics")
        check_concrete(self, "diagnostics", "look at them outside of jit")
        shown = []
        for k, kind in enumerate(KINDS):
            row: dict[str, Any] = {"workload_kind": kind, "active": NAMES[int(self.active[k])]}
            for name, error in zip(NAMES, self.error[:, k].tolist(), strict=True):
                row[f"{name}_error"] = None if math.isnan(error) else error
            shown.append(row | {"observations": int(self.count[k]), "streak": int(self.streak[k])})
        return tuple(shown)

    @property
    def for_draft(self) -> Chosen:
        return replace(self, stable=for_draft(self.stable), challenger=for_draft(self.challenger))

    @property
    def ready(self) -> bool:
        """Whether an expert that is chosen for some kind is."""
        check_concrete(self, "ready", "inside jit look at the status of an answer")
        return any(bool(expert.ready) for i, expert in enumerate(self.experts) if (np.asarray(self.active) == i).any())

    @property
    def execution(self) -> str:
        return self.stable.execution

    @property
    def verify_width(self) -> int:
        return getattr(self.stable, "verify_width", 1)

    @property
    def reads(self) -> frozenset[str]:
        return frozenset().union(*(getattr(expert, "reads", ()) for expert in self.experts))

    @property
    def by_rank(self) -> bool:
        return all(getattr(expert, "by_rank", True) for expert in self.experts)

    def _for(self, work: Work) -> tuple[str, Any]:
        """(its name and the kind, the expert) that answers one iteration, fields [r]."""
        kind = int(iteration_features(np, askable(np, work)[0]).kind)
        i = int(self.active[kind]) if kind >= 0 else STABLE
        return f"the {NAMES[i]} model answers {KINDS[kind] if kind >= 0 else 'idle passes'}", self.experts[i]

    def explain(self, reason: Status, work: Work) -> str:
        """Why one iteration (fields [r]) has no answer: who is asked, and its own words."""
        who, expert = self._for(work)
        return f"{who}; {explained(expert, reason, work)}"

    def malformed(self, work: Work) -> tuple[str, str]:
        """(code, message) for one iteration of valid counts that the chosen expert cannot take."""
        who, expert = self._for(work)
        reason = Status.INVALID_WORK
        code, why = reason.code, f"{describe(reason, work, None)}\nhint: {HINTS[reason]}"
        if hasattr(expert, "malformed"):
            code, why = expert.malformed(work)
        return code, f"{who}; {why}"

    def __repr__(self) -> str:
        shown = f"Chosen({', '.join(type(expert).__name__ for expert in self.experts)}"
        if is_stacked(self):
            return f"{shown}, {np.size(self.warmup)} models)"
        return f"{shown})" if is_traced(self) else f"{shown}, {int(np.sum(self.count))} scored)"


def predict(expert: Any, observations: Observations, kept: np.ndarray) -> tuple[Any, np.ndarray]:
    """(the expert after the kept observations, its milliseconds before each, float64 [kept]; NaN: none above zero).

    Raises what the expert raises when it learns; a message about an observation names its position among all.
    """
    if not hasattr(expert, "update"):
        return expert, numbers_of(estimate(expert, jax.tree.map(lambda x: x[kept], observations.work), check=False))
    found = np.empty(kept.size)
    for n, i in enumerate(kept.tolist()):
        one = observations[i : i + 1]
        found[n] = numbers_of(estimate(expert, one.work, check=False))[0]
        try:
            expert = expert.update(one)
        except MetricsError as error:
            text = str(error).replace("observation 0:", f"observation {i}:", 1)
            raise MetricsError(text, code=error.code) from None
    return expert, found


def numbers_of(answer: Any) -> np.ndarray:
    """float64 [n]: milliseconds of what is answered, NaN elsewhere."""
    return np.where((answer.status == OK) & (answer.latency_ms > 0), answer.latency_ms, np.nan)


def merge_intervals(xp: Any, pick: Any, a: Interval | None, b: Interval | None) -> Interval | None:
    """The chosen one's; NaN and a count of 0 where it has none."""
    there = [x for x in (a, b) if x is not None]
    if not there:
        return None
    if there[0].level != there[-1].level:
        what = f"the intervals of the two models are of different levels, {there[0].level} and {there[1].level}"
        raise OptionError(f"{what}\nhint: build both with the same level", code="level")
    nan = xp.full(np.shape(there[0].count), np.nan)
    none = Interval(nan, nan, xp.full(nan.shape, np.int64(0)), there[0].level)
    return jax.tree.map(pick, *(none if x is None else x for x in (a, b)))


def merge_support(xp: Any, pick: Any, a: Support | None, b: Support | None) -> Support | None:
    """The chosen one's; NaN where it has none."""
    there = [x for x in (a, b) if x is not None]
    if not there:
        return None
    none = jax.tree.map(lambda x: xp.full(np.shape(x), np.nan), there[0])
    return jax.tree.map(pick, *(none if x is None else x for x in (a, b)))


def is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 1 <= int(value) < 2**63


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
