"""From ForwardPassMetrics with wall times to the next model: all of them or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fpmjax.errors import OptionError
from fpmjax.estimate import estimate
from fpmjax.metrics import read_json as decode_json
from fpmjax.metrics import refuse
from fpmjax.models.corrected import Corrected
from fpmjax.models.intake import wrong_role
from fpmjax.models.regression import Regression
from fpmjax.observe.observations import Observations
from fpmjax.observe.observations import _nested as nested
from fpmjax.observe.observations import _parse_each as parse_each
from fpmjax.status import Status


def learn(model: Any, iterations: Any) -> Any:
    """The model after these iterations; whatever is wrong with one of them, none is learned."""
    if not hasattr(model, "update"):
        raise OptionError(
            f"a {type(model).__name__} model does not learn\n"
            "hint: wrap it, fpmjax.corrected(model), or build it with best_available",
            code="unsupported_estimator",
        )
    if isinstance(iterations, (str, bytes, bytearray)):
        iterations = decode_json(iterations)
    elif isinstance(iterations, Iterable) and not isinstance(iterations, Mapping):
        iterations = list(iterations)  # read twice below
    observed = Observations.from_metrics(iterations)
    if isinstance(model, Regression) and (observed.report["no_wall_time"] or observed.report["overflow"]):
        check_role(model.role, iterations)  # what teaches nothing still has to be this worker's work
    if not len(observed):
        return model
    if isinstance(model, Corrected):
        native = estimate(model.model, observed.work, check=False)
        if ((native.status > Status.IDLE) & (native.status != Status.NOT_READY)).any():
            estimate(model.model, observed.work)  # raises: there is nothing to compare with, and never will be
    return model.update(observed)


def check_role(role: str, iterations: Any) -> None:
    other = {"prefill": "decode_requests", "decode": "prefill_tokens"}.get(role)
    for i, ranks in enumerate(parse_each(nested(iterations)) if other else []):
        if any(getattr(rank, other or "") for rank in ranks):
            what, hint = wrong_role(role).split("\nhint: ")
            refuse("role", f"iterations[{i}]: {what}", hint)
