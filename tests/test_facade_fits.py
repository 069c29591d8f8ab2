"""The facade over models that learn: recorded streams through best_available, tuning and estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import DETAIL, SPECULATIVE, decode, facade, prefill, records
from configs import FIT, LOOKUP, fit, merged
from streams import GROUPS, rank_dict, recorded
from table_pairs import refusal

from fpmjax.answer import Estimate
from fpmjax.config import with_correction
from fpmjax.errors import CoverageError, MetricsError, OptionError, SpeculationError
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.models.corrected import Corrected
from fpmjax.schema import resolve
from fpmjax.status import Status
from fpmjax.work import COUNTS, Work

COLD = {"latency_ms": None, "native_latency_ms": None, "correction_factor": None, "max_rank": None, "ranks": []}
IDLE = COLD | {"latency_ms": 0.0}


def regression_of(stream: dict) -> ForwardPassPerfModel:
    return ForwardPassPerfModel.best_available(
        FIT | {"worker_type": stream["worker_type"], "estimator_config": stream["estimator_config"]}
    )


def seen(metrics: dict, seconds: float) -> dict:
    return metrics | {"wall_time": seconds}


def line(model: ForwardPassPerfModel, n: int = 8) -> ForwardPassPerfModel:
    """Tuned on decode that takes B + K / 1024 ms, over batches and contexts that vary independently."""
    points = [(b, 1024 * k) for b in (1, 2, 4, 8) for k in (1, 16)][:n]
    model.tune_with_fpms([[seen(decode(b, k), (b + k / 1024) / 1000)] for b, k in points])
    return model


# Recorded streams


@pytest.mark.parametrize("group", GROUPS)
def test_recorded_streams_of_a_regression(group):
    streams = recorded(group)
    assert len(streams) >= 4
    for stream in streams:
        model = regression_of(stream)
        assert model.tune_with_fpms(stream["observations"]) is None
        stores = model.regression_store_diagnostics()
        assert [list(store.values())[:3] for store in stores] == stream["stores"], stream["id"]
        if "spline" in stream:
            internal = ("numerical_rebuilds", "batch_fallbacks")  # of running sums, which are not kept here
            for store, want in zip(stores, stream["spline"], strict=True):
                assert {**store["spline"], **{k: want[k] for k in internal}} == want
        for query, want in zip(stream["queries"], stream["answers_ms"], strict=True):
            detail = model.estimate_forward_pass_detailed(query)
            assert detail == COLD | {"latency_ms": detail["latency_ms"]}
            assert model.estimate_forward_pass_time_ms(query) == detail["latency_ms"]
            assert detail["latency_ms"] == (want if want is None else pytest.approx(want, rel=1e-9, abs=0)), stream[
                "id"
            ]
        diagnostics = model.diagnostics()
        ready = any(ready for _, ready, _ in stream["stores"])
        assert diagnostics["readiness"] == ("ready" if ready else "insufficient_data")
        assert diagnostics["retained_observations"] == sum(kept for _, _, kept in stream["stores"])


class Native:
    """Stands for the peer's estimator: answers what was recorded, knows nothing else."""

    composition, execution, ready = "op_level", "autoregressive", True

    def __init__(self, iterations: list, ms: list[float]):
        self.known = {key(ranks): value for ranks, value in zip(iterations, ms, strict=True)}

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        counts = np.stack([np.broadcast_to(getattr(work, name), (*work.shape, work.ranks)) for name in COUNTS], -1)
        ms = np.array([self.known[key(ranks.tolist())] for ranks in counts.reshape(-1, work.ranks, len(COUNTS))])
        status = np.where(ms > 0, np.int8(Status.OK), np.int8(Status.IDLE)).reshape(work.shape)
        return Estimate(ms.reshape(work.shape), status, np.where(status == Status.OK, np.int32(0), np.int32(-1)))


def key(ranks: list) -> tuple:
    counts = [tuple(rank[:5]) for rank in ranks]
    while counts and not any(counts[-1]):
        counts.pop()
    return tuple(counts)


@pytest.mark.parametrize("stream", [r for r in records("regression_cases.jsonl.gz") if r["group"] == "correction"])
def test_recorded_streams_of_a_correction(stream):
    native = Native(
        stream["observations"] + stream["queries"], stream["observation_native_ms"] + stream["query_native_ms"]
    )
    options = resolve(FIT | {"estimator_config": stream["estimator_config"]})["estimator_config"]["correction"]
    model = ForwardPassPerfModel(with_correction(native, options))
    iterations = [[rank_dict(rank) for rank in ranks] for ranks in stream["observations"]]
    for start in range(0, len(iterations), 8):
        model.tune_with_fpms(iterations[start : start + 8])
    for query, ms, want in zip(stream["queries"], stream["query_native_ms"], stream["answers_ms"], strict=True):
        detail = model.estimate_forward_pass_detailed([rank_dict(rank) for rank in query])
        assert detail["latency_ms"] == pytest.approx(want, rel=1e-9, abs=0)
        assert (detail["native_latency_ms"], detail["correction_factor"] > 0) == (ms, True)
    shown = model.diagnostics()
    counts = (shown["source"], shown["retained_observations"], shown["correction_ready_buckets"])
    assert counts == (stream["source"], stream["retained"], stream["ready_buckets"])
    getters = (model.get_min_correction_factor, model.get_max_correction_factor, model.get_avg_correction_factor)
    for get, want in zip(getters, stream["factors_min_max_avg"], strict=True):
        assert get() == (want if want is None else pytest.approx(want, rel=1e-12))
    with pytest.raises(SpeculationError) as caught:
        model.estimate_forward_pass_time_ms(decode(1, 1), draft_length=1)
    assert caught.value.code == "unsupported_estimator"


TUNED = [r for r in records("metrics_cases.jsonl.gz") if r["call"] == "tune_then_diagnostics"]


@pytest.mark.parametrize("record", TUNED, ids=lambda record: record["case"])
@pytest.mark.parametrize("name", ["reg_decode", "fpm_direct"])
def test_recorded_tuning(record, name):
    model = ForwardPassPerfModel.best_available(FIT if name == "reg_decode" else LOOKUP)
    want = record["peer"][name]
    if "error" in want:
        error = CoverageError if "PerfData" in want["error"] else MetricsError
        with pytest.raises(error):
            model.tune_with_fpms(record["input_json"])
    else:
        assert model.tune_with_fpms(record["input_json"]) is want["returned"]
    shown = model.diagnostics()
    assert {k: v for k, v in want.items() if k not in ("returned", "error", "message")} == {
        k: shown[k] for k in ("retained_observations", "readiness", "source")
    }


# By hand


def test_unready_and_idle_answers_of_a_regression():
    model = ForwardPassPerfModel.best_available(FIT)
    assert model.estimate_forward_pass_time_ms(decode(4, 4096)) is None
    assert model.estimate_forward_pass_detailed(decode(4, 4096)) == COLD
    for idle in ({}, [{}, {}]):
        assert model.estimate_forward_pass_time_ms(idle) == 0.0
        assert model.estimate_forward_pass_detailed(idle) == IDLE
    answer = model.estimate_forward_pass_detailed(decode(4, 4096), draft_length=3)
    assert answer == {"latency_ms": None, "draft_length": 3, "scaling_factor": 1.49, "stp_reference": COLD}
    assert model.regression_store_diagnostics() == [
        {"workload_kind": "pure_decode", "ready": False, "retained_observations": 0}
    ]
    line(model, n=4)
    assert model.estimate_forward_pass_time_ms(decode(4, 4096)) is None


def test_a_tuned_regression_answers_and_scales_once():
    model = line(ForwardPassPerfModel.best_available(FIT))
    assert model.estimate_forward_pass_time_ms(decode(2, 8192)) == pytest.approx(10.0)
    answer = model.estimate_forward_pass_detailed(decode(2, 8192), draft_length=3)
    assert list(answer) == SPECULATIVE and list(answer["stp_reference"]) == DETAIL
    assert answer["stp_reference"]["latency_ms"] == pytest.approx(16.0)
    assert answer["latency_ms"] == 1.49 * answer["stp_reference"]["latency_ms"]
    assert model.estimate_forward_pass_time_ms(decode(2, 8192), draft_length=3) == answer["latency_ms"]
    assert model.diagnostics()["source"] == "fallback_regression"
    getters = (model.get_min_correction_factor, model.get_max_correction_factor, model.get_avg_correction_factor)
    assert [get() for get in getters] == [None] * 3


def test_an_aggregated_worker_lists_four_stores():
    model = ForwardPassPerfModel.best_available(FIT | {"worker_type": "aggregated"})
    kinds = [store["workload_kind"] for store in line(model).regression_store_diagnostics()]
    assert kinds == ["pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill"]
    assert [store["ready"] for store in model.regression_store_diagnostics()] == [True, False, False, False]
    assert model.estimate_forward_pass_time_ms(prefill(1, 64)) is None


def test_tuning_takes_the_peers_shapes():
    one, two = seen(decode(4, 4096), 0.01), seen(decode(2, 10), 0.02)
    for iterations, kept in ((one, 1), ([one, two], 1), ([[one], [two]], 2), ([], 0), (([one], (two,)), 2)):
        model = ForwardPassPerfModel.best_available(FIT)
        model.tune_with_fpms(iterations)
        assert model.diagnostics()["retained_observations"] == kept
    model.tune_with_fpms(iter([[one], [two]]))
    assert model.diagnostics()["retained_observations"] == 4


def test_tuning_is_all_or_nothing():
    good, wrong_role = [seen(decode(4, 4096), 0.01)], [seen(prefill(1, 8), 0.01)]
    bad = {
        "role": wrong_role,
        "decode_kv_without_requests": [decode(0, 5)],
        "schema_version": [seen(decode(1, 1), 0.1) | {"version": 2}],
        "payload": [{"scheduled_requests": 5}],
        "no_ranks": [],
    }
    for code, iteration in bad.items():
        model = ForwardPassPerfModel.best_available(FIT)
        before = model.model
        assert refusal(model.tune_with_fpms, [good, iteration], error=MetricsError)[0] == code
        assert model.model is before
    model = line(ForwardPassPerfModel.best_available(LOOKUP))
    before, answer = model.model, model.estimate_forward_pass_time_ms(decode(4, 4096))
    refusal(model.tune_with_fpms, [good, [seen(decode(64, 5), 0.01)]], error=CoverageError)
    assert model.model is before and model.estimate_forward_pass_time_ms(decode(4, 4096)) == answer


def test_a_role_is_checked_where_nothing_is_learned():
    model = ForwardPassPerfModel.best_available(FIT)
    for seconds in (0.0, -1.0, 1e308):
        code, message = refusal(model.tune_with_fpms, [[decode(1, 1)], [seen(prefill(1, 8), seconds)]])
        assert code == "role" and "decode worker's regression received scheduled prefill work" in message
    assert refusal(model.estimate_forward_pass_time_ms, prefill(1, 8), error=MetricsError)[0] == "role"
    other = ForwardPassPerfModel.best_available(FIT | {"worker_type": "prefill"})
    assert refusal(other.tune_with_fpms, [[decode(1, 1)]], error=MetricsError)[0] == "role"
    other.tune_with_fpms([[prefill(1, 8)]])


def test_request_lists_are_needed_where_an_axis_reads_them():
    model = ForwardPassPerfModel.best_available(fit("estimator_config.fpm_regression.sampling.axes", ["F", "n"]))
    lists = {"extend_lengths": [1], "past_kv_lengths": [5]}
    model.tune_with_fpms(seen(decode(1, 5, **lists), 0.01))
    assert refusal(model.tune_with_fpms, seen(decode(1, 5), 0.01), error=MetricsError)[0] == "lists_needed"
    assert model.estimate_forward_pass_time_ms(decode(1, 5)) is None  # only the fitted axes of a query are read
    linear = {"feature_axes": ["maxP"]}
    model = ForwardPassPerfModel.best_available(fit("estimator_config.fpm_regression.fit.linear", linear))
    assert refusal(model.estimate_forward_pass_time_ms, decode(1, 5), error=MetricsError)[0] == "lists_needed"
    assert model.estimate_forward_pass_time_ms({}) == 0.0


def test_a_regression_has_no_phases_and_no_ceiling():
    model = line(ForwardPassPerfModel.best_available(FIT))
    calls: list[tuple[Any, ...]] = [
        (model.predict_decode_latency_total, 1, 1024),
        (model.predict_prefill_latency_total, 1, 8, 0),
        (model.predict_prefill_latency, 1, 8),
        (model.static_phase_latency, 1, 8, 4, False),
        (model.static_phase_latency, 1, 8, 4, True),
        (model.fpm_decode_kv_ceiling,),
    ]
    for call, *args in calls:
        assert refusal(call, *args, error=MetricsError)[0] == "unsupported_estimator"


def test_what_only_learned_models_have():
    for model in (ForwardPassPerfModel.best_available(FIT), ForwardPassPerfModel.best_available(LOOKUP)):
        for call in (model.flush_updates, model.export_learned_artifact):
            assert refusal(call, error=OptionError)[0] == "unsupported_estimator"
        assert refusal(model.save_online_checkpoint, "x", error=OptionError)[0] == "unsupported_estimator"
        assert model.learned_metadata() is model.learned_feature_names() is None
        assert model.learned_online_diagnostics() is model.learned_selector_diagnostics() is None
        model.close()


# A corrected table


def test_a_corrected_table_keeps_its_evidence_and_applies_its_factor_once():
    model, plain = ForwardPassPerfModel.best_available(LOOKUP), facade("speculation_tables/surf.parquet")
    query = [{}, decode(2, 8192)]
    assert model.estimate_forward_pass_detailed(query) == plain.estimate_forward_pass_detailed(query)
    assert model.get_max_correction_factor() is None
    model.tune_with_fpms([[seen(decode(b, 8192), 1.5 * (b + 8) / 1000)] for b in (1, 2, 3, 4, 5)])
    assert (model.get_min_correction_factor(), model.get_max_correction_factor()) == (1.5, 1.5)
    assert model.diagnostics()["source"] == "aic_with_correction"
    native = plain.estimate_forward_pass_detailed(query)
    detail = model.estimate_forward_pass_detailed(query)
    assert detail == native | {"latency_ms": 15.0, "correction_factor": 1.5}
    assert model.estimate_forward_pass_time_ms(query) == 15.0
    answer = model.estimate_forward_pass_detailed(query, draft_length=3)
    assert answer["stp_reference"]["latency_ms"] == 24.0 and answer["latency_ms"] == 1.49 * 24.0
    assert model.estimate_forward_pass_time_ms(query, draft_length=3) == answer["latency_ms"]
    assert model.predict_decode_latency_total(2, 8192) == 10.0  # phases are the table's own
    assert model.fpm_decode_kv_ceiling() == plain.fpm_decode_kv_ceiling()


@pytest.mark.parametrize("mode", ["fixed", "dynamic_local", "hybrid"])
def test_the_plain_factor_is_the_models(mode):
    rng = np.random.default_rng(3)
    config = merged(LOOKUP, {"estimator_config": {"correction": {"mode": mode, "max_batch_size": 6}}})
    model = ForwardPassPerfModel.best_available(config)
    batches = rng.integers(1, 9, 60).tolist()
    model.tune_with_fpms([[seen(decode(b, 8192), rng.uniform(0.5, 2.0) * (b + 8) / 1000)] for b in batches])
    assert isinstance(model.model, Corrected) and model.model.factors.size
    for query in ([decode(b, 8192)] for b in range(1, 9)):
        for ranks in (query, [decode(1, 8192), *query], [*query, {}, decode(1, 8192)]):
            want = model.model.on_host(Work.from_metrics(ranks))
            detail = model.estimate_forward_pass_detailed(ranks)
            assert (detail["latency_ms"], detail["correction_factor"]) == (want.latency_ms, want.factor)


def test_a_disabled_correction_checks_and_keeps_nothing():
    config = merged(LOOKUP, {"estimator_config": {"correction": {"enabled": False}}})
    model = line(ForwardPassPerfModel.best_available(config))
    refusal(model.tune_with_fpms, [[decode(0, 5)]], error=MetricsError)
    assert model.diagnostics()["retained_observations"] == 0
    assert model.estimate_forward_pass_time_ms(decode(2, 8192)) == 10.0


def test_a_plain_table_does_not_learn():
    model = facade("speculation_tables/surf.parquet")
    code, message = refusal(model.tune_with_fpms, [[seen(decode(1, 1024), 0.1)]], error=OptionError)
    assert code == "unsupported_estimator" and "a Direct model does not learn" in message
