"""The streams of the command: closed or full ones, marks before the data, and inputs of very uneven size."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import IDENTITY
from hypothesis import given
from hypothesis import strategies as st
from test_cli_traffic import COVER, TP1, lines, rank

from fpmjax.cli import main, output, traffic

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
INSPECT = f"{sys.executable} -m fpmjax inspect embedded"
REFUSED = f"{sys.executable} -m fpmjax inspect /nowhere"


def bash(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)


# Streams that are closed or full


@pytest.mark.parametrize(
    "command",
    [
        ("estimate", *TP1, "--metrics", "-"),
        ("coverage", *TP1, "--traffic", "-"),
        ("table", "build", "-", "--identity", "-", "-o", "new"),
    ],
    ids=lambda command: command[0],
)
def test_a_closed_stdin_is_said_to_be_closed(capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(list(command)) == 2
    assert capsys.readouterr().err == "error: stdin is closed\nhint: name a file instead of -\n"


@linux
def test_a_closed_or_full_stderr_changes_neither_data_nor_exit_code():
    data = bash(f"{INSPECT} --json")
    for closed in ("2>&-", "2>/dev/full", "2>&- <&-"):
        ran = bash(f"{INSPECT} --json {closed}")
        assert (ran.returncode, ran.stdout) == (0, data.stdout)
        ran = bash(f"{REFUSED} {closed}")
        assert (ran.returncode, ran.stdout) == (2, "")


@linux
def test_lost_output_is_never_a_success():
    ran = bash(f"{INSPECT} >&-")
    assert ran.returncode == 2 and ran.stderr.startswith("error: stdout is closed\nhint: ")
    for command in (INSPECT, f"{INSPECT} --json", f"{sys.executable} -m fpmjax --help", f"{REFUSED} --help"):
        ran = bash(f"{command} >/dev/full")
        assert (ran.returncode, ran.stderr) == (2, "error: output: No space left on device\n")
    assert bash(f"{INSPECT} >/dev/full 2>/dev/full").returncode == 2


def test_text_for_a_stream_that_was_closed_later_is_given_up(monkeypatch):
    closed = open("/dev/null", "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    output.tell("nobody hears this")


# Marks, names and numbers


def test_a_byte_order_mark_before_metrics_is_named(fpm, tmp_path):
    text = b"\xef\xbb\xbf" + lines(rank(1, 9), rank(2, 9))
    for command in (("estimate", *TP1, "--metrics", "-"), (*COVER, "-")):
        fpm(*command, stdin=text).refused("stdin, line 1: ", "byte order mark (BOM)")
    fpm("estimate", *TP1, "--metrics", "-", stdin=text.splitlines()[0]).refused("byte order mark (BOM)")


def test_empty_names_and_odd_places_are_refused(fpm, tmp_path):
    identity = tmp_path / "id.json"
    identity.write_text(json.dumps(IDENTITY))
    fpm(*COVER, "").refused("error: the name of the input file is empty")
    fpm("table", "build", "rows.csv", "--identity", identity, "-o", "").refused("error: --output is empty")
    fpm("inspect", "/dev/null").refused("/dev/null is not a regular file")


def test_a_repeated_parquet_column_is_named(fpm, tmp_path):
    identity, rows = tmp_path / "id.json", tmp_path / "rows.parquet"
    identity.write_text(json.dumps(IDENTITY))
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["batch_size", "batch_size"]), rows)
    ran = fpm("table", "build", rows, "--identity", identity, "-o", tmp_path / "new")
    ran.refused(f"error: {rows}: column 'batch_size' occurs 2 times")


def test_a_draft_length_beyond_32_bits_is_refused_before_the_traffic_is_read(fpm):
    for command in ((*COVER, "missing.jsonl"), ("estimate", *TP1, "--batch", 1, "--kv", 9)):
        ran = fpm(*command, "--draft-length", "1,4294967295")
        ran.refused("error: draft_length=4294967295 makes more rows per request than 32 bits can count")


# Lines of very uneven length


@given(st.lists(st.integers(1, 300), max_size=60))
def test_blocks_keep_every_line_in_order_and_never_pad_much(lengths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "PADDED", 1 << 10)
        patch.setattr(traffic, "BLOCK", 16)
        source = [(i, b"x" * n) for i, n in enumerate(lengths)]
        blocks = list(traffic.json_blocks(iter(source)))
    assert [line for block in blocks for line in block] == source
    for block in blocks:
        longest = max(len(text) for _, text in block)
        assert len(block) == 1 or (len(block) <= 16 and len(block) * longest <= 1 << 10)


def listed(n: int) -> dict:
    item = rank(n, 100 * n)
    item["scheduled_requests"] |= {"extend_lengths": [1] * n, "past_kv_lengths": [100] * n}
    return item


def test_one_long_list_does_not_pad_all_traffic(fpm, monkeypatch):
    sizes, real = [], traffic.read_iterations

    def spying(*args):
        work = real(*args)
        sizes.append(work.lists.extend.size)
        return work

    monkeypatch.setattr(traffic, "read_iterations", spying)
    monkeypatch.setattr(traffic, "PADDED", 1 << 16)
    text = lines(*[listed(2)] * 200, listed(1000), *[listed(2)] * 200)
    (tally,) = fpm(*COVER, "-", "--draft-length", "0", "--json", stdin=text).document["draft_lengths"]
    assert tally["queries"] == 401 and tally["answered"] == 400
    assert max(sizes) <= (1 << 16) / 4


def in_pieces(monkeypatch):
    """Pieces of a few queries, blocks of a few lines, and lists that fit only a few at a time."""
    monkeypatch.setattr("fpmjax.work.MOST_LISTED", 100)
    monkeypatch.setattr("fpmjax.cli.queries.LISTED", 50)
    monkeypatch.setattr("fpmjax.cli.traffic.BLOCK", 9)


@pytest.mark.parametrize("more", [(), ("--detail",), ("--draft-length", "0:2"), ("--draft-length", "1", "--detail")])
def test_metrics_are_streamed_with_the_answers_of_one_call(fpm, monkeypatch, more):
    items = [listed(1 + i % 7) for i in range(25)]
    items[20] = [listed(2), listed(30), {}]  # more ranks than before it
    items[11] = listed(40)
    items[22] = {"scheduled_requests": {"num_decode_requests": 5000, "sum_decode_kv_tokens": 9}}
    ask = ("estimate", *TP1, "--metrics", "-", *more)
    once = fpm(*ask, "--json", stdin=lines(*items)), fpm(*ask, stdin=lines(*items))
    in_pieces(monkeypatch)
    pieces = fpm(*ask, "--json", stdin=lines(*items)), fpm(*ask, stdin=lines(*items))
    for ran, before in zip(pieces, once, strict=True):
        assert (ran.code, ran.out) == (before.code, before.out)
        # the example says where its rank stands among those of its piece
        assert ran.err.partition("for example")[0] == before.err.partition("for example")[0]
    assert [len(query["work"]) for query in pieces[0].document["queries"]] == [3] * len(pieces[0].document["queries"])
    assert sum(pieces[0].document["refused"].values()) and "have no answer" in pieces[0].err


def test_models_that_read_lists_are_asked_with_them_in_pieces(fpm, monkeypatch, tmp_path):
    import fpmjax
    from fpmjax.store import save_model

    items = [listed(1 + i % 9) for i in range(40)]
    work = fpmjax.Work.from_iterations(items)
    seen = fpmjax.Observations.of(work, 3.0 + np.asarray(work.decode_kv, float)[:, 0] / 900)
    save_model(fpmjax.regression(seen, role="decode", feature_axes=("P", "maxP")), tmp_path / "m.npz")
    ask = ("estimate", tmp_path / "m.npz", "--metrics", "-", "--draft-length", "0,2", "--json")
    once = fpm(*ask, stdin=lines(*items))
    in_pieces(monkeypatch)
    assert once.code == 0 and fpm(*ask, stdin=lines(*items)) == once


def test_one_long_list_among_many_short_ones_is_no_obstacle(fpm):
    """Padded to the longest list, all of them at once would be more than fits."""
    text = lines(*[listed(2)] * 700, listed(100_000), *[listed(3)] * 700)
    document = fpm("estimate", *TP1, "--metrics", "-", "--json", stdin=text).document
    assert (len(document["queries"]), document["answered"]) == (1401, 1400)


def test_one_iteration_whose_lists_do_not_fit_is_refused(fpm, monkeypatch):
    monkeypatch.setattr("fpmjax.work.MOST_LISTED", 1000)
    ran = fpm("estimate", *TP1, "--metrics", "-", stdin=lines([listed(400), {}, {}]))
    ran.refused("error: stdin: request lists are padded to the longest one: 3 ranks of 400 requests make 1,200 entries")
