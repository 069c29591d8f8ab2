"""`evaluate`: how far a model's answers lie from what was observed, by kind of work and over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fpmjax.estimate import estimate
from fpmjax.iteration import askable
from fpmjax.metrics import holds_masked, refuse, show
from fpmjax.observe.features import KINDS, iteration_features
from fpmjax.observe.observations import Observations, refuse_traced
from fpmjax.status import Status
from fpmjax.work import Array, Work

if TYPE_CHECKING:
    import pyarrow as pa

BLOCKS = 4
ALL = "all"


def evaluate(model: Any, observations: Observations, *, by: Any = "batch", blocks: int = BLOCKS) -> pa.Table:
    """Errors of `model` on observations that it was not fitted on, as an Arrow table.

    by: what the groups are: "batch" (scheduled requests of the busiest rank), "kv" or "tokens" (past KV read, tokens
        computed, summed over ranks), each in classes up to the next power of two; "kind" of work; "support", how many
        e-folds outside of what a learned model was fitted on (`SUPPORT`); a column of your own, [n] numbers or text,
        one entry per observation; or None for no groups.
    blocks: the observations, in their order, are also scored in so many blocks of equal length, which shows drift
        that an average hides; 1 for none.  More than there are observations would be empty, and are left out.

    Rows: `group` "all", then every group; and each of them in total (`block` null) and by block.  Columns:
    `by`, `group`, `block`, `first` and `last` (range of the block, last one excluded), `n` observations, of which
    `scored`, `unready` (the model has not seen enough of this work) and `refused` (every other refusal, and where no
    time above zero was observed, as `Observations.of` would not keep);
    `coverage` = scored / n; and over the scored ones, with e = 100 (predicted - observed) / observed:
    `mape_pct` mean of |e|, `wape_pct` 100 sum |predicted - observed| / sum observed, `bias_pct` mean of e,
    `p50_ape_pct` and `p90_ape_pct` percentiles of |e| (linear interpolation), `worst_ape_pct` and `worst_row` the
    largest |e| and its first row, `observed_ms` mean.  They are null where nothing was scored.  MAPE is asymmetric:
    an over-prediction is unbounded, an under-prediction at most 100 %; read it beside the bias.

    `interval_coverage` is the share of the scored observations with an interval whose time lies inside it, ends
    included, to be compared with `interval_level`, the share that the model states; `extrapolated` counts the scored
    ones outside of what the model was fitted on.  They are null where the model states no interval, no support.

    Raises MetricsError `payload` for arguments of another kind.
    """
    import pyarrow as pa

    if not isinstance(observations, Observations):
        refuse("payload", f"observations is a {type(observations).__name__}", "Observations.of, .read or read_trace")
    if type(blocks) is not int or blocks < 1:
        refuse("payload", f"blocks is {blocks!r}", "give a whole number from 1; 1 does not split")
    refuse_traced(observations, by)
    n = len(observations)
    blocks = min(blocks, max(n, BLOCKS))
    of_answers = isinstance(by, str) and by == "support"
    groups = None if of_answers else _groups(by, observations.work, n)  # its mistakes come before a long estimate
    answer = estimate(model, observations.work, check=False)
    name, code, labels = groups or (by, *_support_classes(answer, n))
    observed = np.asarray(observations.wall_ms, np.float64)
    edges = [n * i // blocks for i in range(blocks + 1)]
    spans = [(None, 0, n), *((i, edges[i], edges[i + 1]) for i in range(blocks if blocks > 1 else 0))]
    rows = []
    for group in range(-1, len(labels)):
        inside = np.arange(n) if group < 0 else np.flatnonzero(code == group)
        for block, first, last in spans:
            rows_here = inside[(inside >= first) & (inside < last)]
            row = {"by": name, "group": ALL if group < 0 else labels[group], "block": block}
            row |= {"first": first, "last": last}
            rows.append(row | _statistics(rows_here, answer, observed))
    return pa.Table.from_pylist(rows, schema=pa.schema([(c, _TYPES.get(c, "double")) for c in rows[0]]))


_TYPES = {"by": "string", "group": "string"} | dict.fromkeys(
    ("block", "first", "last", "n", "scored", "unready", "refused", "worst_row", "extrapolated"), "int64"
)


def _statistics(rows: np.ndarray, answer: Any, observed: np.ndarray) -> dict[str, Any]:
    """Counts of these rows, and the errors of the scored ones."""
    predicted, status = np.asarray(answer.latency_ms), np.asarray(answer.status)
    sound = np.isfinite(observed[rows]) & (observed[rows] > 0)
    scored = rows[(status[rows] == Status.OK) & sound]
    unready = int((status[rows] == Status.NOT_READY).sum())
    counts: dict[str, Any] = {"n": len(rows), "scored": len(scored), "unready": unready}
    counts |= {"refused": len(rows) - len(scored) - unready, "coverage": len(scored) / len(rows) if len(rows) else None}
    if not len(scored):
        return counts | dict.fromkeys(_ERRORS)
    miss = predicted[scored] - observed[scored]
    with np.errstate(over="ignore"):  # infinite where the miss is beyond float64
        error = 100.0 * miss / observed[scored]
    ape = np.abs(error)
    p50, p90 = np.percentile(ape, [50, 90])
    return counts | {
        "mape_pct": ape.mean(),
        "wape_pct": 100.0 * np.abs(miss).sum() / observed[scored].sum(),
        "bias_pct": error.mean(),
        "p50_ape_pct": p50,
        "p90_ape_pct": p90,
        "worst_ape_pct": ape.max(),
        "worst_row": int(scored[ape.argmax()]),
        "observed_ms": observed[scored].mean(),
        **_stated(answer, scored, observed),
    }


def _stated(answer: Any, scored: np.ndarray, observed: np.ndarray) -> dict[str, Any]:
    """What the model says of its own errors, for the scored rows; None where it says nothing."""
    stated: dict[str, Any] = dict.fromkeys(_STATED)
    if answer.interval is not None:
        low, high = (np.asarray(x)[scored] for x in (answer.interval.low_ms, answer.interval.high_ms))
        known = ~np.isnan(low) & ~np.isnan(high)
        if known.any():
            inside = (low <= observed[scored]) & (observed[scored] <= high)
            stated |= {"interval_coverage": inside[known].mean(), "interval_level": answer.interval.level}
    if answer.support is not None:
        distance = np.asarray(answer.support.distance)[scored]
        if not np.isnan(distance).all():
            stated["extrapolated"] = int((distance > 0).sum())
    return stated


_STATED = ("interval_coverage", "interval_level", "extrapolated")

_ERRORS = (
    "mape_pct",
    "wape_pct",
    "bias_pct",
    "p50_ape_pct",
    "p90_ape_pct",
    "worst_ape_pct",
    "worst_row",
    "observed_ms",
    *_STATED,
)


# --- groups ------------------------------------------------------------------------------------------------


def _total(work: Work, *names: str) -> np.ndarray:
    """int64 [n, r], the sum of these counts."""
    shape = (*work.shape, work.ranks)
    counts = [getattr(work, name) for name in names]
    return sum((np.asarray(x, np.int64) for x in counts if x is not None), np.zeros(shape, np.int64))


# Name -> int64 [n], what is put into classes.
SIZES: dict[str, Callable[[Work], Array]] = {
    "batch": lambda work: _total(work, "prefill_requests", "decode_requests").max(-1),
    "kv": lambda work: _total(work, "prefill_kv", "decode_kv").sum(-1),
    "tokens": lambda work: _total(work, "prefill_tokens", "decode_requests").sum(-1),
}


def _groups(by: Any, work: Work, n: int) -> tuple[str, np.ndarray, list[str]]:
    """(name, code [n] of each row's group, the label of every code)."""
    if by is None:
        return "none", np.zeros(n, np.intp), []
    if isinstance(by, str):
        if by == "kind":
            asked, _ = askable(np, jax.tree.map(np.asarray, work))
            found, code = np.unique(np.asarray(iteration_features(np, asked).kind), return_inverse=True)
            return by, code.reshape(n), [KINDS[k] for k in found]
        if by not in SIZES:
            refuse(
                "payload", f"by is {by!r}", f"it is one of {', '.join((*SIZES, 'kind', 'support'))}, a column, or None"
            )
        return by, *_classes(SIZES[by](work))
    values: Any
    try:
        values = np.asarray(by)
    except (TypeError, ValueError):  # ragged, or of a kind that NumPy does not know
        values = np.empty(())
    if not values.ndim or holds_masked(by):
        refuse("payload", f"by is {show(by)}, which is no column", "give one number or text per observation")
    if values.shape != (n,):
        refuse("payload", f"the column has shape {values.shape} for {n} observations", "give one entry per observation")
    missing = np.array([value is None or value != value for value in values.tolist()], bool)
    if missing.any():
        i, first = int(missing.sum()), int(missing.argmax())
        refuse(
            "payload",
            f"the column by has no value for {i} of {n} observations, the first is {first}",
            "give every observation a number or text, or leave those without one out: observations.where(mask)",
        )
    try:
        found, code = np.unique(values, return_inverse=True)
    except TypeError:
        refuse("payload", "the column by mixes kinds of values", "give numbers, or text")
    labels = [str(value).encode(errors="backslashreplace").decode() for value in found.tolist()]
    return "column", code.reshape(n), labels


# Label of a class -> largest distance in it, e-folds outside of what the model was fitted on.
SUPPORT = {"supported": 0.0, "extrapolated <=0.5": 0.5, "extrapolated <=1": 1.0, "extrapolated >1": np.inf}
UNKNOWN = "unknown"  # no answer, or a model that does not say


def _support_classes(answer: Any, n: int) -> tuple[np.ndarray, list[str]]:
    distance = np.full(n, np.nan) if answer.support is None else np.asarray(answer.support.distance)
    labels = [*SUPPORT, UNKNOWN]
    code = np.where(np.isnan(distance), len(SUPPORT), np.searchsorted(list(SUPPORT.values()), distance))
    found, code = np.unique(code, return_inverse=True)
    return code.reshape(n), [labels[k] for k in found]


def _classes(sizes: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Classes 0, 1, 2, 3-4, 5-8, ...: up to each power of two; those that occur, in their order."""
    exponent = np.frexp(np.maximum(sizes - 1, 0).astype(np.float64))[1] + (
        sizes > 0
    )  # 0 -> 0, 1 -> 1, 2 -> 2, 3..4 -> 3
    found, code = np.unique(exponent, return_inverse=True)
    return code.reshape(len(sizes)), [_label(int(k)) for k in found]


def _label(k: int) -> str:
    if k < 3:
        return str(k)
    return f"{2 ** (k - 2) + 1}-{2 ** (k - 1)}"
