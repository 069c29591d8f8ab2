"""`summarise`: a grid reduced to one row per combination of the axes that are kept; no answer is ever stored.

The device folds blocks of lines (`fpmjax.lines`), the host joins what they leave in a fixed order (`fpmjax.totals`):
neither the number of blocks in flight nor that of devices changes a bit.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax._jax import own_scope
from fpmjax.errors import SpeculationError, refuse_option
from fpmjax.given import flag
from fpmjax.grid import DECODE, DRAFT, MODEL, Grid, with_models
from fpmjax.lines import fold_grid
from fpmjax.metrics import show
from fpmjax.model_names import named
from fpmjax.progress import Progress
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import check_rule, require_eligible
from fpmjax.totals import Histogram, Totals

if TYPE_CHECKING:
    import pyarrow as pa


MOST_ROWS = 2**24  # about a gigabyte of totals


@dataclass(frozen=True)
class Reduce:
    """What a grid is reduced to.

    keep: axes that stay, in the order in which the rows are wanted; () for one row.  All others are reduced.
    limit_ms: also the share of latencies up to it, itself included.
    quantiles: of 0..1; the latency at rank ceil(q * answered), within `QUANTILE_ERROR` of it, relative.
    pareto: instead of one row, all cells of each kept combination that no other one beats both in latency and in
        throughput, decode_requests / latency.

    Raises OptionError, the code being the field.
    """

    keep: Sequence[str] = (DECODE,)
    limit_ms: float | None = None
    quantiles: Sequence[float] = ()
    pareto: bool = False

    def __post_init__(self):
        keep = (self.keep,) if isinstance(self.keep, str) else self.keep
        if not isinstance(keep, (list, tuple)) or not all(isinstance(name, str) for name in keep):
            refuse_option(
                "keep", f"keep is {show(self.keep)}", "name the axes that stay, such as keep=['decode_requests']"
            )
        if len(set(keep)) < len(keep):
            refuse_option("keep", f"keep names an axis twice: {', '.join(keep)}", "name each axis once")
        object.__setattr__(self, "keep", tuple(keep))
        if self.limit_ms is not None:
            limit = real(self.limit_ms)
            if limit is None or limit < 0:
                refuse_option(
                    "limit_ms", f"limit_ms is {show(self.limit_ms)}", "give milliseconds, such as limit_ms=50"
                )
            object.__setattr__(self, "limit_ms", limit)
        asked: Any = np.atleast_1d(self.quantiles) if isinstance(self.quantiles, np.ndarray) else self.quantiles
        quantiles = tuple(map(real, asked if isinstance(asked, (list, tuple, np.ndarray)) else (asked,)))
        if any(q is None or not 0 <= q <= 1 for q in quantiles):
            refuse_option("quantiles", f"quantiles is {show(asked)}", "give numbers from 0 to 1, such as [0.5, 0.99]")
        if len(set(quantiles)) < len(quantiles):
            refuse_option("quantiles", "quantiles names one twice", "name each once")
        object.__setattr__(self, "quantiles", quantiles)
        object.__setattr__(self, "pareto", flag("pareto", self.pareto))
        if self.pareto and (self.limit_ms is not None or quantiles):
            refuse_option("pareto", "a front has no shares and quantiles", "ask for them in a call of their own")


def real(value: Any) -> float | None:
    """The float64 of a real number, an infinite one too; None for everything else."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def summarise(
    models: Any,
    grid: Grid,
    *,
    reduce: Reduce | None = None,
    rule: SpeculativeRule | None = None,
    progress: bool = True,
) -> pa.Table:
    """The answers to a whole grid, reduced; one row per combination of the kept axes, the last one running fastest.

    models: as `sweep` takes them: one; several in a list; or {name: model}.  Several, or named ones, become an axis
        `model` before all others.  None where the grid has one.
    rule: factor of a speculative round, for a grid with `draft_length`; None is the published one.

    Columns: the kept axes; `cells`, of which `answered` (idle ones among them, at 0 ms) and `refused`; `min_ms`, and
    `best_*`, where every reduced axis stands at the first minimum in the order of the grid (`best_draft_length` is the
    fastest draft length); `max_ms`, `mean_ms`; `share_under_limit` of the answered ones and
    `share_of_cells_under_limit`; quantiles as `p50_ms`, `p99.9_ms`.  They are null where nothing is answered.
    Models are told by their names, as a dictionary of words.

    With `Reduce(pareto=True)`: the kept axes, `latency_ms`, `throughput_per_s` (decode steps of requests a second) and
    the reduced axes; from the lowest latency on.  Of equal cells the first one stands for all.

    Raises OptionError (`models`, or the option or axis), FpmError `stacked`, SpeculationError where a model cannot
    answer a draft length.
    """
    import pyarrow as pa

    flag("progress", progress)
    reduce = Reduce() if reduce is None else reduce
    if not isinstance(reduce, Reduce):
        refuse_option("reduce", f"reduce is a {type(reduce).__name__}", "fpmjax.Reduce(keep=['decode_requests'])")
    if not isinstance(grid, Grid):
        refuse_option(
            "grid", f"{type(grid).__name__} is no grid", "fpmjax.grid(decode_requests=[1, 8], decode_kv=8192)"
        )
    names, asked, several = named(models, grid, "summarise")
    if several and grid.models is None:
        grid = with_models(grid, asked)
    for name in reduce.keep:
        if name not in grid.names:
            refuse_option("keep", f"{name} is no axis of this grid", f"its axes are {', '.join(grid.names)}")
    check_rule(rule)
    if DRAFT in grid.names:
        for model in asked:
            require_eligible(model)
    elif rule is not None:
        raise SpeculationError("a rule scales speculative rounds\nhint: give the grid a draft_length", code="rule")
    fronts = reduce.pareto
    if fronts and DECODE not in grid.names:
        refuse_option("pareto", "throughput counts decode requests", "give the grid decode_requests")
    # The front of cells with equally many requests is their fastest one: it needs no more than minima.
    keep = reduce.keep if not fronts or DECODE in reduce.keep else (*reduce.keep, DECODE)
    rows = math.prod(len(grid[name]) for name in keep)
    if rows > MOST_ROWS:
        what = f"{' x '.join(keep)} are {rows:,} combinations, more than the {MOST_ROWS:,} that are held at once"
        refuse_option("keep", what, "keep fewer axes, or make them coarser")
    passes = 2 if reduce.quantiles else 1
    with own_scope(), Progress("summarising", passes * grid.size, unit="cells") if progress else nullcontext() as bar:
        done = 0

        def tell(cells: int) -> None:
            nonlocal done
            done += cells
            if bar is not None:
                bar(done)

        totals = Totals(grid, keep)
        fold_grid(asked, grid, totals, rule or PUBLISHED, tell, reduce.limit_ms)
        spread = None
        if reduce.quantiles:
            spread = Histogram(totals)
            fold_grid(asked, grid, spread, rule or PUBLISHED, tell)
    columns: dict[str, Any] = totals.kept_columns()
    best = totals.best_columns()
    some = totals.answered > 0
    described = {"mean_ms": "sum over fixed blocks / answered"}
    if fronts:
        columns, described = pareto_columns(reduce.keep, columns | best, totals.low, some), {}
    else:
        columns |= {"cells": np.full(len(some), totals.cells), "answered": totals.answered}
        columns |= {"refused": totals.cells - totals.answered}
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {"min_ms": totals.low} | {f"best_{name}": x for name, x in best.items()}
            values |= {"max_ms": totals.high, "mean_ms": totals.total / totals.answered}
            if reduce.limit_ms is not None:
                values["share_under_limit"] = totals.under / totals.answered
                values["share_of_cells_under_limit"] = totals.under / totals.cells
                described["limit_ms"] = repr(reduce.limit_ms)
        if spread is not None:
            values |= {f"p{100 * q:.10g}_ms": spread.quantile(q) for q in reduce.quantiles}
            described["quantile_relative_error"] = repr(QUANTILE_ERROR)
        always = {"share_of_cells_under_limit"}
        columns |= {name: x if name in always else pa.array(x, mask=~some) for name, x in values.items()}
    for name in columns.keys() & {MODEL, f"best_{MODEL}"}:
        place = columns[name] if isinstance(columns[name], pa.Array) else pa.array(columns[name])
        columns[name] = pa.DictionaryArray.from_arrays(place.cast(pa.int32()), pa.array(names, pa.string()))
    if DRAFT in grid.names:
        described["rule"] = str(rule or PUBLISHED)
    return pa.table(columns).replace_schema_metadata(described or None)


QUANTILE_ERROR = Histogram.ERROR


def pareto_columns(
    keep: Sequence[str], axes: dict[str, np.ndarray], latency_ms: np.ndarray, answered: np.ndarray
) -> dict[str, np.ndarray]:
    """The fronts among candidates, of which `axes` says where they stand; candidates of one front are neighbours in
    no particular order, and those with other kept axes are of another front."""
    here = np.flatnonzero(answered & (latency_ms > 0))  # idle cells serve nobody
    axes, latency_ms = {name: x[here] for name, x in axes.items()}, latency_ms[here]
    throughput = axes[DECODE] / latency_ms * 1000.0
    group = np.zeros(len(here), np.int64)
    for name in keep:
        _, code = np.unique(axes[name], return_inverse=True)
        group = group * (int(code.max(initial=0)) + 1) + code
    order = np.lexsort((-throughput, latency_ms, group))
    group, throughput = group[order], throughput[order]
    front = np.ones(len(order), bool)
    for start, stop in zip(*edges(group), strict=True):
        best = np.maximum.accumulate(throughput[start:stop])
        front[start + 1 : stop] = throughput[start + 1 : stop] > best[:-1]
    kept = order[front]
    columns = {name: axes[name][kept] for name in keep}
    columns |= {"latency_ms": latency_ms[kept], "throughput_per_s": throughput[front]}
    return columns | {name: x[kept] for name, x in axes.items() if name not in columns}


def edges(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of runs of equal values."""
    cuts = np.flatnonzero(np.diff(group)) + 1
    return (np.append(0, cuts), np.append(cuts, len(group))) if len(group) else (cuts, cuts)
