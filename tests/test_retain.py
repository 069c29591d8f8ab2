"""The retention grid, against the plain oracle: the same rows stay, in NumPy, in a scan and under vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from oracles.grid_ref import GridSampler

import fpmjax
from fpmjax.observe import retain
from fpmjax.observe.retain import Grid, cell_of, crowds, insert, ranks

BINS = [(4, 4), (2, 3), (1, 1), (5, 2), (3, 7)]


def coordinates(seed: int, n: int, axes: int = 2) -> np.ndarray:
    """log1p of small integers: many equal rows, many on the edge between two cells."""
    rng = np.random.default_rng(seed)
    return np.log1p(rng.integers(0, rng.choice([5, 60, 6000]), (n, axes)).astype(float))


def kept_in_turn(grid: Grid, rows: np.ndarray) -> tuple[Grid, list[list[int]]]:
    """The grid after all rows, and which rows were there after each."""
    at, history = np.full(len(grid.crowd), -1), []
    for i, z in enumerate(rows):
        filed = insert(np, grid, z)
        grid = filed.grid
        if filed.slot >= 0:
            at[filed.slot] = i
        history.append(sorted(at[grid.used].tolist()))
    return grid, history


@jax.jit
def in_scan(grid: Grid, rows: jax.Array):
    def step(grid, z):
        filed = insert(jnp, grid, z)
        return filed.grid, (filed.slot, filed.evicted)

    return lax.scan(step, grid, rows)


in_vmap = jax.jit(jax.vmap(in_scan))


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.sampled_from(BINS), st.sampled_from([1, 2, 5, 12, 64]))
def test_the_rows_that_stay_are_the_oracle_s(seed, bins, capacity):
    rows = coordinates(seed, 3 * capacity + 10)
    oracle = GridSampler(bins, capacity)
    _, history = kept_in_turn(Grid.empty(bins, capacity, slots=64), rows)
    for i, z in enumerate(rows):
        oracle.add(z, i)
        assert history[i] == sorted(oracle.rows())


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes):
    bins, rows = (5, 2, 3)[:axes], coordinates(1, 200, axes)
    oracle = GridSampler(bins, 20)
    for i, z in enumerate(rows):
        oracle.add(z, i)
    assert kept_in_turn(Grid.empty(bins, 20), rows)[1][-1] == sorted(oracle.rows())


def test_one_cell_forgets_the_oldest_row():
    _, history = kept_in_turn(Grid.empty((1, 1), 3), coordinates(0, 7))
    assert history == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_the_newest_row_can_be_the_one_that_goes():
    grid = Grid.empty((4,), 2, lo=[0.0], hi=[4.0])
    grid, history = kept_in_turn(grid, np.array([[0.5], [1.5], [3.5]]))
    assert history[-1] == [0, 1]  # three cells of one row: the largest index loses its only one
    assert insert(np, grid, np.array([3.5])).slot == -1


def test_known_bounds_do_not_move_for_rows_inside():
    grid = Grid.empty((4, 4), 8, lo=[0.0, 0.0], hi=[8.0, 8.0])
    after, _ = kept_in_turn(grid, np.array([[1.0, 7.0], [8.0, 0.0]]))
    assert np.array_equal(after.lo, grid.lo) and np.array_equal(after.hi, grid.hi)
    assert after.cell[after.used].tolist() == [3, 12]


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(BINS), st.sampled_from([5, 64]))
def test_a_scan_keeps_the_same_bits(seed, bins, capacity):
    rows, grid = coordinates(seed, 200), Grid.empty(bins, capacity, slots=64)
    expected, _ = kept_in_turn(grid, rows)
    with fpmjax.x64():
        assert same(in_scan(grid, rows)[0], expected)


def test_stacked_grids_under_vmap():
    rows = np.stack([coordinates(seed, 100) for seed in range(20)])
    grids = [Grid.empty(BINS[i % 5], 3 + i, slots=64) for i in range(20)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *grids)
    with fpmjax.x64():
        together = in_vmap(stacked, rows)[0]
    for i, grid in enumerate(grids):
        assert same(jax.tree.map(lambda x: x[i], together), kept_in_turn(grid, rows[i])[0])  # noqa: B023


def test_padding_slots_change_nothing():
    rows = coordinates(4, 150)
    narrow, wide = (kept_in_turn(Grid.empty((4, 4), 10, slots=s), rows) for s in (0, 48))
    assert narrow[1] == wide[1]
    assert same(jax.tree.map(lambda x: x[:10] if x.shape[:1] == (48,) else x, wide[0]), narrow[0])


def test_sorting_and_counting_pairs_agree(monkeypatch):
    rows = coordinates(9, 200)
    pairs = kept_in_turn(Grid.empty((4, 4), 40), rows)
    monkeypatch.setattr(retain, "PAIRWISE", 0)
    sorting = kept_in_turn(Grid.empty((4, 4), 40), rows)
    assert pairs[1] == sorting[1] and same(pairs[0], sorting[0])
    keys = np.array([7, 3, 9, 1])
    assert ranks(np, keys).tolist() == [2, 1, 3, 0]
    assert crowds(np, np.array([4, 2, 4, 4])).tolist() == [3, 1, 3, 3]


def test_cells_are_cut_as_plain_arithmetic_cuts_them():
    """A row at exactly half the range: a reciprocal instead of a quotient would put it a cell lower."""
    lo, hi, bins = np.zeros(1), np.log1p(np.array([35.0])), np.array([2])
    at = np.log1p(np.array([[5.0], [35.0], [0.0], [99.0]]))
    expected = [int(min(z / hi[0] * 2, 1)) for z in at[:, 0]]
    assert cell_of(np, at, lo, hi, bins).tolist() == expected == [1, 1, 0, 1]
    with fpmjax.x64():
        assert jax.jit(lambda *a: cell_of(jnp, *a))(at, lo, hi, bins).tolist() == expected
