"""Tables of this package in the Rust peer, where it is installed (extra `peer`, an environment of its own)."""

from __future__ import annotations

import numpy as np
import pytest
from table_pairs import IDENTITY, PROFILE, ROUND, ROWS

from fpmjax.tables.load import load_cells
from fpmjax.tables.policy import POLICIES
from fpmjax.tables.write import write_table

engine = pytest.importorskip("aisimulate_core.sdk.rust_engine_step")

MODEL = "Qwen/Qwen3-0.6B"  # a model that the peer knows without a download
ROW_COLUMNS = {
    "per_row_single_sample_or_median_of_3": {"measurement_policy": "kvwarm_median_of_3", "measurement_repeats": 3},
    "per_row_single_sample_or_full_grid_median_v1": {
        "measurement_policy": "independent_full_grid_median_of_3",
        "measurement_repeats": 3,
    },
}


def in_peer(path, **options):
    method = {"method": "sol", "fpm_parquet_path": str(path)}
    asked = {name: IDENTITY[name] for name in ("system", "backend", "backend_version", "tp")} | options
    config = engine.ForwardPassPerfModelConfig(
        model=MODEL,
        worker_type="aggregated",
        estimation_mode="fpm_interpolation",
        fallback_policy="deny",
        estimator_config={"fpm_interpolation": method},
        **asked,
    )
    return engine.RustForwardPassPerfModel.best_available(config)


def awkward_rows(seed: int) -> dict[str, np.ndarray | list[str]]:
    rng = np.random.default_rng(seed)
    batch, kv = (axis.ravel() for axis in np.meshgrid([1, 2, 3, 8, 13], [0, 7, 4096, 999_983], indexing="ij"))
    rows = {
        "workload_kind": ["decode"] * 20 + ["prefill"] * 20,
        "batch_size": np.concatenate([batch, batch]),
        "total_prefill_tokens": np.concatenate([np.zeros(20, np.int64), batch * 17]),
        "total_kv_read_tokens": np.concatenate([kv, kv]),
        "latency_ms": np.exp(rng.normal(size=40) * 8),
    }
    return rows


@pytest.mark.parametrize("schema_version", [6, 7])
def test_every_recorded_point_comes_back_from_the_peer(tmp_path, schema_version):
    rows = awkward_rows(schema_version)
    path = write_table(tmp_path, rows, identity=IDENTITY | {"model": MODEL}, schema_version=schema_version)
    peer, cell = in_peer(path), load_cells(path).select()
    for batch, kv, latency in zip(cell.decode.batch, cell.decode.kv, cell.decode.latency_ms, strict=True):
        assert peer.predict_decode_latency_total(int(batch), int(kv)) == latency
    p = cell.prefill
    for batch, tokens, kv, latency in zip(p.batch, p.tokens, p.kv, p.latency_ms, strict=True):
        assert peer.predict_prefill_latency_total(int(batch), int(tokens), int(kv)) == latency


@pytest.mark.parametrize("policy", [name for name, p in POLICIES.items() if not p.sample_contract])
def test_every_wall_policy_loads_in_the_peer(tmp_path, policy):
    backend = POLICIES[policy].backend or "vllm"
    version = {"vllm": "0.24.0", "sglang": "0.5.14"}[backend]
    identity = IDENTITY | {"model": MODEL, "backend": backend, "backend_version": version}
    path = write_table(tmp_path, ROWS | ROW_COLUMNS.get(policy, {}), identity=identity, policy=policy)
    peer = in_peer(path, backend=backend, backend_version=version)
    assert peer.predict_decode_latency_total(8, 4096) == 7.0


def test_the_peer_reads_measured_rounds_and_finds_another_cell(tmp_path):
    """The pair passes its checks, so that it only misses the plain cell that is asked for."""
    rows = ROWS | {"measurement_reduction": "single_sample", "source_sample_count": 1, "execution_profile": PROFILE}
    path = write_table(tmp_path, rows, identity=IDENTITY | {"model": MODEL}, policy=ROUND)
    with pytest.raises(Exception, match="No FPM cell matches"):
        in_peer(path)
