"""`plot_fit`: every kind of model is drawn, marks tell places apart, the same figure gives the same bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import fpmjax
from fpmjax import FpmError, MetricsError, Observations, SpeculationError, Work
from fpmjax.observe.sizes import BOX
from fpmjax.plot import check_figure_path, plot_fit, write_figure
from fpmjax.plot.figure import short
from fpmjax.plot.look import EXTRAPOLATED, REFUSED, SUPPORTED, look, widened

ROWS, KV = BOX.index("decode_rows"), BOX.index("decode_kv")

N = 90


@pytest.fixture(scope="module")
def stream():
    """Decode of one rank, 8 + 0.02 B + K / 30000 ms, up to B = 32; three of them were slow."""
    rng = np.random.default_rng(3)
    batch = rng.integers(1, 33, N)
    kv = batch * rng.integers(64, 4096, N)
    wall = (8 + 0.02 * batch + kv / 3e4) * rng.lognormal(0, 0.02, N)
    wall[:3] *= 9
    return Observations.of(Work.decode(batch, kv), wall)


@pytest.fixture(scope="module")
def learned(stream):
    return fpmjax.learned(stream[:70], role="decode", family="linear")


@pytest.fixture(scope="module")
def regression(stream):
    return fpmjax.regression(stream[:70], role="decode")


def texts(figure) -> str:
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        legend = axes.get_legend()
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.texts)]
        found += [] if legend is None else [t.get_text() for t in legend.get_texts()]
    return "\n".join(found)


def test_a_learned_model_shows_its_box_and_its_drafts(stream, learned, tmp_path):
    figure = plot_fit(learned, stream, learned=70)
    shown = texts(figure)
    for words in (
        "Learned model of decode work: 70 observations learned, 20 later ones were not",
        "range holds",
        "training box",
        "supported / extrapolated / no answer",
        "draft length 4: ",
        "drafts ready up to 64",
        "3 farther down",
        "learned up to here",
        "median of stretches",
    ):
        assert words in shown
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        write_figure(figure if name[0] == "a" else plot_fit(learned, stream, learned=70), tmp_path / name)
    svg = (tmp_path / "a.svg").read_bytes()
    assert svg == (tmp_path / "b.svg").read_bytes() and b"dc:date" not in svg
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_places_are_those_of_the_model(stream, learned):
    seen = look(learned, stream, 70)
    one, three = widened(learned, seen, [1, 3])
    batch, kv = (np.asarray(x)[:, 0].astype(float) for x in (stream.work.decode_requests, stream.work.decode_kv))
    assert np.allclose(three.at[:, ROWS], 4 * batch) and np.allclose(three.at[:, KV], kv)
    for asked in (one, three):
        wide = (asked.depth + 1) * batch
        assert ((asked.place == REFUSED) == (wide > 64)).all()  # the rule of the anchor, at twice the largest batch
        assert ((wide > 32) <= (asked.place != SUPPORTED)).all()
    assert set(np.unique(one.place)) == {SUPPORTED, EXTRAPOLATED}


def test_a_regression_extrapolates_outside_of_what_it_learned(stream, regression):
    seen = look(regression, stream, 70)
    (one,) = widened(regression, seen, [1])
    batch, kv = np.asarray(stream.work.decode_requests)[:, 0], np.asarray(stream.work.decode_kv)[:, 0]
    low, high = (kv / batch)[:70].min(), (kv / batch)[:70].max()
    each = kv / (2 * batch)
    outside = (2 * batch > 32) | (2 * batch < batch[:70].min()) | (each < low * 0.999) | (each > high * 1.001)
    assert ((one.place == EXTRAPOLATED) >= outside).all() and (one.place != REFUSED).all()
    shown = texts(plot_fit(regression, stream, draft_lengths=()))
    assert "90 observations learned" in shown and "draft length" not in shown


def test_a_corrected_table_answers_or_refuses(stream, embedded_cell):
    table = fpmjax.corrected(fpmjax.direct(embedded_cell), stream[:20])
    seen = look(table, stream, 20)
    assert set(np.unique(seen.place)) <= {SUPPORTED, REFUSED}
    shown = texts(plot_fit(table, stream, learned=20, draft_lengths=(1,)))
    assert "Correction: 20 observations learned" in shown and "not learned: MAPE" in shown


def test_prompts_mixed_work_and_unready_models_are_drawn(tmp_path):
    rng = np.random.default_rng(1)
    tokens, cached = rng.integers(8, 2000, 40), rng.choice([0, 512, 4096], 40)
    prompts = Observations.of(Work.prefill(1, tokens, cached), 4.0 + 0.01 * tokens + 1e-4 * cached)
    model = fpmjax.regression(prompts, role="prefill")
    shown = texts(plot_fit(model, prompts))
    assert "Training box of prompts" in shown and "Residuals over new tokens" in shown
    mixed = Work.of(
        decode_requests=[4, 2, 8], decode_kv=[99, 99, 99], prefill_requests=[1, 0, 1], prefill_tokens=[9, 0, 9]
    )
    seen = Observations.of(mixed, [5.0, 6.0, 7.0])
    figure = plot_fit(fpmjax.regression(seen, role="aggregated"), seen)
    assert texts(figure).count("no observation has an answer") == 3
    write_figure(figure, tmp_path / "unready.svg")
    empty = plot_fit(model, prompts[:0])
    assert "nothing was observed" in texts(empty)
    write_figure(empty, tmp_path / "empty.png")


def test_many_observations_are_thinned(regression, stream):
    many = Observations.concat([stream] * 100)
    figure = plot_fit(regression, many)
    assert "9,000 observations learned; 3,000 of them are drawn" in texts(figure)


def test_arguments_are_checked(stream, regression, tmp_path):
    wrong: tuple[dict[str, Any], ...] = ({"learned": 91}, {"learned": -1}, {"learned": 1.0})
    for more in wrong:
        with pytest.raises(MetricsError, match="\nhint: "):
            plot_fit(regression, stream, **more)
    with pytest.raises(MetricsError, match="\nhint: "):
        plot_fit(regression, stream.work)
    with pytest.raises(SpeculationError, match="\nhint: "):
        plot_fit(regression, stream, draft_lengths=(0,))
    for path in ("x.pdf", str(tmp_path), str(tmp_path / "none" / "x.png")):
        with pytest.raises(FpmError, match="\nhint: ") as caught:
            check_figure_path(path)
        assert caught.value.code == "figure"


def test_matplotlib_is_imported_when_something_is_drawn(monkeypatch, stream, regression):
    code = "import sys, fpmjax.plot, fpmjax.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FpmError, match=r"\nhint: pip install 'fpmjax\[plot\]'") as caught:
        plot_fit(regression, stream)
    assert caught.value.code == "matplotlib"


def test_numbers_on_axes_are_short():
    assert [short(x) for x in (0.5, 3.0, 2048.0, 15_000.0, 2e6, 3e9)] == ["0.5", "3", "2048", "15k", "2M", "3G"]


def test_cuda_graph_sizes_place_what_is_padded(stream, learned):
    padded = replace(learned, graph_sizes=np.array([8, 16, 32, 64]))
    seen = look(padded, stream, 70)
    assert set(np.unique(np.round(seen.at[:, ROWS]))) == {8, 16, 32}
