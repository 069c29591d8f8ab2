"""What a study keeps of its sources: the bytes that were read, the sidecar that was read, columns that it ignored."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from asking import refusal
from studies import six_rounds, synthetic

from fpmjax.errors import OptionError
from fpmjax.study.read import read_study
from fpmjax.study.result import run_study
from fpmjax.study.template import write_template

SIX = six_rounds()
SMALL = synthetic(gpus=("A",), contexts=(1024,), batches=(1,), depths=(1, 2), rounds=lambda d: 4)


def csv_of(table: pa.Table, path, mark: str = ","):
    pacsv.write_csv(table, path, pacsv.WriteOptions(delimiter=mark))
    return path


def saved(study, folder):
    return run_study(study, draws=20, progress=False).save(folder, figures=False)


# --- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [".csv", ".parquet"])
@pytest.mark.parametrize("then", ["rewritten", "removed", "left"])
def test_the_folder_holds_the_bytes_that_were_read(tmp_path, monkeypatch, end, then):
    monkeypatch.chdir(tmp_path)
    name = f"rounds{end}"
    (csv_of if end == ".csv" else pq.write_table)(SMALL, name)
    before = (tmp_path / name).read_bytes()
    (tmp_path / "rounds.json").write_text('{"protocol": "by hand"}')
    study = read_study(name)
    if then == "rewritten":
        (tmp_path / name).write_bytes(b"other")
        (tmp_path / "rounds.json").write_text("{}")
    elif then == "removed":
        (tmp_path / name).unlink()
        (tmp_path / "rounds.json").unlink()
    else:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    folder = saved(study, tmp_path / "kept")
    assert (folder / "data" / name).read_bytes() == before
    assert (folder / "data" / "rounds.json").read_text() == '{"protocol": "by hand"}'


@pytest.mark.parametrize("beside", [True, False])
def test_the_sidecar_that_was_read_is_kept_where_a_rebuild_finds_it(tmp_path, fpm, monkeypatch, beside):
    csv_of(SMALL, tmp_path / "e.csv")
    (tmp_path / "mine.json").write_text('{"protocol": "mine", "clock_ghz": 1.234567890123456789}')
    if beside:
        (tmp_path / "e.json").write_text('{"protocol": "not mine"}')
    ran = fpm(
        "calibrate", tmp_path / "e.csv", "--sidecar", tmp_path / "mine.json", "-o", tmp_path / "a", "--no-figures"
    )
    assert ran.code == 0, ran
    folder = saved(read_study(tmp_path / "e.csv", sidecar=tmp_path / "mine.json"), tmp_path / "kept")
    for one in (tmp_path / "a", folder):
        assert (one / "data" / "e.json").read_text() == (tmp_path / "mine.json").read_text()
        assert json.loads((one / "result.json").read_text())["inputs"][0]["sidecar"] == {
            "protocol": "mine",
            "clock_ghz": 1.2345678901234568,  # as it is given, and not to nine digits
        }
    before = (folder / "result.json").read_bytes()
    monkeypatch.chdir(folder)
    assert fpm(*json.loads(before)["command"].split()[1:]).code == 0
    assert (folder / "result.json").read_bytes() == before


def test_a_table_keeps_its_sidecar_too(tmp_path):
    note = {"protocol": "in memory", "sha256": read_study(SMALL).digest}
    (tmp_path / "mine.json").write_text(json.dumps(note))
    folder = saved(read_study(SMALL, sidecar=tmp_path / "mine.json"), tmp_path / "kept")
    assert json.loads((folder / "data" / "study.json").read_text()) == note
    assert read_study(folder / "data" / "study.parquet").sidecar == note


@pytest.mark.parametrize(
    "text", ['{"protocol": "\\ud800"}', '{"\\udfff": 1}', '{"a": ["\\ud800"]}', '{"a": ' + "[" * 70 + "]" * 70 + "}"]
)
def test_a_sidecar_that_could_not_be_written_again_is_refused(tmp_path, text):
    csv_of(SIX, tmp_path / "e.csv")
    (tmp_path / "e.json").write_text(text)
    assert refusal(OptionError, read_study, tmp_path / "e.csv")[0] == "study_sidecar"


@pytest.mark.parametrize("name", [5, "", "a\0", b"mine.json", "a\ud800"])
def test_what_names_no_sidecar_is_refused(name):
    assert refusal(OptionError, read_study, SIX, sidecar=name)[0] == "study_sidecar"


@pytest.mark.parametrize("name", ["a\0.csv", "a\udcff.csv", ""])
def test_what_names_no_study_is_refused(name):
    assert refusal(OptionError, read_study, name)[0] == "study_file"


@pytest.mark.parametrize("anchors", [None, 1, "yes"])
def test_anchors_are_a_yes_or_no(anchors):
    assert refusal(OptionError, read_study, SIX, anchors=anchors)[0] == "study_anchors"


# --- columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("CUDA_GRAPH", "cuda_graph"),
        ("cuda_graf", "cuda_graph"),
        ("cuda graph", "cuda_graph"),
        ("active_req", "active_requests"),
        ("active", "active_requests"),
        (" reason", "reason"),
        ("reasons", "reason"),
        ("var", "var_kv"),
        ("emited_tokens", "emitted_tokens"),
        ("GPU", "gpu"),
    ],
)
@pytest.mark.parametrize("file", [True, False])
def test_a_name_that_is_nearly_a_column_is_refused(tmp_path, name, close, file):
    rounds = SIX.append_column(name, pa.array(["x"] * 9))
    with pytest.raises(OptionError) as caught:
        read_study(csv_of(rounds, tmp_path / "e.csv") if file else rounds)
    assert caught.value.code == "study_columns" and repr(name) in str(caught.value)
    assert close in str(caught.value).split("\nhint: ")[1]


def test_a_required_column_in_another_case_is_told(tmp_path):
    rounds = SIX.rename_columns([name.upper() for name in SIX.column_names])
    for source in (rounds, csv_of(rounds, tmp_path / "e.csv")):
        with pytest.raises(OptionError, match="did you mean study_id"):
            read_study(source)


def test_other_columns_are_named_as_ignored(tmp_path, fpm):
    extra = ["host", "accepted_tokens", "draft_tokens", "timestamp", "odd\nname"]
    rounds = SMALL
    for name in extra:
        rounds = rounds.append_column(name, pa.array(["x"] * len(rounds)))
    for source in (rounds, csv_of(rounds, tmp_path / "e.csv")):
        study = read_study(source)
        assert study.ignored == tuple(extra)
        found = run_study(study, draws=20, progress=False).document
        assert found["inputs"][0]["ignored_columns"] == extra
    assert "ignored_columns" not in run_study(SMALL, draws=20, progress=False).document["inputs"][0]
    text = fpm("calibrate", tmp_path / "e.csv", "--draws", 20).out
    assert "ignored   columns host, accepted_tokens, draft_tokens, timestamp, 'odd\\nname'\n" in text


@pytest.mark.parametrize(("mark", "word"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_another_delimiter_is_named(tmp_path, mark, word):
    path = csv_of(SIX, tmp_path / "e.csv", mark)
    code, said = refusal(OptionError, read_study, path)
    assert (code, said) == ("study_file", f"e.csv, line 1: fields are separated by {word}, not by commas")
    path.write_text(path.read_text().replace("M", "1,5"))  # with decimal commas
    assert word in refusal(OptionError, read_study, path)[1]


@pytest.mark.parametrize("text", ["\n", "\n\n\n", " \n", ",,\n,,\n", "\r\n"])
def test_a_file_of_nothing_is_told(tmp_path, text):
    (tmp_path / "e.csv").write_text(text)
    assert refusal(OptionError, read_study, tmp_path / "e.csv")[0] == "study_file"


def test_a_file_of_something_else_lacks_its_columns(tmp_path):
    (tmp_path / "e.csv").write_text("a,b\n1,2\n")
    assert refusal(OptionError, read_study, tmp_path / "e.csv")[1].startswith("e.csv lacks the columns study_id, gpu")


# --- the template ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no/x.csv", "a\0.csv", "", 5, None])
def test_a_template_that_cannot_be_written_is_told(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, said = refusal(OptionError, write_template, name)
    assert code == "template" and ".partial" not in said and not os.listdir(tmp_path)
