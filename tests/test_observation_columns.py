"""Observations in files and tables: they give back the same bits, and what is no such table is refused whole."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import assert_same, code_of, lists_and_ranks

from fpmjax import Observations, TraceError, Work
from fpmjax.work import COUNTS


@pytest.mark.parametrize("part", [slice(None), slice(0, 0), slice(0, 1), slice(1, 3)])
def test_parquet_gives_back_the_same_bits(part, tmp_path):
    observations = lists_and_ranks()[part]
    observations.write(tmp_path / "o.parquet")
    assert_same(Observations.read(tmp_path / "o.parquet"), observations)
    assert_same(Observations.read(pq.read_table(tmp_path / "o.parquet")), observations)
    assert [p.name for p in tmp_path.iterdir()] == ["o.parquet"]


@given(st.data())
def test_any_observations_survive_parquet(tmp_path_factory, data):
    n, r = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    u32 = st.integers(1, 2**32 - 1)
    draw = lambda values: np.array(data.draw(st.lists(values, min_size=n * r, max_size=n * r))).reshape(n, r)  # noqa: E731
    work = Work.of(
        **{name: draw(u32).astype(np.uint32) for name in COUNTS},
        prefill_length_var=draw(st.floats(allow_nan=False, allow_infinity=False)).astype(float),
        decode_kv_var=draw(st.floats(allow_nan=False, allow_infinity=False)).astype(float),
        ranks=True,
    )
    wall = data.draw(st.lists(st.floats(1e-300, 1e10), min_size=n, max_size=n))
    observations = Observations.of(work, np.array(wall, float))
    path = tmp_path_factory.mktemp("o") / "o.parquet"
    observations.write(path)
    assert_same(Observations.read(path), observations)


def test_csv_holds_one_rank_without_lists(tmp_path):
    observations = Observations.of(Work.decode([1, 2], [5, 6]), [0.1, 1 / 3], timing="cuda")
    observations.write(tmp_path / "o.csv")
    assert_same(Observations.read(tmp_path / "o.csv"), observations)
    assert code_of(lists_and_ranks().write, tmp_path / "p.csv") == "columns"
    assert code_of(observations.write, tmp_path / "none" / "p.parquet") == "file"
    assert [p.name for p in tmp_path.iterdir()] == ["o.csv"]


def csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "o.csv"
    path.write_text(text)
    return path


def test_published_column_names_are_understood(tmp_path):
    lattice = """gpu,phase,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms,latency_source
H,decode,8,0,4096,7.5,update
H,prefill,2,512,128,20,update
"""
    observations = Observations.read(csv(tmp_path, lattice))
    assert observations.work.decode_requests[:, 0].tolist() == [8, 0]
    assert observations.work.decode_kv[:, 0].tolist() == [4096, 0]
    assert observations.work.prefill_requests[:, 0].tolist() == [0, 2]
    assert observations.work.prefill_tokens[:, 0].tolist() == [0, 512]
    assert observations.work.prefill_kv[:, 0].tolist() == [0, 128]
    assert observations.wall_ms.tolist() == [7.5, 20.0] and observations.timing == "update"
    assert Observations.read(tmp_path / "o.csv", timing="mine").timing == "mine"

    rounds = """phase,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms,prefill_requests,decode_requests,\
prefill_kv_tokens,decode_kv_tokens,var_prefill_length,var_decode_kv
mixed,9,512,4224,30.5,1,8,128,4096,0.0,2.5
"""
    observations = Observations.read(csv(tmp_path, rounds))
    assert [int(getattr(observations.work, name)[0, 0]) for name in COUNTS] == [1, 512, 128, 8, 4096]
    assert observations.work.decode_kv_var[0, 0] == 2.5

    composed = "phase,batch_size,total_prefill_tokens,total_kv_read_tokens,latency_ms,kv_prefill,n_decode,kv_decode\n"
    observations = Observations.read(csv(tmp_path, composed + "mixed,3,16,48,17.4,16,2,32\n"))
    assert [int(getattr(observations.work, name)[0, 0]) for name in COUNTS] == [1, 16, 16, 2, 32]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("decode_requests,decode_kv\n1,2\n", "columns"),
        ("wall_ms,latency_ms,decode_requests\n1,1,1\n", "columns"),
        ("wall_ms,decode_kv\n1,1\n", "columns"),
        ("wall_ms,decode_requests\n1,1.5\n", "values"),
        ("wall_ms,decode_requests\n1,-1\n", "values"),
        ("wall_ms,decode_requests\n1,4294967296\n", "values"),
        ("wall_ms,decode_requests\n1,\n2,1\n", "values"),
        ("wall_ms,decode_requests\nx,1\n", "values"),
        ("wall_ms,decode_requests\nnan,1\n", "values"),
        ("wall_ms,decode_requests\ninf,1\n", "payload"),
        ("wall_ms,decode_requests,decode_kv\n1,0,7\n", "decode_kv_without_requests"),
        ("wall_ms,phase,batch_size,total_kv_read_tokens\n1,mixed,3,7\n", "columns"),
        ("wall_ms,phase,batch_size,total_kv_read_tokens\n1,sd_round,3,7\n", "values"),
        ("wall_ms,batch_size,total_kv_read_tokens\n1,3,7\n", "columns"),
        ("wall_ms,batch_size,decode_requests\n1,3,7\n", "columns"),
        ("wall_ms,decode_requests,draft_length\n1,7,0\n1,7,3\n", "speculative"),
        ("wall_ms,decode_requests,timing\n1,7,a\n1,7,b\n", "mixed_timing"),
        ("", "file"),
    ],
)
def test_a_bad_table_is_refused_whole(text, code, tmp_path):
    assert code_of(Observations.read, csv(tmp_path, text)) == code


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"wall_ms": [1.0, 2.0], "decode_requests": [[1, 2], [3]]}, "columns"),
        ({"wall_ms": [1.0], "decode_requests": [[1, 2]], "decode_kv": [[1, 2, 3]]}, "columns"),
        ({"wall_ms": [1.0], "decode_requests": [[1, None]]}, "values"),
        ({"wall_ms": [1.0], "decode_requests": [None]}, "values"),
        ({"wall_ms": [1.0], "decode_requests": [True]}, "values"),
        ({"wall_ms": [1.0], "decode_requests": [1], "extend_lengths": [[1]]}, "columns"),
        ({"wall_ms": [1.0], "decode_requests": [1], "extend_lengths": [[1, 1]], "past_kv_lengths": [[1]]}, "values"),
        ({"wall_ms": [1.0], "decode_requests": [1], "extend_lengths": [[-1]], "past_kv_lengths": [[1]]}, "values"),
        ({"wall_ms": [1.0], "decode_requests": [1], "extend_lengths": ["x"], "past_kv_lengths": [[1]]}, "columns"),
    ],
)
def test_a_bad_arrow_table_is_refused_whole(columns, code):
    assert code_of(Observations.read, pa.table(columns)) == code


def test_lists_of_an_arrow_table_are_ranks_and_absent_columns_are_zero():
    table = pa.table({"wall_ms": [1.0, 2.0], "decode_requests": [[1, 2], [3, 0]], "decode_kv": [[10, 20], [30, 0]]})
    observations = Observations.read(table)
    assert observations.work.decode_kv.tolist() == [[10, 20], [30, 0]] and observations.timing == "unspecified"
    assert not observations.work.prefill_tokens.any()


@pytest.mark.parametrize(
    ("words", "timing"),
    [
        ([None, None], "unspecified"),
        (["", None], "unspecified"),
        (["unspecified", None], "unspecified"),
        (["cuda", "cuda"], "cuda"),
    ],
)
def test_a_clock_that_is_not_given_is_unspecified(words, timing):
    for column in (pa.array(words), pa.array(words, pa.string()), pa.array(words, pa.string()).dictionary_encode()):
        table = pa.table({"wall_ms": [1.0, 2.0], "decode_requests": [1, 1], "timing": column})
        assert Observations.read(table).timing == timing


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"timing": ["cuda", None]}, "mixed_timing"),
        ({"timing": [5, 5]}, "values"),
        ({"timing": [["cuda"], ["cuda"]]}, "values"),
        ({"phase": ["decode", None], "batch_size": [1, 1]}, "values"),
        ({"phase": [1, 2], "batch_size": [1, 1]}, "values"),
        ({"draft_length": [0, None]}, None),
        ({"draft_length": ["3", "0"]}, "speculative"),
        ({"draft_length": [0.0, 2.0]}, "speculative"),
    ],
)
def test_words_and_draft_lengths_are_checked(columns, code):
    work = {} if "phase" in columns else {"decode_requests": [1, 1]}
    table = pa.table({"wall_ms": [1.0, 2.0], **work, **columns})
    if code is None:
        assert len(Observations.read(table)) == 2
    else:
        assert code_of(Observations.read, table) == code


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".ipc", ".csv", ".csv.gz", ".CSV", ".Arrow", ""])
def test_a_file_is_read_as_the_format_that_its_name_was_written_in(suffix, tmp_path):
    observations = Observations.of(Work.decode([7, 8], [70, 81]), [0.1, 1 / 3], timing="wall")
    observations.write(tmp_path / f"o{suffix}")
    assert_same(Observations.read(tmp_path / f"o{suffix}"), observations)


def test_columns_of_foreign_types_are_refused():
    work = {"decode_requests": [1, 1], "decode_kv": [5, 5], "extend_lengths": [[1], [1]], "past_kv_lengths": [[5], [5]]}
    foreign = [
        pa.array([{"a": 1}] * 2),
        pa.array([[(1, 2)]] * 2, pa.map_(pa.int32(), pa.int32())),
        pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
        pa.RunEndEncodedArray.from_arrays([2], [5]),
        pa.array([[[1]], [[2]]]),
        pa.array([b"1", b"2"]),
        pa.array([1, 2], pa.timestamp("s")),
        pa.array([1, 2]).dictionary_encode(),
    ]
    for name in ("wall_ms", *work):
        for column in foreign:
            if name not in ("extend_lengths", "past_kv_lengths") or not pa.types.is_list(column.type):
                assert code_of(Observations.read, pa.table({"wall_ms": [1.0, 2.0], **work, name: column})) in (
                    "columns",
                    "values",
                )


@pytest.mark.parametrize(
    "note", [b"\xff", b"[" * 100_000, b'{"lists":"q"}', b'{"lists":1e300}', b'{"lists":-5}', b"9" * 5000]
)
def test_a_damaged_note_is_none(note):
    table = pa.table({"wall_ms": [1.0], "decode_requests": [1], "extend_lengths": [[1]], "past_kv_lengths": [[1]]})
    key = b"fpmjax.observations"
    assert_same(Observations.read(table.replace_schema_metadata({key: note})), Observations.read(table))
    assert code_of(Observations.read, table.replace_schema_metadata({key: b'{"lists":100000000000}'})) == "too_large"


def test_sources_that_are_no_files_are_said_so():
    for source in (5, None, b"o.parquet", ["o.parquet"], "", "o\0.parquet", {"wall_ms": [1.0]}):
        assert code_of(Observations.read, source) == "file"
        assert code_of(lists_and_ranks().write, source) == "file"
    for work in (None, [1], {"decode_requests": 1}):
        assert code_of(Observations.of, work, [1.0]) == "payload"


def test_files_that_are_none_are_said_so(tmp_path):
    (tmp_path / "o.parquet").write_bytes(b"PAR1 not really")
    for name in ("o.parquet", "none.parquet", "none.csv", "none.arrow"):
        with pytest.raises(TraceError, match=name.replace(".", r"\.")) as caught:
            Observations.read(tmp_path / name)
        assert caught.value.code == "file"


BOTH = (
    "wall_ms,phase,batch_size,total_kv_read_tokens,prefill_requests,prefill_tokens,prefill_kv,decode_requests,decode_kv"
)


@pytest.mark.parametrize(
    ("drop", "text", "wrong"),
    [
        ("", "5,decode,8,40,0,0,0,8,40", None),
        ("", "5,prefill,2,16,2,9,16,0,0", None),
        ("", "5,mixed,10,56,2,9,16,8,40", None),
        ("", "5,decode,9,40,0,0,0,8,40", "batch_size 9"),
        ("", "5,decode,8,5,0,0,0,8,40", "total_kv_read_tokens 5"),
        ("", "5,decode,8,5,0,0,0,8,0", "total_kv_read_tokens 5"),
        ("", "5,decode,10,56,2,9,16,8,40", "phase 'decode'"),
        ("", "5,prefill,8,40,0,0,0,8,40", "phase 'prefill'"),
        ("phase", "5,9,40,0,0,0,8,40", "batch_size 9"),
        ("batch_size", "5,decode,56,2,9,16,8,40", "phase 'decode'"),
        ("batch_size", "5,decode,41,0,0,0,8,40", "total_kv_read_tokens 41"),
        ("batch_size", "5,warm-up,40,0,0,0,8,40", None),
        ("prefill_kv", "5,mixed,10,56,2,9,8,40", None),
        ("prefill_kv", "5,mixed,10,39,2,9,8,40", "total_kv_read_tokens 39"),
        ("decode_kv", "5,mixed,10,56,2,9,16,8", None),
    ],
)
def test_work_that_a_file_says_twice_has_to_agree(drop, text, wrong, tmp_path):
    header = ",".join(name for name in BOTH.split(",") if name != drop)
    path = csv(tmp_path, f"{header}\n{text}\n")
    if wrong is None:
        work = Observations.read(path).work
        whole = {name: int(getattr(work, name)[0, 0]) for name in COUNTS}
        assert (whole["prefill_kv"], whole["decode_kv"]) in ((0, 40), (16, 0), (16, 40))
        return
    with pytest.raises(TraceError, match=rf"o\.csv: row 0 says {wrong}, but also prefill_requests \[") as caught:
        Observations.read(path)
    assert caught.value.code == "values"


def test_ranks_beside_a_phase_have_to_agree_too():
    columns = {"wall_ms": [1.0], "phase": ["decode"], "decode_requests": [[1, 2]], "prefill_requests": [[0, 0]]}
    assert len(Observations.read(pa.table(columns))) == 1
    assert code_of(Observations.read, pa.table(columns | {"prefill_requests": [[0, 1]]})) == "values"


def test_writing_replaces_regular_files_only(tmp_path):
    observations = Observations.of(Work.decode([1], [5]), [1.0])
    for suffix in (".parquet", ".csv", ".arrow"):
        pipe, target, link = (tmp_path / f"{name}{suffix}" for name in ("pipe", "target", "link"))
        os.mkfifo(pipe)
        assert code_of(observations.write, pipe) == "file" and pipe.is_fifo()
        observations.write(target)
        link.symlink_to(target)
        observations[:0].write(link)
        assert link.is_symlink() and len(Observations.read(target)) == 0
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir()
        assert code_of(observations.write, folder) == "file"
    assert len(list(tmp_path.iterdir())) == 12


def test_threads_may_write_the_same_file(tmp_path):
    several = [Observations.of(Work.decode([1] * n, 5), [1.0] * n) for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(observations.write, tmp_path / "o.parquet") for observations in several]:
            assert done.result() is None
    assert 1 <= len(Observations.read(tmp_path / "o.parquet")) <= 8
    assert [p.name for p in tmp_path.iterdir()] == ["o.parquet"]
