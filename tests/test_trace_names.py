"""Names in traces: clocks that a terminal prints as they are, files that are left out, pipes; and long lines."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time

import numpy as np
import pyarrow as pa
import pytest
from traces import CASES, code_of, outcomes, read, row, write

from fpmjax import MetricsError, Observations, TraceError, Work
from fpmjax.observe.segments import read_lines

FORGED = ["a\nnote: forged", "a\x1b[2J", "a\rb", "\u202eabc", "\ud800", "a\tb", "\x7f", "", "x" * 201]


def clock(name):
    return lambda whole: whole["event"]["fpm"].update(timing_scope=name)


@pytest.mark.parametrize("name", [*FORGED, "mixed"])
def test_a_clock_in_a_trace_is_named_in_plain_words_and_is_one(name, tmp_path):
    lines = [row(0, edit=clock("cuda")), row(1, edit=clock(name)), row(2, edit=clock("cuda"))]
    for some in (lines, lines[1:2]):
        observations = read(write(tmp_path / "a.jsonl", some))
        assert observations.report["bad_field"] == 1
        assert observations.timing == ("cuda" if len(some) > 1 else "unspecified")
        assert all(shown.isprintable() for shown in observations.report["examples"]["bad_field"])


def test_a_clock_of_other_letters_is_fine(tmp_path):
    assert read(write(tmp_path / "a.jsonl", [row(0, edit=clock("Uhr für CUDA"))])).timing == "Uhr für CUDA"


@pytest.mark.parametrize("name", FORGED)
def test_no_other_source_takes_a_forged_clock(name, tmp_path):
    work = Work.decode([1], [5])
    with pytest.raises(MetricsError, match=r"(?s)timing is .*hint: ") as caught:
        Observations.of(work, [1.0], timing=name)
    assert caught.value.code == "payload" and all(line.isprintable() for line in str(caught.value).split("\n"))
    with pytest.raises(MetricsError, match="timing is "):
        Observations.from_metrics([], timing=name)
    for suffix in (".parquet", ".csv"):
        with pytest.raises(MetricsError, match="timing is "):
            Observations(work, np.ones(1), name).write(tmp_path / f"o{suffix}")
    assert list(tmp_path.iterdir()) == []
    if name and name != "\ud800":
        columns = {"wall_ms": [1.0, 2.0], "decode_requests": [1, 1]}
        with pytest.raises(MetricsError, match="the table: timing is "):
            Observations.read(pa.table(columns | {"timing": [name, name]}))
        with pytest.raises(TraceError, match="different clocks") as told:
            Observations.read(pa.table(columns | {"timing": [name, "cuda"]}))
        assert all(line.isprintable() for line in str(told.value).split("\nhint: "))
    whole = json.loads((CASES / "benchmark_results.json").read_text())
    whole["measurement_protocol"]["timing_metric"] = name
    (tmp_path / "a.json").write_text(json.dumps(whole))
    if name:
        assert code_of(read, tmp_path / "a.json") == "artifact"


def test_an_artifact_has_one_clock(tmp_path):
    whole = json.loads((CASES / "benchmark_results.json").read_text())
    whole["measurement_protocol"]["timing_metric"] = "mixed"
    (tmp_path / "a.json").write_text(json.dumps(whole))
    assert code_of(read, tmp_path / "a.json") == "artifact"


def test_mixed_observations_are_written_and_read_as_such(tmp_path):
    one, two = (Observations.of(Work.decode([1], [5]), [1.0], timing=clock) for clock in "ab")
    mixed = Observations.concat([one, two], mixed_timing=True)
    for suffix in (".parquet", ".csv"):
        mixed.write(tmp_path / f"o{suffix}")
        assert Observations.read(tmp_path / f"o{suffix}").timing == "mixed"


# --- files -------------------------------------------------------------------------------------------------


def test_what_is_no_segment_in_a_folder_is_told(tmp_path):
    shutil.copy(CASES / "dynamo-fpm.4192.000001.jsonl.gz", tmp_path)
    assert read(tmp_path).report["files_left_out"] == 0 and read(tmp_path).report["warnings"] == ()
    for name in ("other.jsonl", "b.jsonl.gz", ".hidden.jsonl", "dynamo-fpm.lock", "a.json"):
        (tmp_path / name).write_text("")
    for paths in (tmp_path, [tmp_path, tmp_path]):
        report = read(paths).report
        assert report["files"] == 1 and report["files_left_out"] == 2 and report["accepted"] == 12
        assert report["warnings"] == (
            f"{tmp_path}: 'b.jsonl.gz' and 1 more are left out, by name no segment; "
            "name the file, or a glob, to read it",
        )
    report = read([tmp_path, tmp_path / "other.jsonl"]).report
    assert (
        report["files"] == 2 and report["files_left_out"] == 1 and "'b.jsonl.gz' is left out" in report["warnings"][0]
    )


def test_a_pipe_is_no_regular_file(tmp_path):
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    with pytest.raises(TraceError, match=r"a\.jsonl is not a regular file\nhint: ") as caught:
        read(path)
    assert caught.value.code == "file"
    reader, writer = os.pipe()
    try:
        with pytest.raises(TraceError, match="is not a regular file"):
            read(f"/dev/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)


def test_a_long_line_takes_time_in_proportion(tmp_path):
    """Copying what was read so far for every block takes over 10 seconds here."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (60 << 20), 1))
    begin = time.process_time()
    ((number, (line,)),) = [block for block in read_lines(path) if block[1]]
    assert number == 1 and len(line) == 60 << 20
    assert time.process_time() - begin < 4


def test_lines_are_the_same_wherever_blocks_end(tmp_path, monkeypatch):
    lines = [row(i) for i in range(5)]
    path = write(tmp_path / "a.jsonl", lines)
    for chunk in (1, 7, 400, 1 << 18):
        monkeypatch.setattr("fpmjax.observe.segments.CHUNK", chunk)
        found = [(first + i, line) for first, block in read_lines(path) for i, line in enumerate(block)]
        assert found == [(i, line.encode()) for i, line in enumerate(lines, 1)]
        assert outcomes(read(path)) == {"accepted": 5}
