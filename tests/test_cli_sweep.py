"""Ordinary and drafted answers in one sweep, what the study behind the factor covers, and rows on fabricated KV."""

from __future__ import annotations

import json

import pytest
from table_pairs import seal, table

import fpmjax

TP1 = ("embedded", "--select", "tp=1")
SWEEP = ("--batch", "1,8", "--kv", "8192", "--draft-length")


def test_draft_length_0_is_ordinary_decoding_beside_drafts(fpm, embedded_cell):
    ran = fpm("estimate", *TP1, *SWEEP, "0,1,0,3", "--json", "--detail")
    model, work = fpmjax.direct(embedded_cell), fpmjax.Work.decode([1, 8], 8192)
    plain = fpmjax.estimate(model, work).latency_ms.tolist()
    one, three = (fpmjax.estimate(model, work, draft_length=d).latency_ms.tolist() for d in (1, 3))
    queries = ran.document["queries"]
    expected = [x for row in zip(plain, one, plain, three, strict=True) for x in row]
    assert [q["latency_ms"] for q in queries] == expected
    assert [q["draft_length"] for q in queries] == [0, 1, 0, 3] * 2
    assert [q["scaling_factor"] for q in queries] == [1.0, 1.33, 1.0, 1.49] * 2
    assert [q["in_study_range"] for q in queries] == [None, False, None, False, None, True, None, True]
    assert [q["ranks"][0]["lookups"][0]["batch_size"] for q in queries] == [1, 2, 1, 4, 8, 16, 8, 32]


def test_only_plain_answers_are_those_without_the_option(fpm):
    zero = fpm("estimate", *TP1, *SWEEP, "0", "--json").document
    none = fpm("estimate", *TP1, *SWEEP[:-1], "--json").document
    assert [q["latency_ms"] for q in zero["queries"]] == [q["latency_ms"] for q in none["queries"]]
    assert "study" not in zero
    text = fpm("estimate", *TP1, *SWEEP, "0").out
    assert text.splitlines()[1].split() == ["1", "8,192", "none", "13.7632", "-", "-", "-"] and "the study" not in text


def test_prefill_is_answered_at_draft_length_0_only(fpm):
    ran = fpm("estimate", *TP1, "--prefill-requests", "1", "--prefill-tokens", "64", "--draft-length", "0,2", "--json")
    assert ran.code == 0 and [q["status"] for q in ran.document["queries"]] == ["ok", "not_pure_decode"]


def test_metrics_are_swept_from_plain_to_drafted(fpm):
    line = b'[{"scheduled_requests": {"num_decode_requests": 8, "sum_decode_kv_tokens": 8192}}, {}]\n'
    ran = fpm("estimate", *TP1, "--metrics", "-", "--draft-length", "0:1", "--json", stdin=line * 40)
    assert [q["draft_length"] for q in ran.document["queries"]] == [0, 1] * 40
    plain = fpm("estimate", *TP1, *SWEEP[:-1], "--json").document["queries"][1]["latency_ms"]
    assert {q["latency_ms"] for q in ran.document["queries"][::2]} == {plain}


def test_a_verify_width_goes_with_draft_length_0(fpm):
    wide = ("estimate", *TP1, "--batch", "2", "--kv", "4096", "--verify-width", "4")
    assert fpm(*wide, "--draft-length", "0").code == 0
    fpm(*wide, "--draft-length", "0,1").refused("verify_width=4")


def test_the_api_still_refuses_a_draft_length_of_0(embedded_cell):
    with pytest.raises(fpmjax.SpeculationError):
        fpmjax.estimate(fpmjax.direct(embedded_cell), fpmjax.Work.decode(1, 8192), draft_length=0)


def test_another_deployment_than_the_studys_is_told_so(fpm, tmp_path):
    seal(tmp_path, table({"gemm_quant_mode": "fp8", "tp": 4, "moe_tp": 4}))
    asked = ("estimate", tmp_path, "--batch", "4", "--kv", "4096", "--draft-length", "1")
    told = "this cell is TP4, fp8, KV BF16"
    ran = fpm(*asked)
    assert "in study range" in ran.out.splitlines()[0] and ran.out.splitlines()[-1].endswith(told)
    document = fpm(*asked, "--json").document
    assert document["queries"][0]["in_study_range"] is True
    assert document["study"] == {
        "deployment": "TP1, BF16",
        "largest_batch": 8,
        "largest_kv_per_request": 4096,
        "largest_draft_length": 4,
        "this_cell": "TP4, fp8, KV BF16",
    }
    line = b'{"scheduled_requests": {"num_decode_requests": 4, "sum_decode_kv_tokens": 4096}}\n'
    ran = fpm("coverage", tmp_path, "--traffic", "-", stdin=line)
    assert f"the factor's study ran TP1, BF16, {told}\n" in ran.out
    assert "study" in fpm("coverage", tmp_path, "--traffic", "-", "--json", stdin=line).document
    assert "study" not in fpm("coverage", tmp_path, "--traffic", "-", "--draft-length", "0", stdin=line).out


# Rows on fabricated KV


@pytest.fixture
def faked(tmp_path):
    """Decode at batch 8: real at KV 10 and 20, fabricated at 30; at batch 4 fabricated only."""
    rows = {
        "workload_kind": ["decode"] * 4,
        "batch_size": [8, 8, 8, 4],
        "total_prefill_tokens": [0] * 4,
        "total_kv_read_tokens": [10, 20, 30, 20],
        "latency_ms": [1.0, 2.0, 99.0, 50.0],
        "kv_seed_regime": ["real_kv", "real_kv", "fake_fallback", "fake_fallback"],
    }
    return seal(tmp_path, table(rows))


@pytest.mark.parametrize(
    ("rule", "answer", "fate"),
    [
        ("drop", None, "2 dropped"),
        ("heal", 3.0, "1 healed, 1 kept, which could not be healed"),
        ("keep", 99.0, "2 kept"),
    ],
)
def test_the_treatment_of_fabricated_rows_is_chosen_and_told(fpm, faked, rule, answer, fate):
    asked = ("--batch", "8", "--kv", "20,30", "--fake-kv", rule)
    ran = fpm("estimate", faked, *asked, "--json")
    assert ran.document["queries"][1]["latency_ms"] == answer
    assert ran.err.startswith(f"note: rows measured on fabricated KV: {fate}\n")
    assert sum(ran.document["fake_kv_rows"].values()) == 2
    inspected = fpm("inspect", faked, "--fake-kv", rule)
    assert f"2 of 4 rows were measured on fake_fallback KV: {fate}" in inspected.out
    assert f"  rows on fabricated KV: {fate}\n" in inspected.out
    line = json.dumps({"scheduled_requests": {"num_decode_requests": 8, "sum_decode_kv_tokens": 30}}).encode()
    ran = fpm("coverage", faked, "--traffic", "-", "--draft-length", "0", "--fake-kv", rule, "--json", stdin=line)
    assert ran.document["draft_lengths"][0]["answered"] == (answer is not None)
    assert ran.document["fake_kv_rows"] and fate in ran.err


def test_without_the_option_fabricated_rows_are_dropped(fpm, faked):
    ran = fpm("estimate", faked, "--batch", "8", "--kv", "10", "--json")
    assert ran.err == "" and ran.document["fake_kv_rows"] == {"dropped": 2, "healed": 0, "kept": 0}
    ran = fpm("estimate", *TP1, "--batch", "8", "--kv", "8192", "--fake-kv", "heal")
    assert ran.err == "note: rows measured on fabricated KV: none in this cell\n"
