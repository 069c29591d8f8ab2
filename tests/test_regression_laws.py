"""The laws of every model, for regressions; and what holds of their updates: in pieces, together, compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest
from asking import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import decode_stream, random_stream
from test_laws import bits, in_jit, in_vmap, kernel, same, speculate_in_jit

import fpmjax
from fpmjax import Observations, Work, estimate
from fpmjax.errors import MetricsError, OptionError
from fpmjax.models import regression as module
from fpmjax.models.learner import absorb_rows, absorb_stacked
from fpmjax.models.regression import regression, stack, update_many
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.work import COUNTS

LAZY = ErrorThreshold(0.05, 0.1, window=8, trigger=2, cooldown=4)
KINDS = {
    "plain": ("aggregated", {"attention_kv_weight": 0.7, "non_negative": False}),
    "lists": ("aggregated", {"feature_axes": ("P", "maxP", "n", "logF")}),
    "spline": ("decode", {"spline": Knots(per_axis=2)}),
}


@pytest.fixture(scope="module", params=KINDS)
def fitted(request):
    """(a ready model, its role) of each kind."""
    role, options = KINDS[request.param]
    model = regression(Observations.from_metrics(random_stream(11, 150, role, 2, lists=True)), role=role, **options)
    assert model.ready
    return model, role


def asked(role: str, seed: int, n: int, ranks: int = 3) -> Work:
    """Queries with lists of one padded length, so that they share compiled code."""
    work = Work.from_iterations(random_stream(seed, n, role, ranks, lists=True))
    assert work.lists is not None
    more = [(0, 0), (0, 0), (0, 48 - work.lists.extend.shape[-1])]
    extend, past = (np.pad(x, more) for x in (work.lists.extend, work.lists.past))
    return replace(work, lists=replace(work.lists, extend=extend, past=past))


def only(work: Work, index) -> Work:
    return jax.tree.map(lambda x: x[index], work)


def on_ranks(work: Work, change) -> Work:
    """The work with `change` applied along the rank axis of every field."""
    return jax.tree.map(change, work)


def test_idle_ranks_change_nothing(fitted):
    model, role = fitted
    work = asked(role, 1, 40)
    for before, after in ((0, 1), (1, 0)):
        more = on_ranks(work, lambda x: np.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)]))  # noqa: B023
        assert same(kernel(model, work), kernel(model, more))


def test_rank_order_changes_nothing(fitted):
    model, role = fitted
    work = asked(role, 2, 40)
    forward, backward = (kernel(model, w) for w in (work, on_ranks(work, lambda x: x[:, ::-1])))
    assert same(forward.status, backward.status)
    np.testing.assert_allclose(forward.latency_ms, backward.latency_ms, rtol=1e-13)  # sums of lists are reordered


def test_a_batch_is_a_stack_of_singles(fitted):
    """The kernel and the host give the same bits; logarithms are the exception, in the last one."""
    model, role = fitted
    work = asked(role, 3, 20)
    whole = kernel(model, work)
    for i in range(20):
        single = estimate(model, only(work, i), check=False)
        if "logF" in model.feature_axes:
            assert single.status == whole.status[i]
            np.testing.assert_allclose(single.latency_ms, whole.latency_ms[i], rtol=1e-13)
        else:
            assert bits(single) == bits(jax.tree.map(lambda x: x[i], whole))  # noqa: B023


def test_jit_vmap_chunks_and_shape_change_nothing(fitted):
    model, role = fitted
    work = asked(role, 4, 24)
    expected = kernel(model, work)
    with fpmjax.x64():
        assert same(expected, in_jit(model, work))
        assert same(expected, in_vmap(model, work))
    deep = jax.tree.map(lambda x: x.reshape(2, 3, 4, *x.shape[1:]), work)
    assert bits(kernel(model, deep)) == bits(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__["chunks"].__globals__, "SIZES", (8, 32))
        assert bits(expected) == bits(kernel(model, work))


def test_every_answer_is_a_number_or_a_refusal(fitted):
    model, role = fitted
    for result in (kernel(model, asked(role, 5, 200)), model.on_host(asked(role, 6, 50))):
        assert ((result.status > 1) == np.isnan(result.latency_ms)).all()
        assert ((result.status == 1) == (result.latency_ms == 0)).all()
        assert (result.rank == -1).all()


def test_free_slots_are_never_read():
    obs, query = decode_stream(1, 10), Work.decode(np.arange(1, 60), 30_000)
    for options in ({}, {"spline": Knots(), "min_observations": 8}):
        model = regression(obs, role="decode", **options)
        store = model.learners
        free = ~store.grid.used
        poisoned = replace(store, x=np.where(free[..., None], np.nan, store.x), y=np.where(free, np.inf, store.y))
        poisoned = replace(model, learners=poisoned)
        assert same(kernel(model, query), kernel(poisoned, query))
        assert same(kernel(model.update(obs), query), kernel(poisoned.update(obs), query))


def test_speculation_is_the_answer_at_the_widened_work_times_the_factor(fitted):
    model, _ = fitted
    work = asked("decode", 7, 30)
    spec = kernel(model, work, draft_length=3)
    assert (spec.scaling_factor == 1.49).all()
    assert np.array_equal(spec.latency_ms, 1.49 * spec.stp.latency_ms, equal_nan=True)
    if not model.reads:
        wide = Work.decode(work.decode_requests * np.uint32(4), work.decode_kv, ranks=True)
        assert same(spec.stp.latency_ms, kernel(model, wide).latency_ms)
    host = estimate(model, only(work, slice(0, 10)), draft_length=3, check=False)
    np.testing.assert_allclose(host.latency_ms, spec.latency_ms[:10], rtol=1e-13)
    if not model.every and not model.reads:
        with fpmjax.x64():
            assert same(spec.latency_ms, speculate_in_jit(model, work, np.int32(3)).latency_ms)


def test_an_unready_model_scales_nothing():
    work = Work.decode([4, 0, 9], [4096, 0, 10])
    spec = estimate(regression(role="decode"), work, draft_length=2, check=False)
    assert spec.status.tolist() == [5, 1, 5] and spec.latency_ms[1] == 0
    assert np.isnan(spec.latency_ms[[0, 2]]).all() and (spec.scaling_factor == 1.41).all()


def test_answers_have_finite_gradients():
    model = regression(decode_stream(3, 50), role="decode")
    work = Work.decode(np.array([1, 0, 30]), np.array([10, 0, 9000]))

    @jax.jit
    @jax.grad
    def slopes_of_total(slopes, model):
        plane = replace(model.learners.plane, slopes=slopes)
        model = replace(model, learners=replace(model.learners, plane=plane))
        return model(work).latency_ms.sum()

    with fpmjax.x64():
        slopes = np.asarray(slopes_of_total(model.learners.plane.slopes, model))
    assert np.isfinite(slopes).all() and (slopes != 0).all()


@pytest.mark.parametrize("options", [{}, {"lazy": LAZY}, {"max_observations": 12}], ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_pieces_change_nothing(options, seed):
    """One call, many calls, plain loops or compiled ones: the same rows stay and the same answers come."""
    obs = decode_stream(seed, 70)
    cuts = [0, *sorted(np.random.default_rng(seed).integers(0, 70, 3).tolist()), 70]
    whole = regression(obs, role="decode", **options)
    pieces = regression(role="decode", **options)
    for a, b in pairwise(cuts):
        pieces = pieces.update(obs[a:b])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLAIN", 0)
        compiled = regression(obs, role="decode", **options)
    query = Work.decode([2, 50], [4000, 90_000])
    for other in (pieces, compiled):
        assert same(whole.learners.grid, other.learners.grid)
        np.testing.assert_allclose(estimate(whole, query).latency_ms, estimate(other, query).latency_ms, rtol=1e-11)


def test_a_compiled_spline_is_the_plain_one():
    obs, options = decode_stream(5, 80), {"role": "decode", "spline": Knots(per_axis=3, step=40)}
    plain = regression(obs, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLAIN", 0)
        compiled = regression(obs, **options)
    assert plain.stores == compiled.stores and plain.stores[0]["spline"]["knot_searches"] == 3
    query = obs.work
    np.testing.assert_allclose(kernel(plain, query).latency_ms, kernel(compiled, query).latency_ms, rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"lazy": LAZY}], ids=str)
def test_many_models_are_updated_together(options):
    """What a stack makes of a stream is what each model makes of its part, four stores each."""
    models, n = 8, 400
    obs = Observations.from_metrics(random_stream(21, n, "aggregated", 2))
    which = np.random.default_rng(2).integers(0, models, len(obs))
    empty = [
        regression(role="aggregated", attention_kv_weight=0.5 + i, max_observations=8 + i, **options)
        for i in range(models)
    ]
    together = update_many(stack(empty), obs, which)
    compiled = absorb_stacked._cache_size()
    update_many(together, obs[100:], which[100:])
    assert absorb_stacked._cache_size() == compiled  # fewer rows, the same size
    work = asked("aggregated", 8, 16)
    with fpmjax.x64():
        answers = jax.jit(jax.vmap(lambda model, work: model(work), (0, None)))(together, work)
    for i, model in enumerate(empty):
        alone = model.update(obs.where(which == i))
        mine = jax.tree.map(lambda x: x[i], together)  # noqa: B023
        assert mine.stores == alone.stores and same(mine.learners.grid, alone.learners.grid)
        expected = estimate(alone, work, check=False)
        assert same(expected.status, answers.status[i])
        np.testing.assert_allclose(answers.latency_ms[i], expected.latency_ms, rtol=1e-10)


def test_a_stack_refuses_as_one():
    models = stack([regression(role="decode")] * 3)
    obs = decode_stream(0, 4)
    assert refusal(OptionError, update_many, models, obs, [0, 1, 2, 3])[0] == "which"
    assert refusal(OptionError, update_many, models, obs, [0, 1])[0] == "which"
    wrong = Observations.of(Work.prefill([1] * 4, 5), np.ones(4))
    assert refusal(MetricsError, update_many, models, wrong, [0, 1, 2, 0])[0] == "role"


def test_other_numbers_do_not_recompile(monkeypatch):
    """New data, capacities, grids, weights, tolerances: the same compiled code."""
    monkeypatch.setattr(module, "PLAIN", 0)

    def fit(seed, n, **options):
        regression(decode_stream(seed, n), role="decode", **options)

    fit(1, 300, lazy=LAZY)
    fit(1, 300)
    compiled = absorb_rows._cache_size()
    fit(2, 123, lazy=ErrorThreshold(0.2, 3.0, window=5, trigger=1, cooldown=9))
    fit(3, 77, max_observations=31, bins_per_axis=(3, 9), min_observations=9, attention_kv_weight=2.5)
    fit(4, 512, non_negative=False, singular_ridge_scale=0.1, rebuild_interval=7)
    assert absorb_rows._cache_size() == compiled


def test_a_long_stream_is_one_call():
    obs = decode_stream(8, 70_000)
    model = regression(obs, role="decode")
    assert model.stores[0]["retained_observations"] == 64
    late = regression(obs[:40_000], role="decode").update(obs[40_000:])
    assert same(model.learners.grid, late.learners.grid)
    query = Work.decode([2, 50], [4000, 90_000])
    assert estimate(model, query).latency_ms.tolist() == estimate(late, query).latency_ms.tolist()


def test_counts_may_be_absent():
    model = regression(decode_stream(3, 50), role="aggregated")
    whole = Work.decode([3, 0], [500, 0])
    slim = Work(decode_requests=whole.decode_requests, decode_kv=whole.decode_kv)
    assert set(COUNTS) > {"decode_requests"} and same(model.on_host(whole), model.on_host(slim))
