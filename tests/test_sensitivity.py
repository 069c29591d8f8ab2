"""Sensitivities equal what they stand for: differences of answers, gradients through `with_latencies`, evidence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tables import cell_of, decode_rows, queries_near, surface, tables, work_of

from fpmjax import CoverageError, FpmError, MetricsError, SpeculationError, Work, direct, estimate, x64
from fpmjax.errors import OptionError
from fpmjax.rule import PUBLISHED
from fpmjax.sensitivity import row_sensitivity, sensitivity
from fpmjax.speculative import speculative

CURVES = decode_rows({2: [(0, 1.0), (10, 3.0), (30, 4.0)], 4: [(0, 5.0), (20, 9.0)], 5: [(7, 1.0)]})


def answers(model, batch, kv, **options):
    return estimate(model, Work.decode(batch, kv), check=False, **options).latency_ms


@pytest.mark.parametrize(
    ("batch", "kv", "slope"),
    [
        (2, 3, 0.2),
        (2, 0, 0.2),
        (2, 10, 0.05),  # a measured point: the segment above
        (2, 30, 0.05),  # the end of a curve: the one below
        (4, 20, 0.2),
        (3, 5, 0.2),
        (3, 15, 0.05 + (0.2 - 0.05) * 0.5),
        (5, 7, np.nan),  # a curve of one point
        (2, 31, np.nan),
        (9, 5, np.nan),
    ],
)
def test_the_slope_is_that_between_the_measured_points(batch, kv, slope):
    found = sensitivity(direct(cell_of(CURVES)), Work.decode(batch, kv))
    assert found.per_kv_token == pytest.approx(slope, rel=1e-15, nan_ok=True)
    assert np.shape(found.per_kv_token) == ()


@given(tables(decode_only=True), st.integers(0, 2**32), st.sampled_from([None, 1, 3]))
def test_slopes_are_differences_inside_a_cell_and_steps_are_differences_of_answers(rows, seed, draft):
    model = direct(cell_of(rows))
    batch, kv = queries_near(rows, 40, seed)[:, 3:].T
    batch = np.maximum(batch, 1)
    found = sensitivity(model, Work.decode(batch, kv), draft_length=draft)
    here = answers(model, batch, kv, draft_length=draft)
    assert np.array_equal(found.latency_ms, here, equal_nan=True)
    up = np.minimum(kv + 1, 2**32 - 1)
    after = answers(model, batch, up, draft_length=draft)
    support = [
        e.parts.decode if draft is None else e.stp.parts.decode
        for e in (
            estimate(model, Work.decode(batch, k), draft_length=draft, check=False, evidence=True) for k in (kv, up)
        )
    ]
    rows_used = [np.sort(e.row[:, 0], -1) for e in support]
    inside = (rows_used[0] == rows_used[1]).all(-1) & (up > kv) & ~np.isnan(here + after)
    scale = np.maximum(here, max(r[-1] for r in rows))
    assert np.all(np.abs(found.per_kv_token - (after - here))[inside] <= 1e-14 * scale[inside])
    fits = batch < 2**32 - 1
    more = answers(model, np.where(fits, batch + 1, 0), np.where(fits, kv, 0), draft_length=draft)
    assert np.array_equal(found.next_same_total, np.where(fits, more - here, np.nan), equal_nan=True)
    even = (kv % batch == 0) & fits & (kv + kv // batch < 2**32)
    more = answers(model, np.where(even, batch + 1, 0), np.where(even, kv + kv // batch, 0), draft_length=draft)
    assert np.array_equal(found.next_same_context[even], (more - here)[even], equal_nan=True)


def test_the_next_request_gets_the_nearest_context():
    found = sensitivity(direct(cell_of(surface([1, 2, 4, 8], [0, 4096]))), Work.decode([2, 2, 3], [4, 5, 4]))
    assert np.allclose(found.next_same_context, 1 + np.array([2, 3, 1]) / 1024)
    assert np.allclose(found.next_same_total, 1.0)
    assert np.allclose(found.per_kv_token, 1 / 1024)


def test_other_models_are_asked_for_one_more_token(embedded_cell):
    from test_inverse import Plain

    model = direct(embedded_cell)
    batch, kv = np.array([[3], [60]]), np.array([2000, 9000, 10**6])
    found, table = sensitivity(Plain(model), Work.decode(batch, kv)), sensitivity(model, Work.decode(batch, kv))
    assert np.array_equal(found.per_kv_token, answers(model, batch, kv + 1) - answers(model, batch, kv), equal_nan=True)
    assert np.allclose(found.per_kv_token, table.per_kv_token, rtol=1e-6, equal_nan=True)
    assert np.array_equal(found.next_same_context, table.next_same_context, equal_nan=True)


def test_rows_per_request_of_the_model_count_in_slopes():
    rows = surface([2, 4, 8], [0, 4096])
    found = sensitivity(direct(cell_of(rows), verify_width=2), Work.decode([1, 2, 4, 5], 100))
    assert np.allclose(found.per_kv_token, [1 / 1024] * 3 + [np.nan], equal_nan=True)


def test_only_pure_decode_on_one_rank_has_a_next_request():
    model = direct(cell_of(CURVES))
    for work in (Work.prefill(1, 5), Work.decode([1, 2], 3, ranks=True)):
        with pytest.raises(MetricsError) as error:
            sensitivity(model, work)
        assert error.value.code == "not_pure_decode"
    with pytest.raises(SpeculationError):
        sensitivity(model, Work.decode(1, 1), draft_length=0)


def gradient(model, work, weights, rows, draft=None):
    """d (weighted mean) / d (row) by jax through `with_latencies`, over the answered queries."""
    with x64():
        latencies = np.zeros(rows)
        for points in (model.cell.decode, model.cell.prefill):
            latencies[points.row] = points.latency_ms

        def mean(latency):
            changed = model.with_latencies(latency)
            result = changed(work) if draft is None else speculative(changed, work, draft)
            answered = result.status <= 1
            ms = jnp.where(answered, result.latency_ms, 0.0)
            return (ms * weights).sum() / jnp.where(answered, weights, 0.0).sum()

        return np.asarray(jax.grad(mean)(jnp.asarray(latencies)))


@settings(max_examples=10)
@given(tables(), st.integers(0, 2**32), st.sampled_from([None, 2]))
def test_row_sensitivity_is_the_gradient_through_with_latencies(rows, seed, draft):
    model, queries = direct(cell_of(rows)), queries_near(rows, 24, seed)
    if draft:
        queries[:, :3] = 0
    work = work_of(queries)
    weights = np.random.default_rng(seed).uniform(0, 2, 24)
    if np.all(estimate(model, work, draft_length=draft, check=False).status > 1):
        return
    found = row_sensitivity(model, work, weights, draft_length=draft)
    assert found.shape == (len(rows),)
    np.testing.assert_allclose(found, gradient(model, work, weights, len(rows), draft), rtol=1e-12, atol=1e-15)


@settings(max_examples=10)
@given(tables(), st.integers(0, 2**32))
def test_row_sensitivity_is_the_evidence_summed_by_row(rows, seed):
    """Pure phases on several ranks; the slowest rank carries the query, and refused queries carry nothing."""
    model = direct(cell_of(rows))
    queries = queries_near(rows, 60, seed).reshape(30, 2, 5)
    queries[..., :3] *= (queries[..., 3:4] == 0).astype(np.int64)
    work = work_of(queries)
    result = estimate(model, work, check=False, evidence=True)
    if np.all(result.status > 1):
        return
    expected = np.zeros(len(rows))
    for i, rank in enumerate(result.rank.tolist()):
        if rank < 0:
            continue
        ms = [result.parts.prefill_ms[i], result.parts.decode_ms[i]]
        slow = np.nan_to_num(ms[0]) + np.nan_to_num(ms[1])
        tied = np.flatnonzero(slow == slow.max())  # equally slow ranks share
        for part in (result.parts.prefill, result.parts.decode):
            for r in tied:
                for row, weight in zip(part.row[i, r], part.weight[i, r], strict=True):
                    if row >= 0:
                        expected[row] += weight / len(tied)
    expected /= np.sum(result.status <= 1)
    np.testing.assert_allclose(row_sensitivity(model, work), expected, rtol=1e-12, atol=1e-15)


def test_shares_of_a_mean_add_up_and_do_not_depend_on_how_the_queries_come(embedded_cell, monkeypatch):
    monkeypatch.setitem(row_sensitivity.__globals__, "BLOCK", 64)
    model = direct(embedded_cell)
    rng = np.random.default_rng(3)
    batch, kv = rng.integers(1, 65, 200), rng.integers(64, 32_000, 200)
    flat = row_sensitivity(model, Work.decode(batch, kv))
    assert flat.sum() == pytest.approx(1, rel=1e-12)
    assert np.all(flat[embedded_cell.prefill.row] == 0)
    mean = flat[embedded_cell.decode.row] @ embedded_cell.decode.latency_ms
    assert mean == pytest.approx(np.nanmean(answers(model, batch, kv)), rel=1e-12)
    square = row_sensitivity(model, Work.decode(batch.reshape(10, 20), kv.reshape(10, 20)), np.ones((10, 1)))
    assert np.array_equal(flat, square)
    drafted = row_sensitivity(model, Work.decode(batch[:5], kv[:5]), draft_length=[[1], [2]])
    assert drafted.sum() == pytest.approx((PUBLISHED.factor(1) + PUBLISHED.factor(2)) / 2, rel=1e-12)


def test_refused_queries_are_left_out_and_nothing_answered_is_an_error():
    model = direct(cell_of(CURVES))
    found = row_sensitivity(model, Work.decode([2, 99], [5, 5]))
    assert found.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert np.array_equal(found, row_sensitivity(model, Work.decode([2, 4], [5, 5]), [1, 0]))
    for work in (Work.decode(99, 5), Work.decode(np.zeros(0, np.uint32), 5)):
        with pytest.raises(CoverageError, match="no query that counts"):
            row_sensitivity(model, work)
    ranks = row_sensitivity(model, Work.decode([[2, 99], [2, 4]], [[5, 5], [5, 0]], ranks=True))
    assert ranks.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("scale", [1.7e308, 1e300, 1e-300, 2.0**-1074, 3])
def test_weights_count_by_their_ratios_alone(scale):
    model, work = direct(cell_of(CURVES)), Work.decode(np.tile([2, 4, 3], 40), np.tile([5, 5, 15], 40))
    found = row_sensitivity(model, work, np.full(120, scale))
    np.testing.assert_allclose(found, row_sensitivity(model, work), rtol=1e-13)
    np.testing.assert_allclose(found, row_sensitivity(model, work, scale), rtol=1e-13)
    assert found.sum() == pytest.approx(1, rel=1e-12)
    ratios = np.tile([1.0, 0.5, 0.25], 40)
    if scale > 2.0**-1000:
        want = row_sensitivity(model, work, ratios)
        np.testing.assert_allclose(row_sensitivity(model, work, ratios * scale), want, rtol=1e-13)


def test_the_weights_of_a_workload_may_lie_far_apart():
    model = direct(cell_of(CURVES))
    found = row_sensitivity(model, Work.decode([2, 4], 5), [1e308, 1e-300])
    assert np.array_equal(found, row_sensitivity(model, Work.decode(2, 5)))
    assert np.array_equal(found, row_sensitivity(model, Work.decode([2, 2], 5), np.array([2, 1], np.longdouble)))


@pytest.mark.parametrize(
    "weights", [[1, 2, 3], -1, np.nan, "1", [True, False], [np.inf, 1], [1, -1e-300], np.ma.array([1, 2], mask=[0, 1])]
)
def test_bad_weights_are_refused_by_name(weights):
    with pytest.raises(OptionError) as error:
        row_sensitivity(direct(cell_of(CURVES)), Work.decode([2, 4], 5), weights)
    assert error.value.code == "weights"
    assert "\nhint: " in str(error.value)


def test_only_tables_have_rows():
    from test_inverse import Plain

    with pytest.raises(OptionError) as error:
        row_sensitivity(Plain(direct(cell_of(CURVES))), Work.decode(2, 5))
    assert error.value.code == "model"
    with pytest.raises(FpmError, match="asks a model"):
        row_sensitivity("model", Work.decode(2, 5))


@settings(max_examples=10)
@given(tables(), st.integers(0, 2**32), st.booleans())
def test_a_draft_length_of_nothing_among_others_is_ordinary_decoding(rows, seed, plain_only):
    model, rng = direct(cell_of(rows)), np.random.default_rng(seed)
    queries = queries_near(rows, 30, seed)
    queries[:, :3] = 0
    batch, kv = np.maximum(queries[:, 3], 1), queries[:, 4]
    depth = np.zeros(30, np.int64) if plain_only else rng.integers(0, 4, 30)
    work = Work.decode(batch, kv)
    found = sensitivity(model, work, draft_length=depth)
    for which, more in ((depth == 0, {}), *((depth == d, {"draft_length": d}) for d in (1, 2, 3))):
        alone = sensitivity(model, Work.decode(batch[which], kv[which]), **more)
        for name in vars(found):
            assert np.array_equal(getattr(found, name)[which], getattr(alone, name), equal_nan=True), name
    drafted = estimate(model, work, draft_length=np.maximum(depth, 1), check=False).latency_ms
    ms = np.where(depth == 0, estimate(model, work, check=False).latency_ms, drafted)
    assert np.array_equal(found.latency_ms, ms, equal_nan=True)
    if np.isnan(ms).all():
        return
    weights = rng.uniform(0.1, 2, 30)
    by_row = row_sensitivity(model, work, weights, draft_length=depth)
    if plain_only:
        assert np.array_equal(by_row, row_sensitivity(model, work, weights))
    latencies = np.zeros(len(rows))
    for points in (model.cell.decode, model.cell.prefill):
        latencies[points.row] = points.latency_ms
    known = ~np.isnan(ms)  # an answer is a sum over measured rows, so their pulls times their latencies are the mean
    mean = (ms[known] * weights[known]).sum() / weights[known].sum()
    assert (by_row * latencies[: len(by_row)]).sum() == pytest.approx(mean, rel=1e-9)
