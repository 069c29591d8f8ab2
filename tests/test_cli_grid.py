"""`fpmjax sweep` and `fpmjax compare`: axes, files of axes and of queries, CSV, Parquet, folders and reductions."""

from __future__ import annotations

import gzip
import io
import json

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import fpmjax
from fpmjax import result_files
from fpmjax.compare import compare
from fpmjax.grid import grid
from fpmjax.sweep import sweep

TP1 = ("embedded", "--select", "tp=1")
AXES = ("--decode-requests", "1,8,999", "--kv-per-request", "512:2048:x2")
GRID = {"decode_requests": [1, 8, 999], "kv_per_request": [512, 1024, 2048]}
REFUSED = "3 of 9 queries have no answer"


@pytest.fixture(scope="module")
def expected(embedded_cell):
    return sweep(fpmjax.direct(embedded_cell), grid(**GRID), progress=False)


def rows_of(text):
    return pacsv.read_csv(io.BytesIO(text.encode())).to_pylist()


def plain(table):
    """Rows, with an empty text for a missing one as CSV has it."""
    return table.to_pylist()


def test_rows_go_to_stdout_as_csv(fpm, expected):
    ran = fpm("sweep", *TP1, *AXES)
    assert ran.code == 0 and REFUSED in ran.err
    assert rows_of(ran.out) == plain(expected)
    short = fpm("sweep", *TP1, "--batch", "1,8,999", "--kv-per-request", "512:2048:x2", "--columns", "latency_ms")
    assert short.out.splitlines()[0] == '"latency_ms"' and len(short.out.splitlines()) == 10


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_axes_come_from_a_document(fpm, tmp_path, expected, suffix):
    if suffix == "yaml":
        pytest.importorskip("yaml", reason="pyyaml is not installed")
        text = "decode_requests: [1, '8', 999]\nkv_per_request: 512:2048:x2\n"
    else:
        text = json.dumps({"kv_per_request": "512:2048:x2", "decode_requests": [1, "8", 999]})
    (tmp_path / f"axes.{suffix}").write_text(text)
    assert rows_of(fpm("sweep", *TP1, "--spec", tmp_path / f"axes.{suffix}").out) == plain(expected)


@pytest.mark.parametrize("name", ["axes.json", "axes.yaml", "q.csv", "q.csv.gz"])
def test_short_names_and_a_byte_order_mark_are_taken(fpm, tmp_path, name):
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="pyyaml is not installed")
    text = (
        "batch,kv,draft_length\n8,8192,0\n8,8192,1\n"
        if "csv" in name
        else '{"batch": 8, "kv": 8192, "draft_length": "0:1"}'
    )
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt", encoding="utf-8-sig") as file:
        file.write(text)
    rows = rows_of(fpm("sweep", *TP1, "--spec", tmp_path / name).out)
    told = rows_of(fpm("sweep", *TP1, "--batch", "8", "--kv", "8192", "--draft-length", "0:1").out)
    assert [row["latency_ms"] for row in rows] == [row["latency_ms"] for row in told]
    assert [row["scaling_factor"] for row in rows] == [1.0, 1.33]


def test_yaml_numbers_read_as_on_the_command_line(fpm, tmp_path):
    pytest.importorskip("yaml", reason="pyyaml is not installed")
    path = tmp_path / "axes.yaml"
    path.write_text("decode_requests: 1:2\nkv_per_request: [0512, 1024:2048:x2]\n")
    told = fpm("sweep", *TP1, "--decode-requests", "1:2", "--kv-per-request", "512,1024:2048:x2")
    assert rows_of(fpm("sweep", *TP1, "--spec", path).out) == rows_of(told.out)
    path.write_text("decode_requests: 1:40\nkv: 0\n")
    assert len(rows_of(fpm("sweep", *TP1, "--spec", path).out)) == 40


@pytest.mark.parametrize("name", ["axes.json", "axes.yaml"])
def test_an_axis_that_is_named_twice_is_refused(fpm, tmp_path, name):
    if name.endswith("yaml"):
        pytest.importorskip("yaml", reason="pyyaml is not installed")
    (tmp_path / name).write_text('{"decode_requests": 1, "decode_kv": 8, "decode_requests": 2}')
    fpm("sweep", *TP1, "--spec", tmp_path / name).refused("key 'decode_requests' occurs twice")


def test_a_broken_document_is_told_with_what_one_looks_like(fpm, tmp_path):
    path = tmp_path / "axes.json"
    for text in ('{"decode_requests": 1 "decode_kv": 8}', '{"batch": [1, "kv": 3}', "", "{"):
        path.write_text(text)
        told = fpm("sweep", *TP1, "--spec", path)
        told.refused("axes.json is not readable JSON: ", 'hint: {"decode_requests": "1:8", ')
    path.write_text('{"decode_requests": 8}')
    fpm("sweep", *TP1, "--spec", path).refused("axes.json: decode_requests needs decode_kv or kv_per_request")
    (tmp_path / "q.csv").write_text("decode_requests,kv_per_requst\n8,1024\n")
    fpm("sweep", *TP1, "--spec", tmp_path / "q.csv").refused("is 'kv_per_requst' meant as kv_per_request")


def test_queries_come_from_a_table_and_bad_rows_are_told(fpm, tmp_path):
    path = tmp_path / "q.csv"
    path.write_text("batch,kv,who\n1,512,a\nx,512,b\n999,1,c\n")
    ran = fpm("sweep", *TP1, "--spec", path, "--out", tmp_path / "x.parquet", "--json")
    assert ran.code == 0 and "line 3: batch is 'x'" in ran.err and "2 of 3 queries have no answer" in ran.err
    assert ran.document["statuses"] == {"ok": 1, "invalid_work": 1, "decode_no_two_sided_batch_bracket": 1}
    assert ran.document["faulty"] == 1 and ran.document["answered"] == 1
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["who"].to_pylist() == ["a", "b", "c"] and table["fault"].null_count == 2
    fpm("sweep", *TP1, "--spec", path, "--out", tmp_path / "x.parquet").refused("exists", "overwrite")
    assert fpm("sweep", *TP1, "--spec", path, "--out", tmp_path / "x.parquet", "--overwrite").code == 0


def test_a_folder_goes_on_and_evidence_needs_a_file(fpm, tmp_path, monkeypatch, expected):
    from fpmjax import sweep_job

    monkeypatch.setattr(result_files, "PART_ROWS", 2)
    monkeypatch.setattr(sweep_job, "CHUNK", 2)
    write = result_files.Part.write

    def interrupted(self, batch):
        if self.path.name == "part-00002.parquet":
            raise KeyboardInterrupt
        write(self, batch)

    monkeypatch.setattr(result_files.Part, "write", interrupted)
    ran = fpm("sweep", *TP1, *AXES, "--out", tmp_path / "new")
    assert ran.code == 130 and "the same command goes on" in ran.err
    ran = fpm("sweep", *TP1, *AXES, "--out", tmp_path / "new", "--overwrite")
    assert ran.code == 130 and "the same command, without --overwrite, goes on" in ran.err
    monkeypatch.setattr(result_files.Part, "write", write)
    ran = fpm("sweep", *TP1, *AXES, "--out", tmp_path / "new")
    assert ran.code == 0 and ran.out == f"{tmp_path / 'new'}: 9 rows, 6 answered\n" and REFUSED in ran.err
    assert pq.read_table(tmp_path / "new").equals(expected)
    fpm("sweep", *TP1, *AXES, "--evidence").refused("--evidence needs --out")
    assert fpm("sweep", *TP1, *AXES, "--evidence", "--out", tmp_path / "e.parquet").code == 0
    assert "decode_rows" in pq.read_schema(tmp_path / "e.parquet").names


def test_every_cell_and_several_models_have_names(fpm, embedded_cells):
    ran = fpm("sweep", "embedded", "--every-cell", "--batch", "8", "--kv", "8192")
    rows = rows_of(ran.out)
    assert [row["model"] for row in rows] == [f"embedded tp={tp}" for tp in (1, 2, 4)]
    for row, tp in zip(rows, (1, 2, 4), strict=True):
        model = fpmjax.direct(embedded_cells.select(tp=tp))
        assert row["latency_ms"] == fpmjax.estimate(model, fpmjax.Work.decode(8, 8192)).latency_ms
    rows = rows_of(fpm("sweep", "embedded", *TP1, "--batch", "8", "--kv", "8192").out)
    assert [row["model"] for row in rows] == ["embedded", "embedded (2)"]


def test_saved_models_stand_beside_tables(fpm, tmp_path, embedded_cell):
    path = tmp_path / "m.npz"
    fpmjax.save_model(fpmjax.direct(embedded_cell), path)
    rows = rows_of(fpm("sweep", path, *TP1, "--batch", "8", "--kv", "8192").out)
    assert rows[0]["latency_ms"] == rows[1]["latency_ms"] and rows[0]["model"] == str(path)
    fpm("sweep", path, "--select", "tp=1", "--batch", "8", "--kv", "0").refused("--select is about tables")


def test_a_reduction_is_that_of_summarise(fpm, tmp_path, embedded_cell):
    from fpmjax.reduce import Reduce, summarise

    reduce = Reduce(keep=("decode_requests",), limit_ms=13.5, quantiles=(0.5,))
    found = summarise(fpmjax.direct(embedded_cell), grid(**GRID), reduce=reduce, progress=False)
    flags = ("--keep", "decode-requests", "--limit-ms", "13.5", "--quantiles", "0.5")
    assert rows_of(fpm("sweep", *TP1, *AXES, *flags).out) == found.to_pylist()
    assert fpm("sweep", *TP1, *AXES, *flags, "--out", tmp_path / "r.parquet").out.endswith("r.parquet: 3 rows\n")
    assert pq.read_table(tmp_path / "r.parquet").equals(found)
    assert len(rows_of(fpm("sweep", *TP1, *AXES, "--keep", "none").out)) == 1
    fpm("sweep", *TP1, *AXES, *flags, "--out", tmp_path / "r.parquet").refused("exists")
    fpm("sweep", *TP1, *AXES, "--limit-ms", "20").refused("--limit-ms reduces, and needs --keep")
    fpm("sweep", *TP1, *AXES, "--keep", "none", "--evidence", "--out", "x").refused("--evidence is about rows")


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (TP1, ("nothing is asked",)),
        ((*TP1, "--kv", "1"), ("a grid needs decode_requests", "--decode-requests 1,8 --decode-kv 8192")),
        ((*TP1, "--batch", "1", "--kv", "1", "--kv-per-request", "1"), ("say the same twice",)),
        ((*TP1, "--batch", "1", "--kv", "0", "--draft-length", "4294967295"), ("draft_length reaches 4294967295",)),
        ((*TP1, "--batch", "1", "--kv", "0", "--spec", "x"), ("--spec says what is asked, so --decode-requests",)),
        ((*TP1, "--spec", "absent.json"), ("absent.json does not exist",)),
        ((*TP1, "--batch", "1", "--kv", "0", "--columns", "latency"), ("did you mean latency_ms",)),
        ((*TP1, "--batch", "1", "--kv", "0", "--out", "x.csv"), ("no Parquet file",)),
        ((*TP1, "--batch", "1"), ("needs decode_kv or kv_per_request beside it", "add --decode-kv 1, or")),
        ((*TP1, "--prefill-requests", "1"), ("needs prefill_tokens or tokens_per_request", "add --prefill-tokens 1")),
        (("absent", "--batch", "1", "--kv", "0"), ("absent does not exist",)),
        (("embedded", "--batch", "1", "--kv", "0"), ("holds 3 cells",)),
    ],
)
def test_mistakes_are_told_in_words_of_the_command_line(fpm, argv, texts):
    fpm("sweep", *argv).refused(*texts)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.json", "{", "is not readable JSON"),
        ("a.json", "[1]", "holds no axes"),
        ("a.json", '{"decode_requests": "8:1"}', "decode_requests: the range 8:1 ends before it begins"),
        ("a.json", '{"decode_request": 1}', "did you mean decode_requests"),
        ("a.json", '{"decode_requests": 1, "batch": 1}', "batch and decode_requests are the same axis"),
        ("a.json", '{"kv": "8:1", "batch": 1}', "decode_kv: the range 8:1 ends before it begins"),
        ("a.json", '{"decode_requests": 1.5}', "decode_requests"),
        ("a.csv", "x\n1\n", "no column that says what is asked"),
    ],
)
def test_files_of_axes_are_checked(fpm, tmp_path, name, text, told):
    (tmp_path / name).write_text(text)
    fpm("sweep", *TP1, "--spec", tmp_path / name).refused(told, name)


def test_nothing_answered_is_exit_code_3(fpm, tmp_path):
    beyond = ("--batch", "999", "--kv", "1")
    assert fpm("sweep", *TP1, *beyond).code == 3
    for flags in (("--keep", "none"), ("--keep", "none", "--out", tmp_path / "r.parquet")):
        ran = fpm("sweep", *TP1, *beyond, *flags)
        assert ran.code == 3 and "no cell has an answer" in ran.err and ran.out
    assert fpm("sweep", *TP1, *beyond, "--keep", "none", "--pareto").code == 3
    assert fpm("sweep", *TP1, *AXES, "--keep", "none", "--pareto").code == 0
    for flags in ((), ("--json",)):
        ran = fpm("compare", "embedded", *TP1, *beyond, *flags)
        assert ran.code == 3 and "neither answers any of the 1 rows" in ran.err and ran.out


def test_a_comparison_tells_and_keeps(fpm, tmp_path, embedded_cells):
    both = ("compare", "embedded", *TP1, "--select-b", "tp=4", *AXES)
    expected = compare(*(fpmjax.direct(embedded_cells.select(tp=tp)) for tp in (1, 4)), grid(**GRID), progress=False)
    ran = fpm(*both, "--out", tmp_path / "d.parquet")
    assert "9 rows, 6 answered by both" in ran.out and "only A answers 0, only B 0, neither 3" in ran.out
    assert pq.read_table(tmp_path / "d.parquet").equals(expected)
    document = fpm(*both, "--json", "--top", "2").document
    assert document["both"] == 6 and len(document["largest"]) == 2
    assert document["largest"][0]["difference_pct"] == document["worst_pct"]
    assert "no answer differs" in fpm("compare", "embedded", *TP1, *AXES).out
    fpm(*both, "--out", tmp_path / "d.parquet").refused("exists")
    fpm(*both, "--out", tmp_path).refused("is a folder")


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_help_teaches(fpm, command):
    ran = fpm(command, "--help")
    assert ran.code == 0 and "examples:" in ran.out and "512:65536:x2" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 120


def test_csv_of_a_result_is_read_back(fpm, expected):
    table = pacsv.read_csv(io.BytesIO(fpm("sweep", *TP1, *AXES).out.encode()))
    assert table["latency_ms"].equals(expected["latency_ms"]) and pa.types.is_string(table.schema.field("status").type)
