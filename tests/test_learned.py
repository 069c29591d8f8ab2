"""Laws that every learned model obeys: what changes its answers, what does not, and where it says that it ends."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fitted import counting_compiles, decoder, decoding, engine_ms, same_bits, server, serving, the, wide_queries
from table_pairs import refusal

import fpmjax
from fpmjax import (
    Observations,
    Status,
    Work,
    chosen,
    corrected,
    estimate,
    evaluate,
    learned,
    learned_fleet,
    load_model,
    regression,
    save_model,
    speculative,
    stack,
    x64,
)
from fpmjax.iteration import askable
from fpmjax.models import committee
from fpmjax.models.committee import families_at
from fpmjax.models.fitting import fit
from fpmjax.models.refine import FADE
from fpmjax.observe.sizes import sizes_of

QUERIES = wide_queries()


def answers(model, work=QUERIES, **options) -> np.ndarray:
    return estimate(model, work, **options).latency_ms


def logs_at(*args) -> list[np.ndarray]:
    with x64():
        return [np.asarray(log) for log in jax.jit(families_at, static_argnums=2)(*args)]


def sizes_at(work: Work):
    return sizes_of(np, askable(np, work)[0])


# The fit


def test_the_same_key_gives_the_same_model_and_another_nearly():
    again, other = learned(decoding(), role="decode"), decoder(key=1)
    assert same_bits(again, decoder()) and not same_bits(other, decoder())
    assert same_bits(learned(decoding(), role="decode", key=jax.random.key(1)), other)
    assert same_bits(learned(decoding(), role="decode", key=jax.random.PRNGKey(1)), other)
    inside = np.asarray(estimate(other, QUERIES).support.distance) == 0
    assert inside.any() and np.allclose(answers(decoder())[inside], answers(other)[inside], rtol=0.01)


def test_it_recovers_the_engine_where_it_has_seen_work():
    held = decoding(300, seed=9, noise=0.0)
    for seed in range(2):
        answer = estimate(decoder(seed), held.work)
        error = np.abs(answer.latency_ms / held.wall_ms - 1)[answer.support.distance == 0]
        assert error.mean() < 0.01 and error.max() < 0.04


def test_another_row_count_compiles_nothing():
    model = decoder()
    answers(model)
    before = fit._cache_size()
    with counting_compiles() as compiled:
        for n in (16, 17, 33, 60, 63, 64):
            learned(decoding(n, seed=n), role="decode", key=n)
    assert fit._cache_size() == before and not compiled


@pytest.mark.parametrize("size", [128])
def test_padding_changes_nothing(size, monkeypatch):
    monkeypatch.setattr(committee, "padded_rows", lambda count: size)
    padded = learned(decoding(), role="decode")
    np.testing.assert_allclose(answers(padded), answers(decoder()), rtol=1e-9)


def test_padded_sizes():
    assert [committee.padded_rows(n) for n in (16, 60, 64, 65, 128, 129, 2048)] == [64, 64, 64, 128, 128, 256, 2048]


def test_a_fleet_is_its_models():
    """To 1e-6: a batched fit rounds differently, and 600 steps of descent carry that on."""
    parts = [decoding(), decoding(16, seed=2), decoding(10, seed=3)]
    fleet = learned_fleet(iter(parts), role="decode")
    assert fpmjax.guard.is_stacked(fleet)
    for i, part in enumerate(parts):
        one = learned(part, role="decode")
        found, expected = estimate(the(fleet, i), QUERIES, check=False), estimate(one, QUERIES, check=False)
        assert np.array_equal(found.status, expected.status)
        for name in ("latency_ms", "interval.low_ms", "interval.high_ms", "support.distance", "support.model_spread"):
            x, y = (np.asarray(_get(e, name)) for e in (found, expected))
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
        assert the(fleet, i).diagnostics == one.diagnostics
    with x64():
        together = jax.jit(jax.vmap(lambda model: model(QUERIES).latency_ms))(fleet)
    np.testing.assert_allclose(together[0], answers(the(fleet, 0)), rtol=1e-12)
    assert refusal(estimate, fleet, QUERIES)[0] == "stacked"


def _get(value, path: str):
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_saved_models_are_the_same_bits(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    models = (
        decoder(),
        server(),
        stack([decoder(), decoder(1)]),
        decoder(allow_extrapolation=True, cuda_graph_batch_sizes=(8, 64)),
        corrected(decoder(), decoding(seed=4)),
        chosen(decoder(), regression(decoding(), role="decode")),
    )
    for model in models:
        save_model(model, path)
        assert same_bits(load_model(path), model)
    save_model(decoder(), path)
    assert same_bits(estimate(load_model(path), QUERIES), estimate(decoder(), QUERIES))


# The answers


def test_forms_rise_with_kv():
    batch = np.repeat([1, 7, 64, 300], 50)
    kv = np.tile((np.arange(1, 51) ** 5.6 + np.arange(50)).astype(np.int64), 4)
    for model in (decoder(), decoder(1)):
        store = the(model.stores, 0)
        for log in logs_at(store, sizes_at(Work.decode(batch, kv)), model.families):
            assert (np.diff(log.reshape(4, 50)) > 0).all()


def test_outside_the_answer_is_the_median_of_its_families():
    """Inside, what they miss is added."""
    model = decoder()
    answer = estimate(model, QUERIES)
    log = np.stack(logs_at(the(model.stores, 0), sizes_at(QUERIES), model.families))
    far = answer.support.distance >= FADE
    assert far.any() and not far.all()
    np.testing.assert_allclose(answer.latency_ms[far], np.exp(np.median(log, 0))[far], rtol=1e-12)
    np.testing.assert_allclose(answer.support.model_spread, np.ptp(log, 0) / 2, atol=1e-12)
    assert np.abs(np.log(answer.latency_ms) - np.median(log, 0)).max() < 0.1


def test_support_is_the_box_of_what_was_seen():
    seen = decoding()
    model = decoder()
    assert not estimate(model, seen.work).support.extrapolated.any()
    edge = model.box["pure_decode"]
    most, (least_kv, most_kv), (short, long) = 64, edge["decode_kv"], edge["decode_kv_per_request"]
    assert edge["decode_rows"] == (1, most) and edge["prefill_tokens"] == (1, 1)
    middle = int(most * (short + long) / 2)
    queries = {
        (most, middle): 0.0,
        (2 * most, middle): np.log(2),
        (most, 4 * int(most_kv)): np.log(4 * most_kv / min(most_kv, most * long)),
        (1, int(3 * long)): np.log(3),
        (1, 1): np.log(max(least_kv, short)),
    }
    work = Work.decode(*np.array(list(queries)).T)
    support = estimate(model, work).support
    np.testing.assert_allclose(support.distance, list(queries.values()), atol=1e-3)
    assert np.array_equal(support.extrapolated, np.array(list(queries.values())) > 0)


def test_intervals_hold_the_answer_and_widen_outside():
    answer = estimate(decoder(), QUERIES)
    low, high = answer.interval.low_ms, answer.interval.high_ms
    assert (low < answer.latency_ms).all() and (answer.latency_ms < high).all()
    assert (answer.interval.count == 60).all() and answer.interval.level == 0.9
    width = np.log(high / low)
    inside = answer.support.distance == 0
    assert width[inside].max() < width[answer.support.distance > 1].min()
    assert (decoder(level=0.5).stores.quantile < decoder().stores.quantile).all()


def test_no_interval_where_too_few_rows_were_held_out():
    few = learned(decoding(16), role="decode", level=0.99)
    assert np.isinf(few.stores.quantile).all()
    answer = estimate(replace(decoder(), stores=replace(decoder().stores, quantile=few.stores.quantile)), QUERIES)
    assert np.isnan(answer.interval.low_ms).all() and np.isnan(answer.interval.high_ms).all()
    assert np.isfinite(answer.latency_ms).all()


def test_captured_sizes():
    """Between two of them every batch takes what the next one takes."""
    batch, sizes = np.tile(np.arange(1, 65), 4)[:64], np.array([8, 16, 32, 64])
    rng = np.random.default_rng(0)
    batch = rng.permutation(batch)
    kv = batch * rng.integers(100, 4000, 64)
    ms = engine_ms(sizes[np.searchsorted(sizes, batch)] * 3, kv)
    model = learned(Observations.of(Work.decode(batch, kv), ms), role="decode", cuda_graph_batch_sizes=sizes)
    same = answers(model, Work.decode([33, 48, 64], [90_000] * 3))
    assert np.ptp(same) / same[0] < 0.02 and answers(model, Work.decode(32, 90_000)) < 0.97 * same[0]
    wide = answers(model, Work.decode([65, 70], [90_000] * 2))  # beyond the largest at its own size
    assert wide[0] < wide[1]


# Draft lengths


def test_wide_work_needs_an_anchor():
    model, work = decoder(), Work.decode([32, 32, 16, 43], [90_000] * 4)
    depth = np.array([3, 4, 7, 2])
    answer = estimate(model, work, draft_length=depth, check=False)
    assert answer.status.tolist() == [Status.OK, Status.NOT_READY, Status.OK, Status.NOT_READY]
    assert np.isnan(answer.latency_ms[[1, 3]]).all() and answer.support.extrapolated[[0, 2]].all()
    assert answer.support.distance[0] == pytest.approx(np.log(2))
    code, message = refusal(estimate, model, work, draft_length=depth)
    assert code == "not_ready" and "160 decode rows a rank, but at most 64 were learned" in message
    assert "hint: draft_length=3 is answered" in message
    said = model.explain(Status.NOT_READY, Work.decode(160, 90_000))
    assert "observe a batch of at least 80" in said and "recommend_anchors" in said
    assert estimate(model, Work.decode(160, 90_000)).status == Status.OK  # ordinary work is answered, and flagged

    free = estimate(decoder(allow_extrapolation=True), work, draft_length=depth)
    assert (free.status == Status.OK).all() and free.support.extrapolated.all()

    wide = Work.decode([160, 160], [60_000, 200_000])
    more = Observations.concat([decoding(40), Observations.of(wide, engine_ms(160, np.array([60_000, 200_000])))])
    anchored = learned(more, role="decode")
    ready = estimate(anchored, work, draft_length=depth)
    assert not ready.support.extrapolated.any()
    rows = np.array([32, 32, 16, 43]) * (depth + 1)
    np.testing.assert_allclose(ready.stp.latency_ms, engine_ms(rows, 90_000), rtol=0.05)


def test_the_interval_of_a_round_is_scaled():
    answer = estimate(decoder(), Work.decode([8, 16], [30_000, 40_000]), draft_length=2)
    np.testing.assert_allclose(answer.interval.low_ms, answer.stp.interval.low_ms * (0.08 * 2 + 1.25))
    with x64():
        traced = jax.jit(speculative)(decoder(), Work.decode([8, 16], [30_000, 40_000]), 2)
    np.testing.assert_allclose(traced.latency_ms, answer.latency_ms, rtol=1e-12)


# Kinds, ranks, lists


def test_an_aggregated_worker_has_a_store_for_each_kind():
    model, seen = server(), serving(seed=7)
    assert [d["ready"] for d in model.diagnostics] == [True] * 4
    answer = estimate(model, seen.work)
    for row in evaluate(model, seen, by="kind", blocks=1).to_pylist():
        assert row["scored"] == row["n"] and row["mape_pct"] < 5.0, row
    inside = (answer.interval.low_ms <= seen.wall_ms) & (seen.wall_ms <= answer.interval.high_ms)
    assert 0.85 < inside.mean() < 0.97
    decode_only = learned(decoding(), role="aggregated")
    mixed = estimate(decode_only, seen.work, check=False)
    kinds = np.repeat(np.arange(4), 60)
    assert np.array_equal(mixed.status == Status.OK, kinds == 0)
    code, message = refusal(estimate, decode_only, Work.prefill(1, 100))
    assert code == "not_ready" and "0 observations of pure_prefill" in message
    assert "at least 16, with 3 distinct prefill_tokens or prefill_kv" in message


def test_idle_ranks_and_the_order_of_ranks_change_nothing():
    work = serving(20, seed=3).work
    answer = estimate(server(), work)
    turned = jax.tree.map(lambda x: x[:, ::-1], work)
    assert same_bits(estimate(server(), turned), answer)
    queries = Work.decode([8, 16], [30_000, 40_000])
    idle = Work.decode([[0, 8, 0], [16, 0, 0]], [[0, 30_000, 0], [40_000, 0, 0]], ranks=True)
    np.testing.assert_allclose(answers(decoder(), idle), answers(decoder(), queries), rtol=1e-13)


def test_lists_change_nothing():
    ranks = {"num_decode_requests": 3, "sum_decode_kv_tokens": 3000}
    listed = [[{"scheduled_requests": ranks | {"extend_lengths": [1, 1, 1], "past_kv_lengths": [500, 500, 2000]}}]]
    work = Work.from_iterations(listed)
    plain = replace(work, lists=None)
    for depth in (None, 2):
        assert same_bits(estimate(decoder(), work, draft_length=depth), estimate(decoder(), plain, draft_length=depth))


def test_statuses():
    work = Work.decode([0, 3, 0], [0, 900, 0])
    answer = estimate(decoder(), work)
    assert answer.status.tolist() == [Status.IDLE, Status.OK, Status.IDLE] and answer.latency_ms[0] == 0
    assert np.isnan(answer.support.distance[0]) and answer.interval.count.tolist() == [0, 60, 0]
    assert refusal(estimate, decoder(), Work.prefill(1, 5))[0] == "role"
    code, message = refusal(estimate, learned(decoding(15), role="decode"), work)
    assert code == "not_ready" and "15 observations of pure_decode" in message
    assert "at least 16, with 4 distinct decode_rows and 4 distinct decode_kv_per_request" in message
    assert estimate(decoder(), Work.decode(np.zeros(0, int), np.zeros(0, int))).latency_ms.shape == (0,)


# Inside jit, and inside other models


def test_usable_inside_jit_vmap_and_grad():
    model, work = decoder(), Work.decode([5, 32], [9000, 90_000])
    expected = answers(model, work)
    with x64():
        assert np.allclose(jax.jit(lambda m, w: m(w).latency_ms)(model, work), expected, rtol=1e-12)
        each = jax.jit(jax.vmap(lambda b, k: model(Work.decode(b, k)).latency_ms))(
            jnp.array([[5], [32]], jnp.uint32), jnp.array([[9000], [90_000]], jnp.uint32)
        )
        assert np.allclose(each[:, 0], expected, rtol=1e-12)
        slope = jax.jit(
            jax.grad(lambda theta: replace(model, stores=replace(model.stores, theta=theta))(work).latency_ms.sum())
        )(jnp.asarray(model.stores.theta))
        assert np.isfinite(slope).all() and (slope != 0).any()
    assert refusal(model, work)[0] == "x64_required"
    fitted = jax.jit(lambda x: x + learned(decoding(), role="decode").stores.box)(1.0)  # of what is not traced
    assert np.allclose(fitted, model.stores.box + 1.0, rtol=1e-6)
    assert refusal(jax.jit(lambda seen: learned(seen, role="decode").stores.box), decoding())[0] == "traced"


@pytest.mark.parametrize("mode", ["jax_debug_nans", "jax_debug_infs", "jax_enable_checks"])
def test_the_caller_s_debugging_modes(mode):
    old = getattr(jax.config, mode)
    jax.config.update(mode, True)
    try:
        assert same_bits(learned(decoding(), role="decode"), decoder())
        answer = estimate(decoder(), Work.decode([5, 5], [5000, 5000]), draft_length=[1, 1000], check=False)
        assert answer.status.tolist() == [Status.OK, Status.NOT_READY]
    finally:
        jax.config.update(mode, old)


def test_inside_other_models():
    model, seen, work = decoder(), decoding(seed=5), Work.decode([5, 32], [9000, 90_000])
    slower = replace(seen, wall_ms=1.2 * np.asarray(seen.wall_ms))
    fixed = estimate(corrected(model, slower), work)
    assert np.allclose(fixed.factor, 1.2, rtol=0.02) and np.array_equal(fixed.native_ms, answers(model, work))
    np.testing.assert_allclose(fixed.interval.high_ms, fixed.factor * estimate(model, work).interval.high_ms)
    both = chosen(model, regression(seen, role="decode"))
    assert np.array_equal(answers(both, work), answers(model, work))
    assert refusal(estimate, both, work, draft_length=9)[0] == "not_ready"
    assert refusal(estimate, corrected(model, slower), work, draft_length=9)[0] == "not_ready"
    row = evaluate(model, seen, by=None, blocks=1).to_pylist()[0]
    assert row["scored"] == 60 and row["mape_pct"] < 2.0
