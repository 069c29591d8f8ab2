"""Whether arrays that come from elsewhere make up a model.

They are compared with those of a new model, and their numbers with the ranges of `fpmjax.ranges`; nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fpmjax.errors import FpmError, first_line
from fpmjax.guard import is_stacked
from fpmjax.lookup.bounds import check_tables
from fpmjax.models.chosen import Chosen, chosen
from fpmjax.models.committee import FAMILIES, Store
from fpmjax.models.corrected import HYBRID, Corrected, corrected
from fpmjax.models.direct import Direct
from fpmjax.models.forest import Forest, check_forest
from fpmjax.models.intervals import WithIntervals, widths
from fpmjax.models.learned import Learned, pad_store
from fpmjax.models.regression import Regression, regression
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.observe.features import ROLES
from fpmjax.observe.record import UNSPECIFIED
from fpmjax.ranges import (
    CHOSEN,
    COMMITTEE,
    INTERVALS,
    UnfitError,
    check_corrections,
    check_learners,
    check_ranges,
)
from fpmjax.tables.cell import Cell


def fault_of(model: Any) -> str | None:
    """What is wrong with the arrays of a model, or of a stack of models; None: nothing."""
    try:
        with np.errstate(all="ignore"):
            check(model)
    except FpmError as error:
        return str(error).split("\nhint: ")[0]
    except Exception as error:  # whatever NumPy and jax raise for arrays that do not fit
        return first_line(error, None)
    return None


def check(model: Any) -> None:
    timing = getattr(model, "timing", UNSPECIFIED)
    if not isinstance(timing, str) or not timing:
        raise UnfitError(f"its clock is {timing!r}")
    if isinstance(model, Direct):
        if not isinstance(model.cell, Cell | None):
            raise UnfitError(f"its cell is a {type(model.cell).__name__}")
        check_tables(model.decode, model.prefill)
    elif isinstance(model, Regression):
        alike(model, new_regression_like(model), np.shape(model.learners.accepted)[:-1])
        check_learners(model.learners, model.rules, model.weights)
    elif isinstance(model, Learned):
        alike(model, new_learned_like(model), np.shape(model.anchor))
        low, high = np.moveaxis(np.asarray(model.stores.box), -2, 0)
        ladder = np.asarray([1] if model.graph_sizes is None else model.graph_sizes)
        if (low > high).any() or not ladder.size or ladder.min() < 1 or (np.diff(ladder) <= 0).any():
            raise UnfitError("its training box or its graph sizes are out of order")
        if type(model.draft) is not bool:
            raise UnfitError(f"its draft is {model.draft!r}")
        check_ranges(model.stores, COMMITTEE, "stores.")
        if not np.all(np.asarray(model.anchor) > 0):
            raise UnfitError("its anchor is not above zero")
    elif isinstance(model, Forest):
        check_forest(model)
    elif isinstance(model, Corrected):
        check(model.model)
        alike(model, new_corrected_like(model), np.shape(model.min_observations))
        check_corrections(model)
    elif isinstance(model, Chosen):
        check(model.stable)
        check(model.challenger)
        new, nobody = chosen(*map(first_of, model.experts)), {"stable": None, "challenger": None}
        alike(replace(model, **nobody), replace(new, timing=model.timing, **nobody), np.shape(model.warmup))
        check_ranges(model, CHOSEN)
    elif isinstance(model, WithIntervals):
        if not isinstance(model.model, Direct) or not isinstance(model.level, float) or not 0 < model.level < 1:
            raise UnfitError(f"its intervals are around a {type(model.model).__name__}, level {model.level}")
        check(model.model)
        alike(replace(model, model=None), WithIntervals(None, *widths(), model.level), np.shape(model.count)[:-2])
        check_ranges(model, INTERVALS)


def new_regression_like(model: Regression) -> Regression:
    """A regression without observations of the same sizes."""
    slots, ring, spline = np.shape(model.learners.y)[-1], np.shape(model.learners.missed)[-1], model.learners.spline
    new = regression(
        role=model.role,
        feature_axes=model.feature_axes,
        sampling_axes=model.sampling_axes,
        bins_per_axis=(1,) * len(model.sampling_axes),
        max_observations=slots,
        min_observations=1,
        lazy=ErrorThreshold(0.0, 0.0, ring, 1, 1) if ring and spline is None else None,
        spline=None if spline is None else Knots(np.shape(spline.knots)[-1], window=ring, trigger=1),
    )
    return replace(new, timing=model.timing)


def new_learned_like(model: Learned) -> Learned:
    """A learned model of the same sizes that has seen nothing."""
    if not set(model.families) <= FAMILIES.keys() or not 0 < model.level < 1:
        raise UnfitError(f"its families are {model.families}, its level is {model.level}")
    store = pad_store(Store.empty(len(model.families)), np.shape(model.stores.refinement.weights)[-1])
    stores = jax.tree.map(lambda x: np.stack([x] * len(ROLES[model.role])), store)
    sizes = None if model.graph_sizes is None else np.zeros(np.shape(model.graph_sizes)[-1], np.int64)
    return replace(model, stores=stores, anchor=np.zeros(()), graph_sizes=sizes)


def new_corrected_like(model: Corrected) -> Corrected:
    """A correction of the same model without observations, of the same sizes."""
    stores = (*(model.fixed or ()), *(model.local or ()))
    slots = np.shape(stores[0].ratio)[-1] if stores else model.room
    new = corrected(
        first_of(model.model),
        policy=model.policy or HYBRID,
        bins=(model.room, 1),
        max_observations=slots,
        min_observations=1,
        enabled=bool(stores),
    )
    return replace(new, timing=model.timing)


def first_of(model: Any) -> Any:
    """The model, or the first one of a stack."""
    while is_stacked(model):
        model = jax.tree.map(lambda x: np.asarray(x)[0], model)
    return model


def alike(model: Any, new: Any, stack: tuple[int, ...]) -> None:
    """Raise unless both have the same fields, options, shapes behind the axes of `stack`, and types."""
    if jax.tree.structure(model) != jax.tree.structure(new):
        raise UnfitError("its fields and options do not go together")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(new), strict=True):
        found, want = (np.shape(x), np.asarray(x).dtype), ((*stack, *np.shape(y)), np.asarray(y).dtype)
        if found != want and path[0] != jax.tree_util.GetAttrKey("model"):
            name = jax.tree_util.keystr(path)
            raise UnfitError(f"{name} is {found[1]} of shape {found[0]} instead of {want[1]} of shape {want[0]}")
