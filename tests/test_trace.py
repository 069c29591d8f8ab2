"""Engine traces become observations: every line has the outcome that was recorded for it, and no file is trusted."""

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

from fpmjax import Observations, TraceError, read_trace
from fpmjax.observe.layout import learn
from fpmjax.observe.rows import Rejected, RowReader, careful, decode
from fpmjax.observe.trace import OUTCOMES

CASES = Path(__file__).parent / "cases" / "traces"
BAD = CASES / "bad.records.000000.jsonl"
GOOD = sorted(p.name for p in CASES.glob("dynamo-fpm.*.jsonl.gz"))
HEAT = 1795000000000  # any time observed


def row(counter: int, wall: Any = 0.005, *, at: int | None = None, rank: int = 0, edit: Callable | None = None, **over):
    """One trace line; `over` replaces scheduled counts, `edit` gets the whole row."""
    scheduled = {
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": 0,
        "num_decode_requests": 2,
        "sum_decode_kv_tokens": 100 + counter % 1000,
        "var_decode_kv_tokens": 0.0,
    }
    queued = {k: v for k, v in scheduled.items() if k != "sum_prefill_kv_tokens"}
    fpm = {"version": 1, "worker_id": "w", "dp_rank": rank, "counter_id": counter, "wall_time": wall}
    whole = {
        "timestamp": counter,
        "event": {
            "schema": "dynamo.fpm.trace.v1",
            "source": {"namespace": "n", "component": "backend", "producer_id": "p"},
            "capture_mode": "full",
            "observed_at_unix_ms": HEAT + (10 * counter if at is None else at),
            "fpm": fpm | {"scheduled_requests": scheduled | over, "queued_requests": queued},
        },
    }
    if edit:
        edit(whole)
    return json.dumps(whole, separators=(",", ":"))


def write(path: Path, rows: list[str]) -> Path:
    data = "".join(r + "\n" for r in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(paths, **options) -> Observations:
    return read_trace(paths, **{"speculative": False, **options})


def code_of(call: Callable, *args, **options) -> str:
    with pytest.raises(TraceError) as caught:
        call(*args, **options)
    assert "\nhint: " in str(caught.value)
    return caught.value.code


def outcomes(observations: Observations) -> dict[str, int]:
    """The outcomes that occurred; with every line accounted for."""
    report = observations.report
    assert sum(report[name] for name in OUTCOMES) == report["lines"]
    return {name: report[name] for name in OUTCOMES if report[name]}


# --- the recorded files ------------------------------------------------------------------------------------

LINES = {
    **{1: "bad_schema", 2: "bad_version", 3: "bad_version", 4: "bad_field", 5: "bad_field", 6: "bad_field"},
    **{7: "inconsistent", 8: "bad_field", 9: "bad_field", 10: "bad_field", 11: "not_stp", 12: "inconsistent"},
    **{13: "accepted", 14: "bad_envelope", 15: "bad_envelope", 16: "bad_field", 17: "bad_field", 18: "bad_json"},
    **{19: "not_object", 20: "blank"},
}


@pytest.mark.parametrize("number", LINES)
def test_every_bad_line_has_its_recorded_outcome(number, tmp_path):
    line = BAD.read_bytes().split(b"\n")[number - 1]
    path = tmp_path / "one.jsonl"
    path.write_bytes(line + b"\n")
    observations = read(path)
    assert outcomes(observations) == {LINES[number]: 1}
    assert observations.report["defaulted"] == (number == 13)
    if LINES[number] in ("accepted", "blank"):
        read(path, strict=True)
    else:
        with pytest.raises(TraceError, match=r"one\.jsonl:1: ") as caught:
            read(path, strict=True)
        assert caught.value.code == LINES[number]


def test_the_bad_file_as_a_whole_counts_each_reason_and_shows_the_first_of_each():
    observations = read(BAD)
    counts = outcomes(observations)
    assert counts == {name: list(LINES.values()).count(name) for name in set(LINES.values())}
    assert observations.timing == "execute_model_cuda" and len(observations) == 1
    assert observations.report["examples"]["bad_field"][0].startswith(f"{BAD}:4: ")
    with pytest.raises(TraceError, match=r"000000\.jsonl:1: event\.schema"):
        read(BAD, strict=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dynamo-fpm.4192.000000", {"accepted": 12, "idle": 2}),
        ("dynamo-fpm.4192.000001", {"accepted": 12}),
        ("dynamo-fpm.prefill_0.000000", {"accepted": 10}),
        ("dynamo-fpm.sgl-3.000000", {"accepted": 8}),
        ("dynamo-fpm.vllm-native.000000", {"accepted": 6}),
    ],
)
def test_every_good_file_gives_its_recorded_counts_plain_and_compressed(name, expected, tmp_path):
    packed = CASES / f"{name}.jsonl.gz"
    plain = tmp_path / f"{name}.jsonl"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    a, b = read(packed, strict=True), read(plain, strict=True)
    assert outcomes(a) == outcomes(b) == expected
    assert_same(a, b)
    walls = [json.loads(line)["event"]["fpm"]["wall_time"] * 1000.0 for line in plain.read_text().splitlines()]
    assert a.wall_ms.tolist() == [wall for wall in walls if wall > 0]


def test_a_folder_is_read_in_rotation_order_and_repeats_are_dropped(tmp_path):
    for name in ("dynamo-fpm.4192.000001.jsonl.gz", "dynamo-fpm.4192.000000.jsonl.gz"):
        shutil.copy(CASES / name, tmp_path)
        (tmp_path / name[:-3]).write_bytes(gzip.decompress((CASES / name).read_bytes()))
    for name in ("dynamo-fpm.lock", ".dynamo-fpm.4192.000002.write-probe-1.jsonl", "notes.txt", "results.json"):
        (tmp_path / name).write_text("not a trace")
    observations = read(tmp_path)
    assert outcomes(observations) == {"accepted": 24, "idle": 2, "duplicate": 26}
    assert observations.report["gaps"] == 1 and observations.report["missing"] == 3
    assert observations.report["restarts"] == 0 and observations.report["files"] == 4
    assert observations.work.decode_requests[0, 0] == 3 and observations.work.decode_kv[0, 0] == 2843


def test_artifacts_are_read_by_their_groups_only(tmp_path):
    one = read(CASES / "benchmark_results.json")
    two = read(CASES / "benchmark_results_dp2_rank0.json")
    assert len(one) == len(two) == 7 and one.timing == two.timing == "scheduler_wall_time"
    assert one.work.ranks == 1 and two.work.ranks == 2
    groups = json.loads((CASES / "benchmark_results_dp2_rank0.json").read_text())["iteration_groups"]
    assert two.wall_ms.tolist() == [group["wall_time"] * 1000.0 for group in groups]
    copy = tmp_path / "benchmark_results_dp2_rank0_dp1.json"
    shutil.copy(CASES / "benchmark_results_dp2_rank0.json", copy)
    both = read([CASES / "benchmark_results_dp2_rank0.json", copy])
    assert len(both) == 7 and len(both.report["warnings"]) == 1
    both = read([CASES / "benchmark_results.json", CASES / "benchmark_results_dp2_rank0.json"])
    assert len(both) == 14 and both.work.ranks == 2


def edited(path: Path, **changes) -> Path:
    whole = json.loads((CASES / "benchmark_results.json").read_text())
    for key, change in changes.items():
        change(whole) if callable(change) else whole.update({key: change})
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"schema_version": 3}, "artifact"),
        ({"usable": False}, "artifact"),
        ({"timing_valid": False}, "artifact"),
        ({"error": "engine died"}, "artifact"),
        ({"engine": {"speculative": {"method": "eagle3"}}}, "speculative"),
        ({"x": lambda w: w["iteration_groups"][3].update(complete=False)}, "artifact"),
        ({"x": lambda w: w["iteration_groups"][3].update(expected_dp_ranks=[0, 1])}, "artifact"),
        ({"x": lambda w: w["iteration_groups"][3]["rank_results"].clear()}, "artifact"),
        ({"x": lambda w: w["iteration_groups"][3]["rank_results"][0]["fpms"][0].update(wall_time=-1)}, "artifact"),
        ({"x": lambda w: w["iteration_groups"][3]["rank_results"][0]["fpms"].append({})}, "artifact"),
        ({"x": lambda w: w["iteration_groups"][3]["rank_results"][0]["fpms"][0].update(version=2)}, "artifact"),
        ({"x": lambda w: w.update(iteration_groups={})}, "artifact"),
        ({"x": lambda w: (w.pop("iteration_groups"), w["dp"].update(size=2))}, "artifact"),
    ],
)
def test_an_artifact_is_taken_whole_or_not_at_all(changes, code, tmp_path):
    assert code_of(read, edited(tmp_path / "a.json", **changes)) == code


def test_an_older_artifact_without_groups_gives_one_iteration_per_result(tmp_path):
    old = edited(tmp_path / "old.json", x=lambda w: (w.pop("iteration_groups"), w.pop("schema_version")))
    assert_same(read(old), read(CASES / "benchmark_results.json"))


# --- what the reader is told -------------------------------------------------------------------------------


def test_speculation_has_to_be_declared_and_is_refused():
    with pytest.raises(TypeError):
        read_trace(CASES / GOOD[0])  # pyright: ignore[reportCallIssue]
    for value in (True, None, 0, "no"):
        assert code_of(read, CASES / GOOD[0], speculative=value) == "speculative"


def test_one_clock_per_store_unless_allowed():
    paths = [CASES / "dynamo-fpm.vllm-native.000000.jsonl.gz", CASES / "dynamo-fpm.4192.000001.jsonl.gz"]
    assert code_of(read, paths) == "mixed_timing"
    assert code_of(read, [paths[0], CASES / "benchmark_results.json"]) == "mixed_timing"
    mixed = read(paths, mixed_timing=True)
    assert mixed.timing == "mixed" and len(mixed) == 18
    assert mixed.report["timing"] == {"unspecified": 12, "execute_model_cuda": 6}


def test_components_are_kept_apart():
    paths = [CASES / "dynamo-fpm.prefill_0.000000.jsonl.gz", CASES / "dynamo-fpm.4192.000001.jsonl.gz"]
    assert outcomes(read(paths)) == {"accepted": 22}
    prefill = read(paths, component="prefill")
    assert outcomes(prefill) == {"accepted": 10, "other_component": 12}
    assert not prefill.work.decode_requests.any() and prefill.report["components"] == {"prefill": 10}
    assert outcomes(read(paths, component=["prefill", "backend"], strict=True)) == {"accepted": 22}


def test_skip_first_leaves_out_the_warm_up_of_every_life_of_every_worker(tmp_path):
    lives = [row(i, at=i) for i in range(5)] + [row(i, 0.006, at=100 + i) for i in range(3)]
    rename = lambda whole: whole["event"]["fpm"].update(worker_id="v")  # noqa: E731
    path = write(tmp_path / "a.jsonl", lives + [row(i, at=i, edit=rename) for i in range(2)])
    observations = read(path, skip_first=2)
    assert observations.report["restarts"] == 1
    assert observations.report["skipped"] == 6 and len(observations) == 4
    assert observations.work.decode_kv[:, 0].tolist() == [102, 103, 104, 102]
    assert len(read(path, skip_first=0)) == 10 and len(read(path, skip_first=9)) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"group": "first", "tolerance_ms": 1.0},
        {"group": "nearest"},
        {"tolerance_ms": 1.0},
        {"group": "nearest", "tolerance_ms": -1.0},
        {"group": "nearest", "tolerance_ms": float("nan")},
        {"group": "nearest", "tolerance_ms": True},
        {"skip_first": -1},
        {"skip_first": 1.5},
        {"skip_first": True},
    ],
)
def test_options_are_checked(options):
    assert code_of(read, CASES / GOOD[0], **options) == "option"


def test_paths_that_name_nothing_are_said_so(tmp_path):
    (tmp_path / "x_worker_probe.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("{}")
    for path in (tmp_path, tmp_path / "none.jsonl", str(tmp_path / "*.jsonl"), str(tmp_path / "*")):
        assert code_of(read, path) == "no_files"
    for path in (tmp_path / "notes.txt", tmp_path / "x_worker_probe.json"):
        assert code_of(read, path) == "file"
    assert code_of(read, 7) == code_of(read, [7]) == "paths"
    assert len(read([])) == 0


# --- ranks -------------------------------------------------------------------------------------------------

RANKS = CASES / "dynamo-fpm.7a01.000000.jsonl.gz"


def test_flat_records_of_several_ranks_are_refused_unless_joined(tmp_path):
    assert code_of(read, RANKS) == "multi_rank"
    only = write(tmp_path / "a.jsonl", [row(i, rank=1) for i in range(3)])
    for options in ({}, {"group": "nearest", "tolerance_ms": 5.0}):  # a rank 1 means there is a rank 0 somewhere
        assert code_of(read, only, **options) == "multi_rank"
    joined = read(RANKS, group="nearest", tolerance_ms=5.0)
    assert outcomes(joined) == {"accepted": 20, "idle": 4}
    assert len(joined) == 12 and joined.work.ranks == 2 and joined.report["unmatched"] == 0
    assert joined.work.decode_requests[:4].tolist() == [[0, 3], [3, 4], [4, 4], [4, 0]]
    assert joined.wall_ms[0] == 0.023935881 * 1000.0 and joined.wall_ms[3] == 0.006372404 * 1000.0
    apart = read(RANKS, group="nearest", tolerance_ms=0.5)
    assert len(apart) == 0 and apart.report["unmatched"] == 20


def test_records_join_only_with_each_others_nearest(tmp_path):
    # rank 1 at 9 is nearer to rank 0 at 10 than to rank 0 at 0, so the first one stays alone
    path = write(tmp_path / "a.jsonl", [row(0, at=0), row(1, at=10), row(0, at=9, rank=1), row(1, at=40, rank=1)])
    joined = read(path, group="nearest", tolerance_ms=20)
    assert joined.work.decode_kv.tolist() == [[101, 100]] and joined.report["unmatched"] == 2


def test_a_single_rank_joins_with_itself():
    path = CASES / "dynamo-fpm.4192.000001.jsonl.gz"
    assert_same(read(path), read(path, group="nearest", tolerance_ms=0))


# --- identity ----------------------------------------------------------------------------------------------


def test_the_same_key_with_other_content_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0), row(1), row(1, 0.007), row(2)])
    with pytest.raises(TraceError, match=r"a\.jsonl:3 and .*a\.jsonl:2 are the same record") as caught:
        read(path)
    assert caught.value.code == "conflict"


def test_repeats_are_dropped_wherever_they_stand(tmp_path):
    rows = [row(i) for i in range(6)]
    path = write(tmp_path / "a.jsonl", [*rows[:4], rows[3], rows[0], *rows[4:], rows[5]])
    assert_same(read(path), read(write(tmp_path / "b.jsonl", rows)))
    assert outcomes(read(path)) == {"accepted": 6, "duplicate": 3} and read(path).report["restarts"] == 0


def test_gaps_are_counted_in_full_capture_only(tmp_path):
    sampled = lambda whole: whole["event"].update(capture_mode="sampled")  # noqa: E731
    counters = [0, 1, 5, 6, 2**64 - 1]
    full = read(write(tmp_path / "a.jsonl", [row(i, at=k) for k, i in enumerate(counters)]))
    some = read(write(tmp_path / "b.jsonl", [row(i, at=k, edit=sampled) for k, i in enumerate(counters)]))
    assert (full.report["gaps"], full.report["missing"]) == (2, 3 + 2**64 - 8)
    assert (some.report["gaps"], some.report["missing"]) == (0, 0)
    assert_same(full, some)


def test_iterations_come_in_the_order_observed(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0, at=7), row(1, at=5), row(2, at=5), row(3, at=9)])
    assert read(path).work.decode_kv[:, 0].tolist() == [101, 102, 100, 103]


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (row(0, 0.0), "no_wall_time"),
        (row(0, 0), "no_wall_time"),
        (row(0, num_decode_requests=0, sum_decode_kv_tokens=0), "idle"),
        (row(0, num_decode_requests=0, sum_decode_kv_tokens=0, num_prefill_requests=1), "idle"),
        (row(0, float("nan")), "bad_json"),
        (row(0, float("inf")), "bad_json"),
        (row(0).replace("0.005", "1e999"), "bad_field"),
        (row(0, -0.5), "bad_field"),
        (row(0, 1795000000.0), "bad_field"),  # an absolute clock
        (row(0, 1e308), "bad_field"),
        (row(0, True), "bad_field"),
        (row(0, 6.7), "accepted"),  # a cold start is a measurement
        (row(0, 1), "accepted"),
        (row(0).replace('"dp_rank":0', '"dp_rank":-0'), "bad_field"),
        (row(0).replace('"dp_rank":0', '"dp_rank":0,"dp_rank":0'), "bad_json"),
        (row(0, num_decode_requests=True), "bad_field"),
        (row(0, sum_decode_kv_tokens=2**32 - 1), "accepted"),
        (row(0, sum_decode_kv_tokens=2**32), "bad_field"),
        (row(0, sum_prefill_tokens=1), "inconsistent"),
        (row(0, extend_lengths=[1, 1]), "inconsistent"),
        (row(0, extend_lengths=[1, 1], past_kv_lengths=[50, 50]), "accepted"),
        (row(0, extend_lengths=None, past_kv_lengths=None), "accepted"),
        (row(0, extend_lengths=[1, 2], past_kv_lengths=[50, 50]), "not_stp"),
        (row(0, num_prefill_requests=1, extend_lengths=[9, 1, 1], past_kv_lengths=[0, 1, 1]), "accepted"),
        (row(0, num_prefill_requests=1, extend_lengths=[9, 4, 4], past_kv_lengths=[0, 1, 1]), "not_stp"),
        (row(0, edit=lambda w: w["event"].update(observed_at_unix_ms=-1)), "bad_envelope"),
        (row(0, edit=lambda w: w["event"].update(observed_at_unix_ms=2**70)), "bad_envelope"),
        (row(0, edit=lambda w: w["event"].update(capture_mode="some")), "bad_envelope"),
        (row(0, edit=lambda w: w["event"]["source"].pop("component")), "bad_envelope"),
        (row(0, edit=lambda w: w["event"].update(source=None)), "bad_envelope"),
        (row(0, edit=lambda w: w["event"]["fpm"].pop("counter_id")), "bad_field"),
        (row(0, edit=lambda w: w["event"]["fpm"].update(version=True)), "bad_version"),
        (row(0, edit=lambda w: w["event"]["fpm"].update(timing_scope="")), "bad_field"),
        (row(0, edit=lambda w: w["event"]["fpm"].update(queued_requests=None)), "bad_field"),
        (row(0, edit=lambda w: w["event"]["fpm"]["scheduled_requests"].pop("num_decode_requests")), "bad_field"),
        (row(0, edit=lambda w: w["event"]["fpm"]["scheduled_requests"].pop("var_prefill_length")), "accepted"),
        (row(0, edit=lambda w: w["event"]["fpm"]["queued_requests"].update(var_prefill_length=-1)), "bad_field"),
        ("[" * 100_000, "bad_json"),
        ("1" * 5_000, "bad_json"),
    ],
)
def test_a_line_has_the_same_outcome_before_and_after_its_layout_is_known(line, outcome, tmp_path):
    alone = read(write(tmp_path / "a.jsonl", [line]))
    assert outcomes(alone) == {outcome: 1}
    other = [row(i, at=i) for i in range(100, 103)]
    among = read(write(tmp_path / "b.jsonl", [*other, line, *other]))
    assert outcomes(among) == {"accepted": 3 + (outcome == "accepted"), "duplicate": 3} | (
        {} if outcome == "accepted" else {outcome: 1}
    )


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


def assert_same(a: Observations, b: Observations) -> None:
    import jax

    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


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
