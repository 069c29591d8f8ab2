"""From a Parquet file of queries to a Parquet file of answers, beside pyarrow reading and writing the same columns.

The reference reads the queries and writes the columns of the result, which lie in memory, with nothing between: what is
left of its speed is what the answers themselves, and everything around them, may cost.  It writes with the settings of
`sweep`; `pyarrow, its own settings` with those of `pyarrow.parquet.write_table` and zstd.  Every way writes one file,
and all were seen to write the same rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from runner import Case, main

import fpmjax
from fpmjax.grid import grid
from fpmjax.sweep import sweep
from fpmjax.sweep_job import CHUNK

N = 1 << 20
FEW = "scaling_factor", "status", "calibrated", "draft_length", "decode_requests", "decode_kv"
KEPT = tempfile.TemporaryDirectory(prefix="fpmjax-files-")  # removed when the process ends
FOLDER = Path(KEPT.name)


def queries(path: Path, *, drafts: bool) -> None:
    """Uniform over what the TP1 cell covers, with a text of the asker's own."""
    rng = np.random.default_rng(1)
    requests = rng.integers(1, 129, N)
    columns = {"decode_requests": requests, "decode_kv": requests * rng.integers(64, 4096, N)}
    if drafts:
        columns["draft_length"] = rng.integers(1, 4, N)
    words = pa.array([f"tenant-{i}" for i in range(100)]).take(pa.array(rng.integers(0, 100, N)))
    pq.write_table(pa.table({**columns, "tenant": words}), path, compression="zstd")


def copied(source: Path, result: pa.Table, to: Path, **settings: Any) -> None:
    """Read what is asked, write what comes out."""
    file = pq.ParquetFile(source)
    with pq.ParquetWriter(to, result.schema, compression="zstd", **settings) as writer:
        for i, _ in enumerate(file.iter_batches(batch_size=CHUNK)):
            writer.write_table(result.slice(i * CHUNK, CHUNK))


def model() -> fpmjax.Direct:
    return fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))


def from_queries(*, drafts: bool) -> tuple[list[Case], str]:
    own = model()
    source, ours, theirs = (FOLDER / f"{name}{drafts}.parquet" for name in ("queries", "ours", "theirs"))
    queries(source, drafts=drafts)

    def swept() -> None:
        sweep(own, source, out=ours, overwrite=True)

    swept()
    result = pq.read_table(ours)
    assert (np.asarray(result["status"].combine_chunks().indices) == 0).mean() > 0.5
    few = [name for name in FEW if name in result.column_names] + ["fault", "tenant"]
    copied(source, result, theirs, use_dictionary=few)
    assert pq.read_table(theirs).equals(result)
    read = Case("pyarrow, read and write", lambda: copied(source, result, theirs, use_dictionary=few), N)
    usual = Case("pyarrow, its own settings", lambda: copied(source, result, theirs), N)
    return [read, usual, Case("fpmjax sweep", swept, N)], read.name


def from_grid() -> tuple[list[Case], str]:
    """The reference only writes: a grid is read from nowhere."""
    own, ours, theirs = model(), FOLDER / "grid.parquet", FOLDER / "written.parquet"
    asked = grid(decode_requests=range(1, 65), kv_per_request=range(512, 4608), draft_length=[1, 2, 3, 4])

    def swept() -> None:
        sweep(own, asked, out=ours, overwrite=True)

    def written() -> None:
        with pq.ParquetWriter(theirs, result.schema, compression="zstd", use_dictionary=few) as writer:
            for batch in batches:
                writer.write_batch(batch, row_group_size=CHUNK)

    swept()
    result = pq.read_table(ours)
    batches = result.to_batches(CHUNK)
    few: Any = [name for name in (*FEW, "kv_per_request") if name in result.column_names]
    written()
    assert pq.read_table(theirs).equals(result)
    return [Case("pyarrow, write", written, asked.size), Case("fpmjax sweep", swept, asked.size)], "pyarrow, write"


BENCHMARKS = {
    "plain": lambda: from_queries(drafts=False),
    "drafted": lambda: from_queries(drafts=True),
    "grid": from_grid,
}

if __name__ == "__main__":
    main(BENCHMARKS, rounds=7, mark="<!-- files -->")
