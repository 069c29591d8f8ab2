"""Refits: the oracles, the borders, both methods, and what must not change them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, nnls
from studies import EAGLE, MTP, TRUE, scored, six_scored, synthetic_scored

from fpmjax import FpmError, OptionError
from fpmjax.study.refit import LOSSES, WEIGHTS, refit
from fpmjax.study.scored import Config, Scored


@pytest.fixture(scope="module")
def clean() -> Scored:
    return synthetic_scored()


def config(d: int, gpu: str = "H100") -> Config:
    return Config(gpu, 1, "M", "mtp", d, 1, 64)


def drawn(data: Any, most: int = 30) -> Scored:
    """Some rounds of two to four draft lengths, a configuration each."""
    depths = data.draw(st.lists(st.integers(1, 8), min_size=2, max_size=4, unique=True))
    at = data.draw(st.lists(st.integers(0, len(depths) - 1), min_size=2, max_size=most))
    at = np.array([*range(len(depths)), *at])
    size = st.floats(0.5, 50)
    reference, ratio = (data.draw(st.lists(s, min_size=len(at), max_size=len(at))) for s in (size, st.floats(0.5, 3)))
    return scored(
        np.array(depths)[at], reference, np.array(reference) * ratio, at, [config(d, f"G{d}") for d in depths]
    )


def test_oracle_a_six_rounds():
    found = refit(six_scored())
    assert found.status == "clipped"
    assert found.unclipped == pytest.approx((-0.04404391, 1.45808011), abs=5e-9)
    assert found.slope == 0 and found.intercept == pytest.approx(1.32807421, abs=5e-9)
    slow = refit(six_scored(), loss="abs_l2")
    assert slow.unclipped == pytest.approx((-0.05102168, 1.46636923), abs=5e-9) and slow.status == "clipped"


@pytest.mark.parametrize("loss", LOSSES)
def test_oracle_b_each_method_exactly(clean, loss):
    for name in (MTP, EAGLE):
        own = np.array([(c.model, c.method) == name for c in clean.configs])[clean.config]
        found = refit(clean.where(own), loss=loss)
        assert (found.slope, found.intercept) == pytest.approx(TRUE[name], rel=1e-11)
        assert (found.status, found.depths, found.configurations) == ("ok", (1, 2, 3, 4), 96)
        assert found.value < 1e-12


def test_oracle_b_pooled(clean):
    found = refit(clean)
    assert len(clean) == found.rounds == 14400
    assert (found.slope, found.intercept) == pytest.approx((0.09082119, 1.19684088), abs=5e-9)
    equal = refit(clean, weights="configuration")
    assert (equal.slope, equal.intercept) == pytest.approx((0.09080033, 1.19688633), abs=5e-9)


def test_oracle_b_pooled_absolute(clean):
    """The printed pair (0.10011, 1.14989) comes from a smoothed solver; the smallest loss is EAGLE's own line."""
    found = refit(clean, loss="rel_l1")
    assert (found.slope, found.intercept) == pytest.approx((0.10, 1.15), rel=1e-12)
    assert (found.slope, found.intercept) == pytest.approx((0.10011, 1.14989), abs=1.2e-4)
    printed = np.abs((0.10011 * clean.depth + 1.14989) * clean.reference_ms / clean.measured_ms - 1)
    assert 100 * printed.mean() == pytest.approx(1.9103, abs=1e-4)
    assert found.value <= printed.mean() and 100 * found.value == pytest.approx(1.9103, abs=1.1e-4)
    smooth = refit(clean, loss="rel_l1", method="optax")
    assert smooth.value == pytest.approx(found.value, rel=2e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", ["rel_l2", "abs_l2"])
@pytest.mark.parametrize("study", ["clean", "six"])
def test_optax_equals_the_closed_form(clean, study, loss, weights):
    rounds = clean if study == "clean" else six_scored()
    closed, other = (refit(rounds, loss=loss, weights=weights, method=m) for m in ("closed_form", "optax"))
    assert other.unclipped == pytest.approx(closed.unclipped, rel=1e-8)
    assert (other.slope, other.intercept) == pytest.approx((closed.slope, closed.intercept), rel=1e-8)
    assert 0 < other.steps <= 50 and other.status == closed.status


@given(st.data())
def test_optax_equals_the_closed_form_anywhere(data):
    rounds = drawn(data)
    loss = data.draw(st.sampled_from(["rel_l2", "abs_l2"]))
    closed, other = (refit(rounds, loss=loss, method=m) for m in ("closed_form", "optax"))
    assert other.unclipped == pytest.approx(closed.unclipped, rel=1e-6, abs=1e-7) and other.steps <= 50


@given(st.data())
def test_constrained_squares_are_those_of_nnls(data):
    rounds = drawn(data)
    loss, weights = data.draw(st.sampled_from(["rel_l2", "abs_l2"])), data.draw(st.sampled_from(WEIGHTS))
    f, t = rounds.reference_ms, rounds.measured_ms
    scale = (1 / t if loss == "rel_l2" else 1) * np.sqrt(1 if weights == "round" else 1 / rounds.count[rounds.config])
    pair, _ = nnls(np.stack([rounds.depth * f * scale, f * scale], axis=1), t * scale)
    found = refit(rounds, loss=loss, weights=weights)
    assert (found.slope, found.intercept) == pytest.approx(pair, rel=1e-7, abs=1e-9)
    raw = np.linalg.lstsq(np.stack([rounds.depth * f * scale, f * scale], axis=1), t * scale, rcond=None)[0]
    assert found.unclipped == pytest.approx(raw, rel=1e-7, abs=1e-9)
    assert found.status == ("ok" if (raw >= 0).all() else "clipped")


@pytest.mark.parametrize("free", [True, False])
@given(data=st.data())
def test_absolute_errors_are_as_small_as_a_linear_program_gets_them(free, data):
    rounds = drawn(data)
    f, t = rounds.reference_ms, rounds.measured_ms
    lines = np.stack([rounds.depth * f / t, f / t], axis=1)
    n = len(f)
    least = linprog(
        np.concatenate([[0, 0], np.ones(n)]),
        A_ub=np.block([[lines, -np.eye(n)], [-lines, -np.eye(n)]]),
        b_ub=np.concatenate([np.ones(n), -np.ones(n)]),
        bounds=[(None, None) if free else (0, None)] * 2 + [(0, None)] * n,
    ).fun
    found = refit(rounds, loss="rel_l1")
    pair = found.unclipped if free else (found.slope, found.intercept)
    assert np.abs(lines @ np.array(pair) - 1).sum() == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert free or found.value * n == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", ["closed_form", "optax"])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_draft_length_is_singular_and_has_no_number(clean, loss, method):
    found = refit(clean.where(clean.depth == 2), loss=loss, method=method)
    assert found.status == "singular" and not found.fitted
    assert all(map(math.isnan, (found.slope, found.intercept, *found.unclipped, found.value)))
    assert found.ratio_mean == pytest.approx((1.41 + 1.35) / 2)
    assert np.isnan(found.predict(clean)).all()
    with pytest.raises(OptionError, match="fix no slope") as refusal:
        found.rule("mine")
    assert refusal.value.code == "singular"


def test_no_rounds_are_singular(clean):
    found = refit(clean.where(clean.depth > 9))
    assert found.status == "singular" and math.isnan(found.ratio_mean) and found.rounds == 0


def test_a_line_below_zero_keeps_its_intercept_at_zero():
    rounds = scored([1, 2, 4], [1.0, 1, 1], [0.5, 1.5, 3.5], [0, 1, 2], [config(1), config(2), config(4)])
    found = refit(rounds)
    assert found.status == "clipped" and found.unclipped == pytest.approx((1, -0.5))
    assert found.intercept == 0 and found.slope > 0
    assert found.rule("steep").factor(2) == pytest.approx(2 * found.slope, rel=1e-8)


@given(st.data())
def test_units_and_order_change_nothing(data):
    rounds = drawn(data)
    factor = data.draw(st.sampled_from([1e-6, 0.001, 3.0, 1e9]))
    order = np.array(data.draw(st.permutations(range(len(rounds)))))
    loss, weights = data.draw(st.sampled_from(LOSSES)), data.draw(st.sampled_from(WEIGHTS))
    found = refit(rounds, loss=loss, weights=weights)
    moved = scored(
        rounds.depth[order],
        factor * rounds.reference_ms[order],
        factor * rounds.measured_ms[order],
        rounds.config[order],
        rounds.configs,
    )
    again = refit(moved, loss=loss, weights=weights)
    if loss == "rel_l1":  # several pairs may share the smallest loss
        assert again.value == pytest.approx(found.value, rel=1e-9, abs=1e-12)
    else:
        assert again.unclipped == pytest.approx(found.unclipped, rel=1e-9, abs=1e-9)
        assert (again.slope, again.intercept) == pytest.approx((found.slope, found.intercept), rel=1e-9, abs=1e-9)


@given(st.data())
def test_repeating_one_configuration_moves_only_round_weights(data):
    rounds = drawn(data)
    times = np.where(rounds.config == 0, 3, 1)
    more = rounds.where(np.repeat(np.arange(len(rounds)), times))
    for loss in ("rel_l2", "abs_l2"):
        one, other = (refit(s, loss=loss, weights="configuration") for s in (rounds, more))
        assert other.unclipped == pytest.approx(one.unclipped, rel=1e-9, abs=1e-9)
    everything = rounds.where(np.repeat(np.arange(len(rounds)), 5))
    assert refit(everything).unclipped == pytest.approx(refit(rounds).unclipped, rel=1e-9, abs=1e-9)


def test_a_refit_becomes_a_rule(clean):
    rule = refit(clean).rule("my engine")
    assert (str(rule.slope), str(rule.intercept), rule.provenance) == ("0.0908211911", "1.19684088", "my engine")


@pytest.mark.parametrize("wrong", [{"loss": "l2"}, {"weights": "equal"}, {"method": "adam"}, {"loss": None}])
def test_unknown_words_are_refused(wrong):
    with pytest.raises(OptionError, match="hint: one of") as refusal:
        refit(six_scored(), **wrong)
    assert refusal.value.code == next(iter(wrong))


def test_anchors_are_fitted_only_when_asked(clean):
    anchors = replace(clean, reference="interpolated_batch")
    with pytest.raises(FpmError, match="anchors=True"):
        refit(anchors)
    assert refit(anchors, anchors=True).anchors_only and not refit(clean).anchors_only


def test_the_public_steps_keep_the_slope_and_lose_the_intercept():
    """vLLM PR 32374, batches 1, 4 and 16 against steps interpolated between batches: anchors, not a study."""
    step = {1: 6.520589930005372, 4: 6.601515458896756, 16: 6.898819003254175, 64: 7.774091092869639}
    step[256] = 14.491415582597256
    rounds = {
        1: {1: 7.367628160864115, 3: 8.84066498838365, 5: 10.32649097032845},
        4: {1: 7.472813129425049, 3: 8.981170016340911, 5: 10.400271974503994},
        16: {1: 7.852344075217843, 3: 9.518282022327185, 5: 11.196403065696359},
    }
    each = [
        (d, np.interp((d + 1) * b, list(step), list(step.values())), t) for b in rounds for d, t in rounds[b].items()
    ]
    configs = [Config("?", 1, "L", "eagle", d, b, 1) for b in rounds for d in rounds[b]]
    found = refit(scored(*np.array(each).T, config=range(9), configs=configs))
    assert (round(found.slope, 4), round(found.intercept, 3)) == (0.0749, 1.042)
