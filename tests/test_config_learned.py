"""Learned models behind the peer's configuration and method names: frozen artifacts, ranges, sources."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from asking import DETAIL, decode
from configs import merged, trees
from forests import artifact, stump
from table_pairs import refusal

import fpmjax
from fpmjax import Observations, Work
from fpmjax.config import best_available
from fpmjax.errors import ModelFileError, OptionError
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.models.corrected import Corrected

IDENTITY = {"model": "org/any", "system": "h200_sxm", "tp": 1, "nextn": 0, "gemm_quant_mode": None}


@pytest.fixture
def write(tmp_path):
    """An artifact of 1 ms up to a batch of 4 and 2 ms beyond, and the frozen configuration of it."""

    def write(**more):
        path = tmp_path / "model.json"
        path.write_text(json.dumps(artifact([stump()], **more)))
        return trees(artifact_path=str(path), adaptation="frozen")

    return write


def test_a_frozen_artifact_is_corrected_by_what_is_tuned(write):
    model = ForwardPassPerfModel.best_available(write(metadata={"identity": IDENTITY}))
    assert isinstance(model.model, Corrected) and model.model.policy == "hybrid"
    assert model.estimate_forward_pass_time_ms(decode(4, 100)) == 1.0
    detail = model.estimate_forward_pass_detailed(decode(5, 100))
    assert list(detail) == [*DETAIL, "source"] and (detail["latency_ms"], detail["source"]) == (2.0, "learned")
    shown = model.diagnostics()
    assert (shown["source"], shown["readiness"]) == ("learned", "ready")
    assert shown["provenance"]["selected_estimation_mode"] == "fpm_learned"
    model.tune_with_fpms([[decode(4, 100) | {"wall_time": 0.01}] for _ in range(5)])
    assert model.estimate_forward_pass_time_ms(decode(4, 100)) == 2.0  # the usual bound of a factor
    assert model.diagnostics()["source"] == "learned_with_correction"
    assert model.learned_feature_names() == ["num_decode_requests"]
    drafted = model.estimate_forward_pass_detailed(decode(4, 100), draft_length=1)
    assert drafted["latency_ms"] == 1.33 * drafted["stp_reference"]["latency_ms"]


def test_the_correction_of_an_artifact_is_configured_like_any(write):
    config = merged(write(), {"estimator_config": {"correction": {"mode": "fixed"}}})
    assert best_available(config)[0].policy == "fixed"
    config = merged(write(), {"estimator_config": {"correction": {"enabled": False}}})
    assert best_available(config)[0].policy is None


def test_a_kind_without_a_store_is_not_ready(write):
    config = write(worker_type="aggregated", kinds=("pure_prefill",)) | {"worker_type": "aggregated"}
    assert ForwardPassPerfModel.best_available(config).estimate_forward_pass_time_ms(decode(4, 100)) is None


def test_an_artifact_has_to_be_the_one_that_is_meant(write, tmp_path):
    config = write(metadata={"identity": IDENTITY | {"tp": 2}})
    code, message = refusal(best_available, config, error=OptionError)
    assert code == "identity" and "does not match resolved deployment identity: tp is 2 in " in message
    code, message = refusal(best_available, write(metadata={"identity": {"foo": 1}}), error=OptionError)
    assert code == "identity" and "no field of a configuration" in message
    config = write()
    digest = hashlib.sha256((tmp_path / "model.json").read_bytes()).hexdigest()
    best_available(merged(config, {"estimator_config": {"fpm_learned": {"source_sha256": digest.upper()}}}))
    wrong = merged(config, {"estimator_config": {"fpm_learned": {"source_sha256": "0" * 64}}})
    assert "source_sha256 is 0000" in refusal(best_available, wrong, error=OptionError)[1]
    code, message = refusal(best_available, config | {"worker_type": "prefill"}, error=OptionError)
    assert code == "identity" and "of a decode worker, but worker_type is 'prefill'" in message
    gone = trees(artifact_path=str(tmp_path / "none.json"), adaptation="frozen")
    assert refusal(best_available, gone, error=ModelFileError)[0] == "unreadable"
    (tmp_path / "model.json").write_text("{}")
    assert refusal(best_available, config, error=ModelFileError)[0] == "json"


def test_details_carry_what_a_learned_model_states():
    rng = np.random.default_rng(2)
    batch = rng.integers(1, 33, 60)
    kv = batch * rng.integers(64, 4096, 60)
    wall = (8 + 0.02 * batch + kv / 3e4) * rng.lognormal(0, 0.02, 60)
    native = fpmjax.learned(Observations.of(Work.decode(batch, kv), wall), role="decode", family="linear")
    model = ForwardPassPerfModel(native)
    detail = model.estimate_forward_pass_detailed(decode(8, 9000))
    assert list(detail) == [*DETAIL, "interval", "support", "source"] and detail["source"] == "learned"
    assert detail["interval"]["low_ms"] < detail["latency_ms"] < detail["interval"]["high_ms"]
    assert detail["support"] == {"extrapolated": False, "e_folds": 0.0, "model_spread": 0.0}
    assert model.estimate_forward_pass_detailed(decode(500, 900_000))["support"]["extrapolated"] is True
    drafted = model.estimate_forward_pass_detailed(decode(8, 9000), draft_length=1)
    inner = drafted["stp_reference"]["interval"]
    assert drafted["interval"]["high_ms"] == 1.33 * inner["high_ms"] and "support" not in drafted
    far = model.estimate_forward_pass_detailed(decode(500, 900_000), draft_length=1)
    assert far["latency_ms"] is far["interval"] is far["stp_reference"]["support"] is None
    assert model.diagnostics()["provenance"]["selected_estimation_mode"] == "fpm_learned"
    code, _ = refusal(model.tune_with_fpms, [[decode(1, 1) | {"wall_time": 0.01}]], error=OptionError)
    assert code == "unsupported_estimator"


def test_a_table_with_intervals_states_them(embedded_cell):
    model = ForwardPassPerfModel(fpmjax.with_intervals(fpmjax.direct(embedded_cell)))
    detail = model.estimate_forward_pass_detailed(decode(8, 8192))
    assert list(detail) == [*DETAIL, "interval"] and detail["interval"]["level"] == 0.9
    assert model.diagnostics()["source"] == "aic"
