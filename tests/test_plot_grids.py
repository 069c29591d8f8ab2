"""`plot_grid`, `plot_difference`: the right cells have values, hatches and words; equal figures have equal bytes."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import fpmjax
from fpmjax import Acceptance, CoverageError, FpmError, OptionError
from fpmjax.answer import Resolution
from fpmjax.plot import grids, plot_difference, plot_grid, write_figure
from fpmjax.plot.field import EXTRAPOLATED, IDLE, SOME_MISSING
from fpmjax.plot.plane import Plane
from fpmjax.plot.shows import COVERAGE, NEITHER, NEVER, NO_NEIGHBOUR, NO_ORDINARY, ONLY_B, SHOWS

BATCHES, CONTEXTS = [1, 2, 3, 8, 12, 16, 33, 64, 200], [512, 2048, 32_768]
REFUSED = "no answer: no measured batches on both sides cover it"


def axes_of(**more):
    return fpmjax.grid(decode_requests=BATCHES, kv_per_request=CONTEXTS, **more)


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Fewer pixels are drawn faster."""
    monkeypatch.setattr("fpmjax.plot.figure.DPI", 30)


@pytest.fixture
def uncertain(monkeypatch):
    """Every answer brings a range of 10 % along, and counts as extrapolated from batch 16 on, as a fit's may."""
    ask = Plane.ask

    def unsure(self, **more):
        found = ask(self, **more)
        ms = found.latency_ms
        distance = np.where(self.column("decode_requests") >= 16, 0.7, 0.0)
        return replace(found, low_ms=0.9 * ms, high_ms=1.1 * ms, distance=distance, resolution=None)

    monkeypatch.setattr(Plane, "ask", unsure)


def asked(model, depth=None) -> Any:
    """The same cells, asked directly: [context, batch]."""
    batch, context = np.meshgrid(BATCHES, CONTEXTS)
    return fpmjax.estimate(
        model, fpmjax.Work.decode(batch, batch * context), draft_length=depth, check=False, evidence=True
    )


def pictured(*models_and_grid: Any, **more: Any) -> Any:
    return plot_grid(*models_and_grid, progress=False, **more)


def told_apart(*pair_and_grid: Any, **more: Any) -> Any:
    return plot_difference(*pair_and_grid, progress=False, **more)


def shown_in(axes: Any) -> np.ndarray:
    """[context, batch]: what the map of a panel shows, NaN for nothing."""
    return np.ma.filled(axes.collections[0].get_array().astype(float), np.nan)


def words(figure) -> str:
    """Everything that is written in a figure."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel(), *(t.get_text() for t in axes.texts)]
        found += [t.get_text() for t in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        found += [child.get_xlabel() for child in axes.child_axes]
    for legend in figure.legends:
        found += [t.get_text() for t in legend.get_texts()]
    return "\n".join(found).replace("-\n", "-")


def hatched(axes, label) -> np.ndarray:
    """[context, batch]: the centres of cells that lie in a hatched patch of this label."""
    centres = np.stack(np.meshgrid(BATCHES, CONTEXTS), -1).reshape(-1, 2)
    found = np.zeros(len(centres), bool)
    for patch in axes.patches:
        if patch.get_label() == label:
            assert patch.get_hatch()
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            low, high = corners.min(1), corners.max(1)
            found |= ((centres[:, None] > low) & (centres[:, None] < high)).all(-1).any(-1)
    return found.reshape(len(CONTEXTS), len(BATCHES))


def fields_of(models, grid, show, **more):
    """The fields of a picture, as it draws them."""
    from fpmjax.plot.shows import Question

    plane, kind = grids.checked(models, grid, show, more.get("tokens_per_round"))
    question = Question(plane, None, more.get("tokens_per_round"), False)
    return kind.fields(question, question.ask(evidence=True))


CASES = {
    "latency": ("latency", {}, {}),
    "throughput": ("throughput", {}, {}),
    "coverage": ("coverage", {"draft_length": [1, 3]}, {}),
    "break-even": ("draft_length", {"draft_length": [1, 3]}, {}),
    "best": ("draft_length", {"draft_length": [0, 1, 3]}, {"tokens_per_round": {1: 1.6, 3: 2.2}}),
    "sensitivity": ("sensitivity", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_figure_has_the_same_bytes(tp1, tmp_path, case):
    show, axes, more = CASES[case]
    grid = fpmjax.grid(decode_requests=[2, 16, 64], kv_per_request=[512, 32_768], **axes)
    figures = [pictured(tp1, grid, show=show, **more) for _ in range(2)]
    for kind in ("png", "svg"):
        for i, figure in enumerate(figures):
            write_figure(figure, tmp_path / f"{i}.{kind}")
        first, second = ((tmp_path / f"{i}.{kind}").read_bytes() for i in range(2))
        assert first == second and len(first) > 3000 and b"dc:date" not in first


def test_a_difference_has_the_same_bytes(tp1, tp4, tmp_path):
    for name in ("a.svg", "b.svg"):
        write_figure(told_apart(tp1, tp4, axes_of()), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_notebook_shows_what_a_file_holds(tp1, tmp_path):
    figure = pictured(tp1, axes_of(), show="latency")
    write_figure(figure, tmp_path / "a.png")
    assert figure._repr_png_() == (tmp_path / "a.png").read_bytes()


def test_latency_says_what_and_whose_it_is_and_hatches_refused_cells(tp1):
    figure = pictured(tp1, axes_of())
    text = words(figure)
    for word in (
        "Latency of one pass over batch and context",
        "Qwen/Qwen3-32B on b300_sxm",
        "tp1",
        "clock: scheduler wall",
        "batch, decode requests",
        "context, past KV tokens a request",
        "latency of one pass, ms",
        "32,768",
        REFUSED,
    ):
        assert word in text.replace("\n", " ") or word in text
    answer = asked(tp1)
    refused = answer.status > fpmjax.Status.IDLE
    axes = figure.axes[0]
    assert refused.any() and (hatched(axes, REFUSED) == refused).all()
    assert np.array_equal(shown_in(axes), answer.latency_ms, equal_nan=True)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_few_cells_carry_their_numbers_and_many_contours(tp1):
    few = fpmjax.grid(decode_requests=[1, 8], kv_per_request=[512, 2048])
    work = fpmjax.Work.decode([1, 8, 1, 8], [512, 4096, 2048, 16_384])
    expected = {f"{ms:#.4g}" for ms in fpmjax.estimate(tp1, work).latency_ms}
    assert {t.get_text() for t in pictured(tp1, few).axes[0].texts} == expected
    many = fpmjax.grid(decode_requests=range(1, 65), kv_per_request=CONTEXTS)
    labels = {t.get_text() for t in pictured(tp1, many).axes[0].texts}
    assert labels and labels <= {f"{x:g}" for x in np.arange(12, 60, 0.5)}


def test_throughput_is_requests_over_latency_with_one_panel_a_model(tp1, tp4):
    figure = pictured({"one": tp1, "four": tp4}, axes_of(), show="throughput")
    text = words(figure)
    assert "request steps a second" in text and "one: Qwen" in text and "clock of all" in text
    for axes, name, model in zip(figure.axes, ("one", "four"), (tp1, tp4), strict=False):
        assert axes.get_title(loc="left") == name
        shown = shown_in(axes)
        assert np.array_equal(shown, 1e3 * np.array(BATCHES) / asked(model).latency_ms, equal_nan=True)


def test_idle_cells_serve_nobody(tp1):
    idle = fpmjax.grid(decode_requests=[0, 1, 2], decode_kv=[0, 4096])
    assert IDLE in words(pictured(tp1, idle, show="throughput"))
    assert "idle, 0 ms" in words(pictured(tp1, idle, show="coverage"))


def test_coverage_tells_measured_from_interpolated_and_why_not(tp1):
    figure = pictured(tp1, axes_of(draft_length=[1, 3]), show="coverage")
    text = words(figure)
    assert COVERAGE[0][0] in text and "interpolated between batches" in text and REFUSED in text
    assert "decode rows that are looked up, 4 a request" in text
    for axes, depth in zip(figure.axes, (1, 3), strict=False):
        answer = asked(tp1, depth)
        resolution = answer.stp.parts.decode.resolution[..., 0]
        shown = shown_in(axes)
        assert (np.nan_to_num(shown, nan=-1) == resolution).all() and (shown == Resolution.EXACT).any()
        assert (hatched(axes, REFUSED) == (answer.status > fpmjax.Status.IDLE)).all()


def test_coverage_is_drawn_where_nothing_is_answered(tp1):
    beyond = fpmjax.grid(decode_requests=[4000, 8000], kv_per_request=[1, 2])
    assert REFUSED in words(pictured(tp1, beyond, show="coverage"))
    with pytest.raises(CoverageError, match="4 decode_no_two_sided") as caught:
        pictured(tp1, beyond)
    assert caught.value.code == "nothing_answered"


def test_break_even_is_the_round_over_the_ordinary_pass(tp1):
    ordinary = asked(tp1).latency_ms
    for field, depth in zip(fields_of(tp1, axes_of(draft_length=[1, 3]), "draft_length"), (1, 3), strict=True):
        drafted = asked(tp1, depth)
        assert field.panel == f"draft length {depth}"
        assert np.array_equal(field.values, drafted.latency_ms / ordinary, equal_nan=True)
        alone = np.isnan(ordinary) & (drafted.status == fpmjax.Status.OK)
        assert (field.marks.get(NO_ORDINARY, np.zeros_like(alone)) == alone).all()
    steep = fpmjax.SpeculativeRule(Decimal(3), Decimal(2), "a test")
    figure = pictured(tp1, axes_of(draft_length=[1, 3]), show="draft_length", rule=steep)
    assert NEVER in words(figure) and "Tokens that a round must yield to pay" in words(figure)


@pytest.mark.parametrize("given", [[1, 1.6, 1.9, 2.2], {1: 1.6, 3: 2.2}, Acceptance.measured({1: 1.6, 3: 2.2})])
def test_the_best_draft_length_has_the_largest_goodput(tp1, given):
    grid = axes_of(draft_length=[0, 1, 3])
    which, gain = fields_of(tp1, grid, "draft_length", tokens_per_round=given)
    batch, context = np.meshgrid(BATCHES, CONTEXTS)
    acceptance = Acceptance.measured({1: 1.6, 3: 2.2})
    best = fpmjax.best_draft_length(tp1, batch, batch * context, acceptance).best
    position = np.where(best.draft_length < 0, np.nan, np.searchsorted([0, 1, 3], best.draft_length))
    assert np.array_equal(which.values, position, equal_nan=True)
    assert np.allclose(gain.values, 100 * (best.speedup - 1), equal_nan=True)
    missing = np.isnan(asked(tp1, 1).latency_ms) | np.isnan(asked(tp1, 3).latency_ms)
    assert (which.marks[SOME_MISSING] == (missing & (best.draft_length >= 0))).all()
    figure = pictured(tp1, grid, show="draft_length", tokens_per_round=given)
    text = words(figure)
    assert "a round yields 1.6 at 1, 2.2 at 3 tokens" in text and "best draft length: 3" in text and "\n3\n" in text


def test_sensitivity_is_that_of_the_library(tp1):
    kv, request = fields_of(tp1, axes_of(draft_length=[0, 2]), "sensitivity")[:2]
    batch, context = np.meshgrid(BATCHES, CONTEXTS)
    found = fpmjax.sensitivity(tp1, fpmjax.Work.decode(batch, batch * context))
    assert np.array_equal(kv.values, 1e3 * found.per_kv_token, equal_nan=True)
    assert np.array_equal(request.values, found.next_same_context, equal_nan=True)
    assert (request.marks[NO_NEIGHBOUR] == np.isnan(found.next_same_context) & ~np.isnan(found.latency_ms)).all()
    assert kv.panel.startswith("draft length 0") and "1,000" in kv.quantity.label


def test_a_difference_is_signed_symmetrical_and_hatches_what_one_answers(tp1, tp4):
    figure = told_apart(tp1, tp4, axes_of(), names=("one", "four"))
    one, four = asked(tp1).latency_ms, asked(tp4).latency_ms
    axes = figure.axes[0]
    shown = shown_in(axes)
    assert np.array_equal(shown, 100 * (four - one) / one, equal_nan=True)
    norm = axes.collections[0].norm
    assert norm.vmin == -norm.vmax and norm.vmax > 0
    only = np.isnan(one) & ~np.isnan(four)
    assert only.any() and (hatched(axes, ONLY_B) == only).all()
    assert (hatched(axes, NEITHER) == (np.isnan(one) & np.isnan(four))).all()
    text = words(figure)
    assert "four against one" in text and "A, one: Qwen" in text and "B - A, % of A" in text and "-60" in text


def test_one_axis_is_drawn_as_lines_with_markers_where_rows_were_measured(tp1, tp4):
    line = fpmjax.grid(decode_requests=range(1, 400), kv_per_request=2048, draft_length=[1, 2])
    figure = pictured({"one": tp1, "four": tp4}, line)
    text = words(figure)
    assert "context 2,048" in text and "marker: the ordinary pass behind it was measured" in text
    assert "draft length 2 (no value at " in text
    batch = np.arange(1, 400)
    work = fpmjax.Work.decode(batch, 2048 * batch)
    answer: Any = fpmjax.estimate(tp1, work, draft_length=1, check=False, evidence=True)
    first = figure.axes[0].lines[0]
    assert np.array_equal(first.get_ydata(), answer.latency_ms, equal_nan=True)
    measured = answer.stp.parts.decode.resolution[:, 0] == Resolution.EXACT
    assert measured.any() and (np.array(first.get_markevery()) == measured).all()
    assert first.get_linestyle() != figure.axes[0].lines[1].get_linestyle()
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


@pytest.mark.parametrize("show", SHOWS)
def test_every_picture_of_one_axis_is_drawn(tp1, tmp_path, show):
    line = fpmjax.grid(decode_requests=range(1, 300), kv_per_request=512, draft_length=[1, 3])
    more: dict[str, Any] = {"tokens_per_round": [1, 1.6, 2, 2.2]} if show == "draft_length" else {}
    write_figure(pictured(tp1, line, show=show, **more), tmp_path / "x.svg")
    if show == "latency":
        write_figure(told_apart(tp1, tp1, line), tmp_path / "y.svg")


def test_ranges_are_shaded_and_extrapolation_is_hatched(tp1, uncertain):
    figure = pictured(tp1, fpmjax.grid(decode_requests=range(1, 33), kv_per_request=1024))
    assert "shaded: the model's own range" in words(figure) and EXTRAPOLATED in words(figure)
    (band,) = (
        c for c in figure.axes[0].collections if type(c).__name__ == "FillBetweenPolyCollection" or c.get_alpha()
    )
    height = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert np.isclose(height.max(), 1.1 * np.nanmax(figure.axes[0].lines[0].get_ydata()))
    axes = pictured(tp1, axes_of()).axes[0]
    assert (hatched(axes, EXTRAPOLATED) == (np.array(BATCHES) >= 16)).all()
    axes = pictured(tp1, axes_of(), show="coverage").axes[0]
    shown = shown_in(axes)
    known = asked(tp1).status == fpmjax.Status.OK
    assert ((shown == 6) == (known & (np.array(BATCHES) >= 16))).all() and (shown == 5).any()


def test_prefill_and_repeated_values_have_pictures(tp1):
    prompts = fpmjax.grid(prefill_requests=1, prefill_tokens=[512, 64, 128, 64], prefill_kv=[0, 1024, 4096])
    figure = pictured(tp1, prompts)
    assert "new tokens, total" in words(figure) and "prefill requests 1" in words(figure)
    work = fpmjax.Work.prefill(1, [[64, 128, 512]] * 3, [[0], [1024], [4096]])
    shown = shown_in(figure.axes[0])
    assert np.array_equal(shown, fpmjax.estimate(tp1, work, check=False).latency_ms, equal_nan=True)


@pytest.mark.parametrize(
    ("grid", "more", "code"),
    [
        ({"decode_requests": 1, "decode_kv": 9}, {}, "axes"),
        ({"decode_requests": [1, 2], "kv_per_request": 9}, {"show": "surface"}, "show"),
        ({"decode_requests": [1, 2], "kv_per_request": 9}, {"show": "difference"}, "show"),
        ({"decode_requests": [1, 2], "kv_per_request": 9}, {"show": ["latency"]}, "show"),
        ({"decode_requests": [1, 2], "kv_per_request": 9}, {"show": "draft_length"}, "draft_length"),
        ({"decode_requests": 1, "kv_per_request": 9, "draft_length": [1, 2]}, {"show": "draft_length"}, "axes"),
        ({"prefill_requests": 1, "prefill_tokens": [1, 2]}, {"show": "throughput"}, "decode_requests"),
        (
            {"decode_requests": [1, 2], "decode_kv": 9, "prefill_requests": 1, "prefill_tokens": 9},
            {"show": "sensitivity"},
            "prefill_requests",
        ),
        ({"decode_requests": range(1, 1100), "kv_per_request": range(1000)}, {}, "cells"),
        ({"decode_requests": [1, 2], "kv_per_request": [1, 2], "draft_length": range(1, 14)}, {}, "panels"),
        ({"decode_requests": [1, 2], "kv_per_request": 2, "draft_length": range(1, 10)}, {}, "panels"),
        ({"decode_requests": [1, 2], "kv_per_request": 9}, {"tokens_per_round": [1, 2]}, "tokens_per_round"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_asked(tp1, monkeypatch, grid, more, code):
    monkeypatch.setattr("fpmjax.plot.plane.sweep", None)
    with pytest.raises(OptionError, match="\nhint: ") as caught:
        plot_grid(tp1, fpmjax.grid(**grid), **more)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "tokens", [[1, 1.5], [1, 3, 2], [2, 1.5, 2], {1: 1.5}, 1.5, "x", {}, [1, "a", 2], {1: 0.5, 2: 2}]
)
def test_tokens_per_round_are_checked(tp1, tokens):
    with pytest.raises(OptionError, match="\nhint: ") as caught:
        plot_grid(tp1, axes_of(draft_length=[1, 2]), show="draft_length", tokens_per_round=tokens)
    assert caught.value.code == "tokens_per_round"


def test_other_arguments_are_checked(tp1, monkeypatch):
    for models, grid, code in ((tp1, "x", "grid"), ("x", axes_of(), "models")):
        with pytest.raises(OptionError, match="\nhint: ") as caught:
            plot_grid(models, grid)
        assert caught.value.code == code
    with pytest.raises(OptionError, match="one model is compared") as caught:
        plot_difference([tp1, tp1], tp1, axes_of())
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FpmError, match=r"pip install 'fpmjax\[plot\]'"):
        plot_grid(tp1, axes_of())
