"""A draft length: widen once, ask once, scale once; and refuse what must not be scaled."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tables import cell_of, decode_rows, surface

import fpmjax
from fpmjax import (
    CoverageError,
    DraftLengthTypeError,
    FpmError,
    SpeculationError,
    SpeculativeRule,
    Status,
    Work,
    direct,
    estimate,
    speculative,
)
from fpmjax.rule import PUBLISHED
from fpmjax.speculative import check_draft_length, split_length

SURFACE = surface((1, 2, 4, 8, 16, 32), (0, 1024, 65536))  # B + K / 1024 ms


@pytest.fixture(scope="module")
def model():
    return direct(cell_of(SURFACE))


@pytest.mark.smoke
@pytest.mark.parametrize(("depth", "expected"), [(1, 15.96), (2, 19.74), (3, 23.84), (4, 28.26)])
def test_worked_values_on_the_surface(model, depth, expected):
    result = estimate(model, Work.decode(2, 8192), draft_length=depth)
    assert result.latency_ms == pytest.approx(expected, rel=1e-12)
    assert result.stp.latency_ms == 2 * (depth + 1) + 8


def test_the_published_example():
    model = direct(cell_of([("decode", 8, 0, 64, 8.0)]))
    result = estimate(model, Work.decode(2, 64), draft_length=3, evidence=True)
    assert (result.latency_ms, result.scaling_factor, result.stp.latency_ms) == (11.92, 1.49, 8.0)
    assert result.stp.parts.decode.row.tolist() == [[0, -1, -1, -1]]
    with pytest.raises(CoverageError):
        estimate(model, Work.decode(2, 64))  # B itself need not be covered


def test_every_rank_is_widened_then_reduced_then_scaled_once(model):
    ranks = Work.decode([1, 4, 0], [5120, 2048, 0], ranks=True)
    result = estimate(model, ranks, draft_length=[1, 2, 3, 4])
    assert result.stp.latency_ms.tolist() == [10, 14, 18, 22] and result.rank.tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(result.latency_ms, [13.3, 19.74, 26.82, 34.54], rtol=1e-12)
    idle = estimate(model, Work.decode([0, 0], [0, 0], ranks=True), draft_length=3)
    assert (idle.latency_ms, idle.status, idle.rank) == (0, Status.IDLE, -1)


def test_kv_is_kept_to_the_last_token(model):
    for kv in (1003, 8191, 65535):
        for depth in (1, 2, 3, 6):
            assert estimate(model, Work.decode(2, kv), draft_length=depth).stp.latency_ms == 2 * (depth + 1) + kv / 1024


def test_coverage_is_that_of_the_widened_point():
    curves = {2: [(8192, 8.5), (16384, 9.0)], 8: [(32768, 10.0), (65536, 12.0)]}
    model = direct(cell_of(decode_rows(curves)))
    assert estimate(model, Work.decode(2, 8192)).latency_ms == 8.5
    with pytest.raises(CoverageError, match=r"^draft_length=3 makes 4 rows of each request \(batch_size=2\): decode"):
        estimate(model, Work.decode(2, 8192), draft_length=3)


def test_a_refused_draft_names_the_longest_one_that_is_answered(model):
    says = r"makes 21 rows of each request \(batch_size=2\): decode batch_size=42"
    with pytest.raises(CoverageError, match=says) as caught:
        estimate(model, Work.decode(2, 8192), draft_length=20)
    assert str(caught.value).endswith("\nhint: draft_length=15 is answered for this work")


def test_refusals_of_the_work_name_the_rank_and_the_values(model):
    cases = [
        (
            Work.of(prefill_requests=[0, 1], prefill_tokens=[0, 5], decode_requests=1, decode_kv=1, ranks=True),
            r"\(rank 1: prefill_requests=1, prefill_tokens=5, prefill_kv=0\)",
        ),
        (
            Work.decode([1, 2**31], 1, ranks=True),
            r"\(rank 1: decode_requests=2147483648\); draft_length=3",
        ),
    ]
    for work, says in cases:
        with pytest.raises(SpeculationError, match=says):
            estimate(model, work, draft_length=3)
    depth = np.where(np.arange(100) == 77, -5, 2)
    with pytest.raises(SpeculationError, match=r"^1 of 100 queries have no answer; the first, \[77\]: draft_length=-5"):
        estimate(model, Work.decode(2, 8192), draft_length=depth)


def test_omitting_the_draft_length_leaves_every_bit(model):
    work = Work.decode([2, 3, 99], [8192, 5000, 1])
    before = estimate(model, work, check=False, evidence=True)
    estimate(model, work, draft_length=2, check=False)
    after = estimate(model, work, check=False, evidence=True)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.tobytes() == b.tobytes()


def test_refusals_are_data_and_leave_the_others_untouched(model):
    work = Work.of(
        decode_requests=[2, 2, 2, 2**31, 20, 2, 0],
        decode_kv=[8192, 8192, 8192, 8192, 8192, 8192, 0],
        prefill_requests=[0, 0, 1, 0, 0, 0, 0],
        prefill_tokens=0,
    )
    depth = np.array([3, 0, 3, 3, 3, 2**32 - 1, 3])
    for copies in (1, 30):  # the host path and the kernel
        many = jax.tree.map(lambda x, n=copies: np.tile(x, (n, 1)), work)
        result = estimate(model, many, draft_length=np.tile(depth, copies), check=False)
        names = [Status(s).name for s in result.status[-7:]]
        assert names == [
            "OK",
            "BAD_DRAFT_LENGTH",
            "NOT_PURE_DECODE",
            "COUNT_OVERFLOW",
            "NO_BATCH_BRACKET",
            "BAD_DRAFT_LENGTH",
            "IDLE",
        ]
        assert np.isnan(result.latency_ms[-6:-1]).all() and np.isnan(result.stp.latency_ms[-6:-1]).all()
        assert result.latency_ms[0] == 1.49 * 16 and result.latency_ms[-1] == 0


def test_rows_that_extend_by_several_tokens_cannot_be_widened_again(model):
    rank = {"scheduled_requests": {"num_decode_requests": 2, "sum_decode_kv_tokens": 30, "past_kv_lengths": [10, 20]}}
    ok = rank["scheduled_requests"] | {"extend_lengths": [1, 1]}
    bad = rank["scheduled_requests"] | {"extend_lengths": [4, 1]}
    work = Work.from_iterations([{"scheduled_requests": ok}, [{}, {"scheduled_requests": bad}]])
    for copies in (1, 40):
        many = jax.tree.map(lambda x, n=copies: np.concatenate([x] * n), work)
        result = estimate(model, many, draft_length=1, check=False)
        assert result.status[:2].tolist() == [Status.OK, Status.NOT_SINGLE_TOKEN]
    with pytest.raises(SpeculationError, match="extends by more than one token"):
        estimate(model, work, draft_length=1)


def test_calibrated_marks_the_published_study(model):
    work = Work.decode([1, 8, 8, 9, 0], [4096, 32768, 32769, 1024, 0])
    assert estimate(model, work, draft_length=3, check=False).calibrated.tolist() == [True, True, False, False, True]
    assert estimate(model, Work.decode(1, 64), draft_length=[1, 4, 5]).calibrated.tolist() == [True, True, False]
    mine = SpeculativeRule("0.09", "1.2", provenance="my engine")
    assert not estimate(model, Work.decode(1, 64), draft_length=3, rule=mine).calibrated
    assert estimate(model, Work.decode(1, 64), draft_length=3, rule=SpeculativeRule()).calibrated
    ranks = Work.decode([[8, 0], [8, 16]], [[1024, 0], [1024, 1024]], ranks=True)
    assert estimate(model, ranks, draft_length=1).calibrated.tolist() == [True, False]


def test_the_pure_function_needs_64_bits(model):
    with pytest.raises(FpmError, match=r"32-bit mode here\nhint: wrap the call in `with fpmjax.x64\(\):`") as caught:
        speculative(model, Work.decode(2, 64), 3)
    assert caught.value.code == "x64_required"
    with pytest.raises(FpmError):
        jax.jit(lambda m, b: speculative(m, Work.decode(b, 64), 3).latency_ms)(model, np.int32(2))
    with pytest.raises(FpmError):
        model(Work.decode(2, 64))


@pytest.mark.smoke
def test_the_pure_function_in_jit_vmap_and_grad(model):
    batch, kv, depth = np.int32([2, 3, 4]), np.int32([8192, 3000, 100]), np.int32([3, 1, 2])
    expected = estimate(model, Work.decode(batch, kv), draft_length=depth)

    def one(m, b, k, d):
        return speculative(m, Work.decode(b, k), d).latency_ms

    with fpmjax.x64():
        assert (jax.jit(one)(model, batch, kv, depth) == expected.latency_ms).all()
        assert (jax.vmap(one, (None, 0, 0, 0))(model, batch, kv, depth) == expected.latency_ms).all()
        latencies = np.array([r[4] for r in SURFACE])
        total = jax.grad(lambda ms: one(model.with_latencies(ms), batch, kv, depth).sum())(latencies)
    np.testing.assert_allclose(np.asarray(total) @ latencies, expected.latency_ms.sum(), rtol=1e-12)


class Double:
    """A stand-in that says what it is."""

    composition, execution, verify_width = "whole_forward", "autoregressive", 1

    def __init__(self, **said):
        vars(self).update(said)

    def __call__(self, work, *, evidence=False):
        raise AssertionError("asked although it must not be scaled")


@pytest.mark.parametrize(
    ("double", "code", "says"),
    [
        (Double(composition="op_level"), "unsupported_estimator", "whole forward pass, not of `op_level`"),
        (Double(execution="speculative_round"), "measured_round", "would count speculation twice"),
        (Double(verify_width=2), "unsupported_estimator", "already widens every request to verify_width=2 rows"),
    ],
)
def test_nothing_is_scaled_twice(double, code, says):
    for ask in (lambda: estimate(double, Work.decode(1, 1), draft_length=1), lambda: in_x64(double)):
        with pytest.raises(SpeculationError, match=says) as caught:
            ask()
        assert caught.value.code == code and "\nhint: " in str(caught.value)


def in_x64(double):
    with fpmjax.x64():
        return speculative(double, Work.decode(1, 1), 1)


ROUND = "vllm_native_fpm_model_step_cuda_v1"
NATIVE_AR = "vllm_native_ar_model_step_cuda_v1"


def test_a_measured_round_answers_its_logical_batch_and_nothing_else():
    rows = [*decode_rows({2: [(64, 9.0)], 8: [(64, 12.0)]}), ("prefill", 1, 16, 0, 5.0)]
    cell = cell_of(rows, policy=ROUND)
    model = direct(cell)
    assert model.execution == "speculative_round"
    assert estimate(model, Work.decode([2, 8], 64)).latency_ms.tolist() == [9.0, 12.0]
    with pytest.raises(SpeculationError, match="twice"):
        estimate(model, Work.decode(2, 64), draft_length=3)
    with pytest.raises(CoverageError, match="verify_width=2"):
        direct(cell, verify_width=2)
    mixed = Work.of(prefill_requests=1, prefill_tokens=16, decode_requests=2, decode_kv=64)
    for work in (mixed, Work.decode([2, 8], [64, 64], ranks=True)):
        with pytest.raises(CoverageError, match="compose neither with prefill on the same rank nor over") as caught:
            estimate(model, work)
        assert caught.value.code == "measured_round"
    assert estimate(model, Work.decode([0, 8], [0, 64], ranks=True)).latency_ms == 12.0


def test_native_ar_cells_refuse_a_verify_width_and_answer_a_draft_length():
    rows = [("decode", 8, 0, 4096, 7.0)]
    cell = cell_of(rows, policy=NATIVE_AR)
    assert cell.native_ar_only
    for refused in (
        lambda: direct(cell, verify_width=2),
        lambda: cell.check_ready("decode", verify_width=2),
        lambda: estimate(replace(direct(cell), verify_width=2), Work.decode(4, 4096)),
        lambda: in_x64_call(replace(direct(cell), verify_width=2)),
    ):
        with pytest.raises(CoverageError, match=r"verify_width=2 (.|\n)*speculative-round measurements") as caught:
            refused()
        assert caught.value.code == "native_ar_only"
    assert estimate(direct(cell), Work.decode(8, 4096)).latency_ms == 7.0
    assert estimate(direct(cell), Work.decode(2, 4096), draft_length=3).latency_ms == 1.49 * 7.0
    wall = direct(cell_of(rows), verify_width=2)
    assert estimate(wall, Work.decode(4, 4096)).latency_ms == 7.0
    many = estimate(wall, Work.decode([4] * 70 + [2**31], 4096), check=False)
    assert (many.latency_ms[:70] == 7.0).all() and many.status[70] == Status.COUNT_OVERFLOW


def in_x64_call(model):
    with fpmjax.x64():
        return model(Work.decode(4, 4096))


@pytest.mark.parametrize(
    "bad", [True, np.True_, 2.0, float("nan"), np.float32(2), "3", b"3", Decimal(3), Fraction(3), {}]
)
def test_a_draft_length_is_an_integer(model, bad):
    for ask in (check_draft_length, lambda d: estimate(model, Work.decode(2, 64), draft_length=d)):
        with pytest.raises(DraftLengthTypeError, match=r"draft_length must be an integer, not .*\nhint: ") as caught:
            ask(bad)
        assert caught.value.code == "draft_length_type"
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
    with pytest.raises(DraftLengthTypeError):
        estimate(model, Work.decode(2, 64), draft_length=np.array([1.0, 2.0]))
    with pytest.raises(DraftLengthTypeError):
        estimate(model, Work.decode(2, 64), draft_length=[1, bad])


def test_integers_of_every_kind_are_draft_lengths(model):
    import jax.numpy as jnp

    for good in (3, np.uint8(3), np.int64(3), np.array(3), jnp.int32(3)):
        assert check_draft_length(good) == 3
        assert estimate(model, Work.decode(2, 8192), draft_length=good).latency_ms == 1.49 * 16
    assert check_draft_length(2**32 - 2) == 2**32 - 2
    for bad, code in (
        (0, "draft_length_not_positive"),
        (-1, "draft_length_not_positive"),
        (2**32 - 1, "width_overflow"),
    ):
        with pytest.raises(SpeculationError) as caught:
            check_draft_length(bad)
        assert caught.value.code == code
    with pytest.raises(DraftLengthTypeError, match="one integer here, not an array"):
        check_draft_length([3])


def test_any_depth_is_answered_where_the_table_reaches(model):
    result = estimate(model, Work.decode(1, 64), draft_length=np.arange(1, 32))
    assert (result.latency_ms == (125 + 8 * np.arange(1, 32)) / 100 * (np.arange(2, 33) + 64 / 1024)).all()


@given(st.integers(0, 2**64 - 1), st.integers(1, 50))
def test_a_split_drops_no_token(length, width):
    parts = split_length(length, width)
    assert sum(parts) == length and len(parts) == width and max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


# The rule


def test_the_published_factor_is_correctly_rounded_traced_or_not():
    depth = np.append(np.arange(1, 4000), [10**6, 2**31, 2**32 - 2])
    exact = np.array([(125 + 8 * int(d)) / 100 for d in depth])
    assert (PUBLISHED.factor(depth) == exact).all()
    assert all(PUBLISHED.factor(int(d)) == x for d, x in zip(depth, exact, strict=True))
    with fpmjax.x64():
        assert (jax.jit(PUBLISHED.factor)(depth) == exact).all()
        assert (jax.vmap(PUBLISHED.factor)(depth) == exact).all()
        scalar = jax.jit(PUBLISHED.factor)
        assert all(scalar(int(d)) == x for d, x in zip(depth[:200], exact[:200], strict=True))
    assert [float(PUBLISHED.factor(d)) for d in (1, 2, 3, 4)] == [1.33, 1.41, 1.49, 1.57]


@given(st.decimals(0, 3, places=4), st.decimals("0.01", 3, places=5), st.integers(1, 10**6))
def test_decimal_coefficients_are_kept_exactly(slope, intercept, depth):
    rule = SpeculativeRule(slope, str(intercept))
    exact = Fraction(intercept) + Fraction(slope) * depth
    assert rule.factor(depth) == exact.numerator / exact.denominator
    assert rule.factor(np.array([depth]))[0] == exact.numerator / exact.denominator


def test_long_coefficients_stay_correctly_rounded_on_the_host():
    rule = SpeculativeRule("0.081234567890123456789", "1.2512345678901234567")
    exact = Fraction(rule.intercept) + Fraction(rule.slope) * 7
    assert rule.factor(np.array([7]))[0] == rule.factor(7) == exact.numerator / exact.denominator
    assert SpeculativeRule(0.08, 1.25).integers() == PUBLISHED.integers()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, "x", None, True, [1]])
def test_a_rule_refuses_coefficients_that_cannot_scale(bad):
    with pytest.raises(SpeculationError) as caught:
        SpeculativeRule(bad, 1)
    assert caught.value.code == "rule"
    with pytest.raises(SpeculationError, match="would answer 0 ms everywhere"):
        SpeculativeRule(0, 0)
