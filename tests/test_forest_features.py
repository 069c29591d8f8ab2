"""The 135 features, against those that were recorded, the plain oracle and widened lists written out."""

from __future__ import annotations

import gzip
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import decode, records
from forests import LEARNED
from hypothesis import given
from hypothesis import strategies as st
from oracles import learned_ref
from streams import random_stream, rank_dict

import fpmjax
from fpmjax.iteration import askable
from fpmjax.observe.forest_features import LOGARITHMS, NAMES, features_of, raw_features, usable_lists
from fpmjax.speculative import split_length, widen
from fpmjax.work import Work

RAW = [name for name in NAMES if name not in LOGARITHMS]
compiled = jax.jit(lambda work: raw_features(jnp, work, RAW))


def test_the_names_are_the_peer_s_in_its_order():
    with gzip.open(LEARNED / "feature_names.json.gz") as file:
        assert list(NAMES) == json.load(file)
    assert list(NAMES) == learned_ref.NAMES


def test_recorded_features_bit_for_bit():
    cases = records("learned/features.oracle.jsonl.gz")
    assert len(cases) == 60
    for case in cases:
        expected = [math.nan if x is None else x for x in case["features"]]
        np.testing.assert_array_equal(features_of(Work.from_metrics(case["q"])), expected)


def streams(seed: int, role: str, ranks: int) -> list[list[dict]]:
    """Iterations with lists; now and then a rank's are missing or inconsistent, variances are of either sign."""
    rng = np.random.default_rng(seed)
    stream = random_stream(seed, 12, role, ranks, lists=True)
    for rank in (rank for iteration in stream for rank in iteration):
        scheduled = rank["scheduled_requests"]
        scheduled["var_decode_kv_tokens"], scheduled["var_prefill_length"] = rng.normal(0.0, 1e5, 2).tolist()
        if rng.random() < 0.1 or not scheduled["extend_lengths"]:
            del scheduled["extend_lengths"], scheduled["past_kv_lengths"]
        elif rng.random() < 0.1:
            scheduled["past_kv_lengths"][0] += int(rng.integers(0, 20000))
    return stream


@given(st.integers(0, 2**32), st.sampled_from(["decode", "prefill", "aggregated"]), st.integers(1, 5))
def test_features_are_the_oracle_s_bit_for_bit(seed, role, ranks):
    stream = streams(seed, role, ranks)
    work = Work.from_iterations(stream)
    found = features_of(work)
    for i, iteration in enumerate(stream):
        np.testing.assert_array_equal(found[i], learned_ref.features_of(iteration))


def test_compiled_features_have_the_same_bits():
    work = askable(np, Work.from_iterations([x for seed in range(30) for x in streams(seed, "aggregated", 4)]))[0]
    with fpmjax.x64():
        on_device = compiled(work)
    np.testing.assert_array_equal(on_device, raw_features(np, work, RAW))


@pytest.mark.parametrize("ranks", [1, 3, 17, 64])
def test_compiled_sums_over_ranks_go_from_the_first_to_the_last(ranks):
    rng = np.random.default_rng(ranks)
    work = Work.of(
        prefill_requests=rng.integers(1, 8, (500, ranks)),
        prefill_tokens=rng.integers(1, 10**6, (500, ranks)),
        prefill_kv=rng.integers(0, 10**6, (500, ranks)),
        decode_requests=rng.integers(1, 300, (500, ranks)),
        decode_kv=rng.integers(0, 10**7, (500, ranks)),
        decode_kv_var=rng.uniform(0.0, 1e7, (500, ranks)),
        ranks=True,
    )
    names = ["prefill_attention_pairs", "sum_decode_kv_squared", "mean_decode_kv"]
    with fpmjax.x64():
        found = jax.jit(lambda work: raw_features(jnp, work, names))(work)
    np.testing.assert_array_equal(found, raw_features(np, work, names))


@pytest.mark.parametrize("draft", [1, 2, 3, 7])
def test_widened_features_are_those_of_the_split_batch(draft):
    rng = np.random.default_rng(draft)
    for _ in range(20):
        ranks = []
        for _ in range(2):
            past = rng.integers(0, rng.choice([4, 3000]), int(rng.integers(1, 20))).tolist()
            ranks.append(decode(len(past), sum(past), extend_lengths=[1] * len(past), past_kv_lengths=past))
        work = Work.from_metrics(ranks)
        wide, _ = askable(np, widen(np, work, np.array(draft), np.zeros(work.ranks, np.int8)))
        split = []
        for rank in ranks:
            past = [x for p in rank["scheduled_requests"]["past_kv_lengths"] for x in split_length(p, draft + 1)]
            variance = float(np.var(np.array(past, np.float64)))
            split.append(
                decode(
                    len(past),
                    sum(past),
                    extend_lengths=[1] * len(past),
                    past_kv_lengths=past,
                    var_decode_kv_tokens=variance,
                )
            )
        np.testing.assert_allclose(features_of(wide), learned_ref.features_of(split), rtol=1e-12, atol=1e-9)
    with fpmjax.x64():
        on_device = compiled(wide)
    np.testing.assert_allclose(on_device, raw_features(np, wide, RAW), rtol=1e-12, atol=1e-9)


def test_a_widened_variance_without_lists_is_that_of_an_even_split():
    work = Work.from_metrics(decode(4, 400, var_decode_kv_tokens=90.0))
    wide, _ = askable(np, widen(np, work, np.array(2), np.zeros(1, np.int8)))
    found = dict(zip(NAMES, features_of(wide), strict=True))
    assert found["var_decode_kv_tokens"] == 10.0
    assert found["sum_decode_kv_squared"] == 12 * 10.0 + 12 * (400 / 12) * (400 / 12)


@pytest.mark.parametrize(("past", "usable"), [(11, True), (12, False), (2**64 - 1, False)])
def test_lists_may_hold_the_tokens_of_this_step_and_no_more(past, usable):
    work = Work.from_metrics(decode(1, 10, extend_lengths=[1], past_kv_lengths=[past]))
    assert usable_lists(np, askable(np, work)[0]).all() == usable


def test_sums_of_lists_do_not_wrap():
    lists = {"extend_lengths": [1, 1], "past_kv_lengths": [2**63, 2**63]}
    assert not usable_lists(np, askable(np, Work.from_metrics(decode(2, 10, **lists)))[0]).any()


def test_lists_of_idle_ranks_count_for_nothing():
    idle = rank_dict([1, 0, 700, 0, 0, 0.0, [0], [700]])
    busy = decode(1, 10, extend_lengths=[1], past_kv_lengths=[10])
    np.testing.assert_array_equal(features_of(Work.from_metrics([idle, busy])), features_of(Work.from_metrics(busy)))


def test_lists_that_say_another_number_of_requests_are_no_lists():
    from dataclasses import replace

    work = Work.from_metrics(decode(2, 10, extend_lengths=[1, 1], past_kv_lengths=[4, 6]))
    assert usable_lists(np, work).all()
    assert not usable_lists(np, replace(work, lists=replace(work.lists, count=np.array([1], np.int32)))).any()
