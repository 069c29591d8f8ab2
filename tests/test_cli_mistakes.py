"""Mistakes that a newcomer makes with the command, and what it says: files, paths, keys, separators, identities."""

from __future__ import annotations

import json
import os

import pytest
from commands import IDENTITY

TP1 = ("embedded", "--select", "tp=1")
HEADER = "workload_kind,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms"
GOOD = f"{HEADER}\ndecode,1,0,10,1.5\ndecode,2,0,10,2.5\n"


@pytest.fixture
def build(fpm, tmp_path):
    """`fpmjax table build` of these rows under this identity, and the path of the rows."""
    rows, identity = tmp_path / "rows.csv", tmp_path / "id.json"

    def run(text, *more, fields=IDENTITY):
        rows.write_text(text)
        identity.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        return fpm("table", "build", rows, "--identity", identity, "-o", tmp_path / "new", *more)

    return run


# Keys that nobody reads


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"num_decode_requests": 4}, "the unknown key 'num_decode_requests' is ignored; did you mean it inside sch"),
        (IDENTITY, "'fmha_quant_mode', 'comm_quant_mode', ... are ignored; did you mean them inside"),
        ({"scheduled": {"num_decode_requests": 4}}, "'scheduled' is ignored; did you mean scheduled_requests?"),
        ({"scheduled_requests": {"num_decode_request": 4}}, "did you mean num_decode_requests?"),
        ([{}, {"sum_decode_kv_tokens": 4}], "did you mean it inside scheduled_requests?"),
        ({"event": {"fpm": {"batch": 4}}}, "the unknown key 'batch' is ignored"),
    ],
)
def test_an_iteration_is_idle_aloud_where_its_keys_are_not_read(fpm, line, said):
    work = b'{"scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 9}}\n'
    text = work + json.dumps(line).encode() + b"\n"
    for asked in (("estimate", *TP1, "--metrics", "-"), ("coverage", *TP1, "--traffic", "-")):
        ran = fpm(*asked, stdin=text)
        assert ran.code == 0 and ran.err.startswith("note: stdin, line 2 is idle: ") and said in ran.err
        assert ran.err.count("\n") == 1, "only the first such line is named"


@pytest.mark.parametrize("line", ["{}", '{"worker_id": "a"}', '{"scheduled_requests": {"queued_prefill_tokens": 4}}'])
def test_idle_iterations_and_foreign_keys_beside_work_are_silent_but_nothing_but_idle_is_said(fpm, line):
    work = b'{"timing_scope": "x", "scheduled_requests": {"num_decode_requests": 1, "sum_decode_kv_tokens": 9}}\n'
    for asked in (("estimate", *TP1, "--metrics", "-"), ("coverage", *TP1, "--traffic", "-")):
        assert fpm(*asked, stdin=work + line.encode()).err == ""
        ran = fpm(*asked, stdin=line.encode())
        assert ran.code == 0
        assert ran.err == "note: every iteration is idle and takes 0 ms: no rank is given any work\n"


# Exit codes


def test_the_exit_code_does_not_depend_on_the_order_of_lines(fpm):
    wide = '{"scheduled_requests": {"num_decode_requests": 5000, "sum_decode_kv_tokens": 9}}'
    prefill = '{"scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 9}}'
    asked = ("estimate", *TP1, "--draft-length", "1", "--metrics", "-")
    for lines in ((wide, prefill), (prefill, wide)):
        ran = fpm(*asked, stdin="\n".join(lines).encode())
        assert ran.code == 3 and "error: draft_length=1 " in ran.err and "batch_size=10000" in ran.err
    assert fpm(*asked, stdin=prefill.encode()).code == 2


def test_coverage_tells_bad_input_from_no_coverage(fpm):
    wide = '{"scheduled_requests": {"num_decode_requests": %d, "sum_decode_kv_tokens": 9}}'
    asked = ("coverage", *TP1, "--traffic", "-", "--draft-length", "9")
    ran = fpm(*asked, stdin=(wide % 2**31).encode())
    assert ran.code == 2 and "count_overflow" in ran.out
    assert fpm(*asked, stdin=(wide % 2**31 + "\n" + wide % 5000).encode()).code == 3


# Paths


def test_a_path_that_does_not_exist_leads_to_the_embedded_table(fpm):
    asked = ("estimate", "nosuch", "--batch", "1", "--kv", "5")
    fpm(*asked).refused("nosuch does not exist", "`fpmjax fit` wrote", "`embedded`, which is the table inside")
    for command in (("inspect",), ("coverage", "--traffic", "-")):
        fpm(command[0], "nosuch", *command[1:]).refused(
            "the path nosuch does not exist\nhint: give a Parquet file, the folder that holds the pair, or `embedded`, "
            "which is the table inside this package"
        )
    fpm("inspect", "embeded").refused("hint: did you mean `embedded`, which is the table inside this package")


def test_a_folder_without_a_table_is_named_in_full(fpm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", tmp_path):
        fpm("inspect", name).refused(
            f"File does not exist at {tmp_path / 'fpm_forward_perf.parquet'}",
            f"hint: {tmp_path} has no Parquet file; a table's default name is fpm_forward_perf.parquet",
        )
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    fpm("inspect", ".").refused(f"{tmp_path} has mine.parquet: name the file where it is not called fpm_forward")


@pytest.mark.parametrize("name", ["rows.csv", "ROWS.CSV.gz", "rows.tsv", "rows.txt"])
def test_measurements_in_place_of_a_table_lead_to_table_build(fpm, tmp_path, name):
    (tmp_path / name).write_text(GOOD)
    ran = fpm("inspect", tmp_path / name).refused("holds measurements, but is no table yet\nhint: make one with ")
    assert f"`fpmjax table build {tmp_path / name} --identity ID.json -o DIR`" in ran.err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_a_table_that_may_not_be_read_is_named(fpm, tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"")
    (tmp_path / "t.parquet").chmod(0)
    fpm("inspect", tmp_path / "t.parquet").refused("t.parquet: Permission denied")


# Columns


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("latency_ms", "latency", 'hold a column "latency", which no reader knows\nhint: did you mean latency_ms?'),
        ("batch_size", "batch", 'rows lack the column "batch_size"\nhint: did you mean batch to be it?'),
        ("total_kv_read_tokens", "kv", 'lack the column "total_kv_read_tokens"\nhint: did you mean kv to be it?'),
        ("workload_kind", "phase", 'rows lack the column "workload_kind"\nhint: a row needs workload_kind, '),
    ],
)
def test_a_column_under_another_name_is_recognised(build, tmp_path, old, new, said):
    build(GOOD.replace(old, new)).refused(f"error: {tmp_path / 'rows.csv'}: ", said)


@pytest.mark.parametrize(("mark", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_other_separators_are_recognised(build, fpm, tmp_path, mark, word):
    build(GOOD.replace(",", mark)).refused("line 1: one column, 'workload_kind", f"seem to be separated by {word}")
    fpm("coverage", *TP1, "--traffic", "-", stdin=f"batch{mark}kv\n1{mark}2\n".encode()).refused(f"separated by {word}")


def test_columns_without_a_name_are_left_out_where_they_are_empty(build, fpm, tmp_path):
    told = "fields without a column name are left out, all of them are empty\n"
    for text in (GOOD.replace("\n", ",\n"), GOOD.replace("\n", ", \n").replace("latency_ms, ", "latency_ms")):
        ran = build(text, "--overwrite")
        assert ran.code == 0 and ran.err.startswith(f"note: {tmp_path / 'rows.csv'}: {told}")
    middle = "\n".join(line.replace(",", ",,", 1) for line in GOOD.splitlines())
    assert build(middle, "--overwrite").code == 0
    filled = middle.replace("decode,,2", "decode,9,2")
    build(filled, "--overwrite").refused("rows.csv, line 3: field 2 is '9', but its column has no name\nhint: name ")
    ran = fpm("coverage", *TP1, "--traffic", "-", "--json", stdin=b"batch,kv,\n1,9,\n2,9\n")
    assert ran.document["draft_lengths"][0]["queries"] == 2 and ran.err == f"note: stdin: {told}"
    fpm("coverage", *TP1, "--traffic", "-", stdin=b"batch,kv\n1,9,7\n").refused("line 2: 3 fields under 2 column names")


# Rows


def test_the_good_repetition_of_a_bad_row_is_good(build, tmp_path):
    ran = build(f"{HEADER}\ndecode,1,0,10,nan\ndecode,1,0,10,1.5\ndecode,2,0,x,3\ndecode,2,0,0,3\ndecode,2,0,0,4\n")
    ran.refused("error: 3 of 5 rows are bad, nothing was written\n")
    path = tmp_path / "rows.csv"
    assert [line.split(" (")[0] for line in ran.err.splitlines()[:3]] == [
        f"{path}, line 2: the row has non-finite/non-positive latency_ms=nan",
        f"{path}, line 4: total_kv_read_tokens is 'x', not a whole number",
        f"{path}, line 6: the row repeats line 5",
    ]


def test_one_reason_for_every_row_is_told_once(build, tmp_path):
    ran = build(GOOD, fields=IDENTITY | {"moe_backend": ""}).refused("2 of 2 rows are bad")
    assert ran.err.startswith(f"{tmp_path / 'rows.csv'}, every row: moe_backend must be a non-empty string")
    assert ran.err.count("moe_backend must") == 1


# The identity and the sidecar


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (IDENTITY | {"modle": "x"}, "an identity has no field 'modle'\nhint: did you mean model? the fields are "),
        (IDENTITY | {"tp": 1.5}, "tp is 1.5, but it is a whole number from 0 to 4294967295, or null"),
        (IDENTITY | {"tp": True}, "tp is true, but it is a whole number"),
        (IDENTITY | {"tp": -1}, "tp is -1, but it is a whole number"),
        (IDENTITY | {"model": 7}, "model is 7, but it is text, or null"),
        (IDENTITY | {"model_path": ["x"]}, 'model_path is ["x"], but it is text, or null'),
        (IDENTITY | {"backend": ""}, 'backend is "", but it is text that is not empty'),
        (IDENTITY | {"enable_eplb": 1}, "enable_eplb is 1, but it is true or false"),
        ({"model": "x", "tp": 1}, "lacks system, backend, backend_version, gemm_quant_mode, "),
        ('{"tp": 1, "tp": 2}', "is not JSON: key 'tp' occurs twice in one object"),
    ],
)
def test_an_identity_is_refused_by_file_field_value_and_type(build, tmp_path, fields, said):
    build(GOOD, fields=fields).refused(f"error: {tmp_path / 'id.json'}", said)


def test_what_differs_between_rows_need_not_be_in_the_identity(build):
    text = GOOD.replace("latency_ms", "latency_ms,tp").replace(".5\n", ".5,2\n")
    assert build(text, fields={k: v for k, v in IDENTITY.items() if k != "tp"}).code == 0


def test_more_sidecar_fields_come_from_a_file(build, fpm, tmp_path):
    sidecar = tmp_path / "more.json"
    sidecar.write_text('{"timing_boundary": "schedule_to_update"}')
    assert build(GOOD, "--sidecar", sidecar).code == 0
    assert fpm("inspect", tmp_path / "new", "--json").document["timing_boundary"] == "schedule_to_update"
    sidecar.write_text('{"row_count": 9}')
    again = build(GOOD, "--sidecar", sidecar, "--overwrite")
    again.refused(f"error: {sidecar}: sidecar field row_count=9 contradicts 2")
    sidecar.write_text("[]")
    build(GOOD, "--sidecar", sidecar).refused("more.json is not a JSON object, but a list")
