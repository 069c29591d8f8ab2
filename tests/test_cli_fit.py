"""`fpmjax fit`, `evaluate`, and saved models in `estimate` and `inspect`: every answer is that of the Python API."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from commands import shell

import fpmjax
from fpmjax import Observations, Work
from fpmjax.store import load_model, save_model

N = 400
PLAIN = ("--not-speculative",)


def decode_stream(n: int = N, seed: int = 3, noise: float = 0.02) -> Observations:
    """Decode of one rank, 4 + 0.02 B + K / 60000 ms."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 65, n)
    kv = batch * rng.integers(16, 4096, n)
    return Observations.of(Work.decode(batch, kv), (4 + 0.02 * batch + kv / 6e4) * rng.lognormal(0, noise, n))


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """The stream as Parquet and as CSV."""
    folder = tmp_path_factory.mktemp("streams")
    for name in ("stream.parquet", "stream.csv"):
        decode_stream().write(folder / name)
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A saved decode regression of the whole stream."""
    path = tmp_path_factory.mktemp("models") / "decode.npz"
    save_model(fpmjax.regression(decode_stream(), role="decode"), path)
    return path


def trace_line(i: int, batch: int, ms: float) -> str:
    """Record i of one worker: `batch` requests with 1,000 past tokens each."""
    zero = {"num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0}
    zero |= {"num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_decode_kv_tokens": 0.0}
    scheduled = zero | {"num_decode_requests": batch, "sum_decode_kv_tokens": 1000 * batch, "sum_prefill_kv_tokens": 0}
    fpm = {"version": 1, "worker_id": "w", "dp_rank": 0, "counter_id": i, "wall_time": ms / 1000.0}
    fpm["timing_scope"] = "execute_model_cuda"
    event = {
        "schema": "dynamo.fpm.trace.v1",
        "source": {"namespace": "n", "component": "backend", "producer_id": "p"},
        "capture_mode": "full",
        "observed_at_unix_ms": 1_795_000_000_000 + 20 * i,
        "fpm": fpm | {"scheduled_requests": scheduled, "queued_requests": zero},
    }
    return json.dumps({"timestamp": 20 * i, "event": event})


def same_bits(model, other) -> bool:
    work = Work.decode([1, 8, 64], [512, 20_000, 100_000])
    answers = [fpmjax.estimate(m, work, check=False).latency_ms for m in (model, other)]
    return np.array_equal(*answers, equal_nan=True)


# Fitting


@pytest.mark.smoke
def test_a_fit_saves_the_model_that_the_api_makes(fpm, stream, tmp_path):
    ran = fpm("fit", stream / "stream.parquet", *PLAIN, "--role", "decode", "-o", tmp_path / "m.npz")
    assert (ran.code, ran.out) == (0, "")
    assert "400 iterations" in ran.err and "pure_decode: ready, 64 observations retained" in ran.err
    assert same_bits(load_model(tmp_path / "m.npz"), fpmjax.regression(decode_stream(), role="decode"))


def test_options_reach_the_model(fpm, stream, tmp_path):
    options = ("--min-observations", 20, "--max-observations", 40, "--bins", "2,3", "--feature-axes", "n,moe")
    ran = fpm("fit", stream / "stream.csv", *PLAIN, "--role", "aggregated", *options, "-o", tmp_path / "m.npz")
    assert ran.code == 0
    wanted = fpmjax.regression(
        decode_stream(),
        role="aggregated",
        min_observations=20,
        max_observations=40,
        bins_per_axis=(2, 3),
        feature_axes=("n", "moe"),
    )
    assert same_bits(load_model(tmp_path / "m.npz"), wanted)
    ran = fpm("fit", stream / "stream.csv", *PLAIN, "--role", "decode", "--spline", "-o", tmp_path / "m.npz")
    assert ran.code == 0 and load_model(tmp_path / "m.npz").learners.spline is not None
    axes = ("--sampling-axes", "attention")
    ran = fpm("fit", stream / "stream.csv", *PLAIN, "--role", "decode", *axes, "-o", tmp_path / "m.npz")
    assert ran.code == 0 and load_model(tmp_path / "m.npz").sampling_axes == ("attention",)


def test_the_first_share_is_learned_and_the_rest_is_scored(fpm, stream, tmp_path):
    ask = ("fit", stream / "stream.parquet", *PLAIN, "--role", "decode", "--first-share", 0.6, "-o", tmp_path / "m.npz")
    ran = fpm(*ask, "--by", "kind", "--json")
    whole = decode_stream()
    model = fpmjax.regression(whole[:240], role="decode")
    assert same_bits(load_model(tmp_path / "m.npz"), model)
    document, (total, *_) = ran.document, fpmjax.evaluate(model, whole[240:], by="kind", blocks=1).to_pylist()
    assert (document["observations"], document["learned"]) == (400, 240)
    assert document["stores"][0]["retained_observations"] == 64
    assert [(row["by"], row["group"]) for row in document["scores"]] == [(None, "all"), ("kind", "pure_decode")]
    scores = document["scores"][0]
    assert scores["mape_pct"] == total["mape_pct"] and (scores["first"], scores["last"]) == (240, 400)
    text = fpm(*ask, "--by", "kind")
    assert text.out.splitlines()[0].split()[:3] == ["by", "group", "n"]
    assert f"{total['mape_pct']:.2f}" in text.out
    later = fpm("evaluate", tmp_path / "m.npz", *ask[1:3], "--first-share", 0.6, "--by", "kind", "--json")
    assert later.document["scores"] == document["scores"]


def test_traces_artifacts_globs_and_columns_are_read_together(fpm, stream, tmp_path):
    lines = [trace_line(i, 1 + i % 9, 5.0 + i % 9) for i in range(40)]
    trace = tmp_path / "run.4192.000000.jsonl.gz"
    trace.write_bytes(gzip.compress("\n".join([*lines, "no json", ""]).encode()))
    ask = ("--not-speculative", "--role", "decode", "-o", tmp_path / "m.npz", "--json")
    ran = fpm("fit", tmp_path, *ask)
    assert ran.code == 0 and ran.document["observations"] == 40
    assert "bad_json, for example" in ran.err and "left out: 1 bad_json" in ran.err
    ran = fpm("fit", trace, stream / "*.parquet", *ask, "--mixed-timing")
    assert ran.document["observations"] == 440 and len(ran.document["read"]) == 2
    fpm("fit", trace, stream / "*.parquet", *ask).refused("different clocks", "--mixed-timing")
    ran = fpm("fit", trace, *ask, "--skip-first", 10)
    assert ran.document["observations"] == 30 and "10 skipped" in ran.err


def test_an_unready_fit_is_saved_and_says_so(fpm, tmp_path):
    decode_stream(3).write(tmp_path / "few.csv")
    ask = ("fit", tmp_path / "few.csv", *PLAIN, "-o", tmp_path / "m.npz")
    fpm(*ask, "--role", "decode").refused("no store is ready", code=3)
    assert not load_model(tmp_path / "m.npz").ready
    fpm("estimate", tmp_path / "m.npz", "--batch", 1, "--kv", 100).refused(
        "3 of its kind, pure_decode", code=3, out=fpm("estimate", tmp_path / "m.npz", "--batch", 1, "--kv", 100).out
    )
    ran = fpm("evaluate", tmp_path / "m.npz", tmp_path / "few.csv", *PLAIN)
    assert ran.code == 3 and "none of the 3 iterations has an answer (3 unready)" in ran.err
    fpm(*ask, "--correct", "embedded", "--select", "tp=1").refused("no factor is in use yet", code=3)


# Corrections


def test_a_correction_over_a_table_shows_its_factor(fpm, embedded_cell, tmp_path):
    rng = np.random.default_rng(5)
    batch = rng.integers(1, 64, 200)
    work = Work.decode(batch, batch * 2048)
    seen = Observations.of(work, 1.25 * fpmjax.estimate(fpmjax.direct(embedded_cell), work).latency_ms)
    seen.write(tmp_path / "seen.parquet")
    ask = ("fit", tmp_path / "seen.parquet", *PLAIN, "--correct", "embedded", "--select", "tp=1")
    box = ("--max-batch-size", 64, "--max-kv-tokens", 150_000, "--max-num-tokens", 100)
    ran = fpm(*ask, "--policy", "hybrid", *box, "-o", tmp_path / "c.npz", "--json")
    assert ran.code == 0 and ran.document["policy"] == "hybrid"
    assert ran.document["smallest_factor"] == pytest.approx(1.25)
    sizes = {"max_batch_size": 64, "max_kv_tokens": 150_000, "max_num_tokens": 100}
    model = fpmjax.corrected(fpmjax.direct(embedded_cell), seen, policy="hybrid", **sizes)
    assert np.array_equal(load_model(tmp_path / "c.npz").factors, model.factors)
    assert same_bits(load_model(tmp_path / "c.npz"), model)
    question = ("estimate", tmp_path / "c.npz", "--batch", 8, "--kv", 16_384, "--draft-length", "0,2")
    document = fpm(*question, "--detail", "--json").document
    plain, drafted = document["queries"]
    assert plain["correction_factor"] == pytest.approx(1.25) and document["cell"]["tp"] == 1
    assert plain["latency_ms"] == plain["native_latency_ms"] * plain["correction_factor"]
    assert drafted["latency_ms"] == drafted["scaling_factor"] * drafted["stp_latency_ms"]
    assert plain["ranks"][0]["lookups"]  # the measured rows behind the native answer
    text = fpm(*question).out
    assert "correction" in text and "native ms" in text and "1.2500" in text
    over = fpm("fit", tmp_path / "seen.parquet", *PLAIN, "--correct", tmp_path / "c.npz", "-o", tmp_path / "cc.npz")
    assert over.code == 0 and "over correction" in over.err


# Saved models in the other commands


def test_estimate_answers_from_a_saved_model_as_from_a_table(fpm, fitted, tmp_path):
    ask = ("estimate", fitted, "--batch", "1,8", "--kv-per-request", 512)
    document = fpm(*ask, "--draft-length", "0:3", "--json").document
    model = load_model(fitted)
    work = Work.decode([1, 8], [512, 4096])
    plain = fpmjax.estimate(model, work).latency_ms.tolist()
    drafted = fpmjax.estimate(model, work, draft_length=3).latency_ms.tolist()
    found = {(q["work"][0]["decode_requests"], q["draft_length"]): q["latency_ms"] for q in document["queries"]}
    assert [found[1, 0], found[8, 0], found[1, 3], found[8, 3]] == [*plain, *drafted]
    assert document["study"]["this_cell"] is None and "cell" not in document
    text = fpm(*ask, "--draft-length", 3, "--detail")
    assert "this cell" not in text.out and "without measured rows" in text.err
    metrics = tmp_path / "m.json"
    metrics.write_text(json.dumps({"scheduled_requests": {"num_decode_requests": 8, "sum_decode_kv_tokens": 4096}}))
    assert fpm("estimate", fitted, "--metrics", metrics, "--json").document["queries"][0]["latency_ms"] == plain[1]


def test_inspect_shows_what_a_saved_model_holds(fpm, fitted):
    text = fpm("inspect", fitted).out
    assert "linear regression of decode work" in text and "pure_decode: ready, 64 observations retained" in text
    document = fpm("inspect", fitted, "--json").document
    assert document["kind"] == "Regression" and len(document["digest"]) == 64
    assert document["stores"][0]["ready"] is True


def test_evaluate_scores_a_table_and_groups_as_asked(fpm, embedded_cell, tmp_path):
    work = Work.decode([1, 2, 4, 4000], [1024, 2048, 4096, 10])
    ms = np.array([*fpmjax.estimate(fpmjax.direct(embedded_cell), work, check=False).latency_ms[:3], 1.0])
    Observations.of(work, ms * [1.0, 0.5, 2.0, 1.0]).write(tmp_path / "seen.csv")
    ask = ("evaluate", "embedded", "--select", "tp=1", tmp_path / "seen.csv", *PLAIN)
    document = fpm(*ask, "--by", "none", "--blocks", 2, "--json").document
    total, first, _ = document["scores"]
    assert (total["n"], total["scored"], total["refused"], total["unready"]) == (4, 3, 1, 0)
    assert total["mape_pct"] == pytest.approx(50.0) and total["worst_ape_pct"] == pytest.approx(100.0)
    assert total["worst_row"] == 1 and first["block"] == 0 and document["cell"]["tp"] == 1
    text = fpm(*ask, "--by", "batch").out
    assert "4" in text.split() and "refused" in text.splitlines()[0]


# Mistakes


def test_speculative_traffic_has_to_be_ruled_out(fpm, stream, fitted, tmp_path):
    ask = ("fit", stream / "stream.csv", "--role", "decode", "-o", tmp_path / "m.npz")
    fpm(*ask).refused("--not-speculative is missing", "--draft-length")
    fpm("evaluate", fitted, stream / "stream.csv").refused("--not-speculative is missing")
    assert not (tmp_path / "m.npz").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["-o", "m.npz"], "--role is missing"),
        (["-o", "none/m.npz", "--role", "decode"], "the folder none does not exist"),
        (["-o", "stream.csv", "--role", "decode"], "no saved model, so it is not replaced"),
        (["-o", "m.npz", "--role", "decode", "--bins", "4"], "--bins"),
        (["-o", "m.npz", "--role", "decode", "--bins", "0,1"], "not a whole number from 1"),
        (["-o", "m.npz", "--role", "decode", "--feature-axes", "foo"], "--feature-axes='foo' is no axis"),
        (["-o", "m.npz", "--role", "decode", "--min-observations", "65"], "--min-observations"),
        (["-o", "m.npz", "--role", "decode", "--first-share", "0"], "is not a share"),
        (["-o", "m.npz", "--role", "decode", "--first-share", "0.001"], "raise --first-share"),
        (["-o", "m.npz", "--role", "decode", "--policy", "fixed"], "--policy belongs to a correction"),
        (["-o", "m.npz", "--role", "decode", "--select", "tp=1"], "--select belongs to a correction"),
        (["-o", "m.npz", "--role", "prefill"], "use --role aggregated"),
        (["-o", "m.npz", "--role", "decode", "--skip-first", "3"], "--skip-first is about traces"),
        (["-o", "m.npz", "--correct", "embedded", "--role", "decode"], "--role belongs to a regression"),
        (["-o", "m.npz", "--correct", "embedded"], "cells that match"),
        (["-o", "m.npz", "--correct", "embedded", "--select", "tp=1", "--bins", "4"], "--bins"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(fpm, stream, monkeypatch, more, told):
    monkeypatch.chdir(stream)
    fpm("fit", "stream.csv", *PLAIN, *more).refused(told)
    assert not (stream / "m.npz").exists()


def test_bad_sources_and_models_are_told(fpm, stream, fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask = (*PLAIN, "--role", "decode", "-o", "m.npz")
    fpm("fit", "nothing.jsonl", *ask).refused("nothing.jsonl does not exist")
    fpm("fit", "nothing.csv", *ask).refused("nothing.csv does not exist")
    fpm("fit", "embedded", *ask).refused("embedded is a table, not observations", "--correct")
    (tmp_path / "seen.jsonl").write_text("")
    fpm("fit", "sen.jsonl", *ask).refused("hint: did you mean seen.jsonl")
    fpm("fit", "seen.jsonl", *ask).refused("seen.jsonl: empty, there is no iteration at all")
    fpm("estimate", tmp_path, "--batch", 1, "--kv", 1).refused("holds observations, not a table", "fpmjax fit")
    fpm("estimate", "none.npz", "--batch", 1, "--kv", 1).refused("none.npz does not exist", "`fpmjax fit` wrote")
    fpm("fit", "seen.jsonl", "--not-speculativ", *ask).refused("--not-speculativ", "did you mean --not-speculative?")
    (tmp_path / "idle.csv").write_text("wall_ms,decode_requests,decode_kv\n0.0,1,100\n")
    fpm("fit", "idle.csv", *ask).refused("no usable iteration", "left out: 1 no_wall_time")
    (tmp_path / "line.jsonl").write_text("{}\n")
    fpm("fit", "line.jsonl", *ask, "--strict").refused("line.jsonl:1", "without --strict")
    fpm("fit", "line.jsonl", *ask, "--group", "nearest").refused("--group and --tolerance-ms go together")
    (tmp_path / "cut.npz").write_bytes(fitted.read_bytes()[:500])
    for command in (("estimate", "cut.npz", "--batch", 1, "--kv", 1), ("inspect", "cut.npz")):
        fpm(*command).refused("no saved model, or a damaged one")
    fpm("estimate", fitted, "--select", "tp=1", "--batch", 1, "--kv", 1).refused("--select is about tables")
    fpm("estimate", fitted, "--verify-width", 2, "--batch", 1, "--kv", 1).refused("--verify-width is about tables")
    fpm("estimate", fitted, "--prefill-requests", 1, "--prefill-tokens", 9).refused(
        "decode worker's regression",
        "use --role aggregated",
        out=fpm("estimate", fitted, "--prefill-requests", 1, "--prefill-tokens", 9).out,
    )
    fpm("coverage", fitted, "--traffic", "x").refused("is a saved model, not a table")
    fpm("evaluate", fitted, stream / "stream.csv", *PLAIN, "--by", "size").refused("is none of kind, batch")
    fpm("evaluate", fitted, stream / "stream.csv", *PLAIN, "--first-share", 1).refused("nothing is left to score")


def test_a_stack_of_models_is_no_single_one(fpm, tmp_path):
    from fpmjax.models.regression import regression, stack

    save_model(stack([regression(role="decode")] * 2), tmp_path / "s.npz")
    fpm("estimate", tmp_path / "s.npz", "--batch", 1, "--kv", 1).refused("holds a stack of models")


def test_progress_goes_to_a_terminal_only_and_changes_nothing(monkeypatch, capsys):
    import io
    import sys

    from fpmjax.cli import fit

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(fit, "CHUNK", 150)
    monkeypatch.setitem(sys.modules, "rich.console", None)  # drawn plainly
    monkeypatch.setattr("fpmjax.progress.DELAY", 0)
    monkeypatch.setattr("fpmjax.progress.PAUSE", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    model = fpmjax.regression(role="decode")
    watched = fit.taught(model, decode_stream())
    shown = sys.stderr.getvalue()
    assert "] 37%  150 of 400 observations" in shown.replace("]  ", "] ") and shown.endswith(" \r")
    assert same_bits(watched, fpmjax.regression(decode_stream(), role="decode"))
    mixed = Observations.of(
        Work.of(
            prefill_requests=[0] * 200 + [1],
            prefill_tokens=[0] * 200 + [9],
            decode_requests=[1] * 200 + [0],
            decode_kv=[5] * 200 + [0],
        ),
        np.ones(201),
    )
    with pytest.raises(fpmjax.MetricsError, match="observation 200"):
        fit.taught(model, mixed)


def test_help_of_both_commands_names_every_source():
    for command in ("fit", "evaluate"):
        done = shell(command, "--help")
        assert done.returncode == 0 and ".jsonl.gz" in done.stdout and "--not-speculative" in done.stdout
