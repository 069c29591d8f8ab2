"""What a picture of a fit shows: the observations, the model's answers, and the same work at draft lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from fpmjax.errors import SpeculationError
from fpmjax.estimate import estimate
from fpmjax.evaluate import SIZES
from fpmjax.iteration import askable
from fpmjax.observe.features import KINDS, iteration_features
from fpmjax.observe.observations import Observations
from fpmjax.observe.sizes import BOX, coordinates, sizes_of
from fpmjax.status import Status
from fpmjax.work import Work

MOST = 4000  # observations that are drawn; of more, every so manieth
EDGE = 1e-6  # e-folds: what rounding may cost at the edge of the box
SUPPORTED, EXTRAPOLATED, REFUSED = range(3)
PURE_DECODE = KINDS.index("pure_decode")
Boxes = Mapping[int, tuple[np.ndarray, np.ndarray]]  # kind of work -> least and largest coordinates, float64 [6]


class Seen(NamedTuple):
    """What is drawn of n observations.

    work: [n, ranks].  position: int64 [n], in the order in which they were seen; later: bool [n], not learned.
    observed, predicted: float64 [n] ms; NaN where there is no answer.  inside: bool [n], the range holds it, and
    ranged: [n], there is one.  place: int [n], SUPPORTED, EXTRAPOLATED or REFUSED.
    at: float64 [n, 7], the coordinates of `observe.sizes.BOX`, in their units.  kind: int [n], of `KINDS`.
    batch, tokens: [n], as `evaluate` counts them.  boxes: of what the model learned.
    """

    work: Work
    position: np.ndarray
    later: np.ndarray
    observed: np.ndarray
    predicted: np.ndarray
    inside: np.ndarray
    ranged: np.ndarray
    place: np.ndarray
    at: np.ndarray
    kind: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    boxes: Boxes

    @property
    def answered(self) -> np.ndarray:
        return ~np.isnan(self.predicted)

    @property
    def residual(self) -> np.ndarray:
        """Per cent."""
        return 100.0 * (self.predicted - self.observed) / self.observed


class Asked(NamedTuple):
    """Queries of one draft length: at float64 [n, 7] as in `Seen`, place int [n]."""

    depth: int
    at: np.ndarray
    place: np.ndarray


def look(model: Any, observations: Observations, learned: int) -> Seen:
    """At most `MOST` observations, evenly spread, and the model's answers; it learned the first `learned` of all."""
    step = max(1, -(-len(observations) // MOST))
    position = np.arange(0, len(observations), step)
    work = jax.tree.map(lambda x: np.asarray(x)[position], observations.work)
    answer: Any = estimate(model, work, check=False)
    answered = np.asarray(answer.status) == Status.OK
    observed = np.asarray(observations.wall_ms, np.float64)[position]
    ranged = inside = np.zeros(len(position), bool)
    if answer.interval is not None:
        low, high = np.asarray(answer.interval.low_ms), np.asarray(answer.interval.high_ms)
        ranged, inside = answered & ~np.isnan(low), (low <= observed) & (observed <= high)
    asked, _ = askable(np, work)
    at, kind, later = coordinates_of(model, asked), np.asarray(iteration_features(np, asked).kind), position >= learned
    boxes = boxes_of(model, at[~later], kind[~later])
    batch, tokens = (np.asarray(SIZES[name](work)) for name in ("batch", "tokens"))
    return Seen(
        work,
        position,
        later,
        observed,
        np.where(answered, answer.latency_ms, np.nan),
        inside,
        ranged,
        places(model, answer, at, kind, boxes),
        at,
        kind,
        batch,
        tokens,
        boxes,
    )


def widened(model: Any, seen: Seen, depths: Sequence[int]) -> list[Asked]:
    """The observed pure decode at every draft length; nothing for a model that takes none."""
    decode = seen.kind == PURE_DECODE
    if not decode.any() or not depths:
        return []
    work = jax.tree.map(lambda x: x[decode], seen.work)
    try:
        answer: Any = estimate(model, work, draft_length=np.array(depths)[:, None], check=False)
    except SpeculationError:
        return []
    asked, _ = askable(np, work)
    out = []
    for i, depth in enumerate(depths):
        rows = np.asarray(asked.decode_requests, np.int64) * (depth + 1)
        at = coordinates_of(model, replace(asked, decode_requests=rows))
        stp = jax.tree.map(lambda x: np.asarray(x)[i], answer.stp)  # noqa: B023
        out.append(Asked(depth, at, places(model, stp, at, seen.kind[decode], seen.boxes)))
    return out


def inner(model: Any) -> Any:
    """What a correction or an interval stands around."""
    while hasattr(model, "model"):
        model = model.model
    return model


def coordinates_of(model: Any, work: Work) -> np.ndarray:
    """float64 [n, 7] of work as `askable` returns it, in units, as the model pads it."""
    return np.exp(coordinates(np, sizes_of(np, work, getattr(inner(model), "graph_sizes", None))))


def boxes_of(model: Any, at: np.ndarray, kind: np.ndarray) -> Boxes:
    """The boxes that a model states, else those of the coordinates [n, 7] and kinds [n] that it learned."""
    stated = getattr(inner(model), "box", None)
    if stated is not None:
        spans = {KINDS.index(name): np.array([box[axis] for axis in BOX]).T for name, box in stated.items()}
        return {kind: (low, high) for kind, (low, high) in spans.items()}
    return {int(k): (at[kind == k].min(0), at[kind == k].max(0)) for k in np.unique(kind[kind >= 0])}


def places(model: Any, answer: Any, at: np.ndarray, kind: np.ndarray, boxes: Boxes) -> np.ndarray:
    """int [n]: SUPPORTED, EXTRAPOLATED or REFUSED; of queries at coordinates [n, 7] and of kinds [n]."""
    outside = np.zeros(len(at), bool)
    if answer.support is not None:
        outside = np.nan_to_num(np.asarray(answer.support.distance)) > 0
    elif getattr(model, "cell", None) is None:  # a table refuses outside of what was measured, others have to be told
        for k in np.unique(kind):
            here, (low, high) = np.log(at[kind == k]), boxes.get(int(k), (np.inf, np.inf))
            outside[kind == k] = ((np.log(low) - here > EDGE) | (here - np.log(high) > EDGE)).any(-1)
    place = np.where(outside, EXTRAPOLATED, SUPPORTED)
    return np.where(np.asarray(answer.status) == Status.OK, place, REFUSED)
