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
