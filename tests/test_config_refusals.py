"""The peer's configuration: every mistake by its path, and what is not modelled by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configs import FIT, LAZY, LOOKUP, PROFILED, C, E, R, fit, look, merged, trees
from table_pairs import refusal

from fpmjax.config import best_available
from fpmjax.errors import OptionError

POLICY, SEARCH = R + "fit.linear.update_policy", R + "fit.spline.search"


def spline(**search: Any) -> dict[str, Any]:
    return {"fit": {"kind": "spline", "spline": {"search": {"kind": "adaptive", **search}}}}


# Every refusal once

MEANING = [
    (R + "fit.rebuild_interval", 0, "must be positive or null"),
    (R + "fit.singular_ridge_scale", -1, "must be finite and nonnegative"),
    (R + "fit.singular_ridge_scale", float("nan"), "must be finite and nonnegative"),
    (R + "sampling.bins_per_axis", [4], "must contain exactly one bin count per sampling axis"),
    (R + "sampling.bins_per_axis", [0, 4], "must be positive and have a representable product"),
    (R + "sampling.bins_per_axis", [2**40, 2**40], "must be positive and have a representable product"),
    (R + "sampling.axes", [], "must contain 1 to 6 axes"),
    (R + "sampling.axes", ["n", "E", "P", "F", "maxE", "maxP", "minP"], "must contain 1 to 6 axes"),
    (R + "sampling.axes", ["n", "n"], "must not contain repeated axes"),
    (R + "fit.linear.feature_axes", [], "must contain 1 to 6 axes"),
    (R + "fit.linear.feature_axes", ["n", "n"], "must not contain repeated axes"),
    (R + "sampling.max_observations", 0, "must be positive"),
    (R + "min_observations", 0, "invalid forward pass perf options: min_observations must be >= 1"),
    (R + "min_observations", 65, "invalid forward pass perf options: min_observations must be <= max_observations"),
    (POLICY, LAZY | {"relative_tolerance": -1}, ".relative_tolerance must be finite and nonnegative"),
    (POLICY, LAZY | {"absolute_tolerance_ms": -1}, ".absolute_tolerance_ms must be finite and nonnegative"),
    (POLICY, LAZY | {"window": 0}, ".window must be positive"),
    (POLICY, LAZY | {"cooldown": 0}, ".cooldown must be positive"),
    (POLICY, LAZY | {"startup_observations": 0}, ".startup_observations must be positive"),
    (POLICY, LAZY | {"trigger": 0}, ".trigger must be positive and at most window"),
    (POLICY, LAZY | {"trigger": 4}, ".trigger must be positive and at most window"),
    (R + "fit", {"kind": "spline", "linear": {}}, "linear requires fit.kind='standardized_nnls' (alias 'linear')"),
    (R + "fit", {"kind": "linear", "spline": {}}, "spline requires fit.kind='spline'"),
    (R + "fit", {"kind": "spline", "spline": {"knots_per_axis": 4}}, "knots_per_axis must be 2 or 3"),
    (R + "fit", spline(kind="periodic", step=0)["fit"], "search.step must be positive"),
    (R + "fit", spline(tolerance=0)["fit"], "search.tolerance must be finite and positive"),
    (R + "fit", spline(absolute_tolerance_ms=-1)["fit"], "search.absolute_tolerance_ms must be finite and nonnegative"),
    (R + "fit", spline(window=0)["fit"], "search.window must be positive"),
    (R + "fit", spline(trigger=17)["fit"], "search.trigger must be positive and at most window"),
    (R + "fit", spline(cooldown=0)["fit"], "search.cooldown must be positive"),
    (
        E + "fpm_regression",
        {"sampling": {"axes": ["moe", "attention"]}, **spline()},
        "sampling.axes must be ['attention', 'moe'] for spline fitting",
    ),
    (
        E + "fpm_regression",
        {"sampling": {"max_observations": 31}, **spline()},
        "sampling.max_observations must be at least 32 for spline fitting",
    ),
    (E + "features.attention_kv_weight", 0, "regression_attention_kv_weight must be finite and > 0.0"),
    (E + "features.prefill_attention_pair_weight", -1, "regression_prefill_attention_pair_weight must be finite"),
    (E + "features.ffn_token_weight", float("inf"), "regression_ffn_token_weight must be finite and > 0.0"),
    (C + "factor_bounds.min", 0, "min_faster_correction_factor must be finite and in (0.0, 1.0]"),
    (C + "factor_bounds.min", 2, "min_faster_correction_factor must be finite and in (0.0, 1.0]"),
    (C + "factor_bounds.max", 0.5, "max_slower_correction_factor must be finite and >= 1.0"),
    (C + "max_num_tokens", 0, "max_num_tokens must be >= 1"),
    (C + "max_batch_size", 0, "max_batch_size must be >= 1"),
    (C + "max_kv_tokens", 0, "max_kv_tokens must be >= 1"),
    (C + "min_observations", 0, "min_observations must be >= 1"),
    (C + "min_observations", 65, "min_observations must be <= max_observations"),
    (C + "sampling.max_observations", 0, "max_observations must be >= 1"),
    (C + "sampling.bins_per_axis", [0, 1], "must be positive and have a representable product"),
    ("model", " ", "model cannot be empty"),
    ("system", "", "system cannot be empty"),
    ("tp", 0, "tp, pp, and attention_dp must be positive"),
    ("moe_tp_size", 1, "moe_tp_size and moe_ep_size must be configured together"),
    ("cp_size", 0, "cp_size must be positive"),
    ("dcp", 2, "dcp must be positive and divide tp"),
    ("nextn", 6, "nextn must be in 0..=5"),
]


@pytest.mark.parametrize(("path", "value", "words"), MEANING)
def test_what_an_option_means_is_checked(path, value, words):
    _, message = refusal(best_available, fit(path, value), error=OptionError)
    assert message.startswith("invalid engine config: ") and words in message
    if path.startswith(E) and "features" not in path:
        assert ".".join(path.split(".")[:2]) in message


SHAPE = [
    ("foo", 1, "at foo: unknown field `foo`, expected one of `model`, `system`"),
    (E + "foo", 1, f"at {E}foo: unknown field `foo`, expected one of `features`"),
    (R + "samplin", 1, f"at {R}samplin: unknown field"),
    (R + "sampling.foo", 1, f"at {R}sampling.foo: unknown field"),
    (R + "fit.foo", 1, f"at {R}fit.foo: unknown field"),
    (R + "fit.linear.foo", 1, f"at {R}fit.linear.foo: unknown field"),
    (POLICY, LAZY | {"foo": 1}, f"at {POLICY}.foo: unknown field"),
    (POLICY, {"kind": "always", "window": 3}, "unknown field `window`, there are no fields"),
    (R + "fit.spline.foo", 1, f"at {R}fit.spline.foo: unknown field `foo`, expected `knots_per_axis` or `search`"),
    (SEARCH, {"kind": "periodic", "foo": 1}, f"at {SEARCH}.foo: unknown field"),
    (E + "features.foo", 1, f"at {E}features.foo: unknown field"),
    (C + "foo", 1, f"at {C}foo: unknown field"),
    (C + "sampling.axes", ["n"], f"at {C}sampling.axes: unknown field"),
    (C + "factor_bounds.foo", 1, f"at {C}factor_bounds.foo: unknown field"),
    (E + "fpm_interpolation.foo", 1, f"at {E}fpm_interpolation.foo: unknown field"),
    (E + "fpm_learned.foo", 1, f"at {E}fpm_learned.foo: unknown field"),
    (E + "fpm_learned.adaptation", "x", "unknown variant `x`, expected one of `online`, `frozen`, `causal_selector`"),
    (E + "op_level.foo", 1, f"at {E}op_level.foo: unknown field"),
    ("speculation", {"kind": "none", "foo": 1}, "at speculation.foo: unknown field"),
    ("speculation", {}, "at speculation: missing field `kind`"),
    ("speculation", {"kind": "x"}, "at speculation.kind: unknown variant `x`"),
    ("fpm_profile", {"model": "m", "deployments": [{"foo": 1}]}, "at fpm_profile.deployments[0].foo: unknown field"),
    (POLICY, {}, f"at {POLICY}: missing field `kind`"),
    (POLICY, {"kind": "error_threshold"}, f"at {POLICY}: missing field `relative_tolerance`"),
    (POLICY, {"kind": "x"}, f"at {POLICY}.kind: unknown variant `x`, expected `always` or `error_threshold`"),
    (SEARCH, {"kind": "x"}, f"at {SEARCH}.kind: unknown variant `x`, expected `periodic` or `adaptive`"),
    (R + "fit.kind", "foo", f"at {R}fit.kind: unknown variant `foo`"),
    (R + "sampling.axes", ["Attention"], f"at {R}sampling.axes[0]: unknown variant `Attention`"),
    (R + "min_observations", "a", f'at {R}min_observations: invalid type: string "a", expected usize'),
    (R + "min_observations", 1.5, "invalid type: floating point `1.5`, expected usize"),
    (R + "min_observations", True, "invalid type: boolean `true`, expected usize"),
    (R + "min_observations", None, "invalid type: null, expected usize"),
    (R + "min_observations", -1, "invalid value: integer `-1`, expected usize"),
    (R + "sampling.bins_per_axis", 4, "invalid type: integer `4`, expected a sequence"),
    (R + "sampling", None, f"at {R}sampling: invalid type: null"),
    (R + "fit.singular_ridge_scale", "a", "expected f64"),
    (R + "fit.linear.non_negative", 1, "invalid type: integer `1`, expected a boolean"),
    (C + "enabled", 1, "expected a boolean"),
    (C + "mode", "foo", f"at {C}mode: unknown variant `foo`, expected one of `auto`, `fixed`"),
    (C + "feature_space", "x", "unknown variant `x`, expected `legacy_workload`"),
    (C + "sampling.bins_per_axis", [4], "invalid length 1, expected an array of length 2"),
    ("estimator_config", 3, "at estimator_config: invalid type: integer `3`"),
    ("worker_type", "Decode", "at worker_type: unknown variant `Decode`, expected one of `prefill`, `decode`"),
    ("estimation_mode", "foo", "at estimation_mode: unknown variant `foo`"),
    ("fallback_policy", "foo", "at fallback_policy: unknown variant `foo`"),
    ("backend", "tgi", "at backend: unknown variant `tgi`, expected one of `trtllm`, `sglang`, `vllm`"),
    ("database_mode", "FOO", "at database_mode: unknown variant `FOO`"),
    ("model", 3, "at model: invalid type: integer `3`, expected a string"),
    ("tp", 1.5, "at tp: invalid type: floating point `1.5`, expected u32"),
    ("tp", 2**32, "at tp: invalid value: integer `4294967296`, expected u32"),
    ("enable_eplb", 1, "at enable_eplb: invalid type: integer `1`, expected a boolean"),
    ("systems_paths", "here", 'at systems_paths: invalid type: string "here", expected a sequence'),
    (R + "fit.linear", [1], f"at {R}fit.linear: invalid type: sequence"),
    (R + "fit.rebuild_interval", {}, "invalid type: map, expected usize"),
]


@pytest.mark.parametrize(("path", "value", "words"), SHAPE)
def test_names_and_types_are_checked(path, value, words):
    _, message = refusal(best_available, fit(path, value), error=OptionError)
    assert message.startswith("invalid forward-pass config at ") and words in message


def test_the_nearest_name_is_given():
    _, message = refusal(best_available, fit(R + "samplin", 1), error=OptionError)
    assert message.endswith("hint: did you mean `sampling`?")
    _, message = refusal(best_available, fit("worker_type", "Decode"), error=OptionError)
    assert message.endswith("hint: did you mean `decode`?")


def test_what_has_no_default_has_to_be_given():
    for name in ("model", "system", "backend", "worker_type"):
        config = {key: value for key, value in FIT.items() if key != name}
        code, message = refusal(best_available, config, error=OptionError)
        assert code == "missing_field" and f"missing field `{name}`" in message
    refusal(best_available, None, error=OptionError)
    refusal(best_available, [FIT], error=OptionError)
    refusal(best_available, FIT | {"tp": 1, "tp_size": 1}, error=OptionError)


SOL = merged(LOOKUP, {"estimator_config": {"fpm_interpolation": {"method": "sol"}}})
REFUSED = [
    (FIT | {"estimation_mode": "op_level"}, "op_level", "fpmjax does not model"),
    (FIT | {"estimation_mode": "auto"}, "auto", "would try op_level first"),
    ({k: v for k, v in FIT.items() if k != "estimation_mode"}, "auto", "would try op_level first"),
    (FIT | {"estimation_mode": "fpm_learned"}, "option", "fpm_learned names no artifact"),
    (trees(), "adaptation", "fpm_learned.adaptation='online' is not modelled"),
    (trees(adaptation="causal_selector"), "adaptation", "adaptation='causal_selector' is not modelled"),
    (trees(artifact_path=None, checkpoint_path="x", adaptation="frozen"), "adaptation", "state of online updates"),
    (
        trees(checkpoint_path="x", adaptation="frozen"),
        "adaptation",
        "checkpoint_path holds the state of online updates",
    ),
    (SOL, "interpolation_method", "method='sol' is not modelled"),
    (look(method="auto"), "interpolation_method", "method='auto' is not modelled"),
    (LOOKUP | {"estimator_config": {}}, "interpolation_method", "method='auto' is not modelled"),
    (LOOKUP | {"estimation_mode": "fpm", "estimator_config": {}}, "interpolation_method", "is not modelled"),
    (LOOKUP | {"nextn": 1}, "speculative_config", "nextn=1"),
    (LOOKUP | {"speculation": {"kind": "mtp"}}, "speculative_config", "speculation.kind='mtp'"),
    (FIT | {"speculation": {"kind": "ngram"}}, "speculative_config", "speculation.kind='ngram'"),
    (FIT | {"nextn": 1, "speculation": {"kind": "mtp"}}, "option", "speculation cannot be combined with nextn"),
    (LOOKUP | {"database_mode": "SOL"}, "option", "database_mode='SOL'"),
    (look(unrecorded_quant_modes=["fmha"]), "option", "unrecorded_quant_modes is not modelled"),
    (LOOKUP | {"decoder_replay": True}, "option", "decoder_replay=True is not modelled"),
    (LOOKUP | {"wideep_num_slots": 8}, "option", "wideep_num_slots=8 is not modelled"),
    (LOOKUP | {"moe_kernel_source": "x"}, "option", "moe_kernel_source='x' is not modelled"),
    (LOOKUP | {"encoder_parallel": "tp"}, "option", "encoder_parallel='tp' is not modelled"),
    (look(fpm_parquet_path=""), "option", "fpm_parquet_path cannot be empty"),
    (look(fpm_parquet_path=None), "option", "fpm_interpolation has no table"),
    (look(fpm_parquet_path=None) | {"systems_paths": ["no/such"]}, "option", "is not a directory: no/such"),
    (
        look(fpm_parquet_path=None) | {"systems_paths": ["x"], "backend_version": None},
        "option",
        "hold a table per backend_version",
    ),
    (fit(E + "fpm_interpolation.collect_coverage", True), "option", "requires estimation_mode='fpm_interpolation'"),
    (look(collect_coverage=True) | {"fallback_policy": "allow"}, "option", "and fallback_policy='deny'"),
    (PROFILED | {"backend_version": None}, "option", "fpm_profile requires a literal backend_version"),
    (PROFILED | {"model": "org/other"}, "option", "FPM profile model identity mismatch"),
    (PROFILED | {"tp": 4}, "option", "no matching FPM deployment profile"),
    (PROFILED | {"gemm_quant_mode": "fp8"}, "option", "FPM profile identity conflict: gemm_quant_mode='fp8'"),
]


@pytest.mark.parametrize(("config", "code", "words"), REFUSED)
def test_what_is_not_modelled_is_refused_by_name(config, code, words):
    found, message = refusal(best_available, config, error=OptionError)
    assert found == code and words in message


def test_a_refused_configuration_reads_no_file(monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("a file was read"))
    for config, _, _ in REFUSED:
        refusal(best_available, config, error=OptionError)
