"""Online correction: the laws, factors worked out by hand, and what must not be learned."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from asking import decode
from native_models import TOY, Toy
from small_tables import cell_of, queries_near, surface, work_of

import fpmjax
from fpmjax import ForwardPassPerfModel, Observations, Work, direct, estimate, speculative
from fpmjax.errors import CoverageError, MetricsError, OptionError
from fpmjax.models import corrected as module
from fpmjax.models.corrected import Corrected, corrected
from fpmjax.models.regression import regression
from fpmjax.status import Status
from fpmjax.work import COUNTS

# The laws, for a corrected table


def seen_around(rows: list, seed: int, n: int = 30) -> Observations:
    work = work_of(queries_near(rows, n, seed))
    return Observations.of(work, np.random.default_rng(seed).uniform(0.1, 1e4, n))


def kernel(model, work, **options):
    """Through compiled code whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__, "SMALL", 0)
        return estimate(model, work, check=False, **options)


def bits(result) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(result)]


def same(a, b) -> bool:
    return all(
        np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f")
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


in_jit = jax.jit(lambda model, work: model(work))
ROWS = [
    *surface([1, 2, 4, 8], [0, 64, 128]),
    *(("prefill", 1, p, k, 2.0 + p / 8 + k / 64) for p in (8, 16, 64) for k in (0, 32)),
]
# One compiled shape for all seeds: the first query has both phases, and every policy reads boxes alike.
SEEDS = pytest.mark.parametrize("seed", range(8))


def asked(n: int, seed: int) -> np.ndarray:
    queries = queries_near(ROWS, n, seed)
    queries[0] = 1, 8, 0, 2, 64
    return queries


def law_model(seed: int) -> Corrected:
    return corrected(direct(cell_of(ROWS)), seen_around(ROWS, seed), policy="hybrid", min_observations=1)


@SEEDS
def test_idle_ranks_change_nothing(seed):
    model, queries = law_model(seed), asked(36, seed).reshape(12, 3, 5)
    alone = kernel(model, work_of(queries))
    idle = np.zeros((12, 1, 5), np.int64)
    after = kernel(model, work_of(np.concatenate([queries, idle], axis=1)))
    before = kernel(model, work_of(np.concatenate([idle, queries], axis=1)))
    assert same(alone, after)
    assert same((alone.latency_ms, alone.status, alone.factor), (before.latency_ms, before.status, before.factor))


@SEEDS
def test_a_batch_is_a_stack_of_singles_in_any_shape_and_chunk_compiled_or_not(seed):
    model, queries = law_model(seed), asked(48, seed)
    work = work_of(queries)
    whole = kernel(model, work)
    assert (whole.factor[whole.status != Status.OK] == 1.0).all() and (whole.factor != 1.0).any()
    for i in range(48):
        assert bits(estimate(model, work_of(queries[i]), check=False)) == bits(jax.tree.map(lambda x: x[i], whole))  # noqa: B023
    deep = Work.of(**{n: getattr(work, n).reshape(2, 3, 8) for n in COUNTS})
    assert bits(whole) == bits(kernel(model, deep)) == bits(model.on_host(deep))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__["chunks"].__globals__, "SIZES", (8, 32))
        assert bits(whole) == bits(kernel(model, work))
    with fpmjax.x64():
        assert same(whole, in_jit(model, work))


def test_stacked_corrections_answer_under_vmap():
    models = [law_model(seed) for seed in range(3)]
    work = work_of(asked(48, 5))
    apart = [kernel(model, work) for model in models]
    with fpmjax.x64():
        together = jax.vmap(in_jit, (0, None))(jax.tree.map(lambda *x: np.stack(x), *models), work)
    assert same(together, jax.tree.map(lambda *x: np.stack(x), *apart))


def test_a_gradient_is_the_factor():
    rows = surface([1, 2, 4, 8], [0, 64, 128])
    model = seen_of(direct(cell_of(rows)), [(2, 64)] * 5, 1.5)

    def total(latencies):
        inner = model.model.with_latencies(latencies)
        return replace(model, model=inner)(Work.decode(2, 64)).latency_ms

    with fpmjax.x64():
        gradient = np.asarray(jax.jit(jax.grad(total))(np.array([r[4] for r in rows])))
    assert gradient[[r[1:4] for r in rows].index((2, 0, 64))] == gradient.sum() == 1.5


# By hand: a table that takes B + K / 1024 ms

DECODE = direct(cell_of(surface([1, 2, 4, 8, 16, 512, 1024, 2048, 4096], [0, 1024, 4096])))


def seen_of(model, points, ratio, **options) -> Corrected:
    work = Work.decode(*np.array(points).T)
    return corrected(model, Observations.of(work, np.asarray(model.on_host(work).latency_ms) * ratio), **options)


def test_the_factor_shows_in_the_estimate_and_in_the_detail():
    model = seen_of(DECODE, [(2, 1024)] * 5, 1.5)
    answer = estimate(model, Work.decode(2, 1024))
    assert (answer.latency_ms, answer.native_ms, answer.factor) == (4.5, 3.0, 1.5)
    facade = ForwardPassPerfModel(model)
    assert facade.estimate_forward_pass_time_ms(decode(2, 1024)) == 4.5
    detail = facade.estimate_forward_pass_detailed(decode(2, 1024))
    assert (detail["latency_ms"], detail["native_latency_ms"]) == (4.5, 3.0)
    assert (detail["correction_factor"], detail["max_rank"]) == (1.5, 0)
    idle = facade.estimate_forward_pass_detailed({})
    assert (idle["latency_ms"], idle["native_latency_ms"], idle["correction_factor"]) == (0.0, 0.0, 1.0)
    assert repr(model) == "Corrected(Direct, policy='fixed', 5 retained)"


def test_four_observations_are_too_few_and_ratios_are_clipped():
    work = Work.decode(2, 1024)
    assert estimate(seen_of(DECODE, [(2, 1024)] * 4, 1.5), work).factor == 1.0
    assert estimate(seen_of(DECODE, [(2, 1024)] * 5, 9.0), work).factor == 2.0
    assert estimate(seen_of(DECODE, [(2, 1024)] * 5, 0.1), work).factor == 0.5
    assert estimate(seen_of(DECODE, [(2, 1024)] * 5, 9.0, factor_bounds=(None, None)), work).factor == 9.0


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    work = Work.decode(np.full(6, 2), 1024)
    seen = Observations.of(work, 3.0 * np.array([1.9, 1.0, 1.25, 0.6, 1.5, 1.75]))
    assert estimate(corrected(DECODE, seen), Work.decode(2, 1024)).factor == pytest.approx((1.25 + 1.5) / 2, rel=1e-15)


def test_every_kind_has_a_store_of_its_own():
    model = seen_of(TOY, [(2, 1024)] * 5, 1.5, policy="hybrid")
    work = work_of([[1, 8, 0, 0, 0], [1, 8, 0, 2, 1024], [0, 0, 0, 2, 1024], [1, 0, 64, 0, 0]])
    assert estimate(model, work).factor.tolist() == [1.0, 1.0, 1.5, 1.0]


def test_the_largest_rank_decides_and_of_equal_ones_the_last():
    model = seen_of(TOY, [(2, 1024)] * 5, 1.5)
    a, b = (0, 0, 0, 2, 1024), (1, 1026, 0, 0, 0)  # both sum to 1026; nothing is known about prefill
    assert estimate(model, work_of([[a, b], [b, a], [a, (1, 1027, 0, 0, 0)]])).factor.tolist() == [1.0, 1.5, 1.0]


def test_outside_the_box_nothing_is_learned_or_corrected_under_fixed():
    points = [(1, 1024)] * 5 + [(4096, 4096)] * 5
    fixed = seen_of(DECODE, points, 1.5)
    assert fixed.report == {"observations": 10, "taken": 5, "no_native_answer": 0, "outside_box": 5}
    assert estimate(fixed, Work.decode([1, 4096], [1024, 4096])).factor.tolist() == [1.5, 1.0]
    hybrid = seen_of(DECODE, points, 1.5, policy="hybrid")
    assert hybrid.report["outside_box"] == 0
    assert estimate(hybrid, Work.decode([1, 4096], [1024, 4096])).factor.tolist() == [1.5, 1.5]
    assert estimate(hybrid, Work.decode(512, 1024)).factor == 1.0  # an empty cell of the fixed box


def test_a_widened_query_takes_the_factor_of_the_widened_point():
    rows = [(2, 1024)] * 5 + [(8, 1024)] * 5
    ratios = np.array([1.5] * 5 + [0.75] * 5)
    model = seen_of(DECODE, rows, ratios, bins=(512, 1), max_batch_size=512)
    plain, widened = estimate(model, Work.decode(2, 1024)), estimate(model, Work.decode(2, 1024), draft_length=3)
    assert plain.factor == 1.5
    assert (widened.stp.factor, widened.stp.native_ms) == (0.75, 9.0)
    assert widened.latency_ms == (1.25 + 0.08 * 3) * (9.0 * 0.75)
    detail = ForwardPassPerfModel(model).estimate_forward_pass_detailed(decode(2, 1024), draft_length=3)
    assert (detail["scaling_factor"], detail["stp_reference"]["correction_factor"]) == (1.49, 0.75)
    with fpmjax.x64():
        pure = jax.jit(lambda m, w: speculative(m, w, 3))(model, Work.decode(2, 1024))
    assert same(pure.latency_ms, widened.latency_ms)


@pytest.mark.parametrize("host", [True, False])
def test_beyond_the_largest_batch_the_factor_falls_to_one(host):
    model = seen_of(DECODE, [(512, 1024)] * 5, 1.5)
    ask = estimate if host else kernel
    inside, outside = (ask(model, Work.decode([256], 1024), draft_length=d) for d in (1, 3))
    assert (inside.stp.factor, outside.stp.factor) == (1.5, 1.0)
    assert outside.latency_ms == 1.49 * 1025.0


def test_asking_changes_no_state():
    model = seen_of(DECODE, [(2, 1024)] * 5, 1.5, policy="hybrid")
    before = bits(model)
    estimate(model, Work.decode(np.arange(1, 17), 1024), draft_length=[1], check=False)
    assert bits(model) == before


def test_an_update_is_pure(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    model = seen_of(DECODE, [(2, 1024)] * 5, 1.5, policy="hybrid", max_observations=8)
    before = bits(model)
    work = Work.decode(np.full(200, 2), 1024)
    for count in (7, 200):  # the plain loop and the compiled one
        after = model.update(Observations.of(work, np.full(200, 2.0))[:count])
        assert bits(model) == before and bits(after) != before
    assert bits(model.update(Observations.of(work, np.full(200, 2.0))[:0])) == before


def test_refused_natives_are_left_out_and_counted():
    model = corrected(Toy(np.array([7.0])), policy="hybrid", min_observations=1)
    work = Work.decode([2, 2, 3], [7, 8, 7])
    after = model.update(Observations.of(work, [1.0, 5.25, 1.0]))
    assert after.report == {"observations": 3, "taken": 1, "no_native_answer": 2, "outside_box": 0}
    assert after.retained == 2  # in both stores
    assert estimate(after, Work.decode(2, 8)).factor == 1.5
    refused = estimate(after, Work.decode(2, 7), check=False)
    assert np.isnan(refused.latency_ms) and refused.status == Status.NO_ROWS and refused.factor == 1.0
    assert bits(model.update(Observations.of(work, [1.0] * 3).where(np.array([True, False, True])))) == bits(model)


def test_what_no_clock_measures_is_never_stored():
    bad = [0.0, -1.0, np.nan, np.inf, 1e308, 1e-320]
    seen = Observations(Work.decode(np.full(6, 2), 8), np.array(bad))  # past the checks of `Observations.of`
    model = corrected(TOY, seen, policy="hybrid", min_observations=1, factor_bounds=(None, None))
    assert model.report["taken"] == 1 and np.isfinite(model.factors).all()
    assert np.isfinite(estimate(model, Work.decode(2, 8)).latency_ms)


def test_a_correction_that_is_not_enabled_keeps_nothing():
    model = seen_of(DECODE, [(2, 1024)] * 9, 1.5, enabled=False)
    assert (model.retained, model.ready_buckets, len(model.factors), model.policy) == (0, 0, 0, None)
    answer = estimate(model, Work.decode(2, 1024))
    assert (answer.latency_ms, answer.factor) == (3.0, 1.0)


def test_the_native_model_speaks_for_itself():
    model = corrected(DECODE)
    assert (model.ready, model.execution, model.composition) == (True, "autoregressive", "whole_forward")
    assert (model.verify_width, model.cell, model.reads) == (1, DECODE.cell, frozenset())
    with pytest.raises(CoverageError, match=r"measured for total_kv_read_tokens 0\.\.4096"):
        estimate(model, Work.decode(3, 2**20))
    evidence = estimate(seen_of(DECODE, [(2, 1024)] * 5, 1.5), Work.decode(2, 1024), evidence=True)
    assert evidence.parts.decode_ms == 3.0


def test_a_fit_is_corrected_as_a_table_is():
    seen = Observations.of(Work.decode(np.arange(1, 41), 64 * np.arange(1, 41)), 1.0 + np.arange(1, 41))
    fit = regression(seen, role="decode")
    later = Observations.of(seen.work, estimate(fit, seen.work).latency_ms * 1.25)
    model = corrected(fit, later)
    assert estimate(model, Work.decode(8, 512)).latency_ms == pytest.approx(9.0 * 1.25)
    assert same(kernel(model, seen.work), model.on_host(seen.work))
    cold = corrected(regression(seen[:2], role="decode"), later)
    assert (cold.report["no_native_answer"], cold.retained) == (40, 0)
    unready = estimate(cold, Work.decode(8, 512), draft_length=2, check=False)
    assert np.isnan(unready.latency_ms) and unready.status == Status.NOT_READY and unready.stp.factor == 1.0
    assert ForwardPassPerfModel(cold).estimate_forward_pass_time_ms(decode(8, 512)) is None
    other_role = model.update(Observations.of(work_of([[1, 16, 0, 0, 0]]), [9.0]))
    assert other_role.report["no_native_answer"] == 1 and bits(other_role) == bits(model)
    with pytest.raises(MetricsError) as refused:
        estimate(model, work_of([[1, 16, 0, 0, 0]]))
    assert refused.value.code == "role"


def test_a_model_on_the_device_learns_alike():
    model = corrected(TOY, policy="hybrid", min_observations=1)
    seen = Observations.of(Work.decode([2, 3], 2**31), [1e8, 1.5e8])
    with fpmjax.x64():
        on_device = jax.tree.map(jax.numpy.asarray, model)
    assert bits(on_device.update(seen)) == bits(model.update(seen))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "auto"},
        {"min_observations": 0},
        {"min_observations": 65},
        {"min_observations": True},
        {"max_observations": 2.0},
        {"bins": (4,)},
        {"bins": (0, 4)},
        {"bins": (2**16, 2**15)},
        {"factor_bounds": (0.0, 2.0)},
        {"factor_bounds": (1.1, 2.0)},
        {"factor_bounds": (0.5, 0.9)},
        {"factor_bounds": (0.5, math.inf)},
        {"factor_bounds": 2.0},
        {"max_num_tokens": 0},
        {"max_batch_size": -1},
        {"max_kv_tokens": "many"},
    ],
    ids=str,
)
def test_options_are_checked(options):
    with pytest.raises(OptionError, match=f"^{next(iter(options))} is .*\nhint: "):
        corrected(DECODE, **options)


def test_sizes_and_bounds_that_nothing_can_hold_are_refused(embedded_cell):
    model = fpmjax.direct(embedded_cell)
    cases = [
        {"max_observations": 2**40},
        {"factor_bounds": (0.5, 10**400)},
        {"max_batch_size": 2**70},
    ]
    for options in cases:
        with pytest.raises(fpmjax.OptionError, match=f"{next(iter(options))} is "):
            fpmjax.corrected(model, **options)
    for other in (5, None, embedded_cell):
        with pytest.raises(fpmjax.FpmError, match="corrected takes a model, not a") as caught:
            fpmjax.corrected(other)
        assert caught.value.code == "not_a_model"
    with pytest.raises(fpmjax.OptionError, match="ffn_token_weight"):
        fpmjax.regression(role="decode", ffn_token_weight=10**400)
