"""Streams of observed iterations for tests: recorded ones, and random ones of every kind of work."""

from __future__ import annotations

from typing import Any

import numpy as np
from asking import records

from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.observe.observations import Observations

COLUMNS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)

# Recorded groups of the regression; the rest of the file is the correction.
GROUPS = (
    "linear_default",
    "eviction",
    "eviction_default_grid",
    "feature_axes",
    "lazy",
    "low_min",
    "hand",
    "widened",
    "spline",
)


def recorded(*groups: str) -> list[dict]:
    """The recorded streams of some groups, their iterations as lists of rank dicts."""
    streams = [r for r in records("regression_cases.jsonl.gz") if r["group"] in groups]
    for stream in streams:
        for name in ("observations", "queries"):
            stream[name] = [[rank_dict(rank) for rank in ranks] for ranks in stream[name]]
    return streams


def rank_dict(row: list) -> dict:
    """[five counts, wall time in seconds, extend lengths?, past lengths?] as metrics."""
    scheduled = dict(zip(COLUMNS, row[:5], strict=True))
    if len(row) > 6:
        scheduled |= {"extend_lengths": row[6], "past_kv_lengths": row[7]}
    return {"scheduled_requests": scheduled, "wall_time": row[5]}


def options_of(config: dict) -> dict[str, Any]:
    """The keyword arguments of `regression` for the peer's estimator_config."""
    inner = config.get("fpm_regression", {})
    sampling, fit = dict(inner.get("sampling", {})), dict(inner.get("fit", {}))
    linear, spline, kind = fit.pop("linear", None) or {}, fit.pop("spline", None) or {}, fit.pop("kind", None)
    options = {**config.get("features", {}), **sampling, **fit}
    if "axes" in options:
        options["sampling_axes"] = options.pop("axes")
    if "min_observations" in inner:
        options["min_observations"] = inner["min_observations"]
    policy = dict(linear.get("update_policy", {"kind": "always"}))
    if policy.pop("kind") == "error_threshold":
        options["lazy"] = ErrorThreshold(**policy)
    options |= {name: linear[name] for name in ("feature_axes", "non_negative") if name in linear}
    if kind == "spline":
        search = dict(spline.get("search") or {})
        if search.pop("kind", "adaptive") == "periodic":
            search.setdefault("step", 64)
        options["spline"] = Knots(per_axis=spline.get("knots_per_axis", 2), **search)
    return options


def random_rank(rng: np.random.Generator, role: str, lists: bool) -> dict:
    """One rank of a worker, now and then idle or with a fully cached prompt; wall time in seconds."""
    prefills = 0 if role == "decode" else int(rng.integers(0, 5))
    decodes = 0 if role == "prefill" else int(rng.integers(0, 40)) * int(rng.integers(0, 4) > 0)
    cached = rng.integers(0, 4000, prefills) * (rng.random(prefills) < 0.6)
    fresh = rng.integers(0 if rng.random() < 0.1 else 1, 3000, prefills) * (rng.random() > 0.05)
    past = rng.integers(0, 9000, decodes)
    counts = (prefills, int(fresh.sum()), int(cached.sum()), decodes, int(past.sum()))
    seconds = 0.002 + 8e-6 * counts[1] + 5e-5 * decodes + 2e-8 * (counts[4] + counts[2])
    row = [*counts, seconds * float(rng.lognormal(0.0, 0.05)) * float(rng.random() > 0.03)]
    if lists:
        row += [[*fresh.tolist(), *[1] * decodes], [*cached.tolist(), *past.tolist()]]
    return rank_dict(row)


def random_stream(seed: int, n: int, role: str, ranks: int = 1, *, lists: bool = False) -> list[list[dict]]:
    rng = np.random.default_rng(seed)
    return [[random_rank(rng, role, lists) for _ in range(ranks)] for _ in range(n)]


def decode_stream(seed: int, n: int) -> Observations:
    """Pure decode of one rank, latency rising in both features."""
    from fpmjax.work import Work

    rng = np.random.default_rng(seed)
    requests = rng.integers(1, 257, n).astype(np.uint32)
    kv = (requests * rng.integers(16, 8192, n)).astype(np.uint32)
    return Observations.of(Work.decode(requests, kv), (4.0 + 0.02 * requests + kv / 6e4) * rng.lognormal(0.0, 0.03, n))
