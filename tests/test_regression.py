"""Regression: the peer's recorded streams, the plain oracle, readiness, refusals, and how states change."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from asking import SURFACE, decode, forbid_compiling, prefill, records, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.regression_ref import RegressionModel
from streams import GROUPS, decode_stream, options_of, random_stream, recorded

from fpmjax import Observations, Work, estimate
from fpmjax.errors import CoverageError, MetricsError, OptionError
from fpmjax.models.regression import regression
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.status import Status


def shown(model) -> list[list]:
    return [[s["workload_kind"], s["ready"], s["retained_observations"]] for s in model.stores]


def agree(got: float, want: float | None, where: str, rtol: float = 1e-9) -> None:
    assert np.isnan(got) if want is None else abs(got - want) <= rtol * abs(want), (where, got, want)


@pytest.mark.parametrize("group", GROUPS)
def test_recorded_streams(group):
    """Every answer within 1e-9, every readiness and count; the peer's recovery counters are of its running sums."""
    for stream in recorded(group):
        observed = Observations.from_metrics(stream["observations"])
        model = regression(observed, role=stream["worker_type"], **options_of(stream["estimator_config"]))
        assert shown(model) == stream["stores"], stream["id"]
        for query, want in zip(stream["queries"], stream["answers_ms"], strict=True):
            agree(float(model.on_host(Work.from_metrics(query)).latency_ms), want, stream["id"])
        for store, want in zip(model.stores, stream.get("spline", ()), strict="spline" in stream):
            clocks = {k: v for k, v in store["spline"].items() if k not in ("numerical_rebuilds", "batch_fallbacks")}
            assert clocks == {k: want[k] for k in clocks}, stream["id"]


@pytest.fixture(scope="module")
def plane() -> Observations:
    """The recorded models' 40 iterations: B + B kv / 1024 milliseconds."""
    grid = [(b, kv) for b in (1, 2, 3, 4, 6, 8, 12, 16) for kv in (64, 512, 1024, 4096, 8192)]
    return Observations.from_metrics(
        [[{**decode(b, b * kv), "wall_time": (b + b * kv / 1024) / 1000}] for b, kv in grid]
    )


def test_recorded_metrics(plane):
    models = {
        "reg_decode_cold": regression(role="decode"),
        "reg_decode_ready": regression(plane, role="decode"),
        "reg_agg_ready": regression(plane, role="aggregated"),
        "reg_prefill_cold": regression(role="prefill"),
    }
    for case in records("metrics_cases.jsonl.gz"):
        for name, model in models.items() if case["call"] == "estimate" else ():
            want, ask = case["peer"][name], case["input_json"]
            if "error" in want or case.get("ours") == "refused":
                with pytest.raises(MetricsError):
                    estimate(model, Work.from_metrics(ask))
            else:
                agree(
                    float(estimate(model, Work.from_metrics(ask), check=False).latency_ms), want["value"], case["case"]
                )


def test_recorded_tuning():
    for case in records("metrics_cases.jsonl.gz"):
        if case["call"] != "tune_then_diagnostics":
            continue
        want, model = case["peer"]["reg_decode"], regression(role="decode")
        left_out = case["case"] == "tune_prefill_on_decode_zero_wall"  # no wall time: no observation of any role
        if "error" in want and not left_out:
            with pytest.raises(MetricsError):
                model.update(Observations.from_metrics(case["input_json"]))
        else:
            model = model.update(Observations.from_metrics(case["input_json"]))
        assert model.stores[0]["retained_observations"] == want["retained_observations"], case["case"]


@pytest.mark.parametrize("name", ["fpm_regression_decode_ready", "fpm_regression_decode_cold"])
def test_recorded_speculative_rounds(name, plane):
    model = regression(plane if name.endswith("ready") else None, role="decode")
    cases = [case for case in records("speculative_cases.jsonl.gz") if name in case.get("expected", ())]
    assert len(cases) > 20
    for case in cases:
        want, work = case["expected"][name], Work.from_metrics(case["metrics"])
        answer = estimate(model, work, draft_length=case["draft_length"], check=False)
        agree(float(answer.latency_ms), want["sd_latency_ms"], case["case"])
        agree(float(answer.stp.latency_ms), want["peer_stp_latency_ms"], case["case"])
        assert answer.stp.rank == -1 and want["max_rank"] is None


def test_recorded_widened_queries_are_what_a_draft_length_asks():
    """A base query with a draft length is the recorded widened one times the factor, once."""
    for stream in recorded("widened"):
        depth = int(stream["note"].split(";")[0].removeprefix("d="))
        model = regression(
            Observations.from_metrics(stream["observations"]),
            role=stream["worker_type"],
            **options_of(stream["estimator_config"]),
        )
        for base, want in zip(stream["queries"][:3], stream["answers_ms"][3:6], strict=True):
            got = estimate(model, Work.from_metrics(base), draft_length=depth, check=False)
            agree(float(got.stp.latency_ms), want, stream["id"])
            assert got.latency_ms == (125 + 8 * depth) / 100 * got.stp.latency_ms


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["prefill", "decode", "aggregated"]),
    st.integers(1, 3),
    st.sampled_from(["linear", "signed", "lazy", "axes", "spline"]),
)
def test_streams_are_fitted_as_the_oracle_fits_them(seed, role, ranks, kind):
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([5, 12, 40]))
    sampling: dict = {"bins_per_axis": [int(x) for x in rng.integers(1, 5, 2)], "max_observations": capacity}
    fit: dict = {}
    if kind == "signed":
        fit = {"linear": {"non_negative": False}}
    elif kind == "lazy":
        policy = dict(relative_tolerance=0.05, absolute_tolerance_ms=0.1, window=6, trigger=2, cooldown=3)
        policy |= {"startup_observations": 4}
        fit = {"linear": {"update_policy": {"kind": "error_threshold", **policy}}, "rebuild_interval": 17}
    elif kind == "axes":
        fit = {"linear": {"feature_axes": ["P", "E", "maxP"]}}
        sampling["axes"] = ["n", "cvP2"]
    elif kind == "spline":
        fit = {"kind": "spline", "spline": {"search": {"kind": "periodic", "step": 25}}}
        sampling["max_observations"] = 32
    config = {"fpm_regression": {"sampling": sampling, "fit": fit}}
    stream = random_stream(seed, 90, role, ranks, lists=True)
    oracle = RegressionModel(role, config)
    oracle.tune(stream)
    model = regression(Observations.from_metrics(stream), role=role, **options_of(config))
    assert shown(model) == [list(s.values()) for s in oracle.store_diagnostics()]
    for query in random_stream(seed + 1, 12, role, ranks, lists=True):
        agree(float(model.on_host(Work.from_metrics(query)).latency_ms), oracle.estimate(query), kind, rtol=1e-6)


def test_constant_work_is_never_ready():
    obs = Observations.of(Work.decode(np.full(20, 4), 4096), np.linspace(5, 6, 20))
    assert shown(regression(obs, role="decode")) == [["pure_decode", False, 20]]


def test_an_all_falling_stretch_keeps_the_last_fit():
    """The candidate of all-zero slopes is no fit; the one before it stays, however the stretch is cut."""
    b = np.arange(1, 31)
    ms = np.concatenate([np.arange(10.0, 18.0), np.linspace(400.0, 100.0, 22)])
    obs = Observations.of(Work.decode(b, b * 100), ms)
    rising = regression(obs[:8], role="decode")
    whole, stepwise = regression(obs, role="decode"), rising
    for i in range(8, 30):
        stepwise = stepwise.update(obs[i : i + 1])
    query = Work.decode(50, 5000)
    assert whole.ready and estimate(whole, query).latency_ms == estimate(stepwise, query).latency_ms
    oracle = RegressionModel("decode")
    oracle.tune([[{**decode(int(x), int(x) * 100), "wall_time": t / 1000}] for x, t in zip(b, ms, strict=True)])
    agree(float(estimate(whole, query).latency_ms), oracle.estimate([decode(50, 5000)]), "falling")


def test_no_store_answers_for_another(plane):
    model = regression(plane, role="aggregated")
    assert [s["ready"] for s in model.stores] == [True, False, False, False]
    mixed = estimate(
        model, Work.of(prefill_requests=1, prefill_tokens=64, decode_requests=4, decode_kv=99), check=False
    )
    assert mixed.status == Status.NOT_READY and np.isnan(mixed.latency_ms) and mixed.rank == -1
    code, text = refusal(CoverageError, estimate, model, Work.prefill(1, 64))
    assert code == "not_ready" and "0 of its kind, pure_prefill" in text


def test_idle_is_zero_even_before_any_observation():
    for role in ("prefill", "decode", "aggregated"):
        answer = estimate(regression(role=role), Work.of(prefill_requests=2, prefill_kv=500))
        assert answer.latency_ms == 0 and answer.status == Status.IDLE


def test_an_answer_is_never_below_the_floor():
    obs = Observations.of(Work.decode(np.arange(10, 20), np.arange(10, 20) * 1000), np.arange(0.1, 10.1))
    assert estimate(regression(obs, role="decode"), Work.decode(1, 1)).latency_ms == 1e-6


def test_a_wrong_role_changes_nothing(plane):
    model = regression(plane, role="decode")
    before = json.dumps(model.stores)
    mixed = Observations.concat([plane, Observations.from_metrics({**prefill(1, 8), "wall_time": 0.01})])
    code, text = refusal(MetricsError, model.update, mixed)
    assert code == "role" and "observation 40" in text and "scheduled prefill work" in text
    assert json.dumps(model.stores) == before
    code, text = refusal(MetricsError, estimate, model, Work.prefill(1, 8))
    assert code == "role" and "scheduled prefill work" in text
    code, _ = refusal(MetricsError, estimate, regression(role="prefill"), Work.decode([3, 4], 100))
    assert code == "role"
    assert estimate(model, Work.prefill(1, 8), check=False).status == Status.INVALID_WORK


def test_request_lists_are_asked_for_where_an_axis_needs_them():
    listed = Observations.from_metrics(random_stream(3, 30, "decode", lists=True))
    bare = Observations.from_metrics(random_stream(3, 30, "decode"))
    fitted = regression(listed, role="decode", feature_axes=("P", "maxP"))
    assert fitted.ready
    for model in (fitted, regression(role="decode", feature_axes=("P", "maxP"))):
        code, text = refusal(MetricsError, estimate, model, Work.decode(3, 100))  # a cold store asks, too
        assert code == "lists_needed" and "extend_lengths" in text
        assert refusal(MetricsError, model.update, bare)[0] == "lists_needed"
        assert estimate(model, Work.decode(0, 0)).latency_ms == 0
    sampled = regression(listed, role="decode", sampling_axes=("attention", "P"))
    assert estimate(sampled, Work.decode(3, 100)).status == Status.OK  # a query needs only what is fitted
    assert refusal(MetricsError, sampled.update, bare)[0] == "lists_needed"


def test_the_model_before_an_update_stays_as_it_was(plane):
    first = regression(plane[:20], role="decode")
    query = Work.decode([3, 9], [2000, 90_000])
    answer = estimate(first, query).latency_ms.tolist()
    second = first.update(plane[20:])
    assert estimate(first, query).latency_ms.tolist() == answer != estimate(second, query).latency_ms.tolist()
    assert shown(first)[0][2] == 20 and shown(second)[0][2] == 40


def test_a_query_changes_no_state(plane):
    model = regression(plane, role="decode")
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(model)]
    estimate(model, Work.decode(np.full(300, 3), 77), draft_length=2)
    estimate(model, Work.decode(3, 77), draft_length=2)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(model)] == before


def test_single_queries_and_short_updates_never_compile(plane, monkeypatch):
    forbid_compiling(monkeypatch)
    monkeypatch.setattr("fpmjax.models.regression.absorb_rows", lambda *_, **__: pytest.fail("an update compiled"))
    model = regression(plane, role="decode").update(plane[:1])
    assert estimate(model, Work.decode(4, 4096), draft_length=3).latency_ms > 0


def test_wild_streams_leave_finite_models():
    """Zeros, absolute clocks, cold starts: retained as they are, and every answer stays a number or a refusal."""
    obs = decode_stream(1, 60)
    for factor in (1e-12, 1.7e12 / 5, 1e200):
        wild = obs.wall_ms.copy()
        wild[::7] *= factor
        model = regression(Observations.of(obs.work, wild), role="decode")
        answer = estimate(model, Work.decode(np.arange(1, 40), 4000), check=False)
        assert (np.isfinite(answer.latency_ms) == (answer.status == Status.OK)).all()


def test_surface_in_the_table_and_in_the_fit_are_the_same_plane(plane):
    from asking import facade

    table, fitted = facade(SURFACE).model, regression(plane, role="decode")
    work = Work.decode([2, 4, 8], [8192, 8192, 4096])
    np.testing.assert_allclose(estimate(fitted, work).latency_ms, estimate(table, work).latency_ms, rtol=1e-12)


OPTIONS = [
    ("role", dict(role="router"), "is no role"),
    ("feature_axes", dict(feature_axes=()), "must contain 1 to 6 axes"),
    ("feature_axes", dict(feature_axes=("P", "P")), "must not contain repeated axes"),
    ("feature_axes", dict(feature_axes=("tokens",)), "is no axis"),
    ("sampling_axes", dict(sampling_axes="moe"), "must contain 1 to 6 axes"),
    ("bins_per_axis", dict(bins_per_axis=(4,)), "exactly one bin count per sampling axis"),
    ("bins_per_axis", dict(bins_per_axis=(0, 4)), "must be an integer of 1 to 2147483647"),
    ("bins_per_axis", dict(bins_per_axis=(2**20, 2**20)), "cells"),
    ("max_observations", dict(max_observations=0), "must be an integer of 1 to 1048576"),
    ("min_observations", dict(min_observations=65), "must be at most max_observations"),
    ("min_observations", dict(min_observations=0), "must be an integer of 1 to 2147483647"),
    ("singular_ridge_scale", dict(singular_ridge_scale=float("nan")), "must be finite and nonnegative"),
    ("rebuild_interval", dict(rebuild_interval=0), "must be an integer of 1 to 2147483647"),
    ("non_negative", dict(non_negative=1), "is no bool"),
    ("ffn_token_weight", dict(ffn_token_weight=0.0), "must be finite and positive"),
    ("lazy", dict(lazy={"window": 3}), "is no ErrorThreshold"),
    ("max_observations", dict(spline=Knots(), max_observations=31), "at least 32 for spline fitting"),
    ("spline", dict(spline=Knots(), feature_axes=("n", "moe")), "needs the axes"),
    ("spline", dict(spline=Knots(), lazy=ErrorThreshold(0, 0, 1, 1, 1)), "neither lazy nor signed"),
]


@pytest.mark.parametrize(("code", "options", "words"), OPTIONS)
def test_options_are_checked(code, options, words):
    found, text = refusal(OptionError, regression, **{"role": "decode", **options})
    assert found == code and words in text


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: ErrorThreshold(-1.0, 0.0, 4, 2, 1), "relative_tolerance"),
        (lambda: ErrorThreshold(0.1, float("inf"), 4, 2, 1), "absolute_tolerance_ms"),
        (lambda: ErrorThreshold(0.1, 0.0, 4, 5, 1), "trigger"),
        (lambda: ErrorThreshold(0.1, 0.0, 4, 2, 1, 0), "startup_observations"),
        (lambda: Knots(per_axis=4), "per_axis"),
        (lambda: Knots(step=0), "step"),
        (lambda: Knots(tolerance=0.0), "tolerance"),
        (lambda: Knots(trigger=17), "trigger"),
    ],
)
def test_options_of_updates_are_checked(make, code):
    assert refusal(OptionError, make)[0] == code
