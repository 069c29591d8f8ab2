"""The peer's configuration: what is built from it."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import numpy as np
from asking import CASES, SURFACE, decode
from configs import DEPLOYMENT, FIT, LAZY, LOOKUP, PROFILED, R, fit, look, merged
from table_pairs import PROFILE, ROUND, ROWS, refusal, seal, table

from fpmjax.config import best_available
from fpmjax.errors import CellNotFoundError, CoverageError, OptionError, SpeculationError, TableError
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.models.corrected import Corrected
from fpmjax.models.regression import Regression, regression
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.schema import resolve


def test_a_regression_is_built_with_the_peers_defaults():
    model, origin = best_available(FIT)
    same = regression(role="decode")
    assert model.role == "decode" and not model.ready and origin.selected == "fpm_regression"
    assert (model.feature_axes, model.sampling_axes, model.every) == (same.feature_axes, same.sampling_axes, False)
    assert [int(x) for x in (model.rules.min_observations, same.rules.min_observations)] == [5, 5]


def test_every_option_of_a_regression_arrives(monkeypatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr("fpmjax.config.regression", lambda **options: asked.update(options))
    linear = {"feature_axes": ["n", "F"], "non_negative": False, "update_policy": LAZY}
    inner = {
        "sampling": {"axes": ["n"], "bins_per_axis": [3], "max_observations": 9},
        "min_observations": 2,
        "fit": {"kind": "linear", "singular_ridge_scale": 0, "rebuild_interval": 7, "linear": linear},
    }
    weights = {"attention_kv_weight": 2, "prefill_attention_pair_weight": 3, "ffn_token_weight": 0.5}
    best_available(FIT | {"estimator_config": {"fpm_regression": inner, "features": weights}})
    assert asked == {
        "role": "decode",
        "sampling_axes": ("n",),
        "bins_per_axis": (3,),
        "max_observations": 9,
        "min_observations": 2,
        "singular_ridge_scale": 0.0,
        "rebuild_interval": 7,
        "feature_axes": ("n", "F"),
        "non_negative": False,
        "lazy": ErrorThreshold(0.1, 1.0, 3, 1, 2, 10),
        **weights,
    }
    best_available(fit(R + "fit", {"kind": "spline", "spline": {"knots_per_axis": 3, "search": {"kind": "periodic"}}}))
    assert asked["spline"] == Knots(3, step=64)
    best_available(fit(R + "fit", {"kind": "spline"}))
    assert asked["spline"] == Knots(2, None, 16, 8, 0.05, 1.0, 64)


def test_a_table_is_found_by_its_path_by_a_systems_root_and_by_a_profile(tmp_path):
    folder = tmp_path / "data" / "h200_sxm" / "vllm" / "0.24.0"
    folder.mkdir(parents=True)
    for suffix in (".parquet", ".metadata.json"):
        shutil.copy((CASES / SURFACE).with_suffix(suffix), folder / f"fpm_forward_perf{suffix}")
    by_root = look(fpm_parquet_path=None) | {"systems_paths": (str(tmp_path / "data"), str(tmp_path))}
    for config in (LOOKUP, by_root, PROFILED, merged(by_root, {"gemm_dtype": "bfloat16", "tp_size": 2}) | {"tp": 2}):
        if "tp_size" in config:
            del config["tp"]
        model = ForwardPassPerfModel.best_available(config)
        assert model.estimate_forward_pass_time_ms(decode(4, 4096)) == 8.0
        assert isinstance(model.model, Corrected) and model.model.policy == "fixed"
    root = ForwardPassPerfModel.best_available(by_root).diagnostics()["provenance"]["selected_systems_root"]
    assert root == str(folder)


def test_options_of_the_correction_arrive():
    options = {
        "mode": "hybrid",
        "sampling": {"bins_per_axis": [2, 3], "max_observations": 7},
        "min_observations": 2,
        "factor_bounds": {"min": None, "max": 3},
    }
    model, _ = best_available(merged(LOOKUP, {"estimator_config": {"correction": options}}))
    assert (model.policy, model.bounds.tolist(), int(model.min_observations)) == ("hybrid", [0.0, 3.0], 2)
    model, _ = best_available(merged(LOOKUP, {"estimator_config": {"correction": {"enabled": False}}}))
    assert model.policy is None


def test_a_frozen_dataclass_is_read_like_a_mapping():
    Config = dataclasses.make_dataclass("Config", list(FIT), frozen=True)
    assert resolve(Config(**FIT)) == resolve(FIT)
    assert resolve(FIT | {"nextn": np.int64(0)}) == resolve(FIT)


def test_a_missing_table_falls_back_only_where_that_is_allowed(tmp_path):
    config = look(fpm_parquet_path=str(tmp_path / "none.parquet"))
    assert refusal(best_available, config, error=TableError)[0] == "not_collected"
    model = ForwardPassPerfModel.best_available(config | {"fallback_policy": "allow"})
    assert isinstance(model.model, Regression)
    shown = model.diagnostics()
    assert (shown["source"], shown["readiness"]) == ("fallback_regression", "unsupported_config")
    assert "File does not exist" in shown["last_warning"] and "op_level" not in shown["last_warning"]
    assert [len(shown["provenance"]["selection_failures"]), shown["provenance"]["selected_estimation_mode"]] == [
        2,
        "fpm_regression",
    ]
    other = LOOKUP | {"tp": 4, "fallback_policy": "regression"}
    assert isinstance(best_available(other)[0], Regression)
    broken = seal(tmp_path, b"not a table")
    config = merged(config | {"fallback_policy": "allow"}, look(fpm_parquet_path=str(broken)))
    refusal(best_available, config | {"fallback_policy": "allow"}, error=TableError)


def test_several_cells_are_no_reason_to_fall_back(tmp_path):
    two = {name: values * 2 for name, values in ROWS.items()} | {"gemm_quant_mode": ["bfloat16"] * 6 + ["fp8"] * 6}
    config = look(fpm_parquet_path=str(seal(tmp_path, table(two)))) | {"model": "acme/small", "tp": 1}
    code, message = refusal(best_available, config | {"fallback_policy": "allow"}, error=CellNotFoundError)
    assert code == "cell_ambiguous" and "gemm_quant_mode" in message
    best_available(config | {"gemm_quant_mode": "fp8"})


def test_a_cell_is_never_borrowed():
    assert refusal(best_available, LOOKUP | {"tp": 4}, error=CellNotFoundError)[0] == "cell_not_found"
    for name in ("gemm_quant_mode", "kvcache_quant_mode", "attention_backend"):
        assert refusal(best_available, LOOKUP | {name: "fp8"}, error=CellNotFoundError)[0] == "cell_not_found"
    refusal(best_available, LOOKUP | {"dcp": 2}, error=CellNotFoundError)
    refusal(best_available, LOOKUP | {"enable_eplb": True}, error=CellNotFoundError)
    refusal(best_available, LOOKUP | {"system": "other"}, error=TableError)


def test_a_worker_needs_measured_rows_of_its_role(tmp_path):
    rows = {"workload_kind": ["decode"] * 2, "batch_size": [4, 8], "latency_ms": [6.0, 7.0]}
    rows |= {"total_prefill_tokens": 0, "total_kv_read_tokens": 4096, "kv_seed_regime": "real_kv"}
    path = str(seal(tmp_path, table(rows)))
    config = look(fpm_parquet_path=path) | {"model": "acme/small", "tp": 1}
    best_available(config)
    assert refusal(best_available, config | {"worker_type": "aggregated"}, error=CoverageError)[0] == "no_rows"


def test_a_measured_round_is_found_by_its_profile_only(tmp_path):
    rounds = {"measurement_policy": ROUND, "timing_scope": "model_step_cuda", "execution_profile": PROFILE}
    rounds |= {"measurement_reduction": "single_sample", "source_sample_count": 1, "measurement_repeats": 1}
    path = seal(tmp_path, table(rounds), {"measurement_policy": ROUND, "timing_scope": "model_step_cuda"})
    config = look(fpm_parquet_path=str(path)) | {"model": "acme/small", "tp": 1}
    assert refusal(best_available, config, error=CellNotFoundError)[0] == "cell_not_found"
    execution = {"kind": "speculative_round", "method": "eagle3", "num_draft_tokens": 3, "draft_model": "acme/draft"}
    execution |= {"draft_revision": "a" * 40, "timing_scope": "model_step_cuda"}
    deployment = DEPLOYMENT | {"tp": 1, "moe_tp": 1, "execution_profile": execution}
    profile = {"model": "acme/small", "model_revision": "b" * 40, "deployments": [deployment]}
    model = ForwardPassPerfModel.best_available(config | {"nextn": 3, "fpm_profile": profile})
    assert model.estimate_forward_pass_time_ms(decode(8, 4096)) == 7.0
    ask = model.estimate_forward_pass_time_ms
    assert refusal(ask, decode(8, 4096), draft_length=3, error=SpeculationError)[0] == "measured_round"
    refusal(best_available, config | {"nextn": 2, "fpm_profile": profile}, error=OptionError)


def test_coverage_is_collected_where_it_is_asked_for():
    model = ForwardPassPerfModel.best_available(look(collect_coverage=True))
    model.estimate_forward_pass_time_ms(decode(4, 4096))
    coverage = model.fpm_query_coverage()
    assert coverage is not None and coverage["queries"] == {"measured": 1, "interpolated": 0, "unsupported": 0}
    assert ForwardPassPerfModel.best_available(LOOKUP).fpm_query_coverage() is None


def test_a_configured_speculation_takes_no_draft_length():
    for extra, said in (({"nextn": 3}, "nextn=3"), ({"speculation": {"kind": "mtp"}}, "speculation.kind='mtp'")):
        model = ForwardPassPerfModel.best_available(FIT | extra)
        assert model.estimate_forward_pass_time_ms(decode(1, 10)) is None
        for ask in (model.estimate_forward_pass_time_ms, model.estimate_forward_pass_detailed):
            code, message = refusal(ask, decode(1, 10), draft_length=2, error=SpeculationError)
            assert code == "speculative_config" and said in message
    model = ForwardPassPerfModel.best_available(FIT | {"speculation": {"kind": "none"}})
    assert model.estimate_forward_pass_time_ms(decode(1, 10), draft_length=2) is None
