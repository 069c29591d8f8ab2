"""The columns of a result: their names, types, units and order, and how answers become them.

A refused row keeps its place: its numbers are null, its status says why.  Evidence names measured rows by their
zero-based row of the table's Parquet file, so that it joins back to that file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.answer import Resolution
from fpmjax.errors import refuse_option
from fpmjax.metrics import show
from fpmjax.status import Status

MODEL, STATUS, FAULT = "model", "status", "fault"
PHASES = ("prefill", "decode", "baseline")
STATUSES = pa.array([Status(i).code for i in range(len(Status))])
RESOLUTIONS = pa.array([r.word for r in Resolution if r >= 0])
WORDS = pa.dictionary(pa.int8(), pa.string())


@dataclass(frozen=True)
class Column:
    """One kind of column; `fill` is what an array of it holds where there is nothing, and becomes null."""

    type: pa.DataType
    dtype: Any
    fill: Any
    unit: str
    about: str
    width: tuple[int, ...] = ()


def number(unit: str, about: str) -> Column:
    return Column(pa.float64(), np.float64, np.nan, unit, about)


# In the order in which they stand in a result, behind the inputs.
COLUMNS: dict[str, Column] = {
    "latency_ms": number("ms", "one forward pass, or one whole speculative round; null where refused"),
    STATUS: Column(WORDS, np.int8, -1, "", "ok, idle, or why there is no answer"),
    "scaling_factor": number("", "what the round's rule multiplies the ordinary pass by"),
    "stp_latency_ms": number("ms", "the ordinary pass at the widened work"),
    "calibrated": Column(pa.bool_(), np.int8, -1, "", "inside the published study; null for ordinary decoding"),
    "native_latency_ms": number("ms", "before the online correction"),
    "correction_factor": number("", "what the online correction multiplied by"),
    "interval_low_ms": number("ms", "lower end of the range in which the model expects a measurement"),
    "interval_high_ms": number("ms", "upper end of it"),
    "interval_count": Column(pa.int64(), np.int64, -1, "rows", "held-out rows behind the range"),
    "support_distance": number("e-folds", "outside of what the model was fitted on; 0 inside"),
    "model_spread": number("log", "half the range between the model's families"),
}
for _phase in PHASES:
    COLUMNS |= {
        f"{_phase}_ms": number("ms", f"the {_phase} lookup"),
        f"{_phase}_resolution": Column(WORDS, np.int8, -1, "", f"how the {_phase} lookup was answered"),
        f"{_phase}_rows": Column(pa.list_(pa.int32()), np.int32, -1, "row", "rows of the table's Parquet file", (4,)),
        f"{_phase}_weights": Column(pa.list_(pa.float64()), np.float64, 0.0, "", "their weights, in that order", (4,)),
    }
del _phase

Arrays = dict[str, np.ndarray]


def arrays_of(result: Any) -> Arrays:
    """The columns of an estimate of single-rank work [n], as NumPy arrays of the types in `COLUMNS`."""
    stp = getattr(result, "stp", result)
    out: Arrays = {"latency_ms": result.latency_ms, STATUS: result.status}
    if stp is not result:
        out |= {"scaling_factor": result.scaling_factor, "stp_latency_ms": stp.latency_ms}
        out["calibrated"] = result.calibrated.astype(np.int8)
    if stp.correction is not None:
        out |= {"native_latency_ms": stp.native_ms, "correction_factor": stp.factor}
    if (interval := result.interval) is not None:
        out |= {"interval_low_ms": interval.low_ms, "interval_high_ms": interval.high_ms}
        out["interval_count"] = interval.count
    if (support := result.support) is not None:
        out |= {"support_distance": support.distance, "model_spread": support.model_spread}
    if stp.parts is not None:
        for phase in PHASES:
            evidence = getattr(stp.parts, phase)
            out |= {
                f"{phase}_ms": getattr(stp.parts, f"{phase}_ms")[:, 0],
                f"{phase}_resolution": evidence.resolution[:, 0],
                f"{phase}_rows": np.stack([x[:, 0] for x in evidence.rows], -1),
                f"{phase}_weights": np.stack([x[:, 0] for x in evidence.weights], -1),
            }
    return out


def ordinary(arrays: Arrays) -> Arrays:
    """The answers of an ordinary pass as those of a round without a draft: a factor of 1, no study."""
    latency = arrays["latency_ms"]
    return arrays | {
        "scaling_factor": np.ones_like(latency),
        "stp_latency_ms": latency,
        "calibrated": np.full(len(latency), -1, np.int8),
    }


def gathered(n: int, names: Iterable[str], parts: Sequence[tuple[Any, Arrays]]) -> Arrays:
    """The answers of parts, each for the rows that its mask says, as one; what a part lacks is `Column.fill`."""
    if len(parts) == 1 and parts[0][0] is None:
        whole = parts[0][1]
        return {name: whole[name] if name in whole else blank(name, n) for name in names}
    out = {name: blank(name, n) for name in names}
    for rows, arrays in parts:
        for name in out.keys() & arrays.keys():
            out[name][rows] = arrays[name]
    return out


def blank(name: str, n: int) -> np.ndarray:
    column = COLUMNS[name]
    return np.full((n, *column.width), column.fill, column.dtype)


def to_arrow(name: str, x: np.ndarray) -> pa.Array:
    """One column of a result."""
    column = COLUMNS[name]
    if column.width:
        raise AssertionError(f"{name} is made beside its rows")
    if pa.types.is_dictionary(column.type):
        words = STATUSES if name == STATUS else RESOLUTIONS
        return pa.DictionaryArray.from_arrays(pa.array(x, mask=None if name == STATUS else x < 0), words)
    if pa.types.is_boolean(column.type):
        return pa.array(x == 1, mask=x < 0)
    if pa.types.is_integer(column.type):
        return pa.array(x, mask=x < 0)
    return pa.array(x, from_pandas=True)


def lists(rows: np.ndarray, weights: np.ndarray) -> tuple[pa.Array, pa.Array]:
    """(rows, weights) that are used, [n, 4] each, as lists of equal lengths; a lookup that was not made has none."""
    used = rows >= 0
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(used.sum(1), out=offsets[1:])
    ends = pa.array(offsets)
    return pa.ListArray.from_arrays(ends, pa.array(rows[used])), pa.ListArray.from_arrays(ends, pa.array(weights[used]))


class Layout:
    """The columns that one result has, in order.

    inputs: fields of what is asked; found: names of `COLUMNS` that the models give; models: names of several models;
    faulty: whether rows may be refused for what they hold; chosen: names to keep, None for all.

    Raises OptionError (`columns`) for a chosen name that the result does not have.
    """

    def __init__(
        self,
        inputs: Sequence[pa.Field],
        found: Iterable[str],
        models: Sequence[str] | None,
        *,
        faulty: bool,
        chosen: Any = None,
    ):
        found = set(found)
        fields = [pa.field(MODEL, pa.dictionary(pa.int32(), pa.string()))] if models is not None else []
        fields += [*inputs, *(pa.field(name, column.type) for name, column in COLUMNS.items() if name in found)]
        fields += [pa.field(FAULT, pa.string())] if faulty else []
        names = [f.name for f in fields]
        if chosen is not None:
            chosen = checked(chosen, names)
            fields = [f for f in fields if f.name in chosen]
        self.schema = pa.schema(fields)
        self.models = pa.array(models, pa.string()) if models is not None else None
        self.found = [name for name in COLUMNS if name in found]
        self.units = {f.name: COLUMNS[f.name].unit for f in fields if f.name in COLUMNS and COLUMNS[f.name].unit}

    def batch(
        self, inputs: Mapping[str, Any], answers: Arrays, model: np.ndarray | None, faults: Mapping[int, str]
    ) -> pa.RecordBatch:
        """One piece of the result."""
        n = len(answers[STATUS])
        made: dict[str, pa.Array] = {}
        for name in self.schema.names:
            if name in made:
                continue
            if name in inputs:
                x = inputs[name]
                made[name] = x if isinstance(x, pa.Array) else pa.array(x)
            elif name == MODEL:
                made[name] = pa.DictionaryArray.from_arrays(pa.array(model, pa.int32()), self.models)
            elif name == FAULT:
                text = pa.nulls(n, pa.string())
                if faults:
                    text = pa.array([faults.get(i) for i in range(n)], pa.string())
                made[name] = text
            elif COLUMNS[name].width:
                phase = name.rpartition("_")[0]
                both = f"{phase}_rows", f"{phase}_weights"
                made |= dict(zip(both, lists(*(answers[x] for x in both)), strict=True))
            else:
                made[name] = to_arrow(name, answers[name])
        return pa.record_batch([made[name] for name in self.schema.names], schema=self.schema)


def checked(chosen: Any, names: Sequence[str]) -> set[str]:
    """The chosen names; OptionError (`columns`) for others."""
    try:
        chosen = [chosen] if isinstance(chosen, str) else list(chosen)
    except TypeError:
        refuse_option("columns", f"columns is {show(chosen)}", "give names, such as ['latency_ms', 'status']")
    for name in chosen:
        if not isinstance(name, str) or name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {close[0]}?" if close else f"this result has {', '.join(names)}"
            refuse_option("columns", f"{show(name)} is no column of this result", hint)
    if not chosen:
        refuse_option("columns", "columns is empty", "leave it out for all columns")
    return set(chosen)


def as_numpy(name: str, column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A column for NumPy: numbers as they are, NaN for null, words as their positions (-1 for null)."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(column.type):
        column = column.indices.fill_null(-1)
    return column.to_numpy(zero_copy_only=False)
