"""Writes observations as columns: Parquet, Arrow and CSV.

`wall_ms` and every field of `Work` under its own name, plain columns for one rank, fixed-size lists (one entry per
rank) for several; request lists as `extend_lengths` and `past_kv_lengths`, one list per rank, null where the rank
supplied none.  A note in the schema keeps the timing and the padded width.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.atomic import replacing
from fpmjax.observe.columns import CSV, IPC, LISTS, NOTE, label_of, refuse
from fpmjax.work import COUNTS, VARIANCES, Work


def write_columns(path: str | os.PathLike[str], work: Work, wall_ms: Any, timing: str) -> None:
    """The file appears whole or not at all."""
    path = Path(label_of(path, "path"))
    table = to_table(work, np.asarray(wall_ms), timing)
    try:
        with replacing(path) as partial:
            _save(table, timing, str(partial), path.name.lower())
    except OSError as error:
        refuse("file", f"{path} cannot be written: {error}", "name a file in a folder that exists and is writable")


def _save(table: pa.Table, timing: str, to: str, name: str) -> None:
    """In the format that `_open` takes a file of this name for."""
    if name.endswith(CSV):
        import pyarrow.csv as pacsv

        if nested := [f.name for f in table.schema if pa.types.is_nested(f.type)]:
            refuse(
                "columns",
                f"CSV has no column of lists, but these have one entry per rank or request: {', '.join(nested)}",
                "write a `.parquet` file",
            )
        table = table.append_column("timing", pa.array([timing] * table.num_rows, pa.string()))
        with pa.output_stream(to, compression="gzip" if name.endswith(".gz") else None) as stream:
            pacsv.write_csv(table, stream)
    elif name.endswith(IPC):
        import pyarrow.feather as feather

        feather.write_feather(table, to)
    else:
        import pyarrow.parquet as pq

        pq.write_table(table, to)


def to_table(work: Work, wall_ms: np.ndarray, timing: str) -> pa.Table:
    """Columns of work [n, r] and wall_ms [n]; fields that are None become zeros."""
    n, ranks = len(wall_ms), work.ranks
    columns: dict[str, pa.Array] = {"wall_ms": pa.array(wall_ms)}
    for name, dtype in (*((c, np.uint32) for c in COUNTS), *((v, np.float64) for v in VARIANCES)):
        field = getattr(work, name)
        flat = np.zeros(n * ranks, dtype) if field is None else np.asarray(field, dtype).reshape(n * ranks)
        values = pa.array(flat)
        columns[name] = values if ranks == 1 else pa.FixedSizeListArray.from_arrays(values, ranks)
    note: dict[str, Any] = {"version": 1, "timing": timing, "ranks": ranks, "lists": None}
    if work.lists is not None:
        note["lists"] = int(np.shape(work.lists.extend)[-1])
        for name, values in zip(LISTS, (work.lists.extend, work.lists.past), strict=True):
            columns[name] = _ragged(np.asarray(values), np.asarray(work.lists.count), ranks)
    return pa.table(columns).replace_schema_metadata({NOTE: json.dumps(note).encode()})


def _ragged(values: np.ndarray, count: np.ndarray, ranks: int) -> pa.Array:
    """uint64 [n, r, q] and int32 [n, r] -> a list per rank, null where count is -1."""
    q = values.shape[-1]
    count = count.reshape(-1)
    filled = np.arange(q) < count[:, None]
    offsets = np.concatenate([[0], np.cumsum(np.maximum(count, 0))]).astype(np.int64)
    flat = pa.array(values.reshape(-1, q)[filled].astype(np.uint64, copy=False))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(count < 0))
    return lists if ranks == 1 else pa.FixedSizeListArray.from_arrays(lists, ranks)
