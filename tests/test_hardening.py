"""What an attack found once: each mended, each kept mended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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

ROWS = [*surface((1, 2, 4, 8, 16), (0, 1024, 8192, 65536)), ("prefill", 1, 64, 0, 3.0), ("prefill", 1, 128, 0, 4.0)]


@pytest.fixture(scope="module")
def model():
    return direct(cell_of(ROWS))


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 65, 70, 129])
def test_one_iteration_has_as_many_ranks_as_it_likes(model, ranks):
    batch = np.zeros(ranks, int)
    batch[-1] = 2
    work = Work.decode(batch, batch * 512, ranks=True)
    for draft_length, expected in ((None, 3.0), (1, 1.33 * 5.0)):
        result = estimate(model, work, draft_length=draft_length, evidence=True)
        assert result.latency_ms == expected and result.rank == ranks - 1 and np.ndim(result.latency_ms) == 0
    parts = estimate(model, work, evidence=True).parts
    assert parts.decode.row.shape == (ranks, 4) and parts.prefill_ms.shape == (ranks,)
    with pytest.raises(CoverageError, match=f"on rank {ranks - 1}:" if ranks > 1 else "batch_size=99"):
        estimate(model, Work.decode(np.where(batch, 99, 0), batch, ranks=True))


def test_a_model_that_lost_its_64_bits_is_refused(model):
    for moved in (jax.device_put(model), jax.tree.map(jnp.asarray, model)):
        for n in (3, 300):
            with pytest.raises(FpmError, match="latencies became float32\nhint: move or map a model inside") as caught:
                estimate(moved, Work.decode([3] * n, 5000))
            assert caught.value.code == "x64_required"
    with fpmjax.x64():
        moved = jax.tree.map(jnp.asarray, model)
    assert (estimate(moved, Work.decode([3] * 300, 5000)).latency_ms == 3 + 5000 / 1024).all()


@pytest.mark.parametrize("n", [2, 200])
def test_a_phase_is_there_as_a_whole_or_not_at_all(model, n):
    one = np.ones((n, 1), np.uint32)
    cases = [
        (Work(decode_requests=one), Status.OK),
        (Work(decode_kv=one), Status.INVALID_WORK),
        (Work(prefill_tokens=one * 64), Status.INVALID_WORK),
        (Work(prefill_requests=one, prefill_tokens=one * 64), Status.OK),
        (Work(prefill_requests=one), Status.IDLE),
    ]
    for work, expected in cases:
        assert (estimate(model, work, check=False).status == expected).all()
        with fpmjax.x64():
            assert (model(work).status == expected).all()


def test_draft_lengths_come_back_as_they_were_asked(model):
    asked = [2**32 + 5, -7, 3, 2**70]
    for copies in (1, 100):
        result = estimate(model, Work.decode(np.full(4 * copies, 2), 512), draft_length=asked * copies, check=False)
        assert result.draft_length[:3].tolist() == asked[:3]
        assert np.isnan(result.scaling_factor[[0, 1, 3]]).all() and result.scaling_factor[2] == 1.49
    with fpmjax.x64():
        pure = speculative(model, Work.decode([2, 2], 512), np.array([2**32 + 5, 3]))
    assert pure.draft_length.tolist() == [2**32 + 5, 3] and np.isnan(pure.scaling_factor[0])


class OpLevel:
    composition, execution = "op_level", "autoregressive"


def test_the_draft_length_is_checked_before_the_model():
    cases = [(True, "draft_length_type"), ("x", "draft_length_type"), (0, "draft_length_not_positive")]
    for bad, code in [*cases, (2**32, "width_overflow"), (3, "unsupported_estimator")]:
        with pytest.raises(SpeculationError) as caught:
            estimate(OpLevel(), Work.decode(1, 1), draft_length=bad)
        assert caught.value.code == code


def test_masked_and_ragged_draft_lengths_are_no_draft_lengths(model):
    for bad in (np.ma.array([1, 2], mask=[0, 1]), [np.zeros((2, 2), int), np.zeros((2, 3), int)]):
        with pytest.raises(DraftLengthTypeError):
            estimate(model, Work.decode([2, 2], 512), draft_length=bad)
    with fpmjax.x64(), pytest.raises(SpeculationError, match="does not broadcast") as caught:
        speculative(model, Work.decode([2, 3], 512), np.array([1, 2, 3]))
    assert caught.value.code == "draft_length_shape"


@pytest.mark.parametrize("slope", ["1e400", "1e308", "1e-400", "1e-31", 10**400, "-1e-5"])
def test_a_rule_keeps_to_factors_that_float64_can_hold(slope):
    with pytest.raises(SpeculationError, match="cannot scale a latency\nhint: a coefficient is 0 or lies in") as caught:
        SpeculativeRule(slope, "0")
    assert caught.value.code == "rule"
    largest = SpeculativeRule("1e30", "1e-30").factor(2**32 - 2)
    assert np.isfinite(largest) and SpeculativeRule("1e-30", "0").factor(1) > 0


def test_debugging_modes_of_jax_do_not_reach_inside(model):
    work = Work.decode(np.where(np.arange(600) % 2, 2, 999), 512)
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        result = estimate(model, work, check=False)
    assert (result.status[1::2] == Status.OK).all() and np.isnan(result.latency_ms[::2]).all()


def test_estimate_cannot_be_traced(model):
    with fpmjax.x64(), pytest.raises(FpmError, match=r"cannot be traced\nhint: inside jit, vmap or grad") as caught:
        jax.jit(lambda b: estimate(model, Work.decode(b, 512)).latency_ms)(np.int32([2, 3]))
    assert caught.value.code == "traced"


def test_neighbours_that_crowd_the_other_side_out_are_named():
    curve = [(0, 1.0), (100, 2.0)]
    model = direct(cell_of(decode_rows({b: curve for b in (100, 102, 104, 106, 108, 300)})))
    with pytest.raises(CoverageError, match=r"the 4 nearest .* lie on one side \(102, 104, 106, 108\)"):
        estimate(model, Work.decode(110, 50))
