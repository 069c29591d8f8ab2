"""A study from file to document to evidence folder: what it says, that it repeats to the byte, and its rule."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import studies

import fpmjax
from fpmjax.errors import OptionError
from fpmjax.rule import SpeculativeRule
from fpmjax.rule_file import load_rule
from fpmjax.study.folder import FIGURES
from fpmjax.study.read import read_study
from fpmjax.study.result import KEYS, run_study
from fpmjax.study.scored import score
from fpmjax.study.summary import summary
from fpmjax.study.template import write_template

SMALL = {"gpus": ("H100",), "depths": (1, 2, 4), "batches": (1, 4), "rounds": lambda d: 12, "repetitions": (0, 1)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small synthetic study with noise, as a file."""
    path = tmp_path_factory.mktemp("study") / "small.parquet"
    pq.write_table(studies.synthetic(**SMALL, cluster_noise=0.02, round_noise=0.01), path)
    return path


@pytest.fixture(scope="module")
def result(small):
    return run_study(small, draws=200, progress=False)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_document_has_its_keys_in_order_and_plain_values(result):
    assert tuple(result.document) == KEYS
    assert json.loads(result.json()) == result.document
    for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", result.json()):
        digits = number.split("e")[0].replace(".", "").lstrip("-0")
        assert len(digits) <= 9, number


def test_it_says_what_was_scored_against_what(result):
    document = result.document
    assert document["overall"]["rounds"] == 2 * 3 * 2 * 2 * 12
    assert document["rows"]["sd"] == {"rows": 2 * 288 + 2 * 24 * 16, "excluded": {"warmup": 768}}
    assert document["reference"]["mode"] == "measured" and document["rule"]["slope"] == "0.08"
    assert document["scope"]["gpu"] == ["H100"] and document["scope"]["method"] == ["eagle3", "mtp"]
    assert [entry["file"] for entry in document["inputs"]] == ["data/small.parquet"]
    assert len(document["cells"]) == 6 and len(document["configurations"]) == 24
    assert all(cell["cell_round_weighted_mape_interval"] for cell in document["cells"])
    groups = list(dict.fromkeys(fit["group"] for fit in document["refits"]))
    assert groups == ["pooled", "Qwen3-8B + eagle3", "Qwen3.5-4B + mtp"] and len(document["refits"]) == 18
    assert document["refits"][0]["slope_interval"][0] < document["refits"][0]["slope"]


def test_the_study_of_192_configurations_has_its_oracles():
    document = run_study(studies.synthetic(), draws=50, progress=False).document
    overall = document["overall"]
    assert overall["rounds"] == 14400 and overall["scored_configurations"] == 192
    assert overall["round_weighted_mape"] == pytest.approx(2.00346393, abs=1e-7)
    assert overall["equal_config_mape"] == pytest.approx(1.86167346, abs=1e-7)
    fits = {(fit["group"], fit["loss"], fit["weights"]): fit for fit in document["refits"]}
    fit = fits["pooled", "rel_l2", "round"]
    assert (fit["slope"], fit["intercept"]) == pytest.approx((0.09082119, 1.19684088), abs=1e-7)
    fit = fits["pooled", "rel_l2", "configuration"]
    assert (fit["slope"], fit["intercept"]) == pytest.approx((0.09080033, 1.19688633), abs=1e-7)
    fit = fits["Qwen3-8B + eagle3", "rel_l2", "round"]
    assert (fit["slope"], fit["intercept"]) == pytest.approx((0.10, 1.15), abs=1e-9)


def test_the_folder_is_whole_and_rebuilds_to_the_byte(result, tmp_path, fpm, monkeypatch):
    folder = result.save(tmp_path / "kept", figures=False)
    before = files_of(folder)
    assert list(before) == ["README.md", "chart.svg", "data/small.parquet", "result.json"]
    monkeypatch.chdir(folder)
    ran = fpm(*result.document["command"].split()[1:])
    assert ran.code == 0, ran
    assert {name: data for name, data in files_of(folder).items() if name not in FIGURES} == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_nothing_in_it_tells_where_or_when_it_was_made(result, tmp_path):
    for name, data in files_of(result.save(tmp_path / "kept", figures=False)).items():
        if not name.startswith("data/"):
            assert str(tmp_path).encode() not in data
            assert not re.search(rb"20\d\d-\d\d-\d\d", data)


def test_the_format_of_the_file_and_the_order_of_its_rows_change_no_number(small, result, tmp_path):
    table = pq.read_table(small)
    shuffled = table.take(list(reversed(range(table.num_rows))))
    pacsv.write_csv(shuffled, tmp_path / "small.csv")
    for source in (shuffled, tmp_path / "small.csv"):
        other = run_study(source, draws=200, progress=False).document
        differ = [name for name in KEYS if other[name] != result.document[name]]
        assert set(differ) <= {"inputs", "command"}
        assert other["inputs"][0]["content_sha256"] == result.document["inputs"][0]["content_sha256"]


def test_the_sidecar_is_kept_beside_the_data(tmp_path):
    table, sidecar = write_template(tmp_path / "study.csv")
    found = run_study(table, draws=20, progress=False)
    assert found.files == {"data/study.csv": table.read_bytes(), "data/study.json": sidecar.read_bytes()}
    assert "SYNTHETIC" in (found.save(tmp_path / "kept", figures=False) / "README.md").read_text()


def test_an_older_study_is_replaced_and_other_files_stay(small, result, tmp_path):
    table, _ = write_template(tmp_path / "study.csv")
    folder = run_study(table, draws=20, progress=False).save(tmp_path / "kept")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="holds a study already"):
        result.save(folder)
    result.save(folder, overwrite=True, figures=False)
    names = ["README.md", "chart.svg", "data/small.parquet", "notes.txt", "result.json"]
    assert list(files_of(folder)) == names
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text("{}")
    with pytest.raises(OptionError, match="no study"):
        result.save(tmp_path / "other", overwrite=True)
    with pytest.raises(OptionError, match="is a file"):
        result.save(table, overwrite=True)


def broken(folder, change):
    older = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(change if isinstance(change, str) else json.dumps(older | change))


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": 5},
        {"inputs": None},
        {"inputs": [5]},
        {"inputs": [{"file": 5}]},
        {"inputs": {"a": 1}},
        "[" * 10**5,
        "{",
    ],
)
def test_a_broken_result_is_told_before_anything_is_replaced(result, tmp_path, change):
    folder = result.save(tmp_path / "kept", figures=False)
    broken(folder, change)
    before = files_of(folder)
    with pytest.raises(OptionError, match="no study, or a broken"):
        result.save(folder, overwrite=True)
    assert files_of(folder) == before


@pytest.mark.parametrize(
    "name", ["data/a\0", "data/\ud800", "data/..", "data/.", "../x", "data/deep", "/etc/x", "result.json"]
)
def test_odd_names_in_an_older_result_are_left_alone(result, tmp_path, name):
    folder = result.save(tmp_path / "kept", figures=False)
    (tmp_path / "x").write_text("mine")
    (folder / "data" / "deep").mkdir()
    before = files_of(folder)
    broken(folder, {"inputs": [{"file": name}]})
    result.save(folder, overwrite=True, figures=False)
    assert files_of(folder) == before and (tmp_path / "x").exists() and (folder / "data" / "deep").is_dir()


@pytest.mark.parametrize("name", ["chart.svg", "README.md", "data/small.parquet", "data"])
def test_what_is_no_file_is_never_replaced(result, tmp_path, name):
    folder = result.save(tmp_path / "kept", figures=False)
    if name == "data":
        (folder / "data").rename(tmp_path / "data")
        (folder / "data").write_text("mine")
    else:
        (folder / name).unlink()
        (folder / name).mkdir()
    before = files_of(folder)
    with pytest.raises(OptionError, match="is no f"):
        result.save(folder, overwrite=True, figures=False)
    assert files_of(folder) == before


@pytest.mark.parametrize("name", ["a\0", "", None, 5, "\ud800"])
def test_what_names_no_folder_is_refused(result, name):
    with pytest.raises(OptionError) as caught:
        result.save(name)
    assert caught.value.code == "folder"


def test_figures_are_written_where_matplotlib_is(result, tmp_path):
    pytest.importorskip("matplotlib")
    folder = result.save(tmp_path / "a")
    assert set(FIGURES) <= set(files_of(folder))
    assert files_of(folder) == files_of(result.save(tmp_path / "b"))


def test_every_number_of_the_readme_is_one_of_the_document(result, tmp_path):
    text = (result.save(tmp_path / "kept", figures=False) / "README.md").read_text()
    overall, fit = result.document["overall"], result.document["refits"][0]
    assert f"| {overall['equal_config_mape']:.2f} |" in text
    assert f"{fit['slope']:.4f} ({fit['slope_interval'][0]:.4f}..{fit['slope_interval'][1]:.4f})" in text
    assert result.document["inputs"][0]["sha256"] in text
    assert "\n".join(summary(result.document)) in text
    assert "conditional on the frozen reference and the tested configurations" in " ".join(text.split())


def test_the_refit_becomes_a_rule_with_its_interval(result, tmp_path):
    rule = result.rule()
    fit = result.document["refits"][0]
    assert float(rule.slope) == fit["slope"] and float(rule.intercept) == fit["intercept"]
    assert rule.interval == (tuple(fit["slope_interval"]), tuple(fit["intercept_interval"]), 0.95, 24)
    assert "288 rounds in 24 configurations" in rule.provenance and "H100" in rule.provenance
    result.save_rule(tmp_path / "rule.json")
    assert load_rule(tmp_path / "rule.json") == rule
    told = json.loads((tmp_path / "rule.json").read_text())["study"]
    assert told["inputs"][0]["sha256"] == result.document["inputs"][0]["sha256"]
    assert result.rule("Qwen3-8B + eagle3").slope != rule.slope
    with pytest.raises(OptionError, match="Qwen3-8B \\+ eagle3"):
        result.rule("Qwen3-8B")


def test_a_rule_of_ones_own_is_judged_and_kept(small, result, tmp_path):
    mine = SpeculativeRule("0.09", "1.2", "my engine")
    found = run_study(small, rule=mine, draws=20, progress=False)
    assert found.document["rule"] == mine.document()
    assert found.document["overall"]["round_weighted_mape"] < result.document["overall"]["round_weighted_mape"]
    folder = found.save(tmp_path / "kept", figures=False)
    assert load_rule(folder / "fixed_rule.json") == mine
    assert found.document["command"].endswith("--draws 20 --rule fixed_rule.json")


def test_one_draft_length_is_singular_and_gives_no_rule(tmp_path):
    found = run_study(studies.synthetic(**(SMALL | {"depths": (3,)})), draws=20, progress=False)
    fit = found.document["refits"][0]
    assert fit["status"] == "singular" and fit["slope"] is None and fit["ratio_mean"] > 1
    assert any("one draft length fixes no slope" in line for line in summary(found.document))
    with pytest.raises(OptionError) as caught:
        found.rule()
    assert caught.value.code == "singular"
    found.save(tmp_path / "kept")


def test_an_estimator_as_reference_is_told_apart_from_the_measured_one(embedded_cell, tmp_path):
    table = studies.synthetic(gpus=("B300",), true={studies.MTP: (0.08, 1.25)}, batches=(1, 4), rounds=lambda d: 12)
    model = fpmjax.direct(embedded_cell)
    found = run_study(table, reference="estimator", model=model, draws=20, progress=False)
    document = found.document
    assert document["reference"]["model"]["table_digest"] == embedded_cell.digest
    assert document["beside"]["measured"]["round_weighted_mape"] < 1e-6 < document["overall"]["round_weighted_mape"]
    text = (found.save(tmp_path / "kept", figures=False) / "README.md").read_text()
    assert "% against measured F" in text and "its own error is in every number" in text


def test_a_folder_made_with_a_model_in_python_promises_no_command(embedded_cell, tmp_path, monkeypatch):
    table = studies.synthetic(gpus=("B300",), true={studies.MTP: (0.08, 1.25)}, batches=(4,), rounds=lambda d: 12)
    model, rule = fpmjax.direct(embedded_cell), SpeculativeRule("0.09", "1.2", "mine")
    for given in (model, {("B300", 1, "Qwen3.5-4B"): model}):
        found = run_study(
            table, reference="estimator", model=given, rule=rule, repetition=None, draws=20, progress=False
        )
        folder = found.save(tmp_path / "kept", figures=False, overwrite=True)
        before, line = files_of(folder), found.document["command"]
        text = (folder / "README.md").read_text()
        assert f"```python\n{line}\n```" in text and "fpmjax calibrate" not in text
        assert f"sha256 {model_digest(found.document)[:16]}" in text
        assert line == (
            "fpmjax.run_study('data/study.parquet', model=model, reference='estimator', repetition=None, draws=20, "
            "rule=fpmjax.load_rule('fixed_rule.json')).save('.', overwrite=True)"
        )
        monkeypatch.chdir(folder)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        exec(line, {"fpmjax": fpmjax, "model": given})
        assert files_of(folder) == before


def model_digest(document):
    told = document["reference"]["model"]
    return told["digest"] if "digest" in told else next(iter(told.values()))["digest"]


def test_all_repetitions_can_be_scored(small, tmp_path, fpm, monkeypatch):
    found = run_study(small, repetition=None, draws=20, progress=False)
    assert found.document["overall"]["rounds"] == 2 * 288
    folder = found.save(tmp_path / "kept", figures=False)
    assert "| scored repetition | all |" in (folder / "README.md").read_text()
    before = (folder / "result.json").read_bytes()
    monkeypatch.chdir(folder)
    assert fpm(*found.document["command"].split()[1:]).code == 0
    assert (folder / "result.json").read_bytes() == before


@pytest.mark.parametrize("repetition", [[1], "all", True, 1.0, -1])
def test_a_repetition_is_a_number(small, repetition):
    study = read_study(small)
    for call in (score, run_study):
        with pytest.raises(OptionError) as caught:
            call(study, repetition=repetition)
        assert caught.value.code == "repetition" and "\nhint: " in str(caught.value)


@pytest.mark.parametrize("value", ["x.csv", None, 5])
def test_only_a_study_is_scored(value):
    with pytest.raises(OptionError, match="read_study makes one"):
        score(value)


def test_too_many_draws_are_refused(small):
    with pytest.raises(OptionError, match="at most 1,000,000"):
        run_study(small, draws=10**9)


def test_rows_without_a_context_are_anchors_only(tmp_path):
    table = studies.six_rounds()
    empty = pa.nulls(table.num_rows, pa.int64())
    table = table.set_column(table.column_names.index("initial_context"), "initial_context", empty)
    study = read_study(table, anchors=True)
    with pytest.raises(OptionError, match="row 1 has no initial_context"):
        run_study(study, progress=False)


def test_a_study_without_a_reference_says_so(tmp_path):
    table = studies.synthetic(**SMALL)
    kinds = table.column("kind").to_pylist()
    found = run_study(table.filter([kind == "sd" for kind in kinds]), draws=20, progress=False)
    assert found.document["overall"]["rounds"] == 0 and found.document["refits"] == []
    assert any("no round has a reference" in line for line in summary(found.document))
    folder = found.save(tmp_path / "kept")
    assert "no round was scored" in (folder / "chart.svg").read_text()


def test_anchors_are_scored_and_never_fitted(tmp_path):
    table = studies.six_rounds()
    for name in ("total_kv_tokens", "initial_context"):
        empty = pa.nulls(table.num_rows, pa.int64())
        table = table.set_column(table.column_names.index(name), name, empty)
    found = run_study(table, reference="interpolated_batch", progress=False)
    overall = found.document["overall"]
    assert overall["round_weighted_mape"] == pytest.approx(14.015152, abs=1e-6)
    assert overall["equal_config_mape"] == pytest.approx(9.848485, abs=1e-6)
    assert found.document["refits"] == [] and found.document["intervals"] is None
    text = (found.save(tmp_path / "kept") / "README.md").read_text()
    assert "anchors only, never data for a fit" in text and "context unknown" in text
    with pytest.raises(OptionError, match="have no refit"):
        found.rule()


def test_without_matplotlib_there_are_no_figures(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "errors.png" not in files_of(result.save(tmp_path / "kept"))
    with pytest.raises(fpmjax.FpmError) as caught:
        result.save(tmp_path / "other", figures=True)
    assert caught.value.code == "matplotlib" and not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_finished_is_not_there(result, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(fpmjax.FpmError, match="disk is full"):
        result.save(tmp_path / "kept", figures=False)
    assert list(tmp_path.iterdir()) == []
