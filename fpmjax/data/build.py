"""Builds the embedded table from the measurements in `sources/`.

    python -m fpmjax.data.build [-o DIRECTORY]

Each source row is one engine step: every request has the same number of new tokens and of past KV tokens, and
`latency_ms` runs from the scheduler's decision to the update of its state (`latency_source`).  Every row becomes one
table row, or is counted among the rows left out; any row that is neither stops the build.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
from pathlib import Path

from fpmjax.data import embedded_table
from fpmjax.tables.write import write_table

SOURCES = {
    phase: Path(__file__).parent / "sources" / f"b300_vllm0201_grid_{phase}_qwen3_32b.csv.gz"
    for phase in ("decode", "prefill")
}
# What every source row must say; the table's identity and clock rest on it.
EXPECTED = {
    "gpu": "NVIDIA B300 SXM6 AC",
    "license": "Apache-2.0",
    "model": "Qwen/Qwen3-32B",
    "latency_source": "schedule_to_update",
    "max_num_batched_tokens": "2048",
}
STEP_TOKENS = 2048  # the engine's own limit: a prefill above it is probably several steps
IDENTITY = {
    "model": "Qwen/Qwen3-32B",
    "system": "b300_sxm",
    "backend": "vllm",
    "backend_version": "0.20.1",
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "pp": 1,
    "dp": 1,
    "moe_ep": 1,
    "cp": 1,
}


def read_source(phase: str) -> list[dict[str, str]]:
    """All rows of one source file, in its order, each checked to be what this build takes it for."""
    with gzip.open(SOURCES[phase], "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for line, row in enumerate(rows, start=2):
        requests, new, past = (int(row[k]) for k in ("batch_size", "new_tokens_per_request", "past_kv_per_request"))
        expected = EXPECTED | {
            "phase": phase,
            "total_prefill_tokens": str(requests * new if phase == "prefill" else 0),
            "total_kv_read_tokens": str(requests * past),
        }
        wrong = {k: row[k] for k, v in expected.items() if row[k] != v}
        if wrong or (phase == "decode" and new != 1):
            raise SystemExit(
                f"{SOURCES[phase].name}, line {line}: not a {phase} row of this deployment: {wrong or row}"
            )
    return rows


def table_rows() -> tuple[dict[str, list], list[dict]]:
    """Columns of the table, and what was read and left out per source file."""
    kept, report = [], []
    for phase in SOURCES:
        rows = read_source(phase)
        fits = [row for row in rows if int(row["total_prefill_tokens"]) <= STEP_TOKENS]
        kept += fits
        report.append(
            {
                "file": SOURCES[phase].name,
                "sha256": hashlib.sha256(gzip.decompress(SOURCES[phase].read_bytes())).hexdigest(),
                "from": sorted({row["source"] for row in rows}),
                "rows": len(rows),
                "rows_left_out": len(rows) - len(fits),
            }
        )
    tp = [int(row["tp"]) for row in kept]
    columns = {
        "cell_id": [f"qwen3_32b_b300_vllm0201_tp{n}" for n in tp],
        "tp": tp,
        "moe_tp": tp,
        "workload_kind": [row["phase"] for row in kept],
        "batch_size": [int(row["batch_size"]) for row in kept],
        "total_prefill_tokens": [int(row["total_prefill_tokens"]) for row in kept],
        "total_kv_read_tokens": [int(row["total_kv_read_tokens"]) for row in kept],
        "latency_ms": [float(row["latency_ms"]) for row in kept],
    }
    return columns, report


def build(directory: Path) -> tuple[Path, list[dict]]:
    """Write the pair into `directory`; the path of its Parquet file, and per source the rows read and left out."""
    columns, sources = table_rows()
    sidecar = {
        "timing_boundary": "schedule_to_update",
        "license": "Apache-2.0, see NOTICE.md",
        "left_out": f"prefill rows above {STEP_TOKENS} new tokens: the engine's step limit, so probably several steps",
        "sources": sources,
    }
    return write_table(directory, columns, identity=IDENTITY, sidecar=sidecar, overwrite=True), sources


def main() -> None:
    """Build, and print what became of every source row."""
    parser = argparse.ArgumentParser(prog="python -m fpmjax.data.build", description="Build the embedded table")
    parser.add_argument("-o", "--output", type=Path, default=embedded_table().parent, metavar="DIRECTORY")
    path, sources = build(parser.parse_args().output)
    for source in sources:
        kept = source["rows"] - source["rows_left_out"]
        print(f"{source['file']}: {source['rows']} rows, {kept} kept, {source['rows_left_out']} left out")
    print(path)


if __name__ == "__main__":
    main()
