"""Learned artifacts for tests: recorded ones, hand-made ones, and random valid trees."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np
from asking import CASES

from fpmjax.models.forest import Forest, load_forest
from fpmjax.observe.features import ROLES
from fpmjax.observe.forest_features import NAMES

LEARNED = CASES / "learned"
V1 = NAMES[:21]


def recorded_artifact(name: str) -> dict[str, Any]:
    with gzip.open(LEARNED / f"{name}.artifact.json.gz", "rt") as file:
        return json.load(file)


def loaded(artifact: dict[str, Any]) -> Forest:
    return load_forest(json.dumps(artifact))


def artifact(trees: list[dict], features: Any = ("num_decode_requests",), **more: Any) -> dict[str, Any]:
    """A decode worker's artifact in milliseconds, if nothing else is said."""
    kinds = more.pop("kinds", ("pure_decode",))
    return {
        "schema": "aic_fpm_learned_forward_perf",
        "schema_version": 1,
        "worker_type": "decode",
        "target": "ms",
        "features": list(features),
        "stores": {kind: {"baseline": more.pop("baseline", 0.0), "trees": trees} for kind in kinds},
        **more,
    }


def stump(cut: float = 4.0, **more: Any) -> dict[str, Any]:
    """1 ms where the feature is at most the threshold, otherwise 2 ms."""
    nodes = {"left": [1, -1, -1], "right": [2, -1, -1], "feature": [0, -1, -1]}
    return {**nodes, "threshold": [cut, 0.0, 0.0], "value": [0.0, 1.0, 2.0], **more}


def random_tree(rng: np.random.Generator, features: int, size: int, values: np.ndarray) -> dict[str, Any]:
    """A random valid tree; values [rows, features] give thresholds, which queries then meet exactly.

    Now and then two parents share a child, a node cannot be reached, or no side for NaN is stated.
    """
    left, right, feature, threshold = [-1], [-1], [-1], [0.0]
    leaves = [0]
    while len(left) < size:
        node = leaves.pop(int(rng.integers(len(leaves))))
        feature[node] = int(rng.integers(features))
        threshold[node] = float(values[rng.integers(len(values)), feature[node]])
        if not np.isfinite(threshold[node]):
            threshold[node] = 1.797e308
        for side in (left, right):
            behind = [leaf for leaf in leaves if leaf > node]
            if behind and rng.random() < 0.05:
                side[node] = int(rng.choice(behind))
                continue
            side[node] = len(left)
            leaves.append(len(left))
            for column, filler in ((left, -1), (right, -1), (feature, -1), (threshold, 0.0)):
                column.append(filler)
        if not leaves:
            break
    tree = {"left": left, "right": right, "feature": feature, "threshold": threshold}
    tree["value"] = rng.normal(0.0, 0.3, len(left)).tolist()
    if rng.random() < 0.7:
        tree["missing_left"] = (rng.random(len(left)) < 0.5).tolist()
    return tree


def random_artifact(rng: np.random.Generator, role: str, names: list[str], values: np.ndarray, **more: Any) -> dict:
    """Trees for every kind of work of a role, now and then one kind short."""
    sizes = more.pop("sizes", (1, 3, 15, 61, 121))
    kinds = [kind for kind in ROLES[role] if len(ROLES[role]) == 1 or rng.random() < 0.8] or [ROLES[role][0]]
    made = artifact([], names, worker_type=role, target=str(rng.choice(["ms", "log_ms"])), kinds=kinds, **more)
    for store in made["stores"].values():
        store["baseline"] = float(rng.normal(1.0, 0.3))
        count = int(rng.integers(0, 12))
        store["trees"] = [random_tree(rng, len(names), int(rng.choice(sizes)), values) for _ in range(count)]
    return made
