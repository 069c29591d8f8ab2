"""Models in files: one NPZ or Parquet file with a JSON manifest, every bit as it was, nothing that runs on loading.

    manifest   UTF-8 JSON: format, version, package, the tree of fields and static options, dtypes and shapes
    a0 ...     the arrays, in the order of the tree
    digest     SHA-256 of the members before it, each as the bytes of an NPY file

Only the kinds of `KINDS` are written and read.  The digest finds damage, not forgery: whoever can write the file can
write the digest too, and can then make a model that answers nonsense, but nothing worse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from fpmjax.integrity import fault_of
from fpmjax.model_file import (
    AGAIN,
    DIGEST,
    DTYPES,
    FORMAT,
    MANIFEST,
    NPY,
    array_of,
    npy,
    read_members,
    refuse,
    write_members,
)

VERSION = 1
# What a model is made of, by the module that defines it.
KINDS = {
    "Direct": "models.direct",
    "Regression": "models.regression",
    "Corrected": "models.corrected",
    "Chosen": "models.chosen",
    "WithIntervals": "models.intervals",
    "Forest": "models.forest",
    "Cuts": "models.trees",
    "Masks": "models.trees",
    "Walk": "models.trees",
    "DecodeTable": "lookup.decode",
    "PrefillTable": "lookup.prefill",
    "Axis": "lookup.axis",
    "Knots": "lookup.curves",
    "Cell": "tables.cell",
    "Points": "tables.cell",
    "Identity": "tables.identity",
    "Learned": "models.learned",
    "Store": "models.committee",
    "Refinement": "models.refine",
    "Learner": "models.learner",
    "Rules": "models.learner",
    "Plane": "models.plane",
    "Spline": "models.spline",
    "Grid": "observe.retain",
    "Boxes": "observe.ratios",
    "Fixed": "observe.ratios",
    "Local": "observe.ratios",
}
MODELS = ("Direct", "Regression", "Learned", "Corrected", "Chosen", "WithIntervals", "Forest")
BESIDE = {"Direct": "cell"}  # attributes that are no fields, but that messages and coverage need


def save_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a model to one file; an older file of that name is replaced when the new one is complete.

    path: with the suffix `.parquet` a Parquet file, otherwise NPZ; `load_model` tells them apart by their content.
        A link stays, and the file that it leads to is written.
    model: from `direct`, `regression`, `learned`, `load_forest`, `corrected`, `chosen` or `with_intervals`; also a
        stack of models, such as `stack`, `learned_fleet` and `update_many` make.

    Raises ModelFileError: `kind` for what is none of these, `shape` for arrays that do not fit, `unwritable`
    (also where a folder, a device or a pipe has that name).
    """
    arrays: list[np.ndarray] = []
    tree = encode(model, arrays)
    if tree.get("kind") not in MODELS:
        refuse(f"a {type(model).__name__} is no model that can be saved", f"save one of {', '.join(MODELS)}", "kind")
    fault = fault_of(model)
    if fault is not None:
        refuse(f"the arrays of this {tree['kind']} do not fit each other: {fault}", "build the model again", "shape")
    from fpmjax import __version__

    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "package": __version__,
        "kind": tree["kind"],
        "arrays": [{"dtype": a.dtype.str, "shape": list(a.shape)} for a in arrays],
        "model": tree,
    }
    text = np.frombuffer(
        json.dumps(manifest, ensure_ascii=False, allow_nan=False).encode(errors="surrogatepass"), np.uint8
    )
    members = {MANIFEST: npy(text), **{member(i): npy(array) for i, array in enumerate(arrays)}}
    members[DIGEST] = npy(np.frombuffer(digest_of(members.values()), np.uint8))
    write_members(path, members)


def load_model(path: str | os.PathLike[str]) -> Any:
    """The model of a file that `save_model` wrote, bit for bit: of any kind that it takes, or a stack of them.

    A table comes back with its cell, a regression with its rows, a correction and a choice with the models inside, so
    that each of them goes on learning where it stopped; a learned model with its intervals; a forest as it was read.
    Everything is checked before anything is built.  Raises ModelFileError: `unreadable`, `not_a_model` (another
    kind of file, or a cut one), `version`, `digest`, `malformed` (what no model is made of), `shape` (arrays that do
    not make up a model).
    """
    members = read_members(path)
    manifest = read_manifest(members, path)
    arrays = read_arrays(members, manifest, path)
    try:
        model, used = decode(manifest["model"], arrays), count_arrays(manifest["model"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        refuse(f"{path} holds no model that this version knows: {error}", written_by(manifest), "malformed")
    if used != list(range(len(arrays))) or manifest.get("kind") not in MODELS or kind_of(model) != manifest["kind"]:
        refuse(f"{path} holds fields that no model has", written_by(manifest), "malformed")
    fault = fault_of(model)
    if fault is not None:
        refuse(f"the arrays of {path} do not make up a {manifest['kind']}: {fault}", written_by(manifest), "shape")
    return model


# Trees


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """The value as JSON; arrays are appended to `arrays` and stand there by their position."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if isinstance(value, Tracer):
            refuse("a model cannot be saved while it is traced", "save what the compiled function returns", "kind")
        array = np.asarray(value, order="C")
        if array.dtype.str not in DTYPES:
            refuse(
                f"an array of {array.dtype} is no part of a model", "models hold numbers of 8, 32 or 64 bits", "kind"
            )
        arrays.append(array)
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    if value is None or isinstance(value, (bool, int, str)):
        return {"is": value}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, arrays) for item in value]}
    if kind_of(value) is None:
        refuse(f"a {type(value).__name__} is no part of a model that can be saved", "save the model itself", "kind")
    node: dict[str, Any] = {"kind": kind_of(value)}
    node["fields"] = {f.name: encode(getattr(value, f.name), arrays) for f in dataclasses.fields(value)}
    beside = BESIDE.get(node["kind"])
    if beside:
        node["beside"] = encode(getattr(value, beside), arrays)
    return node


def decode(node: Any, arrays: list[np.ndarray]) -> Any:
    """The value of a node; KeyError, TypeError or ValueError where there is none."""
    if "kind" in node:
        cls = class_of(node["kind"])
        names = [f.name for f in dataclasses.fields(cls)]
        if sorted(names) != sorted(node["fields"]):
            raise ValueError(f"the fields of {node['kind']} are {', '.join(names)}")
        value = cls(**{name: decode(node["fields"][name], arrays) for name in names})
        if "beside" in node:
            object.__setattr__(value, BESIDE[node["kind"]], decode(node["beside"], arrays))
        return value
    ((form, content),) = node.items()
    if form in ("array", "scalar"):
        return arrays[content] if form == "array" else arrays[content][()]
    if form == "tuple":
        return tuple(decode(item, arrays) for item in content)
    if form == "float":
        return float.fromhex(content)
    if form == "is" and (content is None or isinstance(content, (bool, int, str))):
        return content
    raise ValueError(f"unknown form {form!r}")


def count_arrays(node: Any) -> list[int]:
    """Positions of all arrays in a decoded tree, in its order."""
    if "kind" in node:
        inner = [*node["fields"].values(), *([node["beside"]] if "beside" in node else [])]
    else:
        ((form, content),) = node.items()
        if form in ("array", "scalar"):
            return [content]
        inner = content if form == "tuple" else []
    return [i for each in inner for i in count_arrays(each)]


def kind_of(value: Any) -> str | None:
    """The registered name of a value's class."""
    name = type(value).__name__
    return name if type(value).__module__ == f"fpmjax.{KINDS.get(name)}" else None


def class_of(kind: Any) -> Any:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    return getattr(importlib.import_module(f"fpmjax.{KINDS[kind]}"), kind)


# Members


def read_manifest(members: dict[str, bytes], path: Any) -> dict[str, Any]:
    try:
        manifest = json.loads(array_of(members[MANIFEST]).tobytes())
    except (ValueError, RecursionError) as error:
        refuse(f"the manifest of {path} cannot be read: {error}", AGAIN, "not_a_model")
    if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
        refuse(f"{path} holds arrays, but no saved model", AGAIN, "not_a_model")
    if manifest.get("version") != VERSION:
        what = f"{path} has version {manifest.get('version')!r} of the format, but this package reads {VERSION}"
        refuse(what, written_by(manifest), "version")
    return dict(manifest)


def read_arrays(members: dict[str, bytes], manifest: dict[str, Any], path: Any) -> list[np.ndarray]:
    listed = manifest.get("arrays")
    names = [member(i) for i in range(len(listed))] if isinstance(listed, list) else None
    if names is None or members.keys() != {MANIFEST, DIGEST, *names}:
        refuse(f"{path} does not hold the arrays that its manifest lists", AGAIN, "malformed")
    try:
        stored = array_of(members[DIGEST]).tobytes()
        arrays = [array_of(members[name]) for name in names]
    except ValueError as error:
        refuse(f"an array of {path} cannot be read: {error}", AGAIN, "malformed")
    if stored != digest_of([members[MANIFEST], *(members[name] for name in names)]):
        refuse(f"the content of {path} does not have the digest that it states", AGAIN, "digest")
    if [{"dtype": a.dtype.str, "shape": list(a.shape)} for a in arrays] != listed:
        refuse(f"the arrays of {path} are not those that its manifest lists", AGAIN, "shape")
    return arrays


def member(i: int) -> str:
    return f"a{i}{NPY}"


def digest_of(members: Any) -> bytes:
    digest = hashlib.sha256()
    for data in members:
        digest.update(data)
    return digest.digest()


def written_by(manifest: Mapping[str, Any]) -> str:
    return f"it was written by fpmjax {manifest.get('package')!r}; load it there, or fit the model again"
