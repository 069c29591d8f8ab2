"""Calibration files: what is read, and every refusal with its row and column."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from asking import refusal
from hypothesis import given
from hypothesis import strategies as st
from studies import six_rounds, synthetic

from fpmjax.errors import OptionError
from fpmjax.study.columns import COLUMNS, PRIMARY_KEY
from fpmjax.study.exclude import exclude
from fpmjax.study.read import read_study

SIX = six_rounds()
OPTIONAL = {
    "cuda_graph": pa.array([True, None, False] * 3),
    "active_requests": pa.array([None, 1, 1] * 3, pa.int64()),
    "var_kv": pa.array([None, 0.0, 2.5] * 3),
    "reason": pa.array([None, "", "paused"] * 3),
}
RICH = SIX
for name, column in OPTIONAL.items():
    RICH = RICH.append_column(name, column)


def csv_text(rounds: pa.Table = SIX) -> list[list[str]]:
    """The fields of a CSV, the header first; row i of the study is entry i, line i + 1."""
    rows = [["" if v is None else str(v) for v in row.values()] for row in rounds.to_pylist()]
    return [rounds.column_names, *rows]


def written(folder, fields: list[list[str]], **over: str):
    """Row 3 changed, as a file."""
    changed = [list(row) for row in fields]
    for name, value in over.items():
        changed[3][fields[0].index(name)] = value
    path = folder / "rounds.csv"
    path.write_text("".join(",".join(row) + "\n" for row in changed))
    return path


def saved(folder, rounds: pa.Table, end: str):
    path = folder / f"rounds{end}"
    if end == ".parquet":
        pq.write_table(rounds, path)
    else:
        sink = pa.BufferOutputStream()
        pacsv.write_csv(rounds, sink)
        content = sink.getvalue().to_pybytes()
        path.write_bytes(gzip.compress(content) if end.endswith(".gz") else content)
    return path


# --- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [".parquet", ".csv", ".csv.gz"])
@pytest.mark.parametrize("rounds", [SIX, RICH, synthetic(gpus=("A",), contexts=(1024,))])
def test_every_format_says_the_same(tmp_path, rounds, end):
    memory, file = read_study(rounds), read_study(path := saved(tmp_path, rounds, end))
    assert file.words == memory.words and list(file.columns) == [column.name for column in COLUMNS]
    for name, values in memory.columns.items():
        np.testing.assert_array_equal(file.columns[name], values, strict=True)
    assert file.table().equals(memory.table()) and file.content() == memory.digest
    assert file.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_study(file.table()).table().equals(file.table())


def test_what_optional_columns_leave_out_reads_as_unsaid():
    study = read_study(RICH)
    assert study.columns["cuda_graph"].tolist() == [1, -1, 0] * 3
    assert study.columns["active_requests"].tolist() == [-1, 1, 1] * 3
    assert np.isnan(study.columns["var_kv"][0]) and study.columns["var_kv"][2] == 2.5
    assert study.text("reason").tolist() == ["", "", "paused"] * 3
    assert (study.columns["proposed_tokens"] == -1).all() and "proposed_tokens" not in study.table().column_names
    assert study.sd.sum() == 6 and study.rows == 9


@given(st.permutations(range(len(RICH))))
def test_the_digest_of_a_table_does_not_depend_on_the_order_of_rows(order):
    assert read_study(RICH.take(order)).digest == read_study(RICH).digest


def test_the_digest_of_a_table_depends_on_every_value():
    digests = {read_study(RICH).digest}
    for name in ("latency_ms", "total_kv_tokens"):
        column = pc.add(RICH[name], 1)  # pyright: ignore[reportAttributeAccessIssue]
        digests.add(read_study(RICH.set_column(RICH.column_names.index(name), name, column)).digest)
    digests.add(read_study(RICH.drop_columns("reason")).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64()])
def test_integers_of_any_width_and_coded_texts_are_read(kind):
    narrow = SIX.set_column(SIX.column_names.index("batch_size"), "batch_size", SIX["batch_size"].cast(kind))
    narrow = narrow.set_column(narrow.column_names.index("gpu"), "gpu", narrow["gpu"].dictionary_encode())
    assert read_study(narrow).table().equals(read_study(SIX).table())


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_are_read(library):
    pytest.importorskip(library)
    frame = SIX.to_pandas() if library == "pandas" else pytest.importorskip("polars").from_arrow(SIX)
    assert read_study(frame).table().equals(read_study(SIX).table())


def test_a_data_frame_that_mixes_kinds_is_refused():
    pandas = pytest.importorskip("pandas")
    frame = SIX.to_pandas()
    for values in ([1, "2"] * 4 + [1], [None] + [1] * 8):
        mixed = frame.assign(batch_size=pandas.Series(values))
        assert refusal(OptionError, read_study, mixed)[0] == "study_columns"


def test_a_dictionary_of_texts_may_hold_nulls():
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 3), pa.array(["paused", None]))
    assert read_study(SIX.append_column("reason", coded)).text("reason").tolist() == ["paused", "", ""] * 3


def test_blank_lines_are_no_rows_and_lines_are_counted_through_them(tmp_path):
    fields = csv_text()
    path = tmp_path / "rounds.csv"
    lines = [",".join(row) for row in fields]
    path.write_text("\n".join([*lines[:2], "", *lines[2:], "", ""]))
    study = read_study(path)
    assert study.rows == 9 and study.lines is not None and study.lines[:3].tolist() == [2, 4, 5]
    assert study.place(1) == "line 4 (row 2)" and read_study(SIX).place(1) == "row 2"


def test_other_columns_are_left_alone(tmp_path):
    wide = SIX.append_column("host", pa.array(["a, b"] * 9))
    assert read_study(saved(tmp_path, wide, ".csv")).table().equals(read_study(SIX).table())
    assert read_study(wide).table().equals(read_study(SIX).table())


# --- what one field of a CSV may not be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"draft_length": ""}, "draft_length: nothing is given"),
        ({"batch_size": '"1,024"'}, "batch_size: '1,024' is not a whole number"),
        ({"latency_ms": '"1,024.5"'}, "latency_ms: '1,024.5' is not a number"),
        ({"latency_ms": "NaN"}, "latency_ms: 'NaN' is not a number"),
        ({"latency_ms": "inf"}, "latency_ms: 'inf' is not a number"),
        ({"latency_ms": "1e999"}, "latency_ms: inf is no duration"),
        ({"latency_ms": "0x10"}, "latency_ms: '0x10' is not a number"),
        ({"latency_ms": "0"}, "latency_ms: 0.0 is no duration"),
        ({"latency_ms": "-3.5"}, "latency_ms: -3.5 is no duration"),
        ({"latency_ms": ""}, "latency_ms: nothing is given"),
        ({"batch_size": "4.0"}, "batch_size: '4.0' is not a whole number"),
        ({"batch_size": "true"}, "batch_size: 'true' is not a whole number"),
        ({"batch_size": "0"}, "batch_size: 0 is not 1..2147483647"),
        ({"batch_size": "٣"}, "batch_size: '٣' is not a whole number"),
        ({"tp": "0"}, "tp: 0 is not 1..2147483647"),
        ({"repetition": "-1"}, "repetition: -1 is not 0..2147483647"),
        ({"round_index": " 16"}, "round_index: ' 16' is not a whole number"),
        ({"round_index": "99999999999999999999"}, "round_index: '99999999999999999999' is not a whole number"),
        ({"initial_context": "0"}, "initial_context: 0 is not 1..2147483647"),
        ({"total_kv_tokens": ""}, "total_kv_tokens: nothing is given"),
        ({"total_kv_tokens": "-1"}, "total_kv_tokens: -1 is not 0..9007199254740992"),
        ({"topk": "4"}, "topk: 4 is not 1"),
        ({"gpu": ""}, "gpu: nothing is given"),
        ({"gpu": "A "}, "gpu: 'A ' has blanks around it or characters that do not print"),
        ({"timing_scope": "wall"}, "timing_scope: 'wall' is unknown"),
        ({"method": "medusa"}, "method: 'medusa' is unknown"),
        ({"kind": "SD"}, "kind: 'SD' is unknown"),
        ({"draft_length": "0"}, "draft_length: 0 on an sd row"),
        ({"method": "none"}, "method: none on an sd row"),
        ({"kind": "stp"}, "draft_length: 1 on an stp row"),
        ({"kind": "stp", "draft_length": "0"}, "method: mtp on an stp row"),
        (
            {"draft_length": "2000000000", "batch_size": "4"},
            "batch_size: 4 requests of draft length 2000000000 are 8000000004 rows",
        ),
        ({"round_index": "16"}, "round_index: the same round as line 3 (row 2)"),
    ],
)
def test_a_field_is_refused_by_line_row_and_column(tmp_path, over, said):
    path = written(tmp_path, csv_text(), **over)
    assert refusal(OptionError, read_study, path) == ("study_rows", f"rounds.csv, line 4 (row 3), {said}")


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"cuda_graph": "1"}, "cuda_graph: '1' is not true or false"),
        ({"active_requests": "2"}, "active_requests: 2 is above batch_size = 1"),
        ({"active_requests": "-1"}, "active_requests: -1 is not 0..2147483647"),
        ({"emitted_tokens": "3"}, "emitted_tokens: 3 is above (draft_length + 1) * batch_size = 2"),
        ({"proposed_tokens": "2"}, "proposed_tokens: 2 is above draft_length * batch_size = 1"),
        ({"var_kv": "nan"}, "var_kv: 'nan' is not a number"),
        ({"var_kv": "-1"}, "var_kv: -1.0 is no variance"),
    ],
)
def test_an_optional_field_is_refused_too(tmp_path, over, said):
    rounds = RICH
    for name in ("emitted_tokens", "proposed_tokens"):
        rounds = rounds.append_column(name, pa.nulls(9, pa.int64()))
    path = written(tmp_path, csv_text(rounds), **over)
    assert refusal(OptionError, read_study, path) == ("study_rows", f"rounds.csv, line 4 (row 3), {said}")


def test_several_findings_are_told_at_once_and_the_rest_counted(tmp_path):
    fields = csv_text()
    place = {name: i for i, name in enumerate(fields[0])}
    for row in range(1, 9):
        fields[row][place["latency_ms"]] = "NaN"
    fields[2][place["topk"]] = "2"
    code, said = refusal(OptionError, read_study, written(tmp_path, fields))
    assert code == "study_rows"
    assert said.splitlines() == [
        "rounds.csv: 8 rows are refused",
        *[
            f"  line {row + 1} (row {row}), "
            + ("topk: 2 is not 1" if row == 2 else "latency_ms: 'NaN' is not a number")
            for row in range(1, 6)
        ],
        "  and 3 more",
    ]


def test_a_round_marked_invalid_needs_no_latency(tmp_path):
    fields = csv_text(RICH)
    study = read_study(written(tmp_path, fields, latency_ms="", reason="invalid"))
    assert np.isnan(study.columns["latency_ms"][2]) and exclude(study).reasons[exclude(study).code[2] - 1] == "invalid"
    assert read_study(study.table()).content() == study.content()
    assert refusal(OptionError, read_study, written(tmp_path, fields, latency_ms="", reason="odd"))[0] == "study_rows"


@given(st.sampled_from(csv_text(RICH)[0]), st.text(max_size=6))
def test_any_text_in_a_field_is_read_or_refused(name, text):
    fields = csv_text(RICH)
    with tempfile.TemporaryDirectory() as folder:
        quoted = '"' + text.replace('"', '""') + '"'
        with contextlib.suppress(OptionError):
            study = read_study(written(Path(folder), fields, **{name: quoted}))
            read = study.table()[name][2].as_py() if name in study.table().column_names else None
            kind = next(column.kind for column in COLUMNS if column.name == name)
            if kind in ("text", "flag"):
                assert read in (text or None, text.lower() == "true")
            else:
                assert read is None or read == float(text)


# --- what a file may not be --------------------------------------------------------------------------------


def test_torn_lines_and_byte_order_marks_are_refused(tmp_path):
    path = written(tmp_path, csv_text())
    whole = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    assert refusal(OptionError, read_study, path) == (
        "study_file",
        "rounds.csv, line 1 starts with a byte order mark (BOM)",
    )
    path.write_bytes(whole + b"1,2\n3,4,5\n")
    assert refusal(OptionError, read_study, path) == (
        "study_rows",
        "rounds.csv, line 11 has 2 fields under 19 column names (so have 1 more lines)",
    )
    path.write_bytes(whole.split(b"\n")[0] + b"\n")
    assert refusal(OptionError, read_study, path) == ("study_rows", "rounds.csv has no rows")
    for content in (b"", whole.replace(b"synthetic", b"\xff")):
        path.write_bytes(content)
        assert refusal(OptionError, read_study, path)[0] == "study_file"


@pytest.mark.parametrize("source", [5, b"x.csv", "rounds.txt", "absent.csv", "absent.parquet", None])
def test_what_is_no_file_is_refused(source):
    assert refusal(OptionError, read_study, source)[0] == "study_file"


def test_a_parquet_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.csv.gz").write_bytes(b"gpu")
    for name in ("x.parquet", "x.csv.gz"):
        assert refusal(OptionError, read_study, tmp_path / name)[0] == "study_file"


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("batch_size", pa.array([1.0] * 9), "batch_size has type double and not a whole number (row 1 holds 1.0)"),
        (
            "batch_size",
            pa.array([None, 2.5] + [1.0] * 7),
            "batch_size has type double and not a whole number (row 2 holds",
        ),
        ("batch_size", pa.array([True] * 9), "batch_size has type bool and not a whole number (row 1 holds True)"),
        (
            "batch_size",
            pa.array(["1,024"] * 9),
            "batch_size has type string and not a whole number (row 1 holds '1,024')",
        ),
        ("latency_ms", pa.array(["NaN"] * 9), "latency_ms has type string and not a number (row 1 holds 'NaN')"),
        ("gpu", pa.array([1] * 9), "gpu has type int64 and not text (row 1 holds 1)"),
    ],
)
def test_a_column_of_another_type_is_refused(name, values, said):
    rounds = SIX.set_column(SIX.column_names.index(name), name, values)
    code, what = refusal(OptionError, read_study, rounds)
    assert code == "study_columns" and what.startswith(f"the table: {said}")


def test_nulls_and_not_a_number_in_a_table_are_refused_by_row():
    for name, values, said in (
        ("latency_ms", pa.array([1.0, float("nan")] + [1.0] * 7), "row 2, latency_ms: nan is no duration"),
        ("latency_ms", pa.array([1.0] * 8 + [None]), "row 9, latency_ms: nothing is given"),
        ("tp", pa.array([1, None] + [1] * 7), "row 2, tp: nothing is given"),
        ("batch_size", pa.array([2**64 - 1, *SIX["batch_size"].to_pylist()[1:]], pa.uint64()), "row 1, batch_size: "),
    ):
        rounds = SIX.set_column(SIX.column_names.index(name), name, values)
        code, what = refusal(OptionError, read_study, rounds)
        assert code == "study_rows" and what.startswith(f"the table, {said}")


def test_missing_misspelt_and_doubled_columns_are_refused():
    assert refusal(OptionError, read_study, SIX.drop_columns(["gpu", "latency_ms"])) == (
        "study_columns",
        "the table lacks the columns gpu, latency_ms",
    )
    for old, new in (("latency_ms", "latency_s"), ("total_kv_tokens", "total_kv_token")):
        renamed = SIX.rename_columns([new if name == old else name for name in SIX.column_names])
        assert refusal(OptionError, read_study, renamed) == ("study_columns", f"the table: column {new!r} is unknown")
    misspelt = SIX.append_column("cuda_graphs", pa.array([True] * 9))  # optional, but it would be lost in silence
    assert refusal(OptionError, read_study, misspelt)[0] == "study_columns"
    twice = SIX.append_column("tp", SIX["tp"])
    assert refusal(OptionError, read_study, twice) == ("study_columns", "the table: column 'tp' occurs twice")


@pytest.mark.parametrize("name", PRIMARY_KEY)
def test_rows_that_differ_in_one_key_only_are_two_rounds(name):
    new = SIX.slice(2, 1).to_pylist()[0]
    if name in ("gpu", "tp", "model", "study_id", "initial_context", "repetition", "round_index", "batch_size"):
        new[name] = f"{new[name]}2" if isinstance(new[name], str) else new[name] + 5
        assert read_study(pa.concat_tables([SIX, pa.Table.from_pylist([new], SIX.schema)])).rows == 10
    assert refusal(OptionError, read_study, pa.concat_tables([SIX, SIX.slice(2, 1)])) == (
        "study_rows",
        "the table, row 10, round_index: the same round as row 3",
    )


@pytest.mark.parametrize("name", ["dtype", "framework", "framework_version", "attention_backend"])
def test_one_deployment_with_two_engines_is_refused(name):
    new = SIX.slice(2, 1).to_pylist()[0]
    was, new[name], new["round_index"] = new[name], "another", 99
    rounds = pa.concat_tables([SIX, pa.Table.from_pylist([new], SIX.schema)])
    code, said = refusal(OptionError, read_study, rounds)
    row = 2 if name == "attention_backend" else 1  # which may differ by method
    who = "A, 1, M, mtp" if name == "attention_backend" else "A, 1, M"
    assert code == "study_mixed"
    assert said == f"the table has two engines for {who}: {name} is {was} in row {row} and another in row 10"


def test_several_studies_deployments_and_engines_fit_one_file():
    one, two = SIX.to_pylist(), SIX.to_pylist()
    for row in two:
        row |= {"study_id": "other", "gpu": row["gpu"] * 2, "framework_version": "0.6", "tp": 2}
    assert read_study(pa.Table.from_pylist(one + two)).rows == 18


def test_two_clocks_are_refused():
    rows = SIX.to_pylist()
    rows[1]["timing_scope"] = "client_itl"
    assert refusal(OptionError, read_study, pa.Table.from_pylist(rows)) == (
        "study_mixed",
        "the table mixes timing scopes: client_itl (row 2), model_worker_forward_cuda (row 1)",
    )


def test_kv_may_be_absent_in_anchors_only():
    rows = [row | {"total_kv_tokens": None} for row in SIX.to_pylist()]
    rounds = pa.Table.from_pylist(rows, SIX.schema)
    assert refusal(OptionError, read_study, rounds)[0] == "study_rows"
    study = read_study(rounds, anchors=True)
    assert (study.columns["total_kv_tokens"] == -1).all() and study.anchors
    assert study.table()["total_kv_tokens"].null_count == 9
    rows = [row | {"initial_context": None} for row in rows]
    study = read_study(pa.Table.from_pylist(rows, SIX.schema), anchors=True)
    assert (study.columns["initial_context"] == -1).all()
