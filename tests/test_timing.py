"""A model remembers the clock of what it learned, and takes no other one unless that is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from fitted import decoding
from small_tables import cell_of, surface
from streams import decode_stream
from table_pairs import refusal

from fpmjax import (
    Observations,
    Work,
    chosen,
    corrected,
    direct,
    estimate,
    learned,
    learned_fleet,
    load_model,
    regression,
    save_model,
    stack,
    update_many,
)
from fpmjax.errors import OptionError
from fpmjax.models.intake import joined_timing

A, B = "execute_model_cuda", "scheduler_wall_time"
TABLE = direct(cell_of(surface([1, 2, 4, 8], [0, 1024, 65536])))
COLD = regression(role="decode")


def seen(timing: str, seed: int = 1, n: int = 20) -> Observations:
    return replace(decode_stream(seed, n), timing=timing)


MODELS: dict[str, Any] = {
    "regression": COLD,
    "corrected": corrected(TABLE, max_batch_size=4096),
    "chosen": chosen(TABLE, COLD),
    "chosen tables": chosen(TABLE, TABLE),
    "corrected chosen": corrected(chosen(TABLE, COLD)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_first_named_clock_stays(name, tmp_path):
    model = MODELS[name]
    assert model.timing == "unspecified"
    model = model.update(seen("unspecified"))
    assert model.timing == "unspecified"
    model = model.update(seen(A)).update(seen("unspecified"))
    assert model.timing == A
    save_model(model, tmp_path / "model.npz")
    for each in (model, load_model(tmp_path / "model.npz")):
        code, message = refusal(each.update, seen(B), error=OptionError)
        assert code == "timing" and A in message and B in message and "mixed_timing=True" in message
        assert each.update(seen(A)).timing == A


@pytest.mark.parametrize("name", MODELS)
def test_mixed_is_a_permission_and_stays_one(name):
    model = MODELS[name].update(seen(A))
    both = Observations.concat([seen(A), seen(B)], mixed_timing=True)
    assert both.timing == "mixed"
    model = model.update(both)
    assert model.timing == "mixed"
    assert model.update(seen(B)).update(seen("unspecified")).timing == "mixed"


@pytest.mark.parametrize(
    "first, second, both",
    [(A, A, A), ("unspecified", A, A), ("unspecified", "mixed", "mixed"), ("mixed", A, "mixed")],
)
def test_the_rule(first, second, both):
    assert joined_timing(first, second) == joined_timing(second, first) == both


def test_stacks_are_of_one_clock():
    a, b = (regression(seen(t), role="decode") for t in (A, B))
    for other in (b, COLD):
        code, message = refusal(stack, [a, other], error=OptionError)
        assert code == "models" and "timing" in message
    both = stack([a, a])
    assert refusal(update_many, both, seen(B, n=2), np.array([0, 1]), error=OptionError)[0] == "timing"
    assert update_many(both, seen(A, n=2), np.array([0, 1])).timing == A
    assert update_many(stack([COLD, COLD]), seen(B, n=2), np.array([0, 1])).timing == B


def test_models_around_others_begin_with_their_clock():
    a, b = (regression(seen(t), role="decode") for t in (A, B))
    assert corrected(a).timing == A
    assert refusal(corrected, a, seen(B), error=OptionError)[0] == "timing"
    assert chosen(TABLE, a).timing == A
    assert refusal(chosen, a, b, error=OptionError)[0] == "timing"
    assert refusal(chosen(TABLE, a).update, seen(B), error=OptionError)[0] == "timing"


def test_a_learned_model_has_the_clock_of_its_fit(tmp_path):
    few = decoding(8)  # too few to be fitted, so that nothing compiles
    model = learned(replace(few, timing=A), role="decode")
    assert model.timing == A
    save_model(model, tmp_path / "model.npz")
    assert load_model(tmp_path / "model.npz").timing == A
    assert refusal(corrected, model, seen(B), error=OptionError)[0] == "timing"
    fleet = [replace(few, timing=t) for t in (A, B)]
    assert refusal(learned_fleet, fleet, role="decode", error=OptionError)[0] == "timing"
    assert learned_fleet([fleet[0]] * 2, role="decode").timing == A


def test_the_clock_changes_no_answer_and_is_no_leaf():
    plain, named = regression(seen("unspecified"), role="decode"), regression(seen(A), role="decode")
    work = Work.decode([1, 5], [100, 9000])
    assert estimate(plain, work).latency_ms.tobytes() == estimate(named, work).latency_ms.tobytes()
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(named))


# Times that no pass can have taken


def absurd(ms: float) -> Observations:
    """Made by hand; the constructors leave such times out."""
    work = jax.tree.map(lambda x: x[:1], seen(A).work)
    return Observations(work, np.array([ms]))


@pytest.mark.parametrize("ms", [1e160, 1e11, np.inf, np.nan, 0.0, -1.0])
@pytest.mark.parametrize("name", MODELS)
def test_absurd_times_neither_teach_nor_spoil(name, ms):
    model = MODELS[name].update(seen(A))
    after = model.update(absurd(ms))
    assert jax.tree.structure(after) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(after), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_absurd_times_spoil_no_model_of_a_stack():
    ready = regression(seen(A), role="decode")
    after = update_many(stack([ready, ready]), absurd(1e160), np.array([1]))
    assert np.asarray(after.learners.plane.ready).all() and np.isfinite(after.learners.y).all()


def test_why_there_is_no_answer_is_true():
    work = Work.decode([1, 2, 4, 8, 16], [100, 300, 900, 4000, 10000])
    huge = regression(
        Observations.of(work, [1.0, 2.0, 3.0, 4.0, 5.0]),
        role="decode",
        feature_axes=("attention",),
        sampling_axes=("attention",),
        bins_per_axis=(4,),
        attention_kv_weight=1e160,
    )
    level = regression(Observations.of(work, [3.0] * 5), role="decode")
    for model, words in ((huge, "too large to be fitted"), (level, "rises with none")):
        assert not model.ready and words in refusal(estimate, model, work)[1]


# What stands on the host says so


def test_stacking_and_showing_while_traced():
    ready = regression(seen(A), role="decode")
    model = corrected(ready, policy="hybrid")
    both = chosen(TABLE, ready)
    shown: list[str] = []

    def traced(*models: Any) -> Any:
        assert refusal(stack, [models[0]] * 2)[0] == "traced"
        shown.extend(map(repr, models))
        return 0

    jax.jit(traced)(ready, model, both)
    assert shown[1] == "Corrected(Regression, policy='hybrid')" and shown[2] == "Chosen(Direct, Regression)"
    assert repr(both) == "Chosen(Direct, Regression, 0 scored)"
    assert repr(ready) == f"Regression(role='decode', axes=attention/moe, timing={A!r}, 20 retained)"
    for each in (ready, model, both):
        assert "\n" not in repr(each) and len(repr(each)) < 120 and "2 models" in repr(stack([each, each]))


def test_positions_of_other_types_and_while_traced():
    models, few = stack([COLD, COLD]), seen(A, n=2)
    for which in (few, "ab", {}, object(), [[0], [0, 1]], None):
        assert refusal(update_many, models, few, which, error=OptionError)[0] == "which"
    assert jax.jit(lambda which: refusal(update_many, models, few, which)[0] == "traced" or 0)(np.array([0, 1]))
