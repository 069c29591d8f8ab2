"""Documents of studies that nobody measured, as `fpmjax.study.result` makes them, to draw and to tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any


def document(
    gpus: Sequence[str] = ("H100", "B200"),
    groups: Sequence[tuple[str, str]] = (("Qwen3.5-4B", "mtp"), ("Qwen3-8B", "eagle3")),
    depths: Sequence[int] = (1, 2, 3, 4),
    *,
    interval: bool = True,
    status: str = "ok",
) -> dict[str, Any]:
    """What the charts read, with regular noise."""
    cells, configs = [], []
    for i, (gpu, (model, method), d) in enumerate(itertools.product(sorted(gpus), sorted(groups), depths)):
        where = {"gpu": gpu, "model": model, "method": method, "draft_length": d}
        mape = 6 + 3 * math.sin(12.9898 * i)
        cell = {"rounds": 588, "cell_round_weighted_mape": mape, "cell_equal_config_mape": 0.9 * mape + 0.4}
        cell |= {"cell_round_weighted_bias": -mape / 2}
        if interval:
            cell["cell_round_weighted_mape_interval"] = [mape - 1.5, mape + 2]
        cells.append(where | cell)
        for j, (size, context) in enumerate(itertools.product((1, 4, 8), (1024, 4096))):
            ratio = 0.1 * d + 1.15 + 0.05 * math.sin(78.233 * (6 * i + j))
            config = {"tp": 1, "batch_size": size, "initial_context": context, "rounds": 98}
            config |= {"config_ratio_median": ratio, "config_mape": mape, "config_bias": -mape / 2}
            configs.append(where | config)
    fit = {"group": "pooled", "loss": "rel_l2", "weights": "round", "status": status, "slope": None, "intercept": None}
    if status == "ok":
        fit |= {"slope": 0.0908, "intercept": 1.197}
    errors = [
        {
            "group": name,
            "low": n,
            "high": n,
            "rounds": 98,
            "p10_round_error": -3.0,
            "median_round_error": 1.0,
            "p90_round_error": 4.0,
        }
        for name in (f"{model} + {method}" for model, method in sorted(groups))
        for n in (2, 8, 40)
    ]
    return {
        "rule": {"slope": "0.08", "intercept": "1.25", "provenance": "published"},
        "cells": cells,
        "configurations": configs,
        "refits": [fit],
        "intervals": {"level": 0.95} if interval else None,
        "overall": {"rounds": 98 * len(configs), "scored_configurations": len(configs)},
        "scope": {"timing_scope": ["model_worker_forward_cuda"]},
        "reference": {"mode": "measured", "anchors_only": False},
        "residuals": {
            "widened_batch": errors,
            "kv_tokens": [row | {"low": 1024 * row["low"], "high": 1024 * row["high"]} for row in errors],
        },
    }


def empty() -> dict[str, Any]:
    """A study of which no round was scored."""
    one = document(("H100",), (("M", "mtp"),), (3,), interval=False, status="singular")
    for row in (*one["cells"], *one["configurations"]):
        row.update({name: None for name in row if name.startswith(("cell_", "config_"))}, rounds=0)
    return one | {
        "residuals": {"widened_batch": [], "kv_tokens": []},
        "overall": {"rounds": 0, "scored_configurations": 0},
    }
