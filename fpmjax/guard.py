"""What may stand where a model, work or observations are asked for; everything else is refused by name."""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from fpmjax.errors import FpmError, MetricsError
from fpmjax.work import COUNTS, Work

# A leaf of each kind of model that is a scalar, unless several models are stacked as one.
SCALARS = ("decode.rows", "rules.min_observations", "min_observations", "warmup", "anchor")


def is_model(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "composition") and hasattr(value, "execution")


def is_stacked(model: Any) -> bool:
    """Whether this is a stack of models, or a correction of one; inside `jax.vmap` it is one of them."""
    for name in SCALARS:
        try:
            if np.ndim(operator.attrgetter(name)(model)):
                return True
        except AttributeError:
            continue
    return hasattr(model, "model") and is_stacked(model.model)


def check_one_model(model: Any, who: str) -> None:
    """Raise FpmError `stacked` for a stack; who: what takes one model at a time."""
    if is_stacked(model):
        raise FpmError(
            f"{who} is for one model, but this {type(model).__name__} is a stack of several\n"
            "hint: jax.vmap(lambda model, work: model(work))(stack, work) inside fpmjax.x64() asks each, update_many "
            "teaches each, jax.tree.map(lambda x: x[i], stack) is the i-th one",
            code="stacked",
        )


def check_work(work: Any, who: str) -> None:
    """Raise MetricsError `payload` for what is no `Work`, `no_ranks` for an empty rank axis."""
    if not isinstance(work, Work):
        raise MetricsError(
            f"{who} takes Work, not a {type(work).__name__}\n"
            "hint: Work.decode(requests, kv_tokens), or Work.from_metrics for a dict of engine metrics",
            code="payload",
        )
    if any(np.shape(getattr(work, name))[-1:] == (0,) for name in COUNTS):
        raise MetricsError("the rank axis is empty\nhint: an idle rank is a row of zeros", code="no_ranks")


def is_traced(tree: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def check_concrete(tree: Any, who: str, hint: str) -> None:
    """Raise FpmError `traced` where a leaf is a tracer of jax; who: what works on the host."""
    if is_traced(tree):
        raise FpmError(f"{who} works on the host and cannot be traced\nhint: {hint}", code="traced")
