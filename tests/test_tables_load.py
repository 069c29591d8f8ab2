"""Loading a table artifact: which files are taken, and what sidecar and Parquet file must be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from table_pairs import SIDECAR, refusal, seal, table
from table_pairs import with_row as row

from fpmjax.errors import TableError
from fpmjax.tables.load import load_cells
from fpmjax.tables.policy import POLICIES


def code_of(path: Path | str, **options) -> str:
    return refusal(load_cells, path, error=TableError, **options)[0]


# ---- which files


def test_a_pair_is_found_by_its_file_its_sidecar_or_its_folder(tmp_path):
    path = seal(tmp_path, table())
    for name in (path, str(path), tmp_path, path.with_suffix(".metadata.json"), os.fspath(tmp_path)):
        cells = load_cells(name)
        assert cells.path == str(path) and cells.sidecar["row_count"] == 6 and len(cells.digest) == 64


def test_any_stem_works(tmp_path):
    path = seal(tmp_path, table())
    path.rename(tmp_path / "my.table.parquet")
    path.with_suffix(".metadata.json").rename(tmp_path / "my.table.metadata.json")
    assert len(load_cells(tmp_path / "my.table.parquet")) == 1
    code, message = refusal(load_cells, tmp_path)
    assert code == "not_collected" and "my.table.parquet" in message.split("hint: ")[1]


@pytest.mark.parametrize("name", ["absent", "absent/absent.parquet", "x\0y", "a" * 5000, ""])
def test_nothing_there_is_not_collected(tmp_path, name):
    path = f"{tmp_path}/{name}"
    code, message = refusal(load_cells, path, error=TableError)
    assert code == "not_collected"
    assert "File does not exist at" in message and "No fpm_forward data collected" in message


def test_half_a_pair_is_refused(tmp_path):
    path = seal(tmp_path, table())
    path.with_suffix(".metadata.json").unlink()
    assert code_of(path) == "sidecar_missing"
    path.with_suffix(".metadata.json").mkdir()
    assert code_of(path) == "sidecar_missing"


def test_what_is_no_path_is_a_type_error():
    for path in (None, 3, b"bytes", ["a"], object()):
        with pytest.raises(TypeError):
            load_cells(path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="backend must be a string"):
        load_cells("x", backend=7)  # type: ignore[arg-type]


def test_an_unknown_fake_kv_names_the_choices(tmp_path):
    code, message = refusal(load_cells, seal(tmp_path, table()), fake_kv="mend", error=TableError)
    assert code == "fake_kv" and "drop, heal, keep" in message


def test_a_rewritten_file_is_noticed(tmp_path):
    first = load_cells(seal(tmp_path, table()))
    second = load_cells(seal(tmp_path, table(row(4, latency_ms=9.0))))
    assert first.digest != second.digest
    assert second.select().decode.latency_ms.tolist() == [6.0, 9.0, 7.5]


# ---- the sidecar


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff\xfe{}", "decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b'{"x": -Infinity}', "-Infinity is not JSON"),
        (b'{"x": 1e999}', "out of range"),
        (b'{"x": 1' + b"0" * 400 + b"}", "out of range"),
        (b'{"x": 1' + b"0" * 9000 + b"}", "out of range"),
        (b'{"x": "\\ud800"}', "surrogates"),
        (b'{"x": 1, "x": 1}', "occurs twice"),
        (b'{"x": {"y": 1, "y": 2}}', "occurs twice"),
        (b'{"x": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
        (b"PAR1\0\0PAR1", "Expecting value"),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_sidecar_that_is_no_json_object_is_refused(tmp_path, data, reason):
    path = seal(tmp_path, table())
    path.with_suffix(".metadata.json").write_bytes(data)
    code, message = refusal(load_cells, path, error=TableError)
    assert code == "sidecar_json" and reason in message


def test_a_number_may_be_written_as_an_integral_float(tmp_path):
    assert load_cells(seal(tmp_path, table(), {"schema_version": 7.0, "row_count": 6.0})).select().schema_version == 7


SIDECAR_FAULTS = [  # (fields, code) in the order of the checks: each also has every fault after it
    ({"schema_name": "other"}, "schema_name"),
    ({"schema_version": True}, "schema_version"),
    ({"coordinate_system": None}, "coordinate_system"),
    ({"measurement_policy": ...}, "measurement_policy"),
    ({"system": "b200"}, "system"),
    ({"backend": "trtllm"}, "backend"),
    ({"backend_version": 24}, "backend_version"),
    ({"parquet_sha256": "0" * 64}, "digest"),
    ({"configuration_selector": {"dcp": True}}, "selector"),
    ({"row_count": 5}, "row_count"),
]


@pytest.mark.parametrize("first", range(len(SIDECAR_FAULTS)))
def test_the_first_sidecar_fault_is_the_one_reported(tmp_path, first):
    fields = {name: value for faults, _ in SIDECAR_FAULTS[first:] for name, value in faults.items()}
    path = seal(tmp_path, table(row(0, latency_ms=-1.0)), fields)
    asked = {name: SIDECAR[name] for name in ("system", "backend", "backend_version")}
    assert code_of(path, **asked) == SIDECAR_FAULTS[first][1]


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.backend])
def test_a_policy_of_one_backend_is_refused_under_another_and_under_schema_6(tmp_path, policy):
    other = {"measurement_policy": policy, "backend": "trtllm"}
    code, message = refusal(load_cells, seal(tmp_path, table(), other))
    assert code == "measurement_policy" and 'for schema 7 backend "trtllm"' in message
    old = {"measurement_policy": policy, "backend": POLICIES[policy].backend, "schema_version": 6}
    assert code_of(seal(tmp_path, table(), old)) == "measurement_policy"


def test_the_digest_is_lower_case_hex_of_the_bytes(tmp_path):
    path = seal(tmp_path, table())
    fields = json.loads(path.with_suffix(".metadata.json").read_text())
    upper = seal(tmp_path, table(), {"parquet_sha256": fields["parquet_sha256"].upper()})
    assert code_of(upper) == "digest"


@pytest.mark.parametrize("value", [None, 7, "", ["h200_sxm"]])
@pytest.mark.parametrize("name", ["system", "backend", "backend_version"])
def test_an_identity_taken_from_the_sidecar_is_text(tmp_path, name, value):
    assert code_of(seal(tmp_path, table(), {name: value})) == name


# ---- the Parquet file


def test_swapped_truncated_and_foreign_files_are_refused(tmp_path):
    path = seal(tmp_path, table())
    good = path.read_bytes()
    path.write_bytes(good[:-20])
    assert code_of(path) == "digest"
    for bad in (
        b"",
        b"PAR1",
        b"PAR1PAR1",
        good[:-20],
        good[: len(good) // 2] + good[len(good) // 2 + 9 :],
        b"text" * 99,
    ):
        assert code_of(seal(tmp_path, bad)) == "parquet"
    ipc = pa.BufferOutputStream()
    with pa.ipc.new_file(ipc, table().schema) as writer:
        writer.write_table(table())
    assert code_of(seal(tmp_path, ipc.getvalue().to_pybytes())) == "parquet"


def test_no_corrupted_byte_gets_past_the_reader(tmp_path):
    """A sealed file with damaged bytes loads as some table or is refused by name; nothing else is raised."""
    good = seal(tmp_path, table(), compression="none").read_bytes()
    rng = np.random.default_rng(7)
    for _ in range(60):
        data = bytearray(good)
        data[int(rng.integers(4, len(data) - 8))] ^= int(rng.integers(1, 256))
        try:
            load_cells(seal(tmp_path, bytes(data), {"row_count": 6}))
        except TableError as error:
            assert error.code


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "lz4", "brotli", "zstd"])
def test_every_compression_that_arrow_reads_is_read(tmp_path, compression):
    assert len(load_cells(seal(tmp_path, table(), compression=compression))) == 1


def test_row_groups_column_order_and_extra_columns_do_not_matter(tmp_path):
    odd = table().append_column("notes", pa.array([{"a": 1}] * 6)).select([*table().column_names[::-1], "notes"])
    cell = load_cells(seal(tmp_path, odd, row_group_size=2)).select()
    assert cell.decode.kv.tolist() == [4096, 4096, 8192] and cell.decode.row.tolist() == [3, 4, 5]


def test_text_may_be_any_arrow_text(tmp_path):
    texts = {name: pa.large_string() for name in ("model_path", "workload_kind")}
    texts |= {name: pa.dictionary(pa.int8(), pa.string()) for name in ("cell_id", "kv_seed_regime", "partition_policy")}
    assert load_cells(seal(tmp_path, table(types=texts))).select().identity.model == "acme/small"


WRONG_TYPES = [
    *[(name, kind, "int64") for name in ("batch_size", "total_kv_read_tokens", "tp") for kind in ("int32", "uint64")],
    ("total_prefill_tokens", "float64", "int64"),
    ("latency_ms", "float32", "float64"),
    ("model_path", "binary", "a string column"),
    ("cell_id", "binary", "a string column"),
    ("kv_seed_regime", "binary", "a string column"),
    ("workload_kind", "binary", "a string column"),
]


@pytest.mark.parametrize(("name", "kind", "wanted"), WRONG_TYPES)
def test_a_column_of_another_type_is_refused_by_name(tmp_path, name, kind, wanted):
    data = table()
    data = data.set_column(data.column_names.index(name), name, data[name].cast(getattr(pa, kind)()))
    code, message = refusal(load_cells, seal(tmp_path, data))
    assert code == "column_type" and f"column {name} must be {wanted}, but is {kind}" in message


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    data = table()
    bad = pa.array([b"cell\xff"] * 6, pa.binary()).view(pa.string())
    data = data.set_column(data.column_names.index("cell_id"), "cell_id", bad)
    code, message = refusal(load_cells, seal(tmp_path, data))
    assert code == "column_type" and "cell_id must be UTF-8 text" in message


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    assert code_of(seal(tmp_path, table().append_column("tp", pa.array([2] * 6)))) == "column_duplicate"


def test_a_missing_column_is_named_with_the_likely_typo(tmp_path):
    data = table().rename_columns([{"latency_ms": "latency_us"}.get(n, n) for n in table().column_names])
    code, message = refusal(load_cells, seal(tmp_path, data, {"row_count": 99}))
    assert code == "column_missing" and 'column "latency_ms" missing' in message and "'latency_us'" in message


def test_row_count_comes_before_emptiness_and_both_before_rows(tmp_path):
    empty = table().slice(0, 0)
    assert code_of(seal(tmp_path, empty, {"row_count": 1})) == "row_count"
    assert code_of(seal(tmp_path, empty)) == "empty"
    narrow = table(types={"batch_size": pa.int32()})
    assert code_of(seal(tmp_path, narrow, {"row_count": 7})) == "row_count"


# ---- what is accepted but said


def test_what_was_done_to_fake_rows_is_said(tmp_path):
    fake = row(5, kv_seed_regime="fake_fallback") | row(3, batch_size=8, total_kv_read_tokens=2048)
    for choice, word in (("drop", "1 dropped"), ("keep", "1 kept"), ("heal", "1 healed")):
        cells = load_cells(seal(tmp_path, table(fake)), fake_kv=choice)
        assert cells.warnings == (f"1 of 6 rows were measured on fake_fallback KV: {word}",)
        assert len(cells.select().decode) == (2 if choice == "drop" else 3)


def test_oddities_are_said_once_and_a_good_table_is_silent(tmp_path):
    assert load_cells(seal(tmp_path, table(row(3, batch_size=8, total_kv_read_tokens=2048)))).warnings == ()
    odd = {
        "workload_kind": ["decode"] * 3,
        "batch_size": [4, 8, 16],
        "total_prefill_tokens": [0] * 3,
        "total_kv_read_tokens": [1, 4096, 4096],
        "latency_ms": [1.0, 2.0, 3.0],
        "kv_seed_regime": ["real_kv"] * 3,
        "tp": [None, 1, 1],
    }
    assert load_cells(seal(tmp_path, table(odd))).warnings == (
        "2 of 2 cells have no prefill rows, so prefill work is refused there",
        "3 of 3 decode batches have a single KV total, and answer at that total only",
        "1 decode rows read fewer KV tokens than they have requests, first in row 0",
        "1 rows have no tp: they form a cell of their own, with tp=None",
    )
