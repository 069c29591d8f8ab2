"""Work: broadcasting without copies, and every refusal of its constructors."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fpmjax.errors import MetricsError
from fpmjax.metrics import show
from fpmjax.work import COUNTS, VARIANCES, RequestLists, Work

U32 = 2**32 - 1


def rank(requests: int, kv: int, **more) -> dict:
    return {"scheduled_requests": {"num_decode_requests": requests, "sum_decode_kv_tokens": kv, **more}}


def refusal(call, *args, **kwargs) -> tuple[str, str]:
    """(code, message) of the MetricsError that the call raises; every message ends with one hint line."""
    with pytest.raises(MetricsError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.count("\nhint: ") == 1 and not message.endswith(".")
    return caught.value.code, message.split("\nhint: ")[0]


def test_scalars_are_one_query_of_one_rank():
    work = Work.decode(4, 4096)
    assert (work.shape, work.ranks) == ((), 1)
    assert work.decode_requests.tolist() == [4] and work.decode_kv.tolist() == [4096]
    assert all(getattr(work, name).dtype == np.uint32 for name in COUNTS)
    assert all(getattr(work, name).dtype == np.float64 for name in VARIANCES)
    assert work.lists is None


def test_arguments_broadcast_as_in_numpy():
    work = Work.prefill([[1], [2]], [10, 20, 30], 7)
    assert (work.shape, work.ranks) == ((2, 3), 1)
    assert work.prefill_requests[..., 0].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert work.prefill_tokens[..., 0].tolist() == [[10, 20, 30]] * 2
    assert work.prefill_kv[..., 0].tolist() == [[7] * 3] * 2


def test_with_ranks_the_last_axis_is_ranks():
    work = Work.decode([[1, 2, 0], [3, 4, 5]], [[10, 20, 0], [30, 40, 50]], ranks=True)
    assert (work.shape, work.ranks) == ((2,), 3)
    assert Work.decode([1, 2], 10, ranks=True).shape == ()


def test_broadcasting_costs_no_memory():
    n = 10**8
    work = Work.decode(np.broadcast_to(np.int64(8), n), 1024)
    assert work.shape == (n,)
    assert all(getattr(work, name).strides == (0, 0) for name in (*COUNTS, *VARIANCES))
    kept = np.arange(1, 9, dtype=np.uint32)
    assert np.shares_memory(Work.decode(kept, 1024).decode_requests, kept)


def test_an_axis_that_is_constant_is_checked_once_and_its_error_still_has_an_index():
    wide = np.broadcast_to(np.array([1, 2**32])[:, None], (2, 10**8))
    assert refusal(Work.decode, wide, 5)[1].startswith("decode_requests[1, 0] is 4294967296 (int)")


@pytest.mark.parametrize(
    "value",
    [3, np.int8(3), np.uint64(3), np.array(3), jnp.array(3), jnp.array(3, jnp.uint8)],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}",
)
def test_integers_of_every_kind_are_counts(value):
    assert Work.decode(value, 9).decode_requests.tolist() == [3]
    assert Work.decode([value, 4], 9).decode_requests[:, 0].tolist() == [3, 4]


def test_empty_batches_are_fine():
    for empty in ([], np.zeros(0, np.int64), np.zeros((0,), np.uint32)):
        assert Work.decode(empty, 3).shape == (0,)
    assert Work.from_iterations([]).shape == (0,)


def test_the_whole_range_of_32_bits_is_exact():
    work = Work.decode([1, U32], [16777217, U32])
    assert work.decode_requests[:, 0].tolist() == [1, U32] and work.decode_kv[:, 0].tolist() == [16777217, U32]


class Celsius(float):
    """A float by another name."""


def repr_of(value) -> str:
    return show(value) if not isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "decode_requests is 1.0 (float)"),
        (True, "decode_requests is True (bool)"),
        (np.True_, "decode_requests is True (bool)"),
        (None, "decode_requests is None (NoneType)"),
        ("3", "decode_requests is '3' (str)"),
        (-1, "decode_requests is -1 (int)"),
        (2**32, "decode_requests is 4294967296 (int)"),
        (2**70, "decode_requests is 1180591620717411303424 (int)"),
        (1 << 20_000, "decode_requests is an integer of 20001 bits (int)"),
        (math.nan, "decode_requests is nan (float)"),
        ([1, 2.0], "decode_requests[1] is 2.0 (float)"),
        ([[1, 2], [3, True]], "decode_requests[1, 1] is True (bool)"),
        ([[1], [2, 3]], "decode_requests[0] is [1] (list)"),
        ([1, "x"], "decode_requests[1] is 'x' (str)"),
        ([1, -1, 2**64], "decode_requests[1] is -1 (int)"),
        (np.array([1, -7]), "decode_requests[1] is -7 (int)"),
        (np.array([[1, 2], [2**32, 4]]), "decode_requests[1, 0] is 4294967296 (int)"),
        (np.array([1.0, 2.0]), "decode_requests[0] is 1.0 (float)"),
        (np.array([True]), "decode_requests[0] is True (bool)"),
        (np.array([1, 2.0], object), "decode_requests[1] is 2.0 (float)"),
        (np.array(["1"]), "decode_requests[0] is '1' (str)"),
        (np.zeros(0), "decode_requests is array([], dtype=float64) (ndarray)"),
        (jnp.array([1.5]), "decode_requests[0] is 1.5 (float)"),
        (jnp.array([False]), "decode_requests[0] is False (bool)"),
        (Celsius(2), "decode_requests is 2.0 (Celsius)"),
    ],
    ids=repr_of,
)
def test_what_is_no_count_is_refused_by_name_place_and_value(value, shown):
    code, message = refusal(Work.decode, value, 5)
    assert code == "u32"
    assert message == f"{shown}, but a count is an integer from 0 to 4294967295"


@pytest.mark.parametrize("name", COUNTS)
def test_every_count_is_checked(name):
    assert refusal(Work.of, **{name: [0, -1]})[1].startswith(f"{name}[1] is -1 (int)")


def test_variances_are_finite_numbers():
    work = Work.of(decode_requests=1, decode_kv_var=[-1.5, 2], prefill_length_var=np.float32(0.5))
    assert work.decode_kv_var[:, 0].tolist() == [-1.5, 2.0] and work.prefill_length_var[:, 0].tolist() == [0.5, 0.5]
    for value, shown in [
        (math.nan, "decode_kv_var is nan (float)"),
        ([0.0, math.inf], "decode_kv_var[1] is inf (float)"),
        (np.array([[0.0], [-math.inf]]), "decode_kv_var[1, 0] is -inf (float)"),
        (True, "decode_kv_var is True (bool)"),
        ("1.0", "decode_kv_var is '1.0' (str)"),
        (1 << 2000, "decode_kv_var is an integer of 2001 bits (int)"),
        (np.array([True]), "decode_kv_var[0] is True (bool)"),
        (1j, "decode_kv_var is 1j (complex)"),
    ]:
        code, message = refusal(Work.of, decode_kv_var=value)
        assert (code, message) == ("payload", f"{shown}, but a variance is a finite number")


def test_totals_belong_to_requests():
    assert refusal(Work.decode, [1, 0], [5, 6]) == (
        "decode_kv_without_requests",
        "decode_kv[1] is 6 while decode_requests is 0",
    )
    assert refusal(Work.prefill, 0, 5) == (
        "prefill_sums_without_requests",
        "prefill_tokens is 5 while prefill_requests is 0",
    )
    assert refusal(Work.prefill, [[1], [0]], 0, [0, 3]) == (
        "prefill_sums_without_requests",
        "prefill_kv[1, 1] is 3 while prefill_requests is 0",
    )
    ranks = np.ones((3, 100_000, 2), np.uint32)
    ranks[2, 99_999, 1] = 0
    assert refusal(Work.decode, ranks, 1, ranks=True)[1] == "decode_kv[2, 99999, 1] is 1 while decode_requests is 0"


def test_requests_without_tokens_are_accepted():
    assert Work.prefill(2, 0, 500).prefill_kv.tolist() == [500]
    assert Work.decode(2, 0).decode_requests.tolist() == [2]


def test_shapes_that_do_not_broadcast_are_named():
    code, message = refusal(Work.decode, [1, 2], [1, 2, 3])
    assert code == "payload"
    assert message == "shapes do not broadcast against each other: decode_requests (2,), decode_kv (3,)"


def test_ranks_need_an_axis():
    code, message = refusal(Work.decode, 1, 2, ranks=True)
    assert code == "no_ranks"
    assert message == "ranks=True takes the last axis as ranks, but the common shape is ()"
    assert refusal(Work.decode, np.zeros((4, 0), int), 0, ranks=True)[0] == "no_ranks"


def test_tracers_pass_unchecked_with_their_dtype():
    def total(requests, kv):
        work = Work.decode(requests, kv)
        assert work.decode_requests.dtype == jnp.int32 and work.decode_kv.dtype == np.uint32
        assert work.shape == (2, 3)
        return work.decode_requests.sum() + work.ranks

    assert jax.jit(lambda r: total(r, np.ones((2, 1), np.uint32)))(jnp.arange(3)) == 7
    assert refusal(jax.jit(lambda r: Work.decode(r, 1).decode_kv), jnp.ones(2)) == (
        "u32",
        "decode_requests is traced as float32, but counts are integers",
    )


def test_work_is_a_pytree():
    work = Work.decode([1, 2], [10, 20])
    doubled = jax.tree.map(lambda x: x * np.array(2, x.dtype), work)
    assert isinstance(doubled, Work) and doubled.decode_kv[:, 0].tolist() == [20, 40]
    assert repr(work) == "Work(shape=(2,), ranks=1)"
    assert Work().shape == () and Work(**{"decode_requests": np.ones((5, 2), np.uint32)}).ranks == 2


def test_metrics_become_one_query():
    work = Work.from_metrics([rank(4, 4096, var_decode_kv_tokens=-2.5), {}, rank(2, 9000)])
    assert (work.shape, work.ranks) == ((), 3)
    assert work.decode_requests.tolist() == [4, 0, 2] and work.decode_kv.tolist() == [4096, 0, 9000]
    assert work.decode_kv_var.tolist() == [-2.5, 0.0, 0.0]
    text = Work.from_metrics('{"scheduled_requests": {"num_prefill_requests": 1, "sum_prefill_tokens": 8}}')
    assert text.prefill_tokens.tolist() == [8] and text.ranks == 1
    assert repr(Work.from_metrics(rank(1, 5, extend_lengths=[1], past_kv_lengths=[5]))).endswith(", lists)")


def test_request_lists_are_padded_and_counted():
    big = 2**64 - 1
    work = Work.from_iterations(
        [
            [rank(2, 7, extend_lengths=[1, 1], past_kv_lengths=[3, big]), {}],
            rank(1, 5),
            {"scheduled_requests": {"extend_lengths": [], "past_kv_lengths": []}},
        ]
    )
    assert isinstance(work.lists, RequestLists)
    assert work.lists.extend.dtype == np.uint64 and work.lists.extend.shape == (3, 2, 2)
    assert work.lists.past[0, 0].tolist() == [3, big] and not work.lists.past[1:].any()
    assert work.lists.count.tolist() == [[2, -1], [-1, -1], [0, -1]]


def test_iterations_are_padded_with_idle_ranks():
    work = Work.from_iterations([rank(4, 4096), [{}, rank(1, 2), rank(3, 4)], "[{}]"])
    assert (work.shape, work.ranks) == ((3,), 3)
    assert work.decode_requests.tolist() == [[4, 0, 0], [0, 1, 3], [0, 0, 0]]
    assert work.decode_kv.tolist() == [[4096, 0, 0], [0, 2, 4], [0, 0, 0]]


def test_a_bad_iteration_is_named_by_its_index():
    items = [{}, [rank(1, 1)], [{}, rank(True, 1)]]
    code, message = refusal(Work.from_iterations, items)
    assert code == "u32"
    assert message.startswith("iterations[2]: ranks[1].scheduled_requests.num_decode_requests is True (bool)")
    assert refusal(Work.from_iterations, [{}, []])[0] == "no_ranks"


@pytest.mark.parametrize("items", ["[]", b"[]", {}, 5, None])
def test_iterations_are_a_list(items):
    code, message = refusal(Work.from_iterations, items)
    assert code == "payload" and message == f"iterations is of type {type(items).__name__}, not a list of iterations"


# ---- masked entries, arrays of objects, and lists of very different lengths


MASKED = np.ma.array([8, 4], mask=[False, True])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (MASKED, "decode_requests[1]"),
        (np.ma.array([[8], [4]], mask=[[False], [True]]), "decode_requests[1, 0]"),
        ([MASKED, MASKED], "decode_requests"),
        (np.ma.masked, "decode_requests"),
        ([1, np.ma.masked], "decode_requests"),
    ],
    ids=repr_of,
)
def test_masked_entries_are_no_counts(value, where):
    code, message = refusal(Work.decode, value, 0)
    assert code == "u32" and message.startswith(f"{where} is masked, but a count is an integer")


def test_masked_arrays_are_refused_for_their_masked_entries_alone():
    assert refusal(Work.of, decode_kv_var=np.ma.array([1.0, 2.0], mask=[1, 0]))[0] == "payload"
    assert Work.decode(np.ma.array([8, 4]), 9).decode_requests.tolist() == [[8], [4]]
    looped = []
    looped.append(looped)
    assert refusal(Work.decode, looped, 9)[0] == "u32"


def test_an_array_of_objects_is_read_element_by_element():
    work = Work.of(decode_requests=np.array([8, 4], object), decode_kv_var=np.array([1, 2.5], object))
    assert work.decode_requests.tolist() == [[8], [4]] and work.decode_kv_var.tolist() == [[1.0], [2.5]]


def test_one_long_list_among_many_iterations_is_refused_before_it_is_padded():
    def listed(n):
        lists = {"extend_lengths": [1] * n, "past_kv_lengths": [9] * n}
        return {"scheduled_requests": {"num_decode_requests": n, **lists}}

    code, message = refusal(Work.from_iterations, [listed(65_536), *[listed(1)] * 1024])
    assert code == "lists_too_large"
    assert message.startswith("request lists are padded to the longest one: 1,025 ranks of 65,536 requests make 67,1")
    assert Work.from_iterations([listed(65_536), *[listed(1)] * 8]).lists.extend.shape == (9, 1, 65_536)
