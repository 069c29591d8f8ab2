"""The chooser: its rule against a plain loop, who is asked when, and one answer out of two."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import decode, prefill, refusal
from native_models import TOY, Toy
from small_tables import cell_of, surface, work_of
from streams import decode_stream, random_stream

from fpmjax import ForwardPassPerfModel, Work, corrected, direct, estimate, regression, with_intervals, x64
from fpmjax._jax import pytree
from fpmjax.answer import Support
from fpmjax.errors import CoverageError, FpmError, MetricsError, ModelFileError, OptionError
from fpmjax.models.chosen import Chosen, chosen
from fpmjax.observe.features import KINDS
from fpmjax.observe.observations import Observations
from fpmjax.status import Status
from fpmjax.store import load_model, save_model


@pytree()
class Scaled:
    """TOY times a factor, with its refusals."""

    factor: Any
    toy: Toy = TOY

    composition, execution, ready = "whole_forward", "autoregressive", True

    def __call__(self, work, *, evidence=False, xp=jnp):
        answer = self.toy(work, xp=xp)
        return replace(answer, latency_ms=answer.latency_ms * self.factor)

    def on_host(self, work, *, evidence=False):
        return self(work, xp=np)


@pytree()
class Memory:
    """Answers every busy iteration with the last wall time that it was taught."""

    last_ms: Any

    composition, execution, ready = "whole_forward", "autoregressive", True

    def __call__(self, work, *, evidence=False, xp=jnp):
        answer = TOY(work, xp=xp)
        busy = answer.status == Status.OK
        return replace(answer, latency_ms=xp.where(busy, xp.asarray(self.last_ms), answer.latency_ms))

    def on_host(self, work, *, evidence=False):
        return self(work, xp=np)

    def update(self, observations):
        return replace(self, last_ms=np.asarray(observations.wall_ms[-1]))


# One iteration of each kind on two ranks, in the order of KINDS.
OF_KIND = np.array(
    [
        [[0, 0, 0, 3, 64], [0, 0, 0, 0, 0]],
        [[1, 16, 0, 3, 64], [0, 0, 0, 2, 64]],
        [[1, 16, 0, 0, 0], [0, 0, 0, 3, 64]],
        [[1, 16, 0, 0, 0], [0, 0, 0, 0, 0]],
    ]
)
ONE = Work.decode([1], [0])  # TOY: 2 ms
ROWS = [*surface([2, 4, 8, 16], range(0, 320, 32)), *(("prefill", 1, t, 0, 2.0 + t) for t in range(8, 40, 2))]
CELL = cell_of(ROWS)
TABLE = direct(CELL)
HALF = TABLE.with_latencies(np.array([row[4] / 2.0 for row in ROWS]))


def seen(kinds: Any, wall_ms: Any) -> Observations:
    return Observations.of(work_of(OF_KIND[np.asarray(kinds)]), np.asarray(wall_ms, np.float64))


def alternating(a: Any, b: Any, *kinds: int, **options: Any) -> Chosen:
    """Both models, the challenger active for these kinds."""
    active = np.isin(np.arange(len(KINDS)), kinds).astype(np.int8)
    return replace(chosen(a, b, **options), active=active)


def compiled(model, work, **options):
    """Through compiled code whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__, "SMALL", 0)
        return estimate(model, work, check=False, **options)


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(
            x, y, equal_nan=np.asarray(x).dtype == float
        )


# The rule


def plain_rule(kinds, stable, challenger, observed, alpha=0.4, margin=0.05, warmup=5, persistence=1) -> list[dict]:
    """The rule as its description reads; a prediction of None is no number."""
    states = {k: {"active": 0, "error": [None, None], "observations": 0, "streak": 0} for k in range(4)}
    for kind, *predicted, wall in zip(kinds, stable, challenger, observed, strict=True):
        state = states[kind]
        if None in predicted:
            continue
        for expert in (0, 1):
            x, old = abs(predicted[expert] - wall) / wall, state["error"][expert]
            state["error"][expert] = x if old is None else alpha * x + (1.0 - alpha) * old
        state["observations"] += 1
        if state["observations"] >= warmup:
            incumbent, other = state["error"][state["active"]], state["error"][1 - state["active"]]
            state["streak"] = state["streak"] + 1 if other < (1.0 - margin) * incumbent else 0
            if state["streak"] == persistence:
                state["active"], state["streak"] = 1 - state["active"], 0
    return [
        {
            "workload_kind": name,
            "active": ("stable", "challenger")[state["active"]],
            "stable_error": state["error"][0],
            "challenger_error": state["error"][1],
            "observations": state["observations"],
            "streak": state["streak"],
        }
        for name, state in zip(KINDS, states.values(), strict=True)
    ]


OPTIONS: dict[str, dict] = {
    "default": {},
    "newest alone": {"alpha": 1.0, "margin": 0.0, "warmup": 1},
    "slow": {"alpha": 0.1, "persistence": 3},
    "reluctant": {"alpha": 0.9, "margin": 0.3, "warmup": 9, "persistence": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("learning", [False, True], ids=["fixed", "learning"])
def test_the_rule_on_random_streams(options, learning):
    """Bit for bit, in one update or in several; a learning expert has seen all before the row, and nothing after."""
    switches = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        kinds = rng.integers(0, 4, 120)
        observed = 30.0 * np.exp(rng.normal(0, 0.3, 120) + 0.8 * np.sin(np.arange(120) / 15))
        toy = estimate(TOY, work_of(OF_KIND[kinds])).latency_ms
        second = [20.0, *observed[:-1].tolist()] if learning else (1.3 * toy).tolist()
        model = chosen(
            Scaled(np.float64(0.9)), Memory(np.float64(20.0)) if learning else Scaled(np.float64(1.3)), **options
        )
        observations = seen(kinds, observed)
        want = plain_rule(kinds.tolist(), (0.9 * toy).tolist(), second, observed.tolist(), **options)
        assert list(model.update(observations).diagnostics) == want
        parts = model
        for piece in (slice(0, 1), slice(1, 50), slice(50, 90), slice(90, 120)):
            before, parts = parts.diagnostics, parts.update(observations[piece])
            switches += sum(a["active"] != b["active"] for a, b in zip(before, parts.diagnostics, strict=True))
        assert list(parts.diagnostics) == want
        assert np.isnan(model.error).all()  # as it was
    assert switches > 5


def test_equal_is_not_better():
    """2 ms observed, 4 and 3 predicted: errors of exactly 1 and 1/2, and a margin of exactly 1/2."""
    many = Observations.of(Work.decode([1] * 20, [0] * 20), [2.0] * 20)
    for alpha in (0.5, 1.0):
        model = chosen(Scaled(np.float64(2.0)), Scaled(np.float64(1.5)), many, margin=0.5, alpha=alpha)
        assert model.error[:, 0].tolist() == [1.0, 0.5]
        assert model.diagnostics[0]["active"] == "stable" and model.streak[0] == 0
        better = chosen(Scaled(np.float64(2.0)), Scaled(np.nextafter(1.5, 0.0)), many, margin=0.5, alpha=alpha)
        assert better.diagnostics[0]["active"] == "challenger"
    alike = chosen(TOY, TOY, many, margin=0.0)
    assert alike.error[:, 0].tolist() == [0.0, 0.0] and alike.active[0] == 0


def test_warmup_and_persistence_are_counted_to_the_row():
    row = Observations.of(ONE, [2.0])
    model = chosen(Scaled(np.float64(2.0)), TOY, warmup=3, persistence=2)
    shown = []
    for _ in range(8):
        model = model.update(row)
        shown.append((model.diagnostics[0]["active"], int(model.streak[0])))
    assert shown[:4] == [("stable", 0), ("stable", 0), ("stable", 1), ("challenger", 0)]
    assert shown[4:] == [("challenger", 0)] * 4


# Which observations count


def test_what_one_model_does_not_answer_scores_neither():
    toy = Toy(np.array([64.0]))
    observations = Observations.of(Work.decode([1, 1, 1], [0, 64, 128]), [2.0, 6.0, 10.0])
    for model in (chosen(Scaled(np.float64(2.0), toy), TOY, observations), chosen(TOY, toy, observations)):
        assert model.count[0] == 2
    cold = chosen(TOY, regression(role="decode"), decode_stream(1, 4))
    assert cold.count[0] == 0 and cold.challenger.stores[0]["retained_observations"] == 4  # taught all the same
    assert cold.update(decode_stream(2, 30)).count[0] > 20


def test_idle_iterations_and_times_that_are_none_neither_score_nor_teach():
    work = Work.decode([1, 0, 1, 1, 1, 1], [0] * 6)
    odd = Observations(work, np.array([2.0, 3.0, np.nan, np.inf, 0.0, -1.0]))
    model = chosen(TOY, Memory(np.float64(7.0)), odd)
    assert model.count.tolist() == [1, 0, 0, 0] and model.challenger.last_ms == 2.0
    assert chosen(TOY, TOY, odd[:0]).count.sum() == 0
    huge = chosen(Scaled(np.float64(5e307)), TOY, Observations.of(ONE, [1e-3]))
    assert huge.count[0] == 0 and np.isnan(huge.error).all()  # an error beyond float64 would never fade


def test_models_that_learn_end_where_they_would_alone():
    stream = decode_stream(3, 60)
    model = chosen(corrected(TABLE), regression(role="decode", max_observations=20), stream)
    alone = regression(stream, role="decode", max_observations=20)
    same(model.challenger, alone)
    same(model.stable, corrected(TABLE, stream))
    aggregated = Observations.from_metrics(random_stream(2, 50, "aggregated", 2))
    assert chosen(TABLE, regression(role="aggregated"), aggregated).challenger.ready


def test_an_error_of_a_model_names_the_observation_and_changes_nothing():
    mixed = seen([0, 0, 3], [1.0, 1.0, 1.0])
    model = chosen(TABLE, regression(role="decode"))
    code, message = refusal(MetricsError, model.update, mixed)
    assert code == "role" and message.startswith("observation 2: ")
    assert model.count.sum() == 0
    assert refusal(MetricsError, model.update, [mixed])[0] == "payload"


# One answer out of two


WORK = work_of(np.concatenate([OF_KIND, 0 * OF_KIND[:1], OF_KIND[:1] * 100, OF_KIND]))


@pytest.mark.parametrize("active", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_every_query_is_answered_by_the_model_of_its_kind(active):
    model = alternating(TABLE, HALF, *active)
    of = np.array([0, 1, 2, 3, -1, 0, 0, 1, 2, 3])
    for evidence in (False, True):
        a, b = (estimate(m, WORK, check=False, evidence=evidence) for m in (TABLE, HALF))
        want = jax.tree.map(lambda x, y: np.where(np.isin(of, active).reshape(-1, *[1] * (x.ndim - 1)), y, x), a, b)
        for got in (compiled(model, WORK, evidence=evidence), estimate(model, WORK, check=False, evidence=evidence)):
            same(got, want)
    with x64():
        stack = jax.tree.map(lambda *x: np.stack(x), alternating(TABLE, HALF), model)
        each = jax.vmap(lambda m, w: m(w).latency_ms, (0, None))(stack, WORK)
    assert np.array_equal(each[1], want.latency_ms, equal_nan=True)
    assert np.array_equal(each[0], a.latency_ms, equal_nan=True)
    assert (
        refusal(FpmError, estimate, stack, WORK)[0] == refusal(FpmError, stack.update, seen([0], [1.0]))[0] == "stacked"
    )


def test_a_draft_length_is_answered_by_the_model_of_decode():
    work = Work.decode([1, 2, 4], [64, 64, 200])
    for active, of in (((), TABLE), ((0,), HALF), ((1, 2, 3), TABLE)):
        model = alternating(TABLE, HALF, *active)
        for d in (1, 3):
            want = estimate(of, work, draft_length=d)
            same(estimate(model, work, draft_length=d), want)
            same(compiled(model, work, draft_length=d), want)


def test_what_one_model_adds_is_empty_beside_the_answers_of_the_other():
    banded, fixed = with_intervals(TABLE), corrected(HALF, Observations.of(Work.decode([2] * 5, [64] * 5), [3.0] * 5))
    work = work_of(OF_KIND)
    mine = np.array([False, False, True, True])
    native, other = estimate(banded, work), estimate(fixed, work)
    for ask in (compiled, estimate):
        answer = ask(alternating(banded, fixed, 0, 1), work)
        assert np.array_equal(answer.interval.low_ms, np.where(mine, native.interval.low_ms, np.nan), equal_nan=True)
        assert answer.interval.count.tolist() == np.where(mine, native.interval.count, 0).tolist()
        assert answer.interval.count.dtype == np.int64 and answer.interval.level == 0.9
        assert np.array_equal(answer.factor, np.where(mine, 1.0, other.factor))
        assert np.array_equal(answer.native_ms, np.where(mine, native.latency_ms, other.native_ms))
    both = estimate(alternating(banded, corrected(with_intervals(HALF)), 0), work)
    assert np.isfinite(both.interval.low_ms).all() and both.support is None
    other_level = chosen(banded, with_intervals(TABLE, level=0.5))
    assert refusal(OptionError, estimate, other_level, work)[0] == "level"


def test_support_is_merged_alike():
    @pytree()
    class Fitted:
        composition, execution, ready = "whole_forward", "autoregressive", True

        def __call__(self, work, *, evidence=False, xp=jnp):
            answer = TOY(work, xp=xp)
            one = xp.ones(work.shape)
            return replace(answer, support=Support(0.5 * one, 0.02 * one))

    for pair, active in (((TOY, Fitted()), (3,)), ((Fitted(), TOY), (0, 1, 2))):
        support = compiled(alternating(*pair, *active), work_of(OF_KIND)).support
        assert support.extrapolated.tolist() == [False, False, False, True]
        assert np.array_equal(support.model_spread, [np.nan] * 3 + [0.02], equal_nan=True)
    both = compiled(alternating(Fitted(), Fitted(), 1), work_of(OF_KIND)).support
    assert both.distance.tolist() == [0.5] * 4


LISTS: dict[str, Any] = {"feature_axes": ("n", "maxP"), "sampling_axes": ("n",), "bins_per_axis": (4,)}


def test_ranks_are_told_where_the_model_of_a_kind_tells_them():
    fitted = regression(Observations.from_metrics(random_stream(2, 80, "aggregated", 2)), role="aggregated")
    work = work_of(OF_KIND[:, :1])  # a single rank
    model = alternating(TABLE, fitted, 3)
    assert not model.by_rank and chosen(TABLE, HALF).by_rank
    for answer in (compiled(model, work), estimate(model, work, check=False)):
        assert answer.rank[0] == 0 and answer.rank[3] == -1
    assert model.reads == frozenset() and chosen(TABLE, regression(role="decode", **LISTS)).reads == {"lists"}


# Around it


def test_a_refusal_says_whose_it_is():
    model = alternating(TABLE, regression(role="decode"), 3, 1)
    with pytest.raises(CoverageError, match="the stable model answers pure_decode; decode batch_size=5000") as caught:
        estimate(model, Work.decode(5000, 1))
    assert str(caught.value).count("\nhint: ") == 1
    code, message = refusal(MetricsError, estimate, model, Work.prefill(1, 16, 0))
    assert code == "role" and message.startswith("the challenger model answers pure_prefill; a decode worker's")
    cold = alternating(TABLE, regression(role="decode"), 0)
    code, message = refusal(CoverageError, estimate, cold, Work.decode(2, 64))
    assert code == "not_ready" and "the challenger model answers pure_decode" in message
    toy = chosen(Toy(np.array([64.0])), TOY)
    assert refusal(CoverageError, estimate, toy, Work.decode(1, 64))[0] == "no_rows"
    invalid = replace(Work.decode(1, 64), decode_requests=np.zeros(1, np.uint32))
    assert refusal(MetricsError, estimate, chosen(TABLE, HALF), invalid)[0] == "invalid_work"


def test_ready_is_that_of_the_models_that_answer(never_compiles):
    cold = regression(role="decode")
    assert chosen(TABLE, cold).ready and not chosen(cold, TABLE).ready
    assert estimate(alternating(TABLE, HALF, 0), Work.decode([2, 3], 64)).latency_ms[0] == 1.03125
    assert alternating(cold, TABLE, 2).ready and not alternating(TABLE, cold, 0, 1, 2, 3).ready


def test_it_nests_is_corrected_and_serves_the_facade():
    inner = alternating(TABLE, HALF, 0)
    outer = chosen(inner, TABLE)
    assert estimate(outer, Work.decode(2, 64)).latency_ms == estimate(HALF, Work.decode(2, 64)).latency_ms
    work = Work.decode([2] * 8, [64] * 8)
    taught = outer.update(Observations.of(work, estimate(TABLE, work).latency_ms))
    assert taught.stable.count[0] == taught.count[0] == 8
    assert (taught.stable.active[0], taught.active[0]) == (0, 1)  # both changed, at the fifth row
    fixed = corrected(inner, Observations.of(Work.decode([2] * 5, [64] * 5), [3.0] * 5))
    assert np.isclose(estimate(fixed, Work.decode(2, 64)).latency_ms, 2 * estimate(HALF, Work.decode(2, 64)).latency_ms)
    facade = ForwardPassPerfModel(inner)
    assert facade.estimate_forward_pass_time_ms(decode(2, 64)) == estimate(HALF, Work.decode(2, 64)).latency_ms
    assert facade.estimate_forward_pass_time_ms(prefill(1, 16)) == 18.0


def test_saved_and_loaded(tmp_path):
    stream = decode_stream(3, 40)
    fitted = chosen(TABLE, regression(role="decode"), stream, warmup=2)
    for i, model in enumerate((fitted, chosen(with_intervals(TABLE), corrected(HALF)), chosen(fitted, TABLE))):
        for suffix in ("npz", "parquet"):
            save_model(model, tmp_path / f"{i}.{suffix}")
            again = load_model(tmp_path / f"{i}.{suffix}")
            same(again, model)
            same(again.update(stream), model.update(stream))
    stack = jax.tree.map(lambda *x: np.stack(x), fitted, fitted)
    save_model(stack, tmp_path / "stack.npz")
    same(load_model(tmp_path / "stack.npz"), stack)
    for wrong in ({"count": np.zeros(3, np.int64)}, {"stable": CELL}, {"stable": direct(CELL, verify_width=2)}):
        assert refusal(ModelFileError, save_model, replace(fitted, **wrong), tmp_path / "wrong.npz")[0] == "shape"


def test_what_does_not_go_together_is_refused_by_name():
    for wrong in (None, CELL, Chosen, "model"):
        assert refusal(FpmError, chosen, wrong, TABLE)[0] == refusal(FpmError, chosen, TABLE, wrong)[0] == "not_a_model"
    stack = jax.tree.map(lambda *x: np.stack(x), TABLE, TABLE)
    assert refusal(FpmError, chosen, TABLE, stack)[0] == "stacked"
    rounds = SimpleNamespace(composition="whole_forward", execution="speculative_round")
    operators = SimpleNamespace(composition="operators", execution="autoregressive")
    assert refusal(OptionError, chosen, TABLE, rounds)[0] == "execution"
    assert refusal(OptionError, chosen, TABLE, operators)[0] == "composition"
    assert refusal(OptionError, chosen, TABLE, direct(CELL, verify_width=2))[0] == "verify_width"
    assert chosen(direct(CELL, verify_width=2), direct(CELL, verify_width=2)).verify_width == 2
    for name, values in (
        ("alpha", (0, -1, 1.1, float("nan"), "0.4", True, None)),
        ("margin", (-0.1, 1, float("inf"), None)),
        ("warmup", (0, 1.5, True, None, 2**70)),
        ("persistence", (0, "1", -3)),
    ):
        for value in values:
            assert refusal(OptionError, chosen, TABLE, HALF, **{name: value})[0] == name
    update = jax.jit(lambda model: model.update(seen([0], [1.0])).count)
    assert refusal(FpmError, update, chosen(TABLE, HALF))[0] == "traced"
