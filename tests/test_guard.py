"""Wrong arguments of models and of what asks them: refused by name, never with an exception of NumPy or jax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from small_tables import cell_of, surface
from streams import decode_stream
from table_pairs import refusal

import fpmjax
from fpmjax.errors import MetricsError, ModelFileError, OptionError, SpeculationError
from fpmjax.guard import is_stacked
from fpmjax.models.settings import MOST
from fpmjax.observe.observations import Observations

CELL = cell_of([*surface([1, 2, 4], [0, 1024]), ("prefill", 1, 64, 0, 2.0)])
SEEN = decode_stream(1, 30)
WORK = fpmjax.Work.decode([1, 3], [100, 200])
MANY = fpmjax.Work.decode(np.ones(200, int), np.ones(200, int))
ONES: dict[str, Any] = {
    "table": fpmjax.direct(CELL),
    "regression": fpmjax.regression(SEEN, role="decode"),
    "correction": fpmjax.corrected(fpmjax.direct(CELL)),
    "corrected regression": fpmjax.corrected(fpmjax.regression(SEEN, role="decode"), SEEN, policy="hybrid"),
}
STACKS = {name: fpmjax.stack([model] * 3) for name, model in ONES.items()}
FOREIGN = (None, 5, "text", [], {}, WORK, CELL, fpmjax.Regression, lambda work: work)


@pytest.mark.parametrize("name", ONES)
def test_a_stack_is_asked_under_vmap_alone(name, tmp_path):
    one, stack = ONES[name], STACKS[name]
    assert is_stacked(stack) and not is_stacked(one)
    for ask in (
        lambda: fpmjax.estimate(stack, WORK),
        lambda: fpmjax.estimate(stack, MANY),
        lambda: fpmjax.estimate(stack, WORK, draft_length=2),
        lambda: fpmjax.evaluate(stack, SEEN),
        lambda: fpmjax.corrected(stack),
        lambda: fpmjax.ForwardPassPerfModel(stack),
        lambda: fpmjax.stack([stack, stack]),
    ):
        code, message = refusal(ask)
        assert code == "stacked" and "vmap" in message and "stack of several" in message
    with fpmjax.x64():
        assert refusal(fpmjax.speculative, stack, WORK, 2)[0] == "stacked"
        answers = jax.vmap(lambda model, work: model(work), (0, None))(stack, WORK)
        rounds = jax.vmap(lambda model: fpmjax.speculative(model, WORK, 1).latency_ms)(stack)
    assert answers.latency_ms.shape == rounds.shape == (3, 2)
    fpmjax.save_model(stack, tmp_path / "stack.parquet")  # a stack is kept as one
    assert is_stacked(fpmjax.load_model(tmp_path / "stack.parquet"))
    third = jax.tree.map(lambda x: x[2], stack)
    assert np.array_equal(fpmjax.estimate(third, WORK).latency_ms, fpmjax.estimate(one, WORK).latency_ms)


def test_what_a_stack_cannot_do_as_one():
    stack = STACKS["regression"]
    for ask in (lambda: stack.update(SEEN), lambda: stack.stores, lambda: STACKS["correction"].update(SEEN)):
        code, message = refusal(ask)
        assert code == "stacked" and "update_many" in message
    assert refusal(lambda: STACKS["corrected regression"].factors)[0] == "stacked"
    with fpmjax.x64():
        assert refusal(stack, WORK)[0] == refusal(STACKS["correction"], WORK)[0] == "stacked"


def test_only_equal_models_are_stacked():
    decode = ONES["regression"]
    for models, said in (
        ([], "at least one"),
        ([decode, fpmjax.regression(role="prefill")], "role is 'prefill' and 'decode'"),
        ([decode, fpmjax.regression(role="decode", max_observations=1000)], "shape (1, 1024, 2) and (1, 64, 2)"),
        ([decode, fpmjax.regression(role="decode", spline=fpmjax.Knots())], "differ in learners"),
        ([decode, ONES["table"]], "a Direct and a Regression"),
        ([ONES["correction"], fpmjax.corrected(ONES["table"], policy="hybrid")], "differ in local"),
    ):
        code, message = refusal(fpmjax.stack, models, error=OptionError)
        assert code == "models" and said in message
    for models in (None, 5, [decode, 5], [None], "ab", [WORK]):
        assert refusal(fpmjax.stack, models)[0] == "not_a_model"
    assert is_stacked(fpmjax.stack(model for model in (decode, decode)))


def test_update_many_takes_a_stack_observations_and_positions():
    stack, which = STACKS["regression"], [0] * 30
    for models in (None, 5, *ONES.values(), STACKS["correction"], STACKS["table"]):
        assert refusal(fpmjax.update_many, models, SEEN, which, error=OptionError)[0] == "models"
    for observations in FOREIGN:
        assert refusal(fpmjax.update_many, stack, observations, which, error=MetricsError)[0] == "payload"
    bad = (None, 3, "a", [[0], [0, 1]], [3] * 30, [-1] * 30, [0.0] * 30, [True] * 30, [0] * 29, [0, None] * 15)
    for positions in (*bad, np.full(30, 2**64 - 1, np.uint64), np.zeros((30, 1), int)):
        assert refusal(fpmjax.update_many, stack, SEEN, positions, error=OptionError)[0] == "which"
    unsigned = fpmjax.update_many(stack, SEEN, np.zeros(30, np.uint64))
    assert np.array_equal(unsigned.learners.y, fpmjax.update_many(stack, SEEN, which).learners.y)
    assert np.array_equal(fpmjax.update_many(stack, SEEN[:0], []).learners.y, stack.learners.y)


@pytest.mark.parametrize("learn", [ONES["regression"].update, ONES["correction"].update])
def test_only_observations_are_learned(learn):
    for value in FOREIGN:
        code, message = refusal(learn, value, error=MetricsError)
        assert code == "payload" and "update takes Observations" in message
    for made in (
        Observations(WORK, np.ones(3)),
        Observations(SEEN.work, np.ones((30, 1))),
        Observations(SEEN.work, np.array(["1"] * 30)),
        Observations(SEEN.work, np.ones(30, bool)),
        Observations(None, np.ones(3)),  # pyright: ignore[reportArgumentType]
        Observations(fpmjax.Work(), np.ones(3)),
        Observations(SEEN.work, [1.0] * 30),
        Observations(SEEN.work, np.array([1.0] * 30, object)),
    ):
        assert refusal(learn, made, error=MetricsError)[0] == "payload"


def test_constructors_refuse_other_observations_and_models():
    for value in FOREIGN[1:]:
        assert refusal(fpmjax.regression, value, role="decode", error=MetricsError)[0] == "payload"
        assert refusal(fpmjax.corrected, ONES["table"], value, error=MetricsError)[0] == "payload"
    for value in FOREIGN:
        assert refusal(fpmjax.corrected, value)[0] == "not_a_model"
        assert refusal(fpmjax.ForwardPassPerfModel, value)[0] == "not_a_model"
        assert refusal(fpmjax.estimate, value, WORK)[0] == "not_a_model"
        assert refusal(fpmjax.estimate, value, WORK, draft_length=1)[0] == "not_a_model"
    coverage = {"collect_coverage": True, "error": OptionError}
    assert refusal(fpmjax.ForwardPassPerfModel, ONES["regression"], **coverage)[0] == "collect_coverage"


def test_the_pure_functions_refuse_by_type():
    with fpmjax.x64():
        for value in FOREIGN:
            assert refusal(fpmjax.speculative, value, WORK, 1)[0] == "not_a_model"
        for value in (None, 5, (4, 10), SEEN):
            assert refusal(fpmjax.speculative, ONES["regression"], value, 1, error=MetricsError)[0] == "payload"
            for model in (ONES["regression"], ONES["correction"]):
                assert refusal(model, value, error=MetricsError)[0] == "payload"
                assert refusal(model.on_host, value, error=MetricsError)[0] == "payload"
        wrong = refusal(fpmjax.speculative, ONES["table"], WORK, 1, (0.1, 1.2), error=SpeculationError)
        assert wrong[0] == "rule"


def test_what_works_on_the_host_says_so_when_traced(tmp_path):
    model, correction = ONES["regression"], ONES["correction"]
    for trace in (
        lambda: jax.jit(lambda seen: model.update(seen).weights)(SEEN),
        lambda: jax.jit(lambda seen: correction.update(seen).bounds)(SEEN),
        lambda: jax.vmap(lambda one: one.update(SEEN).weights)(STACKS["regression"]),
        lambda: jax.jit(lambda s: fpmjax.update_many(s, SEEN, [0] * 30).weights)(STACKS["regression"]),
        lambda: jax.jit(lambda one: one.ready)(model),
        lambda: jax.jit(lambda one: len(one.stores))(model),
    ):
        with fpmjax.x64():
            assert refusal(trace)[0] == "traced"
    save = jax.jit(lambda one: fpmjax.save_model(one, tmp_path / "m.npz"))
    assert refusal(save, model, error=ModelFileError)[0] == "kind"


OPTIONS = {
    "role": [["decode"], None, 5, {}, "worker"],
    "feature_axes": [[[1]], [None], [{}], "n", 5, None, [], np.array(["n"]), ["n", "n"]],
    "sampling_axes": [[["n"]], [5], {"n"}, [b"n"]],
    "bins_per_axis": [[[1], [2]], [4], None, "44", [4, float("nan")], [0, 4], [2**31 - 1] * 2, [True, 4]],
    "max_observations": [2**31 - 1, MOST + 1, 0, -1, 4.0, None, float("nan"), np.array([3, 4]), 10**400],
    "min_observations": [0, 65, float("inf"), "5", [5]],
    "singular_ridge_scale": [float("nan"), -1, 10**400, "0", np.ones(3), None],
    "ffn_token_weight": [float("inf"), 0, None, [1.0]],
    "lazy": [True, (0.1, 0.2)],
    "spline": [True, 2],
    "non_negative": [None, 1, np.array([True, False])],
    "rebuild_interval": [0, 1.5],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_another_type_or_range_is_refused_by_name(name):
    for value in OPTIONS[name]:
        code, message = refusal(fpmjax.regression, **{"role": "decode", name: value}, error=OptionError)
        assert code == name and message.startswith(f"{name}=")


def test_options_of_knots_and_thresholds():
    for value in (2.0, True, None, [2], np.array([2, 3]), 4, "2"):
        assert refusal(fpmjax.Knots, value, error=OptionError)[0] == "per_axis"
    for window in (MOST + 1, 2**31, 0, 1.0, np.ones(2)):
        assert refusal(fpmjax.Knots, window=window, trigger=1, error=OptionError)[0] == "window"
        assert refusal(fpmjax.ErrorThreshold, 0.1, 1.0, window, 1, 1, error=OptionError)[0] == "window"


NO_RANKS = fpmjax.Work(decode_requests=np.zeros((3, 0), np.uint32), decode_kv=np.zeros((3, 0), np.uint32))
NO_REQUESTS = fpmjax.Work(decode_requests=np.zeros((3, 1), np.uint32), decode_kv=np.ones((3, 1), np.uint32))
NEGATIVE = fpmjax.Work(decode_requests=np.full((3, 1), -1), decode_kv=np.zeros((3, 1), np.int64))


def test_work_that_no_constructor_makes():
    for model in ONES.values():
        assert refusal(fpmjax.estimate, model, NO_RANKS, error=MetricsError)[0] == "no_ranks"
        for work in (NO_REQUESTS, NEGATIVE):
            assert refusal(fpmjax.estimate, model, work, error=MetricsError)[0] == "invalid_work"
    for name in ("regression", "correction"):
        assert refusal(ONES[name].update, Observations(NO_RANKS, np.ones(3)), error=MetricsError)[0] == "no_ranks"
    listed = fpmjax.regression(role="decode", feature_axes=["maxP"], sampling_axes=["n"], bins_per_axis=[4])
    assert refusal(fpmjax.estimate, listed, WORK, error=MetricsError)[0] == "lists_needed"


CORRECTION = {
    "policy": ["other", None, [], 5],
    "min_observations": [0, 65, float("nan"), "5", 2**70, True],
    "bins": [(4,), (0, 4), (True, 4), (2**40, 2**40), np.array([4, 4]), "44", None],
    "max_observations": [0, 2**20 + 1, 4.0, None],
    "factor_bounds": [(float("nan"), 2), (0.5, float("inf")), (0.5, 10**400), "ab", (np.ones(2), 2), None, (2, 0.5)],
    "max_num_tokens": [0, 10**400, 1.5],
    "max_batch_size": [None, -1],
    "max_kv_tokens": [True, "1"],
    "enabled": ["no", None, 1, np.ones(2)],
}


@pytest.mark.parametrize("name", CORRECTION)
def test_every_option_of_a_correction_is_refused_by_name(name):
    for value in CORRECTION[name]:
        code, message = refusal(fpmjax.corrected, ONES["table"], **{name: value}, error=OptionError)
        assert code == name and message.startswith(f"{name} is")


def test_weights_that_overflow_are_no_row_and_no_answer():
    """Also where NumPy's warnings are errors."""
    model = fpmjax.regression(SEEN, role="decode", attention_kv_weight=1e308)
    assert model.stores[0]["retained_observations"] == 0
    with np.errstate(all="raise"):
        assert np.isnan(fpmjax.estimate(model.update(SEEN), WORK, check=False).latency_ms).all()
