"""Accepted tokens against time: E(d) and its limits, goodput, the best draft length, public numbers."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tables import cell_of, decode_rows

import fpmjax
from fpmjax import Acceptance, OptionError, Status, best_draft_length, best_measured_draft_length
from fpmjax.acceptance import pooled_tokens_per_round

# Median milliseconds per engine step of vLLM PR 32374, Llama-3.1-8B with EAGLE: batch -> draft length -> ms.
STEPS = {
    1: {0: 6.520589930005372, 1: 7.367628160864115, 3: 8.84066498838365, 5: 10.32649097032845},
    4: {0: 6.601515458896756, 1: 7.472813129425049, 3: 8.981170016340911, 5: 10.400271974503994},
    16: {0: 6.898819003254175, 1: 7.852344075217843, 3: 9.518282022327185, 5: 11.196403065696359},
    64: {0: 7.774091092869639, 1: 9.656429989263415, 3: 13.497876934707165, 5: 16.831180080771446},
    256: {0: 14.491415582597256, 1: 27.138127014040947, 3: 41.848431108519435, 5: 57.40421102382243},
}
EAGLE = (0.681, 0.391, 0.204, 0.101, 0.051)
# SpecDecode-Bench, Llama-3.1-8B-Instruct: tokens per round at d = 1, 2, 3, 5, and its own i.i.d. curve through d = 1.
CURVES = {
    ("gsm8k", "eagle"): ((1.6989, 2.1337, 2.3908, 2.6655), (1.6989, 2.1874, 2.5287, 2.9341)),
    ("gsm8k", "ngram"): ((1.1095, 1.1467, 1.164, 1.177), (1.1095, 1.1215, 1.1228, 1.123)),
    ("sharegpt", "eagle"): ((1.661, 2.0384, 2.2542, 2.4784), (1.661, 2.0979, 2.3867, 2.7038)),
    ("sharegpt", "ngram"): ((1.2357, 1.3394, 1.395, 1.451), (1.2357, 1.2913, 1.3043, 1.3082)),
    ("cnn", "eagle"): ((1.6743, 2.0835, 2.3285, 2.5778), (1.6743, 2.129, 2.4356, 2.7817)),
    ("cnn", "ngram"): ((1.2047, 1.2894, 1.3337, 1.3778), (1.2047, 1.2466, 1.2552, 1.2573)),
    ("instructcoder", "eagle"): ((1.6809, 2.095, 2.3483, 2.6254), (1.6809, 2.1445, 2.4602, 2.8215)),
    ("instructcoder", "ngram"): ((1.5087, 1.8229, 2.0277, 2.2888), (1.5087, 1.7675, 1.8991, 2.0001)),
}


@pytest.fixture(scope="module")
def public_model():
    """Ordinary steps of that table, the same at every KV total."""
    curves = {b: [(k, by_depth[0]) for k in (0, 1 << 20)] for b, by_depth in STEPS.items()}
    return fpmjax.direct(cell_of(decode_rows(curves)))


def test_iid_tokens_and_both_limits():
    d = np.arange(6)
    assert Acceptance.iid(1).tokens_per_round(d).tolist() == [1, 2, 3, 4, 5, 6]
    assert Acceptance.iid(0).tokens_per_round(d).tolist() == [1, 1, 1, 1, 1, 1]
    assert Acceptance.iid(0.5).tokens_per_round(d) == pytest.approx([1, 1.5, 1.75, 1.875, 1.9375, 1.96875], rel=1e-15)


@given(st.floats(0, 1), st.integers(0, 60))
def test_iid_is_the_geometric_sum(rate, d):
    found = Acceptance.iid(rate).tokens_per_round(d)
    assert found == pytest.approx(math.fsum(rate**j for j in range(d + 1)), rel=1e-13)


@given(st.floats(1e-17, 1e-3))
def test_iid_close_to_one_loses_no_digits(missed):
    rate = 1 - missed
    exact = math.fsum(rate**j for j in range(8))
    assert Acceptance.iid(rate).tokens_per_round(7) == pytest.approx(exact, rel=1e-14)


def test_unconditional_and_conditional_rates_differ():
    assert Acceptance.unconditional(EAGLE[:3]).tokens_per_round(3) == pytest.approx(2.276, abs=1e-12)
    assert Acceptance.conditional(EAGLE[:3]).tokens_per_round(3) == pytest.approx(2.00159, abs=1e-5)
    assert Acceptance.unconditional(EAGLE).tokens_per_round([0, 1, 5]) == pytest.approx([1, 1.681, 2.428])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_conditional_rates_are_unconditional_ones_multiplied_up(rates):
    c, d = Acceptance.conditional(rates), np.arange(len(rates) + 1)
    q = Acceptance.unconditional(np.cumprod(rates))
    assert c.tokens_per_round(d) == pytest.approx(q.tokens_per_round(d), rel=1e-15)


@given(st.floats(0, 1), st.integers(1, 12))
def test_equal_conditional_rates_are_iid(rate, d):
    found = Acceptance.conditional([rate] * d).tokens_per_round(np.arange(d + 1))
    assert found == pytest.approx(Acceptance.iid(rate).tokens_per_round(np.arange(d + 1)), rel=1e-13)


def test_rising_unconditional_rates_are_refused():
    with pytest.raises(
        OptionError, match=r"rates\[1\]=0.7 exceeds rates\[0\]=0.6(.|\n)*hint: .*conditional"
    ) as refusal:
        Acceptance.unconditional([0.6, 0.7, 0.5])
    assert refusal.value.code == "rates"
    Acceptance.conditional([0.6, 0.7, 0.5])


@pytest.mark.parametrize("rates", [[], [1.2], [-0.1], [float("nan")], ["0.5"], [True], [[0.5]], 0.5, [68.1], None])
@pytest.mark.parametrize("made", [Acceptance.unconditional, Acceptance.conditional])
def test_what_is_no_list_of_rates_is_refused(made, rates):
    with pytest.raises(OptionError, match="hint: an acceptance rate"):
        made(rates)


@pytest.mark.parametrize("rate", [1.0000001, -1, float("nan"), "0.5", True, None, [0.5, 0.5]])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(OptionError):
        Acceptance.iid(rate)


@pytest.mark.parametrize("tokens", [{}, {1: 2.1}, {2: 0.9}, {1: float("nan")}, {-1: 1}, {1.5: 1.2}, [1.6], {1: "1.2"}])
def test_what_is_no_tokens_per_round_is_refused(tokens):
    with pytest.raises(OptionError):
        Acceptance.measured(tokens)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (("iid", None, 7.0), "rate"),
        (("iid",), "rate"),
        (("iid", np.array([1, 1.5]), 0.5), "tokens"),
        (("iid", None, "0.5"), "rate"),
        (("guessed", np.array([1, 1.5])), "source"),
        ((np.array(["iid"]),), "source"),
        (("measured",), "tokens"),
        (("measured", np.array([1, 1.5]), 0.5), "rate"),
        (("measured", np.array([1, 2.5])), "tokens"),
        (("measured", np.array([1.5])), "tokens"),
        (("measured", np.array([np.nan, 1.5])), "tokens"),
        (("conditional", [[1.0]]), "tokens"),
        (("unconditional", ["1"]), "tokens"),
    ],
)
def test_the_constructor_checks_too(made, code):
    with pytest.raises(OptionError) as refusal:
        Acceptance(*made)
    assert refusal.value.code == code and "\nhint: " in str(refusal.value)


def test_a_made_acceptance_can_be_made_again():
    for made in (Acceptance.iid(1), Acceptance.conditional([1.0] * 64), Acceptance.measured({1: 2, 3: 2.4})):
        again = Acceptance(made.source, made.tokens, made.rate)
        np.testing.assert_array_equal(again.tokens_per_round(np.arange(4)), made.tokens_per_round(np.arange(4)))


@pytest.mark.parametrize(
    "most", [2**31, 10**9, 10**400, 65_537, [], range(0), [3], np.array([2, 3]), 2.0, True, "3", -1]
)
def test_what_is_no_largest_draft_length_is_refused(public_model, most):
    with pytest.raises(OptionError, match="hint: give one integer from 0 to 65536") as refusal:
        best_draft_length(public_model, 1, 4096, Acceptance.iid(0.5), most=most)
    assert refusal.value.code == "most" and len(str(refusal.value)) < 200


def test_measured_tokens_leave_gaps_unknown():
    found = Acceptance.measured({1: 1.6989, 3: 2.3908}).tokens_per_round([0, 1, 2, 3, 4])
    np.testing.assert_array_equal(found, [1, 1.6989, np.nan, 2.3908, np.nan])


def test_pooled_tokens_are_no_mean_of_means():
    assert pooled_tokens_per_round([10, 1], [5, 5]) == 1 + 11 / 10
    assert pooled_tokens_per_round([9, 1], [3, 1]) == 1 + 10 / 4  # the mean of the two would be 3
    with pytest.raises(OptionError, match="no round"):
        pooled_tokens_per_round([0], [0])


@pytest.mark.parametrize("curve", CURVES)
def test_the_iid_curve_through_one_point_is_biased_as_said(curve):
    real, printed = CURVES[curve]
    found = Acceptance.iid(real[0] - 1).tokens_per_round([1, 2, 3, 5])
    assert found == pytest.approx(printed, abs=1.0001e-4)
    error = 100 * (found[1:] / np.array(real[1:]) - 1)
    if curve == ("gsm8k", "eagle"):
        assert np.round(error, 1).tolist() == [2.5, 5.8, 10.1]
    assert ((error > 2) & (error < 11)).all() if curve[1] == "eagle" else (error < 0).all()


def test_best_measured_draft_length_of_the_public_steps():
    depths = [0, 1, 3, 5]
    ms = np.array([[by_depth[d] for d in depths] for by_depth in STEPS.values()])
    found = best_measured_draft_length(depths, ms, list(STEPS), Acceptance.unconditional(EAGLE))
    assert found.best.draft_length.tolist() == [3, 3, 3, 1, 0]
    assert found.candidate.all()
    assert found.by_depth.draft_length[0].tolist() == depths


def test_best_draft_length_by_the_rule(public_model):
    found = best_draft_length(public_model, list(STEPS), 4096, Acceptance.unconditional(EAGLE))
    assert found.best.draft_length.tolist() == [3, 3, 3, 0, 0]
    # 256 requests: 512 rows are beyond the table, so ordinary decoding was the only candidate, and that is visible.
    assert found.candidate[4].tolist() == [True, False, False, False, False, False]
    assert (found.status[4, 1:] == Status.NO_BATCH_BRACKET).all()
    assert found.best.speedup[4] == found.best.break_even[4] == found.best.tokens_per_round[4] == 1
    assert found.best.calibrated.tolist() == [True, True, False, True, True]
    assert not found.by_depth.calibrated[0, 5]


def test_every_number_by_hand(public_model):
    found = best_draft_length(public_model, 4, 4096, Acceptance.unconditional(EAGLE), most=3).best
    step, wide = STEPS[4][0], STEPS[16][0]
    ms = 1.49 * wide
    assert found.draft_length == 3 and np.shape(found.draft_length) == ()
    for name, value in {
        "tokens_per_round": 2.276,
        "round_ms": ms,
        "goodput_per_ms": 4 * 2.276 / ms,
        "tpot_ms": ms / 2.276,
        "speedup": 2.276 * step / ms,
        "break_even": ms / step,
    }.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-14), name


def test_shapes_broadcast_and_each_answer_stands_alone(public_model):
    acceptance = Acceptance.iid(0.7)
    b, k = np.array([[1], [5], [40]]), np.array([0, 1000, 1 << 20, 1 << 21])
    found = best_draft_length(public_model, b, k, acceptance, most=4)
    assert found.best.goodput_per_ms.shape == (3, 4) and found.status.shape == (3, 4, 5)
    assert found.best.goodput_per_ms.dtype == np.float64 and found.best.draft_length.dtype == np.int64
    assert (found.best.draft_length[:, 3] == -1).all() and np.isnan(found.best.goodput_per_ms[:, 3]).all()
    for i, j in np.ndindex(3, 4):
        one = best_draft_length(public_model, int(b[i, 0]), int(k[j]), acceptance, most=4)
        assert one.best.draft_length == found.best.draft_length[i, j]
        np.testing.assert_array_equal(one.by_depth.speedup, found.by_depth.speedup[i, j])


@given(st.floats(0, 1), st.integers(1, 80), st.integers(0, 1 << 20))
def test_the_best_is_the_largest_of_what_is_covered_and_beats_its_break_even(public_model, rate, b, k):
    found = best_draft_length(public_model, b, k, Acceptance.iid(rate))
    goodput = found.by_depth.goodput_per_ms
    assert found.best.goodput_per_ms == np.nanmax(goodput)
    assert found.best.draft_length == np.nanargmax(goodput)
    assert found.best.speedup >= 1
    pays = found.by_depth.speedup > 1
    assert (pays == (found.by_depth.break_even < found.by_depth.tokens_per_round))[found.candidate].all()


def test_a_rule_of_ones_own_and_unknown_tokens(public_model):
    free = fpmjax.SpeculativeRule(Decimal(0), Decimal(1), "free drafts")
    always = best_draft_length(public_model, 1, 0, Acceptance.iid(1), free)
    assert always.best.draft_length == 8 and not always.best.calibrated
    gaps = best_draft_length(public_model, 1, 0, Acceptance.measured({2: 2.9}), free)
    assert gaps.candidate.tolist() == [True, False, True] and gaps.best.draft_length == 2
    never = best_draft_length(public_model, 1, 0, Acceptance.iid(0), free)
    assert never.best.draft_length == 0  # the smaller one where nothing is gained


def test_an_uncovered_ordinary_step_leaves_no_speedup():
    # 3 requests lie below the smallest batch, 6 and more of their rows do not.
    model = fpmjax.direct(cell_of(decode_rows({4: [(0, 5.0), (9000, 6.0)], 8: [(0, 7.0), (9000, 8.0)]})))
    found = best_draft_length(model, 3, 100, Acceptance.iid(0.8), most=3)
    assert found.candidate.tolist() == [False, True, False, False] and found.best.draft_length == 1
    assert found.best.goodput_per_ms > 0 and np.isnan(found.best.speedup) and np.isnan(found.best.break_even)


def test_counts_beyond_32_bits_are_visible(public_model):
    found = best_draft_length(public_model, 2**31, 0, Acceptance.iid(0.8), most=2)
    assert found.status.tolist() == [Status.NO_BATCH_BRACKET, Status.COUNT_OVERFLOW, Status.COUNT_OVERFLOW]


def test_bare_rates_and_depths_beyond_what_is_known_are_refused(public_model):
    with pytest.raises(OptionError, match="does not say what it counts") as refusal:
        best_draft_length(public_model, 1, 0, EAGLE)  # pyright: ignore[reportArgumentType]
    assert refusal.value.code == "tokens_per_round"
    with pytest.raises(OptionError, match="known up to draft length 5"):
        best_draft_length(public_model, 1, 0, Acceptance.unconditional(EAGLE), most=6)
    for wrong in ({"requests": 0}, {"requests": True}, {"kv": -1}, {"kv": 1.5}, {"most": -1}, {"kv": [1, 2, 3]}):
        with pytest.raises(OptionError):
            best_draft_length(
                public_model, **{"requests": [1, 2], "kv": 0, **wrong}, tokens_per_round=Acceptance.iid(0.5)
            )


@pytest.mark.parametrize(
    "wrong",
    [{"draft_lengths": [1, 0]}, {"draft_lengths": []}, {"round_ms": [5.0, 0.0]}, {"round_ms": [5.0]}, {"round_ms": "a"},
     {"requests": [1, 2, 3]}, {"requests": 0}],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(wrong):
    with pytest.raises(OptionError):
        best_measured_draft_length(
            **{"draft_lengths": [0, 1], "round_ms": [5.0, 6.0], "requests": 1, **wrong},
            tokens_per_round=Acceptance.iid(0.5),
        )


def test_an_unmeasured_depth_is_no_candidate():
    found = best_measured_draft_length([0, 1, 2], [5.0, np.nan, 6.0], 2, Acceptance.iid(0.9))
    assert found.candidate.tolist() == [True, False, True] and found.best.draft_length == 2
