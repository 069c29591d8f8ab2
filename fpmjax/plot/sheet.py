"""The sheet of a figure: its panels side by side, one scale for each quantity, one legend below, a headline above."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.grid import DRAFT
from fpmjax.plot.curves import draw_lines
from fpmjax.plot.field import MEASURED, Field, Quantity, hatches
from fpmjax.plot.figure import blank, nothing
from fpmjax.plot.maps import add_rows_axis, draw_map, name_axes, span_of
from fpmjax.plot.plane import AXES, Plane
from fpmjax.plot.scale import places_of, plain, shades_of
from fpmjax.plot.text import legible, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = (4.4, 3.4)  # inches
ALONE = (8.6, 5.0)  # a single panel
STRIP = 1.5  # inches, the height of a panel without a second axis
WIDEST = 3  # panels side by side
LETTERS = 12  # of a headline in an inch
MOST = 400  # letters of a line of it


def draw_sheet(plane: Plane, fields: Sequence[Field], headline: str, lines: Sequence[str]) -> Figure:
    """Every field in its place."""
    as_map = plane.y is not None or bool(fields[0].quantity.categories)
    groups: dict[tuple[Any, str], list[Field]] = {}
    for field in fields:
        groups.setdefault((field.quantity.title, field.panel), []).append(field)
    quantities = list(dict.fromkeys(field.quantity for field in fields))
    rows, columns = shape_of(len(groups), len(quantities))
    width, height = ALONE if len(groups) == 1 else PANEL
    if as_map and plane.y is None:
        height = STRIP
    width_in, titled = width * columns + 0.8, int(width * LETTERS)
    head = [wrapped(legible(line, MOST), int(width_in * LETTERS)) for line in (headline, *lines)]
    head_lines = "\n".join(head).count("\n")
    title_lines = max(wrapped(field.panel, titled).count("\n") for field in fields)
    marks = dict.fromkeys(label for field in fields for label in field.marks)
    tall = 0.6 + 0.2 * head_lines + 0.25 * math.ceil((len(marks) + 3) / columns)
    figure = blank((width_in, (height + 0.2 * title_lines) * rows + tall))
    grid = figure.subplots(rows, columns, squeeze=False)
    hatch = hatches(marks)
    x = places_of(plane.grid[plane.x], even=plane.x == DRAFT)
    y = places_of(np.array([0]) if plane.y is None else plane.grid[plane.y])
    labels = AXES[plane.x][0], None if plane.y is None else AXES[plane.y][0]
    bars: dict[Quantity, Any] = {}
    hatched: dict[str, None] = {}  # labels
    shades = {
        q: shades_of(np.stack([f.values for f in fields if f.quantity == q]), signed=q.signed) for q in quantities
    }
    for i, (axes, group) in enumerate(zip(grid.ravel(), groups.values(), strict=False)):
        first = group[0]
        told = True
        if as_map:
            name_axes(axes, x, y, labels)  # first: labels of contours find their places on these axes
            mesh, told = draw_map(axes, first, x, y, shades[first.quantity], hatch)
            if first.rows:
                add_rows_axis(axes, x, first.rows)
            if mesh is not None:
                bars.setdefault(first.quantity, mesh)
            hatched.update(dict.fromkeys(label for label, where in first.marks.items() if where.any()))
        else:
            hatched.update(dict.fromkeys(draw_lines(axes, group, x, labels[0], hatch)))
            told = not all(zeros(field) for field in group)
        span = "" if told or first.quantity.categories else span_of(first)
        axes.set_title("\n".join(filter(None, [wrapped(first.panel, titled), span])))
        if not any(np.isfinite(f.values).any() for f in group):
            nothing(axes, "no value anywhere")
        if i + columns < len(groups):  # there is a panel below
            axes.set_xlabel("")
        if i % columns and (as_map or len(quantities) == 1):
            axes.set_ylabel("")
    for axes in grid.ravel()[len(groups) :]:
        axes.remove()
    if not as_map:
        level(grid, len(quantities), len(groups))
    for i, quantity in enumerate(quantities):
        if quantity in bars:
            where = grid if len(quantities) == 1 else grid[:, i]
            panels = [a for a in where.ravel() if a.figure is not None]
            add_bar(figure, bars[quantity], panels, quantity, shades[quantity], below=len(quantities) > 1)
    add_legend(figure, plane, fields, {label: hatch[label] for label in hatched}, columns, as_map)
    figure.suptitle("\n".join(head), x=0.01, ha="left", fontsize=9.5)
    return figure


def shape_of(panels: int, quantities: int) -> tuple[int, int]:
    """(rows, columns)."""
    if quantities > 1:
        return math.ceil(panels / quantities), quantities
    columns = 2 if panels in (2, 4) else min(panels, WIDEST)
    return math.ceil(panels / columns), columns


def add_bar(figure: Figure, mesh: Any, axes: list[Any], quantity: Quantity, shades: Any, *, below: bool) -> None:
    """below: under its panels, as beside them it would stand between them and the next ones."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    place = {"location": "bottom" if below else "right", "aspect": 40 if below else 30, "pad": 0.02 if below else 0.015}
    bar = figure.colorbar(mesh, ax=axes, extend=shades.extend, label=quantity.label, **place)
    axis = bar.ax.xaxis if below else bar.ax.yaxis
    one = len(shades.ticks) == 1 and not len(shades.levels)
    ends = [] if len(shades.ticks) > 3 or one else [shades.norm.vmin, shades.norm.vmax]
    axis.set_major_locator(FixedLocator(sorted([*shades.ticks.tolist(), *ends])))
    axis.set_minor_locator(NullLocator())
    sign = quantity.signed and shades.norm.vmin < 0
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: ("+" if sign and value > 0 else "") + plain(float(f"{value:.4g}")))
    )


def level(grid: Any, quantities: int, panels: int) -> None:
    """The same height for the panels of one quantity, so that they compare."""
    for first in range(quantities):
        these = grid.ravel()[first:panels:quantities]
        ends = [axes.get_ylim() for axes in these]
        for axes in these:
            axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def zeros(field: Field) -> bool:
    """Whether a line of nothing but zeros is to be told in words."""
    known = field.values[np.isfinite(field.values)]
    return bool(field.quantity.zero and len(known) and not known.any())


def add_legend(
    figure: Figure, plane: Plane, fields: Sequence[Field], hatched: Mapping[str, str], columns: int, as_map: bool
) -> None:
    """What hatches, categories, lines and markers mean, below the panels so that it hides nothing."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for quantity in dict.fromkeys(f.quantity for f in fields if f.quantity.categories):
        found = {int(k) for f in fields if f.quantity == quantity for k in np.unique(f.values[np.isfinite(f.values)])}
        handles += [
            Patch(facecolor=colour, hatch=mark, edgecolor="0.35", lw=0.4, label=label)
            for i, (label, colour, mark) in enumerate(quantity.categories)
            if i in found
        ]
    if not as_map:
        named, _ = figure.axes[0].get_legend_handles_labels()
        handles += named
        if any(f.exact is not None and f.exact.any() for f in fields):
            handles.append(Line2D([], [], color="0.3", marker="o", lw=0, ms=4, label=marker_of(plane)))
        if any(f.low is not None for f in fields):
            handles.append(Patch(facecolor="0.3", alpha=0.2, lw=0, label="shaded: the model's own range"))
    handles += [
        Patch(facecolor="white", hatch=hatch, edgecolor="0.35", lw=0.4, label=label) for label, hatch in hatched.items()
    ]
    if handles:
        wide = 3 if columns > 2 else 2
        figure.legend(handles=handles, loc="outside lower left", ncols=wide, handlelength=2.6, handleheight=1.2)


def marker_of(plane: Plane) -> str:
    """What a filled marker means: of a round only the lookup behind it can have been measured."""
    if not plane.drafted:
        return f"marker: {MEASURED}"
    if plane.grid[DRAFT].all():
        return "marker: the ordinary pass behind it was measured"
    return "marker: measured; of a round, the ordinary pass behind it was"
