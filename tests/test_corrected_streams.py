"""Online correction over streams: the recorded ones, and any others against an independent oracle."""

from __future__ import annotations

import numpy as np
import pytest
from asking import records
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import TOY, Recorded
from oracles.correction_ref import Correction
from small_tables import metrics_of, work_of

from fpmjax import Observations, Work, estimate
from fpmjax.metrics import U32_MAX
from fpmjax.models import corrected as module
from fpmjax.models.corrected import Corrected, corrected
from fpmjax.observe.ratios import LOG, RAW, integers_of
from fpmjax.observe.retain import cell_of as bin_of

POLICIES = module.POLICIES
RECORDED = [r for r in records("regression_cases.jsonl.gz") if r["group"] == "correction"]


def options_of(config: dict) -> dict:
    """The peer's `correction` options under our names."""
    c = config["correction"]
    sizes = {name: c[name] for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens", "min_observations")}
    return {
        **sizes,
        "policy": "fixed" if c["mode"] == "auto" else c["mode"],
        "bins": tuple(c["sampling"]["bins_per_axis"]),
        "max_observations": c["sampling"]["max_observations"],
        "factor_bounds": (c["factor_bounds"]["min"], c["factor_bounds"]["max"]),
    }


def iterations_of(rows: list) -> list[list[dict]]:
    return [[metrics_of(rank[:5]) | {"wall_time": rank[5]} for rank in ranks] for ranks in rows]


def assert_recorded(model: Corrected, case: dict) -> None:
    queries = Work.from_iterations([[metrics_of(r[:5]) for r in ranks] for ranks in case["queries"]])
    answer = estimate(model, queries)
    np.testing.assert_allclose(answer.latency_ms, case["answers_ms"], rtol=1e-9, atol=0)
    np.testing.assert_allclose(answer.native_ms, case["query_native_ms"], rtol=0, atol=0)
    factors = model.factors
    assert (model.retained, model.ready_buckets) == (case["retained"], case["ready_buckets"])
    assert case["source"] == ("aic_with_correction" if len(factors) else "aic")
    found = [factors.min(), factors.max(), factors.mean()] if len(factors) else []
    assert found == pytest.approx([x for x in case["factors_min_max_avg"] if x is not None], rel=1e-9)


def recorded_model(case: dict) -> Recorded:
    both = case["observations"] + case["queries"]
    rows = np.zeros((len(both), max(map(len, both)), 5), np.uint32)
    for row, ranks in zip(rows, both, strict=True):
        row[: len(ranks)] = [rank[:5] for rank in ranks]
    return Recorded(rows, np.array(case["observation_native_ms"] + case["query_native_ms"]))


def test_all_recorded_streams_are_here():
    assert len(RECORDED) == 32
    modes = [case["estimator_config"]["correction"]["mode"] for case in RECORDED]
    assert {mode: modes.count(mode) for mode in modes} == {"fixed": 8, "auto": 8, "dynamic_local": 8, "hybrid": 8}


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["id"])
def test_recorded_streams(case):
    seen = Observations.from_metrics(iterations_of(case["observations"]))
    model = recorded_model(case)
    empty = corrected(model, **options_of(case["estimator_config"]))
    assert_recorded(empty.update(seen), case)
    bit_by_bit = empty
    for i in range(0, len(seen), 7):
        bit_by_bit = bit_by_bit.update(seen[i : i + 7])
    assert_recorded(bit_by_bit, case)


# Streams against the oracle

FEW_TOKENS = st.one_of(st.integers(0, 12), st.sampled_from([100, 8192, 8193, 2**24 + 1, U32_MAX - 1, U32_MAX]))
FEW_REQUESTS = st.one_of(st.integers(0, 6), st.sampled_from([511, 512, 513, U32_MAX]))


@st.composite
def a_rank(draw: st.DrawFn) -> tuple[int, ...]:
    tokens, requests = (draw(x) if draw(st.booleans()) else 0 for x in (FEW_TOKENS, FEW_REQUESTS))
    return (min(tokens, 3), tokens, 0, requests, draw(FEW_TOKENS) if requests else 0)


ITERATIONS = st.lists(a_rank(), min_size=1, max_size=3)
STREAMS = st.lists(st.tuples(ITERATIONS, st.floats(0.05, 20.0)), max_size=40)
OPTIONS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(POLICIES),
        "min_observations": st.integers(1, 3),
        "max_observations": st.sampled_from([3, 4, 8]),
        "bins": st.sampled_from([(1, 1), (2, 3), (4, 4), (5, 1)]),
        "factor_bounds": st.sampled_from([(0.5, 2.0), (None, None), (1.0, 1.0), (None, 3.0)]),
        "max_num_tokens": st.sampled_from([8, 8192]),
        "max_batch_size": st.sampled_from([3, 512]),
        "max_kv_tokens": st.sampled_from([10, 2**24, 2**33]),
    }
)


def oracle_of(options: dict) -> Correction:
    low, high = options["factor_bounds"]
    return Correction(
        {
            "correction": {
                **{name: value for name, value in options.items() if name.startswith("m")},
                "mode": options["policy"],
                "sampling": {"bins_per_axis": options["bins"], "max_observations": options["max_observations"]},
                "factor_bounds": {"min": low, "max": high},
            }
        }
    )


def ms_of(ranks) -> float:
    return float(estimate(TOY, work_of([ranks])).latency_ms[0])


def check_stream(stream: list, queries: list, options: dict) -> None:
    oracle, walls = oracle_of(options), []
    for ranks, ratio in stream:
        native = ms_of(ranks)
        wall_s = native * ratio / 1000.0
        walls.append([metrics_of(rank) | {"wall_time": wall_s} for rank in ranks])
        oracle.tune(walls[-1], native)
    model = corrected(TOY, Observations.from_metrics(walls), **options)
    queries = [*queries, *(ranks for ranks, _ in stream)]
    answer = model.on_host(Work.from_iterations([[metrics_of(r) for r in ranks] for ranks in queries]))
    expected = [oracle.factor([metrics_of(r) for r in ranks]) for ranks in queries]
    np.testing.assert_allclose(answer.factor, expected, rtol=1e-12)
    assert np.array_equal(answer.latency_ms, answer.native_ms * answer.factor)
    assert (model.retained, model.ready_buckets) == (oracle.retained(), oracle.ready_buckets())
    np.testing.assert_allclose(np.sort(model.factors), np.sort(oracle.all_factors()), rtol=1e-12)


@given(STREAMS, st.lists(ITERATIONS, min_size=1, max_size=8), OPTIONS)
def test_streams_against_the_oracle(stream, queries, options):
    check_stream(stream, queries, options)


@settings(max_examples=40)
@given(STREAMS, st.lists(ITERATIONS, min_size=1, max_size=8), OPTIONS)
def test_compiled_updates_are_those_of_plain_loops(stream, queries, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", 0)
        patch.setattr(module, "CHUNK", 16)
        check_stream(stream, queries, options)


COORDINATE = st.one_of(st.integers(0, 40), st.integers(0, U32_MAX), st.just(U32_MAX))


@given(st.tuples(COORDINATE, COORDINATE), st.integers(1, 9), st.sampled_from([RAW, LOG]))
def test_every_integer_lies_in_the_box_of_its_bin(ends, bins, scale):
    lo, hi = scale.up(np.array(sorted(ends), np.float64)[:, None])
    spans = (np.array([*x, 0.0]) for x in (lo, hi))
    low, high = integers_of(np.arange(bins if hi > lo else 1), *spans, np.array([bins, 1]), scale)
    low, high = low[:, 0].astype(np.int64), high[:, 0].astype(np.int64)
    assert (low[0], high[-1]) == tuple(sorted(ends)) and (low[1:] == high[:-1] + 1).all()  # no gaps, no overlap
    for i, (first, last) in enumerate(zip(low, high, strict=True)):
        for x in {first, last, (first + last) // 2} if first <= last else ():
            assert bin_of(np, scale.up(np.array([[float(x)]])), lo, hi, np.array([bins]))[0] == i
