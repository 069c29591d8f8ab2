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
from fpmjax.sweep import CHUNK, sweep

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


def cases(*, drafts: bool) -> tuple[list[Case], str]:
    model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))
    source, ours, theirs = (FOLDER / f"{name}{drafts}.parquet" for name in ("queries", "ours", "theirs"))
    queries(source, drafts=drafts)

    def swept() -> None:
        sweep(model, source, out=ours, overwrite=True)

    swept()
    result = pq.read_table(ours)
    assert (np.asarray(result["status"].combine_chunks().indices) == 0).mean() > 0.5
    few = [name for name in FEW if name in result.column_names] + ["fault", "tenant"]
    copied(source, result, theirs, use_dictionary=few)
    assert pq.read_table(theirs).equals(result)
    read = Case("pyarrow, read and write", lambda: copied(source, result, theirs, use_dictionary=few), N)
    own = Case("pyarrow, its own settings", lambda: copied(source, result, theirs), N)
    return [read, own, Case("fpmjax sweep", swept, N)], read.name


if __name__ == "__main__":
    main({"plain": lambda: cases(drafts=False), "drafted": lambda: cases(drafts=True)}, rounds=7)
