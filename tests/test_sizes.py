"""What a learned model sees of an iteration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fitted import serving
from hypothesis import given
from hypothesis import strategies as st
from table_pairs import refusal

from fpmjax import Work, x64
from fpmjax.iteration import askable
from fpmjax.observe.sizes import BOX, Sizes, cells_of, coordinates, ladder_of, sizes_of


def of(work: Work, ladder=None) -> Sizes:
    return sizes_of(np, askable(np, work)[0], ladder)


def test_two_ranks_by_hand():
    work = Work.of(
        prefill_requests=[2, 0],
        prefill_tokens=[100, 0],
        prefill_kv=[60, 0],
        decode_requests=[3, 5],
        decode_kv=[900, 400],
        ranks=True,
    )
    pairs = 60 * 100 / 2 + 100 * 100 / 4 + 100 / 2
    assert of(work) == Sizes(5, 8, 900, 900 / 5, 2, 100, 50, 60, pairs)
    at = coordinates(np, of(work))
    assert np.allclose(np.exp(at), [5, 8, 900, 180, 100, 50, 60]) and len(at) == len(BOX)


def test_graph_sizes_pad_decode_alone():
    ladder = ladder_of([8, 2, 4, 4])
    assert ladder is not None and ladder.tolist() == [2, 4, 8] and ladder_of(None) is None
    assert of(Work.decode([1, 2, 3, 8, 9], [1] * 5), ladder).rows.tolist() == [2, 2, 4, 8, 9]
    mixed = Work.of(prefill_requests=1, prefill_tokens=7, decode_requests=3, decode_kv=10)
    assert of(mixed, ladder).rows == 3
    ranks = Work.decode([[3, 5, 0]], [[1, 1, 0]], ranks=True)
    found = of(ranks, ladder)
    assert found.rows.tolist() == [4 + 8] and found.decode.tolist() == [5]  # an idle rank runs nothing


@pytest.mark.parametrize(
    "value", [1, "12", [], [0], [-1], [1.0], [True], [2**32], [2**64], [[1], [2]], [[1, 2], [3]], [None], ["8"]]
)
def test_other_graph_sizes_are_refused(value):
    assert refusal(ladder_of, value)[0] == "cuda_graph_batch_sizes"


def test_idle_ranks_and_the_order_of_ranks_change_no_bit():
    work = serving(30).work
    idle = jax.tree.map(lambda x: np.concatenate([np.zeros_like(x[:, :1]), x[:, ::-1], np.zeros_like(x)], 1), work)
    ladder = np.array([4, 16, 64])
    for other in (None, ladder):
        assert all(np.array_equal(x, y) for x, y in zip(of(work, other), of(idle, other), strict=True))


def test_compiled_sizes_have_the_same_bits():
    rng = np.random.default_rng(0)
    fields = ("prefill_requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
    work = Work.of(**{name: rng.integers(1, 2**32, (500, 2)) for name in fields}, ranks=True)
    with x64():
        compiled = jax.jit(lambda work: sizes_of(jnp, askable(jnp, work)[0], np.array([8, 2**31])))(work)
    for name, plain, other in zip(Sizes._fields, of(work, np.array([8, 2**31])), compiled, strict=True):
        np.testing.assert_allclose(plain, other, rtol=3e-16 if name == "pairs" else 0)


@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(1, 6), st.floats(0.01, 3.0))
def test_cells_are_those_of_plain_rounding(seed, n, axes, side):
    at = np.random.default_rng(seed).uniform(0, 9, (n, axes))
    _, cell, count = np.unique(np.round(at / side), axis=0, return_inverse=True, return_counts=True)
    found = cells_of(at, side)
    assert np.array_equal(found[0], cell.reshape(-1)) and np.array_equal(found[1], count)
