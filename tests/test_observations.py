"""`Observations`: what is kept, what is refused, and that files give back the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmjax import FpmError, MetricsError, Observations, TraceError, Work, x64
from fpmjax.work import COUNTS


def rank(decode: int = 0, kv: int = 0, wall: float | int | None = None, **scheduled) -> dict:
    metrics: dict = {"scheduled_requests": {"num_decode_requests": decode, "sum_decode_kv_tokens": kv, **scheduled}}
    return metrics if wall is None else metrics | {"wall_time": wall}


def code_of(call, *args, **options) -> str:
    with pytest.raises(FpmError) as caught:
        call(*args, **options)
    assert "\nhint: " in str(caught.value)
    return caught.value.code


def assert_same(a: Observations, b: Observations) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# --- of ----------------------------------------------------------------------------------------------------


def test_idle_and_unmeasured_iterations_are_left_out_and_counted():
    work = Work.of(decode_requests=[8, 0, 4, 4, 2], prefill_requests=[0, 1, 0, 0, 0], prefill_kv=[0, 9, 0, 0, 0])
    observations = Observations.of(work, [7.0, 5.0, 0.0, -3.0, 6000.0], timing="wall")
    assert observations.wall_ms.tolist() == [7.0, 6000.0]  # a cold start is a measurement
    assert observations.work.decode_requests.tolist() == [[8], [2]]
    assert observations.report == {"accepted": 2, "idle": 1, "no_wall_time": 2, "overflow": 0}
    assert observations.timing == "wall" and len(observations) == 2


@pytest.mark.parametrize("wall", [[1.0, float("nan")], [1.0, float("inf")], [1.0, True], [1.0, "2"], [1.0, None]])
def test_a_wall_time_that_is_no_number_refuses_the_batch(wall):
    with pytest.raises(MetricsError, match=r"wall_ms\[1\] is ") as caught:
        Observations.of(Work.decode([1, 2], 5), wall)
    assert caught.value.code == "payload"


def test_shapes_have_to_agree_and_are_flattened_in_c_order():
    work = Work.decode(np.arange(1, 7, dtype=np.uint32).reshape(2, 3), 5)
    wall = np.arange(1, 7).reshape(2, 3)
    observations = Observations.of(work, wall)
    assert observations.wall_ms.tolist() == observations.work.decode_requests[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert len(Observations.of(Work.decode(1, 5), 2.5)) == 1
    for bad in (wall.T, 1.0, [1.0] * 6):
        assert code_of(Observations.of, work, bad) == "payload"
    assert code_of(Observations.of, work, wall, timing="") == "payload"
    assert code_of(Observations.of, work, wall, timing=3) == "payload"


def test_jax_arrays_and_absent_fields_are_fine():
    with x64():
        work = Work(decode_requests=jnp.ones((3, 1), jnp.uint32), decode_kv=jnp.ones((3, 1), jnp.uint32))
        observations = Observations.of(work, jnp.asarray([1.0, 0.0, 2.0]))
    assert observations.wall_ms.tolist() == [1.0, 2.0] and observations.work.prefill_tokens is None
    assert isinstance(observations.work.decode_kv, np.ndarray)


# --- from_metrics ------------------------------------------------------------------------------------------


def test_the_shapes_that_tuning_takes():
    one = rank(2, 10, 0.5)
    for given_, iterations, ranks in (
        (one, 1, 1),
        ([one, one], 1, 2),
        ([[one], [one, one]], 2, 2),
        ((one,), 1, 1),
        (json.dumps([[one], [one]]), 2, 1),
        ([], 0, 1),
    ):
        observations = Observations.from_metrics(given_)
        assert (len(observations), observations.work.ranks) == (iterations, ranks)


def test_the_wall_time_is_the_largest_positive_one_times_1000():
    walls = Observations.from_metrics(
        [[rank(1, 5, -9.0), rank(1, 5, 0.011)], [rank(1, 5, 0.007), rank(0, 0, 0.013)], [rank(1, 5, 0.0066)]]
    ).wall_ms
    assert walls.tolist() == [0.011 * 1000.0, 0.013 * 1000.0, 0.0066 * 1000.0]


def test_what_is_no_observation_is_left_out():
    observations = Observations.from_metrics(
        [[rank(1, 5, 0.5)], [rank(0, 0, 0.5)], [rank(1, 5)], [rank(1, 5, -1.0)], [rank(1, 5, 1e308)], [rank(1, 5, 0)]]
    )
    assert len(observations) == 1
    assert observations.report == {"accepted": 1, "idle": 1, "no_wall_time": 3, "overflow": 1}


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ([[]], "no_ranks"),
        ([rank(1, 5, 0.1), [rank(1, 5, 0.1)]], "payload"),
        ([[rank(1, 5, 0.1)], rank(1, 5, 0.1)], "payload"),
        ([[rank(1, 5, 0.1)], [rank(0, 5, 0.1)]], "decode_kv_without_requests"),
        ([[rank(1, 5, 0.1)], [rank(1, 5, float("nan"))]], "payload"),
        ([[rank(1, 5, 0.1)], [rank(1, 5, float("inf"))]], "payload"),
        ([[rank(1, 5, 0.1)], [{"version": 2}]], "schema_version"),
        ([[rank(1, 5, 0.1)], [rank(-1, 5, 0.1)]], "u32"),
        ([[rank(1, 5, 0.1)], [rank(0, 0, 0.0, sum_prefill_tokens=1)]], "prefill_sums_without_requests"),
        ([[rank(1, 5, 0.1)], 7], "payload"),
        ([[rank(1, 5, 0.1)], "{}"], "payload"),
        (7, "payload"),
        (None, "payload"),
        ("{", "json"),
        ('{"wall_time": NaN}', "json"),
    ],
)
def test_one_bad_item_refuses_the_whole_batch(bad, code):
    assert code_of(Observations.from_metrics, bad) == code


# --- pieces ------------------------------------------------------------------------------------------------


def lists_and_ranks() -> Observations:
    listed = {"extend_lengths": [1, 1, 1], "past_kv_lengths": [2**40, 0, 7]}
    return Observations.from_metrics(
        [
            [rank(1, 10, 0.1)],
            [rank(2, 20, 0.2), rank(3, 30, 0.1, **listed)],
            [rank(0, 0, 0.3, extend_lengths=[], past_kv_lengths=[]), rank(4, 40)],
            [rank(5, 50, 0.4, var_decode_kv_tokens=2.5), rank(0, 0), rank(6, 60)],
        ],
        timing="wall",
    )


def test_slices_masks_and_concatenation_agree():
    observations = lists_and_ranks()
    assert_same(observations[1:3], observations.where(np.array([False, True, True, False])))
    assert_same(Observations.concat([observations[:1], observations[1:4]]), observations)
    assert len(observations[9:]) == 0 and observations[1:].report == {}
    for key in (0, [1, 2], np.array([True] * 4)):
        with pytest.raises(TypeError):
            observations[key]
    for mask in ([1, 0, 1, 0], [True], np.ones((4, 1), bool)):
        assert code_of(observations.where, mask) == "payload"


def test_concatenation_pads_ranks_and_lists_and_keeps_one_clock():
    observations = lists_and_ranks()
    plain = Observations.of(Work.decode([7], 70), [0.5], timing="wall")
    both = Observations.concat([plain, observations])
    assert both.work.decode_requests[0].tolist() == [7, 0, 0] and both.work.lists.count[0].tolist() == [-1, -1, -1]
    assert_same(both[1:], observations)
    assert both.report == {"accepted": 5, "idle": 0, "no_wall_time": 0, "overflow": 0}
    other = Observations.of(Work.decode([7], 70), [0.5], timing="cuda")
    assert code_of(Observations.concat, [plain, other]) == "mixed_timing"
    assert Observations.concat([plain, other], mixed_timing=True).timing == "mixed"
    assert len(Observations.concat([])) == 0


def test_observations_are_a_pytree_without_the_report():
    observations = lists_and_ranks()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(observations))
    with x64():
        doubled = jax.jit(lambda o: o.wall_ms * 2)(observations)
    assert doubled.tolist() == (observations.wall_ms * 2).tolist()
    assert jax.tree.map(lambda x: x, observations).timing == "wall"


# --- files -------------------------------------------------------------------------------------------------


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
    wall = data.draw(st.lists(st.floats(1e-300, 1e300), min_size=n, max_size=n))
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


def test_sources_that_are_no_files_are_said_so():
    for source in (5, None, b"o.parquet", ["o.parquet"], "", "o\0.parquet", {"wall_ms": [1.0]}):
        assert code_of(Observations.read, source) == "file"
    for work in (None, [1], {"decode_requests": 1}):
        assert code_of(Observations.of, work, [1.0]) == "payload"


def test_files_that_are_none_are_said_so(tmp_path):
    (tmp_path / "o.parquet").write_bytes(b"PAR1 not really")
    for name in ("o.parquet", "none.parquet", "none.csv", "none.arrow"):
        with pytest.raises(TraceError, match=name.replace(".", r"\.")) as caught:
            Observations.read(tmp_path / name)
        assert caught.value.code == "file"
