"""Diagnoses: an ordinary study has none, and each mistake has its own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import EAGLE, MTP, six_scored, synthetic, synthetic_scored

from fpmjax.study.diagnose import diagnose
from fpmjax.study.read import read_study
from fpmjax.study.scored import Scored, score


@pytest.fixture(scope="module")
def noisy() -> Scored:
    return synthetic_scored(gpus=("H100", "B200"), cluster_noise=0.02, round_noise=0.02, seed=5)


def codes(found: list[dict[str, Any]]) -> list[str]:
    assert all(set(entry) == {"code", "what", "where", "places", "help"} for entry in found)
    assert all(not entry["what"].endswith(".") and len(entry["where"]) <= 8 <= 8 * entry["places"] for entry in found)
    json.dumps(found, allow_nan=False)
    return [entry["code"] for entry in found]


@given(
    slope=st.floats(0.05, 0.2),
    intercept=st.floats(1.15, 1.5),
    noise=st.floats(0, 0.02),
    rounds=st.integers(16, 120),
    depths=st.sampled_from([(1, 2, 3, 4), (1, 2, 3), (1, 3, 5), (2, 3, 4, 6)]),
    seed=st.integers(0, 999),
)
def test_an_ordinary_study_has_none(slope, intercept, noise, rounds, depths, seed):
    study = synthetic_scored(
        gpus=("H100",),
        true={MTP: (slope, intercept), EAGLE: (0.08, 1.25)},
        depths=depths,
        rounds=lambda d: rounds,
        cluster_noise=noise,
        round_noise=noise,
        seed=seed,
    )
    assert diagnose(None, study) == []


@given(tail=st.floats(0, 0.2), seed=st.integers(0, 999))
def test_a_tail_of_slow_rounds_is_no_merging(noisy, tail, seed):
    random = np.random.default_rng(seed)
    slow = np.where(random.random(len(noisy)) < tail, 1 + random.exponential(0.3, len(noisy)), 1.0)
    assert "merged_rounds" not in codes(diagnose(None, replace(noisy, measured_ms=noisy.measured_ms * slow)))


def test_a_study_from_a_file_has_none():
    study = read_study(synthetic(gpus=("H100",), cluster_noise=0.01, round_noise=0.01))
    assert diagnose(study, score(study)) == []


def test_rounds_without_their_drafts(noisy):
    bare = replace(noisy, measured_ms=noisy.reference_ms * 1.04)
    found = diagnose(None, bare)
    assert codes(found) == ["draft_time_missing"] and found[0]["places"] == 2
    assert "median T / F at d = 4 is 1.040, below 1.171" in found[0]["what"] and "same timing scope" in found[0]["help"]
    one = diagnose(None, bare.where(bare.depth == 2))
    assert codes(one)[:2] == ["draft_time_missing", "few_draft_lengths"]


def test_a_baseline_with_the_drafter_loaded(noisy):
    """A reference 21.6 % too slow still leaves room for drafts, but the intercept falls to about 1.03."""
    clean = synthetic_scored(gpus=("H100",), true={MTP: (0.08, 1.25)}, cluster_noise=0.005, seed=1)
    assert codes(diagnose(None, clean)) == []
    found = diagnose(None, replace(clean, reference_ms=clean.reference_ms * 1.216))
    assert codes(found) == ["baseline_loaded"] and "intercept 1.0" in found[0]["what"]


@pytest.mark.parametrize("multiple", [2, 3])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_merged_rounds(noisy, multiple, share):
    hit = (noisy.config == 7) & (np.random.default_rng(0).random(len(noisy)) < share)
    found = diagnose(None, replace(noisy, measured_ms=np.where(hit, multiple, 1) * noisy.measured_ms))
    assert codes(found) == ["merged_rounds"] and found[0]["places"] == 1 and "some rounds" in found[0]["what"]


def test_a_few_merged_rounds_everywhere(noisy):
    hit = np.random.default_rng(0).random(len(noisy)) < 0.03
    found = diagnose(None, replace(noisy, measured_ms=np.where(hit, 2, 1) * noisy.measured_ms))
    assert codes(found) == ["merged_rounds"] and found[0]["places"] == 4
    assert found[0]["where"][0] == "B200, Qwen3-8B + eagle3: some rounds"


def test_a_configuration_of_merged_rounds_only(noisy):
    found = diagnose(None, replace(noisy, measured_ms=np.where(noisy.config == 7, 2, 1) * noisy.measured_ms))
    assert codes(found) == ["merged_rounds"] and "all rounds" in found[0]["what"]
    c = noisy.configs[7]
    assert f"{c.gpu}, TP1, {c.model} + {c.method}, d = {c.draft_length}, B = {c.batch_size}" in found[0]["where"][0]


@pytest.mark.parametrize("depths", [(1,), (1, 4)])
def test_few_draft_lengths(noisy, depths):
    found = diagnose(None, noisy.where(np.isin(noisy.depth, depths)))
    assert codes(found)[0] == "few_draft_lengths" and found[0]["places"] == 2


def test_thin_and_partial_configurations(noisy):
    keep = (noisy.config != 0) & ((noisy.config != 1) | (noisy.round_index == 20))
    found = diagnose(None, noisy.where(keep))
    assert codes(found) == ["thin_configurations"]
    assert found[0]["places"] == 2 and found[0]["where"][0].endswith("0 scored")
    unmatched = noisy.unmatched.copy()
    unmatched[3:5] = 4, 10  # of 94 and of 100 rounds
    found = diagnose(None, replace(noisy, unmatched=unmatched))
    assert codes(found) == ["partial_configurations"] and found[0]["where"][0].endswith("10 of 100 rounds")


def test_thin_cells(noisy):
    one = noisy.where((noisy.cells[noisy.config] != 0) | (noisy.config == 0))
    found = {entry["code"]: entry for entry in diagnose(None, one)}
    assert found["thin_cells"]["where"] == ["B200, Qwen3-8B + eagle3, d = 1: configurations 1, rounds 90"]
    assert "thin_cells" in codes(diagnose(None, six_scored()))


@pytest.mark.parametrize("method", ["ngram", "draft_model", "other"])
def test_another_kind_of_drafter(noisy, method):
    configs = tuple(c._replace(method=method) if c.method == "mtp" else c for c in noisy.configs)
    mtp = np.array([c.method == "mtp" for c in noisy.configs])[noisy.config]
    cheap = np.where(mtp, noisy.reference_ms, noisy.measured_ms)  # drafts for free are no missing drafts
    assert codes(diagnose(None, replace(noisy, configs=configs, measured_ms=cheap))) == ["other_drafter"]


@pytest.mark.parametrize(("factor", "found"), [(1.02, []), (1.1, ["mixed_scopes"]), (0.9, ["mixed_scopes"])])
def test_runs_that_differ_as_two_timing_scopes_do(factor, found):
    one, other = (synthetic(gpus=("H100",), round_noise=0.02, seed=s) for s in (0, 1))
    columns = {name: other[name] for name in other.column_names}
    columns["study_id"] = pa.array(["tuesday"] * len(other))
    columns["latency_ms"] = pa.array(factor * other["latency_ms"].to_numpy())
    study = read_study(pa.concat_tables([one, pa.table(columns)]))
    entries = diagnose(study, score(study))
    assert codes(entries) == found
    if found:
        percent = float(entries[0]["where"][0].split("takes ")[1].split(" %")[0])
        assert percent == pytest.approx(100 * factor, abs=0.5) and entries[0]["where"][0].startswith("tuesday")


def test_no_rounds_and_anchors(noisy):
    assert codes(diagnose(None, noisy.where(noisy.depth > 9))) == ["thin_configurations", "thin_cells"]
    assert diagnose(None, replace(noisy, reference="interpolated_batch")) == []


@pytest.mark.parametrize(
    ("scale", "code"), [(1e3, "ratios_too_high"), (1e-3, "ratios_too_low"), (1e6, "ratios_too_high")]
)
def test_a_reference_in_other_units_or_of_another_machine(noisy, scale, code):
    found = diagnose(None, replace(noisy, measured_ms=scale * noisy.measured_ms))
    assert codes(found) == [code] and found[0]["places"] == 2 and "in ms" in found[0]["help"]
    assert f"d = 1 is {1.25 * scale:.1e}"[:9] in found[0]["where"][0]


def test_a_reference_of_a_machine_twice_as_fast(noisy):
    """At d = 1 such rounds lose against ordinary steps; where only deep ones are scored, the intercept tells."""
    slow = replace(noisy, measured_ms=2 * noisy.measured_ms)
    for rounds, word in ((slow, "median T / F at d = 1"), (slow.where(slow.depth > 2), "intercept")):
        found = diagnose(None, rounds)
        assert codes(found)[0] == "ratios_too_high" and word in found[0]["what"]
    costly = tuple(c._replace(method="draft_model") for c in noisy.configs)  # d passes of a model half as large
    measured = (0.55 * noisy.depth + 1.2 * (noisy.depth > 1)) * noisy.reference_ms
    assert codes(diagnose(None, replace(noisy, configs=costly, measured_ms=measured))) == ["other_drafter"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("latency", [1e308, 1e290, 2.3e-308, 1e-320])
def test_one_latency_that_none_can_be_is_one_diagnosis(noisy, latency):
    for column in ("measured_ms", "reference_ms"):
        values = getattr(noisy, column).copy()
        values[5] = latency
        found = diagnose(None, replace(noisy, **{column: values}))
        assert codes(found) == ["implausible_latencies"] and found[0]["places"] == 1
        assert "round 21: T = " in found[0]["where"][0]


def test_a_model_of_another_deployment():
    study = read_study(synthetic(gpus=("H100",), true={MTP: (0.08, 1.25)}, rounds=lambda d: 20))
    cell = {"model": "Qwen/Qwen3-32B", "system": "b300_sxm", "tp": 1, "gemm_quant_mode": "bfloat16"}
    model = {"kind": "Direct", "digest": "0" * 64, "cell": cell | {"backend": "vllm", "backend_version": "0.20.1"}}
    found = diagnose(study, score(study), model)
    assert codes(found) == ["other_reference"] and found[0]["places"] == 4
    assert found[0]["what"].endswith("GPU: H100 in the study, b300_sxm in the model")
