"""What a study says of its fixed rule in one sentence, and of the model that its reference comes from."""

from __future__ import annotations

import pytest

from fpmjax.study.identity import mismatches, model_in_words, same_gpu, same_model

CELL = {"model": "Qwen/Qwen3-32B", "system": "b300_sxm", "tp": 1, "gemm_quant_mode": "bfloat16", "backend": "vllm"}
MODEL = {"kind": "Direct", "digest": "0" * 64, "policy": "dynamo_native_single_sample_v1"}
MODEL |= {"cell": CELL | {"backend_version": "0.20.1"}}
SCOPE = {"gpu": ["B300"], "tp": [1], "model": ["Qwen3-32B"], "dtype": ["bf16"], "framework": ["vLLM"]}
SCOPE |= {"framework_version": ["0.20.1"], "timing_scope": ["scheduler_wall_time"]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("H200", "h200_sxm", True),
        ("NVIDIA H200 141GB HBM3e", "h200_sxm", True),
        ("8xH100", "h100_sxm5", True),
        ("GB200", "b200_sxm", False),
        ("H20", "h200_sxm", False),
        ("RTX 4090", "h100_sxm", False),
        ("NVIDIA RTX PRO 6000 300W", "rtx_pro_6000_server", True),
        ("L4", "l40s", False),
        ("A100-SXM4-80GB", "h100-sxm4-80gb", False),
        ("example-gpu", "b300_sxm", False),
        ("my B300", "b300_sxm", True),
    ],
)
def test_gpus_are_compared_by_their_numbers(one, other, same):
    assert same_gpu(one, other) is same_gpu(other, one) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Qwen3-32B", "Qwen/Qwen3-32B", True),
        ("qwen3_32b", "org/Qwen3-32B-Instruct", True),
        ("Qwen3-8B", "Qwen/Qwen3-32B", False),
        ("Qwen3.5-4B", "Qwen3-4B", False),
    ],
)
def test_models_are_compared_by_their_last_part(one, other, same):
    assert same_model(one, other) is same_model(other, one) is same


def test_a_study_of_the_models_own_deployment_differs_in_nothing():
    assert mismatches(MODEL, SCOPE) == [] == mismatches({"kind": "Learned", "digest": "1"}, SCOPE)
    assert mismatches({"B300, 1, Qwen3-32B": MODEL}, SCOPE) == []


@pytest.mark.parametrize(
    ("column", "value", "line"),
    [
        ("gpu", "H100", "GPU: H100 in the study, b300_sxm in the model"),
        ("tp", 4, "tensor-parallel size: 4 in the study, 1 in the model"),
        ("model", "Qwen3-8B", "model: Qwen3-8B in the study, Qwen/Qwen3-32B in the model"),
        ("dtype", "fp8", "precision: fp8 in the study, bfloat16 in the model"),
        ("framework", "sglang", "engine: sglang in the study, vllm in the model"),
        ("framework_version", "1.0", "engine's version: 1.0 in the study, 0.20.1 in the model"),
        (
            "timing_scope",
            "client_itl",
            "clock: client_itl in the study, scheduler wall time, maximum over ranks, one sample",
        ),
        ("timing_scope", "model_step_cuda", "clock: model_step_cuda in the study, scheduler wall time"),
    ],
)
def test_each_difference_is_a_line(column, value, line):
    (found,) = mismatches(MODEL, SCOPE | {column: [value]})
    assert found.startswith(line)
    if column in ("gpu", "tp", "model"):
        key = ", ".join(str((SCOPE | {column: [value]})[name][0]) for name in ("gpu", "tp", "model"))
        assert mismatches({key: MODEL}, SCOPE) == [f"{key}: {found}"]


def test_the_models_cell_and_clock_are_told():
    told = model_in_words(MODEL)
    assert told.startswith(
        "Direct of Qwen/Qwen3-32B on b300_sxm, TP1, bfloat16, vllm 0.20.1; clock: scheduler wall time"
    )
    assert "names no table cell" in model_in_words({"kind": "Learned", "digest": "1" * 64})
