"""The peer's learned artifact, `aic_fpm_learned_forward_perf` version 1: read and checked before anything is built.

    schema, schema_version, worker_type, target, features, metadata (optional, not used)
    stores = {workload kind: {baseline, trees: [{left, right, feature, threshold, value, missing_left (optional)}]}}

Node 0 is the root; a leaf has two negative children, every other field of it but its value counts for nothing.  A child
stands behind its parent, so there are no cycles; two parents may share one.  The reader is strict: types first, as the
peer reads JSON, then the meaning, in its words.  Unknown keys are ignored at every level.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fpmjax import strict_json
from fpmjax.errors import ModelFileError
from fpmjax.metrics import show
from fpmjax.observe.features import KINDS, ROLES
from fpmjax.observe.forest_features import NAMES

SCHEMA, VERSION = "aic_fpm_learned_forward_perf", 1
LARGEST = 1 << 26  # bytes of an artifact; 600 trees of 31 leaves are about two million
PREFIX = "invalid engine config: learned forward-pass model: "
EXPORT = "export the model again; artifacts are not repaired"
I32, U32 = ("i32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1)  # the peer's names of its integer types
KIND_WORDS = {kind: "".join(map(str.capitalize, kind.split("_"))) for kind in KINDS}  # as the peer prints them


class Tree(NamedTuple):
    """Arrays [nodes]: left, right, feature int64; threshold, value float64; missing_left bool."""

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    missing_left: np.ndarray

    @property
    def leaf(self) -> np.ndarray:
        return self.left < 0


class Store(NamedTuple):
    """Trees of one workload kind, and what their sum is added to."""

    baseline: float
    trees: list[Tree]


class Artifact(NamedTuple):
    """One worker's learned model."""

    role: str
    target: str
    features: tuple[str, ...]
    stores: dict[str, Store]


def read_artifact(source: str | os.PathLike[str]) -> Artifact:
    """The artifact of a path, or of JSON text: a string that begins with `{`, whitespace aside.

    Raises ModelFileError: `unreadable` (no such file), `too_large`, `json` (no JSON, or a value of another type),
    `malformed` (what the peer refuses too), and in both of these a message that names the place.
    """
    text = source if isinstance(source, str) and source.lstrip().startswith("{") else read_file(source)
    if len(text) > LARGEST:
        refuse(f"the artifact is longer than {LARGEST:,} bytes", "train fewer or smaller trees", "too_large")
    try:
        value = strict_json.decode(text)
    except ValueError as error:
        not_json(str(error))
    return meaning(read_types(value))


def read_file(path: Any) -> bytes:
    if not isinstance(path, (str, os.PathLike)):
        refuse(f"a {type(path).__name__} names no file", "give a path, or the JSON text itself", "unreadable")
    hint = "give the path of a learned artifact, or its JSON text"
    try:
        with open(path, "rb") as file:
            return file.read(LARGEST + 1)  # not one byte more of a file without end
    except OSError as error:
        refuse(f"cannot read {Path(path)}: {error.strerror}", hint, "unreadable")
    except ValueError as error:  # a name with a null byte
        refuse(f"cannot read {show(str(path))}: {error}", hint, "unreadable")


def refuse(message: str, hint: str, code: str) -> NoReturn:
    raise ModelFileError(f"{message}\nhint: {hint}", code=code)


def wrong(message: str) -> NoReturn:
    """Well-formed JSON that is no learned artifact."""
    refuse(PREFIX + message, EXPORT, "malformed")


def quoted(word: str) -> str:
    """As the peer writes a word, but not at any length."""
    return f'"{show(word)[1:-1]}"'


def not_json(message: str) -> NoReturn:
    refuse(f"{PREFIX}invalid JSON: {message}", EXPORT, "json")


# Types


def read_types(value: Any) -> dict[str, Any]:
    """The known fields, of the right type; the metadata is skipped."""
    top = fields(
        value,
        "the artifact",
        schema=text,
        schema_version=integer,
        worker_type=one_of(*ROLES),
        target=one_of("log_ms", "ms"),
        features=texts,
        stores=mapping,
    )
    for kind, store in top["stores"].items():
        variant(kind, KINDS, f"store {show(kind)}")
        read = fields(store, f"store {kind}", baseline=number, trees=sequence)
        read["trees"] = [read_tree(tree, f"store {kind} tree {i}") for i, tree in enumerate(read["trees"])]
        top["stores"][kind] = read
    return top


def read_tree(value: Any, where: str) -> dict[str, np.ndarray]:
    read = fields(value, where, left=indices, right=indices, feature=indices, threshold=numbers, value=numbers)
    read["missing_left"] = booleans(value.get("missing_left", []), f"{where} missing_left")
    return read


def fields(value: Any, where: str, /, **readers: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The fields of an object, each by its reader."""
    for name in readers:
        if name not in mapping(value, where):
            not_json(f"missing field `{name}` of {where}")
    return {name: read(value[name], f"{where} {name}") for name, read in readers.items()}


def mapping(value: Any, where: str) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else expected("an object", value, where)


def sequence(value: Any, where: str) -> list:
    return value if isinstance(value, list) else expected("a sequence", value, where)


def text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else expected("a string", value, where)


def texts(value: Any, where: str) -> list[str]:
    return [text(item, where) for item in sequence(value, where)]


def one_of(*words: str) -> Callable[[Any, str], str]:
    return lambda value, where: variant(text(value, where), words, where)


def variant(value: str, words: Any, where: str) -> str:
    if value not in words:
        not_json(f"unknown variant {quoted(value)}, expected one of {', '.join(words)}, at {where}")
    return value


def integer(value: Any, where: str, limits: tuple[str, int, int] = U32) -> int:
    name, low, high = limits
    return value if type(value) is int and low <= value <= high else expected(name, value, where)


def number(value: Any, where: str) -> float:
    # Every number of strict JSON is finite; an integer of this length is, as a float.
    return float(value) if type(value) in (int, float) else expected("f64", value, where)


def numbers(value: Any, where: str) -> np.ndarray:
    return array(value, where, (int, float), number, np.float64)


def indices(value: Any, where: str) -> np.ndarray:
    return array(value, where, (int,), lambda item, place: integer(item, place, I32), np.int64)


def booleans(value: Any, where: str) -> np.ndarray:
    def boolean(item: Any, place: str) -> bool:
        return item if isinstance(item, bool) else expected("a boolean", item, place)

    return array(value, where, (bool,), boolean, np.bool_)


def array(value: Any, where: str, types: tuple[type, ...], read: Callable[[Any, str], Any], dtype: Any) -> np.ndarray:
    """A list of one type as an array; element by element only where something is wrong with one."""
    items = sequence(value, where)
    try:
        found = np.array(items, dtype) if set(map(type, items)) <= set(types) else None
    except OverflowError:
        found = None
    if found is None or (dtype is np.int64 and found.size and (found.min() < I32[1] or found.max() > I32[2])):
        found = np.array([read(item, f"{where}[{i}]") for i, item in enumerate(items)], dtype)
    return found


def expected(what: str, value: Any, where: str) -> NoReturn:
    not_json(f"invalid type or value {show(value)}, expected {what}, at {where}")


# Meaning


def meaning(read: dict[str, Any]) -> Artifact:
    """The artifact, once every rule holds."""
    if read["schema"] != SCHEMA:
        wrong(f'schema {quoted(read["schema"])} != "{SCHEMA}"')
    if read["schema_version"] != VERSION:
        wrong(f"schema_version {read['schema_version']} != {VERSION}")
    names = read["features"]
    if not names:
        wrong("features list is empty")
    seen: set[str] = set()
    for name in names:
        if name not in NAMES:  # also slot01_past, which the peer takes for slot1_past
            wrong(f"unknown feature {quoted(name)}")
        if name in seen:
            wrong(f"duplicate feature {quoted(name)}")
        seen.add(name)
    if not read["stores"]:
        wrong("no stores")
    role, stores = read["worker_type"], {}
    for kind, store in read["stores"].items():
        if kind not in ROLES[role]:
            wrong(f"store {KIND_WORDS[kind]} is not valid for worker_type {role.capitalize()}")
        trees = []
        for i, nodes in enumerate(store["trees"]):
            where = f"store {KIND_WORDS[kind]} tree {i}: "
            sizes = {len(x) for name, x in nodes.items() if name != "missing_left"}
            if len(sizes) > 1:
                wrong(f"{where}node arrays have mismatched lengths")
            if sizes == {0}:
                wrong(f"{where}empty tree")
            if len(nodes["missing_left"]) not in (0, *sizes):
                wrong(f"{where}missing_left length mismatch")
            if not len(nodes["missing_left"]):
                nodes["missing_left"] = np.ones(sizes.pop(), bool)
            trees.append(Tree(**nodes))
            check_nodes(trees[-1], len(names), where)
        stores[kind] = Store(store["baseline"], trees)
    return Artifact(role, read["target"], tuple(names), stores)


def check_nodes(tree: Tree, features: int, where: str) -> None:
    """Children and features of every inner node; the first faulty one is named."""
    n = len(tree.value)
    node = np.arange(n)
    left, right, feature = tree.left, tree.right, tree.feature
    inner = (left >= 0) | (right >= 0)
    outside = (np.minimum(left, right) < 0) | (np.maximum(left, right) >= n)
    backward = np.minimum(left, right) <= node
    wrong_feature = (feature < 0) | (feature >= features)
    faulty = inner & (outside | backward | wrong_feature)
    if faulty.any():
        i = int(faulty.argmax())
        if outside[i]:
            wrong(f"{where}node {i} has out-of-range children ({left[i]}, {right[i]})")
        if backward[i]:
            wrong(f"{where}node {i} children must have larger indices")
        wrong(f"{where}node {i} feature index {feature[i]} out of range")
