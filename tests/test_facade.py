"""The facade: one query at a time, in the peer's shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from asking import SPECULATIVE, Wrapped, decode, prefill, refusal
from hypothesis import given
from hypothesis import strategies as st

from fpmjax.answer import Resolution
from fpmjax.errors import CoverageError, DraftLengthTypeError, FpmError, MetricsError, SpeculationError
from fpmjax.estimate import estimate
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.models.direct import direct
from fpmjax.status import Status
from fpmjax.work import Work

pytestmark = pytest.mark.usefixtures("never_compiles")


# One iteration


def test_the_detail_has_the_peers_shape(surface):
    answer = surface.estimate_forward_pass_detailed([{}, decode(3, 8192)])
    point = {"total_prefill_tokens": None, "total_kv_read_tokens": 8192.0}
    assert answer == {
        "latency_ms": 11.0,
        "native_latency_ms": 11.0,
        "correction_factor": 1.0,
        "max_rank": 1,
        "ranks": [
            {
                "rank": 0,
                "latency_ms": 0.0,
                "prefill_ms": None,
                "decode_ms": None,
                "decode_baseline_ms": None,
                "marginal_decode_ms": None,
                "queries": [],
            },
            {
                "rank": 1,
                "latency_ms": 11.0,
                "prefill_ms": None,
                "decode_ms": 11.0,
                "decode_baseline_ms": None,
                "marginal_decode_ms": None,
                "queries": [
                    {
                        "phase": "decode",
                        "model_path": "org/synthetic",
                        "decode_baseline": False,
                        "query": {"batch_size": 3.0, **point},
                        "resolution": "exact_lookup",
                        "latency_ms": 11.0,
                        "support": [{"coordinates": {"batch_size": 3.0, **point}, "latency_ms": 11.0, "weight": 1.0}],
                    }
                ],
            },
        ],
    }


def test_idle_work_takes_no_time_with_and_without_a_draft_length(surface):
    idle = {"latency_ms": 0.0, "native_latency_ms": 0.0, "correction_factor": 1.0, "max_rank": None, "ranks": []}
    for metrics in ({}, [{}, {}], prefill(2, 0, 500)):
        assert surface.estimate_forward_pass_time_ms(metrics) == 0.0
        assert surface.estimate_forward_pass_detailed(metrics) == idle
    answer = surface.estimate_forward_pass_detailed([{}, {}], draft_length=3)
    assert answer == {"latency_ms": 0.0, "draft_length": 3, "scaling_factor": 1.49, "stp_reference": idle}


def test_a_draft_length_is_keyword_only_and_leaves_the_plain_answer_alone(surface):
    plain = surface.estimate_forward_pass_detailed(decode(2, 8192))
    surface.estimate_forward_pass_time_ms(decode(2, 8192), draft_length=2)
    assert surface.estimate_forward_pass_detailed(decode(2, 8192), draft_length=None) == plain
    with pytest.raises(TypeError):
        surface.estimate_forward_pass_time_ms(decode(2, 8192), 2)


def test_mistakes_of_a_speculative_query_are_found_in_order(surface):
    ask = surface.estimate_forward_pass_time_ms
    rounds = ForwardPassPerfModel(replace(surface.model, execution="speculative_round"))
    verify = ForwardPassPerfModel(replace(surface.model, verify_width=2))
    bad, mixed = {"version": 2}, prefill(1, 128, num_decode_requests=1, sum_decode_kv_tokens=1024)
    code, message = refusal(DraftLengthTypeError, rounds.estimate_forward_pass_time_ms, bad, draft_length=True)
    assert (code, message) == ("draft_length_type", "draft_length must be an integer, not bool")
    assert refusal(SpeculationError, rounds.estimate_forward_pass_time_ms, bad, draft_length=1)[0] == "measured_round"
    assert refusal(SpeculationError, verify.estimate_forward_pass_time_ms, bad, draft_length=1)[0] == (
        "unsupported_estimator"
    )
    assert refusal(MetricsError, ask, [mixed, bad], draft_length=1)[0] == "schema_version"
    assert refusal(SpeculationError, ask, [mixed, decode(2**31, 1)], draft_length=1)[0] == "not_pure_decode"
    assert refusal(SpeculationError, ask, prefill(1, 0), draft_length=1)[0] == "not_pure_decode"
    assert refusal(SpeculationError, ask, decode(2**31, 1), draft_length=1)[0] == "count_overflow"
    lists = {"extend_lengths": [1, 4], "past_kv_lengths": [5, 6]}
    assert refusal(SpeculationError, ask, decode(2, 11, **lists), draft_length=1)[0] == "not_single_token_decode"
    code, message = refusal(CoverageError, ask, decode(9, 8192), draft_length=3)
    assert code == "decode_no_two_sided_batch_bracket" and "batch_size=36, total_kv_read_tokens=8192" in message


def test_a_refusal_reads_as_it_does_from_estimate(surface):
    for metrics, depth in [(decode(64, 8192), None), ([{}, prefill(3, 100)], None), (decode(9, 8192), 3)]:
        messages = []
        for ask in (
            lambda m, d: surface.estimate_forward_pass_time_ms(m, draft_length=d),
            lambda m, d: surface.estimate_forward_pass_detailed(m, draft_length=d),
            lambda m, d: estimate(surface.model, Work.from_metrics(m), draft_length=d),
        ):
            with pytest.raises(CoverageError) as caught:
                ask(metrics, depth)
            messages.append(str(caught.value))
        assert len(set(messages)) == 1


COUNT = st.one_of(st.integers(0, 10), st.integers(0, 600), st.sampled_from([2**32 - 1]))
TOTAL = st.one_of(st.just(0), st.integers(1, 9000), st.integers(1, 2**20), st.sampled_from([1024, 8192, 2**32 - 1]))
RANK = st.tuples(COUNT, TOTAL, TOTAL, COUNT, TOTAL)


@given(st.lists(RANK, min_size=1, max_size=4), st.none() | st.integers(1, 6))
def test_the_facade_answers_what_estimate_answers(embedded_cell, ranks, depth):
    model = direct(embedded_cell)
    metrics = [
        prefill(p, t if p else 0, k if p else 0, num_decode_requests=b, sum_decode_kv_tokens=c if b else 0)
        for p, t, k, b, c in ranks
    ]
    try:
        want: Any = estimate(model, Work.from_metrics(metrics), draft_length=depth, evidence=True)
    except FpmError as error:
        with pytest.raises(type(error)) as caught:
            ForwardPassPerfModel(model).estimate_forward_pass_time_ms(metrics, draft_length=depth)
        assert (caught.value.code, str(caught.value)) == (error.code, str(error))
        return
    got = ForwardPassPerfModel(model).estimate_forward_pass_detailed(metrics, draft_length=depth)
    assert got["latency_ms"] == want.latency_ms
    stp, parts = (got, want.parts) if depth is None else (got["stp_reference"], want.stp.parts)
    assert stp["max_rank"] == (int(want.rank) if want.status == Status.OK else None)
    for rank in stp["ranks"]:
        for query in rank["queries"]:
            name = "baseline" if query["decode_baseline"] else query["phase"]
            evidence = getattr(parts, name)
            assert query["latency_ms"] == getattr(parts, f"{name}_ms")[rank["rank"]]
            assert query["resolution"] == Resolution(int(evidence.resolution[rank["rank"]])).word
            used = evidence.row[rank["rank"]] >= 0
            assert [point["weight"] for point in query["support"]] == evidence.weight[rank["rank"]][used].tolist()


# One phase by its totals


def test_phase_queries_by_hand(surface):
    assert surface.predict_decode_latency_total(4, 4096) == 8.0
    assert surface.predict_decode_latency_total(np.int64(4), jnp.array(4096)) == 8.0
    assert surface.predict_decode_latency_total(0, 0) == 0.0
    assert surface.predict_prefill_latency_total(1, 128, 0) == surface.predict_prefill_latency(1, 128) == 12.8
    assert surface.predict_prefill_latency_total(7, 0, 9) == 0.0
    assert surface.static_phase_latency(batch_size=1, input_tokens=128, output_tokens=0, prefill=True) == 12.8
    assert surface.static_phase_latency(2, 100, 1, False) == surface.static_phase_latency(2, 100, 0, False) == 0.0
    # 40 steps after the first token: 32 at K = 2 * 1024, 8 at K = 2 * 1056
    assert surface.static_phase_latency(2, 1023, 41, False) == 32 * (2 + 2048 / 1024) + 8 * (2 + 2112 / 1024)


def test_phase_queries_refuse_what_no_batch_can_be(surface):
    total, uniform = surface.predict_prefill_latency_total, surface.predict_prefill_latency
    assert refusal(MetricsError, surface.predict_decode_latency_total, 0, 3) == (
        "decode_kv_without_requests",
        "total_past_kv_tokens is 3 while batch_size is 0",
    )
    for batch in (0, 4):
        assert refusal(MetricsError, total, batch, 3, 0) == (
            "prefill_tokens_per_request",
            f"total_prefill_tokens is 3 for batch_size={batch}, but every request computes a token",
        )
    assert refusal(MetricsError, uniform, 1, 128, 128) == (
        "prefill_tokens_per_request",
        "128 input tokens with 128 of them cached leave nothing to compute",
    )
    assert refusal(MetricsError, surface.static_phase_latency, 1, 0, 2, True)[0] == "prefill_tokens_per_request"
    for value in (True, 1.0, "1", -1, 2**32, None):
        code, message = refusal(MetricsError, surface.predict_decode_latency_total, value, 1)
        assert code == "u32" and message.startswith("batch_size is ")
    for call, args in [(uniform, (0, 128)), (surface.static_phase_latency, (0, 4, 3, False))]:
        code, message = refusal(CoverageError, call, *args)
        assert "batch_size=0" in message and message.endswith("is outside every table")


def test_products_beyond_32_bits_refuse_and_never_wrap(surface):
    code, message = refusal(CoverageError, surface.predict_prefill_latency, 2**31, 10, 2)
    assert code == "prefill_no_two_sided_support"
    assert message == (
        "prefill at batch_size=2147483648, total_prefill_tokens=17179869184, total_kv_read_tokens=4294967296 "
        "is outside every table"
    )
    # 2**22 requests of 1024 tokens wrap to a total of 0
    code, message = refusal(CoverageError, surface.static_phase_latency, 2**22, 1023, 2, False)
    assert code == "decode_no_two_sided_batch_bracket" and "total_kv_read_tokens=4294967296" in message


# Kinds of model


def test_a_verify_width_multiplies_the_rows_and_scales_nothing(surface):
    verify = ForwardPassPerfModel(direct(surface.model.cell, verify_width=4))
    assert verify.estimate_forward_pass_time_ms(decode(2, 8192)) == 16.0
    (rank,) = verify.estimate_forward_pass_detailed(decode(2, 8192))["ranks"]
    assert rank["queries"][0]["query"]["batch_size"] == 8.0
    assert verify.predict_decode_latency_total(2, 8192) == 16.0
    with pytest.raises(FpmError) as caught:
        verify.estimate_forward_pass_time_ms(decode(2**30, 8192))
    assert caught.value.code == "count_overflow"


def test_measured_rounds_answer_one_rank_and_one_phase(surface):
    rounds = ForwardPassPerfModel(replace(surface.model, execution="speculative_round"))
    assert rounds.estimate_forward_pass_time_ms([{}, decode(4, 4096)]) == 8.0
    mixed = prefill(1, 128, num_decode_requests=4, sum_decode_kv_tokens=4096)
    for metrics in (mixed, [decode(4, 4096), decode(4, 4096)]):
        refusal(CoverageError, rounds.estimate_forward_pass_time_ms, metrics)
        refusal(CoverageError, rounds.estimate_forward_pass_detailed, metrics)


def test_a_model_without_walks_is_asked_through_estimate(surface):
    model = ForwardPassPerfModel(Wrapped(surface.model))
    metrics = [decode(1, 1024), decode(4, 4096)]
    assert model.estimate_forward_pass_time_ms(metrics) == 8.0
    answer = model.estimate_forward_pass_detailed(metrics)
    assert answer == {**surface.estimate_forward_pass_detailed(metrics), "ranks": []}
    assert model.estimate_forward_pass_time_ms(decode(2, 8192), draft_length=3) == 23.84
    assert list(model.estimate_forward_pass_detailed(decode(2, 8192), draft_length=3)) == SPECULATIVE
    with pytest.raises(CoverageError):
        model.estimate_forward_pass_time_ms(decode(64, 8192))
    refusal(DraftLengthTypeError, model.estimate_forward_pass_time_ms, {"version": 2}, draft_length=2.0)
    assert model.fpm_decode_kv_ceiling() is None and model.fpm_query_coverage() is None
    assert model.diagnostics()["readiness"] == "insufficient_data"
    code, message = refusal(MetricsError, model.predict_decode_latency_total, 1, 1024)
    assert (code, message) == ("unsupported_estimator", "a Wrapped model has no phases of its own to ask for")


def test_a_model_that_is_not_ready_answers_none(surface):
    model = ForwardPassPerfModel(Wrapped(surface.model, Status.NOT_READY))
    cold = {"latency_ms": None, "native_latency_ms": None, "correction_factor": None, "max_rank": None, "ranks": []}
    assert model.estimate_forward_pass_time_ms(decode(4, 4096)) is None
    assert model.estimate_forward_pass_detailed(decode(4, 4096)) == cold
    assert model.estimate_forward_pass_time_ms(decode(4, 4096), draft_length=3) is None
    assert model.estimate_forward_pass_detailed(decode(4, 4096), draft_length=3) == {
        "latency_ms": None,
        "draft_length": 3,
        "scaling_factor": 1.49,
        "stp_reference": cold,
    }


def test_diagnostics_and_ceiling(surface):
    assert surface.fpm_decode_kv_ceiling() == surface.model.cell.decode_kv_ceiling > 0
    answer = surface.diagnostics()
    assert (answer["source"], answer["readiness"], answer["last_warning"]) == ("aic", "ready", None)
    assert answer["provenance"]["config"]["model"] == "org/synthetic"
    assert answer["provenance"]["selected_estimation_mode"] == "fpm_interpolation"
    json.dumps(answer)
