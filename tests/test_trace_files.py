"""No trace file is trusted: cut, damaged and mangled ones, the quick reader against the careful one, progress."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import assert_same
from traces import CASES, GOOD, code_of, outcomes, read, row, write

from fpmjax import Observations, TraceError
from fpmjax.observe.layout import learn
from fpmjax.observe.rows import Rejected, RowReader, careful, decode

# --- the quick reader --------------------------------------------------------------------------------------


def every_line() -> list[bytes]:
    return [line for name in GOOD for line in gzip.decompress((CASES / name).read_bytes()).splitlines()]


def result_of(read_one: Callable, line: bytes):
    try:
        return read_one(line)
    except Rejected as rejected:
        return rejected.reason


def test_learnt_layouts_answer_as_the_careful_reader_does():
    reader, quick = RowReader(), 0
    for line in every_line():
        found = reader.read(line)
        assert found == careful(decode(line), None)
        quick += any(layout.read(line) == found for layout in reader.layouts)
    assert quick == len(every_line())
    assert len(reader.layouts) <= len(GOOD)


@given(st.data())
def test_mangled_rows_have_one_outcome_whatever_is_learnt(data):
    lines = every_line()
    reader = RowReader()
    line = bytearray(data.draw(st.sampled_from(lines)))
    reader.read(bytes(line))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(line) - 1))
        replacement = data.draw(
            st.sampled_from([b"", b"-", b"0", b"9", b".5", b"e9", b'"', b" ", b"\\", b",", b"\xff"])
        )
        line[at : at + data.draw(st.integers(0, 2))] = replacement
    mangled = bytes(line)
    assert result_of(reader.read, mangled) == result_of(lambda x: careful(decode(x), None), mangled)


def test_spaces_and_key_order_are_learnt_too():
    spaced = json.dumps(json.loads(row(0, extend_lengths=[1, 1], past_kv_lengths=[1, 2])), sort_keys=True).encode()
    layout = learn(spaced)
    assert layout is not None and layout.read(spaced) == careful(decode(spaced), None)
    assert layout.read(spaced.replace(b"[1, 2]", b"[1, 12]")) is not None
    for damaged in (b"[1, 02]", b"[1,  2]", b"[1, 2,]", b"[1, -2]", b"[1, 2.0]", b"[1 2]", b"[1, 2, 3]", b"null"):
        assert layout.read(spaced.replace(b"[1, 2]", damaged)) is None
    assert learn(b'{"event":{"fpm":{}}}') is None


# --- files that cannot be trusted --------------------------------------------------------------------------


def test_the_cut_member_of_the_newest_segment_is_kept_up_to_the_cut(tmp_path):
    observations = read(CASES / "truncated.000000.jsonl.gz", strict=True)
    assert len(observations) == 7 and observations.report["truncated"] == 1
    assert "cut" in observations.report["warnings"][0]
    for index, name in ((0, "dynamo-fpm.4192.000000.jsonl.gz"), (1, "dynamo-fpm.4192.000001.jsonl.gz")):
        data = (CASES / name).read_bytes()
        (tmp_path / f"t.p.{index:06}.jsonl.gz").write_bytes(data[:-5] if index == 0 else data)
    assert code_of(read, tmp_path) == "truncated"
    (tmp_path / "t.p.000001.jsonl.gz").unlink()
    assert len(read(tmp_path)) == 12


def test_a_file_cut_anywhere_gives_a_beginning_of_it_or_a_trace_error(tmp_path):
    name = "dynamo-fpm.vllm-native.000000.jsonl.gz"
    data, whole = (CASES / name).read_bytes(), read(CASES / name)
    lengths = []
    for size in range(len(data) + 1):
        (tmp_path / name).write_bytes(data[:size])
        part = read(tmp_path / name, strict=True)
        lengths.append(len(part))
        assert part.wall_ms.tolist() == whole.wall_ms[: len(part)].tolist()
    assert lengths[0] == 0 and lengths[-1] == len(whole) and lengths == sorted(lengths)


def test_a_plain_file_cut_anywhere_is_kept_up_to_the_cut(tmp_path):
    data = "\n".join(row(i) for i in range(3)).encode()
    ends = [i for i, byte in enumerate(data + b"\n") if byte == ord("\n")]
    for size in [*range(0, len(data), 7), *ends]:
        (tmp_path / "a.jsonl").write_bytes(data[:size])
        part = read(tmp_path / "a.jsonl", strict=True)
        assert len(part) == sum(end <= size for end in ends)
        assert part.report["truncated"] == (size - 1 not in ends and size not in (0, *ends))


def test_a_last_line_is_cut_only_where_it_begins_a_row(tmp_path):
    text = json.dumps({"a é中": [1.5e-7, -0.25, 1e30, True, False, None, 'x\\"中\n\t/😀', {}, [[1]]], "b": ""})
    for cut in (text.encode(), json.dumps(json.loads(text), ensure_ascii=False).encode(), row(0).encode()):
        for size in range(1, len(cut)):
            (tmp_path / "a.jsonl").write_bytes(cut[:size])
            assert outcomes(observations := read(tmp_path / "a.jsonl")) == {}
            assert observations.report["truncated"] == 1
    garbage = [b"garbage", b"{garbage", b"{abc", b"[1,2", b'"abc', b"\xff\xfe{", b'{"a":1}}', b'{"a":1}{"b"', b'{"a" 1']
    for line in [*garbage, b'{"a":xyz', b'{"a":"\x01', b'{"a":"\\q', b"PK\x03\x04", b"\x00" * 9, b'{"a":' * 100_000]:
        (tmp_path / "a.jsonl").write_bytes(line)
        observations = read(tmp_path / "a.jsonl")
        assert outcomes(observations) == {"bad_json": 1} and observations.report["truncated"] == 0
        assert code_of(read, tmp_path / "a.jsonl", strict=True) == "bad_json"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("newline", ["", "\n"])
def test_a_byte_order_mark_before_a_file_is_no_part_of_it(suffix, newline, tmp_path):
    for i in range(2):
        data = ("\n".join(row(k) for k in range(3 * i, 3 * i + 3)) + newline).encode("utf-8-sig")
        members = [data[:2], data[2:40], data[40:]] if suffix.endswith(".gz") else [data]
        pack = gzip.compress if suffix.endswith(".gz") else bytes
        (tmp_path / f"a.p.{i:06}{suffix}").write_bytes(b"".join(map(pack, members)))
    assert outcomes(read(tmp_path, strict=True)) == {"accepted": 6}
    alone = tmp_path / f"b{suffix}"
    alone.write_bytes(pack(row(0).encode("utf-8-sig")))
    assert outcomes(read(alone)) == {"accepted": 1}
    artifact = tmp_path / "a.json"
    artifact.write_bytes(b"\xef\xbb\xbf" + (CASES / "benchmark_results.json").read_bytes())
    assert len(read(artifact)) == 7


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_garbage_never_raises_anything_but_a_trace_error(tmp_path_factory, lines, packed):
    path = tmp_path_factory.mktemp("g") / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(b"\n".join(lines))
    try:
        outcomes(read(path))
    except TraceError as error:
        assert "\nhint: " in str(error)


def json_values():
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    return st.recursive(
        scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)
    )


@given(st.data())
def test_any_value_in_any_place_is_counted(tmp_path_factory, data):
    whole = json.loads(row(0, extend_lengths=[1, 1], past_kv_lengths=[1, 1]))
    place, parent = [], whole
    while isinstance(parent, dict) and (not place or data.draw(st.booleans())):
        place.append(data.draw(st.sampled_from(sorted(parent))))
        above, parent = parent, parent[place[-1]]
    above[place[-1]] = data.draw(json_values())
    path = tmp_path_factory.mktemp("v") / "a.jsonl"
    path.write_text(json.dumps(whole) + "\n")
    outcomes(read(path))


@given(st.data())
def test_any_value_in_an_artifact_is_read_or_refused(tmp_path_factory, data):
    whole = json.loads((CASES / "benchmark_results.json").read_text())
    place: Any = whole
    key = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.integers(0, 3)):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(json_values())
    path = tmp_path_factory.mktemp("a") / "a.json"
    path.write_text(json.dumps(whole))
    try:
        read(path)
    except TraceError as error:
        assert "\nhint: " in str(error)


def test_damaged_compression_is_an_error_anywhere(tmp_path):
    data = bytearray((CASES / "dynamo-fpm.4192.000000.jsonl.gz").read_bytes())
    generator = random.Random(5)
    for _ in range(60):
        copy = bytearray(data)
        copy[generator.randrange(len(copy))] ^= 1 << generator.randrange(8)
        (tmp_path / "a.jsonl.gz").write_bytes(copy)
        try:
            read(tmp_path / "a.jsonl.gz")
        except TraceError as error:
            assert error.code in ("gzip", "conflict", "multi_rank")
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain text\n" * 5)
    assert code_of(read, tmp_path / "a.jsonl.gz") == "gzip"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0)])
    path.chmod(0)
    assert code_of(read, path) == "file"


# --- lists, streams ----------------------------------------------------------------------------------------


def test_request_lists_arrive_where_they_belong():
    observations = read(CASES / "dynamo-fpm.sgl-3.000000.jsonl.gz")
    lists, work = observations.work.lists, observations.work
    assert lists is not None and lists.count.shape == (8, 1)
    assert (lists.count == work.prefill_requests + work.decode_requests.astype(np.int32)).all()
    for i, line in enumerate(gzip.decompress((CASES / "dynamo-fpm.sgl-3.000000.jsonl.gz").read_bytes()).splitlines()):
        scheduled = json.loads(line)["event"]["fpm"]["scheduled_requests"]
        count = lists.count[i, 0]
        assert lists.past[i, 0, :count].tolist() == scheduled["past_kv_lengths"]
        assert lists.extend[i, 0, :count].tolist() == scheduled["extend_lengths"]
        assert not lists.past[i, 0, count:].any()


def test_records_equal_the_same_metrics_given_as_dicts():
    counts = []
    for name in GOOD:
        fpms = [json.loads(x)["event"]["fpm"] for x in gzip.decompress((CASES / name).read_bytes()).splitlines()]
        given_ = Observations.from_metrics([[fpm] for fpm in fpms])
        counts.append(len(given_))
        if "7a01" not in name:  # two ranks: no file of single records
            observations = read(CASES / name)
            assert_same(observations, Observations(given_.work, given_.wall_ms, observations.timing))
    assert counts == [12, 12, 20, 10, 8, 6]


def test_memory_grows_by_the_numbers_of_a_line_not_by_its_text(tmp_path):
    import tracemalloc

    peaks = []
    for n in (2_000, 2_000, 5_000):  # the first one imports
        path = write(tmp_path / "a.jsonl.gz", [row(i) for i in range(n)])
        tracemalloc.start()
        assert len(read(path)) == n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / 3_000 < 400 < len(row(0))


# --- progress ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_progress_goes_from_the_first_bytes_to_all_of_them(suffix, tmp_path, monkeypatch):
    paths = [write(tmp_path / f"a.p.{i:06}{suffix}", [row(k + 9999 * i) for k in range(2000)]) for i in range(2)]
    paths.append(Path(shutil.copy(CASES / "benchmark_results.json", tmp_path)))
    total = sum(path.stat().st_size for path in paths)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("fpmjax.observe.segments.EVERY_SECONDS", 0.0)
    observations = read(paths, progress=lambda *bytes_: told.append(bytes_), mixed_timing=True)
    done = [read_bytes for read_bytes, _ in told]
    assert {of for _, of in told} == {total} and done == sorted(done) and done[-1] == total and len(told) > 3
    told.clear()
    monkeypatch.setattr("fpmjax.observe.segments.EVERY_SECONDS", 3600.0)
    assert_same(read(paths, progress=lambda *bytes_: told.append(bytes_), mixed_timing=True), observations)
    assert len(told) == 2 and told[-1] == (total, total)
