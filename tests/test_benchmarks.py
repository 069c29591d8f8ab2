"""The benchmark runner tells ratios of what it was given; the numbers themselves are no test."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def runner():
    import sys

    spec = importlib.util.spec_from_file_location("fpmjax_benchmark_runner", BENCHMARKS / "runner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ticking(runner, monkeypatch):
    """A processor clock that only cases move: `ticking(seconds)` is a run that takes so long."""
    now = [0.0]
    monkeypatch.setattr(runner.time, "process_time", lambda: now[0])

    def case(name, seconds, items=1):
        def run():
            now[0] += seconds

        return runner.Case(name, run, items)

    return case


def test_a_case_that_takes_half_the_time_has_ratio_two(runner, ticking):
    fast, slow = runner.compare([ticking("fast", 0.5), ticking("slow", 1.0)], reference="slow", rounds=3)
    assert fast.ratio == pytest.approx(2) and fast.low == pytest.approx(2) and fast.high == pytest.approx(2)
    assert slow.ratio == 1


def test_speed_is_items_not_runs(runner, ticking):
    many, one = runner.compare([ticking("many", 1.0, items=10), ticking("one", 1.0)], reference="one", rounds=2)
    assert many.ratio == pytest.approx(10) and one.ratio == 1


def test_short_cases_are_repeated_until_a_sample_can_be_trusted(runner, ticking):
    repeats = runner._repeats(ticking("short", 1e-4))
    assert repeats * 1e-4 >= runner.SAMPLE_SECONDS


def test_an_unknown_reference_is_refused(runner, ticking):
    with pytest.raises(ValueError, match="`absent` among them: here"):
        runner.compare([ticking("here", 1.0)], reference="absent")


def test_json_lines_carry_versions_and_no_seconds(runner, ticking, capsys):
    runner.main({"b": lambda: ([ticking("x", 1.0), ticking("y", 1.0)], "x")}, ["--json", "--rounds", "2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == ["x", "y"]
    assert {"jax", "numpy", "python"} <= set(lines[0])
    assert not any("second" in key for key in lines[0])


def test_a_page_keeps_everything_but_what_stands_between_its_marks(runner, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->old<!-- x -->\nafter\n")
    runner.put(page, "new", "<!-- x -->")
    assert page.read_text() == "before\n<!-- x -->\n\nnew\n\n<!-- x -->\nafter\n"
