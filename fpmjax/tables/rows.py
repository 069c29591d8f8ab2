"""From Parquet bytes to typed columns: opening the file and finding what schema and policy require."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from fpmjax.errors import TableError
from fpmjax.tables import columns
from fpmjax.tables.columns import Column
from fpmjax.tables.identity import DATABASE, EXECUTION, FLAGS, FULL_TEXT, SIZES, TEXTS, column, shorten
from fpmjax.tables.policy import Policy

COORDINATES = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")

TEXT, COUNT, MILLISECONDS, FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()

# Every column the loader knows, with its exact type.  Provenance columns and any other column are never read.
REQUIRED: dict[str, pa.DataType] = {
    "cell_id": TEXT,
    "weight_quantization": TEXT,
    **{column(name): TEXT for name in (*DATABASE, *TEXTS, *EXECUTION)},
    **dict.fromkeys(SIZES, COUNT),
    **dict.fromkeys(FLAGS, FLAG),
    "workload_kind": TEXT,
    **dict.fromkeys(COORDINATES, COUNT),
    "partition_policy": TEXT,
    "latency_ms": MILLISECONDS,
}
TYPES: dict[str, pa.DataType] = REQUIRED | {
    "dcp": COUNT,
    "kv_seed_regime": TEXT,
    "measurement_policy": TEXT,
    "measurement_repeats": COUNT,
    "global_warmup_iterations": COUNT,
    "warmup_repeats": COUNT,
    "state_protocol": TEXT,
    "timing_boundary": TEXT,
    "timing_scope": TEXT,
    "measurement_reduction": TEXT,
    "source_sample_count": COUNT,
}

Rows = dict[str, Column]
"""The typed columns that a table has, by name."""


def open_table(parquet: bytes, schema_version: int, policy: Policy, label: str) -> pa.Table:
    """The known columns of the file as an Arrow table; refuses a file without a required column."""
    with _parquet_errors(label):
        file = pq.ParquetFile(pa.BufferReader(parquet))
        have = list(file.schema_arrow.names)
        _check_columns(have, schema_version, policy, label)
        known = [name for name in have if name in TYPES]
        return file.read(columns=known, use_threads=False).select(known)


def required_columns(schema_version: int, policy: Policy) -> tuple[str, ...]:
    """Names of the columns without which a table cannot be read, in file-layout order."""
    fixed = [name for name in REQUIRED if schema_version >= 7 or name not in EXECUTION]
    return (*fixed, *policy.columns)


def typed_rows(table: pa.Table, schema_version: int, label: str) -> Rows:
    """Every known column of a table with at least one row.

    Schema 6 has no execution identity: columns of that name are ignored and read as full text.
    """
    with _parquet_errors(label):
        rows = {name: columns.read(table, name, TYPES[name]) for name in table.column_names}
    if schema_version == 6:
        rows |= {n: columns.constant(n, value, table.num_rows) for n, value in zip(EXECUTION, FULL_TEXT, strict=True)}
    return rows


@contextmanager
def _parquet_errors(label: str) -> Iterator[None]:
    try:
        yield
    except TableError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise TableError(
            f"Parquet error ({shorten(str(error))[1:-1]}): {label}\n"
            "hint: the digest matches, so it was sealed like this; write the pair again with `fpmjax.write_table`",
            code="parquet",
        ) from None


def _check_columns(have: list[str], schema_version: int, policy: Policy, label: str) -> None:
    if policy.row_pairs and not set(policy.columns) <= set(have):
        raise TableError(
            f"FPM per-row measurement policy requires measurement_policy and measurement_repeats columns: {label}\n"
            f"hint: policy {policy.name} lets rows differ, so each row says what it is",
            code="column_missing",
        )
    for name in required_columns(schema_version, policy):
        if name not in have:
            raise columns.missing_column(name, have, label)
    for name in TYPES:
        if have.count(name) > 1:
            raise TableError(
                f'parquet column "{name}" occurs {have.count(name)} times: {label}\n'
                "hint: keep the one that was measured",
                code="column_duplicate",
            )
