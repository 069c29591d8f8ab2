"""`fpmjax table build`: good measurements become a table, every bad row is told with its line."""

from __future__ import annotations

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import IDENTITY

import fpmjax

HEADER = "workload_kind,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms"
GOOD = f"{HEADER}\ndecode,1,0,10,1.5\ndecode,1,0,20,1.75\ndecode,2,0,10,2.5\nprefill,1,16,0,9.25\n"


@pytest.fixture
def identity(tmp_path):
    path = tmp_path / "identity.json"
    path.write_text(json.dumps(IDENTITY))
    return path


def test_a_table_is_built_and_answers_its_own_rows(fpm, tmp_path, identity):
    rows = tmp_path / "rows.csv"
    rows.write_text(GOOD)
    ran = fpm("table", "build", rows, "--identity", identity, "-o", tmp_path / "new")
    assert ran.code == 0 and f"next    fpmjax inspect {tmp_path / 'new'}\n" in ran.out
    assert "rows    3 decode, 1 prefill; cells 1" in ran.out
    assert fpm("inspect", tmp_path / "new", "--json").document["cells"][0]["identity"]["model"] == "acme/möbius"
    answers = fpm("estimate", tmp_path / "new", "--batch", "1", "--kv", "10,15,20", "--json").document["queries"]
    assert [q["latency_ms"] for q in answers] == [1.5, 1.625, 1.75]
    assert "acme/möbius" in fpm("inspect", tmp_path / "new").out


def test_columns_of_the_identity_make_several_cells(fpm, tmp_path, identity):
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{HEADER},tp,enable_eplb\n" + "".join(f"decode,1,0,10,{t}.5,{t},true\n" for t in (1, 2, 4)))
    assert fpm("table", "build", rows, "--identity", identity, "-o", tmp_path / "new").code == 0
    fpm("estimate", tmp_path / "new", "--batch", "1", "--kv", "10").refused("--select tp=4")
    ran = fpm("estimate", tmp_path / "new", "--select", "tp=4", "--batch", "1", "--kv", "10", "--json")
    assert ran.document["queries"][0]["latency_ms"] == 4.5 and ran.document["cell"]["enable_eplb"] is True


def test_measurements_in_parquet_or_from_stdin_do_as_well(fpm, tmp_path, identity):
    from pyarrow import csv

    rows = csv.read_csv(io.BytesIO(GOOD.encode()))
    pq.write_table(rows.append_column("note", pa.array(["x"] * 4)), tmp_path / "rows.parquet")
    ran = fpm("table", "build", tmp_path / "rows.parquet", "--identity", identity, "-o", tmp_path / "one")
    assert ran.code == 0 and "columns that are kept but never read: note" in ran.err
    ran = fpm("table", "build", "-", "--identity", identity, "-o", tmp_path / "two", stdin=GOOD.encode())
    assert ran.code == 0
    one, two = (fpmjax.load_cells(tmp_path / name).select().decode for name in ("one", "two"))
    assert one.latency_ms.tolist() == two.latency_ms.tolist()


def test_every_bad_row_is_reported_with_its_line_and_nothing_is_written(fpm, tmp_path, identity):
    bad = [
        ('decode,1,0,10,1.5,"two\nlines"', None, ""),
        ("decode,1,0,10,1.6,", 4, "the row repeats line 2 (phase="),
        ("decode,x,0,10,1.6,", 5, "batch_size is 'x', not a whole number"),
        ("decode,2,0,1e3,y,", 6, "total_kv_read_tokens is '1e3', not a whole number; latency_ms is 'y', not a number"),
        ("prefill,1,0,10,1.6,", 7, "the row is a prefill point with no prefill tokens ("),
        ("decode,3,0,-1,1.6,", 8, "total_kv_read_tokens=-1"),
        ("decode,3,0,4294967296,1.6,", 9, "total_kv_read_tokens=4294967296"),
        ("decode,3,0,99999999999999999999,1.6,", 10, "more than 64 bits can hold"),
        ("decode,4,0,10,nan,", 11, "the row has non-finite/non-positive latency_ms=nan"),
        ("decode,5,0,10,-2,", 12, "latency_ms=-2.0"),
        ("decode,6,0,10,1_0,", 13, "latency_ms is '1_0', not a number"),
        ("decode,7,0,10,,", 14, "latency_ms=null"),
        ("Decode,8,0,10,1,", 15, "the row has unknown workload_kind='Decode'"),
        ("decode,9,0,10", 16, "4 fields under 6 column names"),
        ("decode,10,5,10,1,", 17, "the row is a decode point carrying prefill tokens"),
        ("decode,,0,10,1,", 18, "the row has invalid workload coordinates: batch_size=null does not fit in u32"),
        ("decode,11,0,10,1,", None, ""),
    ]
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{HEADER},remark\n" + "\n".join(row for row, _, _ in bad) + "\n")
    ran = fpm("table", "build", rows, "--identity", identity, "-o", tmp_path / "new")
    ran.refused("error: 15 of 17 rows are bad, nothing was written\nhint: ")
    told = [line for line in ran.err.splitlines() if line.startswith(f"{rows}, line ")]
    wanted = [(number, text) for _, number, text in bad if number]
    assert len(told) == len(wanted)
    for line, (number, text) in zip(told, wanted, strict=True):
        assert line.startswith(f"{rows}, line {number}: ") and text in line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (HEADER, "holds no rows"),
        (GOOD.replace("batch_size", "batch"), 'rows lack the column "batch_size"'),
        (GOOD.replace("latency_ms", "latency_mss"), "latency_ms"),
        (GOOD.replace("batch_size", "latency_ms"), "column 'latency_ms' occurs 2 times"),
        (GOOD + '"', "not CSV"),
        ("PAR1", "not a readable Parquet file"),
    ],
)
def test_measurements_that_are_no_measurements(fpm, tmp_path, identity, content, said):
    (tmp_path / "rows").write_text(content)
    fpm("table", "build", tmp_path / "rows", "--identity", identity, "-o", tmp_path / "new").refused(said)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[1]", "is not a JSON object, but a list"),
        ("{", "is not JSON"),
        (
            json.dumps(IDENTITY | {"tp": [1]}),
            "id.json: tp is [1], but it is a whole number from 0 to 4294967295, or null",
        ),
        (json.dumps(IDENTITY | {"tpp": 1}), "id.json: an identity has no field 'tpp'\nhint: did you mean tp? "),
        (json.dumps({k: v for k, v in IDENTITY.items() if k != "pp"}), "id.json lacks pp, and "),
        (json.dumps(IDENTITY | {"tp": "1"}), 'tp is "1", but it is a whole number'),
        (json.dumps(IDENTITY | {"dcp": 3}), "dcp must be positive and divide tp"),
    ],
)
def test_an_identity_that_is_none(fpm, tmp_path, content, said):
    (tmp_path / "rows.csv").write_text(GOOD)
    (tmp_path / "id.json").write_text(content)
    ran = fpm("table", "build", tmp_path / "rows.csv", "--identity", tmp_path / "id.json", "-o", tmp_path / "new")
    ran.refused(said)
    assert not (tmp_path / "new").exists()


def test_flags_and_foreign_bytes_are_told_by_column(fpm, tmp_path, identity):
    text = GOOD.replace("latency_ms", "latency_ms,enable_eplb").replace("5\n", "5,yes\n", 1)
    (tmp_path / "rows.csv").write_text(text)
    ran = fpm("table", "build", tmp_path / "rows.csv", "--identity", identity, "-o", tmp_path / "new")
    ran.refused("line 2: enable_eplb is 'yes', neither true nor false", "line 3: 5 fields under 6 column names")
    assert "error: 4 of 4 rows are bad" in ran.err


def test_unreadable_values_are_told_even_where_a_column_is_missing(fpm, tmp_path, identity):
    (tmp_path / "rows.csv").write_text(GOOD.replace("latency_ms", "duration").replace("decode,2", "decode,zwei"))
    ran = fpm("table", "build", tmp_path / "rows.csv", "--identity", identity, "-o", tmp_path / "new")
    ran.refused("line 4: batch_size is 'zwei'", 'rows lack the column "latency_ms"')


def test_a_table_is_replaced_only_when_told(fpm, tmp_path, identity):
    (tmp_path / "rows.csv").write_text(GOOD)
    asked = ("table", "build", tmp_path / "rows.csv", "--identity", identity, "-o", tmp_path / "new")
    assert fpm(*asked).code == 0
    fpm(*asked).refused("exists already", "hint: --overwrite replaces the pair")
    assert fpm(*asked, "--overwrite").code == 0
    (tmp_path / "file").write_text("x")
    fpm(*asked[:-1], tmp_path / "file").refused("cannot write")


def test_a_policy_demands_its_columns(fpm, tmp_path, identity):
    (tmp_path / "rows.csv").write_text(GOOD)
    asked = ("table", "build", tmp_path / "rows.csv", "--identity", identity, "-o", tmp_path / "new")
    fpm(*asked, "--policy", "vllm_native_ar_model_step_cuda_v1").refused("measurement_reduction")
    fpm(*asked, "--policy", "mine").refused("invalid choice: 'mine'")


def test_of_many_cells_the_first_are_listed(fpm, tmp_path, identity):
    (tmp_path / "rows.csv").write_text(f"{HEADER},tp\n" + "".join(f"decode,1,0,10,1.5,{t}\n" for t in range(1, 11)))
    assert fpm("table", "build", tmp_path / "rows.csv", "--identity", identity, "-o", tmp_path / "new").code == 0
    asked = fpm("estimate", tmp_path / "new", "--batch", "1", "--kv", "10")
    asked.refused("holds 10 cells that match", "\n  --select tp=8\n  and 2 more, see `fpmjax inspect`\nhint: ")
