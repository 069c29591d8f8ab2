"""The configuration of a forward-pass model, as data: every field, its default, what it must obey.

Names, defaults and words are the peer's.  `resolve` reads a mapping or a frozen dataclass into plain values; what
this package does not model is known here too, so that it is refused by name or left unread on purpose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fpmjax.observe.features import AXES
from fpmjax.options import (
    ABSENT,
    FINITE_NONNEGATIVE,
    FINITE_POSITIVE,
    POSITIVE,
    POSITIVE_OR_NULL,
    U32,
    Option,
    anything,
    choice,
    count,
    each,
    flag,
    number,
    optional,
    record,
    tagged,
    text,
    wrong_meaning,
    wrong_type,
)

MODES = ("auto", "op_level", "fpm_interpolation", "fpm_regression", "fpm_learned")
ROLES = ("prefill", "decode", "aggregated")
SPECULATION_KINDS = ("none", "ngram", "eagle3", "mtp", "dflash", "dspark", "draft_model")
DEFAULT_AXES = ["attention", "moe"]
MOST_AXES, LARGEST_PRODUCT = 6, 2**64 - 1
SPLINE_ROWS = 32  # fewest retained rows that a knot search works with
MOST_NEXTN = 5

AXIS_LIST = each(choice(*AXES))

ALWAYS = record()
ERROR_THRESHOLD = record(
    relative_tolerance=Option(number, rule=FINITE_NONNEGATIVE),
    absolute_tolerance_ms=Option(number, rule=FINITE_NONNEGATIVE),
    window=Option(count(), rule=POSITIVE),
    trigger=Option(count()),
    cooldown=Option(count(), rule=POSITIVE),
    startup_observations=Option(count(), 10, POSITIVE),
)
PERIODIC = record(step=Option(count(), 64, POSITIVE))
ADAPTIVE = record(
    window=Option(count(), 16, POSITIVE),
    trigger=Option(count(), 8),
    tolerance=Option(number, 0.05, FINITE_POSITIVE),
    absolute_tolerance_ms=Option(number, 1.0, FINITE_NONNEGATIVE),
    cooldown=Option(count(), 64, POSITIVE),
)
LINEAR = record(
    feature_axes=Option(AXIS_LIST, DEFAULT_AXES),
    non_negative=Option(flag, True),
    update_policy=Option(tagged(always=ALWAYS, error_threshold=ERROR_THRESHOLD), {"kind": "always"}),
)
SPLINE = record(
    knots_per_axis=Option(count(), 2),
    search=Option(tagged(periodic=PERIODIC, adaptive=ADAPTIVE), {"kind": "adaptive"}),
)
REGRESSION = record(
    sampling=Option(
        record(
            axes=Option(AXIS_LIST, DEFAULT_AXES),
            bins_per_axis=Option(each(count()), [4, 4]),
            max_observations=Option(count(), 64, POSITIVE),
        ),
        {},
    ),
    min_observations=Option(count(), 5),
    fit=Option(
        record(
            kind=Option(choice("standardized_nnls", "spline", linear="standardized_nnls"), "standardized_nnls"),
            singular_ridge_scale=Option(number, 1e-9, FINITE_NONNEGATIVE),
            rebuild_interval=Option(optional(count()), None, POSITIVE_OR_NULL),
            linear=Option(optional(LINEAR), None),
            spline=Option(optional(SPLINE), None),
        ),
        {},
    ),
)
CORRECTION = record(
    enabled=Option(flag, True),
    mode=Option(choice("auto", "fixed", "dynamic_local", "hybrid"), "auto"),
    feature_space=Option(choice("legacy_workload"), "legacy_workload"),
    sampling=Option(
        record(
            bins_per_axis=Option(each(count(), 2), [4, 4]),
            max_observations=Option(count(), 64),
        ),
        {},
    ),
    min_observations=Option(count(), 5),
    factor_bounds=Option(record(min=Option(optional(number), 0.5), max=Option(optional(number), 2.0)), {}),
    max_num_tokens=Option(count(U32), 8192),
    max_batch_size=Option(count(U32), 512),
    max_kv_tokens=Option(count(), 2_000_000),
)
INTERPOLATION = record(
    method=Option(choice("auto", "sol", "direct"), "auto"),
    text_only=Option(flag, ABSENT),
    fpm_parquet_path=Option(optional(text), None),
    collect_coverage=Option(flag, False),
    unrecorded_quant_modes=Option(each(text), ABSENT),
)
# Only a frozen artifact is modelled; what steers online updates is known by name and not read.
ONLINE = ("update_mode", "recent_window", "history_weight", "history_weight_ramp_observations", "history_bin_grouping")
ONLINE += ("mutable_tree_tail", "update_step", "recent_max_age_observations", "update_every", "derivative_refresh")
ONLINE += ("split_sampling_rate", "split_rank_tolerance", "eager_refresh_interval", "seed")
LEARNED = record(
    artifact_path=Option(optional(text), None),
    checkpoint_path=Option(optional(text), None),
    source_sha256=Option(optional(text), None),
    adaptation=Option(choice("online", "frozen", "causal_selector"), "online"),
    **{name: Option(anything, ABSENT) for name in ONLINE},
)
ESTIMATORS = record(
    features=Option(
        record(
            attention_kv_weight=Option(number, 1.0),
            prefill_attention_pair_weight=Option(number, 1.0),
            ffn_token_weight=Option(number, 1.0),
        ),
        {},
    ),
    op_level=Option(record(execution_profile=Option(anything, ABSENT)), {}),
    fpm_interpolation=Option(INTERPOLATION, {}),
    fpm_regression=Option(REGRESSION, {}),
    fpm_learned=Option(LEARNED, {}),
    selector=Option(anything, ABSENT),
    correction=Option(CORRECTION, {}),
)

ROUND_FIELDS = ("kind", "method", "num_draft_tokens", "draft_model", "draft_revision", "timing_scope")
DEPLOYMENT = record(
    system=Option(text),
    backend=Option(text),
    backend_version=Option(optional(text), None),
    **{name: Option(count(U32)) for name in ("tp", "dp", "moe_tp", "moe_ep")},
    **{name: Option(count(U32), 1) for name in ("pp", "cp")},
    **{
        name: Option(text)
        for name in ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
    },
    **{name: Option(text, "auto") for name in ("moe_backend", "attention_backend")},
    **{name: Option(flag, False) for name in ("enable_wideep", "enable_eplb")},
    worker_type=Option(optional(choice(*ROLES)), None),
    execution_profile=Option(optional(record(**{name: Option(anything) for name in ROUND_FIELDS})), None),
    resources=Option(anything, None),  # memory, which no latency depends on
)
PROFILE = record(
    schema_version=Option(count(), 1),
    model=Option(text),
    model_revision=Option(text, ""),
    deployments=Option(each(DEPLOYMENT)),
    **{name: Option(anything, None) for name in ("architecture", "context_length", "num_experts", "provenance")},
)
SPECULATION = record(
    kind=Option(choice(*SPECULATION_KINDS)),
    **{name: Option(anything, ABSENT) for name in ("params", "draft_model_path", "draft_config")},
)

SIZE = optional(count(U32))
NAME = optional(text)
CONFIG = record(
    model=Option(text),
    system=Option(text),
    backend=Option(choice("trtllm", "sglang", "vllm")),
    worker_type=Option(choice(*ROLES)),
    backend_version=Option(NAME, None),
    fpm_profile=Option(optional(PROFILE), None),
    **{name: Option(count(U32), 1) for name in ("tp", "pp", "attention_dp")},
    **{name: Option(SIZE, None) for name in ("dcp", "moe_tp_size", "moe_ep_size", "cp_size")},
    **{f"{name}_quant_mode": Option(NAME, None) for name in ("gemm", "moe", "fmha", "fpm_fmha", "kvcache", "comm")},
    nextn=Option(count(U32), 0),
    speculation=Option(optional(SPECULATION), None),
    kv_block_size=Option(SIZE, None),
    decoder_replay=Option(flag, False),
    estimation_mode=Option(choice(*MODES, fpm="fpm_interpolation"), "auto"),
    database_mode=Option(choice("SILICON", "HYBRID", "EMPIRICAL", "SOL", "SOL_FULL"), "SILICON"),
    transfer_policy=Option(anything, None),  # moves measurements between systems, which `direct` never does
    systems_paths=Option(each(text), ()),
    fallback_policy=Option(choice("deny", "allow", error="deny", regression="allow"), "deny"),
    estimator_config=Option(ESTIMATORS, {}),
    **{name: Option(NAME, None) for name in ("attention_backend", "moe_kernel_source", "moe_backend")},
    enable_eplb=Option(flag, False),
    wideep_num_slots=Option(SIZE, None),
    enable_shared_layer=Option(optional(flag), None),
    strict_provenance=Option(flag, False),
    encoder_parallel=Option(optional(choice("tp", "dp")), None),
)
# Other spellings of top-level fields.
SPELLINGS = {
    "tp_size": "tp",
    "pp_size": "pp",
    "attention_dp_size": "attention_dp",
    "forward_model": "estimation_mode",
    "kv_cache_dtype": "kvcache_quant_mode",
    **{f"{name}_dtype": f"{name}_quant_mode" for name in ("gemm", "moe", "fmha", "fpm_fmha", "comm")},
}


def resolve(config: Any) -> dict[str, Any]:
    """The configuration with every default filled in; OptionError for the first mistake."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        wrong_type(config, "", "a mapping such as {'model': ..., 'estimation_mode': 'fpm_regression'}")
    plain: dict[Any, Any] = {}
    for name, value in config.items():
        known = SPELLINGS.get(name, name) if isinstance(name, str) else name
        if known in plain:
            wrong_meaning(name, f"repeats {known}", f"give {known} once")
        plain[known] = value
    resolved = CONFIG(plain, "")
    check_deployment(resolved)
    check_regression(resolved["estimator_config"]["fpm_regression"])
    check_correction(resolved["estimator_config"]["correction"])
    return resolved


def check_deployment(config: dict[str, Any]) -> None:
    """What the top-level fields must obey together."""

    def refuse_if(wrong: bool, what: str, hint: str) -> None:
        if wrong:
            wrong_meaning("invalid forward pass perf model config:", what, hint)

    refuse_if(not config["model"].strip(), "model cannot be empty", "name the model as the table or the engine does")
    refuse_if(not config["system"].strip(), "system cannot be empty", "name the system, such as h200_sxm")
    sizes = (config["tp"], config["pp"], config["attention_dp"])
    refuse_if(0 in sizes, "tp, pp, and attention_dp must be positive", "1 means that this axis is not split")
    moe = (config["moe_tp_size"], config["moe_ep_size"])
    refuse_if(
        (moe[0] is None) != (moe[1] is None), "moe_tp_size and moe_ep_size must be configured together", "1 is off"
    )
    refuse_if(0 in moe, "moe_tp_size and moe_ep_size must be positive", "1 means that this axis is not split")
    refuse_if(config["cp_size"] == 0, "cp_size must be positive", "leave it out without context parallelism")
    dcp = config["dcp"]
    refuse_if(dcp is not None and (not dcp or config["tp"] % dcp > 0), "dcp must be positive and divide tp", "1 is off")
    refuse_if(config["nextn"] > MOST_NEXTN, f"nextn must be in 0..={MOST_NEXTN}", "leave it out for ordinary decoding")
    if config["speculation"] and config["speculation"]["kind"] == "none":
        config["speculation"] = None
    both = config["nextn"] and config["speculation"]
    refuse_if(bool(both), "speculation cannot be combined with nextn", "ask with draft_length instead of either")
    versionless = config["fpm_profile"] is not None and not config["backend_version"]
    refuse_if(versionless, "fpm_profile requires a literal backend_version", "give the version that was measured")


def check_regression(options: dict[str, Any]) -> None:
    """What the fields of fpm_regression must obey together."""
    path = "estimator_config.fpm_regression"
    sampling, fit = options["sampling"], options["fit"]
    check_axes(sampling["axes"], f"{path}.sampling.axes")
    bins = sampling["bins_per_axis"]
    if len(bins) != len(sampling["axes"]):
        what = "must contain exactly one bin count per sampling axis"
        wrong_meaning(f"{path}.sampling.bins_per_axis", what, f"give {len(sampling['axes'])} bin counts")
    check_bins(bins, f"{path}.sampling.bins_per_axis")
    check_budget(options["min_observations"], sampling["max_observations"], path)
    if fit["kind"] == "spline":
        if fit["linear"] is not None:
            what = "requires fit.kind='standardized_nnls' (alias 'linear')"
            wrong_meaning(f"{path}.fit.linear", what, "a spline fit takes its options from fit.spline")
        fit["spline"] = SPLINE(fit["spline"] or {}, f"{path}.fit.spline")
        check_spline(fit["spline"], sampling, path)
    elif fit["spline"] is not None:
        wrong_meaning(f"{path}.fit.spline", "requires fit.kind='spline'", "set fit.kind, or leave fit.spline out")
    else:
        fit["linear"] = LINEAR(fit["linear"] or {}, f"{path}.fit.linear")
        check_axes(fit["linear"]["feature_axes"], f"{path}.fit.linear.feature_axes")
        check_trigger(fit["linear"]["update_policy"], f"{path}.fit.linear.update_policy")


def check_spline(spline: dict[str, Any], sampling: dict[str, Any], path: str) -> None:
    if spline["knots_per_axis"] not in (2, 3):
        wrong_meaning(f"{path}.fit.spline.knots_per_axis", "must be 2 or 3", "the default is 2")
    check_trigger(spline["search"], f"{path}.fit.spline.search")
    if sampling["axes"] != DEFAULT_AXES:
        what = f"must be {DEFAULT_AXES} for spline fitting"
        wrong_meaning(f"{path}.sampling.axes", what, "other axes go with fit.kind='linear'")
    if sampling["max_observations"] < SPLINE_ROWS:
        what = f"must be at least {SPLINE_ROWS} for spline fitting"
        wrong_meaning(f"{path}.sampling.max_observations", what, "the default is 64")


def check_correction(options: dict[str, Any]) -> None:
    """What the fields of correction must obey; the peer names its older options here."""
    path = "estimator_config.correction:"
    low, high = options["factor_bounds"]["min"], options["factor_bounds"]["max"]
    if low is not None and not 0 < low <= 1:
        legacy(
            path, "min_faster_correction_factor must be finite and in (0.0, 1.0]", "factor_bounds.min is 0.5 by default"
        )
    if high is not None and not 1 <= high < math.inf:
        legacy(path, "max_slower_correction_factor must be finite and >= 1.0", "factor_bounds.max is 2.0 by default")
    for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens"):
        if options[name] < 1:
            legacy(path, f"{name} must be >= 1", "it is the end of the fixed box; leave it out for the usual one")
    if options["sampling"]["max_observations"] < 1:
        legacy(path, "max_observations must be >= 1", "the default is 64")
    check_budget(options["min_observations"], options["sampling"]["max_observations"], "estimator_config.correction")
    check_bins(options["sampling"]["bins_per_axis"], "estimator_config.correction.sampling.bins_per_axis")


def check_axes(axes: list[str], path: str) -> None:
    if not 1 <= len(axes) <= MOST_AXES:
        wrong_meaning(path, f"must contain 1 to {MOST_AXES} axes", f"the default is {DEFAULT_AXES}")
    if len(set(axes)) < len(axes):
        wrong_meaning(path, "must not contain repeated axes", "name every axis once")


def check_bins(bins: list[int], path: str) -> None:
    if not 0 < math.prod(bins) <= LARGEST_PRODUCT:
        what = "must be positive and have a representable product"
        wrong_meaning(path, what, "1 is an axis that is not divided; the default is [4, 4]")


def check_budget(fewest: int, most: int, path: str) -> None:
    if fewest < 1:
        legacy(f"{path}:", "min_observations must be >= 1", "the default is 5")
    if fewest > most:
        legacy(f"{path}:", "min_observations must be <= max_observations", f"max_observations is {most}")


def check_trigger(policy: dict[str, Any], path: str) -> None:
    if "trigger" in policy and not 0 < policy["trigger"] <= policy["window"]:
        what = "must be positive and at most window"
        wrong_meaning(f"{path}.trigger", what, f"window is {policy['window']} here")


def check_weights(weights: dict[str, float]) -> None:
    """Weights of the two default features; only a regression reads them."""
    for name, value in weights.items():
        if not FINITE_POSITIVE.holds(value):
            legacy("estimator_config.features:", f"regression_{name} must be finite and > 0.0", "the default is 1.0")


def legacy(path: str, what: str, hint: str) -> None:
    wrong_meaning(f"{path} invalid forward pass perf options:", what, hint)
