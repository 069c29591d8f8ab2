"""Grids: every combination, in order, never built whole; axes that contradict each other are refused by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fpmjax.errors import OptionError
from fpmjax.grid import grid

AXES = {"decode_requests": [1, 8, 64], "kv_per_request": range(512, 2049, 512), "draft_length": np.array([1, 3])}
DECODE = {"decode_requests": 1, "decode_kv": 64}
PREFILL = {"prefill_requests": 1, "prefill_tokens": 5}


def test_cells_are_the_product_in_row_major_order():
    made = grid(**AXES)
    assert (made.shape, made.size, len(made)) == ((3, 4, 2), 24, 24)
    columns = made.columns()
    assert list(zip(*(x.tolist() for x in columns.values()), strict=True)) == list(itertools.product(*AXES.values()))


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (5, 6), (7, 19), (20, 99), (3, 3)])
def test_any_stretch_of_it_is_a_slice(start, stop):
    made = grid(**AXES)
    for name, whole in made.columns().items():
        assert np.array_equal(made.columns(start, stop)[name], whole[start:stop])


def test_a_total_per_request_is_multiplied_and_a_total_is_not():
    work, depth = grid(**AXES).work()
    columns = grid(**AXES).columns()
    assert np.array_equal(work.decode_kv[:, 0], columns["decode_requests"] * columns["kv_per_request"])
    assert np.array_equal(depth, columns["draft_length"])
    work, depth = grid(prefill_requests=[1, 2], tokens_per_request=100, prefill_kv=7).work()
    assert work.prefill_tokens[:, 0].tolist() == [100, 200]
    assert work.prefill_kv[:, 0].tolist() == [7, 7]
    assert work.decode_requests is None and depth is None


def test_a_huge_grid_costs_nothing_until_it_is_looked_at():
    made = grid(decode_requests=range(1, 1001), decode_kv=range(1_000_000), draft_length=[1, 2, 3, 4])
    assert made.size == 4_000_000_000
    assert made.columns(made.size - 1)["decode_kv"].tolist() == [999_999]


@pytest.mark.parametrize(
    ("axes", "code"),
    [
        ({}, "decode_requests"),
        ({"decode_request": 1}, "decode_request"),
        ({"decode_requests": []}, "decode_requests"),
        ({"decode_requests": [1.0]}, "decode_requests"),
        ({"decode_requests": [True]}, "decode_requests"),
        ({"decode_requests": "8"}, "decode_requests"),
        ({"decode_requests": None}, "decode_requests"),
        ({"decode_requests": [[1, 2]]}, "decode_requests"),
        ({"decode_requests": -1}, "decode_requests"),
        ({"decode_requests": 2**32}, "decode_requests"),
        ({"decode_requests": 10**30}, "decode_requests"),
        ({"decode_kv": 1}, "decode_requests"),
        ({"prefill_requests": 1, "prefill_tokens": 1, "decode_kv": 1}, "decode_kv"),
        ({"decode_requests": 8}, "decode_requests"),
        ({"decode_requests": 8, "draft_length": 1}, "decode_requests"),
        ({"prefill_requests": 1}, "prefill_requests"),
        ({"prefill_requests": 1, "prefill_kv": 9}, "prefill_requests"),
        ({"decode_requests": 8, "kv_per_request": 1024, "prefill_requests": 4}, "prefill_requests"),
        ({"decode_requests": [1, 10**400]}, "decode_requests"),
        ({"decode_requests": 1, "decode_kv": 1, "kv_per_request": 1}, "decode_kv"),
        ({"decode_requests": 1, "draft_length": -1}, "draft_length"),
        ({"decode_requests": 1, "draft_length": 2**32 - 1}, "draft_length"),
        ({**PREFILL, "draft_length": [0, 1]}, "draft_length"),
        ({**DECODE, **PREFILL, "draft_length": [0, 1]}, "draft_length"),
        ({"decode_requests": range(2**70)}, "decode_requests"),
        ({"decode_requests": range(2**32 - 1)}, "decode_requests"),
        ({"decode_requests": range(3, 0)}, "decode_requests"),
        ({"decode_requests": range(3, -2, -1)}, "decode_requests"),
        ({"decode_requests": np.ma.array([1, 2], mask=[False, True])}, "decode_requests"),
        ({"decode_requests": np.array([1, 1.5], object)}, "decode_requests"),
        ({"decode_requests": np.array([1, True], object)}, "decode_requests"),
        ({"decode_requests": np.array([1, None], object)}, "decode_requests"),
        ({"decode_requests": [[1], [2, 3]]}, "decode_requests"),
        ({**DECODE, **PREFILL, "draft_length": 1}, "draft_length"),
        ({"decode_requests": 1, "model": []}, "model"),
        ({"decode_requests": 1, "model": ["m"]}, "model"),
        ({"decode_requests": 1, "model": None}, "model"),
    ],
)
def test_axes_that_make_no_sense_are_refused_by_name(axes, code):
    with pytest.raises(OptionError) as error:
        grid(**axes)
    assert error.value.code == code
    assert "\nhint: " in str(error.value) and len(str(error.value)) < 300


def test_requests_and_their_tokens_need_each_other():
    for axes, missing in (
        ({"decode_requests": 8}, "decode_kv or kv_per_request"),
        ({"prefill_requests": 1}, "prefill_tokens or tokens_per_request"),
        ({"prefill_tokens": 1, **DECODE}, "prefill_requests"),
    ):
        with pytest.raises(OptionError, match=f"needs {missing} beside it\nhint: add .*; 0 is none"):
            grid(**axes)
    assert grid(decode_requests=8, decode_kv=0).size == 1


def test_values_come_in_many_forms():
    for value in ([3, 1], (3, 1), range(3, 0, -2), np.array([3, 1], np.uint64), np.array([3, 1], object)):
        assert grid(decode_requests=value, decode_kv=0)["decode_requests"].tolist() == [3, 1]
    whole = np.ma.array([3, 1], mask=False)
    assert grid(decode_requests=whole, decode_kv=0)["decode_requests"].tolist() == [3, 1]
    assert grid(decode_requests=np.int8(7), decode_kv=0)["decode_requests"].tolist() == [7]


def test_a_draft_length_of_nothing_is_ordinary_decoding():
    work, depth = grid(decode_requests=[1, 2], decode_kv=0, draft_length=range(3)).work()
    assert depth is not None and depth.tolist() == [0, 1, 2] * 2 and work.shape == (6,)
    assert grid(**DECODE, **PREFILL, draft_length=0).size == 1
    assert grid(**PREFILL, draft_length=0).size == 1


def test_too_many_cells_are_refused():
    with pytest.raises(OptionError, match=r"2\*\*53"):
        grid(decode_requests=np.arange(2**20), decode_kv=np.arange(2**20), draft_length=np.arange(1, 2**14 + 1))
