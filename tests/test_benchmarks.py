"""The benchmark runner tells ratios of what it was given, the studies score what was not fitted; the numbers themselves
are no test."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fpmjax import Observations, Work

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def runner():
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


def test_a_case_may_bring_the_clock_of_another_process(runner, ticking):
    away = [0.0]

    def run():
        away[0] += 0.25

    remote = runner.Case("remote", run, 1, lambda: away[0])
    found = runner.compare([remote, ticking("here", 1.0)], reference="here", rounds=2)
    assert [result.ratio for result in found] == [4, 1]


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


def test_a_note_stands_below_its_table(runner, ticking, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- x -->\n<!-- x -->")
    arguments = ["--rounds", "1", "--into", str(page)]
    runner.main({"b": lambda: ([ticking("one", 1.0)], "one", "A note.")}, arguments, mark="<!-- x -->")
    told = page.read_text()
    assert told.index("| one") < told.index("A note.") < told.index("Versions:")


@pytest.fixture(scope="module")
def studies():
    """The modules of benchmarks and studies, imported as their commands import them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        names = ("run", "runner", "lookup", "sizes", "study", "peer", *(f"accuracy_{x}" for x in STUDIES))
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))


STUDIES = ("common", "lattice", "live")


def test_every_section_has_its_place_in_the_page(studies):
    page = (BENCHMARKS / "README.md").read_text()
    for name, marks in studies["run"].ALL.items():
        assert (BENCHMARKS / f"{name}.py").exists()
        for mark in marks:
            assert page.count(f"<!-- {mark} -->") == 2, mark


@pytest.fixture
def tiny(studies, monkeypatch, tmp_path):
    """Small benchmarks, and arguments that put one round of them into `page.md`."""
    monkeypatch.setattr(studies["runner"], "SAMPLE_SECONDS", 1e-9)
    monkeypatch.setattr(studies["lookup"], "N", 64)
    for name, value in {"COUNTS": (1, 100), "USUAL": 100, "LARGE": 100, "KNOTS": (8, 12)}.items():
        monkeypatch.setattr(studies["sizes"], name, value)
    monkeypatch.setattr(studies["peer"], "FEW", 16)
    monkeypatch.setattr(studies["study"], "ROUNDS", 4)
    return ["--rounds", "1", "--into", str(tmp_path / "page.md")]


def test_sizes_are_measured(studies, tiny, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- x --><!-- x -->")
    studies["runner"].main(studies["sizes"].BENCHMARKS, tiny, mark="<!-- x -->")
    told = page.read_text()
    assert all(f"| {case} " in told for case in ("100", "64 points", "144 points", "jax.jit of the model"))


def test_studies_are_measured(studies, tiny, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- x --><!-- x -->")
    studies["runner"].main({"study": studies["study"].study, "draws": studies["study"].draws}, tiny, mark="<!-- x -->")
    assert all(f"| {case} " in page.read_text() for case in ("run_study", "bootstrap"))


# Answers as the peer does, from this package; STRETCH multiplies what it says of whole iterations.
STAND_IN = {
    "aisimulate-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: aisimulate\nVersion: 0\n",
    "aisimulate_core/__init__.py": """
import json, os, fpmjax
class RustForwardPassPerfModel:
    @classmethod
    def best_available(cls, text):
        config = json.loads(text)
        asked = config["estimator_config"]["fpm_interpolation"]
        assert asked["method"] == "direct" and os.path.exists(config["model"] + "/config.json")
        self = cls()
        self.own = fpmjax.ForwardPassPerfModel(
            fpmjax.direct(fpmjax.load_cells(asked["fpm_parquet_path"]).select(tp=config["tp"]))
        )
        self.predict_decode_latency_total = self.own.predict_decode_latency_total
        self.predict_prefill_latency_total = self.own.predict_prefill_latency_total
        return self
    def estimate_forward_pass_time_ms(self, text):
        return self.own.estimate_forward_pass_time_ms(text) * float(os.environ.get("STRETCH", "1"))
    def estimate_forward_pass_detailed(self, text):
        return json.dumps(self.own.estimate_forward_pass_detailed(text))
""",
    "aisimulate_core/sdk/__init__.py": "",
    "aisimulate_core/sdk/rust_engine_step.py": """
import json, aisimulate_core
class ForwardPassPerfModelConfig:
    def __init__(self, **fields):
        self.fields = fields
    def to_dict(self):
        return self.fields
class RustForwardPassPerfModel:
    @classmethod
    def best_available(cls, config):
        self = cls()
        self.native = aisimulate_core.RustForwardPassPerfModel.best_available(json.dumps(config.to_dict()))
        return self
    def estimate_forward_pass_time_ms(self, metrics):
        return self.native.estimate_forward_pass_time_ms(json.dumps(metrics))
    def estimate_forward_pass_detailed(self, metrics):
        return json.loads(self.native.estimate_forward_pass_detailed(json.dumps(metrics)))
""",
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    for name, text in STAND_IN.items():
        path = tmp_path / "stand_in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stand_in"), str(BENCHMARKS.parent)]))
    return ["--python", sys.executable]


def test_the_peer_is_asked_in_every_way(studies, tiny, stand_in, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- peer --><!-- peer -->")
    studies["peer"].run([*stand_in, *tiny])
    told = page.read_text()
    assert told.count("the same bits by every way in 16 rows, by the reference in 64; aisimulate 0") == 4
    assert told.count("the same bits by every way in 16 rows; ") == 1  # details
    assert told.count("| peer, dicts ") == told.count("| fpmjax facade, one by one ") == 5
    assert told.count("| peer, integers ") == 3  # a mixed iteration is no single phase, and they have no details


def test_nothing_is_timed_where_the_peer_differs_in_the_last_bit(studies, tiny, stand_in, monkeypatch):
    monkeypatch.setenv("STRETCH", repr(1 + 2**-52))
    with pytest.raises(SystemExit, match=r"plain: peer, ready JSON and fpmjax estimate do not give the same bits"):
        studies["peer"].run([*stand_in, *tiny, "plain"])


def test_the_real_peer_gives_the_same_bits(studies, tiny, tmp_path):
    if studies["peer"].VARIABLE not in os.environ:
        pytest.skip(f"{studies['peer'].VARIABLE} names no Python that has the peer")
    page = tmp_path / "page.md"
    page.write_text("<!-- peer --><!-- peer -->")
    studies["peer"].run(tiny)
    assert page.read_text().count("the same bits") == 5


def test_a_peer_without_an_environment_is_skipped(studies, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv(studies["peer"].VARIABLE, raising=False)
    monkeypatch.setattr(studies["peer"], "HOME", tmp_path / "taken")
    (tmp_path / "taken").write_text("no folder")
    studies["peer"].run(["plain"])
    assert "skipped, for the peer is not here: no environment can be made: " in capsys.readouterr().err


def test_the_page_keeps_its_table_of_a_peer_that_is_skipped(studies, monkeypatch, tmp_path, capfd):
    page = tmp_path / "page.md"
    page.write_text("<!-- peer -->last<!-- peer -->")
    monkeypatch.setenv(studies["peer"].VARIABLE, str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["run.py", "peer", "--into", str(page)])
    assert studies["run"].main() == 0
    assert page.read_text() == "<!-- peer -->last<!-- peer -->"
    said = capfd.readouterr().err
    assert "it cannot be imported" in said and "peer skipped, the page keeps its last table, after" in said


def test_a_split_fits_seven_tenths_of_the_narrow_points_and_two_anchors_of_every_wide_batch(studies):
    lattice = studies["accuracy_lattice"]
    for found in lattice.lattices():
        one, again, other = (lattice.split(found.batch, seed) for seed in (3, 3, 4))
        assert one.fitted.sum() == round(0.7 * (found.batch <= 64).sum())
        assert found.batch[one.fitted].max() <= 64 < found.batch[one.anchors].min()
        batches, count = np.unique(found.batch[one.anchors], return_counts=True)
        assert set(batches) == set(found.batch[found.batch > 64]) and (count == 2).all()
        np.testing.assert_array_equal(one.fitted, again.fitted)
        assert (one.fitted != other.fitted).any()


def test_what_is_scored_was_never_fitted(studies):
    lattice = studies["accuracy_lattice"]
    found = lattice.lattices()[0]
    own = lattice.splits(found)
    for stage, scored in lattice.held(found).values():
        for one, which in zip(own, scored, strict=True):
            assert which.any() and not (which & (one.fitted | (one.anchors & (stage == 1)))).any()


def test_kv_totals_of_the_composed_lattice_are_totals(studies):
    composed = studies["accuracy_lattice"].lattices()[-1].seen.work
    batch, kv = (studies["accuracy_common"].count(composed, name) for name in ("decode_requests", "decode_kv"))
    assert (kv % batch == 0).all() and kv.max() == 256 * 16384


def test_the_linear_fit_finds_a_plane(studies):
    common = studies["accuracy_common"]
    batch = np.arange(1, 41)
    work = Work.decode(batch, batch * (batch % 7 + 1) * 100)
    plane = 3.0 + 0.1 * batch + 2e-5 * common.count(work, "decode_kv")
    np.testing.assert_allclose(common.linear(Observations.of(work, plane))(work), plane, rtol=1e-9)


def test_the_box_of_the_live_rounds_is_exact_at_its_edges(studies):
    live = studies["accuracy_live"]
    before = Observations.of(Work.decode([2, 4, 8], [200, 4000, 8000]), [1.0, 1.0, 1.0])
    asked = Work.decode([2, 4, 8, 9, 1, 4, 4], [200, 8000, 800, 8000, 200, 199, 8001])
    np.testing.assert_array_equal(live.outside(before, asked), [False, True, False, True, True, True, True])
