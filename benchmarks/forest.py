"""How fast an imported forest answers, beside scikit-learn's own `predict` of the same trees.

    python benchmarks/forest.py [--json] [--rounds N] [totals | requests | slots] ...

A HistGradientBoostingRegressor as the peer trains it (600 trees of up to 31 leaves, log of ms) on pure decode, exported
to the artifact; 2**14 queries that it has not seen.  The three benchmarks differ in the features: totals of the
iteration (preset fpm5), of its requests (atomic5), of its requests one by one (hisim).

Fairness.  The clock is processor time of all threads, so scikit-learn is timed on one thread, where none waits for
another, and as it comes.  Both get finished features, float64; `estimate` starts from the work itself and makes them.
That all give the same numbers is checked before anything is timed.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import numpy as np
from runner import Case, main
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

import fpmjax
from fpmjax.models.forest import Forest, load_forest
from fpmjax.observe.forest_features import NAMES, features_of
from fpmjax.work import RequestLists, Work

N, ROWS, TREES = 2**14, 4000, 600
REQUESTS = 32  # at most, of an iteration
FPM5 = [name for name in NAMES[:21] if "var" not in name and "squared" not in name]
ATOMIC5 = [f"req_{name}" for name in ("batch_size", "sum_past", "max_past", "min_past", "sum_past_squared")]
HISIM = ["req_batch_size", *(name for name in NAMES if name.startswith("slot"))]


def decode_work(n: int, seed: int) -> Work:
    """Pure decode of one rank with its request lists."""
    rng = np.random.default_rng(seed)
    count = rng.integers(1, REQUESTS + 1, n)
    there = np.arange(REQUESTS) < count[:, None]
    past = np.where(there, np.exp(rng.uniform(3.0, 10.0, (n, REQUESTS))).astype(np.uint64), np.uint64(0))
    lists = RequestLists(there.astype(np.uint64)[:, None], past[:, None], count.astype(np.int32)[:, None])
    totals = Work.decode(count, past.sum(-1))
    return Work(**{name: x for name, x in vars(totals).items() if x is not None} | {"lists": lists})


def latency(work: Work) -> np.ndarray:
    """Milliseconds, float64 [n], with noise: what the trees learn."""
    requests, kv = (np.asarray(x, np.float64)[:, 0] for x in (work.decode_requests, work.decode_kv))
    noise = np.random.default_rng(0).lognormal(0.0, 0.02, len(kv))
    return (6.0 + 0.05 * requests + np.maximum(kv / 6e4, requests * requests / 90.0)) * noise


def artifact_of(model: Any, names: list[str]) -> str:
    """The peer's artifact of a fitted decode model, JSON text."""
    trees = []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        trees.append(
            {
                "left": np.where(leaf, -1, nodes["left"].astype(np.int64)).tolist(),
                "right": np.where(leaf, -1, nodes["right"].astype(np.int64)).tolist(),
                "feature": np.where(leaf, -1, nodes["feature_idx"].astype(np.int64)).tolist(),
                "threshold": np.where(leaf, 0.0, np.clip(nodes["num_threshold"], None, 1.797e308)).tolist(),
                "value": nodes["value"].tolist(),
                "missing_left": nodes["missing_go_to_left"].astype(bool).tolist(),
            }
        )
    store = {"baseline": float(model._baseline_prediction.ravel()[0]), "trees": trees}
    return json.dumps(
        {
            "schema": "aic_fpm_learned_forward_perf",
            "schema_version": 1,
            "worker_type": "decode",
            "target": "log_ms",
            "features": names,
            "stores": {"pure_decode": store},
        }
    )


def against_sklearn(names: list[str]) -> tuple[list[Case], str]:
    """Every way to ask for the same numbers."""
    work, asked = decode_work(ROWS, 1), decode_work(N, 2)
    options: dict[str, Any] = {"max_leaf_nodes": 31, "min_samples_leaf": 5, "early_stopping": False}
    model = HistGradientBoostingRegressor(max_iter=TREES, learning_rate=0.05, random_state=0, **options)
    with threadpool_limits(1):
        model.fit(features_of(work, names), np.log(latency(work)))
    forest, x = load_forest(artifact_of(model, names)), features_of(asked, names)
    call = jax.jit(functools.partial(Forest.predict, kind="pure_decode"))
    with fpmjax.x64():
        on_device = jax.device_put((forest, x))

    def predict():
        with fpmjax.x64():
            return call(on_device[0], features=on_device[1])

    def one_thread():
        with threadpool_limits(1):
            return np.exp(model.predict(x))

    def estimate():
        return fpmjax.estimate(forest, asked).latency_ms

    for ours in (predict, estimate):
        np.testing.assert_allclose(np.asarray(ours()), one_thread(), rtol=1e-12)
    return [
        Case("scikit-learn, one thread", one_thread, N),
        Case("scikit-learn", lambda: np.exp(model.predict(x)), N),
        Case("fpmjax predict", predict, N),
        Case("fpmjax estimate", estimate, N),
    ], "scikit-learn, one thread"


if __name__ == "__main__":
    main(
        {
            name: functools.partial(against_sklearn, names)
            for name, names in {"totals": FPM5, "requests": ATOMIC5, "slots": HISIM}.items()
        },
        mark="<!-- forest -->",
    )
