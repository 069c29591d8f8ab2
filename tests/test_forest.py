"""Imported forests: every recorded outcome and number, trees against the plain oracle, draft lengths, saved models."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from asking import decode, prefill, records, refusal
from forests import V1, artifact, loaded, random_artifact, recorded_artifact, stump
from oracles import learned_ref
from streams import random_stream

import fpmjax
from fpmjax import CoverageError, MetricsError, OptionError
from fpmjax.models import trees
from fpmjax.models.forest import Forest, load_forest, of_argument
from fpmjax.models.trees import Masks, Walk
from fpmjax.observe.forest_features import NAMES, features_of
from fpmjax.speculative import speculative, split_length
from fpmjax.status import Status
from fpmjax.work import Work

REFUSED_HERE = {"features slot01", "features +1"}  # the peer takes them for slot1
both_forms = pytest.mark.parametrize("most_bytes", [trees.MOST_BYTES, 0], ids=["masks", "walk"])


def outcome(model: Forest, query) -> float | str | None:
    """Milliseconds, None where the peer answers None, "error"."""
    try:
        return float(fpmjax.estimate(model, Work.from_metrics(query)).latency_ms)
    except CoverageError:
        return None
    except MetricsError:
        return "error"


@both_forms
@pytest.mark.parametrize("name", ["aggregated_all_log", "decode_atomic5_log"])
def test_recorded_iterations(name, most_bytes, monkeypatch):
    monkeypatch.setattr(trees, "MOST_BYTES", most_bytes)
    model = loaded(recorded_artifact(name))
    assert isinstance(model.trees, Masks if most_bytes else Walk)
    answered = []
    for case in records(f"learned/{name}.oracle.jsonl.gz"):
        expected = "error" if case["error"] else case["ms"]
        found = outcome(model, case["q"])
        if isinstance(expected, float) and isinstance(found, float):
            assert math.isclose(found, expected, rel_tol=1e-12), case["q"]
            answered.append((case["q"], expected))
        else:
            assert found == expected, case["q"]
    assert len(answered) > 100
    queries, expected = zip(*answered, strict=True)
    bulk = fpmjax.estimate(model, Work.from_iterations(queries))
    np.testing.assert_allclose(bulk.latency_ms, expected, rtol=1e-12)


@pytest.mark.parametrize("case", records("learned/hand.jsonl.gz"), ids=lambda case: case["name"])
def test_recorded_hand_cases(case):
    if "load_error" in case or case["name"] in REFUSED_HERE:
        code, message = refusal(fpmjax.ModelFileError, loaded, case["artifact"])
        assert code in ("json", "malformed")
        expected = case.get("load_error", "unknown feature")
        if code == "malformed":  # the words of JSON readers differ
            assert expected in message
        return
    expected = "error" if "estimate_error" in case else case["ms"]
    found = outcome(loaded(case["artifact"]), case["q"])
    if isinstance(expected, float) and isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=1e-12)
    else:
        assert found == expected


@both_forms
@pytest.mark.parametrize("role", ["decode", "prefill", "aggregated"])
@pytest.mark.parametrize("names", [V1, NAMES], ids=["totals", "all"])
def test_random_forests_are_the_oracle_s(role, names, most_bytes, monkeypatch):
    monkeypatch.setattr(trees, "MOST_BYTES", most_bytes)
    for seed in range(2 if names == V1 else 1):
        rng = np.random.default_rng(seed)
        stream = random_stream(seed, 100, role, 2, lists=True)
        work = Work.from_iterations(stream)
        made = random_artifact(rng, role, list(names), features_of(work, names))
        model, oracle = loaded(made), learned_ref.LearnedRef(made)
        expected = [oracle.estimate(iteration) for iteration in stream]
        for found in (fpmjax.estimate(model, work, check=False), model.on_host(work)):
            np.testing.assert_allclose(
                found.latency_ms, [math.nan if x is None else x for x in expected], rtol=1e-12, equal_nan=True
            )
            is_status = [Status.NOT_READY if x is None else Status.OK if x else Status.IDLE for x in expected]
            np.testing.assert_array_equal(found.status, is_status)


@both_forms
@pytest.mark.parametrize("seed", range(4))
def test_feature_rows_with_nan_and_values_on_thresholds(most_bytes, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 4, (40, 3)).astype(float)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[0] = [np.inf, -np.inf, 0.0]
    monkeypatch.setattr(trees, "MOST_BYTES", most_bytes)
    made = random_artifact(rng, "decode", list(V1[:3]), rows)
    model = loaded(made)
    expected = learned_ref.Store(made["stores"]["pure_decode"], made["target"]).predict(rows)
    with fpmjax.x64():
        np.testing.assert_allclose(model.predict("pure_decode", rows), expected, rtol=1e-12)


def test_a_tree_of_many_leaves_is_walked():
    rng = np.random.default_rng(3)
    work = Work.decode(rng.integers(1, 500, 300), rng.integers(500, 10**6, 300))
    made = random_artifact(rng, "decode", list(V1), features_of(work, V1), sizes=(1201,))
    made["stores"]["pure_decode"]["trees"] *= 2
    model, oracle = loaded(made), learned_ref.LearnedRef(made)
    assert isinstance(model.trees, Walk)
    expected = [
        oracle.estimate(decode(int(b), int(k)))
        for b, k in zip(work.decode_requests[:, 0], work.decode_kv[:, 0], strict=True)
    ]
    np.testing.assert_allclose(fpmjax.estimate(model, work).latency_ms, expected, rtol=1e-12)


def test_equality_goes_left_and_absent_sides_of_nan_too():
    model = loaded(artifact([stump()]))
    assert fpmjax.estimate(model, Work.decode([4, 5], 0)).latency_ms.tolist() == [1.0, 2.0]
    with fpmjax.x64():
        assert float(model.predict("pure_decode", np.array([np.nan]))) == 1.0
        right = loaded(artifact([stump(missing_left=[False, True, True])]))
        assert float(right.predict("pure_decode", np.array([np.nan]))) == 2.0


def test_a_chain_of_shared_children_has_more_paths_than_anyone_can_count():
    n = 2000
    nodes = {"left": [*range(1, n), -1], "right": [*range(1, n), -1], "feature": [0] * n, "threshold": [4.0] * n}
    model = loaded(artifact([{**nodes, "value": [0.0] * (n - 1) + [7.0]}]))
    assert isinstance(model.trees, Walk)
    assert fpmjax.estimate(model, Work.decode(1, 5)).latency_ms == 7.0


@pytest.mark.parametrize("name", [name for name in NAMES if "log1p" in name][:5])
def test_thresholds_on_logarithms_are_those_of_libm(name):
    """Equality included: the threshold is the logarithm of a query."""
    rng = np.random.default_rng(len(name))
    if name.endswith(("pairs", "squared")):
        x = np.exp(rng.uniform(0.0, 40.0, 3000))
    else:
        x = np.floor(np.exp(rng.uniform(0.0, 30.0, 3000)))
    logs = np.array([math.log1p(v) for v in x.tolist()])
    for step in (-1, 0, 1):
        cuts = logs if step == 0 else np.nextafter(logs, step * np.inf)
        np.testing.assert_array_equal(x <= of_argument(name, cuts), logs <= cuts)
    assert of_argument(name, np.array([-0.5, 0.0, 1.797e308])).tolist() == [-1.0, 0.0, np.finfo(float).max]
    assert of_argument("mean_decode_kv", np.array([2.5])).tolist() == [2.5]


def test_a_prediction_that_is_not_finite_is_an_error():
    model = loaded(artifact([stump()], baseline=1000.0, target="log_ms"))
    code, message = refusal(MetricsError, fpmjax.estimate, model, Work.decode(4, 10))
    assert code == "not_finite" and "pure_decode is not finite (1001 before the link)" in message
    found = fpmjax.estimate(model, Work.decode(np.full(100, 4), 10), check=False)
    assert np.isnan(found.latency_ms).all() and (found.status == Status.INVALID_WORK).all()


def test_a_missing_store_comes_before_missing_lists():
    model = loaded(artifact([stump()], ["req_batch_size"], worker_type="aggregated"))
    code, message = refusal(CoverageError, fpmjax.estimate, model, Work.prefill(1, 5))
    assert code == "not_ready" and "no store of pure_prefill" in message
    assert refusal(MetricsError, fpmjax.estimate, model, Work.decode(1, 5))[0] == "lists_needed"
    assert fpmjax.estimate(model, Work.decode(0, 0)).latency_ms == 0.0
    mixed = Work.from_metrics([prefill(1, 5), decode(1, 5)])
    assert refusal(CoverageError, fpmjax.estimate, model, mixed)[0] == "not_ready"


def test_work_of_another_role():
    code, message = refusal(MetricsError, fpmjax.estimate, loaded(artifact([stump()])), Work.prefill(1, 5))
    assert code == "role" and "received scheduled prefill work" in message


def test_a_prediction_beside_lists_is_told_apart():
    model = loaded(artifact([stump()], ["req_batch_size"], baseline=1000.0, target="log_ms"))
    listed = Work.from_metrics(decode(1, 10, extend_lengths=[1], past_kv_lengths=[10]))
    assert refusal(MetricsError, fpmjax.estimate, model, listed)[0] == "not_finite"
    code, _ = refusal(MetricsError, fpmjax.estimate, model, Work.from_metrics(decode(1, 10)))
    assert code == "lists_needed"


@pytest.mark.parametrize("bulk", [1, 100])
def test_a_draft_length_asks_for_the_split_batch(bulk):
    rng = np.random.default_rng(11)
    past = rng.integers(0, 3000, 9).tolist()
    rank = decode(9, sum(past), extend_lengths=[1] * 9, past_kv_lengths=past)
    split = [x for p in past for x in split_length(p, 4)]
    wide = decode(
        36,
        sum(past),
        extend_lengths=[1] * 36,
        past_kv_lengths=split,
        var_decode_kv_tokens=float(np.var(np.array(split, float))),
    )
    values = np.stack([features_of(Work.from_metrics(x)) for x in (rank, wide)])
    values = np.nan_to_num(np.concatenate([values, values * 1.3]))
    for seed in range(4 if bulk == 1 else 1):
        made = random_artifact(np.random.default_rng(seed), "decode", list(NAMES), values)
        made["stores"]["pure_decode"]["trees"] *= 3
        found = fpmjax.estimate(loaded(made), Work.from_iterations([rank] * bulk), draft_length=3)
        expected = learned_ref.LearnedRef(made).estimate(wide)
        np.testing.assert_allclose(found.stp.latency_ms, expected, rtol=1e-12)
        np.testing.assert_allclose(found.latency_ms, 1.49 * found.stp.latency_ms)


def test_a_variance_without_lists_is_split_evenly():
    model = loaded(artifact([stump(10.0)], ["var_decode_kv_tokens"]))
    work = Work.from_metrics(decode(4, 400, var_decode_kv_tokens=90.0))
    assert fpmjax.estimate(model, work).latency_ms == 2.0
    assert fpmjax.estimate(model, work, draft_length=2).stp.latency_ms == 1.0
    many = Work.of(decode_requests=np.full(500, 4), decode_kv=400, decode_kv_var=90.0)
    assert (fpmjax.estimate(model, many, draft_length=2).stp.latency_ms == 1.0).all()


@both_forms
def test_it_is_pure_under_jit_and_vmap(most_bytes, monkeypatch):
    monkeypatch.setattr(trees, "MOST_BYTES", most_bytes)
    model = loaded(artifact([stump(), stump(7.0)]))
    requests = np.arange(12, dtype=np.uint32).reshape(3, 4)
    work = Work.decode(requests, 0)
    with fpmjax.x64():
        found = jax.jit(lambda model, work: model(work))(model, work)
        mapped = jax.jit(jax.vmap(lambda work: model(work)))(work)
        drafted = jax.jit(lambda work: speculative(model, work, 1))(work)
    expected = np.where(requests == 0, 0.0, np.where(requests <= 4, 2.0, np.where(requests <= 7, 3.0, 4.0)))
    for estimate in (found, mapped, fpmjax.estimate(model, work)):
        np.testing.assert_array_equal(estimate.latency_ms, expected)
    np.testing.assert_array_equal(drafted.stp.status, np.where(requests == 0, Status.IDLE, Status.OK))


def test_an_unknown_store_is_named():
    with fpmjax.x64():
        code, message = refusal(OptionError, loaded(artifact([stump()])).predict, "pure_prefill", np.zeros((1, 1)))
    assert code == "kind" and "pure_prefill" in message


@both_forms
def test_saved_and_loaded(tmp_path, most_bytes, monkeypatch):
    monkeypatch.setattr(trees, "MOST_BYTES", most_bytes)
    model = loaded(recorded_artifact("aggregated_all_log"))
    fpmjax.save_model(model, tmp_path / "forest.npz")
    again = fpmjax.load_model(tmp_path / "forest.npz")
    assert repr(again) == repr(model)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, role="other"),
        lambda m: replace(m, used=(9,)),
        lambda m: replace(m, kinds=()),
        lambda m: replace(m, baseline=np.zeros(2)),
        lambda m: replace(m, cuts=replace(m.cuts, at=m.cuts.at[..., ::-1])),
        lambda m: replace(m, raw_cuts=replace(m.cuts, at=m.cuts.at[..., :1])),
        lambda m: replace(m, trees=replace(m.trees, bits=m.trees.bits[1:])),
        lambda m: replace(m, trees=replace(m.trees, first=m.trees.first - 1)),
        lambda m: replace(
            m, trees=Walk(*[np.zeros(1, np.int32)] * 4, np.ones(1, bool), np.zeros(1), np.ones((1, 1), np.int32))
        ),
        lambda m: replace(
            m, trees=Walk(*[np.full(1, -1, np.int32)] * 4, np.ones(1, bool), np.zeros(1), np.zeros((1, 1), np.int32))
        ),
    ],
)
def test_arrays_that_are_no_forest_are_not_saved(tmp_path, change):
    model = change(loaded(artifact([stump()])))
    assert refusal(fpmjax.ModelFileError, fpmjax.save_model, model, tmp_path / "forest.npz")[0] == "shape"


def test_a_path_is_loaded(tmp_path):
    import json

    path = tmp_path / "model.json"
    path.write_text("  " + json.dumps(artifact([stump()])))
    for source in (path, str(path), path.read_text()):
        assert repr(load_forest(source)) == "<Forest: decode, 1 features, stores pure_decode>"
