"""Learned families and learned artifacts at the shell: fitted, told, asked, scored and drawn as by the API."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from forests import artifact, stump

import fpmjax
from fpmjax import Observations, Work
from fpmjax.cli.fit import tell_anchors
from fpmjax.store import load_model, save_model

N = 120
HARDWARE = "--weight-bytes 16e9 --flops-per-token 16e9 --kv-bytes-per-token 131072 --bandwidth 2e12 --flops 1.6e14"
FLAGS = ("--not-speculative", "--role", "decode", "--family", "committee", *HARDWARE.split())


def decode_stream(n: int = N, seed: int = 3) -> Observations:
    """Decode of one rank, 8 + 0.02 B + K / 30000 ms, up to B = 32."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 33, n)
    kv = batch * rng.integers(64, 4096, n)
    return Observations.of(Work.decode(batch, kv), (8 + 0.02 * batch + kv / 3e4) * rng.lognormal(0, 0.02, n))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The stream, models of its first 100 observations and of 4, an artifact."""
    where = tmp_path_factory.mktemp("learned")
    stream = decode_stream()
    stream.write(where / "seen.parquet")
    stream[:4].write(where / "few.csv")
    hardware = fpmjax.Hardware(16e9, 16e9, 131072, 2e12, 1.6e14)
    model = fpmjax.learned(stream[:100], role="decode", hardware=hardware)
    save_model(model, where / "m.npz")
    save_model(model, where / "m.parquet")
    save_model(fpmjax.corrected(model), where / "corrected.npz")
    save_model(fpmjax.chosen(fpmjax.regression(stream[:60], role="decode"), model, stream[60:]), where / "chosen.npz")
    (where / "trees.json").write_text(json.dumps(artifact([stump(4.0)])))
    return where


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return load_model("m.npz")


# Fitting


@pytest.mark.parametrize("name", ["new.npz", "new.parquet"])
def test_a_fit_is_that_of_the_api_and_is_told(fpm, here, tmp_path, name):
    ask = ("fit", "seen.parquet", *FLAGS, "--first-share", 0.84, "-o", tmp_path / name, "--draft-length", "1:3")
    ran = fpm(*ask, "--json")
    assert ran.code == 0, ran
    model, work = load_model(tmp_path / name), Work.decode([1, 8, 30], [500, 9000, 60_000])
    assert np.array_equal(fpmjax.estimate(model, work).latency_ms, fpmjax.estimate(here, work).latency_ms)
    document = ran.document
    assert (document["kind"], document["families"]) == ("Learned", ["linear", "broad", "datasheet"])
    (store,) = document["stores"]
    assert store["ready"] and store["observations"] == 100 and store["box"]["decode_rows"] == [1.0, 32.0]
    wanted = fpmjax.recommend_anchors(decode_stream()[:100], draft_lengths=(1, 2, 3))
    assert document["anchors"] == [anchor._asdict() for anchor in wanted] and wanted
    assert document["lacks"] == {} and document["scores"][0]["interval_level"] == 0.9
    assert "pure_decode: ready, 100 observations, its range from" in ran.err
    assert "box batch 1..32, KV " in ran.err and f"batch {wanted[0].decode_requests:,}, " in ran.err


def test_options_of_a_family_reach_the_model(fpm, here, tmp_path):
    more = ("--cuda-graph-batch-sizes", "1,2,4:32:4", "--key", 7, "--level", 0.5, "--allow-extrapolation")
    ask = ("fit", "seen.parquet", "--not-speculative", "--role", "decode", "--family", "linear", *more)
    ran = fpm(*ask, "-o", tmp_path / "m.npz", "--json")
    model = load_model(tmp_path / "m.npz")
    assert ran.document["cuda_graph_batch_sizes"] == model.graph_sizes.tolist() == [1, 2, *range(4, 33, 4)]
    assert ran.document["allow_extrapolation"] and np.isinf(model.anchor)
    assert (model.families, model.level) == (("linear",), 0.5)
    assert "any draft length" in fpm("inspect", tmp_path / "m.npz").out


def test_what_observations_lack_is_told(fpm, here, tmp_path):
    ask = ("-o", tmp_path / "m.npz", "--role", "aggregated", "--family", "roofline", "--not-speculative")
    ran = fpm("fit", "few.csv", *ask)
    ran.refused("pure_decode: not ready, 4 observations, but a fit takes at least 16", "no store is ready", code=3)
    rng = np.random.default_rng(0)
    alike = Observations.of(Work.decode([4] * 20, rng.integers(4, 4000, 20)), rng.uniform(8, 9, 20))
    alike.write(tmp_path / "alike.csv")
    ran = fpm("fit", tmp_path / "alike.csv", *ask, "--json")
    assert ran.code == 3 and ran.document["lacks"]["pure_decode"].startswith(
        "20 observations with 1 distinct values of"
    )
    assert not load_model(tmp_path / "m.npz").ready
    told = fpm("estimate", tmp_path / "m.npz", "--batch", 2, "--kv", 100)
    assert told.code == 3 and "not_ready" in told.out and "hint: a fit takes at least 16" in told.err


def test_a_slip_of_a_unit_is_noticed(fpm, here, tmp_path):
    for slip, told in (("--bandwidth 1e9", "takes 1.6e+04 ms"), ("--weight-bytes 16e7", "takes 0.08 ms")):
        flag = slip.split()[0]
        hardware = [slip if words.startswith(flag) else words for words in HARDWARE.replace(" --", "\n--").split("\n")]
        ask = ("fit", "seen.parquet", *FLAGS[:5], *" ".join(hardware).split(), "-o", tmp_path / "m.npz")
        ran = fpm(*ask)
        assert ran.code == 0 and told in ran.err and "of one rank?" in ran.err
    assert "of one rank?" not in fpm("fit", "seen.parquet", *FLAGS, "-o", tmp_path / "m.npz").err


def test_no_anchor_is_told_too(capsys):
    tell_anchors(())
    assert "anchors: none needed" in capsys.readouterr().err
    tell_anchors(None)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--weight-bytes 1e9",
            "--weight-bytes needs --flops-per-token, --kv-bytes-per-token, --bandwidth, --flops too",
        ),
        (HARDWARE.replace("2e12", "0"), "--bandwidth of the hardware is 0.0"),
        ("--level 1.5", "--level is 1.5"),
        ("--level x", "'x' is not a number"),
        ("--cuda-graph-batch-sizes 0", "--cuda-graph-batch-sizes is (0,)"),
        ("--bins 2,2", "--bins belongs to a regression\nhint: leave it out, or --family committee"),
        ("--max-observations 9", "--max-observations belongs to a regression"),
        ("--spline", "--spline belongs to a regression"),
        ("--policy fixed", "--policy belongs to a correction"),
        ("--draft-length 0", "draft_length"),
        ("--plot fit.pdf", "'fit.pdf' is no picture by its name"),
        ("--plot none/fit.png", "the folder none does not exist"),
        ("--keys 3", "did you mean --key?"),
        ("--continue m.npz", "m.npz is a learned model, which is fitted to all observations at once"),
        ("--continue trees.json", "trees.json is a learned artifact, which learns nothing"),
        ("--continue regression.npz", "--family committee does not go with --continue"),
    ],
)
def test_a_mistake_is_told_by_name(fpm, here, tmp_path, monkeypatch, flags, told):
    save_model(fpmjax.regression(role="decode"), "regression.npz")
    ask = ("fit", "seen.parquet", "--not-speculative", "--role", "decode", "--family", "committee")
    fpm(*ask, *flags.split(), "-o", tmp_path / "new.npz").refused(told, "\nhint: ")
    assert not (tmp_path / "new.npz").exists()


def test_flags_of_a_family_do_not_go_with_other_models(fpm, here, tmp_path):
    ask = ("fit", "seen.parquet", "--not-speculative", "-o", tmp_path / "new.npz")
    fpm(*ask, "--role", "decode", "--key", 0).refused("--key belongs to a learned model", "add --family committee")
    fpm(*ask, "--role", "decode", "--draft-length", 2).refused("--draft-length belongs to a learned family")
    fpm(*ask, "--correct", "m.npz", "--flops", 1).refused("--flops belongs to a learned model", "--correct")
    fpm(*ask, "--correct", "m.npz", "--family", "linear").refused("--family belongs to a regression or a learned model")
    fpm(*ask, "--continue", "m.npz").refused("m.npz is a learned model", "hint: fit again with all of them")
    fpm(*ask, "--continue", "chosen.npz", "--role", "decode").refused("but chosen.npz is a choice between two models")
    fpm("fit", "seen.parquet", *FLAGS, "-o", "trees.json").refused("trees.json exists and is no saved model")
    fpm("fit", "trees.json", *FLAGS, "-o", tmp_path / "new.npz").refused("trees.json is a learned artifact, not observ")


def test_a_learned_model_is_corrected(fpm, here, tmp_path):
    ran = fpm("fit", "seen.parquet", "--not-speculative", "--correct", "m.npz", "-o", tmp_path / "c.npz")
    assert ran.code == 0 and "over learned from decode work: linear, roofline" in ran.err
    assert "range" in fpm("estimate", tmp_path / "c.npz", "--batch", 4, "--kv", 4000).out


# Asking


def test_estimates_carry_their_range_and_support(fpm, here):
    ask = ("estimate", "m.npz", "--batch", "8,40,200", "--kv-per-request", 1024, "--draft-length", "0,1")
    document = fpm(*ask, "--json").document
    found = {(q["work"][0]["decode_requests"], q["draft_length"]): q for q in document["queries"]}
    plain = fpmjax.estimate(here, Work.decode([8, 40, 200], [8192, 40_960, 204_800]))
    near, far = found[8, 0], found[40, 0]
    assert near["interval"] == {
        "low_ms": plain.interval.low_ms[0],
        "high_ms": plain.interval.high_ms[0],
        "level": 0.9,
        "calibrated_on": 100,
    }
    assert near["support"]["extrapolated"] is False and near["support"]["e_folds"] == 0.0
    assert far["support"]["extrapolated"] is True and far["support"]["e_folds"] == plain.support.distance[1]
    drafted = found[8, 1]
    assert drafted["interval"]["low_ms"] < drafted["latency_ms"] < drafted["interval"]["high_ms"]
    assert found[200, 1]["status"] == "not_ready" and found[200, 1]["interval"] is found[200, 1]["support"] is None
    text = fpm(*ask)
    assert text.code == 0 and "90 % range" in text.out and "extrapolated 0.22" in text.out and "supported" in text.out
    assert "`fpmjax fit --draft-length LIST`" in text.err and "--allow-extrapolation" in text.err
    refused = fpm("estimate", "m.npz", "--batch", 200, "--kv", 900_000, "--draft-length", 1)
    assert refused.code == 3 and "400 decode rows a rank" in refused.err


def test_an_artifact_stands_where_a_model_does(fpm, here, tmp_path):
    document = fpm("estimate", "trees.json", "--batch", "4,5", "--kv", 100, "--json").document
    assert [q["latency_ms"] for q in document["queries"]] == [1.0, 2.0] and document["kind"] == "Forest"
    assert "support" not in document["queries"][0]
    shown = fpm("inspect", "trees.json")
    assert "learned trees of decode work" in shown.out and "by the trainer of aisimulate" in shown.out
    assert fpm("inspect", "trees.json", "--json").document["target"] == "ms"
    assert fpm("evaluate", "trees.json", "seen.parquet", "--not-speculative").code == 0
    (tmp_path / "bad.json").write_text(json.dumps(artifact([stump()]) | {"features": ["x"]}))
    fpm("estimate", tmp_path / "bad.json", "--batch", 1, "--kv", 1).refused('unknown feature "x"', "\nhint: ")
    fpm("estimate", "trees.json", "--batch", 1, "--kv", 1, "--select", "tp=1").refused("--select is about tables")
    fpm("coverage", "trees.json", "--traffic", "x").refused("trees.json is a saved model, not a table")


@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        (
            "m.npz",
            ["kind      learned from decode work", "range     holds 90 %", "box       batch 1..32, KV"],
            "families",
        ),
        ("m.parquet", ["kind      learned from decode work"], "families"),
        ("corrected.npz", ["kind      correction", "over      learned from decode work"], "over"),
        ("chosen.npz", ["kind      of two models", "choice    pure_decode: the", "other     learned from"], "choices"),
        ("trees.json", ["features  num_decode_requests", "stores    pure_decode"], "features"),
    ],
)
def test_inspect_describes_every_kind(fpm, here, name, words, key):
    text = fpm("inspect", name).out
    assert all(line in text for line in words), text
    assert key in fpm("inspect", name, "--json").document


def test_inspect_describes_a_table_with_intervals(fpm, embedded_cell, tmp_path):
    save_model(fpmjax.with_intervals(fpmjax.direct(embedded_cell)), tmp_path / "t.npz")
    text = fpm("inspect", tmp_path / "t.npz").out
    assert "direct rule over" in text and "range     holds 90 %" in text and "width     decode cross_batch" in text
    assert fpm("inspect", tmp_path / "t.npz", "--json").document["over"]["cell"]["tp"] == 1
    asked = fpm("estimate", tmp_path / "t.npz", "--batch", 8, "--kv", 8192, "--json").document["queries"][0]
    assert asked["interval"]["low_ms"] < asked["latency_ms"] and "support" not in asked


def test_a_stack_is_refused(fpm, here, tmp_path):
    import jax

    save_model(jax.tree.map(lambda x: np.stack([x, x]), here), tmp_path / "stack.npz")
    fpm("estimate", tmp_path / "stack.npz", "--batch", 1, "--kv", 1).refused("holds a stack of models")


# Scores


def test_evaluate_shows_what_the_model_states(fpm, here):
    ask = ("evaluate", "m.npz", "seen.parquet", "--not-speculative")
    document = fpm(*ask, "--json").document
    assert {row["by"] for row in document["scores"]} == {None, "kind", "batch", "support"}
    total = document["scores"][0]
    wanted = fpmjax.evaluate(here, decode_stream(), blocks=1).to_pylist()[0]
    assert total["interval_coverage"] == wanted["interval_coverage"] > 0.8
    assert total["extrapolated"] == wanted["extrapolated"]
    text = fpm(*ask).out
    assert "in 90 %" in text and "outside" in text and "supported" in text
    plain = fpm("evaluate", "trees.json", "seen.parquet", "--not-speculative")
    assert "in 90 %" not in plain.out and "outside" not in plain.out
    only = fpm(*ask, "--by", "support", "--json").document["scores"]
    assert {row["by"] for row in only} == {None, "support"}


# Pictures


@pytest.mark.parametrize("name", ["fit.png", "fit.svg"])
def test_a_fit_is_drawn(fpm, here, tmp_path, name):
    pytest.importorskip("matplotlib")
    ask = ("fit", "seen.parquet", "--not-speculative", "--role", "decode", "--first-share", 0.8, "--by", "none")
    ran = fpm(*ask, "-o", tmp_path / "r.npz", "--plot", tmp_path / name, "--draft-length", 2)
    assert ran.code == 0 and (tmp_path / name).stat().st_size > 10_000
    fpm(*ask, "-o", tmp_path / "r.png", "--plot", tmp_path / "r.png").refused("is to be the model and the picture")


def test_without_matplotlib_a_fit_says_what_to_install(fpm, here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ask = ("fit", "seen.parquet", "--not-speculative", "--role", "decode", "-o", tmp_path / "r.npz")
    fpm(*ask, "--plot", tmp_path / "x.png").refused("matplotlib", "hint: pip install 'fpmjax[plot]'")
    assert fpm(*ask).code == 0
