"""Kinds and features of iterations, against the plain oracle and against rows that are written out."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import regression_ref
from streams import random_stream, rank_dict

import fpmjax
from fpmjax.iteration import askable
from fpmjax.observe.features import (
    AXES,
    KINDS,
    ROLES,
    breaks_role,
    iteration_features,
    lacks_lists,
    need_lists,
    project,
)
from fpmjax.speculative import split_length, widen
from fpmjax.work import COUNTS, Work

ALL = tuple(AXES)
of_kind = jax.jit(lambda work, weights: iteration_features(jnp, work, weights))
all_axes = jax.jit(lambda work: project(jnp, work, iteration_features(jnp, work), ALL))


def test_a_mixed_iteration_by_hand():
    ranks = [rank_dict([2, 100, 60, 3, 500, 0.0]), rank_dict([0, 0, 0, 4, 900, 0.0]), {}]
    found = iteration_features(np, Work.from_metrics(ranks))
    pairs = 60 * 100 / 2 + 100 * 100 / (2 * 2) + 100 / 2
    assert KINDS[found.kind] == "contains_locally_mixed"
    assert found.attention == max(60 + 500 + pairs, 900)  # of the whole rank score
    assert found.moe == 100 + 3 + 4


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([[0, 0, 0, 1, 5]], "pure_decode"),
        ([[1, 5, 0, 0, 0]], "pure_prefill"),
        ([[1, 5, 0, 0, 0], [0, 0, 0, 1, 5]], "cross_rank_aggregated"),
        ([[1, 5, 0, 1, 5], [0, 0, 0, 1, 5]], "contains_locally_mixed"),
        ([[1, 0, 700, 0, 0], [0, 0, 0, 1, 5]], "pure_decode"),  # a cached prompt computes nothing
        ([[1, 0, 700, 0, 0]], None),
        ([[0, 0, 0, 0, 0]], None),
    ],
)
def test_the_kind_of_an_iteration(ranks, kind):
    found = iteration_features(np, Work.from_metrics([rank_dict([*r, 0.0]) for r in ranks])).kind
    assert found == -1 if kind is None else KINDS[found] == kind


@given(st.integers(0, 2**32), st.sampled_from(list(ROLES)), st.integers(1, 4))
def test_features_are_the_oracle_s(seed, role, ranks):
    stream = random_stream(seed, 12, role, ranks, lists=True)
    work, weights = Work.from_iterations(stream), tuple(np.random.default_rng(seed).uniform(0.1, 3.0, 3))
    found = iteration_features(np, work, weights)
    axes = project(np, work, found, ALL)
    for i, iteration in enumerate(stream):
        expected = regression_ref.features(iteration, role, *weights)
        if expected is None:
            assert found.kind[i] == -1
            continue
        assert KINDS[found.kind[i]] == expected[1]
        np.testing.assert_allclose([found.attention[i], found.moe[i]], expected[0], rtol=1e-15)
        np.testing.assert_allclose(axes[i], regression_ref.project(expected[0], iteration, ALL), rtol=1e-12, atol=1e-12)


def test_compiled_features_have_the_same_bits():
    work = Work.from_iterations(random_stream(5, 300, "aggregated", 3, lists=True))
    weights = tuple(np.array([0.37, 1.9, 0.7]))
    with fpmjax.x64():
        compiled = of_kind(work, weights), np.asarray(all_axes(work))
    for x, y in zip(iteration_features(np, work, weights), compiled[0], strict=True):
        assert np.array_equal(x, y)
    plain = project(np, work, iteration_features(np, work), ALL)
    exact = [i for i, name in enumerate(ALL) if not name.startswith(("log", "cv", "mean"))]
    assert np.array_equal(plain[:, exact], compiled[1][:, exact], equal_nan=True)
    np.testing.assert_allclose(compiled[1], plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("phases", ["prefill", "decode", "both"])
def test_large_counts_have_the_same_bits_compiled(phases):
    """Products beyond 2^53 round; contracted with the sum that they enter they would not."""
    rng = np.random.default_rng(1)
    count, few = (lambda: rng.integers(1, 2**32, (2000, 2))), (lambda: rng.integers(1, 5000, (2000, 2)))
    fields = {"prefill_requests": few(), "prefill_tokens": count(), "prefill_kv": count()} if phases != "decode" else {}
    fields |= {"decode_requests": few(), "decode_kv": count()} if phases != "prefill" else {}
    whole = Work.of(**fields, ranks=True)
    slim = replace(whole, **{name: None for name in COUNTS if name not in fields})
    weights = tuple(np.array([0.37, 1.9, 0.7]))
    for work in (whole, slim):
        with fpmjax.x64():
            compiled = of_kind(work, weights)
            constant = jax.jit(lambda work: iteration_features(jnp, work, (0.37, 1.9, 0.7)))(work)
        for plain, *others in zip(iteration_features(np, work, weights), compiled, constant, strict=True):
            assert all(np.array_equal(plain, x) for x in others)


@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    st.lists(st.integers(0, 2**34), max_size=4),
    st.integers(1, 9),
)
def test_widened_lists_have_the_features_of_their_rows_written_out(first, second, depth):
    """Two ranks; no row is ever built."""
    ranks = [first, second]
    listed = [rank_dict([0, 0, 0, len(past), min(sum(past), 2**32 - 1), 0.0, [1] * len(past), past]) for past in ranks]
    rows = [[part for length in past for part in split_length(length, depth + 1)] for past in ranks]
    written = [
        rank_dict([0, 0, 0, len(p), min(sum(q), 2**32 - 1), 0.0, [1] * len(p), p])
        for p, q in zip(rows, ranks, strict=True)
    ]
    work, status = askable(np, Work.from_metrics(listed))
    wide = widen(np, work, np.asarray(depth), status)
    expected = Work.from_metrics(written)
    got, want = (project(np, w, iteration_features(np, w), ALL) for w in (wide, expected))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-9)  # cvP2 is a difference of near-equal numbers


def test_a_widened_row_count_is_never_materialised():
    work, status = askable(np, Work.from_metrics(rank_dict([0, 0, 0, 2, 1003, 0.0, [1, 1], [1000, 3]])))
    wide = widen(np, work, np.asarray(2**31 - 2), status)
    got = dict(zip(ALL, project(np, wide, iteration_features(np, wide), ALL), strict=True))
    assert got["n"] == got["E"] == 2 * (2**31 - 1)
    assert (got["P"], got["maxP"], got["minP"], got["P2"]) == (1003, 1, 0, 1003)


def test_the_variants_of_one_request_list_by_hand():
    work = Work.from_metrics(rank_dict([1, 7, 3, 1, 11, 0.0, [7, 1], [3, 11]]))
    got = dict(zip(ALL, project(np, work, iteration_features(np, work), ALL), strict=True))
    assert got["n"] == 2 and got["n2"] == 4 and got["logN"] == np.log1p(2)
    assert got["E"] == 8 and got["P"] == 14 and got["nE"] == 16
    assert (got["maxE"], got["maxP"], got["minP"]) == (7, 11, 3)
    assert got["P2"] == 9 + 121 and got["F"] == 7 * 3 + 49 / 2 + 11 + 1 / 2
    assert got["meanE"] == 4 and got["meanP"] == 7
    assert got["cvE2"] == 2 * 50 / 64 - 1 and got["cvP2"] == 2 * 130 / 196 - 1


def test_axes_of_totals_need_no_lists():
    plain = Work.decode([3, 5], [100, 200])
    assert not need_lists(("attention", "moe", "n", "logN", "n2"))
    assert project(np, plain, iteration_features(np, plain), ("n", "n2")).tolist() == [[3, 9], [5, 25]]
    assert need_lists(("attention", "E"))
    assert np.isnan(project(np, plain, iteration_features(np, plain), ("E",))).all()
    assert lacks_lists(np, plain).all()


def test_idle_ranks_need_no_lists():
    work = Work.from_metrics([rank_dict([0, 0, 0, 1, 9, 0.0, [1], [9]]), {}])
    assert not lacks_lists(np, work).any()
    partly = Work.from_metrics([rank_dict([0, 0, 0, 1, 9, 0.0, [1], [9]]), rank_dict([0, 0, 0, 1, 9, 0.0])])
    assert lacks_lists(np, partly).tolist() == [False, True]


def test_roles():
    mixed = Work.of(prefill_requests=[1, 0], prefill_tokens=[4, 0], decode_requests=[0, 1], ranks=True)
    assert breaks_role(np, mixed, "prefill").tolist() == [False, True]
    assert breaks_role(np, mixed, "decode").tolist() == [True, False]
    assert not breaks_role(np, mixed, "aggregated").any()
    cached = Work.prefill(1, 0, 50)
    assert not breaks_role(np, cached, "decode").any()


def test_phases_that_are_statically_absent():
    whole = Work.decode([1, 2, 0], [5, 6, 0])
    slim = Work(decode_requests=whole.decode_requests, decode_kv=whole.decode_kv)
    for x, y in zip(iteration_features(np, whole), iteration_features(np, slim), strict=True):
        assert np.array_equal(x, y)
    only = replace(Work.prefill([1, 2], [5, 6]), decode_requests=None, decode_kv=None, prefill_kv=None)
    assert (iteration_features(np, only).kind == KINDS.index("pure_prefill")).all()
