"""Laws that every model obeys, whatever it was made of (here: `direct`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tables import cell_of, queries_near, tables, work_of

import fpmjax
from fpmjax import Work, direct, estimate, speculative

CASES = (tables(), st.integers(0, 2**32))


# Compiled once: small tables share their padded shapes.
in_jit = jax.jit(lambda model, work: model(work))
in_vmap = jax.jit(jax.vmap(lambda model, work: model(work), (None, 0)))
speculate_in_jit = jax.jit(lambda model, work, depth: speculative(model, work, depth))


@jax.jit
@jax.grad
def gradient_of_total(latencies, model, work):
    ms = model.with_latencies(latencies)(work).latency_ms
    return jnp.where(jnp.isnan(ms), 0.0, ms).sum()


def bits(result) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(result)]


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def kernel(model, work, **options):
    """Through compiled code whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__, "SMALL", 0)
        return estimate(model, work, check=False, **options)


@given(*CASES)
def test_idle_ranks_change_nothing(rows, seed):
    model, queries = direct(cell_of(rows)), queries_near(rows, 30, seed).reshape(10, 3, 5)
    alone = kernel(model, work_of(queries))
    idle = np.zeros((10, 1, 5), np.int64)
    after = kernel(model, work_of(np.concatenate([queries, idle, idle], axis=1)))
    before = kernel(model, work_of(np.concatenate([idle, queries], axis=1)))
    assert same(alone, after)
    assert same((alone.latency_ms, alone.status), (before.latency_ms, before.status))
    assert (before.rank == np.where(alone.rank >= 0, alone.rank + 1, -1)).all()


@given(*CASES)
def test_rank_order_changes_nothing_but_the_rank(rows, seed):
    model, queries = direct(cell_of(rows)), queries_near(rows, 40, seed).reshape(10, 4, 5)
    forward, backward = kernel(model, work_of(queries)), kernel(model, work_of(queries[:, ::-1]))
    answered = forward.status <= 1
    assert (answered == (backward.status <= 1)).all()
    assert same(forward.latency_ms, backward.latency_ms)
    ms = kernel(model, work_of(queries.reshape(40, 5))).latency_ms.reshape(10, 4)
    for i in np.flatnonzero(forward.rank >= 0):
        assert ms[i, forward.rank[i]] == ms[i, 3 - backward.rank[i]] == forward.latency_ms[i]


@given(*CASES)
def test_a_batch_is_a_stack_of_singles(rows, seed):
    model, queries = direct(cell_of(rows)), queries_near(rows, 12, seed)
    whole = kernel(model, work_of(queries), evidence=True)
    for i, query in enumerate(queries):
        single = estimate(model, work_of(query), check=False, evidence=True)
        assert bits(single) == bits(jax.tree.map(lambda x: x[i], whole))  # noqa: B023


@given(*CASES)
def test_shape_changes_nothing(rows, seed):
    model, queries = direct(cell_of(rows)), queries_near(rows, 24, seed)
    flat = kernel(model, work_of(queries))
    deep = Work.of(**{n: getattr(work_of(queries), n).reshape(2, 3, 4) for n in fpmjax.work.COUNTS})
    assert bits(flat) == bits(kernel(model, deep))
    assert kernel(model, deep).latency_ms.shape == (2, 3, 4)


@given(*CASES)
def test_chunks_change_nothing(rows, seed):
    model, work = direct(cell_of(rows)), work_of(queries_near(rows, 100, seed))
    whole = kernel(model, work, evidence=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__["chunks"].__globals__, "SIZES", (8, 32))
        assert bits(whole) == bits(kernel(model, work, evidence=True))


@given(*CASES)
def test_jit_and_vmap_change_nothing(rows, seed):
    model, work = direct(cell_of(rows)), work_of(queries_near(rows, 32, seed))
    expected = kernel(model, work)
    with fpmjax.x64():
        assert same(expected, in_jit(model, work))
        assert same(expected, in_vmap(model, work))


@given(*CASES)
def test_padding_is_never_read(rows, seed):
    """Poisoned tails of every table array leave every answer as it is."""
    model, work = direct(cell_of(rows)), work_of(queries_near(rows, 64, seed))
    knots = len(rows) * 4  # at most: points twice, a closing knot for each curve

    def poison(k):
        if k.ms.shape[0] <= knots:
            return k
        dead = np.arange(k.ms.shape[0]) >= knots
        return fpmjax.lookup.curves.Knots(
            *(
                np.where(dead, np.asarray(bad, x.dtype), x)
                for x, bad in ((k.x, 7), (k.ms, np.nan), (k.at, 9), (k.head, 0), (k.row, 5))
            ),
            k.checked,
        )

    from dataclasses import replace

    poisoned = replace(
        model,
        decode=replace(model.decode, knots=poison(model.decode.knots)),
        prefill=replace(model.prefill, knots=poison(model.prefill.knots)),
    )
    assert same(kernel(model, work), kernel(poisoned, work))


@given(*CASES)
def test_the_gradient_in_the_table_is_the_weights(rows, seed):
    model, queries = direct(cell_of(rows)), queries_near(rows, 16, seed)
    queries[:, 1] = 0  # decode alone: a mixed pass also subtracts its baseline
    queries[:, [0, 2]] = 0
    work = work_of(queries)
    found = kernel(model, work, evidence=True)
    latencies = np.zeros(64)
    latencies[: len(rows)] = [r[4] for r in rows]
    with fpmjax.x64():
        gradient = np.asarray(gradient_of_total(latencies, model, work))
    expected = np.zeros(64)
    row, weight = found.parts.decode.row, found.parts.decode.weight
    np.add.at(expected, row[row >= 0], weight[row >= 0])
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


@given(*CASES)
def test_weights_reproduce_the_answer(rows, seed):
    model, work = direct(cell_of(rows)), work_of(queries_near(rows, 64, seed))
    result = kernel(model, work, evidence=True)
    latencies = np.append([r[4] for r in rows], 0.0)  # row -1 is the appended zero
    for name in ("prefill", "decode", "baseline"):
        ms, part = getattr(result.parts, f"{name}_ms"), getattr(result.parts, name)
        found = part.resolution >= 0
        assert (found == ~np.isnan(ms)).all()
        assert ((part.row >= 0) == (part.weight > 0)).all()
        np.testing.assert_allclose(part.weight.sum(-1), found.astype(float), rtol=0, atol=1e-12)
        blend = (latencies[part.row] * part.weight).sum(-1)
        np.testing.assert_allclose(blend[found], ms[found], rtol=1e-9)


@given(*CASES)
def test_outside_coverage_is_nan_and_a_status(rows, seed):
    result = kernel(direct(cell_of(rows)), work_of(queries_near(rows, 64, seed)))
    assert ((result.status > 1) == np.isnan(result.latency_ms)).all()
    assert ((result.status == 1) == (result.latency_ms == 0)).all()
    assert ((result.status == 0) == (result.rank >= 0)).all()


@given(*CASES, st.integers(1, 6))
def test_speculation_is_the_ordinary_answer_at_the_widened_work_times_the_factor(rows, seed, depth):
    model, queries = direct(cell_of(rows)), queries_near(rows, 30, seed)
    queries[:, :3] = 0
    wide = queries.copy()
    wide[:, 3] = np.minimum(wide[:, 3] * (depth + 1), 2**32 - 1)
    fits = queries[:, 3] * (depth + 1) < 2**32
    plain = kernel(model, work_of(wide))
    for spec in (
        kernel(model, work_of(queries), draft_length=depth),
        estimate(model, work_of(queries), draft_length=depth, check=False),
    ):
        assert (spec.scaling_factor == (125 + 8 * depth) / 100).all()
        assert np.array_equal(spec.latency_ms[fits], ((125 + 8 * depth) / 100 * plain.latency_ms)[fits], equal_nan=True)
        assert np.array_equal(spec.latency_ms, spec.scaling_factor * spec.stp.latency_ms, equal_nan=True)
        assert (spec.stp.status[fits] == plain.status[fits]).all()
    with fpmjax.x64():
        assert same(spec.latency_ms, speculate_in_jit(model, work_of(queries), np.int32(depth)).latency_ms)


def test_the_caller_s_jax_settings_are_left_alone(embedded_cell):
    before = jax.config.jax_enable_x64
    result = estimate(direct(embedded_cell), Work.decode(np.full(500, 8), 8192))
    assert jax.config.jax_enable_x64 == before
    assert result.latency_ms.dtype == np.float64 and isinstance(result.latency_ms, np.ndarray)
    with jax.enable_x64(not before):
        assert same(result, estimate(direct(embedded_cell), Work.decode(np.full(500, 8), 8192)))
