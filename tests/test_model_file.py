"""Saved models in Parquet: readable by anything, and no hostile file gets past the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streams import decode_stream
from table_pairs import ROWS, refusal

from fpmjax.data import embedded_table
from fpmjax.errors import ModelFileError
from fpmjax.model_file import COLUMNS, DIGEST, MANIFEST, is_model_file, npy, read_members, write_members
from fpmjax.models.regression import regression
from fpmjax.store import digest_of, load_model, save_model

MODEL = regression(decode_stream(1, 30), role="decode")


@pytest.fixture
def path(tmp_path) -> Path:
    save_model(MODEL, tmp_path / "model.parquet")
    return tmp_path / "model.parquet"


def refused(path: Path | str) -> str:
    return refusal(load_model, path, error=ModelFileError)[0]


def test_any_reader_of_parquet_can_read_it(path):
    table = pq.read_table(path)
    assert table.column_names == list(COLUMNS) and table.schema.metadata[b"format"] == b"fpmjax model"
    rows = {row["name"]: row for row in table.to_pylist()}
    manifest = json.loads(rows["manifest"]["data"])
    assert manifest["kind"] == "Regression"
    for i, listed in enumerate(manifest["arrays"]):
        row = rows[f"a{i}"]
        assert (row["dtype"], json.loads(row["shape"])) == (listed["dtype"], listed["shape"])
        assert np.frombuffer(row["data"], row["dtype"]).size == np.prod(listed["shape"])


def test_both_containers_hold_the_same_members_and_the_content_tells_them_apart(path, tmp_path):
    save_model(MODEL, tmp_path / "model.npz")
    assert read_members(path) == read_members(tmp_path / "model.npz")
    os.rename(path, tmp_path / "other.npz")
    os.rename(tmp_path / "model.npz", path)
    for each in (path, tmp_path / "other.npz"):
        assert load_model(each).stores == MODEL.stores


def test_columns_along_the_fast_axis_are_saved_too(path):
    turned = MODEL.__class__(**{**vars(MODEL), "weights": np.asfortranarray(MODEL.weights)})
    learners = MODEL.learners.__class__(**{**vars(MODEL.learners), "x": np.asfortranarray(MODEL.learners.x)})
    save_model(turned.__class__(**{**vars(turned), "learners": learners}), path.with_suffix(".b.parquet"))
    assert path.with_suffix(".b.parquet").read_bytes() == path.read_bytes()


# Recognised


def test_saved_models_are_recognised_whole_or_damaged(path, tmp_path):
    save_model(MODEL, tmp_path / "archive")
    for each in (path, tmp_path / "archive"):
        data = each.read_bytes()
        assert is_model_file(each) and is_model_file(str(each))
        each.write_bytes(data[: len(data) // 2])
        assert is_model_file(each) and refused(each) == "not_a_model"
    (tmp_path / "empty.npz").touch()
    assert is_model_file(tmp_path / "empty.npz")


def test_other_files_are_not_taken_for_models(tmp_path):
    table = embedded_table()
    (tmp_path / "text").write_text("fpmjax model")
    (tmp_path / "empty").touch()
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    decode_stream(1, 3).write(tmp_path / "seen.parquet")
    others = [tmp_path / name for name in ("text", "empty", "rows.parquet", "seen.parquet", "not there", "")]
    for other in [table, *others, "\0"]:
        assert not is_model_file(other)


def test_recognising_needs_neither_jax_nor_arrow(path):
    script = "import sys; from fpmjax.model_file import is_model_file; print(is_model_file(sys.argv[1]), end=' ');"
    script += "print({'jax', 'pyarrow'} & {name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", script, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True set()\n"


# Refused


def test_other_parquet_is_refused_with_what_reads_it(tmp_path):
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    code, message = refusal(load_model, tmp_path / "rows.parquet", error=ModelFileError)
    assert code == "not_a_model"
    assert message.endswith("hint: load_cells reads tables, Observations.read reads observations")


def test_no_flipped_byte_of_any_part_goes_unnoticed(path):
    data = path.read_bytes()
    for i in [*range(len(data) - 900, len(data), 7), *range(4, len(data) - 900, 211)]:
        for bit in (0x01, 0x80):
            path.write_bytes(data[:i] + bytes([data[i] ^ bit]) + data[i + 1 :])
            try:
                again = load_model(path)  # a byte that no reader looks at, such as the name of the writer
            except ModelFileError:
                continue
            assert again.stores == MODEL.stores


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def rewrite(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    types = {"name": pa.string(), "dtype": pa.string(), "shape": pa.string(), "data": pa.large_binary()}
    table = pa.table({name: pa.array([row[name] for row in rows], types[name]) for name in rows[0]})
    pq.write_table(table, path, **{"compression": "NONE", "use_dictionary": False} | options)


def changed(path: Path, **fields: Any) -> None:
    """The first array with other fields."""
    rows = rows_of(path)
    rewrite(path, [row | fields if row["name"] == "a0" else row for row in rows])


def test_the_rows_alone_decide(path):
    rewrite(path, rows_of(path))
    assert load_model(path).stores == MODEL.stores
    rewrite(path, rows_of(path), use_dictionary=True, row_group_size=3)
    assert load_model(path).stores == MODEL.stores


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_and_an_extra_one(path, name):
    rows = rows_of(path)
    rewrite(path, [{k: v for k, v in row.items() if k != name} for row in rows])
    assert refused(path) == "not_a_model"
    pq.write_table(pa.Table.from_pylist([row | {"more": 1} for row in rows]), path, compression="NONE")
    assert refused(path) == "not_a_model"


def test_columns_of_other_types(path):
    table = pq.read_table(path)
    for name, column in (
        ("name", pa.array(range(len(table)))),
        ("data", pa.array([b.decode("latin1") for b in table["data"].to_pylist()])),
        ("shape", pa.array([json.loads(s) for s in table["shape"].to_pylist()])),
        ("dtype", pa.nulls(len(table), pa.string())),
    ):
        at = table.column_names.index(name)
        pq.write_table(table.set_column(at, name, column), path, compression="NONE")
        assert refused(path) == "not_a_model"


def test_rows_that_are_missing_repeated_or_too_many(path):
    rows = rows_of(path)
    rewrite(path, [*rows, rows[1] | {"name": "a9999"}])
    assert refused(path) == "malformed"
    rewrite(path, [row for row in rows if row["name"] != "a0"])
    assert refused(path) == "malformed"
    rewrite(path, [*rows, rows[1]])
    assert refused(path) == "not_a_model"
    for name in ("manifest", "digest"):
        rewrite(path, [row for row in rows if row["name"] != name])
        assert refused(path) == "not_a_model"
    rewrite(path, rows[:0] or [dict.fromkeys(COLUMNS)])
    assert refused(path) == "not_a_model"


@pytest.mark.parametrize(
    "shape",
    [
        *(
            "[1099511627776]",
            "[0, 4611686018427387904, 8]",
            "[-1]",
            "[1.0]",
            "[true]",
            "{}",
            "3",
            "",
            "[NaN]",
            "[null]",
        ),
        *("[" * 5000, "[9" + "9" * 5000 + "]", json.dumps([1] * 70), json.dumps([2**40] * 3), "[null]"),
    ],
)
def test_shapes_that_no_array_has(path, shape):
    changed(path, shape=shape)
    assert refused(path) == "malformed"


@pytest.mark.parametrize("dtype", ["object", "|O", "<f2", ">f8", "<U4", "f8,f8", "", "<M8[s]", "V8"])
def test_types_that_no_model_has(path, dtype):
    changed(path, dtype=dtype)
    assert refused(path) == "malformed"


def test_other_bytes_and_another_digest(path):
    rows = rows_of(path)
    first = next(row for row in rows if row["name"] == "a0")
    changed(path, data=first["data"] + b"\0")
    assert refused(path) == "malformed"
    changed(path, data=bytes(len(first["data"]) - 1) + b"\7")
    assert refused(path) == "digest"


def test_compressed_files_are_refused(path):
    for compression in ("snappy", "zstd", "gzip"):
        rewrite(path, rows_of(path), compression=compression)
        assert refused(path) == "not_a_model"


def test_a_value_that_stands_in_many_rows_does_not_fill_the_memory(path):
    rows = [{"name": f"a{i}", "dtype": "|u1", "shape": "[1048576]", "data": bytes(1 << 20)} for i in range(60)]
    rewrite(path, rows, use_dictionary=["data"], dictionary_pagesize_limit=1 << 22, write_batch_size=1)
    assert path.stat().st_size < 1 << 21
    code, message = refusal(load_model, path, error=ModelFileError)
    assert code == "not_a_model" and "overlap" in message


def test_what_a_manifest_lists_is_compared_with_the_rows(path):
    members = read_members(path)
    manifest = json.loads(rows_of(path)[0]["data"])
    manifest["arrays"][0]["shape"] = [2**40]
    members[MANIFEST] = npy(np.frombuffer(json.dumps(manifest).encode(), np.uint8))
    members[DIGEST] = npy(np.frombuffer(digest_of(m for name, m in members.items() if name != DIGEST), np.uint8))
    write_members(path, members)
    assert refused(path) == "shape"


def test_names_that_no_file_can_have():
    assert refusal(load_model, "a\0b", error=ModelFileError)[0] == "unreadable"
    for value in (None, 3.5, {}, b"model.npz", "", "."):
        assert refusal(load_model, value, error=ModelFileError)[0] == "unreadable"
    for value in ("a\0b", None, 3.5, b"model.npz", "", "."):
        assert refusal(save_model, MODEL, value, error=ModelFileError)[0] == "unwritable"


# Paths


def save_refused(path: Any) -> str:
    return refusal(save_model, MODEL, path, error=ModelFileError)[0]


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_only_regular_files_are_replaced_and_links_stay(suffix, tmp_path):
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / f"link.{suffix}", tmp_path / "folder" / f"model.{suffix}"
    link.symlink_to(target)
    save_model(MODEL, link)
    assert link.is_symlink() and target.is_file() and load_model(link).stores == MODEL.stores
    pipe = tmp_path / f"pipe.{suffix}"
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path / "folder"):
        assert save_refused(path) == "unwritable"
    assert pipe.is_fifo() and link.is_symlink() and os.listdir(tmp_path / "folder") == [target.name]


def test_concurrent_saves_of_one_path_publish_whole_files(path):
    models = [MODEL, regression(decode_stream(2, 50), role="decode", max_observations=400)]
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda model: save_model(model, path), models * 10):
            assert load_model(path).stores in [model.stores for model in models]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 256, "\ud800.npz", "a\0b", "folder/\udfff/a.npz"])
def test_names_that_no_file_system_takes(name, tmp_path):
    assert save_refused(f"{tmp_path}/{name}") == "unwritable"
    assert refused(f"{tmp_path}/{name}") == "unreadable"
    assert not os.listdir(tmp_path)


def test_the_longest_name_that_a_file_can_have(tmp_path):
    path = tmp_path / ("x" * 251 + ".npz")
    save_model(MODEL, path)
    assert load_model(path).stores == MODEL.stores
