"""Engine traces become observations: every line has the outcome that was recorded for it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from observed import assert_same
from traces import CASES, GOOD, code_of, outcomes, read, row, write

from fpmjax import OptionError, TraceError, read_trace

BAD = CASES / "bad.records.000000.jsonl"


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
    ("name", "values"),
    [
        ("group", ["first", b"nearest", 5, ["nearest"], np.array(["nearest", "nearest"])]),
        ("tolerance_ms", [-1.0, float("nan"), float("inf"), True, "5", [5.0], 10**400]),
        ("skip_first", [-1, 1.5, True, None, "3", [1]]),
        ("component", [5, b"c", [1], "", [], ["a", None], {"a": 1}, True, np.array(1.0)]),
        ("strict", [None, 1, "no", []]),
        ("mixed_timing", [None, 1, "yes"]),
        ("progress", [5, "bar", True]),
    ],
)
def test_options_are_checked(name, values):
    for value in values:
        options = {"group": "nearest", "tolerance_ms": 5.0} if name in ("group", "tolerance_ms") else {}
        with pytest.raises(OptionError, match=rf"(?s)^{name}\b.*\nhint: ") as caught:
            read(CASES / GOOD[0], **(options | {name: value}))
        assert caught.value.code == name
    for options in ({"group": "nearest"}, {"tolerance_ms": 1.0}):
        with pytest.raises(OptionError, match="go together"):
            read(CASES / GOOD[0], **options)
    with pytest.raises(OptionError, match=r"^skip_first"):  # before any file is looked for
        read("none.jsonl", skip_first=-1)


def test_numbers_of_numpy_are_options_too():
    path = CASES / "dynamo-fpm.4192.000001.jsonl.gz"
    numbers = {"tolerance_ms": np.float32(5), "skip_first": np.int64(2), "strict": np.True_}
    assert_same(read(path, group="nearest", **numbers), read(path)[2:])
    assert len(read(path, skip_first=10**30)) == 0


def test_paths_that_name_nothing_are_said_so(tmp_path):
    (tmp_path / "x_worker_probe.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("{}")
    for path in (tmp_path, tmp_path / "none.jsonl", str(tmp_path / "*.jsonl"), str(tmp_path / "*")):
        assert code_of(read, path) == "no_files"
    for path in (tmp_path / "notes.txt", tmp_path / "x_worker_probe.json"):
        assert code_of(read, path) == "file"
    assert code_of(read, []) == code_of(read, iter(())) == "no_files"
    for paths in (7, [7], None, b"a.jsonl", [b"a.jsonl"], {"a.jsonl": 1}, "", [""], "a\0.jsonl", "*\0"):
        assert code_of(read, paths) == "paths"
    assert code_of(read, str(tmp_path / ("x" * 5000))) == "file"


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
    assert caught.value.code == "conflict" and "Stream(" not in str(caught.value)
    assert "worker 'w' (namespace 'n', component 'backend', producer 'p'), attention-DP rank 0" in str(caught.value)


def test_the_same_work_after_a_restart_is_no_repeat(tmp_path):
    lives = [row(i, at=100 * life + i) for life in range(3) for i in range(4)]  # equal but for the time observed
    path = write(tmp_path / "a.jsonl", [*lives, *lives[5:7]])
    observations = read(path)
    assert outcomes(observations) == {"accepted": 12, "duplicate": 2} and observations.report["restarts"] == 2
    warm = read(path, skip_first=3)
    assert warm.report["skipped"] == 9 and warm.work.decode_kv[:, 0].tolist() == [103] * 3


def test_a_record_written_twice_in_a_row_is_a_repeat_whenever_it_was_observed(tmp_path):
    rows = [row(0), row(1), row(1, at=500), row(1, at=900), row(2, at=950)]
    observations = read(write(tmp_path / "a.jsonl", rows))
    assert outcomes(observations) == {"accepted": 3, "duplicate": 2} and observations.report["restarts"] == 0
    assert code_of(read, write(tmp_path / "b.jsonl", [*rows[:2], row(1, 0.006, at=500)])) == "conflict"


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
        (
            row(0, num_prefill_requests=1, sum_prefill_tokens=9, extend_lengths=[9, 1, 1], past_kv_lengths=[0, 1, 1]),
            "accepted",
        ),
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
