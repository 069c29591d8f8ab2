"""What the command reads from engines: metrics and traffic, good files and every kind of bad one."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fpmjax
from fpmjax.cli import files

TP1 = ("embedded", "--select", "tp=1")
COVER = ("coverage", *TP1, "--traffic")
some = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rank(batch: float = 0, kv=0, tokens=0):
    scheduled = {"num_decode_requests": batch, "sum_decode_kv_tokens": kv, "sum_prefill_tokens": tokens}
    return {"scheduled_requests": scheduled | {"num_prefill_requests": int(tokens > 0)}}


def lines(*items) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def envelope(fpm):
    return {"timestamp": 4, "event": {"schema": "dynamo.fpm.trace.v1", "fpm": fpm}}


# Metrics


def test_one_document_is_one_iteration_and_lines_are_many(fpm, tmp_path):
    one = [rank(8, 8192), rank(4, 4096)]
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps(one, indent=2))
    (query,) = fpm("estimate", *TP1, "--metrics", path, "--json").document["queries"]
    assert [w["decode_requests"] for w in query["work"]] == [8, 4] and query["at"] == "line 1"
    many = fpm("estimate", *TP1, "--metrics", "-", "--json", stdin=b"\n" + lines(one, rank(), rank(1, 9))).document
    assert [q["at"] for q in many["queries"]] == ["line 2", "line 3", "line 4"]
    assert many["queries"][0]["latency_ms"] == query["latency_ms"]
    assert [q["status"] for q in many["queries"]] == ["ok", "idle", "ok"]


def test_metrics_answers_are_those_of_estimate_at_every_draft_length(fpm, embedded_cell):
    items = [rank(8, 8192), [rank(4, 999), rank(3, 5000)], rank()]
    ran = fpm("estimate", *TP1, "--metrics", "-", "--draft-length", "1,3", "--json", stdin=lines(*items))
    work = fpmjax.Work.from_iterations(items)
    expected = [fpmjax.estimate(fpmjax.direct(embedded_cell), work, draft_length=d).latency_ms.tolist() for d in (1, 3)]
    assert [q["latency_ms"] for q in ran.document["queries"]] == np.transpose(expected).ravel().tolist()


def test_metrics_as_text_show_line_ranks_and_the_slowest(fpm):
    ran = fpm("estimate", *TP1, "--metrics", "-", stdin=lines([rank(1, 9), rank(8, 8192)], rank(2, 99)))
    assert ran.out.splitlines()[0].split() == ["at", "ranks", "latency", "ms", "slowest", "rank"]
    assert ran.out.splitlines()[1].split() == ["line", "1", "2", "13.6663", "1"]


def test_trace_rows_are_metrics_in_an_envelope(fpm):
    ran = fpm("estimate", *TP1, "--metrics", "-", "--json", stdin=lines(envelope(rank(8, 8192)), rank(8, 8192)))
    first, second = (q["latency_ms"] for q in ran.document["queries"])
    assert first == second


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "stdin is empty"),
        (b" \n\n", "stdin is empty"),
        (b"\xff\xfe\x00", "not JSON text"),
        (b"{", "not JSON text"),
        (lines(rank(1, 9)) + b'{"x": NaN}\n', "stdin, line 2: the metrics are not JSON text"),
        (lines(rank(1, 9), rank(0, 9)), "stdin, line 2: "),
        (lines(rank(1, 9), rank(-1, 9)), "stdin, line 2: ranks[0].scheduled_requests.num_decode_requests is -1"),
        (lines(rank(1, 9), rank(2**32, 9)), "4294967296"),
        (lines(rank(1, 9), rank(1.0, 9)), "1.0 (float)"),
        (lines(rank(1, 9), []), "stdin, line 2: the iteration lists no ranks"),
        (lines(7), "stdin, line 1: ranks[0] is 7"),
        (b"[" * 100000, "nested too deeply"),
        (lines(rank(1, 9), {"event": 3}), "stdin, line 2: the trace row carries no event.fpm"),
        (lines(rank(1, 9)) + b'{"event": ', "stdin, line 2: the metrics are not JSON"),
    ],
)
def test_bad_metrics_name_the_line(fpm, text, said):
    fpm("estimate", *TP1, "--metrics", "-", stdin=text).refused(said)


# Traffic


def test_coverage_counts_answers_per_draft_length(fpm):
    items = [rank(8, 8192), rank(300, 400000), rank(), rank(8, 8192, tokens=64)]
    ran = fpm(*COVER, "-", "--draft-length", "0,1", "--json", stdin=lines(*items))
    plain, one = ran.document["draft_lengths"]
    assert (plain["queries"], plain["idle"], plain["answered"], plain["share"]) == (4, 1, 3, 1.0)
    assert (one["answered"], one["with_prefill"], one["share"], one["largest_batch"]) == (1, 1, 0.5, 600)
    (reason,) = one["refused"]
    assert (reason["reason"], reason["queries"]) == ("decode_no_two_sided_batch_bracket", 1)
    assert reason["example"]["at"] == "line 2" and "batch_size=600" in reason["example"]["message"]
    assert ran.document["largest_measured_batch"] == 512 and ran.code == 0


def test_coverage_as_text_marks_what_lies_beyond_the_largest_batch(fpm):
    ran = fpm(*COVER, "-", stdin=lines(rank(8, 8192), rank(300, 400000)))
    assert "        none           2     0        -         2  100.0%            300\n" in ran.out
    assert "           1           2     0        0         1   50.0%            600 !\n" in ran.out
    assert "! beyond the largest measured batch, 512\n" in ran.out
    assert "draft length 4: 1 refused, decode_no_two_sided_batch_bracket; first at line 2:\n" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 120


def test_every_kind_of_traffic_file_says_the_same(fpm, tmp_path):
    table = {"decode_requests": [8, 300, 1], "decode_kv": [8192, 400000, 1], "count": [2, 1, 3]}
    items = [rank(8, 8192)] * 2 + [rank(300, 400000)] + [rank(1, 1)] * 3
    written = {"a.jsonl": lines(*items), "b.jsonl": lines(*map(envelope, items))}
    written["c.jsonl.gz"] = gzip.compress(lines(*items[:2])) + gzip.compress(lines(*items[2:]))  # several members
    written["d.csv"] = b"\xef\xbb\xbfbatch,kv,count,remark\n8,8192,2,\n300,400000,1,x\n\n 1 ,1,3,\n"
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    written["e.parquet"] = sink.getvalue()
    answers = []
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
        document = fpm(*COVER, tmp_path / name, "--json").document
        for each in document["draft_lengths"]:
            each["refused"] = [(r["reason"], r["queries"]) for r in each["refused"]]
        answers.append(document["draft_lengths"])
    assert all(answer == answers[0] for answer in answers)
    assert [each["queries"] for each in answers[0]] == [6] * 5


def test_columns_that_are_not_read_are_named(fpm):
    ran = fpm(*COVER, "-", "--json", stdin=b"batch,kv,remark\n8,8192,x\n")
    assert ran.err == "note: stdin: columns that are not read: remark\n"


def test_nothing_covered_is_exit_3_and_idle_traffic_is_not(fpm):
    assert fpm(*COVER, "-", stdin=lines(rank(5000, 1))).code == 3
    assert fpm(*COVER, "-", stdin=lines(rank(), rank())).code == 0


def test_a_trace_that_breaks_off_is_used_up_to_there(fpm, tmp_path):
    whole = b"".join(gzip.compress(lines(*[rank(8, 8000 + i) for i in range(j, j + 40)])) for j in range(0, 400, 40))
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(whole[:-12])
    ran = fpm(*COVER, path, "--json", "--draft-length", "0")
    assert "ends inside a gzip member" in ran.err
    assert ran.document["draft_lengths"][0]["queries"] >= 360


def test_blocks_change_nothing(fpm, monkeypatch):
    text = lines(*[rank(b, 100 * b) for b in range(1, 41)])
    whole = fpm(*COVER, "-", "--json", stdin=text).document
    monkeypatch.setattr("fpmjax.cli.traffic.BLOCK", 7)
    assert fpm(*COVER, "-", "--json", stdin=text).document == whole


def test_progress_is_shown_to_a_terminal_only(fpm, monkeypatch, capsys):
    assert fpm(*COVER, "-", stdin=lines(rank(1, 9))).err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)  # drawn plainly
    monkeypatch.setattr("fpmjax.progress.DELAY", 0)
    monkeypatch.setenv("TERM", "xterm")
    assert "\rtraffic: 1 iterations" in fpm(*COVER, "-", stdin=lines(rank(1, 9))).err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"batch,kv\n", "holds no iterations"),
        (b"a,b\n1,2\n", "has no column decode_requests or prefill_requests (found: a, b)"),
        (b"batch,batch\n1,2\n", "line 1: column 'batch' occurs 2 times"),
        (b"batch,decode_requests\n1,2\n", "'batch' and 'decode_requests' are the same quantity"),
        (b"batch,kv\n1,2\n1\n", "line 3: 1 fields under 2 column names"),
        (b"batch,kv\n1,2\n1,-2\n", "line 3, column kv: '-2' is not a whole number from 0"),
        (b"batch,kv\n1,1.5\n", "line 2, column kv: '1.5' is not"),
        (b"batch,kv\n1,4294967296\n", "line 2, column kv: '4294967296' is out of range"),
        (b'batch,kv,x\n1,2,"a\nb"\nx,2,\n', "line 4, column batch: 'x' is not"),
        (b"batch,kv\n1,2\n0,2\n", "line 3: decode_kv is 2 while decode_requests is 0"),
        (b'batch,kv\n1,"2\n', "not CSV"),
        (b"batch,kv\n1,\xff\n", "not UTF-8 text"),
        (b"\x1f\x8bnot gzip at all", "is not a readable gzip file"),
        (b"PAR1 but no more", "is not a readable Parquet file"),
        (os.urandom(3000) + b"\xff", ""),
        (lines(rank(1, 9), rank(0, 9)), "line 2: "),
        (b"{]\n", "line 1: the metrics are not JSON text"),
    ],
)
def test_bad_traffic_says_where(fpm, tmp_path, content, said):
    path = tmp_path / "träffic"
    path.write_bytes(content)
    fpm(*COVER, path, "--json").refused("träffic", said)


def test_traffic_in_parquet_holds_whole_numbers(fpm, tmp_path):
    for column, said in ((pa.array([1.5]), "type double"), (pa.array([None], pa.int64()), "nulls")):
        pq.write_table(pa.table({"batch": column}), tmp_path / "t")
        fpm(*COVER, tmp_path / "t").refused(f"column batch has {said}")
    pq.write_table(pa.table({"batch": pa.array([1, -4])}), tmp_path / "t")
    fpm(*COVER, tmp_path / "t").refused("row 1: decode_requests is -4")


def test_a_count_beyond_every_file_is_out_of_range(fpm, tmp_path):
    for count in (2**53 + 1, -1):
        pq.write_table(pa.table({"batch": [1, 1], "count": [1, count]}), tmp_path / "t")
        fpm(*COVER, tmp_path / "t").refused("t, row 1: count is out of range")


def test_a_gzip_file_that_is_damaged_inside_names_the_last_good_line(fpm, tmp_path):
    for good in ([b"batch,kv"] + [b"%d,%d" % (i % 99 + 1, i * i) for i in range(9000)], [b"{}"] * 90000):
        whole = gzip.compress(b"\n".join(good))
        (tmp_path / "t").write_bytes(whole[: len(whole) // 2] + b"\xff" * 40 + whole[len(whole) // 2 + 40 :])
        fpm(*COVER, tmp_path / "t").refused("t is damaged after line ")


def test_too_many_queries_of_a_file_are_refused_before_they_are_made(fpm):
    asked = ("estimate", *TP1, "--metrics", "-", "--draft-length", "1:400000")
    fpm(*asked, stdin=lines(*[rank(1, 9)] * 3)).refused("3 iterations at 400,000 draft lengths make 1,200,000 queries")


def test_files_that_cannot_be_opened_are_named(fpm, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    fpm(*COVER, tmp_path / "loop").refused("loop: ")
    fpm(*COVER, tmp_path / "none").refused("none: No such file or directory")
    fpm(*COVER, tmp_path).refused("is a folder")
    fpm(*COVER, "a\0b").refused("'a\\x00b' is not a path: ")
    fpm("estimate", *TP1, "--metrics", tmp_path / "none").refused("none: No such file")


def test_measured_rounds_are_asked_as_they_are(fpm, monkeypatch, embedded_cell):
    from dataclasses import replace

    round_cell = replace(embedded_cell, policy="vllm_native_fpm_model_step_cuda_v1")
    monkeypatch.setattr("fpmjax.cli.coverage.open_cell", lambda args: round_cell)
    ran = fpm(*COVER, "-", "--json", stdin=lines(rank(8, 8192)))
    assert [each["draft_length"] for each in ran.document["draft_lengths"]] == [0]
    assert ran.err.startswith("note: the table holds measured speculative rounds")
    fpm(*COVER, "-", "--draft-length", "1", stdin=lines(rank(8, 8192))).refused("count speculation twice")


@some
@given(st.binary(max_size=60))
@example(b"batch,kv\r1,2\r")
@example(b'"batch"\n"1\n"')
@example(b"[" * 3000)
def test_no_bytes_break_a_reader(fpm, tmp_path, content):
    path = tmp_path / "file"
    for head in (b"", b"batch,kv\n", b'{"event"', b"\x1f\x8b\x08\x00", b"PAR1"):
        path.write_bytes(head + content)
        assert fpm(*COVER, path).code in (0, 2, 3)
        assert fpm("estimate", *TP1, "--metrics", path).code in (0, 2, 3)
        assert fpm("table", "build", path, "--identity", path, "-o", tmp_path / "new").code == 2


def test_csv_lines_are_counted_as_an_editor_counts_them():
    text = b'a,b\n1,"x\ny\n"\n\n2,\r\n"3\n",\n4,5\n'
    assert [begin for begin, _ in files.csv_records("x", io.BytesIO(text))] == [1, 2, 6, 7, 9]
