"""What `fpmjax fit` can be told: every option of the Python API, and models that go on learning."""

from __future__ import annotations

import numpy as np
import pytest

import fpmjax
from fpmjax import ErrorThreshold, Knots, Observations, Work
from fpmjax.cli import recipe
from fpmjax.observe.features import AXES, need_lists
from fpmjax.store import load_model, save_model

N = 300
PLAIN = ("--not-speculative",)
DECODE = (*PLAIN, "--role", "decode")


def decode_stream(n: int = N, seed: int = 5) -> Observations:
    """Decode of one rank; the second half of it is 1.5 times slower, which lazy fits miss."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 65, n)
    kv = batch * rng.integers(16, 4096, n)
    slow = np.where(np.arange(n) < n // 2, 1.0, 1.5)
    return Observations.of(Work.decode(batch, kv), slow * (4 + 0.02 * batch + kv / 6e4) * rng.lognormal(0, 0.02, n))


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """The stream, its halves, and a model of the first half, in the folder that is worked in."""
    monkeypatch.chdir(tmp_path)
    whole = decode_stream()
    whole.write("whole.parquet")
    whole[: N // 2].write("first.parquet")
    whole[N // 2 :].write("second.parquet")
    save_model(fpmjax.regression(whole[: N // 2], role="decode"), "m.npz")
    return whole


def same_bits(model, other) -> bool:
    work = Work.decode([1, 8, 64], [512, 20_000, 100_000])
    answers = [fpmjax.estimate(m, work, check=False).latency_ms for m in (model, other)]
    return np.array_equal(*answers, equal_nan=True)


# A new model


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--signed", {"non_negative": False}),
        ("--singular-ridge-scale 0.5", {"singular_ridge_scale": 0.5}),
        ("--attention-kv-weight 2 --ffn-token-weight 0.5", {"attention_kv_weight": 2.0, "ffn_token_weight": 0.5}),
        ("--lazy", {"lazy": ErrorThreshold(0.05, 1.0, 16, 8, 64)}),
        (
            "--lazy --relative-tolerance 0 --absolute-tolerance-ms 0.1 --window 5 --trigger 2 --cooldown 3 "
            "--startup-observations 20 --rebuild-interval 50",
            {"lazy": ErrorThreshold(0.0, 0.1, 5, 2, 3, 20), "rebuild_interval": 50},
        ),
        ("--spline", {"spline": Knots()}),
        ("--spline --knots-per-axis 3 --search-step 40", {"spline": Knots(3, 40)}),
        (
            "--spline --relative-tolerance 0.2 --absolute-tolerance-ms 0 --window 9 --trigger 4 --cooldown 7",
            {"spline": Knots(2, None, 9, 4, 0.2, 0.0, 7)},
        ),
    ],
)
def test_every_option_of_a_regression_has_its_flag(fpm, stream, flags, options):
    ran = fpm("fit", "whole.parquet", *DECODE, *flags.split(), "-o", "new.npz")
    assert ran.code == 0, ran
    model = load_model("new.npz")
    wanted = fpmjax.regression(stream, role="decode", **options)
    assert same_bits(model, wanted) and model.stores == wanted.stores
    assert all(np.array_equal(*pair) for pair in zip(vars(model.rules).values(), vars(wanted.rules).values()))  # noqa: B905


def test_options_of_a_correction(fpm, stream, embedded_cell):
    ask = ("fit", "whole.parquet", *PLAIN, "--correct", "m.npz")
    ran = fpm(*ask, "--factor-bounds", "none,1.1", "-o", "c.npz")
    assert ran.code == 0 and "are cut to the bounds 0 and 1.1" in ran.err
    assert load_model("c.npz").bounds.tolist() == [0.0, 1.1]
    assert load_model("c.npz").factors.max() <= 1.1
    fpm(*ask, "--factor-bounds", "2", "-o", "c.npz").refused("'2' is not LOW,HIGH")
    fpm(*ask, "--factor-bounds", "2,3", "-o", "c.npz").refused("--factor-bounds is (2.0, 3.0)")


def test_inspect_tells_what_is_unusual_about_a_fit(fpm, stream):
    fpm("fit", "whole.parquet", *DECODE, "--signed", "--lazy", "--rebuild-interval", 90, "-o", "new.parquet")
    text = fpm("inspect", "new.parquet").out
    assert "linear regression of decode work, signed slopes, refitted where rows are missed or 90 changes made" in text
    document = fpm("inspect", "new.parquet", "--json").document
    assert (document["signed"], document["lazy"], document["rebuild_interval"]) == (True, True, 90)


def test_the_help_lists_every_feature():
    words = recipe.FEATURES.replace(",", " ").replace(".", " ").replace(";", " ").split()
    plain, listed = words[: words.index("and")], words[words.index("also") + 1 :]
    assert plain[1:] == [name for name in AXES if not need_lists([name])]
    assert listed == [name for name in AXES if need_lists([name])]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--window 4", "--window needs --lazy or --spline"),
        ("--search-step 4", "--search-step needs --spline"),
        ("--lazy --knots-per-axis 2", "--knots-per-axis needs --spline"),
        ("--spline --startup-observations 2", "--startup-observations needs --lazy"),
        ("--rebuild-interval 2", "--rebuild-interval needs --lazy"),
        ("--spline --lazy", "--lazy does not go with --spline"),
        ("--spline --signed", "--signed does not go with --spline"),
        ("--spline --feature-axes n,moe", "--feature-axes n,moe does not go with --spline"),
        ("--spline --search-step 4 --window 9", "--window does not go with --search-step"),
        ("--spline --knots-per-axis 4", "--knots-per-axis=4 knots per axis must be 2 or 3"),
        ("--spline --max-observations 20", "--max-observations=20 must be at least 32"),
        ("--lazy --window 4 --trigger 5", "--trigger=5 must be at most --window=4"),
        ("--lazy --relative-tolerance x", "'x' is not a number"),
        ("--lazy --relative-tolerance nan", "--relative-tolerance=nan must be finite"),
        ("--lazy --absolute-tolerance-ms -1", "--absolute-tolerance-ms=-1.0 must be finite and nonnegative"),
        ("--spline --relative-tolerance 0", "--relative-tolerance=0.0 must be finite and positive"),
        ("--attention-kv-weight 0", "--attention-kv-weight=0.0 must be finite and positive"),
        ("--min-observations 70", "--min-observations=70 must be at most --max-observations=64"),
    ],
)
def test_options_that_make_no_sense_are_named(fpm, stream, tmp_path, flags, told):
    fpm("fit", "whole.parquet", *DECODE, *flags.split(), "-o", "new.npz").refused(told, "\nhint: ")
    assert not (tmp_path / "new.npz").exists()


# Parquet files of models, tables and observations


def test_a_model_in_parquet_is_no_table_and_no_observations(fpm, stream):
    ran = fpm("fit", "whole.parquet", *DECODE, "-o", "new.parquet")
    assert ran.code == 0 and same_bits(load_model("new.parquet"), fpmjax.regression(stream, role="decode"))
    ask = ("estimate", "new.parquet", "--batch", 8, "--kv", 4096, "--json")
    assert fpm(*ask).document["queries"][0]["status"] == "ok"
    assert fpm("evaluate", "new.parquet", "whole.parquet", *PLAIN).code == 0
    fpm("coverage", "new.parquet", "--traffic", "x").refused("new.parquet is a saved model, not a table")
    fpm("evaluate", "new.parquet", "new.parquet", *PLAIN).refused("new.parquet is a saved model, not observations")
    fpm("fit", "m.npz", *DECODE, "-o", "x.npz").refused("m.npz is a saved model, not observations", "--continue")
    fpm("fit", "whole.parquet", *DECODE, "-o", "first.parquet").refused("is no saved model, so it is not replaced")
    fpm("inspect", "whole.parquet").refused("whole.parquet holds observations, not a table")


# Going on


@pytest.mark.parametrize("output", ["next.npz", "next.parquet", "m.npz"])
def test_a_saved_model_goes_on_learning(fpm, stream, output):
    before = load_model("m.npz")
    ran = fpm("fit", "second.parquet", *PLAIN, "--continue", "m.npz", "-o", output, "--json")
    assert ran.code == 0 and ran.document["continued"] == "m.npz" and "continuing m.npz" in ran.err
    assert same_bits(load_model(output), before.update(stream[N // 2 :]))
    assert same_bits(load_model(output), fpmjax.regression(stream, role="decode"))
    assert output == "m.npz" or same_bits(load_model("m.npz"), before)


def test_the_rest_of_new_observations_is_scored(fpm, stream):
    ran = fpm("fit", "second.parquet", *DECODE, "--continue", "m.npz", "-o", "n.npz", "--first-share", 0.5, "--json")
    assert ran.document["learned"] == N // 4 and ran.document["scores"][0]["n"] == N // 2 - N // 4


def test_a_correction_goes_on_learning(fpm, stream, embedded_cell):
    ask = ("--correct", "embedded", "--select", "tp=1", "--policy", "hybrid")
    assert fpm("fit", "first.parquet", *PLAIN, *ask, "-o", "c.npz").code == 0
    assert fpm("fit", "second.parquet", *PLAIN, "--continue", "c.npz", "-o", "c.npz").code == 0
    wanted = fpmjax.corrected(fpmjax.direct(embedded_cell), stream, policy="hybrid")
    assert np.array_equal(load_model("c.npz").factors, wanted.factors)
    fpm("fit", "second.parquet", *DECODE, "--continue", "c.npz", "-o", "c.npz").refused("but c.npz is a correction")


@pytest.mark.parametrize(
    ("name", "flags", "told"),
    [
        ("m.npz", "--role prefill", "m.npz is a regression of decode work, not of prefill work"),
        ("m.npz", "--bins 2,2", "--bins makes a new model, but m.npz keeps its own options"),
        ("m.npz", "--min-observations 2", "--min-observations makes a new model"),
        ("m.npz", "--signed", "--signed makes a new model"),
        ("m.npz", "--window 4", "--window makes a new model"),
        ("m.npz", "--correct embedded", "--correct makes a new model"),
        ("m.npz", "--policy fixed", "--policy makes a new model"),
        ("m.npz", "--select tp=1", "--select makes a new model"),
        ("embedded", "", "embedded is a table, which learns nothing"),
        (".", "", ". is a table, which learns nothing"),
        ("first.parquet", "", "first.parquet is a table, which learns nothing"),
        ("none.npz", "", "none.npz does not exist"),
        ("text", "", "text is no saved model"),
        ("cut.npz", "", "no saved model, or a damaged one"),
        ("direct.npz", "", "direct.npz holds a measured table, which learns nothing"),
        ("stack.npz", "", "stack.npz holds a stack of models"),
    ],
)
def test_what_cannot_go_on_is_told_by_name(fpm, stream, embedded_cell, tmp_path, name, flags, told):
    from fpmjax.models.regression import stack

    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:900])
    save_model(fpmjax.direct(embedded_cell), "direct.npz")
    save_model(stack([load_model("m.npz")] * 2), "stack.npz")
    ask = ("fit", "second.parquet", *PLAIN, "--continue", name, *flags.split(), "-o", "n.npz")
    fpm(*ask).refused(told, "\nhint: ")
    assert not (tmp_path / "n.npz").exists()


def test_work_of_another_role_is_not_learned(fpm, stream, tmp_path):
    Observations.of(Work.prefill([1, 2], [100, 200]), [3.0, 4.0]).write("prefill.parquet")
    before = (tmp_path / "m.npz").read_bytes()
    ask = ("fit", "prefill.parquet", *PLAIN, "--continue", "m.npz", "-o", "m.npz")
    fpm(*ask).refused("observation 0", "decode worker")
    assert (tmp_path / "m.npz").read_bytes() == before
