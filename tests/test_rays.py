"""Rays of KV totals per request give the bits of the flat lookup, whatever the table, the axis and the pieces."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small_tables import cell_of, decode_rows, surface, tables

import fpmjax
from fpmjax import Work, direct, estimate, lines
from fpmjax.grid import grid
from fpmjax.lookup.rays import cut_rays, ramp, read_pieces, turns_of
from fpmjax.metrics import U32_MAX
from fpmjax.reduce import Reduce, summarise

LENGTH = 8
read = jax.jit(read_pieces, static_argnums=8)


def padded(*columns):
    """To one of a few sizes, so that few of them are compiled."""
    size = 1 << (2 * len(columns[0])).bit_length()
    return [np.pad(x, (0, size - len(x))) for x in columns]


def along_rays(model, batch, requests, kv):
    """Milliseconds [rays, kv] from pieces, NaN where there is none."""
    out = np.full((len(requests), len(kv)), np.nan)
    turns = turns_of(model.decode)
    pieces = cut_rays(turns, model.walk_classes(batch), requests, kv, LENGTH)
    if not len(pieces.ray):
        return out
    with fpmjax.x64():
        ms = read(
            jax.device_put(model.decode.knots),
            *padded(turns.lo[pieces.turn], turns.hi[pieces.turn], batch[pieces.ray]),
            *padded(requests[pieces.ray].astype(np.uint32)),
            np.append(kv, np.zeros(LENGTH)).astype(np.uint32),
            *padded(pieces.start.astype(np.int32), pieces.left.astype(np.int32)),
            LENGTH,
        )
    for column, (ray, _, start, left) in zip(np.asarray(ms).T, np.transpose(pieces).tolist(), strict=False):
        assert np.isnan(out[ray, start : start + left]).all() and np.isnan(column[left:]).all()
        out[ray, start : start + left] = column[:left]
    return out


def assert_same_bits(model, batch, requests, kv):
    batch = np.minimum(batch, U32_MAX).astype(np.uint32)
    flat = estimate(model, Work.decode(batch[:, None], requests[:, None] * kv), check=False).latency_ms
    np.testing.assert_array_equal(along_rays(model, batch, requests, kv), flat)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(tables(decode_only=True), st.lists(st.integers(0, 50), min_size=40, max_size=40), st.integers(1, 6))
def test_pieces_have_the_bits_of_the_flat_lookup(rows, kv, width):
    requests = np.array([1, 2, 3, 5, 8, 24, 100, 65_537])
    assert_same_bits(direct(cell_of(rows)), requests * width, requests, np.sort(kv))


def test_the_embedded_table_too(embedded_cell):
    model, requests = direct(embedded_cell), np.arange(1, 600, 7)
    kv = np.unique(np.round(np.exp(np.linspace(0, 13, 300))).astype(int))
    assert_same_bits(model, requests, requests, kv)
    assert_same_bits(model, 3 * requests, requests, kv)
    rows = 1 + max(embedded_cell.decode.row.max(), embedded_cell.prefill.row.max())
    replaced = model.with_latencies(np.random.default_rng(6).normal(1.0, 1.0, rows))  # some are negative
    assert_same_bits(replaced, requests, requests, kv)


def test_turns_are_where_other_knots_answer():
    turns = turns_of(direct(cell_of(decode_rows({1: [(4, 1.0), (6, 2.0)], 2: [(4, 1.0), (9, 2.0)]}))).decode)
    # Nothing of no requests and of many, one curve of each batch; both refuse outside.
    known = [turns.begin[a:b].tolist() for a, b in zip(turns.first[:-1], turns.first[1:], strict=True)]
    assert sorted(known) == [[0], [0, 4, 6, 7], [0, 4, 9, 10]]


def test_a_ray_without_an_answer_has_no_piece():
    model = direct(cell_of(surface([4], [8])))
    pieces = cut_rays(turns_of(model.decode), model.walk_classes(np.array([5, 4])), np.array([5, 4]), np.arange(9), 3)
    assert np.transpose(pieces)[:, [0, 2, 3]].tolist() == [[1, 2, 1]]
    assert ramp(np.array([5, 0, 7]), np.array([2, 0, 3]), 10).tolist() == [5, 15, 7, 17, 27]


# Reduced

AXES = {
    "decode_requests": st.integers(1, 40),
    "kv_per_request": st.one_of(st.integers(0, 12), st.just(2**24)),
    "draft_length": st.integers(1, 4),
}
SMALL = {"CELLS": 64, "AXIS": 16, "GROUP": 12, "PIECE": 8, "RAY_CELLS": 1e9}


def both_ways(model, made, **options):
    """The same reduction along rays and cell by cell."""
    found = []
    for cells in (SMALL["RAY_CELLS"], 0):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (SMALL | {"RAY_CELLS": cells}).items():
                patch.setattr(lines, name, value)
            patch.setattr(lines, "LENGTHS", (8, 16))
            reduced = Reduce(limit_ms=20, **options)
            assert bool(lines.turns_on(model, lines.Axes(made, reduced.keep))) == bool(cells)
            found.append(summarise(model, made, reduce=reduced, progress=False).to_pydict())
    return found


@pytest.mark.parametrize(
    ("names", "keep"),
    [
        (("decode_requests", "kv_per_request"), ("decode_requests",)),
        (("kv_per_request", "draft_length", "decode_requests"), ()),
        (("draft_length", "kv_per_request", "decode_requests"), ("draft_length",)),
    ],
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(tables(decode_only=True), st.data())
def test_reductions_along_rays_equal_those_of_every_cell(names, keep, rows, data):
    drawn = {n: data.draw(st.lists(AXES[n], min_size=1, max_size=20)) for n in names}
    drawn["kv_per_request"].sort()
    rays, cells = both_ways(direct(cell_of(rows)), grid(**drawn), keep=keep, quantiles=(0.3, 1))
    means = rays.pop("mean_ms"), cells.pop("mean_ms")
    assert rays == cells
    for a, b in zip(*means, strict=True):
        assert a == b or a == pytest.approx(b, rel=1e-13)


def test_axes_that_do_not_ascend_are_answered_cell_by_cell(embedded_cell):
    model, n = direct(embedded_cell), 4000
    for kv, may in ((range(n), True), (range(n, 0, -1), False), ([5] * n, True), (range(2**32 - n, 2**32), False)):
        made = grid(decode_requests=[1, 7], kv_per_request=kv)
        assert bool(lines.turns_on(model, lines.Axes(made, ("decode_requests",)))) == may
        assert lines.turns_on(model, lines.Axes(made, ("kv_per_request",))) is None
    up, down = (grid(decode_requests=[1, 7], kv_per_request=kv) for kv in (range(1, n), range(n - 1, 0, -1)))
    a, b = (summarise(model, made, progress=False).drop("mean_ms").to_pydict() for made in (up, down))
    assert a == b
    with_idle = grid(decode_requests=[0, 7], kv_per_request=range(n))
    assert lines.turns_on(model, lines.Axes(with_idle, ("decode_requests",))) is None


def test_sums_along_rays_do_not_depend_on_blocks(embedded_cell, monkeypatch):
    made = grid(decode_requests=range(1, 60), kv_per_request=range(1, 9000), draft_length=[1, 2])
    model, reduce = direct(embedded_cell), Reduce(keep=())
    assert lines.turns_on(model, lines.Axes(made, ()))
    one = summarise(model, made, reduce=reduce, progress=False).to_pydict()
    monkeypatch.setattr(lines, "IN_FLIGHT", 0)
    monkeypatch.setattr(lines, "CELLS", 2**15)
    assert summarise(model, made, reduce=reduce, progress=False).to_pydict() == one
