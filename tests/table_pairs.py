"""Table pairs for tests, sealed by plain pyarrow and json: good ones and, on purpose, bad ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fpmjax.errors import FpmError
from fpmjax.tables.identity import Identity

NAME = "fpm_forward_perf.parquet"
IDENTITY: dict[str, Any] = {
    "model": "acme/small",
    "system": "h200_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
    "cp": 1,
}
# Rows 0, 1: uncached prefill; 2: cached prefill; 3 to 5: decode.
ROWS: dict[str, list] = {
    "workload_kind": ["prefill"] * 3 + ["decode"] * 3,
    "batch_size": [1, 1, 1, 4, 8, 8],
    "total_prefill_tokens": [1024, 2048, 1024, 0, 0, 0],
    "total_kv_read_tokens": [0, 0, 512, 4096, 4096, 8192],
    "latency_ms": [10.0, 20.0, 12.0, 6.0, 7.0, 7.5],
    "kv_seed_regime": ["n/a", "n/a", "real_kv", "real_kv", "real_kv", "real_kv"],
}
SIDECAR: dict[str, Any] = {
    "schema_name": "aic_fpm_forward_perf",
    "schema_version": 7,
    "coordinate_system": "iteration_totals_balanced_v1",
    "measurement_policy": "dynamo_native_single_sample_v1",
    "system": "h200_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
}
AR = "vllm_native_ar_model_step_cuda_v1"
ROUND = "vllm_native_fpm_model_step_cuda_v1"
AR_ROWS: dict[str, Any] = {
    "measurement_policy": AR,
    "timing_scope": "model_step_cuda",
    "measurement_reduction": "single_sample",
    "source_sample_count": 1,
}
AR_SIDECAR = {"measurement_policy": AR, "timing_scope": "model_step_cuda"}
PROFILE = (
    'speculative_round_v1:{"model_revision":"' + "b" * 40 + '","execution_profile":{"kind":"speculative_round",'
    '"method":"eagle3","num_draft_tokens":3,"draft_model":"acme/draft","draft_revision":"' + "a" * 40 + '",'
    '"timing_scope":"model_step_cuda"}}'
)


def table(changes: Any = None, types: dict[str, pa.DataType] | None = None) -> pa.Table:
    """The good table with whole columns replaced (a value stands for all rows, `...` removes the column)."""
    base = {f"{'model_path' if name == 'model' else name}": value for name, value in IDENTITY.items()}
    base |= {"cell_id": "cell-0", "weight_quantization": "", "moe_backend": "auto", "attention_backend": "auto"}
    base |= {"enable_wideep": False, "enable_eplb": False, "partition_policy": "balanced_v1"}
    base |= {"model_config_sha256": "", "execution_profile": "full", "engram_residency": "none"}
    base |= {"input_modality": "text"} | ROWS | dict(changes or {})
    count = max(len(value) for value in base.values() if isinstance(value, list))
    columns = {n: v if isinstance(v, list) else [v] * count for n, v in base.items() if v is not ...}
    return pa.table({n: pa.array(v, (types or {}).get(n)) for n, v in columns.items()})


def identity(**changes: Any) -> Identity:
    """The good table's identity, changed."""
    return Identity(**{**IDENTITY, **changes})


def seal(folder: Path, data: pa.Table | bytes, sidecar: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write a pair with a right digest and row count, whatever its content; `...` removes a sidecar field."""
    path = folder / NAME
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        pq.write_table(data, path, compression=options.pop("compression", "zstd"), **options)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    count = 0 if isinstance(data, bytes) else data.num_rows
    fields = SIDECAR | {"parquet_sha256": digest, "row_count": count} | dict(sidecar or {})
    fields = {name: value for name, value in fields.items() if value is not ...}
    path.with_suffix(".metadata.json").write_text(json.dumps(fields))
    return path


def with_row(row: int, **values: Any) -> dict[str, Any]:
    """Columns of the good table with the values of one row replaced."""
    good = table().to_pydict()
    return {n: [*good[n][:row], value, *good[n][row + 1 :]] for n, value in values.items()}


def refusal(call: Any, *args: Any, error: type[FpmError] = FpmError, **options: Any) -> tuple[str, str]:
    """(code, message) of the error that a call raises; every message ends with one hint line."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert message.count("\nhint: ") == 1 and not message.endswith("."), message
    return caught.value.code, message
