"""A small study to try the command on, and to copy the columns from: synthetic rounds with a known answer.

One made-up GPU, F(b, K) = 6 + 0.03 b + 0.0001 K ms, T = (0.1 d + 1.12) F with some percent of regular noise, 16 rounds
of warm-up in every run; no engine was measured.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from fpmjax.atomic import replacing
from fpmjax.errors import refuse_option
from fpmjax.file_name import file_name
from fpmjax.metrics import show
from fpmjax.study.columns import COLUMNS
from fpmjax.study.exclude import WARMUP

DEPTHS, BATCHES, CONTEXTS, ROUNDS, EMITTED = (1, 2, 3, 4), (1, 4), (1024, 4096), 8, 2
TRUE = (0.1, 1.12)  # slope and intercept of the made-up engine
SAME: dict[str, Any] = {
    "study_id": "example",
    "gpu": "example-gpu",
    "tp": 1,
    "dtype": "bf16",
    "framework": "example-engine",
    "framework_version": "1.0.0",
    "model": "example-8B",
    "attention_backend": "example",
    "timing_scope": "model_worker_forward_cuda",
    "topk": 1,
    "cuda_graph": "true",
}
PROTOCOL = (
    "SYNTHETIC: no engine was measured. Ordinary rounds (stp, repetition 0) at every widened batch (d + 1) B, from the "
    "same total KV as the speculative rounds (sd, repetition 1) that they are set beside; 16 rounds of warm-up first."
)


def write_template(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write the example study as CSV with its sidecar beside it; returns both paths, the same bytes every time.

    Raises OptionError `template` for a name that does not end in .csv, where either file is there already, or where
    none can be written.
    """
    if (name := file_name(path)) is None:
        refuse_option("template", f"the template is {show(path)}", "name a file such as study.csv")
    table = Path(name)
    if table.suffix != ".csv":
        refuse_option("template", f"{table} is no CSV file by its name", "name a file such as study.csv")
    sidecar = table.with_suffix(".json")
    for one in (table, sidecar):
        if one.exists():
            refuse_option("template", f"{one} is there already", "name a file that is not there yet")
    rows = example_rows()
    data = as_csv(rows)
    note = {
        "schema_version": 1,
        "created_utc": None,
        "protocol": PROTOCOL,
        "exclusions": ["warmup", "non_graph"],
        "rows": {kind: sum(row["kind"] == kind for row in rows) for kind in ("sd", "stp")},
        "sha256": hashlib.sha256(data).hexdigest(),
        "collector_revision": "fpmjax calibrate --template",
    }
    for one, content in ((table, data), (sidecar, (json.dumps(note, indent=1) + "\n").encode())):
        try:
            with replacing(one) as partial:
                partial.write_bytes(content)
        except OSError as error:
            hint = "name a file in a folder that exists and is yours"
            refuse_option("template", f"{one} cannot be written: {error.strerror or error}", hint)
    return table, sidecar


def forward_ms(batch: int, kv: int) -> float:
    return 6 + 0.03 * batch + 0.0001 * kv


def example_rows() -> list[dict[str, Any]]:
    """Every round, as a row of the file."""
    rows: list[dict[str, Any]] = []
    for d in DEPTHS:
        for size in BATCHES:
            for context in CONTEXTS:
                wide = (d + 1) * size
                # Ordinary rounds add a token per request: after warm-up they stand where the others begin.
                each = {"method": "none", "kind": "stp", "draft_length": 0, "batch_size": wide, "repetition": 0}
                each |= {"initial_context": context // (d + 1) - WARMUP, "active_requests": wide}
                for i in range(WARMUP + (WARMUP + ROUNDS) * EMITTED // (d + 1) + 2):
                    kv = size * context + wide * (i - WARMUP)
                    latency = forward_ms(wide, kv) * (1.5 if i < WARMUP else noise(len(rows), 0.004))
                    rows.append(SAME | each | measured(i, kv, latency))
                each = {"method": "mtp", "kind": "sd", "draft_length": d, "batch_size": size, "repetition": 1}
                each |= {"initial_context": context, "active_requests": size}
                each |= {"proposed_tokens": d * size, "emitted_tokens": EMITTED * size}
                run = noise(7 * d + 3 * size + context, 0.012)
                for i in range(WARMUP + ROUNDS):
                    kv = size * (context + EMITTED * i)
                    factor = (TRUE[0] * d + TRUE[1]) * run * (1.6 if i < WARMUP else noise(len(rows), 0.01))
                    rows.append(SAME | each | measured(i, kv, factor * forward_ms(wide, kv)))
    rows[-1]["cuda_graph"] = "false"  # one round that missed its graph, to be counted and not scored
    return rows


def measured(i: int, kv: int, latency: float) -> dict[str, Any]:
    return {"round_index": i, "total_kv_tokens": kv, "latency_ms": f"{latency:.6f}"}


def noise(i: int, size: float) -> float:
    """A factor near 1 that looks irregular and is the same everywhere."""
    return 1 + size * math.sin(12.9898 * i)


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    names = [column.name for column in COLUMNS if any(column.name in row for row in rows)]
    out = io.StringIO()
    out.write(",".join(names) + "\n")
    for row in rows:
        out.write(",".join(str(row.get(name, "")) for name in names) + "\n")
    return out.getvalue().encode()
