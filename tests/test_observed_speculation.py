"""A fit never reads speculative rows: whatever the source, request lists that show them are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import records
from traces import CASES, outcomes, read, row, write

from fpmjax import ForwardPassPerfModel, Observations, TraceError, Work, regression
from fpmjax.speculative import widen

# (prefill requests, extend_lengths) of a rank with two decode requests
ORDINARY = [(0, [1, 1]), (0, [1, 0]), (1, [512, 1, 1]), (1, [1, 1, 512]), (2, [3, 9, 1, 1])]
SPECULATIVE = [(0, [1, 2]), (0, [4, 4]), (1, [512, 4, 4]), (1, [1, 4, 4]), (2, [3, 9, 1, 5])]


def rank(prefills: int, extend: list[int], wall: float = 0.01) -> dict:
    return {
        "wall_time": wall,
        "scheduled_requests": {
            "num_prefill_requests": prefills,
            "sum_prefill_tokens": 600 if prefills else 0,
            "num_decode_requests": 2,
            "sum_decode_kv_tokens": 100,
            "extend_lengths": extend,
            "past_kv_lengths": [50] * len(extend),
        },
    }


def table(prefills: int, extend: list[int], ranks: int) -> pa.Table:
    """One row; the last rank is the one in question, those before it are ordinary."""
    plain = [(0, [1, 1])] * (ranks - 1)
    each = [*plain, (prefills, extend)]
    columns = {
        "prefill_requests": [p for p, _ in each],
        "prefill_tokens": [600 * (p > 0) for p, _ in each],
        "decode_requests": [2] * ranks,
        "decode_kv": [100] * ranks,
        "extend_lengths": [e for _, e in each],
        "past_kv_lengths": [[50] * len(e) for _, e in each],
    }
    columns = columns if ranks > 1 else {name: values[0] for name, values in columns.items()}
    return pa.table({"wall_ms": [10.0, 10.0], **{name: [values] * 2 for name, values in columns.items()}})


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("prefills", "extend"), [*ORDINARY, *SPECULATIVE])
def test_a_fit_never_reads_speculative_rows(prefills, extend, ranks, tmp_path):
    others = [rank(0, [1, 1])] * (ranks - 1)
    iterations = [[rank(0, [1, 1])] * ranks, [*others, rank(prefills, extend)]]
    path = tmp_path / "o.parquet"
    rows = table(prefills, extend, ranks)
    line = row(0, **rank(prefills, extend)["scheduled_requests"])
    work = Work.from_iterations(iterations)
    sources = {
        "from_metrics": lambda: Observations.from_metrics(iterations),
        "json": lambda: Observations.from_metrics(json.dumps(iterations)),
        "of": lambda: Observations.of(work, [10.0, 10.0]),
        "arrow": lambda: Observations.read(rows),
        "parquet": lambda: (pq.write_table(rows, path), Observations.read(path))[1],
    }
    sound = (prefills, extend) in ORDINARY
    assert outcomes(read(write(tmp_path / "a.jsonl", [line]))) == {"accepted" if sound else "not_stp": 1}
    for name, source in sources.items():
        if sound:
            assert len(source()) == 2
            continue
        with pytest.raises(TraceError, match=rf"rank {ranks - 1}: extend_lengths .*\n?hint: ") as caught:
            source()
        assert caught.value.code == "speculative"
        assert str(caught.value).startswith({"arrow": "the table: ", "parquet": f"{path}: "}.get(name, "iteration 1"))


def test_they_are_refused_even_where_nothing_would_be_learnt_from_them():
    for wall in (0.0, -1.0, 1e308):
        with pytest.raises(TraceError, match="decode request computes more than one token"):
            Observations.from_metrics([[rank(0, [1, 1])], [rank(0, [4, 4], wall)]])


def test_padding_is_no_request():
    work = Work.from_iterations([[rank(1, [9, 1, 1])], [rank(0, [1, 1])]])
    assert work.lists is not None
    work.lists.extend[1, 0, 2:] = 7
    assert len(Observations.of(work, [1.0, 1.0])) == 2


def test_a_widened_query_is_no_observation():
    for work in (Work.decode([2], [100]), Work.from_metrics(rank(0, [1, 1]))):
        with pytest.raises(TraceError, match="widened") as caught:
            Observations.of(widen(np, work, np.full(work.shape, 3), np.int8(0)), np.full(work.shape, 1.0))
        assert caught.value.code == "speculative"


def test_a_speculative_batch_changes_no_model():
    model = ForwardPassPerfModel(regression(None, role="decode", min_observations=1))
    model.tune_with_fpms([[rank(0, [1, 1])]] * 3)
    before = model.model
    with pytest.raises(TraceError, match="more than one token"):
        model.tune_with_fpms([[rank(0, [1, 1])], [rank(0, [4, 4])]])
    assert model.model is before


def test_an_artifact_is_looked_at_too(tmp_path):
    path = Path(shutil.copy(CASES / "benchmark_results.json", tmp_path / "a.json"))
    whole = json.loads(path.read_text())
    scheduled = next(
        fpm["scheduled_requests"]
        for group in whole["iteration_groups"]
        for fpm in group["rank_results"][0]["fpms"]
        if fpm["scheduled_requests"]["num_decode_requests"]
    )
    requests = scheduled["num_prefill_requests"] + scheduled["num_decode_requests"]
    scheduled |= {"extend_lengths": [4] * requests, "past_kv_lengths": [4] * requests}
    path.write_text(json.dumps(whole))
    with pytest.raises(TraceError, match=r"a\.json: iteration \d+, rank 0: ") as caught:
        read(path)
    assert caught.value.code == "speculative"


def test_no_recorded_stream_of_the_rust_estimator_holds_any():
    listed = 0
    for case in records("regression_cases.jsonl.gz"):
        for prefills, *_, extend, _past in (r for ranks in case.get("observations", ()) for r in ranks if len(r) > 6):
            listed += 1
            assert sum(tokens > 1 for tokens in extend) <= prefills
    assert listed > 400


# --- what totals, columns and keys show ---------------------------------------------------------------------

# (prefill requests, prefill tokens, extend_lengths) of a rank with two decode requests
WITHIN = [(1, 1, [1, 1, 1]), (1, 9, [9, 1, 1]), (1, 9, [5, 1, 1]), (2, 9, [4, 5, 1, 1]), (0, 0, [1, 0])]
ABOVE = [
    (1, 1, [1, 1000, 1]),
    (1, 1, [1, 2, 1]),
    (1, 9, [10, 1, 1]),
    (2, 9, [5, 5, 1, 1]),
    (1, 0, [2**64 - 1] + [0] * 2),
]


@pytest.mark.parametrize(("prefills", "tokens", "extend"), [*WITHIN, *ABOVE])
def test_lists_compute_no_more_than_the_totals(prefills, tokens, extend, tmp_path):
    metrics = rank(prefills, extend)
    metrics["scheduled_requests"]["sum_prefill_tokens"] = tokens
    sound = (prefills, tokens, extend) in WITHIN
    line = row(0, **metrics["scheduled_requests"])
    assert outcomes(read(write(tmp_path / "a.jsonl", [line]))) == {"accepted" if sound else "not_stp": 1}
    known = [row(9, **metrics["scheduled_requests"] | {"extend_lengths": [0] * len(extend)})]
    both = outcomes(read(write(tmp_path / "b.jsonl", [*known, line])))
    assert both == ({"accepted": 2} if sound else {"accepted": 1, "not_stp": 1})
    sources = (
        lambda: Observations.from_metrics([metrics]),
        lambda: Observations.of(Work.from_metrics([metrics]), 5.0),
    )
    for source in sources:
        if sound:
            assert len(source()) == 1
            continue
        with pytest.raises(TraceError, match=r"rank 0: extend_lengths .* add up to \d+ tokens where") as caught:
            source()
        assert caught.value.code == "speculative"


def test_no_recorded_stream_lists_more_than_its_totals():
    listed = 0
    for case in records("regression_cases.jsonl.gz"):
        for ranks in case.get("observations", ()):
            for _, tokens, _, decode, *_, extend, _past in (r for r in ranks if len(r) > 6):
                listed += 1
                assert sum(extend) == tokens + decode
    assert listed > 400


@pytest.mark.parametrize(
    ("name", "ordinary", "drafted"),
    [
        ("draft_length", [0, None, 0], [0, 0, 1]),
        ("DraftLength", [0.0, float("nan"), 0.0], [0.0, 0.0, 3.0]),
        ("draftLength", ["", "none", "0"], ["", "3", ""]),
        ("verify_width", [1, 1, None], [1, 4, 1]),
        ("num_draft_tokens", [0, 0, 0], [0, 0, 7]),
        ("accepted_tokens", [0, 0, 0], [0, 2, 0]),
        ("num_speculative_tokens", [[0], [0], [0]], [[0], [3], [0]]),
        ("nextn", [0, 0, 0], [1, 1, 1]),
        ("speculative", [False, False, False], [False, True, False]),
        ("Speculative", ["off", "False", "none"], ["eagle3", "eagle3", "eagle3"]),
    ],
)
def test_columns_of_speculation_are_looked_at(name, ordinary, drafted):
    columns = {"wall_ms": [1.0, 2.0, 3.0], "decode_requests": [1, 2, 3]}
    assert len(Observations.read(pa.table(columns | {name: ordinary}))) == 3
    with pytest.raises(TraceError, match=rf"row \d was measured with {name} ") as caught:
        Observations.read(pa.table(columns | {name: drafted}))
    assert caught.value.code == "speculative"


def put(place: str, key: str, value):
    """Edits a row: `key` in the struct `place` of it, in the row itself, or in the event."""

    def edit(whole):
        event = whole["event"]
        {"row": whole, "event": event, "fpm": event["fpm"]}.get(place, event["fpm"].get(place))[key] = value

    return edit


KEYS = [
    ("num_draft_tokens", 0, 3),
    ("num_accepted_tokens", [0, 0], [0, 1]),
    ("speculative", False, True),
    ("speculative", None, {"method": "eagle3"}),
    ("draft_length", 0, 4),
    ("draft_length", -1, "4"),
    ("verify_width", 1, 4),
    ("spec_decode", {}, {"num_drafts": 2}),
    ("spec_decode", {"num_draft_tokens": 0, "rate": 0.0, "on": False}, {"k": 3}),
    ("specDecodingStats", {"method": "none"}, {"inner": [{"num_draft_tokens": 1}]}),
]


@pytest.mark.parametrize("place", ["scheduled_requests", "fpm", "event", "row"])
@pytest.mark.parametrize(("key", "ordinary", "drafted"), KEYS)
def test_keys_of_speculation_in_a_trace_are_counted_and_those_that_show_it_rejected(
    key, ordinary, drafted, place, tmp_path
):
    plain, shown = put(place, key, ordinary), put(place, key, drafted)
    lines = [row(0), row(1, edit=plain), row(2, edit=plain), row(3, edit=shown), row(4, edit=plain), row(5)]
    observations = read(write(tmp_path / "a.jsonl", lines))
    assert outcomes(observations) == {"accepted": 5, "not_stp": 1}
    assert observations.report["speculation_keys"][key] == 3
    assert key in observations.report["examples"]["not_stp"][0]
    assert read(write(tmp_path / "b.jsonl", [row(0)])).report["speculation_keys"] == {}


def test_an_artifact_with_keys_of_speculation_is_refused(tmp_path):
    whole = json.loads((CASES / "benchmark_results.json").read_text())
    whole["iteration_groups"][2]["rank_results"][0]["fpms"][0]["num_draft_tokens"] = 3
    path = tmp_path / "a.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(TraceError, match="iteration 2: 'num_draft_tokens' shows speculation") as caught:
        read(path)
    assert caught.value.code == "speculative"
