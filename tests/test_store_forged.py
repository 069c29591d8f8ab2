"""Files whose digest is right but whose content is made up: refused when they are loaded, not found out later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from small_tables import cell_of, surface
from streams import decode_stream
from table_pairs import refusal
from test_store import forge

from fpmjax import (
    Observations,
    Work,
    chosen,
    corrected,
    direct,
    estimate,
    load_model,
    regression,
    save_model,
    stack,
    with_intervals,
)
from fpmjax.errors import ModelFileError
from fpmjax.models.settings import ErrorThreshold, Knots

TABLE = direct(cell_of([*surface([1, 2, 4, 8], [0, 1024, 4096]), ("prefill", 1, 64, 0, 2.0)]))
SEEN = Observations.of(Work.decode([1, 2, 4, 8, 2], [1024] * 5), [2.5, 4.0, 6.0, 11.0, 3.3])
FIT = regression(decode_stream(1, 60), role="decode")
MODELS: dict[str, Any] = {
    "table": TABLE,
    "regression": FIT,
    "lazy": regression(decode_stream(1, 60), role="decode", lazy=ErrorThreshold(0.1, 0.2, 5, 2, 3)),
    "spline": regression(decode_stream(1, 60), role="decode", spline=Knots(2)),
    "hybrid": corrected(TABLE, SEEN, policy="hybrid"),
    "chosen": chosen(TABLE, FIT, SEEN),
    "intervals": with_intervals(TABLE),
}
FORGED = [
    ("table", ".decode.knots.x", 0),
    ("table", ".decode.knots.at", 3),
    ("table", ".decode.knots.ms", np.inf),
    ("table", ".decode.knots.ms", 0.0),
    ("table", ".prefill.knots.ms", np.nan),
    ("regression", ".learners.grid.bins", 0),
    ("regression", ".learners.grid.bins", 2**31),
    ("regression", ".learners.grid.cell", 16),
    ("regression", ".learners.grid.cell", -1),
    ("regression", ".learners.grid.crowd", 2**62),
    ("regression", ".learners.grid.capacity", 0),
    ("regression", ".learners.grid.capacity", 65),
    ("regression", ".learners.grid.lo", 1e9),
    ("regression", ".learners.grid.lo", -np.inf),
    ("regression", ".learners.grid.hi", np.nan),
    ("regression", ".learners.y", np.nan),
    ("regression", ".learners.x", np.inf),
    ("regression", ".learners.plane.std", 0.0),
    ("regression", ".rules.min_observations", 0),
    ("regression", ".rules.min_observations", 65),
    ("regression", ".rules.ridge", np.nan),
    ("regression", ".weights", 0.0),
    ("lazy", ".rules.window", 17),
    ("lazy", ".rules.window", 0),
    ("spline", ".learners.spline.scale", 0.0),
    ("spline", ".learners.spline.knots", np.nan),
    ("hybrid", ".fixed[0].grid.bins", 0),
    ("hybrid", ".fixed[1].grid.bins", 64),
    ("hybrid", ".fixed[1].grid.hi", np.inf),
    ("hybrid", ".fixed[1].ratio", np.inf),
    ("hybrid", ".fixed[1].ratio", 0.0),
    ("hybrid", ".local[1].ratio", -np.inf),
    ("hybrid", ".local[1].recent", 0.0),
    ("hybrid", ".local[1].window", 0),
    ("hybrid", ".local[1].window", 2**40),
    ("hybrid", ".local[1].budget", 64),
    ("hybrid", ".local[1].bins", 0),
    ("hybrid", ".local[1].seen", -1),
    ("hybrid", ".local[1].seen_at", 2**40),
    ("hybrid", ".boxes.factor", np.inf),
    ("hybrid", ".boxes.factor", 0.0),
    ("hybrid", ".boxes.otherwise", np.nan),
    ("hybrid", ".bounds", 0.0),
    ("hybrid", ".min_observations", 0),
    ("hybrid", ".model.decode.knots.x", 0),
    ("chosen", ".active", 2),
    ("chosen", ".active", -1),
    ("chosen", ".alpha", 0.0),
    ("chosen", ".margin", np.nan),
    ("chosen", ".warmup", 0),
    ("chosen", ".count", -1),
    ("chosen", ".error", np.inf),
    ("chosen", ".stable.decode.knots.at", 3),
    ("intervals", ".divisor", 0.0),
    ("intervals", ".divisor", np.inf),
    ("intervals", ".count", -1),
]


def with_numbers(model: Any, path: str, value: Any) -> Any:
    """The model with one array full of a value."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(model)
    assert path in [jax.tree_util.keystr(p) for p, _ in leaves]
    changed = [np.full_like(x, value) if jax.tree_util.keystr(p) == path else x for p, x in leaves]
    return jax.tree.unflatten(tree, changed)


@pytest.mark.parametrize("name, field, value", FORGED)
def test_numbers_out_of_range_are_refused(name, field, value, tmp_path, monkeypatch):
    model = MODELS[name]
    broken = with_numbers(model, field, value)
    assert refusal(save_model, broken, tmp_path / "model.npz", error=ModelFileError)[0] == "shape"
    with monkeypatch.context() as patched:
        patched.setattr("fpmjax.store.fault_of", lambda model: None)
        save_model(broken, tmp_path / "model.npz")
    assert refusal(load_model, tmp_path / "model.npz", error=ModelFileError)[0] == "shape"


@pytest.mark.parametrize("field, value", [(f, v) for name, f, v in FORGED if name == "regression"])
def test_also_where_only_one_of_a_stack_is(field, value, tmp_path):
    broken = jax.tree.map(lambda a, b: np.stack([a, b]), FIT, with_numbers(FIT, field, value))
    assert refusal(save_model, broken, tmp_path / "model.npz", error=ModelFileError)[0] == "shape"
    save_model(stack([FIT, FIT]), tmp_path / "model.npz")


@pytest.mark.parametrize(
    "policy, options",
    [
        (policy, options)
        for policy in ("fixed", "dynamic_local", "hybrid")
        for options in (
            {"bins": (1, 1), "max_observations": 1, "min_observations": 1},
            {"bins": (3, 7), "max_observations": 5, "factor_bounds": (None, None)},
            {"bins": (9, 9), "max_observations": 200},
        )
    ],
)
def test_nothing_that_updates_make_is_out_of_range(policy, options, tmp_path):
    model = corrected(TABLE, policy=policy, **options)
    for part in (SEEN, SEEN[1:3], Observations.concat([SEEN] * 20)):
        model = model.update(part)
        save_model(model, tmp_path / "model.npz")
        again = load_model(tmp_path / "model.npz")
        assert estimate(again, SEEN.work).latency_ms.tobytes() == estimate(model, SEEN.work).latency_ms.tobytes()


def set_timing(value: Any) -> Any:
    def change(manifest: dict, _: dict) -> None:
        manifest["model"]["fields"]["timing"] = value

    return change


def set_model(value: Any) -> Any:
    def change(manifest: dict, _: dict) -> None:
        manifest["model"]["fields"]["role"] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_model({"float": "0x1p99999"}),
        set_model({"float": "one"}),
        set_model({"float": 3}),
        set_model({"is": {}}),
        set_model({"is": 10**400}),
        set_timing({"is": ""}),
        set_timing({"is": None}),
        set_timing({"is": 3}),
        set_timing({"float": "nan"}),
        set_timing({"tuple": []}),
    ],
)
def test_foreign_values_in_a_manifest_are_refused(change, tmp_path):
    save_model(FIT, tmp_path / "model.npz")
    forge(tmp_path / "model.npz", change)
    assert refusal(load_model, tmp_path / "model.npz", error=ModelFileError)[0] in ("malformed", "shape")


def test_any_name_of_a_clock_comes_back(tmp_path):
    for timing in ("schlüssel", "\ud800", "a\0b"):
        save_model(replace(FIT, timing=timing), tmp_path / "model.npz")
        assert load_model(tmp_path / "model.npz").timing == timing
