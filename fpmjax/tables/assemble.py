"""Rows of measurements and an identity become the Arrow table of an artifact.

Nothing is cast unless the value stays exactly what it was: integers to int64, floats to float64, text to text.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.errors import TableError
from fpmjax.tables.columns import is_text, type_name
from fpmjax.tables.identity import (
    EXECUTION,
    FIELDS,
    FULL_TEXT,
    Identity,
    column,
    no_such_field,
    resembling,
    shorten,
)
from fpmjax.tables.policy import CUDA_SCOPE, PARTITION_POLICY, REDUCTIONS, Policy
from fpmjax.tables.rows import TYPES, required_columns

_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Identity) if f.default is not dataclasses.MISSING}
_SCALARS = (str, bytes, int, float, np.generic, type(None))


def assemble(
    rows: Mapping[str, Any] | pa.Table, identity: Identity | Mapping[str, Any], policy: Policy, schema_version: int
) -> pa.Table:
    """The table in the artifact's column order, with everything filled in that has only one legal value.

    Columns of `rows` win over `identity`, so that one table may hold several cells.  Other columns than the
    artifact's are kept as they are.
    """
    given = dict(_columns(rows))
    _check_names(given)
    fill = {
        **{"cell_id": "cell-0", "weight_quantization": "", "partition_policy": PARTITION_POLICY},
        **({"measurement_policy": policy.name} if policy.self_named else {}),
        **({"timing_scope": CUDA_SCOPE} if policy.sample_contract else {}),
        **dict(policy.row_constants),
        **_identity_columns(identity, schema_version),
    }
    if schema_version < 7:
        _only_full_text(given, fill)
    lengths = [len(values) for values in given.values() if not isinstance(values, _SCALARS)]
    count = max(lengths, default=1)
    values = fill | given
    for name in required_columns(schema_version, policy):
        if name not in values:
            likely = [other for other in given if other not in TYPES and name in resembling(other, [name])]
            hint = f"did you mean {likely[0]} to be it?" if likely else _hint(name, policy)
            raise TableError(f'rows lack the column "{name}"\nhint: {hint}', code="column_missing")
    order = [name for name in (*TYPES, *values) if name in values]
    arrays = {name: _array(name, values[name], count) for name in dict.fromkeys(order)}
    return pa.table(arrays)


def _columns(rows: Mapping[str, Any] | pa.Table) -> Iterator[tuple[str, Any]]:
    if isinstance(rows, Mapping):
        for name, values in rows.items():
            if not isinstance(name, str):
                raise TableError(f"{name!r} is no column name\nhint: column names are text", code="column_unknown")
            yield name, _sequence(name, values)
    elif isinstance(rows, pa.Table):
        if twice := [name for name in rows.column_names if rows.column_names.count(name) > 1]:
            raise TableError(f'rows hold "{twice[0]}" more than once\nhint: keep one', code="column_duplicate")
        yield from zip(rows.column_names, rows.columns, strict=True)
    else:
        raise TypeError(f"rows must be a mapping of arrays or a pyarrow.Table, not {type(rows).__name__}")


def _sequence(name: str, values: Any) -> Any:
    """Scalars and Arrow arrays as they are, anything else as a NumPy array of one axis or a list."""
    if isinstance(values, (*_SCALARS, pa.Array, pa.ChunkedArray)):
        return values
    if np.ma.is_masked(values):
        raise TableError(
            f'column "{name}" is a masked array in which {int(np.ma.count_masked(values))} values are masked\n'
            "hint: leave those rows out, or fill in what was measured",
            code="column_type",
        )
    if isinstance(values, (Set, Mapping)):
        raise TableError(
            f'column "{name}" is a {type(values).__name__}, which does not say which row a value belongs to\n'
            "hint: give an array or a list in the order of the rows",
            code="column_type",
        )
    if hasattr(values, "__array__"):
        values = np.asarray(values)
        if values.ndim != 1:
            raise TableError(
                f'column "{name}" has shape {values.shape}\nhint: a column has one axis, one value per row',
                code="row_lengths",
            )
        return values.tolist() if values.dtype == object else values
    try:
        return list(values)
    except TypeError:
        raise TableError(
            f'column "{name}" is {shorten(values)}\nhint: give an array, a list or one value for all rows',
            code="column_type",
        ) from None


def _identity_columns(identity: Identity | Mapping[str, Any], schema_version: int) -> dict[str, Any]:
    if not isinstance(identity, (Identity, Mapping)):
        raise TypeError(f"identity must be an Identity or a mapping, not {type(identity).__name__}")
    stated = {("model" if name == "model_path" else name): value for name, value in dict(identity).items()}
    if unknown := [name for name in stated if name not in FIELDS]:
        raise TableError(no_such_field(unknown[0]), code="identity")
    stated = _DEFAULTS | stated
    if stated["dcp"] is None:
        del stated["dcp"]
    return {column(name): value for name, value in stated.items()}


def _only_full_text(given: dict[str, Any], fill: dict[str, Any]) -> None:
    """Drop the execution columns that schema 6 cannot hold; refuse where that would lose something."""
    for name, value in zip(EXECUTION, FULL_TEXT, strict=True):
        stated, constant = given.pop(name, value), fill.pop(name)
        words = [stated] if isinstance(stated, _SCALARS) else list(_array(name, stated, len(stated)).to_pylist())
        if any(word != value for word in (*words, constant)):
            raise TableError(
                f"schema 6 has no column {name}, and reads it as {value!r}\nhint: write schema 7", code="schema_version"
            )


def _check_names(given: dict[str, Any]) -> None:
    known = list(TYPES)
    for name in given:
        close = ["model_path"] if name == "model" else difflib.get_close_matches(name, known, 1, cutoff=0.8)
        if name not in TYPES and close and close[0] not in given:
            raise TableError(
                f'rows hold a column "{name}", which no reader knows\nhint: did you mean {close[0]}?',
                code="column_unknown",
            )


def _array(name: str, values: Any, count: int) -> pa.Array | pa.ChunkedArray:
    wanted, scalar = TYPES.get(name), isinstance(values, _SCALARS)
    if not scalar and len(values) != count:
        raise TableError(
            f'column "{name}" has {len(values)} values for {count} rows\nhint: every column has one value per row',
            code="row_lengths",
        )
    try:
        if scalar:
            array = pa.repeat(pa.scalar(values), count)
        else:
            array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        if wanted is None:
            return array
        if _exact(array.type, wanted):
            return array.cast(wanted)
        reason = f"is {type_name(array.type)}"
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        reason = f"is not ({shorten(str(error))[1:-1]})"
    raise TableError(
        f'column "{name}" must be {type_name(wanted) if wanted else "an Arrow column"}, but {reason}\n'
        "hint: values are stored as they are; convert them where you know what they mean",
        code="column_type",
    )


def _exact(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a type may become the wanted one; Arrow's safe cast then refuses the inexact ones."""
    if pa.types.is_null(kind) or kind.equals(wanted):
        return True
    if pa.types.is_string(wanted):
        return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)
    if pa.types.is_float64(wanted):
        return pa.types.is_floating(kind) or pa.types.is_integer(kind)
    return pa.types.is_int64(wanted) and pa.types.is_integer(kind)


def _hint(name: str, policy: Policy) -> str:
    if name in policy.columns:
        pairs = " or ".join(f"{stated} with {count}" for stated, count in policy.row_pairs)
        needs = pairs or f"measurement_reduction ({' or '.join(REDUCTIONS)}) and source_sample_count"
        return f"policy {policy.name} needs {needs} in each row"
    field = "model" if name == "model_path" else name
    if field in FIELDS:
        return f"give {field} in the identity, or as a column where it differs between rows"
    return "a row needs workload_kind, batch_size, total_prefill_tokens, total_kv_read_tokens and latency_ms"
