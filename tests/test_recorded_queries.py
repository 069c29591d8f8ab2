"""The peer's recorded answers, through the peer's method names."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pytest
from asking import DETAIL, SPECULATIVE, SURFACE, facade, records, refusal

from fpmjax.errors import CoverageError, DraftLengthTypeError, MetricsError, SpeculationError
from fpmjax.speculative import split_length

pytestmark = pytest.mark.usefixtures("never_compiles")


def agree(got, want, where: str = "") -> None:
    """Equal to the last bit, key by key in the same order; weights within 4 ulp; the peer's model_path is not kept."""
    if isinstance(want, dict):
        assert [k for k in got if k != "model_path"] == list(want), where
        for key in want:
            agree(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for i, (x, y) in enumerate(zip(got, want, strict=True)):
            agree(x, y, f"{where}[{i}]")
    elif where.endswith(".weight"):
        assert abs(got - want) <= 4 * np.spacing(want), where
    else:
        assert type(got) is type(want) and got == want, f"{where}: {got!r}, recorded {want!r}"


@pytest.mark.parametrize("table", ["dense7b", "dense70b", "scatter", "fakekv"])
def test_recorded_iterations_and_phase_queries_are_answered_to_the_last_bit(table):
    model = facade(f"interpolation/tables/{table}")
    cases = [case for case in records("interpolation/cases.jsonl.gz") if case["table"] == table]
    assert len(cases) > 400
    for case in cases:
        where = f"record {case['id']}"
        args = case["args"] if "args" in case else [case["metrics"]]
        ask = getattr(model, case["call"])
        if "error" in case:
            with pytest.raises((MetricsError, CoverageError)) as caught:
                ask(*args)
            assert caught.value.code == case["error"]["class"], where
            assert isinstance(caught.value, CoverageError) == case["error"]["exception"].startswith("Perf"), where
        elif "value" in case:
            agree(ask(*args), case["value"], where)
        else:
            agree(ask(*args), case["result"], where)
            agree(model.estimate_forward_pass_time_ms(*args), case["result"]["latency_ms"], where)


def test_recorded_metrics_are_answered_or_refused(surface):
    cases = [case for case in records("metrics_cases.jsonl.gz") if case["call"] == "estimate"]
    for case in cases:
        peer, text = case["peer"]["fpm_direct"], case["input_json"]
        for ask in (surface.estimate_forward_pass_time_ms, surface.estimate_forward_pass_detailed):
            if case.get("ours") == "refused" or "error" in peer:
                kind = CoverageError if "PerfData" in peer.get("error", "") else MetricsError
                with pytest.raises(kind):
                    ask(text)
            else:
                answer = ask(text)
                assert (answer["latency_ms"] if isinstance(answer, dict) else answer) == peer["value"], case["case"]


TABLES = {
    "fpm_direct_surface_B_plus_K_over_1024": SURFACE,
    "fpm_direct_B8_K64_is_8ms": "speculation_tables/ex1.parquet",
}


@pytest.mark.parametrize("name", TABLES)
def test_recorded_speculative_rounds(name):
    model = facade(TABLES[name])
    cases = [case for case in records("speculative_cases.jsonl.gz") if name in case.get("expected", ())]
    assert cases
    for case in cases:
        want, depth, metrics = case["expected"][name], case["draft_length"], case["metrics"]
        before = json.dumps(metrics)
        if "error" in want:
            refusal(CoverageError, model.estimate_forward_pass_detailed, metrics, draft_length=depth)
            continue
        answer = model.estimate_forward_pass_detailed(metrics, draft_length=depth)
        stp = answer["stp_reference"]
        assert list(answer) == SPECULATIVE and list(stp) == DETAIL
        assert (answer["draft_length"], answer["scaling_factor"]) == (depth, case["scaling_factor"])
        assert stp["latency_ms"] == want["peer_stp_latency_ms"] and stp["max_rank"] == want["max_rank"]
        assert answer["latency_ms"] == want["sd_latency_ms"] == answer["scaling_factor"] * stp["latency_ms"]
        assert model.estimate_forward_pass_time_ms(metrics, draft_length=depth) == answer["latency_ms"]
        assert stp == model.estimate_forward_pass_detailed(case["widened"])
        assert json.dumps(metrics) == before


def test_recorded_widenings_of_request_lists():
    for case in records("speculative_cases.jsonl.gz"):
        if "split" in case:
            split = case["split"]
            assert split_length(split["length"], split["width"]) == split["parts"]
        elif "rows" in case:
            assert list(chain(*(split_length(n, case["width"]) for n in case["past"]))) == case["rows"]
        for rank, wide in zip(case.get("metrics", ()), case.get("widened", ()), strict="widened" in case):
            lengths = rank.get("scheduled_requests", {}).get("past_kv_lengths")
            if lengths is not None:
                parts = list(chain(*(split_length(n, case["draft_length"] + 1) for n in lengths)))
                assert parts == wide["scheduled_requests"]["past_kv_lengths"]


def test_recorded_draft_lengths_and_refusals(surface):
    seen = 0
    for case in records("speculative_cases.jsonl.gz"):
        want = case.get("expected", {})
        if "draft_length_repr" in case:
            depth = eval(case["draft_length_repr"], {"np": np, "array": np.array, "nan": float("nan")})
            metrics = {}
        elif "code" in want:
            depth, metrics = case["draft_length"], case["metrics"]
        else:
            continue
        seen += 1
        if "ok" in want:
            answer = surface.estimate_forward_pass_detailed(metrics, draft_length=depth)
            assert answer["draft_length"] == want["ok"] and type(answer["draft_length"]) is int
            continue
        error = DraftLengthTypeError if want["error"] == "TypeError" else SpeculationError
        with pytest.raises(error) as caught:
            surface.estimate_forward_pass_time_ms(metrics, draft_length=depth)
        if error is SpeculationError:
            assert caught.value.code == want.get("code", want.get("message", "").split(":")[0]), case["case"]
    assert seen > 10
