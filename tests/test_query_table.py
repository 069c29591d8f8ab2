"""Tables of queries: names, carried columns, draft lengths, and rows that are refused by line and kept."""

from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from small_tables import cell_of, surface

import fpmjax
from fpmjax.errors import OptionError
from fpmjax.metrics import U32_MAX
from fpmjax.query_table import read_csv
from fpmjax.sweep import sweep

ROWS = [*surface([1, 2, 4, 8, 16, 32], [0, 64, 256, 1024]), ("prefill", 1, 8, 0, 3.0)]
GOOD = {"decode_requests": [1, 2, 8], "decode_kv": [64, 100, 0], "tenant": ["a", None, "c"]}


@pytest.fixture(scope="module")
def model():
    return fpmjax.direct(cell_of(ROWS))


@pytest.fixture
def ask(model, tmp_path):
    """The rows of a sweep over a table, or over CSV text."""

    def run(source, **options):
        if isinstance(source, str):
            path = tmp_path / "q.csv"
            path.write_text(source)
            source = path
        return sweep(model, source, progress=False, **options)

    return run


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz", None])
def test_every_form_is_answered_and_carries_what_it_does_not_know(ask, tmp_path, suffix):
    table = pa.table(GOOD)
    source = tmp_path / f"q{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, source, row_group_size=2)
    elif suffix:
        with pa.output_stream(source, compression="gzip" if suffix.endswith("gz") else None) as stream:
            pacsv.write_csv(table, stream)
    else:
        source = table
    for chunk in (1, 2, 99):
        found = ask(source, chunk=chunk)
        assert found.column_names == ["decode_requests", "decode_kv", "tenant", "latency_ms", "status", "fault"]
        assert found["latency_ms"].to_pylist() == [1.0625, 2.09765625, 8.0]
        assert found["decode_requests"].to_pylist() == [1, 2, 8]
        assert found["tenant"].to_pylist() in (["a", None, "c"], ["a", "", "c"])
        assert found["fault"].null_count == 3


def test_names_of_engines_and_observations_are_known(ask):
    asked = {"num_decode_requests": [1], "sum_decode_kv_tokens": [64], "kv_per_token": [0.5]}
    assert ask(pa.table(asked))["latency_ms"].to_pylist() == [1.0625]
    asked = {"batch": pa.array([2], pa.uint8()), "kv_per_request": pa.array([32], pa.uint64())}
    assert ask(pa.table(asked))["latency_ms"].to_pylist() == [2.0625]


def test_draft_lengths_of_nothing_are_ordinary_decoding(model, ask):
    asked = {"decode_requests": [2] * 5, "decode_kv": [64] * 5, "draft_length": [None, 0, 1, 3, -1]}
    found = ask(pa.table(asked))
    plain = fpmjax.estimate(model, fpmjax.Work.decode(2, 64)).latency_ms
    one, three = (fpmjax.estimate(model, fpmjax.Work.decode(2, 64), draft_length=d).latency_ms for d in (1, 3))
    assert found["latency_ms"].to_pylist() == [plain, plain, one, three, None]
    assert found["scaling_factor"].to_pylist() == [1.0, 1.0, 1.33, 1.49, None]
    assert found["calibrated"].to_pylist() == [None, None, True, True, None]
    assert found["status"].to_pylist()[4] == "draft_length_not_positive"
    whole = "but a draft length is a whole number from 0 to 4294967294"
    assert found["fault"].to_pylist() == [None] * 4 + [f"row 4: draft_length is -1, {whole}"]


def test_rows_that_hold_no_count_are_refused_and_kept(ask):
    values = pa.array([64, None, -1, U32_MAX + 1, U32_MAX], pa.int64())
    found = ask(pa.table({"decode_requests": [1] * 5, "decode_kv": values}), evidence=True)
    assert found["status"].to_pylist() == ["ok", *["invalid_work"] * 3, "decode_no_two_sided_batch_bracket"]
    assert found["fault"].to_pylist() == [
        None,
        "row 1: decode_kv is empty, but a count is a whole number from 0 to 4294967295",
        "row 2: decode_kv is -1, but a count is a whole number from 0 to 4294967295",
        "row 3: decode_kv is 4294967296, but a count is a whole number from 0 to 4294967295",
        None,
    ]
    assert found["decode_kv"].equals(pa.chunked_array([values]))
    assert found["decode_rows"].to_pylist()[1:] == [[]] * 4
    found = ask(pa.table({"decode_requests": [1, 2**20], "kv_per_request": [64, 2**20]}))
    assert found["fault"].to_pylist() == [None, f"row 1: a total of tokens exceeds {U32_MAX}"]


def test_faults_of_csv_are_told_by_the_line_an_editor_counts(ask):
    text = 'decode_requests,decode_kv,"a\nnote"\n1,64,x\n\n2,many,"y\ny"\n3\n8,0,z\n4,-2,\n'
    found = ask(text)
    assert found["status"].to_pylist() == ["ok", "invalid_work", "invalid_work", "ok", "invalid_work"]
    assert found["fault"].to_pylist() == [
        None,
        "line 5: decode_kv is 'many', but a count is a whole number from 0 to 4294967295",
        "line 7: 1 fields under 3 column names",
        None,
        "line 9: decode_kv is -2, but a count is a whole number from 0 to 4294967295",
    ]
    assert found["decode_kv"].to_pylist() == [64, None, None, 0, -2]
    assert found["a\nnote"].to_pylist() == ["x", "y\ny", None, "z", None]


WHOLE = "but a count is a whole number from 0 to 4294967295"


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("packed", [False, True])
def test_floats_and_dictionaries_hold_whole_numbers(ask, tmp_path, kind, packed):
    def column(values, kind=kind):
        made = pa.array(values, kind)
        return pa.chunked_array([made[:2].dictionary_encode(), made[2:].dictionary_encode()]) if packed else made

    kv = column([64.0, 100.0, 0.5, float("nan"), float("inf"), None])
    depth = column([None, float("nan"), 0.0, 1.0, 2.5, 3.0])
    table = pa.table({"batch": column([2] * 6, pa.int16()), "kv": kv, "draft_length": depth, "id": column([7] * 6)})
    pq.write_table(table, tmp_path / "q.parquet")
    for source in (table, tmp_path / "q.parquet"):
        for chunk in (1, 99):
            found = ask(source, chunk=chunk)
            assert found["latency_ms"].to_pylist() == [2.0625, 2.09765625, None, None, None, None]
            assert found["status"].to_pylist() == ["ok", "ok"] + ["invalid_work"] * 4
            assert found["fault"].to_pylist() == [
                None,
                None,
                f"row 2: kv is 0.5, {WHOLE}",
                f"row 3: kv is nan, {WHOLE}",
                f"row 4: kv is inf, {WHOLE}",
                f"row 5: kv is empty, {WHOLE}",
            ]
            assert found["id"].to_pylist() == [7] * 6
    asked = {"batch": column([2] * 4, pa.int64()), "kv": [64] * 4, "draft_length": column([0.0, 1.0, 1.5, -1.0])}
    found = ask(pa.table(asked))
    assert found["status"].to_pylist() == ["ok", "ok", "invalid_work", "draft_length_not_positive"]
    assert found["fault"].to_pylist()[2:] == [
        f"row {i}: draft_length is {x}, but a draft length is a whole number from 0 to 4294967294"
        for i, x in ((2, 1.5), (3, -1.0))
    ]
    assert found["calibrated"].to_pylist() == [None, True, None, None]
    far = pa.table({"batch": [2], "kv": [64], "draft_length": [2.0**53]})
    assert ask(far)["status"].to_pylist() == ["invalid_work"]


def test_blanks_in_a_header_are_no_part_of_a_name(ask):
    expected = ask("decode_requests,kv_per_request,who\n2,32,a\n")
    for text in (
        "decode_requests, kv_per_request ,who \n2, 32,a\n",
        "\ndecode_requests, kv_per_request, who\n2, 32,a\n",
    ):
        assert ask(text).equals(expected)
        faulty = ask(text + "x,1,b\n")
        assert faulty.slice(0, 1).equals(expected) and faulty["fault"].null_count == 1
    assert ask(pa.table({" batch": [2], "kv ": [64]}))["latency_ms"].to_pylist() == [2.0625]


def test_what_only_resembles_an_input_that_is_there_is_carried(ask):
    extra = {"Decode_KV": [7], "kv_per_req": [8], "decode_request_id": [9], "decode_kv_var": [0.5], "prefill_ms": [1.0]}
    found = ask(pa.table({"decode_requests": [2], "decode_kv": [64], **extra, "mode": ["x"], "batch_size": [3]}))
    assert found["latency_ms"].to_pylist() == [2.0625]
    assert found["Decode_KV"].to_pylist() == [7] and found["input_prefill_ms"].to_pylist() == [1.0]


def test_rows_of_separators_keep_their_place(ask):
    found = ask("decode_requests,decode_kv,who\n1,64,a\n,,\n , ,b\n\n   \n2,64,c\n")
    assert found["status"].to_pylist() == ["ok", "invalid_work", "invalid_work", "ok"]
    assert found["fault"].to_pylist()[1:3] == [f"line {i}: decode_requests is empty, {WHOLE}" for i in (3, 4)]
    assert found["who"].to_pylist() == ["a", None, "b", "c"]


def test_blank_lines_do_not_shift_the_lines_of_faults(ask):
    found = ask("batch,kv,draft_length\n1,64,\n\n1,64,-3\n")
    assert found["fault"].to_pylist()[1].startswith("line 4: draft_length is -3, ")
    assert found["calibrated"].to_pylist() == [None, None]


def test_totals_without_requests_say_why_they_are_refused(ask):
    table = {"decode_requests": [1, 0, 0], "decode_kv": [64, 8, 0]}
    table |= {"prefill_requests": [0, 0, 0], "prefill_tokens": [5, 0, 0], "prefill_kv": [0, 0, 7]}
    found = ask(pa.table(table))
    assert found["status"].to_pylist() == ["invalid_work"] * 3 and found["latency_ms"].null_count == 3
    assert found["fault"].to_pylist() == [
        "row 0: prefill_tokens is 5 without any prefill_requests",
        "row 1: decode_kv is 8 without any decode_requests",
        "row 2: prefill_kv is 7 without any prefill_requests",
    ]
    per = ask(pa.table({"decode_requests": [0], "kv_per_request": [9]}))  # no request has any of it
    assert per["status"].to_pylist() == ["idle"] and per["fault"].null_count == 1


def test_every_row_that_no_draft_length_goes_with_says_why(ask):
    draft = {"decode_requests": [1, 1, 2**31, 1], "decode_kv": [64] * 4, "draft_length": [1, 2**33, 1, 1]}
    prefill = {"prefill_requests": [2, 0, 0, 0], "prefill_tokens": [9, 0, 0, 0]}
    found = ask(pa.table(draft | prefill))
    assert found["status"].to_pylist() == ["not_pure_decode", "draft_length_not_positive", "count_overflow", "ok"]
    assert found["fault"].to_pylist() == [
        "row 0: draft_length is 1, but prefill_requests is above 0, and a round is pure decode",
        "row 1: draft_length is 8589934592, but a draft length is a whole number from 0 to 4294967294",
        f"row 2: draft_length is 1, but that makes more than {U32_MAX} rows",
        None,
    ]
    for name in ("latency_ms", "scaling_factor", "calibrated"):
        assert [x is None for x in found[name].to_pylist()] == [True] * 3 + [False]


@pytest.mark.parametrize("bad", [False, True], ids=["at once", "line by line"])
def test_carried_fields_of_csv_stay_as_they_are_written(ask, bad):
    fields = ["007", " x ", "1.50", "NA", "true", "2026-01-01", "1e3"]
    found = ask("batch,kv,note\n" + "".join(f"1,64,{x}\n" for x in fields) + ("x,64,\n" if bad else ""))
    assert found.schema.field("note").type == pa.string()
    assert found["note"].to_pylist() == fields + ([None] if bad else [])


@pytest.mark.parametrize("bad", [False, True], ids=["at once", "line by line"])
def test_whole_numbers_of_csv_may_be_written_as_floats(ask, bad):
    text = "batch,kv,draft_length,price,who\n2.0,64.,,0.5,\n2,1e2,nan,nan,NA\n2,6.4E1,1.0,,x\n+2,64,3,1,y\n"
    found = ask(text + ("2.5,64,,1,\n" if bad else ""))
    assert found.schema.field("batch").type == found.schema.field("draft_length").type == pa.int64()
    assert found["batch"].to_pylist()[:4] == [2] * 4 and found["kv"].to_pylist()[:4] == [64, 100, 64, 64]
    assert found["scaling_factor"].to_pylist()[:4] == [1.0, 1.0, 1.33, 1.49]
    assert found["latency_ms"].to_pylist()[:2] == [2.0625, 2.09765625]
    assert found["who"].to_pylist()[:4] == [None, "NA", "x", "y"]
    assert found["price"].to_pylist()[:4] == ["0.5", "nan", None, "1"]
    assert found["fault"].to_pylist()[4:] == ([f"line 6: batch is '2.5', {WHOLE}"] if bad else [])


def test_both_ways_through_csv_read_the_same(ask, tmp_path):
    lines = ["decode_requests,decode_kv,price,who", *(f"{i % 9},{i},{i / 4},t{i}" for i in range(50))]
    clean = ask("\n".join(lines) + "\n")
    faulty = ask("\n".join([*lines, "x,1,2.5,t"]) + "\n")
    assert faulty.slice(0, 50).equals(clean)
    assert faulty["fault"].to_pylist()[50].startswith("line 52: decode_requests is 'x'")


def test_a_draft_length_of_text_is_a_fault_and_none_is_not(ask):
    found = ask("batch,kv,draft_length\n1,64,\n1,64,two\n1,64,2\n")
    assert found["status"].to_pylist() == ["ok", "invalid_work", "ok"]
    assert "a draft length is a whole number" in found["fault"].to_pylist()[1]


def test_columns_of_a_result_are_carried_under_another_name(ask):
    again = ask(ask(pa.table(GOOD)))
    assert again.column_names[3:6] == ["input_latency_ms", "input_status", "input_fault"]
    assert again["latency_ms"].equals(again["input_latency_ms"])


def test_a_table_is_asked_of_every_model_in_turn(model):
    found = sweep({"a": model, "b": model}, pa.table(GOOD), progress=False, chunk=2)
    assert found["model"].to_pylist() == ["a"] * 3 + ["b"] * 3
    assert found["tenant"].to_pylist() == ["a", None, "c"] * 2
    assert sweep({"a": model}, pa.table(GOOD), progress=False)["model"].to_pylist() == ["a"] * 3


def test_a_table_goes_on_too(model, tmp_path, monkeypatch):
    from fpmjax import result_files

    monkeypatch.setattr(result_files, "PART_ROWS", 4)
    source = tmp_path / "q.parquet"
    kv = np.arange(20)
    pq.write_table(pa.table({"batch": kv % 9, "kv": kv, "who": kv.astype(str)}), source, row_group_size=7)
    write, written = result_files.Part.write, []

    def interrupted(self, batch):
        if sum(written) >= 11:
            raise KeyboardInterrupt
        written.append(batch.num_rows)
        write(self, batch)

    monkeypatch.setattr(result_files.Part, "write", interrupted)
    options = {"out": tmp_path / "new", "chunk": 3, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        sweep([model, model], source, **options)
    monkeypatch.setattr(result_files.Part, "write", write)
    done = sweep([model, model], source, **options)
    assert done.rows == 40 and pq.read_table(tmp_path / "new").equals(sweep([model, model], source, progress=False))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"kv": [1]}, "needs a column decode_requests"),
        ({"x": [1]}, "no column that says what is asked"),
        ({"batch": [1], "decode_requests": [1]}, "are the same quantity"),
        ({"batch": [1], "kv": [1], "kv_per_request": [1]}, "say one thing twice"),
        ({"batch": ["1"], "kv": [1]}, "has type string, but holds whole numbers"),
        ({"batch": pa.array(["1"]).dictionary_encode(), "kv": [1]}, "has type dictionary"),
        ({"batch": pa.array([1.0], pa.float16()), "kv": [1]}, "has type halffloat"),
        ({"batch": [[1, 2]], "kv": [1]}, "one rank a row"),
        ({"batch": [True], "kv": [1]}, "has type bool"),
        ({"batch": [1], "kv": [1], "status": [1], "input_status": [1]}, "occurs twice in the result"),
        ({"batch": [1]}, "'batch' needs a column decode_kv or kv_per_request beside it\nhint: name counts"),
        ({"prefill_requests": [1]}, "needs a column prefill_tokens or tokens_per_request beside it"),
        ({"batch": [1], "kv": [1], "prefill_requests": [1]}, "needs a column prefill_tokens or"),
        ({"batch": [1], "kv_per_requst": [1]}, "hint: is 'kv_per_requst' meant as kv_per_request\\?  rename it"),
        ({"batch": [1], "Decode_KV": [1]}, "hint: is 'Decode_KV' meant as decode_kv"),
        ({"batch": [1], "kv": [1], "Draft Length": [1]}, "'Draft Length' is no input, but looks like draft_length"),
        ({"batch": [1], "kv": [1], "drat_length": [1]}, "looks like draft_length, which is not there\nhint: rename"),
        ({"batch": [1], "kv": [1], "Prefill_Requests": [1]}, "looks like prefill_requests"),
        ({"prefill_requests": [1], "prefill_tokens": [1], "prefil_kv": [1]}, "looks like prefill_kv"),
    ],
)
def test_columns_that_cannot_be_asked_are_refused_by_name(ask, table, text):
    with pytest.raises(OptionError, match=text) as caught:
        ask(pa.table(table))
    assert caught.value.code == "columns" and "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    "name", ["absent.parquet", "absent.csv", "text.parquet", "cut.csv.gz", "empty.csv", "a\0.csv", "a\0b"]
)
def test_files_that_cannot_be_read_are_told(model, tmp_path, name):
    path = tmp_path / name
    if name == "text.parquet":
        path.write_text("batch\n1\n")
    elif name == "cut.csv.gz":
        path.write_bytes(gzip.compress(b"batch\n1\n" * 99)[:20])
    elif name == "empty.csv":
        path.write_text("")
    with pytest.raises(OptionError) as caught:
        sweep(model, path, progress=False)
    assert caught.value.code in ("file", "columns") and name.replace("\0", "") in str(caught.value).replace("\0", "")


def test_a_clean_csv_is_read_at_once(tmp_path):
    path = tmp_path / "q.csv"
    for text in ("batch,kv\n1,64\n", "batch,kv,draft_length\n1,64.0,\n"):
        path.write_text(text)
        assert isinstance(read_csv(str(path)).places, range)
