"""Trace lines and files that tests write, and how they are read back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fpmjax import Observations, TraceError, read_trace
from fpmjax.observe.trace import OUTCOMES

CASES = Path(__file__).parent / "cases" / "traces"
GOOD = sorted(p.name for p in CASES.glob("dynamo-fpm.*.jsonl.gz"))
HEAT = 1795000000000  # any time observed


def row(counter: int, wall: Any = 0.005, *, at: int | None = None, rank: int = 0, edit: Callable | None = None, **over):
    """One trace line; `over` replaces scheduled counts, `edit` gets the whole row."""
    scheduled = {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": 2,
        "sum_decode_kv_tokens": 100 + counter % 1000,
        "var_decode_kv_tokens": 0.0,
    }
    queued = {k: v for k, v in scheduled.items() if k != "sum_prefill_kv_tokens"}
    fpm = {"version": 1, "worker_id": "w", "dp_rank": rank, "counter_id": counter, "wall_time": wall}
    whole = {
        "timestamp": counter,
        "event": {
            "schema": "dynamo.fpm.trace.v1",
            "source": {"namespace": "n", "component": "backend", "producer_id": "p"},
            "capture_mode": "full",
            "observed_at_unix_ms": HEAT + (10 * counter if at is None else at),
            "fpm": fpm | {"scheduled_requests": scheduled | over, "queued_requests": queued},
        },
    }
    if edit:
        edit(whole)
    return json.dumps(whole, separators=(",", ":"))


def write(path: Path, rows: list[str]) -> Path:
    data = "".join(r + "\n" for r in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(paths, **options) -> Observations:
    return read_trace(paths, **{"speculative": False, **options})


def code_of(call: Callable, *args, **options) -> str:
    with pytest.raises(TraceError) as caught:
        call(*args, **options)
    assert "\nhint: " in str(caught.value)
    return caught.value.code


def outcomes(observations: Observations) -> dict[str, int]:
    """The outcomes that occurred; with every line accounted for."""
    report = observations.report
    assert sum(report[name] for name in OUTCOMES) == report["lines"]
    return {name: report[name] for name in OUTCOMES if report[name]}
