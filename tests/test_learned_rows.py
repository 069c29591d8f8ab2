"""Bad rows and wrong arguments of learned models: a clear refusal or a sane model, never NaN served as a number."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from fitted import decoding, engine_ms, same_bits
from hypothesis import given
from hypothesis import strategies as st
from table_pairs import refusal

from fpmjax import Hardware, Observations, Status, Work, estimate, learned, learned_fleet
from fpmjax.models import committee
from fpmjax.models.committee import committee as median_of
from fpmjax.models.committee import conformal, distinct
from fpmjax.models.fitting import member_weights, thin
from fpmjax.models.learned import split
from fpmjax.models.refine import refine

SEEN = decoding()
BATCH = np.asarray(SEEN.work.decode_requests, np.int64)[:, 0]
KV = np.asarray(SEEN.work.decode_kv, np.int64)[:, 0]
MS = np.asarray(SEEN.wall_ms)
RNG = np.random.default_rng(0)
# From the middle of what is seen to the largest counts there are.
QUERIES = Work.decode([8, 1, 64, 300, 2**32 - 1, 1], [30_000, 1, 300_000, 0, 2**32 - 1, 2**32 - 1])
HARDWARE = Hardware(65.5e9, 65.5e9, 262_144, 8e12, 2.25e15)
decoder = partial(learned, role="decode")


def of(batch: Any, kv: Any, ms: Any) -> Observations:
    return Observations.of(Work.decode(batch, kv), ms)


def raw(ms: Any) -> Observations:
    """As a caller may build them by hand, past what `Observations.of` leaves out."""
    return Observations(SEEN.work, np.asarray(ms, np.float64))


def some(value: float, where: Any = slice(0, 20)) -> np.ndarray:
    ms = MS.copy()
    ms[where] = value
    return ms


def check(model: Any) -> np.ndarray:
    """Every answer is a number inside its interval, or refused; the milliseconds."""
    answer = estimate(model, QUERIES, check=False)
    served = np.asarray(answer.status) == Status.OK
    assert served.all() or (answer.status == Status.NOT_READY).all()
    assert np.array_equal(served, np.isfinite(answer.latency_ms)) and (answer.latency_ms[served] > 0).all()
    assert (answer.interval.low_ms <= answer.latency_ms)[served].all()
    assert (answer.latency_ms <= answer.interval.high_ms)[served].all()
    return answer.latency_ms


NOT_ENOUGH = {
    "one batch": of(np.full(60, 8), KV, MS),
    "one context": of(BATCH, BATCH * 1000, MS),
    "three batches": of(np.minimum(BATCH, 4), KV, MS),
    "15 rows": decoding(15),
    "none": decoding()[:0],
    "batches 31 and 32": of(31 + BATCH % 2, KV, MS),
    **{f"all {value}": raw(np.full(60, value)) for value in (np.nan, 0.0, -1.0, np.inf)},
}


@pytest.mark.parametrize("name", NOT_ENOUGH)
def test_not_enough(name):
    model = decoder(NOT_ENOUGH[name])
    assert not model.ready and np.isnan(check(model)).all()
    code, message = refusal(estimate, model, QUERIES)
    assert code == "not_ready" and "not enough, or too much alike" in message


SANE = {
    **{f"some {value}": raw(some(value)) for value in (np.nan, 0.0, -1.0, np.inf)},
    "16 rows": decoding(16),
    "one KV total": of(BATCH, np.full(60, 10_000), MS),
    "no context": of(BATCH, np.arange(60) % 5 * BATCH, MS),
    "all the same times": of(BATCH, KV, np.full(60, 7.0)),
    "eight rows again and again": of(np.tile(BATCH[:8], 7), np.tile(KV[:8], 7), np.tile(MS[:8], 7)),
    "KV to the brim": of(BATCH, 2**32 - 1 - RNG.integers(0, 1000, 60), MS),
    "KV of any size": of(BATCH, RNG.integers(0, 2**32, 60), MS),
    "wild": of(BATCH, KV, 10 ** RNG.uniform(-5, 7, 60)),
    "absurd": raw(10 ** RNG.uniform(-300, 300, 60)),
    **{f"times {scale}": raw(MS * scale) for scale in (1e-7, 1e-5, 1e5, 1e7, 1e-300, 1e100)},
}


@pytest.mark.parametrize("name", SANE)
def test_sane(name):
    with np.errstate(all="raise"):
        model = decoder(SANE[name])
    assert model.ready and np.isfinite(check(model)).all()


def test_rows_without_a_time_are_left_out():
    kept = jax.tree.map(lambda x: x[20:], SEEN)
    for value in (np.nan, 0.0, -1.0, np.inf):
        assert same_bits(decoder(raw(some(value))), decoder(kept))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_milliseconds_of_any_size(scale):
    assert check(decoder(of(BATCH, KV, MS * scale)))[0] == pytest.approx(scale * engine_ms(8, 30_000), rel=0.05)


@pytest.mark.parametrize("value", [1e-300, 1e-3, 1e6, 1e300])
def test_one_absurd_row_hardly_counts(value):
    assert check(decoder(of(BATCH, KV, some(value, 0))))[0] == pytest.approx(check(decoder(SEEN))[0], rel=0.01)


@pytest.mark.parametrize("cold", [1, 32])
def test_cold_starts_hardly_count(cold):
    batch = np.concatenate([np.full(3, cold), np.arange(1, 51)])
    kv = batch * np.random.default_rng(0).integers(100, 2000, 53)
    model = decoder(of(batch, kv, np.concatenate([np.full(3, 400.0), 5.0 + 0.1 * np.arange(1, 51)])))
    assert estimate(model, Work.decode(32, 32_000)).latency_ms == pytest.approx(8.2, rel=0.02)


def test_what_was_seen_narrowly_is_flagged_widely():
    batch = RNG.integers(29, 33, 60)
    model = decoder(of(batch, batch * RNG.integers(100, 9000, 60), 10.0 + 0.1 * batch))
    answer = estimate(model, Work.decode([1, 31], [1000, 31_000]))
    assert answer.support.extrapolated.tolist() == [True, False]
    assert model.box["pure_decode"]["decode_rows"] == (29, 32)


@pytest.mark.parametrize("sizes", [[7, 11], [1], list(range(1, 5000)), [2**32 - 1]])
def test_any_captured_sizes(sizes):
    model = decoder(SEEN, cuda_graph_batch_sizes=sizes)
    assert model.ready == (sizes != [2**32 - 1])  # there every batch is the same


# Many rows


def test_a_million_rows(monkeypatch):
    """Within seconds, and to the accuracy of few: fitted on 64 of them here, on 2,048 otherwise."""
    monkeypatch.setattr(committee, "thin", partial(thin, most=64))
    batch = np.random.default_rng(0).integers(1, 65, 10**6)
    kv = batch * np.random.default_rng(1).integers(100, 8000, 10**6)
    seen = of(batch, kv, engine_ms(batch, kv) * np.random.default_rng(2).lognormal(0, 0.01, 10**6))
    start = time.process_time()
    model = decoder(seen)
    assert time.process_time() - start < 15
    assert model.diagnostics[0]["observations"] == 10**6 and model.diagnostics[0]["calibrated_on"] == 64
    assert check(model)[0] == pytest.approx(engine_ms(8, 30_000), rel=0.02)


@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 400), st.floats(0.05, 8.0))
def test_thinning_keeps_the_weight_of_all(seed, n, most, wide):
    at = np.random.default_rng(seed).uniform(0, wide, (n, 3)) ** 2
    kept, weight = thin(at, most)
    assert len(kept) == len(weight) <= max(most, 1) and (np.diff(kept) > 0).all() and (weight >= 1).all()
    assert weight.sum() == pytest.approx(n)
    if n <= most:
        assert len(kept) == n and (weight == 1).all()


def test_thinning_spares_what_is_rare():
    at = np.concatenate([np.zeros((5000, 2)), np.arange(1, 41)[:, None] * np.ones(2)])
    kept, weight = thin(at, 100)
    assert set(range(5000, 5040)) <= set(kept.tolist()) and (weight[kept >= 5000] == 1).all()
    crowd = kept[kept < 5000]
    assert len(crowd) == 60 and np.diff(crowd).max() <= 84  # evenly over the 5,000


# Small parts


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=3))
def test_the_median_of_a_committee(logs):
    middle, spread = median_of(np, [np.array([x]) for x in logs])
    assert middle[0] == pytest.approx(np.median(logs)) and spread[0] == pytest.approx(np.ptp(logs) / 2)


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_conformal_quantile_is_the_plain_one(seed, n, level):
    score = np.random.default_rng(seed).exponential(size=n)
    k = int(np.ceil((n + 1) * level - 1e-9))
    expected = np.sort(score)[k - 1] if k <= n else np.inf
    assert conformal(score, np.ones(n), level) == expected
    heavy = conformal(np.repeat(score, 2), np.ones(2 * n), level)  # a row of weight two is the row twice
    assert conformal(score, np.full(n, 2.0), level) >= heavy


def test_refinement_follows_what_later_rows_confirm():
    rng = np.random.default_rng(0)
    at = rng.uniform(0, 6, (300, 4))
    truth = 0.02 * np.sin(at[:, 0])
    surface = refine(at, truth, np.ones(300))
    assert np.abs(surface(np, at) - truth).mean() < 0.5 * np.abs(truth).mean()
    noise = refine(at, 0.02 * rng.standard_normal(300), np.ones(300))
    assert np.abs(noise(np, at)).max() < 0.01
    assert (refine(at, np.zeros(300), np.ones(300)).weights == 0).all()
    drifting = refine(at, np.linspace(-0.03, 0.03, 300), np.ones(300))
    assert np.abs(drifting(np, at)).max() < 0.01


def test_distinct_rows():
    at = np.array([[1, 2], [1, 2], [1, 3], [2, 2]], float)
    assert [distinct(at, most) for most in (1, 3, 9)] == [1, 3, 3] and distinct(at[:0], 4) == 0


def test_work_by_hand_that_is_none_is_left_out():
    work = Work(decode_requests=np.full((3, 1), -1), decode_kv=np.ones((3, 1), int))
    assert not len(split(Observations(work, np.ones(3)), "decode", None, None)[0].wall_ms)


# Arguments


def test_options_are_refused_by_name():
    bad: dict[str, tuple[Any, ...]] = {
        "role": (None, 1, "x", ["decode"]),
        "family": (None, 1, "broad", ["linear"]),
        "level": (None, 0, 1, 1.0, 0.0, -0.5, float("nan"), "x", True, np.array(0.9)),
        "allow_extrapolation": (None, 1, "x", np.array(True)),
        "cuda_graph_batch_sizes": (1, "12", [], [0], [1.5]),
        "key": (None, 1.0, True, np.bool_(1), "a", [1, 2], np.array(3), jax.random.split(jax.random.key(0))),
        "hardware": (1, {}, Hardware, [HARDWARE], "H200"),
    }
    for name, values in bad.items():
        for value in values:
            assert refusal(learned, SEEN, **({"role": "decode"} | {name: value}))[0] == name, (name, value)
    assert refusal(learned, SEEN, role="prefill")[0] == "role"
    for key in (-5, 2**70, np.int64(3), np.uint32(7)):
        assert decoder(SEEN, key=key).ready


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, np.inf, np.nan, "3", None, True, np.bool_(1), 10**400, 1j, 1e-300, np.array(3.0)]
)
def test_a_datasheet_holds_positive_numbers(value):
    assert refusal(Hardware, 1.0, 1.0, 1.0, 1.0, value)[0] == "hardware"
    for scalar in (np.float64(3), np.float32(3), np.int64(3)):
        assert Hardware(1.0, 1.0, 1.0, 1.0, scalar).flops_per_s == 3


def test_only_observations_are_fitted():
    for value in (None, 5, "text", [], [SEEN], SEEN.work, Observations, lambda: SEEN):
        code, message = refusal(decoder, value)
        assert code == "payload" and "learned takes Observations" in message
    stacked = jax.tree.map(lambda x: np.stack([x, x]), SEEN)
    strings, lists = np.array(["1"] * 60), [1.0] * 60
    for value in (stacked, *(Observations(SEEN.work, ms) for ms in (np.ones(3), np.ones((60, 1)), strings, lists))):
        assert refusal(decoder, value)[0] == "payload"


def test_only_several_observations_are_a_fleet():
    for value in (None, 5, [], SEEN, SEEN.work):
        assert refusal(learned_fleet, value, role="decode")[0] == "fleet"
    for value in ("text", [5], {1: SEEN}):
        assert refusal(learned_fleet, value, role="decode")[0] == "payload"
    for hardware in ([None], [HARDWARE, None], [HARDWARE, 3], (h for h in (HARDWARE, HARDWARE))):
        assert refusal(learned_fleet, [SEEN, SEEN], role="decode", hardware=hardware)[0] == "hardware"


@pytest.mark.parametrize("ordinary", [300, 6000])
def test_cold_starts_do_not_stretch_the_box_however_many_rows_there_are(ordinary):
    draw = np.random.default_rng(5)
    batch = np.append(draw.integers(1, 65, ordinary), [512] * 40)
    kv = np.append(batch[:-40] * draw.integers(64, 4096, ordinary), [512_000] * 40)
    wall_ms = np.append((6 + 0.02 * batch[:-40] + kv[:-40] / 5e4) * draw.lognormal(0, 0.02, ordinary), [5000.0] * 40)
    order = draw.permutation(len(batch))
    model = learned(Observations.of(Work.decode(batch[order], kv[order]), wall_ms[order]), role="decode")
    assert model.box["pure_decode"]["decode_requests"][1] <= 64
    assert estimate(model, Work.decode(512, 512_000)).support.extrapolated


def test_prompts_longer_than_any_seen_on_one_rank_are_extrapolated():
    tokens = np.random.default_rng(3).integers(16, 1025, (100, 4))
    one = np.ones_like(tokens)
    seen = Observations.of(
        Work.prefill(one, tokens, 0 * tokens, ranks=True), 5 + 0.01 * tokens.sum(1) + 5e-6 * (tokens**2.0).max(1)
    )
    model = learned(seen, role="prefill")
    assert estimate(model, Work.prefill([1], [3000])).support.extrapolated.all()


def test_one_family_alone_gives_no_range_where_nothing_was_observed():
    draw = np.random.default_rng(0)
    batch = draw.integers(1, 65, 64)
    kv = batch * draw.integers(64, 4096, 64)
    seen = Observations.of(Work.decode(batch, kv), (6 + 0.02 * batch + kv / 5e4) * draw.lognormal(0, 0.02, 64))
    answer = estimate(learned(seen, role="decode", family="linear"), Work.decode([8, 2**20], [8192, 2**32 - 1]))
    assert np.isfinite(answer.interval.low_ms[0]) and np.isnan(answer.interval.low_ms[1])
    assert answer.support.extrapolated.tolist() == [False, True]


def test_copies_of_a_row_are_held_out_together():
    rows = np.tile(np.arange(20.0)[:, None], (30, 1))
    weights, fold = member_weights(np.random.default_rng(0), np.ones(600), rows)
    assert (fold.reshape(30, 20) == fold[:20]).all() and len(set(fold)) > 1
    alone, plain = member_weights(np.random.default_rng(0), np.ones(600), np.arange(600.0)[:, None])
    assert np.bincount(plain).tolist() == [120] * 5 and np.array_equal(alone[:4], weights[:4])
