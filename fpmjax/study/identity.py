"""Whether the model that a study takes its reference from is of what the study measured, as far as names can tell.

Names are spelled in many ways (`H200`, `h200_sxm`, `NVIDIA H200 141GB`), so only what both sides say is compared: the
numbered words of a GPU, the last part of a model's name.  What cannot be compared is stated, and judged by the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fpmjax.tables.policy import CUDA_SCOPE, POLICIES

GPU = re.compile(r"(?!sxm|hbm|pcie|x\d)[a-z]+\d+[a-z]*|\d{4}[a-z]*")  # h200, l4, gb300, mi300x, 4090; no socket or size
WORDS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def model_in_words(model: dict[str, Any]) -> str:
    """A reference's model as a document holds it: what it is, of which table cell, and by which clock."""
    if "kind" not in model:
        return "; ".join(f"{key}: {model_in_words(one)}" for key, one in model.items())
    cell = model.get("cell")
    if not cell:
        return f"{model['kind']}, which names no table cell, sha256 {model['digest'][:16]}"
    who = f"{cell['model']} on {cell['system']}, TP{cell['tp']}, {cell['gemm_quant_mode']}"
    engine = f"{cell['backend']} {cell['backend_version']}"
    return f"{model['kind']} of {who}, {engine}; clock: {clock_of(model)}; sha256 {model['digest'][:16]}"


def clock_of(model: dict[str, Any]) -> str:
    """What the milliseconds of the model's table are."""
    policy = POLICIES.get(model.get("policy") or "")
    return policy.clock if policy else "unknown"


def mismatches(model: dict[str, Any], scope: dict[str, list[Any]]) -> list[str]:
    """What a reference's model and a study say differently, one line each.

    model: as `fpmjax.study.parts.models_of` tells it; scope: as `scope_of` does.
    """
    if "kind" in model:
        return list(differing(model, scope))
    found = []
    for key, one in model.items():
        gpu, tp, name = re.fullmatch(r"(.*?), (\d+), (.*)", key, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
        own = scope | {"gpu": [gpu], "tp": [int(tp)], "model": [name]}
        found += [f"{key}: {line}" for line in differing(one, own)]
    return found


def differing(model: dict[str, Any], scope: dict[str, list[Any]]) -> Iterator[str]:
    cell = model.get("cell")
    if not cell:
        return
    pairs: tuple[tuple[str, Any, Any, Any], ...] = (
        ("GPU", scope["gpu"], cell["system"], same_gpu),
        ("tensor-parallel size", scope["tp"], cell["tp"], lambda a, b: a == b),
        ("model", scope["model"], cell["model"], same_model),
        ("precision", scope["dtype"], cell["gemm_quant_mode"], same_dtype),
        ("engine", scope["framework"], cell["backend"], same_word),
        ("engine's version", scope["framework_version"], cell["backend_version"], lambda a, b: a == b),
    )
    for name, studied, modelled, same in pairs:
        if other := [value for value in studied if not same(value, modelled)]:
            yield f"{name}: {', '.join(map(str, other))} in the study, {modelled} in the model"
    if model.get("policy") in POLICIES:
        clock = clock_of(model)
        scopes = [s for s in scope["timing_scope"] if (s == CUDA_SCOPE) != clock.startswith("CUDA")]
        scopes += [s for s in scope["timing_scope"] if s in NEITHER and s not in scopes]
        if scopes:
            yield f"clock: {', '.join(scopes)} in the study, {clock} in the model"


NEITHER = ("model_worker_forward_cuda", "client_itl")  # scopes that no table is measured by


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def same_gpu(a: str, b: str) -> bool:
    """Whether the names share a numbered word, or any word where one of them has no number."""
    one, other = (set(words(re.sub(r"\b\d+x", "", text.lower()))) for text in (a, b))
    numbers, others = ({word for word in found if GPU.fullmatch(word)} for found in (one, other))
    return bool(numbers & others if numbers and others else one & other)


def same_model(a: str, b: str) -> bool:
    """`Qwen/Qwen3-32B`, `qwen3_32b` and `Qwen3-32B-Instruct` are one; a longer name may only add whole words."""
    one, other = (words(text.rsplit("/", 1)[-1]) for text in (a, b))
    short, long = sorted((one, other), key=len)
    return long[: len(short)] == short


def same_dtype(a: str, b: str) -> bool:
    one, other = (WORDS.get(text.lower(), text.lower()) for text in (a, b))
    return one.startswith(other) or other.startswith(one)


def same_word(a: str, b: str) -> bool:
    one, other = ("".join(words(text)) for text in (a, b))
    return one in other or other in one


def reference_in_words(document: dict[str, Any]) -> str:
    """The mode, and the model where there is one."""
    told = document["reference"]
    mode = told["mode"] + (", anchors only" if told["anchors_only"] else "")
    return mode if not told.get("model") else f"{mode}: {model_in_words(told['model'])}"
