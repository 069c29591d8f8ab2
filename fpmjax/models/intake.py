"""From observations to the rows that stores learn: checked as a whole, on the host, before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log1p
from typing import Any, NamedTuple

import jax
import numpy as np

from fpmjax.errors import MetricsError, OptionError
from fpmjax.guard import check_concrete, check_work
from fpmjax.iteration import askable, shape_of
from fpmjax.metrics import refuse
from fpmjax.observe.features import KINDS, ROLES, breaks_role, iteration_features, lacks_lists, need_lists, project
from fpmjax.observe.observations import MIXED, Observations
from fpmjax.observe.record import CLOCK_SECONDS, UNSPECIFIED
from fpmjax.work import COUNTS, Array

PART = 1 << 16  # iterations whose features are made at once

NO_LISTS = (
    "selected request features require extend_lengths and past_kv_lengths on every active rank\n"
    "hint: have the engine list its requests, or select axes of totals: attention, moe, n, logN, n2"
)


class Rows(NamedTuple):
    """What stores learn: store int64 [n], x float64 [n, axes], z [n, sampling axes], y [n] ms."""

    store: Array
    x: Array
    z: Array
    y: Array

    def of(self, chosen: Array) -> Rows:
        return Rows(*(a[chosen] for a in self))


def wrong_role(role: str) -> str:
    """The message about work that a worker of this role does not do."""
    other = {"prefill": "decode", "decode": "prefill"}[role]
    return (
        f"a {role} worker's regression received scheduled {other} work\n"
        f'hint: route each worker\'s iterations to a model of its own, or use role="aggregated"'
    )


def check_observations(observations: Any, model: Any = None) -> None:
    """Raise MetricsError `payload` for what is none or does not fit together, FpmError `traced` inside jit.

    model: what shall learn them; inside jit it cannot either.
    """
    hint = "Observations.of(work, wall_ms), .from_metrics, .read, or read_trace"
    if not isinstance(observations, Observations):
        refuse("payload", f"update takes Observations, not a {type(observations).__name__}", hint)
    check_concrete((observations, model), "update", "update outside of jit; it compiles for itself")
    check_work(observations.work, "Observations")
    shape = shape_of({name: getattr(observations.work, name) for name in COUNTS})[:-1]
    wall, dtype = observations.wall_ms, getattr(observations.wall_ms, "dtype", None)
    if len(shape) != 1 or np.shape(wall) != shape or dtype is None or np.dtype(dtype).kind not in "iuf":
        said = f"{type(wall).__name__ if dtype is None else dtype} of shape {np.shape(wall)}"
        refuse("payload", f"wall_ms is {said} beside work of batch shape {shape}", hint)


def joined_timing(timing: str, more: str) -> str:
    """The clock of a model of this clock that learns from observations of another one; OptionError `timing`.

    "unspecified" goes with every clock and takes its name.  "mixed" is somebody's explicit permission: it goes with
    every clock too, and whatever has learned from it stays mixed.  Two named clocks do not go together.
    """
    clocks = {timing, more} - {UNSPECIFIED}
    if len(clocks) > 1 and MIXED not in clocks:
        raise OptionError(
            f"the model has learned from times of the clock {timing!r}, but these are of {more!r}\n"
            "hint: fit a model of each clock; where they are known to agree, give Observations of timing='mixed', as "
            "Observations.concat(parts, mixed_timing=True) and read_trace(path, mixed_timing=True) make them",
            code="timing",
        )
    return MIXED if len(clocks) > 1 else next(iter(clocks), UNSPECIFIED)


def is_duration(wall_ms: Array) -> Array:
    """bool [n]: whether a pass can have taken these milliseconds, float64 [n]; three years are a clock's reading."""
    return (wall_ms > 0) & (wall_ms < CLOCK_SECONDS * 1000.0)


@np.errstate(all="ignore")  # what overflows is no row
def rows_of(
    observations: Observations,
    role: str,
    feature_axes: Sequence[str],
    sampling_axes: Sequence[str],
    weights: Array,
    which: Array | None = None,
) -> Rows:
    """The observations as rows of the stores of one model, or of a stack of models.

    weights: float64 [3], or [models, 3] with `which`, int [n], the model that each observation is for.
    Raises MetricsError: `role`, `lists_needed`; the message names the first iteration.
    """
    kinds = np.array([ROLES[role].index(kind) if kind in ROLES[role] else -1 for kind in KINDS])
    found = []
    for start, part in parts(observations):
        asked, _ = askable(np, part.work)
        models = None if which is None else which[start : start + len(part)]
        scale = tuple(np.moveaxis(weights if models is None else weights[models], -1, 0))
        features = iteration_features(np, asked, scale)
        busy = features.kind >= 0
        refuse_first(start, breaks_role(np, asked, role).any(-1), "role", wrong_role, role)
        if need_lists((*feature_axes, *sampling_axes)):
            refuse_first(start, lacks_lists(np, asked).any(-1) & busy, "lists_needed", lambda: NO_LISTS)
        x = project(np, asked, features, feature_axes)
        z = project(np, asked, features, sampling_axes)
        # libm's log1p decides cells; NumPy's vectorised one may differ in the last bit.
        z = np.fromiter(map(log1p, z.ravel().tolist()), np.float64, z.size).reshape(z.shape)
        y = np.asarray(part.wall_ms, np.float64)
        store = kinds[features.kind] + (0 if models is None else len(ROLES[role]) * models)
        kept = busy & np.isfinite(x).all(-1) & np.isfinite(z).all(-1) & is_duration(y)
        found.append(Rows(store, x, z, y).of(kept))
    return Rows(*(np.concatenate(column) for column in zip(*found, strict=True)))


def parts(observations: Observations) -> Iterator[tuple[int, Observations]]:
    """(first iteration, slice) of at most `PART` iterations, NumPy arrays."""
    whole: Observations = jax.tree.map(np.asarray, observations)
    for start in range(0, max(len(whole), 1), PART):
        yield start, whole[start : start + PART]


def refuse_first(start: int, bad: Array, code: str, message: Any, *args: Any) -> None:
    """MetricsError about the first iteration where `bad`, if any."""
    if bad.any():
        raise MetricsError(f"observation {start + int(bad.argmax())}: {message(*args)}", code=code)
