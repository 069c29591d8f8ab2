"""What pictures of grids claim: contours only where neighbours are answered, idle cells apart, ranges, words, names."""

from __future__ import annotations

import errno
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import fpmjax
from fpmjax import FpmError, OptionError, SpeculationError
from fpmjax.plot import check_figure_path, grids, plot_difference, plot_grid, write_figure
from fpmjax.plot.field import IDLE
from fpmjax.plot.figure import as_bytes
from fpmjax.plot.maps import Piece, span_of, write_on_lines
from fpmjax.plot.scale import places_of, shades_of
from fpmjax.plot.text import LONGEST, legible, told_apart

KV = [1, 2, 3, 4, 5, 6, 7, 8, 512, 1024]
EDGE_OF_COVERAGE = fpmjax.grid(decode_requests=range(1, 9), decode_kv=KV, draft_length=[0, 3])
WITH_IDLE = fpmjax.grid(decode_requests=range(20), decode_kv=range(0, 5000, 500))


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr("fpmjax.plot.figure.DPI", 30)


def pictured(*models_and_grid: Any, **more: Any) -> Any:
    return plot_grid(*models_and_grid, progress=False, **more)


def contours(axes: Any) -> list[tuple[float, np.ndarray]]:
    """(level, vertices) of every drawn line of a panel."""
    return [
        (float(level), path.vertices)
        for drawn in axes.collections
        if type(drawn).__name__ == "QuadContourSet"
        for level, path in zip(drawn.levels, drawn.get_paths(), strict=True)
        if len(path.vertices)
    ]


def written(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def legends(figure: Any) -> str:
    return "\n".join(text.get_text() for legend in figure.legends for text in legend.get_texts())


# Contours


@pytest.mark.parametrize("grid", [EDGE_OF_COVERAGE, WITH_IDLE])
def test_contours_lie_between_answered_neighbours_whose_values_hold_them(tp1, grid):
    names = [name for name in grid.names if name != "draft_length"]
    x, y = (places_of(np.unique(grid[name])) for name in names)
    figure = pictured(tp1, grid)
    panels = [axes for axes in figure.axes if axes.get_xlabel() or axes.get_title(loc="left")]
    drawn = 0
    for axes in panels:
        shown = np.ma.filled(axes.collections[0].get_array().astype(float), np.nan)
        for level, points in contours(axes):
            drawn += 1
            place = [np.interp(points[:, i], one.at, np.arange(len(one.at))).round(9) for i, one in enumerate((x, y))]
            ends = np.stack([shown[to(place[1]).astype(int), to(place[0]).astype(int)] for to in (np.floor, np.ceil)])
            assert np.isfinite(ends).all() and (ends.min(0) <= level).all() and (level <= ends.max(0)).all()
    assert drawn


def test_idle_cells_are_no_latencies(tp1):
    figure = pictured(tp1, WITH_IDLE)
    shown = figure.axes[0].collections[0].get_array()
    assert shown.min() > 13 and shown.mask[0].all() and IDLE in legends(figure)
    assert all(level > 13 for level, _ in contours(figure.axes[0]))
    line = pictured(tp1, fpmjax.grid(decode_requests=range(5), decode_kv=0)).axes[0].lines[0]
    assert np.isnan(line.get_ydata()[0])
    two = fpmjax.grid(decode_requests=range(5), kv_per_request=64, draft_length=[0, 1])
    assert "no value" not in legends(pictured(tp1, two))


@pytest.mark.parametrize(("show", "more"), [("draft_length", {}), ("draft_length", {"tokens_per_round": [1, 1.5]})])
def test_idle_rounds_have_no_gain(tp1, show, more):
    grid = fpmjax.grid(decode_requests=[0, 1, 8], decode_kv=[0, 4096], draft_length=[0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = pictured(tp1, grid, show=show, **more)
        alike = plot_difference(tp1, tp1, grid, progress=False)
    assert IDLE in legends(figure) and IDLE in legends(alike)
    assert np.isnan(np.ma.filled(figure.axes[0].collections[0].get_array().astype(float), np.nan)[0, 0])


def test_every_contour_that_has_room_has_a_number_and_none_hides_another(tp1):
    grid = fpmjax.grid(decode_requests=range(1, 129), kv_per_request=range(512, 32_769, 512), draft_length=[0, 1])
    figure = pictured(tp1, grid, show="sensitivity")
    for axes in figure.axes[:4]:
        levels = {f"{level:+g}" if level else "0" for level, _ in contours(axes)}
        assert set(written(axes)) <= levels and written(axes)
        assert all(text.get_rotation() == 0 and text.get_bbox_patch() for text in axes.texts)
    axes = figure.axes[0]
    along = np.column_stack([np.linspace(0, 1, 50), np.full(50, 0.5), np.linspace(0, 1, 50)])
    assert write_on_lines(axes, {"-45": [Piece(None, along)] * 99}) == 7
    bars = figure.axes[4:]
    assert [bar.get_xlabel() for bar in bars] == [
        "ms per 1,000 more KV tokens",
        "ms for one more request of the same context",
    ]


def test_a_panel_without_a_number_says_what_its_values_span(tp1, tp4):
    figure = pictured(tp1, EDGE_OF_COVERAGE)
    assert titles(figure)[0].startswith("draft length 0\n13.3") and " to 13.4" in titles(figure)[0]
    assert titles(figure)[1] == "draft length 3"
    grid = fpmjax.grid(decode_requests=range(1, 65), kv_per_request=[512, 1024])
    same = plot_difference(tp1, tp1, grid, progress=False)
    assert titles(same)[0] == "no difference"
    bar = same.axes[1]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0"]
    line = fpmjax.grid(decode_requests=range(1, 65), kv_per_request=512)
    assert titles(plot_difference(tp1, tp1, line, progress=False))[0] == "no difference"
    assert titles(plot_difference(tp1, tp4, line, progress=False))[0] == ""


def test_spans_are_never_one_number_twice():
    from fpmjax.plot.field import Field, Quantity

    def field(*values, zero=""):
        return Field(Quantity("x", "x", zero=zero), "", "", np.array([values], float))

    assert span_of(field(1.0, np.nan, 2.5)) == "1 to 2.5" and span_of(field(np.nan)) == ""
    assert span_of(field(3.0, 3.0)) == "3 everywhere" and span_of(field(0.0, zero="no difference")) == "no difference"
    assert span_of(field(13.3401, 13.3402)) == "13.3401 to 13.3402"
    one = shades_of(np.array([0.0, 0.0]), signed=True)
    assert one is not None and one.cmap.N == 1


# Draft lengths and markers


def test_draft_lengths_are_evenly_spaced(tp1):
    grid = fpmjax.grid(decode_requests=8, kv_per_request=2048, draft_length=[0, 1, 2, 8])
    axes = pictured(tp1, grid).axes[0]
    assert axes.get_xscale() == "linear" and axes.lines[0].get_xdata().tolist() == [0, 1, 2, 8]


@pytest.mark.parametrize(
    ("depths", "text"),
    [
        (None, "marker: measured exactly"),
        ([1, 3], "marker: the ordinary pass behind it was measured"),
        ([0, 3], "marker: measured; of a round, the ordinary pass behind it was"),
    ],
)
def test_of_a_round_only_the_pass_behind_it_was_measured(tp1, depths, text):
    more = {} if depths is None else {"draft_length": depths}
    line = pictured(tp1, fpmjax.grid(decode_requests=range(1, 40), kv_per_request=512, **more))
    assert text in legends(line).splitlines()
    plane = pictured(tp1, fpmjax.grid(decode_requests=[1, 2], kv_per_request=[512, 600], **more), show="coverage")
    assert ("in the widened pass behind a round" in plane.get_suptitle().replace("\n", " ")) == (depths is not None)


# Names


def test_names_are_text_and_have_room(tp1, tp4, tmp_path):
    long = "a" * 100 + "/x/" + "b" * 100
    grid = fpmjax.grid(decode_requests=range(1, 40), kv_per_request=[512, 1024, 2048])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = pictured({long: tp1, "模型 $x$ $\\frac$ a_b$": tp4}, grid)
        write_figure(figure, tmp_path / "$x$ $\\q$.png")
        line = fpmjax.grid(decode_requests=range(1, 40), kv_per_request=512)
        write_figure(pictured({long: tp1, "\udc80\n\x07": tp4}, line), tmp_path / "b.svg")
        told = plot_difference(tp1, tp4, grid, names=(long, "$\\frac$ 模"), progress=False)
        as_bytes(told, "png")
    assert titles(figure)[:2] == [f"{'a' * 24}…{'b' * 23}", "\\u6a21\\u578b $x$ $\\frac$ a_b$"]
    assert all(axes.get_window_extent().size.min() > 0.4 * 100 for axes in figure.axes[:2])
    assert "$\\frac$ \\u6a21 against aaa" in told.get_suptitle()


def test_shortened_names_stay_apart():
    names = ["x" * 90 + f"{i}" + "y" * 90 for i in range(3)]
    shown = told_apart([*names, "x", "x y"])
    assert len(set(shown)) == 5 and max(map(len, shown)) <= LONGEST and shown[3:] == ["x", "x y"]
    assert legible("a\n b\t\udc80\x00") == "a b \\udc80\\x00" and legible("é ± µ") == "é ± µ"


# Arguments


def test_a_figure_gives_the_same_bytes_again(tp1):
    figure = pictured(tp1, fpmjax.grid(decode_requests=[1, 2, 8], kv_per_request=[512, 1024]))
    assert as_bytes(figure, "png") == as_bytes(figure, "png") == figure._repr_png_()
    assert as_bytes(figure, "svg") == as_bytes(figure, "svg")


@pytest.mark.parametrize("path", [None, 5, b"x.png", "a\0b.png", "\ud800.png", "x" * 300 + ".png"])
def test_odd_paths_are_refused(tp1, path):
    figure = pictured(tp1, fpmjax.grid(decode_requests=[1, 2], kv_per_request=512))
    for call in (lambda: write_figure(figure, path), lambda: check_figure_path(path)):
        with pytest.raises(FpmError, match="\nhint: ") as caught:
            call()
        assert caught.value.code == "figure"


def test_what_is_no_figure_and_what_cannot_be_written_is_refused(tp1, tmp_path, monkeypatch):
    other: Any = "x"
    with pytest.raises(FpmError, match="figure is 'x'\nhint: ") as caught:
        write_figure(other, tmp_path / "z.png")
    assert caught.value.code == "figure"
    figure = pictured(tp1, fpmjax.grid(decode_requests=[1, 2], kv_per_request=512))

    def fails(path, data):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(type(tmp_path), "write_bytes", fails)
    with pytest.raises(FpmError, match=r"x\.png cannot be written: No such file.*\nhint: ") as caught:
        write_figure(figure, tmp_path / "x.png")
    assert caught.value.code == "unwritable" and ".partial" not in str(caught.value)


@pytest.mark.parametrize("names", [None, "x", "1:4", "ab", [], {}, 5, ("a",), ("a", "b", "c"), ("a", 5), ("a", "")])
def test_names_are_two_texts(tp1, names):
    with pytest.raises(OptionError, match="\nhint: ") as caught:
        plot_difference(tp1, tp1, WITH_IDLE, names=names, progress=False)
    assert caught.value.code == "names"


def test_a_rule_needs_a_draft_length_as_in_a_sweep(tp1):
    junk: Any = "junk"
    plain, drafted = WITH_IDLE, EDGE_OF_COVERAGE
    for grid in (plain, drafted):
        for call in (lambda g=grid, **k: plot_grid(tp1, g, **k), lambda g=grid, **k: plot_difference(tp1, tp1, g, **k)):
            with pytest.raises(SpeculationError, match="\nhint: ") as caught:
                call(rule=junk)
            assert caught.value.code == "rule"
            if grid is plain:
                with pytest.raises(OptionError, match="no draft_length is there") as refused:
                    call(rule=fpmjax.SpeculativeRule(Decimal(1), Decimal(1), "a test"))
                assert refused.value.code == "rule"


class Ambiguous:
    """As a missing value or a column of pandas: nobody knows whether it equals anything."""

    def __eq__(self, other):
        return self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


@pytest.mark.parametrize("show", [Ambiguous(), np.array(["latency"]), None, 5, b"latency"])
def test_odd_shows_are_refused(tp1, show):
    with pytest.raises(OptionError, match="\nhint: ") as caught:
        plot_grid(tp1, WITH_IDLE, show=show)
    assert caught.value.code == "show"


@pytest.mark.parametrize("tokens", [np.array(3.0), Ambiguous(), np.ones((2, 2)), {1: Ambiguous()}, [1, 2]])
def test_odd_tokens_are_refused_with_what_is_asked(tp1, tokens):
    grid = fpmjax.grid(decode_requests=[1, 2], kv_per_request=[512, 1024], draft_length=[1, 3])
    with pytest.raises(OptionError, match="\nhint: ") as caught:
        grids.checked(tp1, grid, "draft_length", tokens)
    assert caught.value.code == "tokens_per_round"
    if isinstance(tokens, list):
        assert "from draft length 0 to 3" in str(caught.value)
