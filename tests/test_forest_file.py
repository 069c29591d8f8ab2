"""Learned artifacts that are refused: each by its name and the peer's words, the hostile ones quickly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from asking import refusal
from forests import V1, artifact, random_artifact, stump

from fpmjax import ModelFileError
from fpmjax.models import forest_file
from fpmjax.models.forest import load_forest

MALFORMED = {
    'schema "x" != "aic_fpm_learned_forward_perf"': {"schema": "x"},
    "schema_version 2 != 1": {"schema_version": 2},
    "features list is empty": {"features": []},
    'unknown feature "slot32_past"': {"features": ["slot32_past"]},
    'unknown feature "slot01_past"': {"features": ["slot01_past"]},
    'unknown feature "slot+1_past"': {"features": ["slot+1_past"]},
    'duplicate feature "num_decode_requests"': {"features": ["num_decode_requests"] * 2},
    "no stores": {"stores": {}},
    "store PurePrefill is not valid for worker_type Decode": {"stores": {"pure_prefill": {"baseline": 0, "trees": []}}},
}
TREES = {
    "node arrays have mismatched lengths": {"value": [0.0, 1.0]},
    "empty tree": {name: [] for name in ("left", "right", "feature", "threshold", "value")},
    "missing_left length mismatch": {"missing_left": [True]},
    "node 0 children must have larger indices": {"left": [0, -1, -1]},
    "node 0 has out-of-range children (3, 2)": {"left": [3, -1, -1]},
    "node 0 has out-of-range children (-1, 2)": {"left": [-1, -1, -1]},
    "node 0 feature index 1 out of range": {"feature": [1, -1, -1]},
    "node 0 feature index -1 out of range": {"feature": [-1, -1, -1]},
}
TYPES: list[tuple[str, dict[str, Any]]] = [
    ("expected u32", {"schema_version": 1.0}),
    ("expected u32", {"schema_version": True}),
    ("expected u32", {"schema_version": -1}),
    ("unknown variant", {"worker_type": "agg"}),
    ("unknown variant", {"target": "log"}),
    ("unknown variant", {"stores": {"foo": {"baseline": 0, "trees": []}}}),
    ("missing field `trees`", {"stores": {"pure_decode": {"baseline": 0}}}),
    ("expected f64", {"stores": {"pure_decode": {"baseline": None, "trees": []}}}),
    ("expected a sequence", {"stores": {"pure_decode": {"baseline": 0, "trees": {}}}}),
    ("expected a sequence", {"features": None}),
    ("expected a string", {"features": [1]}),
    ("expected an object", {"stores": []}),
]
NODE_TYPES = [
    ("expected i32", {"left": [1.0, -1, -1]}),
    ("expected i32", {"left": [True, -1, -1]}),
    ("expected i32", {"feature": [2**31, -1, -1]}),
    ("expected i32", {"feature": [10**30, -1, -1]}),
    ("expected f64", {"value": [0, 1, "x"]}),
    ("expected f64", {"threshold": [None, 0, 0]}),
    ("expected a boolean", {"missing_left": [1, 1, 1]}),
    ("expected a sequence", {"missing_left": None}),
]


def why(source: Any) -> tuple[str, str]:
    return refusal(ModelFileError, load_forest, source)


@pytest.mark.parametrize("words", MALFORMED)
def test_rules_of_the_whole(words):
    code, message = why(json.dumps({**artifact([stump()]), **MALFORMED[words]}))
    assert code == "malformed" and message == f"invalid engine config: learned forward-pass model: {words}"


@pytest.mark.parametrize("words", TREES)
def test_rules_of_a_tree(words):
    code, message = why(json.dumps(artifact([stump(), stump(**TREES[words])])))
    assert code == "malformed" and message.endswith(f"model: store PureDecode tree 1: {words}")


@pytest.mark.parametrize(("words", "change"), TYPES)
def test_types_of_the_whole(words, change):
    code, message = why(json.dumps({**artifact([stump()]), **change}))
    assert code == "json" and "learned forward-pass model: invalid JSON: " in message and words in message


@pytest.mark.parametrize(("words", "change"), NODE_TYPES)
def test_types_of_nodes(words, change):
    code, message = why(json.dumps(artifact([stump(**change)])))
    assert code == "json" and words in message and "store pure_decode tree 0 " in message


@pytest.mark.parametrize("name", ["schema", "schema_version", "worker_type", "target", "features", "stores"])
def test_fields_of_the_whole_are_needed(name):
    made = artifact([stump()])
    del made[name]
    assert f"missing field `{name}`" in why(json.dumps(made))[1]


@pytest.mark.parametrize("name", ["left", "right", "feature", "threshold", "value"])
def test_fields_of_a_tree_are_needed(name):
    tree = stump()
    del tree[name]
    assert f"missing field `{name}`" in why(json.dumps(artifact([tree])))[1]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{]",
        json.dumps(artifact([stump()])) + "x",
        json.dumps(artifact([stump(float("inf"))])),
        json.dumps(artifact([stump(float("nan"))])),
        json.dumps(artifact([stump()])).replace("4.0", "1e999"),
        json.dumps(artifact([stump()])).replace('"target"', '"schema": "y", "target"'),
        '{"a":' * 100_000,
        '{"metadata": ' + "[" * 100_000,
        json.dumps(artifact([stump()])).replace("4.0", "9" * 5000),
        json.dumps(artifact([stump()])).replace("[1, -1, -1]", f"[{'9' * 250}, -1, -1]"),
    ],
    ids=range(11),
)
def test_texts_that_are_no_json(text):
    assert why(text)[0] == "json"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b"PAR1", "\ufeff{}".encode()])
def test_files_that_are_no_artifact(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert why(path)[0] == "json"


def test_paths_without_a_file(tmp_path):
    for source in (tmp_path / "absent.json", str(tmp_path), "", "a\0b", 7, None, b"{}"):
        assert why(source)[0] == "unreadable"


def test_a_file_without_end_is_read_no_further(monkeypatch, tmp_path):
    monkeypatch.setattr(forest_file, "LARGEST", 1000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(artifact([stump()], metadata={"text": "x" * 2000})))
    for source in (path, path.read_text()):
        assert why(source)[0] == "too_large"


def test_what_the_peer_ignores():
    extra = {"more": 1}
    made = artifact([stump(**extra), stump(missing_left=[])], **extra)
    made["stores"]["pure_decode"] |= extra
    for metadata in ({}, {"a": [1]}, None, 7):
        load_forest(json.dumps({**made, "metadata": metadata}))
    leaf_fields = stump(feature=[0, 99, -7], threshold=[4, 1, 2])
    load_forest(json.dumps(artifact([leaf_fields])))
    load_forest(json.dumps(artifact([])))


def test_one_changed_child_of_a_random_tree_is_found():
    rng = np.random.default_rng(5)
    values = rng.normal(0.0, 1.0, (20, len(V1)))
    for _ in range(20):
        made = random_artifact(rng, "decode", list(V1), values, sizes=(61,))
        for tree in made["stores"]["pure_decode"]["trees"][:1]:
            inner = [i for i, child in enumerate(tree["left"]) if child >= 0]
            node = int(rng.choice(inner))
            tree[str(rng.choice(["left", "right"]))][node] = int(rng.choice([node, 0, -1, len(tree["left"])]))
            assert why(json.dumps(made))[0] == "malformed"
