"""The committed studies come out of their command again, byte for byte, and hold what their specification asks."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CALIBRATION = ROOT / "calibration"
sys.path.insert(0, str(ROOT))

common: Any = importlib.import_module("calibration.common")

NAMES = {"TP", "RTX", "PR"}  # before a number that is part of a name
ITERATIONS = ("mixed", "plain decode", "prefill", "several ranks", "idle", "decode beside fully cached prompts")
NUMBER = re.compile(r"(?<![\w.,-])(?:[A-Za-z]+ )?\d[\d.,]*\b")


def rebuilt(name: str, folder: Path) -> dict[str, Any]:
    """The result of a study that was rebuilt into a folder, where each of its files is the committed one."""
    study: Any = importlib.import_module(f"calibration.{name}.rebuild")
    common.rebuild(study.measure, study.readme, study.chart, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(common.FILES)
    for file in common.FILES:
        fresh, committed = (where / file for where in (folder, CALIBRATION / name))
        assert fresh.read_text().splitlines() == committed.read_text().splitlines(), file
        assert fresh.read_bytes() == committed.read_bytes(), file
    return json.loads((folder / "result.json").read_text())


def test_the_published_depth_study(tmp_path):
    found = rebuilt("published_depth_study", tmp_path)
    assert found["cell_count"] == 32 and found["configurations_per_cell"] == 6
    assert found["plain_mean_of_cells"] == pytest.approx(7.549, abs=5e-4)
    assert found["by_method"] == {"mtp": pytest.approx(4.226, abs=5e-4), "eagle3": pytest.approx(10.872, abs=5e-4)}
    assert list(found["by_depth"].values()) == pytest.approx([5.65, 7.63, 8.25, 8.68], abs=6e-3)
    low, high = found["plain_mean_range"]
    assert not low <= found["published"]["equal_config_mape"] <= high
    assert found["published"]["p90_unnamed"] > found["largest_cell"]["mape"]


def test_public_step_times(tmp_path):
    found = rebuilt("public_step_times", tmp_path)
    fit = found["refit"]
    assert fit["descriptive_only"] and fit["rounds"] == 9
    assert (fit["slope"], fit["intercept"]) == (pytest.approx(0.0749, abs=5e-5), pytest.approx(1.042, abs=5e-4))
    assert fit["rule_round_weighted_mape"] == pytest.approx(17.3, abs=0.05)
    assert fit["refit_round_weighted_mape"] == pytest.approx(4.4, abs=0.05)
    assert fit["other"]["rounds"] == 7 and "errs by -10 to +9 %" in found["answer"], "the pair belongs to one source"
    goodput = {row["batch"]: (row["best_by_measured"], row["best_by_rule"]) for row in found["goodput"]}
    assert goodput == {1: (3, 3), 4: (3, 3), 16: (3, 3), 64: (1, 0), 256: (0, 0)}
    assert (found["same_choice"], found["batches_with_a_choice"]) == (3, 4), "at 256 the rule has nothing to choose"
    ratio = {(r["batch"], r["draft_length"]): r["ratio"] for r in found["rounds"] if r["source"] == "vLLM PR 32374"}
    assert [ratio[1, d] for d in (1, 3, 5)] == pytest.approx([1.125, 1.339, 1.553], abs=5e-4)
    assert ratio[16, 3] == pytest.approx(1.224, abs=6e-4)
    assert found["outlier"]["round_ms"] == 120.57, "kept, and not scored for want of a reference alone"
    assert found["scored"] + found["without_reference"] + sum(s["ordinary_steps"] for s in found["sources"]) == 53
    eagle = [x for x in found["acceptance"] if (x["method"], x["dataset"]) == ("eagle", "gsm8k")]
    assert [x["error_percent"] for x in eagle] == pytest.approx([2.5, 5.8, 10.1], abs=0.05)


def test_hold_outs_on_b300(tmp_path):
    found = rebuilt("b300_qwen3_32b", tmp_path)
    rung, point = ([x[way]["equal_point_mape"] for x in found["direct"].values()] for way in ("rung", "point"))
    assert rung == pytest.approx([1.24, 1.06, 1.20], abs=6e-3) and max(rung) <= found["gates"]["rung"] == 2.0
    assert point == pytest.approx([0.39, 0.37, 0.60], abs=6e-3) and max(point) <= found["gates"]["point"] == 1.3
    worst = [x["rung"]["largest_point_ape"] for x in found["direct"].values()]
    assert worst == pytest.approx([12.1, 10.1, 9.7], abs=0.06)
    assert [found["decreasing"][f"B300 TP{tp}"] for tp in (1, 2, 4)] == [8, 13, 19]
    widened = found["widened"]
    assert widened["asked"] == widened["inside"]["lattice B300 TP1"] == 24 and widened["inside"]["live rounds TP1"] == 0
    assert [x["ms"] for x in widened["examples"]] == pytest.approx([13.403, 14.035, 15.078], abs=6e-4)
    assert widened["live_tp1_least_kv_at_it"] == 74_883
    for clock in found["clocks"].values():
        assert 9 <= clock["equal_cell_mape"] <= 12.1 and -12 <= clock["equal_cell_bias"] <= -8.9
    other = found["composed"]
    assert other["lattice"] == "RTX 4090" and other["lattice"] not in found["direct"] | found["lattice_fits"]
    assert [other["direct"][way]["equal_point_mape"] for way in ("rung", "point")] == pytest.approx(
        [1.29, 0.28], abs=6e-3
    )
    assert "0.37 to 0.60 %" in found["answer"] and "1.06 to 1.24 %" in found["answer"], "B300 alone"
    for places in (*found["lattice_fits"].values(), other["fits"]):
        assert places["learned"]["narrow"]["equal_point_mape"] <= 2.0
        assert places["learned"]["wide"]["equal_point_mape"] <= 7.0


def test_parity_with_the_peer(tmp_path):
    found = rebuilt("peer_parity", tmp_path)
    for kind, count in (found["bits"] | found["words"]).items():
        assert count["same"] + count["meant_to_differ"] == count["compared"], kind
    bits, again, words, fits = (found["totals"][name] for name in ("bits", "again", "words", "fits"))
    assert bits["compared"] > 1800 and words["compared"] > 1400 and fits["numbers"] > 1000
    assert again["same"] == again["compared"] == sum(found["bits"][kind]["compared"] for kind in ITERATIONS)
    assert (bits["meant_to_differ"], words["meant_to_differ"]) == (4, 21)
    assert fits["relatively_apart_at_most"] <= 1e-9


def test_only_what_we_mean_to_differ_in_counts_as_meant():
    kinds: Any = importlib.import_module("calibration.peer_parity.kinds")
    refused = "regression: refused or not ready"
    assert list(kinds.near("regression", "error", 8.0, True)) == [kinds.Words(refused, False, True)]
    assert list(kinds.near("regression", None, 8.0, True)) == [kinds.Words(refused, False, False)]
    assert list(kinds.near("regression", "error", 8.0)) == [kinds.Words(refused, False, False)]
    assert list(kinds.near("regression", math.nan, None)) == [kinds.Words(refused, True)]
    assert list(kinds.near("regression", 8.0, 8.0)) == [kinds.Within("regression", 0.0)]
    assert list(kinds.near("regression", 1e-9, 0.0)) == [kinds.Bits("fitted models, idle", False)]


def test_the_index_is_told_from_the_results():
    text = (CALIBRATION / "README.md").read_text()
    assert text == common.index()
    assert all(f"({name}/README.md)" in text for name in common.STUDIES)
    assert len(text.splitlines()) < 50, "one screen"


@pytest.mark.parametrize("name", common.STUDIES)
def test_inputs_are_what_the_result_says_and_have_a_notice(name):
    folder = CALIBRATION / name
    inputs = json.loads((folder / "result.json").read_text())["inputs"]
    own = folder / "data"
    for path, digest in inputs.items():
        base = folder if own.is_dir() else ROOT
        assert hashlib.sha256((base / path).read_bytes()).hexdigest() == digest, path
    if own.is_dir():
        assert {path.name for path in own.iterdir()} == {Path(path).name for path in inputs} | {"NOTICE.md"}
        notice = (own / "NOTICE.md").read_text().replace("{1,4}", "1")
        assert all(Path(path).name.replace("tp4", "tp1") in notice for path in inputs)


@pytest.mark.parametrize("name", common.STUDIES)
def test_no_number_of_a_page_is_typed_by_hand(name):
    """Beside places to put numbers in, a page's text holds only those of names (TP 1) and formulas (in code)."""
    text = (CALIBRATION / name / "page.md").read_text()
    text = re.sub(r"`[^`]*`|\{[^}]*\}|aisimulate 630|vLLM 0\.20\.1|d = \d", "", text)
    typed = [found for found in NUMBER.findall(text) if found.split(" ")[0] not in NAMES]
    assert typed == []


def test_measurements_shared_with_the_benchmarks_are_the_same():
    for path in (CALIBRATION / "b300_qwen3_32b" / "data").glob("*.gz"):
        assert path.read_bytes() == (ROOT / "benchmarks" / "data" / path.name).read_bytes()
