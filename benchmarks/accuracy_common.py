"""What the accuracy studies share: the data, the datasheets, the other ways to predict, tables as text.

A way to predict is a function `fit(observations) -> predict`, and `predict(work)` gives milliseconds, float64 [n].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fpmjax import Hardware, Observations, Work

DATA = Path(__file__).parent / "data"
Predict = Callable[[Work], np.ndarray]
TREES = 600  # and the other numbers of `boosted`: as the peer trains its learned artifact


def qwen3_32b_on_b300(tp: int) -> Hardware:
    """One of `tp` ranks: weights of 65.5 GB, read and multiplied once a token."""
    return Hardware(65.5e9 / tp, 65.5e9 / tp, 262_144 / tp, 8e12, 2.25e15)


def llama31_8b_on_rtx4090() -> Hardware:
    return Hardware(16.1e9, 16.1e9, 131_072, 1.008e12, 1.65e14)


def count(work: Work, name: str) -> np.ndarray:
    """A count of one-rank work, float64 [n]; zeros where it is statically absent."""
    value = getattr(work, name)
    return np.zeros(work.shape) if value is None else np.asarray(value, np.float64)[..., 0]


def decode_totals(work: Work) -> np.ndarray:
    """float64 [n, 3]: 1, requests, KV."""
    return np.stack([np.ones(work.shape), count(work, "decode_requests"), count(work, "decode_kv")], -1)


def all_totals(work: Work) -> np.ndarray:
    """float64 [n, 6]: 1, decode requests, KV, prompt tokens, pairs of tokens that prefill attends, cached KV."""
    tokens, cached = count(work, "prefill_tokens"), count(work, "prefill_kv")
    each = np.maximum(count(work, "prefill_requests"), 1.0)
    pairs = cached * tokens / each + tokens * tokens / (2.0 * each) + tokens / 2.0
    return np.concatenate([decode_totals(work), np.stack([tokens, pairs, cached], -1)], -1)


def linear(seen: Observations, columns: Callable[[Work], np.ndarray] = decode_totals) -> Predict:
    """Nonnegative least squares on relative errors: what one fits with two lines of SciPy."""
    from scipy.optimize import nnls

    wall = np.asarray(seen.wall_ms)
    x = columns(seen.work)
    scale = np.maximum(x.max(0), 1.0)
    slopes = nnls(x / scale / wall[:, None], np.ones(len(wall)))[0] / scale
    return lambda work: columns(work) @ slopes


def request_features(work: Work) -> np.ndarray:
    """float64 [n, 5]: batch size, sum, largest and least past, sum of its squares; of requests that are all alike."""
    batch, kv = count(work, "decode_requests"), count(work, "decode_kv")
    past = kv / np.maximum(batch, 1.0)
    return np.stack([batch, kv, past, past, batch * past * past], -1)


def boosted_trees(seen: Observations) -> Any:
    """scikit-learn's HistGradientBoostingRegressor of log ms on `request_features`."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    options: dict[str, Any] = {"max_leaf_nodes": 31, "min_samples_leaf": 5, "early_stopping": False}
    trees = HistGradientBoostingRegressor(max_iter=TREES, learning_rate=0.05, random_state=0, **options)
    with threadpool_limits(1):  # of few rows; threads only wait for each other
        return trees.fit(request_features(seen.work), np.log(np.asarray(seen.wall_ms)))


def boosted(seen: Observations) -> Predict:
    """`boosted_trees`, asked for milliseconds."""
    trees = boosted_trees(seen)
    return lambda work: np.exp(trees.predict(request_features(work)))


def errors(predicted: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """100 (predicted - observed) / observed."""
    return 100.0 * (predicted - observed) / observed


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its header."""
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [rows[0], tuple("-" * w for w in width), *rows[1:]]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |" for row in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def share(which: Any) -> float:
    """Percent; NaN of nothing."""
    return 100.0 * float(np.mean(which)) if np.size(which) else float("nan")
