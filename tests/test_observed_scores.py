"""Observations made past their constructors are scored as far as they are any; files given twice are read once."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest

from fpmjax import MetricsError, Observations, Work, evaluate, regression, x64

WORK = Work.decode(np.arange(1, 41), np.arange(1, 41) * 100)
WALL = np.arange(1, 41) + 5.0
GOOD = Observations.of(WORK, WALL)


@pytest.fixture(scope="module")
def model():
    return regression(GOOD, role="decode", min_observations=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_rows_without_a_wall_time_are_counted_and_not_scored(model, value):
    sound = np.arange(40) % 3 > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row,) = evaluate(model, Observations(WORK, np.where(sound, WALL, value)), by=None, blocks=1).to_pylist()
        (plain,) = evaluate(model, GOOD.where(sound), by=None, blocks=1).to_pylist()
        (none,) = evaluate(model, Observations(WORK, np.full(40, value)), by=None, blocks=1).to_pylist()
        assert regression(Observations(WORK, np.where(sound, WALL, value)), role="decode").ready
    assert (row["n"], row["scored"], row["refused"]) == (40, 26, 14)
    for name in ("mape_pct", "wape_pct", "bias_pct", "p90_ape_pct", "observed_ms"):
        assert row[name] == plain[name] and none[name] is None
    assert none["scored"] == 0 and none["refused"] == 40


def test_there_are_no_more_blocks_than_observations(model):
    rows = evaluate(model, GOOD[:9], by=None, blocks=100_000).to_pylist()
    assert [(row["first"], row["last"]) for row in rows] == [(0, 9), *((i, i + 1) for i in range(9))]
    for few in (0, 3):  # the default number stays
        assert len(evaluate(model, GOOD[:few], by=None, blocks=9)) == len(evaluate(model, GOOD[:few], by=None)) == 5


def test_traced_observations_are_not_scored(model):
    with x64(), pytest.raises(MetricsError, match="not inside jit"):
        jax.jit(lambda seen: evaluate(model, seen).num_rows)(GOOD)


def test_columns_that_are_given_twice_are_read_once(tmp_path, monkeypatch):
    from fpmjax.cli import main

    GOOD.write(tmp_path / "rounds.csv")
    (tmp_path / "link.csv").symlink_to(tmp_path / "rounds.csv")
    monkeypatch.chdir(tmp_path)
    same = ["rounds.csv", "rounds.csv", "./rounds.csv", "link.csv", "r*.csv"]
    for names in (["rounds.csv"], same):
        assert main(["fit", *names, "--not-speculative", "--role", "decode", "-o", f"{len(names)}.npz"]) == 0
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "5.npz").read_bytes()


def test_columns_keep_the_order_in_which_they_were_first_given(tmp_path, monkeypatch, capsys):
    from fpmjax.cli import main

    monkeypatch.chdir(tmp_path)
    GOOD[:20].write("a.csv")
    GOOD[20:].write("b.csv")
    assert main(["fit", "a.csv", "b.csv", "a.csv", "--not-speculative", "--role", "decode", "-o", "m.npz"]) == 0
    told = capsys.readouterr().err
    assert told.count("a.csv: ") == told.count("b.csv: ") == 1 and told.index("a.csv: ") < told.index("b.csv: ")
