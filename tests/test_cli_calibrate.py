"""`fpmjax calibrate`: from a template to a folder, a rule and an estimate; what it tells first, and its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import studies

from fpmjax.rule_file import load_rule
from fpmjax.study.template import TRUE

FAST = ("--draws", "50", "--no-figures")


@pytest.fixture
def study(fpm, tmp_path, monkeypatch):
    """The template, in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    assert fpm("calibrate", "--template", "study.csv").code == 0
    return tmp_path / "study.csv"


def test_a_newcomer_gets_from_the_template_to_an_estimate(fpm, study):
    ran = fpm("calibrate", "study.csv", "-o", "mine", "--rule-out", "rule.json", *FAST)
    assert ran.code == 0 and "note: rule.json: the pooled refit" in ran.err
    rule = load_rule("rule.json")
    assert float(rule.slope) == pytest.approx(TRUE[0], abs=0.01)
    assert float(rule.intercept) == pytest.approx(TRUE[1], abs=0.03)
    asked = ("estimate", "embedded", "--select", "tp=1", "--batch", "4", "--kv", "4096", "--draft-length", "2")
    told = fpm(*asked, "--rule", "rule.json").out.splitlines()[-1]
    assert told.startswith(
        f"factor: {rule.slope} * draft + {rule.intercept}, study example: example-8B + mtp".split(" + mtp")[0]
    )
    assert "95 % interval" in told


def test_the_first_ten_lines_tell_what_matters(fpm, study):
    ran = fpm("calibrate", "study.csv", "-o", "mine", *FAST)
    lines = ran.out.splitlines()
    assert len(lines) <= 10 and all(len(line) <= 130 for line in lines)
    document = json.loads((study.parent / "mine" / "result.json").read_text())
    overall, fit = document["overall"], document["refits"][0]
    assert lines[0] == (
        "scored    127 rounds in 16 of 16 configurations; 0 unmatched; 257 excluded (256 warmup, 1 non_graph)"
    )
    text = ran.out
    assert f"MAPE {overall['round_weighted_mape']:.2f} % round-weighted" in text
    assert f"{overall['equal_config_mape']:.2f} % equal-configuration" in text
    assert f"bias {overall['round_weighted_bias']:+.2f} % round-weighted" in text
    assert f"worst {overall['worst_config']['config_mape']:.2f} %: example-gpu, TP1" in text
    assert f"slope {fit['slope_interval'][0]:.4f}..{fit['slope_interval'][1]:.4f}" in text
    assert "look at   nothing: no diagnosis applies" in text
    assert lines[-1] == "folder    mine: begin with README.md and chart.svg"


def test_diagnoses_are_told(fpm, tmp_path):
    table = studies.synthetic(gpus=("H100",), true={studies.MTP: (0.01, 1.0)}, rounds=lambda d: 20)
    pq.write_table(table, tmp_path / "fast.parquet")
    ran = fpm("calibrate", tmp_path / "fast.parquet", "-o", tmp_path / "kept", *FAST)
    assert ran.code == 0 and "look at   rounds cost hardly more than an ordinary pass" in ran.out
    text = (tmp_path / "kept" / "README.md").read_text()
    assert "**draft_time_missing**" in text and "Time the whole round: draft, verification and sampling" in text


def test_without_a_folder_it_only_tells_and_json_is_the_document(fpm, study):
    ran = fpm("calibrate", "study.csv", "--json", *FAST)
    assert ran.code == 0 and ran.document["format"] == "fpmjax calibration study"
    assert sorted(path.name for path in study.parent.iterdir()) == ["study.csv", "study.json"]
    fpm("calibrate", "study.csv", "-o", "mine", *FAST)
    assert (study.parent / "mine" / "result.json").read_text() == ran.out


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(fpm, study):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        assert fpm("calibrate", "study.csv", "-o", name, "--seed", seed, *FAST).code == 0
    a, b, c = ({p.name: p.read_bytes() for p in (study.parent / x).rglob("*") if p.is_file()} for x in "abc")
    assert a == b and a["result.json"] != c["result.json"] and a["study.csv"] == c["study.csv"]
    assert "--seed 7" in json.loads(a["result.json"])["command"]


def test_an_estimator_is_named_in_the_command_without_its_folder(fpm, tmp_path, embedded_path):
    table = studies.synthetic(gpus=("B300",), true={studies.MTP: (0.08, 1.25)}, batches=(4,), rounds=lambda d: 12)
    pq.write_table(table, tmp_path / "s.parquet")
    model = ("--reference", "estimator", "--model", embedded_path, "--select", "tp=1")
    ran = fpm("calibrate", tmp_path / "s.parquet", *model, "--json", *FAST)
    assert ran.code == 0
    assert ran.document["command"].endswith(
        f"--reference estimator --draws 50 --model {embedded_path.name} --select tp=1 --no-figures"
    )
    assert "measured  against the measured reference" in fpm("calibrate", tmp_path / "s.parquet", *model, *FAST).out


def test_the_refit_of_one_group_can_be_written(fpm, tmp_path):
    pq.write_table(studies.synthetic(gpus=("H100",), rounds=lambda d: 12), tmp_path / "s.parquet")
    asked = ("calibrate", tmp_path / "s.parquet", "--rule-out", tmp_path / "rule.json", *FAST)
    assert fpm(*asked, "--rule-of", "Qwen3-8B + eagle3").code == 0
    assert float(load_rule(tmp_path / "rule.json").slope) == pytest.approx(0.1)
    ran = fpm(*asked, "--rule-of", "eagle3")
    assert ran.code == 2 and "no refit of 'eagle3'" in ran.err and "Qwen3-8B + eagle3" in ran.err
    assert ran.out.startswith("scored    576 rounds")  # what was found is told all the same


def test_a_rule_that_cannot_be_written_is_found_before_the_folder(fpm, study):
    for words in (("--rule-of", "nobody"), *(("--rule-out", name) for name in ("no/rule.json", ".", "/dev/full"))):
        assert fpm("calibrate", "study.csv", "-o", "mine", "--rule-out", "rule.json", *words, *FAST).code == 2
        assert not (study.parent / "mine").exists() and not (study.parent / "rule.json").exists()


# Mistakes


@pytest.mark.parametrize(
    "name",
    [
        "study.csv",
        "study.json",
        "link.csv",
        "./study.csv",
        "fixed.json",
        "mine.json",
        "notes.txt",
        "kept/README.md",
        "kept/result.json",
        "kept/errors.png",
        "kept/data/new.json",
        "kept/fixed_rule.json",
        "empty/README.md",
    ],
)
def test_what_is_read_or_kept_is_never_written_over(fpm, study, name):
    fpm("calibrate", "study.csv", "-o", "kept", "--rule-out", "fixed.json", *FAST)
    Path("empty").mkdir()
    Path("notes.txt").write_text("mine")
    Path("mine.json").write_text("{}")
    Path("link.csv").symlink_to("study.csv")
    before = {path: path.read_bytes() for path in study.parent.rglob("*") if path.is_file()}
    out = name.split("/")[0] if "/" in name and name[0] != "." else "new"
    asked = ("study.csv", "--rule", "fixed.json", "--rule-out", name, "-o", out, *FAST)
    sidecar = ("--sidecar", "mine.json") if name == "mine.json" else ()
    told = fpm("calibrate", *asked, "--overwrite", *sidecar).refused("hint: ").err
    assert "which is read" in told or "holds no rule" in told or "is a file of the folder" in told
    assert {path: path.read_bytes() for path in study.parent.rglob("*") if path.is_file()} == before


def test_a_folder_with_its_estimator_in_it_is_made_again_by_its_command(fpm, tmp_path, embedded_path, monkeypatch):
    table = studies.synthetic(gpus=("B300",), true={studies.MTP: (0.08, 1.25)}, batches=(4,), rounds=lambda d: 12)
    pq.write_table(table, tmp_path / "s.parquet")
    model = ("--reference", "estimator", "--model", embedded_path, "--select", "tp=1")
    assert fpm("calibrate", tmp_path / "s.parquet", *model, "-o", tmp_path / "mine", *FAST).code == 0
    assert "with the estimator named above in it" in (tmp_path / "mine" / "README.md").read_text()
    before = (tmp_path / "mine" / "result.json").read_bytes()
    for path in (embedded_path, embedded_path.with_name(f"{embedded_path.stem}.metadata.json")):
        shutil.copy(path, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    assert fpm(*json.loads(before)["command"].split()[1:]).code == 0
    assert Path("result.json").read_bytes() == before
    again = ("calibrate", "data/s.parquet", "-o", ".", "--overwrite", "--reference", "estimator", "--model", ".")
    assert fpm(*again, "--select", "tp=1", *FAST).code == 0


def test_a_folder_keeps_its_own_study_and_replaces_no_other_input(fpm, study):
    assert fpm("calibrate", "study.csv", "-o", "mine", *FAST).code == 0
    again = ("calibrate", "mine/data/study.csv", "-o", "mine", "--overwrite", *FAST)
    assert fpm(*again).code == 0
    assert fpm(*again, "--rule-out", "mine/rule.json").code == 0
    assert fpm(*again, "--rule", "mine/rule.json").code == 0
    assert fpm(*again, "--rule", "mine/fixed_rule.json").code == 0
    study.rename("other.csv")
    Path("study.json").unlink()
    asked = ("calibrate", "other.csv", "--sidecar", "mine/data/study.json", "-o", "mine", "--overwrite", *FAST)
    fpm(*asked).refused("its sidecar mine/data/study.json is a file that -o mine replaces")
    Path("mine/data/link.csv").symlink_to("../../other.csv")
    assert fpm("calibrate", "mine/data/link.csv", *FAST).code == 0


def test_a_folder_is_never_taken_by_surprise(fpm, study):
    assert fpm("calibrate", "study.csv", "-o", "mine", *FAST).code == 0
    fpm("calibrate", "study.csv", "-o", "mine", *FAST).refused("mine holds a study already", "add --overwrite")
    assert fpm("calibrate", "study.csv", "-o", "mine", "--overwrite", *FAST).code == 0
    fpm("calibrate", "study.csv", "-o", ".", *FAST).refused("holds files that are no study")
    fpm("calibrate", "study.csv", "-o", "no/where", *FAST).refused("does not exist")
    fpm("calibrate", "--template", "study.csv").refused("study.csv is there already")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ((), ("no study is given", "--template study.csv")),
        (("study.csv", "--overwrite"), ("--overwrite needs -o",)),
        (("study.csv", "--reference", "estimator"), ("needs --model",)),
        (("study.csv", "--model", "embedded"), ("add --reference estimator",)),
        (("study.csv", "--rule-of", "x"), ("--rule-out rule.json",)),
        (("study.csv", "--rule-out", "no/where.json"), ("the folder no does not exist",)),
        (("study.csv", "--seed", "-1"), ("is not a whole number",)),
        (("study.csv", "--draws", "0"), ("is not a whole number from 1",)),
        (("study.csv", "--draws", "1000000000"), ("are too many: 2,000 do, at most 1,000,000",)),
        (("study.csv", "--repetition", "every"), ("is not a whole number",)),
        (("study.csv", "--sidecar", "none.json"), ("none.json cannot be read",)),
        (("--template", "no/x.csv"), ("no/x.csv cannot be written",)),
        (("study.csv", "--rule", "study.csv"), ("is no rule file",)),
        (("study.csv", "--repetition", "5"), ("no speculative rounds of repetition 5",)),
        (("none.csv",), ("cannot be read",)),
        (("study.json",), ("name a .parquet",)),
        (("study.csv", "--template", "x.csv"), ("leave one of them out",)),
        (("--template", "x.parquet"), ("is no CSV file by its name",)),
    ],
)
def test_mistakes_are_told_with_what_helps(fpm, study, words, texts):
    fpm("calibrate", *words).refused(*texts, "hint: ")


def test_rows_that_break_a_rule_are_named(fpm, study):
    lines = study.read_text().splitlines()
    names = lines[0].split(",")
    broken = lines[41].split(",")
    broken[names.index("total_kv_tokens")] = '"1,024"'
    study.write_text("\n".join([*lines[:41], ",".join(broken), *lines[42:]]) + "\n")
    study.with_suffix(".json").unlink()
    fpm("calibrate", "study.csv").refused("line 42 (row 41)", "total_kv_tokens", "'1,024'")


def test_one_draft_length_makes_no_rule_and_no_reference_no_score(fpm, study):
    table = pacsv.read_csv("study.csv")
    depth, kind = (table.column(name).to_pylist() for name in ("draft_length", "kind"))
    pq.write_table(table.filter(pa.array([d in (0, 2) for d in depth])), "one.parquet")
    ran = fpm("calibrate", "one.parquet", "--rule-out", "rule.json", *FAST)
    assert "refit     none: one draft length fixes no slope" in ran.out
    assert ran.code == 2 and "measure two draft lengths or more" in ran.err
    pq.write_table(table.filter(pa.array([k == "sd" for k in kind])), "alone.parquet")
    ran = fpm("calibrate", "alone.parquet", *FAST)
    assert ran.code == 3 and "no round has a reference" in ran.out and "batch (d + 1) B" in ran.err


def test_help_describes_the_file_and_the_overview_names_the_command(fpm):
    text = fpm("calibrate", "--help").out
    for word in ("kind (stp: ordinary", "total_kv_tokens", "--template", "--rule-out", "examples:"):
        assert word in text
    assert "calibrate" in fpm("--help").out
