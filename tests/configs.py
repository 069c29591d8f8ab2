"""Configurations of a forward-pass model that tests change in one place."""

from __future__ import annotations

from typing import Any

from asking import CASES, SURFACE

FIT: dict[str, Any] = {
    "model": "org/any",
    "system": "h200_sxm",
    "backend": "vllm",
    "worker_type": "decode",
    "estimation_mode": "fpm_regression",
}
SURFACE_PATH = str(CASES / SURFACE)
LOOKUP = FIT | {
    "model": "org/synthetic",
    "backend_version": "0.24.0",
    "estimation_mode": "fpm_interpolation",
    "tp": 2,
    "estimator_config": {"fpm_interpolation": {"method": "direct", "fpm_parquet_path": SURFACE_PATH}},
}
DEPLOYMENT = {
    "system": "h200_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
    "tp": 2,
    "dp": 1,
    "moe_tp": 2,
    "moe_ep": 1,
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "resources": {"anything": 1},
}
PROFILED = LOOKUP | {
    "moe_tp_size": 2,
    "moe_ep_size": 1,
    "fpm_profile": {"schema_version": 1, "model": "org/synthetic", "deployments": [DEPLOYMENT]},
}


def nested(path: str, value: Any) -> Any:
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {name: merged(base.get(name), value) for name, value in changes.items()}


def fit(path: str = "", value: Any = None) -> dict[str, Any]:
    """A regression's configuration with one value placed at a path."""
    return merged(FIT, nested(path, value)) if path else dict(FIT)


def look(**changes: Any) -> dict[str, Any]:
    """The interpolation's configuration with other options of fpm_interpolation."""
    return merged(LOOKUP, {"estimator_config": {"fpm_interpolation": changes}})


def trees(**options: Any) -> dict[str, Any]:
    """A configuration of fpm_learned over an artifact."""
    learned = {"artifact_path": "x.json"} | options
    return FIT | {"estimation_mode": "fpm_learned", "estimator_config": {"fpm_learned": learned}}


E = "estimator_config."
R, C = E + "fpm_regression.", E + "correction."
LAZY = {"kind": "error_threshold", "relative_tolerance": 0.1, "absolute_tolerance_ms": 1, "window": 3, "trigger": 1}
LAZY |= {"cooldown": 2}
