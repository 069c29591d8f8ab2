"""Counts of lookups, and the gaps that were met."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from asking import SURFACE, Wrapped, decode, facade, prefill, records, refusal

from fpmjax.errors import CoverageError, MetricsError, SpeculationError
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.status import Status


@pytest.fixture
def counting() -> ForwardPassPerfModel:
    return facade("interpolation/tables/scatter", collect_coverage=True)


def outcomes(measured: int = 0, interpolated: int = 0, unsupported: int = 0) -> dict[str, int]:
    return {"measured": measured, "interpolated": interpolated, "unsupported": unsupported}


def test_coverage_is_off_unless_asked_for():
    surface = facade(SURFACE)
    assert surface.fpm_query_coverage() is None
    with pytest.raises(ValueError, match="collect_coverage counts lookups in a measured cell, but this Wrapped has"):
        ForwardPassPerfModel(Wrapped(surface.model), collect_coverage=True)


def test_coverage_counts_lookups_as_the_peer_does(counting):
    ask = counting.estimate_forward_pass_time_ms
    assert counting.fpm_query_coverage() == {
        "counting_unit": "native_lookup_resolutions",
        "queries": outcomes(),
        "prefill": outcomes(),
        "decode": outcomes(),
        "mixed_decode_baseline": outcomes(),
        "gaps": [],
        "gap_limit": 128,
        "omitted_gap_queries": 0,
    }
    ask(decode(1, 37))
    counting.estimate_forward_pass_detailed(prefill(1, 3, num_decode_requests=1, sum_decode_kv_tokens=37))
    counting.predict_decode_latency_total(1, 37)
    for _ in range(2):
        refusal(CoverageError, ask, [decode(1, 37), decode(1, 3), decode(1, 37)])
    refusal(CoverageError, counting.predict_prefill_latency, 2**31, 10, 2)
    # None of these is a lookup:
    ask({})
    counting.static_phase_latency(1, 36, 2, False)
    counting.fpm_decode_kv_ceiling()
    refusal(MetricsError, ask, decode(0, 3))
    refusal(MetricsError, counting.predict_prefill_latency_total, 4, 3, 3)
    refusal(CoverageError, counting.predict_prefill_latency, 0, 10, 2)
    refusal(SpeculationError, ask, decode(2**31, 1), draft_length=1)
    seen = counting.fpm_query_coverage()
    assert seen["decode"] == outcomes(measured=5, unsupported=2)
    assert seen["prefill"] == outcomes(measured=1, unsupported=1)
    assert seen["mixed_decode_baseline"] == outcomes(measured=1)
    assert seen["queries"] == outcomes(measured=7, unsupported=3)
    decode_gap, prefill_gap = seen["gaps"]
    assert decode_gap == {
        "phase": "decode",
        "purpose": "forward_pass",
        "model_path": "org/synthetic",
        "cell_identity": {
            "attention_backend": "auto",
            "comm_quant_mode": "half",
            "cp": "1",
            "dp": "1",
            "enable_eplb": "False",
            "enable_wideep": "False",
            "fmha_quant_mode": "bfloat16",
            "gemm_quant_mode": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "moe_backend": "auto",
            "moe_ep": "1",
            "moe_quant_mode": "bfloat16",
            "moe_tp": "1",
            "pp": "1",
            "tp": "1",
        },
        "cell_ids": ["cell-0"],
        "coordinates": {"batch_size": 1.0, "total_kv_read_tokens": 3.0},
        "reason": Status.NO_BATCH_BRACKET.sentence,
        "occurrences": 2,
    }
    assert prefill_gap["coordinates"] == {
        "batch_size": 2147483648.0,
        "total_kv_read_tokens": 4294967296.0,
        "total_prefill_tokens": 17179869184.0,
    }
    json.dumps(seen)


def test_coverage_of_a_speculative_query_is_at_the_widened_point(counting):
    refusal(CoverageError, counting.estimate_forward_pass_time_ms, decode(1, 3), draft_length=2)
    (gap,) = counting.fpm_query_coverage()["gaps"]
    assert gap["coordinates"] == {"batch_size": 3.0, "total_kv_read_tokens": 3.0}


def test_only_so_many_gaps_are_kept_but_all_are_counted(counting):
    for kv in range(2**32 - 200, 2**32):
        refusal(CoverageError, counting.predict_decode_latency_total, 1, kv)
    refusal(CoverageError, counting.predict_decode_latency_total, 1, 2**32 - 200)
    seen = counting.fpm_query_coverage()
    assert seen["decode"]["unsupported"] == 201
    assert len(seen["gaps"]) == 128 and seen["gaps"][0]["occurrences"] == 2
    assert seen["omitted_gap_queries"] == 72


# Counted by the peer over the same calls: each iteration once plain and once detailed, then the phase queries.
# (measured, interpolated, unsupported) of each phase, distinct gaps kept, gap queries omitted.
PEER = [
    ("dense7b", (108, 374, 22), (131, 336, 40), (150, 47, 0), 61, 0),
    ("dense70b", (113, 356, 41), (116, 369, 9), (124, 51, 0), 50, 0),
    ("scatter", (144, 240, 51), (154, 266, 39), (116, 29, 0), 88, 0),
    ("fakekv", (104, 307, 20), (95, 112, 161), (68, 13, 0), 128, 40),
]


@pytest.mark.parametrize(("table", "prefills", "decodes", "baselines", "gaps", "omitted"), PEER)
def test_coverage_of_the_recorded_queries_is_the_peers(table, prefills, decodes, baselines, gaps, omitted):
    model = facade(f"interpolation/tables/{table}", collect_coverage=True)
    for case in records("interpolation/cases.jsonl.gz"):
        if case["table"] != table:
            continue
        with suppress(MetricsError, CoverageError):
            if "metrics" in case:
                model.estimate_forward_pass_time_ms(case["metrics"])
                model.estimate_forward_pass_detailed(case["metrics"])
            else:
                getattr(model, case["call"])(*case["args"])
    seen = model.fpm_query_coverage()
    assert seen is not None
    assert seen["prefill"] == outcomes(*prefills)
    assert seen["decode"] == outcomes(*decodes)
    assert seen["mixed_decode_baseline"] == outcomes(*baselines)
    assert (len(seen["gaps"]), seen["omitted_gap_queries"]) == (gaps, omitted)
