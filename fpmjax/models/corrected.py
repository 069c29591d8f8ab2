"""`corrected`: any model, its answers multiplied by what observations say about them.

    latency = native latency * factor(kind and size of the work)

The native model is never changed; the factor is looked up, not fitted through.  `fpmjax.observe.ratios` says how an
iteration is placed and what the stores keep.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64, x64
from fpmjax.answer import Correction, Estimate
from fpmjax.errors import FpmError, OptionError
from fpmjax.estimate import estimate
from fpmjax.guard import check_one_model, check_work, is_model, is_stacked, is_traced
from fpmjax.iteration import OK
from fpmjax.metrics import show
from fpmjax.models.around import Around
from fpmjax.models.intake import check_observations, is_duration, joined_timing
from fpmjax.observe.observations import Observations
from fpmjax.observe.ratios import KINDS, NO_CELLS, NONE, Boxes, Fixed, Local, boxes_for, place
from fpmjax.observe.record import UNSPECIFIED
from fpmjax.observe.retain import CELL_LIMIT, repeat
from fpmjax.speculative import for_draft
from fpmjax.work import Array, Work

MOST_OBSERVATIONS = 2**20  # rows kept per store; more says nothing about an engine as it is now
LARGEST_BOX = 2**45  # beyond what the ranks of any engine can count together
FEW = 64  # rows up to which a plain loop beats dispatching compiled code
CHUNK = 1 << 12  # rows of one compiled update; the last chunk is padded, the padding is not run through
FIXED, LOCAL, HYBRID = POLICIES = ("fixed", "dynamic_local", "hybrid")


def corrected(
    model: Any,
    observations: Observations | None = None,
    *,
    policy: str = FIXED,
    min_observations: int = 5,
    bins: tuple[int, int] = (4, 4),
    max_observations: int = 64,
    factor_bounds: tuple[float | None, float | None] = (0.5, 2.0),
    max_num_tokens: int = 8192,
    max_batch_size: int = 512,
    max_kv_tokens: int = 2_000_000,
    enabled: bool = True,
) -> Corrected:
    """The model, corrected by what was observed so far; `update` adds to it.

    policy: where factors come from; each kind of work (prefill, decode, mixed) has stores of its own.
        "fixed": the median ratio of a cell of a grid over the box that the three `max_...` sizes span; 1 in empty
        cells, outside the box, and before the kind has `min_observations`.
        "dynamic_local": a grid that grows with what is seen, its medians shrunk toward the median of the newest
        ratios, which holds everywhere else.
        "hybrid": fixed inside the box, dynamic_local outside.
        A draft length d looks up the factor of the pass that it makes, whose batch is d + 1 times as large: size the
        box of "fixed" for that, or its factor is 1.
    bins: cells of a grid per axis; prefill has one axis with their product.
    max_observations: rows that a store keeps.
    factor_bounds: observed over native is clipped to them before it is stored; None: unbounded on that side.
    enabled: False stores nothing, and every factor is 1.

    The correction remembers the clock of its observations, beginning with the one that the model was fitted to, and
    takes no other.  A table does not say which clock it was measured with, but for what its measurement policy
    implies: whether the two measure the same is for the caller to know, and the factors hold their quotient.

    Raises OptionError (code: the option) for a value outside its range, FpmError (`not_a_model`, `stacked`) for what
    is no single model.
    """
    if not is_model(model):
        raise FpmError(
            f"corrected takes a model, not a {type(model).__name__}\nhint: e.g. corrected(direct(cell), observations)",
            code="not_a_model",
        )
    check_one_model(model, "corrected")
    check_options(policy, min_observations, bins, max_observations, factor_bounds)
    require(isinstance(enabled, (bool, np.bool_)), "enabled", enabled, "True or False")
    sizes = {"max_num_tokens": max_num_tokens, "max_batch_size": max_batch_size, "max_kv_tokens": max_kv_tokens}
    for name, size in sizes.items():
        require(is_count(size) and size <= LARGEST_BOX, name, size, f"an integer of 1 to {LARGEST_BOX:,}")
    line, plane = (math.prod(bins), 1), (int(bins[0]), int(bins[1]))
    boxes = (max_num_tokens, 0), (max_batch_size, max_kv_tokens), (max_num_tokens, max_kv_tokens)
    grids = tuple(zip((line, plane, plane), boxes, strict=True))
    fixed = tuple(Fixed.empty(b, max_observations, box) for b, box in grids)
    local = tuple(Local.empty(b, max_observations, min_observations) for b, _ in grids)
    low, high = factor_bounds
    empty = Corrected(
        model,
        fixed if enabled and policy != LOCAL else None,
        local if enabled and policy != FIXED else None,
        Boxes.of([[]] * len(KINDS), [1.0] * len(KINDS)),
        np.asarray((low or 0.0, math.inf if high is None else high), np.float64),
        np.asarray(min_observations, np.int64),
        boxes_for(plane, max_observations),
        getattr(model, "timing", UNSPECIFIED),
    )
    empty = empty._tabulated()
    return empty if observations is None else empty.update(observations)


@pytree("room", "timing")
class Corrected(Around):
    """Model around another one, which it never changes.

    fixed, local:     a store per kind of work, or None where the policy has none of them.
    boxes:            the factors, as queries read them.
    bounds:           float64 [2], bounds of a ratio.
    min_observations: int64 [], rows before a store is heard.
    room:             cells that a store can occupy.
    timing:           the clock of what was observed, "unspecified" as long as nothing named one.
    """

    model: Any
    fixed: tuple[Fixed, ...] | None
    local: tuple[Local, ...] | None
    boxes: Boxes
    bounds: Array
    min_observations: Array
    room: int
    timing: str = UNSPECIFIED

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: the native estimate, multiplied; `Estimate.correction` shows both."""
        require_x64()
        check_work(work, "a model")
        check_one_model(self, "a call")
        return self._correct(jnp, work, self.model(work, evidence=evidence))

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries: the same bits and no compile, where the native model needs none."""
        check_work(work, "a model")
        ask: Any = getattr(self.model, "on_host", None) or partial(estimate, self.model, check=False)
        return self._correct(np, work, ask(work, evidence=evidence))

    def _correct(self, xp: Any, work: Work, native: Estimate) -> Estimate:
        factor = xp.where(native.status == OK, self.boxes.look_up(xp, work), 1.0)
        correction = Correction(native.latency_ms, factor)
        latency_ms, interval = native.latency_ms * factor, native.scaled(factor)
        return replace(native, latency_ms=latency_ms, correction=correction, interval=interval)

    def update(self, observations: Observations) -> Corrected:
        """The model after these observations, in their order; this one stays as it is.

        The native model is asked once for all of them.  Left out, and counted in `.report`: what it does not answer
        with a time above zero (refused, not ready, not its role), wall times that no pass can have taken, and under
        "fixed" what lies outside the box.

        Raises MetricsError `payload` for what is no observations, OptionError `timing` for those of another clock,
        FpmError (`stacked`, `traced`).
        """
        check_one_model(self, "update")
        check_observations(observations, self)
        timing = joined_timing(self.timing, observations.timing)
        work, wall_ms = observations.work, np.asarray(observations.wall_ms, np.float64)
        native: Any = estimate(self.model, work, check=False)
        kind, *xy = place(np, jax.tree.map(np.asarray, work))
        at = np.stack(xy, -1).astype(np.float64)
        scaled = np.log1p(at)
        with np.errstate(all="ignore"):
            ratio = np.clip(wall_ms / native.latency_ms, *np.asarray(self.bounds))
            usable = is_duration(wall_ms) & (ratio > 0) & np.isfinite(ratio)
            answered = (native.status == OK) & (native.latency_ms > 0) & (kind != NONE) & usable
        fixed, local = jax.tree.map(np.asarray, (self.fixed, self.local))
        taken = np.zeros(len(wall_ms), bool)
        for k in range(len(KINDS)):
            mine = answered & (kind == k)
            if fixed is not None:
                inside = mine & fixed[k].holds(at)
                fixed = put(fixed, k, fill(fixed[k], at[inside], ratio[inside]))
                taken |= inside
            if local is not None:
                local = put(local, k, fill(local[k], scaled[mine], ratio[mine]))
                taken |= mine
        after = replace(self, fixed=fixed, local=local, timing=timing)
        after = after._tabulated() if taken.any() else after
        report = {
            "observations": len(wall_ms),
            "taken": int(taken.sum()),
            "no_native_answer": int((~answered).sum()),
            "outside_box": int((answered & ~taken).sum()) if self.enabled else 0,
        }
        object.__setattr__(after, "_report", report)
        return after

    def _tabulated(self) -> Corrected:
        """With the boxes of its stores."""
        enough = int(self.min_observations)
        kinds, otherwise = [], [1.0] * len(KINDS)
        for k in range(len(KINDS)):
            layers = []
            if self.fixed is not None:
                layers.append((self.fixed[k].cells(enough), self.room))
                if self.local is not None:
                    layers.append((self.fixed[k].whole(), 1))
            if self.local is not None:
                layers.append((self.local[k].cells(enough), self.room))
                otherwise[k] = self.local[k].general(enough) or 1.0
            kinds.append(layers)
        return replace(self, boxes=Boxes.of(kinds, otherwise))

    # What the stores hold, on the host

    @property
    def enabled(self) -> bool:
        return self.fixed is not None or self.local is not None

    @property
    def policy(self) -> str | None:
        """One of `POLICIES`; None where the correction is not enabled."""
        names = {(True, False): FIXED, (False, True): LOCAL, (True, True): HYBRID}
        return names.get((self.fixed is not None, self.local is not None))

    @property
    def report(self) -> Mapping[str, int]:
        """What the last update took and left out; empty on transformed copies."""
        return self.__dict__.get("_report", {})

    @property
    def retained(self) -> int:
        """Observations kept, over all stores."""
        return sum(store.retained for store in (*(self.fixed or ()), *(self.local or ())))

    @property
    def ready_buckets(self) -> int:
        """Occupied cells of the stores that are heard."""
        return len(self._cell_factors())

    @property
    def factors(self) -> np.ndarray:
        """float64: the factor of every such cell, and the general one of every dynamic store; empty: none yet."""
        check_one_model(self, "factors")
        general = [store.general(int(self.min_observations)) for store in self.local or ()]
        return np.array([*(g for g in general if g is not None), *self._cell_factors()])

    def _cell_factors(self) -> np.ndarray:
        enough = int(self.min_observations)
        stores = (*(self.fixed or ()), *(self.local or ()))
        return np.concatenate([NO_CELLS.factor, *(store.cells(enough).factor for store in stores)])

    @property
    def for_draft(self) -> Corrected:
        return replace(self, model=for_draft(self.model))

    @property
    def malformed(self) -> Callable[..., Any]:
        return self.model.malformed

    def __repr__(self) -> str:
        shown = f"Corrected({type(self.model).__name__}, policy={self.policy!r}"
        if is_stacked(self):
            return f"{shown}, {np.size(self.min_observations)} models)"
        return f"{shown})" if is_traced(self) else f"{shown}, {self.retained} retained)"


def put(stores: Any, k: int, store: Any) -> tuple[Any, ...]:
    return (*stores[:k], store, *stores[k + 1 :])


def fill(store: Any, at: np.ndarray, ratio: np.ndarray) -> Any:
    """The store (NumPy arrays) with these rows filed one after another."""
    if len(ratio) <= FEW:
        return filed(np, store, at, ratio, len(ratio))
    with x64():
        for start in range(0, len(ratio), CHUNK):
            rows = at[start : start + CHUNK], ratio[start : start + CHUNK]
            padded = [np.pad(x, [(0, CHUNK - len(x)), *[(0, 0)] * (x.ndim - 1)]) for x in rows]
            store = filed_in_bulk(store, *padded, np.int64(len(rows[1])))
    return jax.tree.map(np.asarray, store)


def filed(xp: Any, store: Any, at: Array, ratio: Array, count: Any) -> Any:
    return repeat(xp, count, lambda i, s: s.file(xp, at[i], ratio[i]), store)


filed_in_bulk = jax.jit(partial(filed, jnp))


def check_options(policy: Any, min_observations: Any, bins: Any, max_observations: Any, factor_bounds: Any) -> None:
    require(policy in POLICIES, "policy", policy, f"one of {', '.join(POLICIES)}")
    require(is_count(min_observations), "min_observations", min_observations, "an integer of at least 1")
    bounded = is_count(max_observations) and max_observations <= MOST_OBSERVATIONS
    require(bounded, "max_observations", max_observations, f"an integer of 1 to {MOST_OBSERVATIONS:,}")
    enough = f"at most max_observations, which is {max_observations}"
    require(min_observations <= max_observations, "min_observations", min_observations, enough)
    pair = isinstance(bins, (tuple, list)) and len(bins) == 2 and all(map(is_count, bins))
    require(pair and math.prod(bins) < CELL_LIMIT, "bins", bins, f"two counts with a product below {CELL_LIMIT}")
    two = isinstance(factor_bounds, (tuple, list)) and len(factor_bounds) == 2
    low, high = factor_bounds if two else (math.nan, math.nan)
    sound = (low is None or (is_number(low) and 0 < low <= 1)) and (high is None or (is_number(high) and high >= 1))
    words = "a pair (in (0, 1] or None, at least 1 and finite or None)"
    require(two and sound, "factor_bounds", factor_bounds, words)


def is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_number(value: Any) -> bool:
    """A finite real number that a float64 holds; integers beyond it are none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def require(holds: bool, name: str, value: Any, words: str) -> None:
    if not holds:
        what = f"{name} is {show(value)}, but it has to be {words}"
        raise OptionError(f"{what}\nhint: leave it out for the usual value", code=name)
