"""`Observations`: what is kept, what is refused, and how pieces of them go together."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from observed import assert_same, code_of, lists_and_ranks, rank

from fpmjax import MetricsError, Observations, Work, x64

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
    assert code_of(Observations.of, Work.decode([1, 2], 5), np.ma.array([1.0, 2.0], mask=[True, False])) == "payload"
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
    for traced in (lambda w, x: Observations.of(w, x).wall_ms, lambda w, x: Observations.of(w, [1.0]).wall_ms):
        with pytest.raises(MetricsError, match="not inside jit"):
            jax.jit(traced)(Work.decode([1], 5), jnp.ones(1))


LIMIT = 1e11  # ms: a wall clock, no pass


def test_a_wall_clock_is_no_wall_time_whatever_the_source():
    for late in (LIMIT, 1.7e12, 1e300):
        walls = [1.0, np.nextafter(LIMIT, 0), late]
        table = pa.table({"wall_ms": walls, "decode_requests": [1, 2, 3], "decode_kv": [5, 5, 5]})
        seconds = [[rank(k, 5, wall / 1000)] for k, wall in enumerate((1.0, 9e10, late), 1)]
        for observations in (
            Observations.of(Work.decode([1, 2, 3], 5), walls),
            Observations.read(table),
            Observations.from_metrics(seconds),
        ):
            assert observations.work.decode_requests[:, 0].tolist() == [1, 2]
            assert observations.report == {"accepted": 2, "idle": 0, "no_wall_time": 0, "overflow": 1}


def test_traced_and_foreign_arguments_are_refused_by_name(tmp_path):
    good, path = Observations.of(Work.decode([1, 2], 5), [1.0, 2.0]), tmp_path / "o.parquet"
    for traced in (
        lambda o, mask: o.where(np.array([True, False])).wall_ms,
        lambda o, mask: good.where(mask).wall_ms,
        lambda o, mask: Observations.concat([good, o]).wall_ms,
        lambda o, mask: o.write(path),
    ):
        with x64(), pytest.raises(MetricsError, match="not inside jit") as caught:
            jax.jit(traced)(good, jnp.array([True, False]))
        assert caught.value.code == "payload"
    assert code_of(Observations.of, good.work, good) == "payload"
    assert code_of(Observations.of, good.work, [good, good]) == "payload"
    assert code_of(good.where, good) == code_of(good.where, [good]) == "payload"
    assert list(tmp_path.iterdir()) == []


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


def test_slices_masks_and_concatenation_agree():
    observations = lists_and_ranks()
    assert_same(observations[1:3], observations.where(np.array([False, True, True, False])))
    assert_same(Observations.concat([observations[:1], observations[1:4]]), observations)
    assert len(observations[9:]) == 0 and observations[1:].report == {}
    for key in (0, [1, 2], np.array([True] * 4)):
        with pytest.raises(TypeError):
            observations[key]
    for mask in ([1, 0, 1, 0], [True], np.ones((4, 1), bool), None, "abcd", [[True], [True, False]]):
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
    for parts in (plain, [plain, None], [plain.work], None, 5):
        assert code_of(Observations.concat, parts) == "payload"


def test_observations_are_a_pytree_without_the_report():
    observations = lists_and_ranks()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(observations))
    with x64():
        doubled = jax.jit(lambda o: o.wall_ms * 2)(observations)
    assert doubled.tolist() == (observations.wall_ms * 2).tolist()
    assert jax.tree.map(lambda x: x, observations).timing == "wall"
