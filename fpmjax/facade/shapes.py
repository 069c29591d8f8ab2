"""The peer's result shapes."""

from __future__ import annotations

from typing import Any

from fpmjax.rule import PUBLISHED

SLOPE, INTERCEPT, UNIT = PUBLISHED.integers()


def coordinates(batch: int, tokens: int | None, kv: int) -> dict[str, float | None]:
    """One point under the peer's keys; the peer shows floats."""
    return {
        "batch_size": float(batch),
        "total_prefill_tokens": None if tokens is None else float(tokens),
        "total_kv_read_tokens": float(kv),
    }


def detail_of(
    latency: float | None,
    native: float | None,
    factor: float | None,
    slowest: int | None,
    ranks: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One answer, its correction and its composition."""
    return {
        "latency_ms": latency,
        "native_latency_ms": native,
        "correction_factor": factor,
        "max_rank": slowest,
        "ranks": ranks or [],
    }


def stated(answer: Any) -> dict[str, Any]:
    """What an estimate [] says of its own error: `interval` and `support`, where its model states them."""
    told: dict[str, Any] = {}
    if answer.interval is not None:
        interval = answer.interval
        low, high = known(interval.low_ms), known(interval.high_ms)
        ends = {"low_ms": low, "high_ms": high, "level": interval.level, "calibrated_on": int(interval.count)}
        told["interval"] = None if low is None else ends
    if answer.support is not None:
        distance, spread = known(answer.support.distance), known(answer.support.model_spread)
        place = {"extrapolated": bool(answer.support.extrapolated), "e_folds": distance, "model_spread": spread}
        told["support"] = None if distance is None else place
    return told


def scaling_factor(depth: int) -> float:
    return (INTERCEPT + SLOPE * depth) / UNIT


def speculative_detail(depth: int, stp: dict[str, Any]) -> dict[str, Any]:
    """The ordinary detail, scaled once; not ready stays not ready."""
    factor, latency = scaling_factor(depth), stp["latency_ms"]
    return {
        "latency_ms": None if latency is None else factor * latency,
        "draft_length": depth,
        "scaling_factor": factor,
        "stp_reference": stp,
    }


def known(number: Any) -> float | None:
    """NaN, the device's word for no answer, as None."""
    return None if number != number else float(number)
