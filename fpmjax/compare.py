"""`compare`: the same questions asked of two models, and where and by how much their answers differ."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fpmjax.errors import OptionError, refuse_option
from fpmjax.guard import is_model
from fpmjax.metrics import show
from fpmjax.model_names import told_apart
from fpmjax.result_columns import FAULT, STATUS, as_numpy
from fpmjax.rule import SpeculativeRule
from fpmjax.sweep import sweep
from fpmjax.sweep_job import NOTE

OWN = ("latency_ms", STATUS)  # columns that each of the two has, under its letter


def compare(
    a: Any,
    b: Any,
    queries: Any,
    *,
    rule: SpeculativeRule | None = None,
    chunk: int | None = None,
    progress: bool = True,
) -> pa.Table:
    """Two models, or two versions of one table, side by side.

    queries: `grid(...)` without an axis of models, or a table of queries, as for `sweep`.

    Rows are the queries in order.  Columns: the inputs; `a_latency_ms`, `b_latency_ms`, `a_status`, `b_status`;
    `difference_ms` = b - a, and `difference_pct` = 100 (b - a) / a, null where either has no answer (and where a takes
    0 ms).  `difference_summary` tells the whole of it in a few numbers.

    The schema's metadata hold, as JSON under `fpmjax`, what a sweep's do.  `models` says who they are: `name` (a, b),
    `called` (`compare_names`), kind and digest, and of a table its file, digest, policy and cell.

    Raises what `sweep` raises; OptionError (`columns`) where the inputs have columns of these names.
    """
    for letter, model in (("a", a), ("b", b)):
        if not is_model(model):
            what = f"{letter} is {show(model)}, but one model is compared with one other"
            raise OptionError(f"{what}\nhint: compare(model, other, queries); sweep asks many", code="models")
    found = [sweep(model, queries, rule=rule, chunk=chunk, progress=progress) for model in (a, b)]
    notes = [json.loads((table.schema.metadata or {})[NOTE]) for table in found]
    outputs = {*notes[0]["outputs"], *notes[1]["outputs"]}
    columns = {name: found[0].column(name) for name in found[0].column_names if name not in outputs}
    made = {f"{letter}_{name}": t.column(name) for name in OWN for letter, t in zip("ab", found, strict=True)}
    difference = pc.subtract(made["b_latency_ms"], made["a_latency_ms"])  # pyright: ignore[reportAttributeAccessIssue]
    made["difference_ms"] = difference
    made["difference_pct"] = share(difference, made["a_latency_ms"])
    if taken := columns.keys() & made.keys():
        raise OptionError(
            f"the queries have a column {min(taken)}, which the comparison makes\nhint: rename it", code="columns"
        )
    if FAULT in outputs:
        made[FAULT] = found[0].column(FAULT)
    about = {
        "result": {**notes[0]["result"], "format": "fpmjax comparison"},
        "versions": notes[0]["versions"],
        "models": [
            {**note["models"][0], "name": letter, "called": called}
            for letter, called, note in zip("ab", compare_names(a, b), notes, strict=True)
        ],
        "rule": notes[0]["rule"],
        "queries": notes[0]["queries"],
        "units": {"a_latency_ms": "ms", "b_latency_ms": "ms", "difference_ms": "ms", "difference_pct": "%"},
    }
    table = pa.table({**columns, **made})
    return table.replace_schema_metadata({NOTE: json.dumps(about)})


def compare_names(a: Any, b: Any) -> tuple[str, str]:
    """Two short names: what tells the cells of two models apart, such as ("tp=1", "tp=4"), or ("A", "B")."""
    one, other = told_apart((a, b)) or ("A", "B")
    return one, other


def share(difference: pa.ChunkedArray, of: pa.ChunkedArray) -> pa.Array:
    """100 difference / of, null where it is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        percent = 100.0 * as_numpy("", difference) / as_numpy("", of)
    return pa.array(np.where(np.isfinite(percent), percent, np.nan), from_pandas=True)


def difference_summary(table: pa.Table) -> dict[str, Any]:
    """A comparison in a few numbers; None where no row has both answers.

    rows, both, only_a, only_b, neither: how many rows have which answers; and over those with both, of the difference
    in ms and in percent: `median_*` its median, `p90_*` the 90th percentile of its size (linear interpolation),
    `worst_*` the one of the largest size, with its sign, and `worst_row` where the largest percentage stands.

    Raises OptionError (`table`) for what is no comparison.
    """
    check_comparison(table)
    has_a, has_b = (table.column(f"{letter}_latency_ms").is_valid().to_numpy() for letter in "ab")
    out: dict[str, Any] = {
        "rows": table.num_rows,
        "both": int((has_a & has_b).sum()),
        "only_a": int((has_a & ~has_b).sum()),
        "only_b": int((has_b & ~has_a).sum()),
        "neither": int((~has_a & ~has_b).sum()),
    }
    for unit in ("ms", "pct"):
        x = as_numpy("", table.column(f"difference_{unit}"))
        size = np.abs(x)
        known = np.flatnonzero(~np.isnan(x))
        if not len(known):
            out |= {f"median_{unit}": None, f"p90_{unit}": None, f"worst_{unit}": None}
            worst = None
        else:
            worst = int(known[size[known].argmax()])
            out |= {
                f"median_{unit}": float(np.median(x[known])),
                f"p90_{unit}": float(np.percentile(size[known], 90)),
                f"worst_{unit}": float(x[worst]),
            }
    return out | {"worst_row": worst}


def worst_rows(table: pa.Table, n: int) -> np.ndarray:
    """int64, the rows that differ by the largest percentages, the largest first; of equal ones the first."""
    check_comparison(table)
    size = np.abs(as_numpy("", table.column("difference_pct")))
    known = np.flatnonzero(size > 0)
    return known[np.argsort(-size[known], kind="stable")[:n]]


def check_comparison(table: Any) -> None:
    """OptionError (`table`) for what `compare` did not make."""
    needed = ("a_latency_ms", "b_latency_ms", "difference_ms", "difference_pct")
    names = table.column_names if isinstance(table, pa.Table) else ()
    if missing := [name for name in needed if name not in names]:
        what = f"a table without {missing[0]}" if isinstance(table, pa.Table) else type(table).__name__
        refuse_option("table", f"{what} is no comparison", "fpmjax.compare(a, b, queries) makes one")
