"""A quantity over one axis: lines told apart by dashes and markers, ranges shaded, and where nothing is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.plot.field import EXTRAPOLATED, IDLE, Field
from fpmjax.plot.scale import Places, plain, set_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by dashes and markers; colour only helps.
LINES: tuple[tuple[str, Any, str], ...] = (
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#7b3294", ":", "D"),
    ("#555555", (0, (6, 2)), "v"),
    ("#b8860b", (0, (3, 1, 1, 1, 1, 1)), "P"),
    ("#56B4E9", (0, (1, 1)), "X"),
    ("black", (0, (8, 2, 1, 2)), "*"),
)
MOST_MARKERS = 48  # of one line with room for large ones
SPREAD = 10.0  # from this ratio on, values are on a logarithmic axis


def draw_lines(axes: Axes, fields: Sequence[Field], x: Places, label: str, hatch: Mapping[str, str]) -> list[str]:
    """One panel: a line for each field, all of one quantity; returns the labels of what is hatched, which holds for
    every line."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    quantity = fields[0].quantity
    for field, (colour, dashes, marker) in zip(fields, LINES, strict=False):
        draw_line(axes, field, x, colour, dashes, marker, alone=len(fields) == 1)
    hatched = []
    for name in dict.fromkeys(name for field in fields for name in field.marks):
        where = np.logical_and.reduce([field.marks.get(name, np.zeros((1, len(x.at)), bool)) for field in fields])[0]
        hatched += [name] if where.any() else []
        for first, end in runs(where):
            look: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.6", "hatch": hatch[name], "lw": 0, "zorder": 0}
            axes.axvspan(x.edges[first], x.edges[end], **look)
    if quantity.signed:
        axes.axhline(0.0, color="0.3", lw=0.8, zorder=1)
    known = np.concatenate([field.values[np.isfinite(field.values)] for field in fields])
    if len(known) and known.min() > 0 and known.max() >= SPREAD * known.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(float(f"{value:.6g}"))))
    set_axis(axes, "x", x, label)
    axes.set_xlim(x.edges[0], x.edges[-1])
    axes.set_ylabel(quantity.label)
    return hatched


def draw_line(axes: Axes, field: Field, x: Places, colour: str, dashes: Any, marker: str, *, alone: bool) -> None:
    values = field.values[0]
    style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.4, "label": name_of(field)}
    if field.exact is not None:
        many = field.exact.sum() > MOST_MARKERS
        style |= {"marker": marker, "markersize": 2.2 if many else 4.5, "markevery": field.exact[0].tolist()}
    elif not alone:
        every = np.isin(x.at, x.ticks()[0]).tolist()
        style |= {"marker": marker, "markersize": 4.5, "markerfacecolor": "white", "markevery": every}
    axes.plot(x.at, values, **style)
    if field.low is not None and field.high is not None:
        axes.fill_between(x.at, field.low[0], field.high[0], color=colour, alpha=0.15, lw=0)


def name_of(field: Field) -> str | None:
    """Its name for the legend, with what is to be known of it; None for a line that needs none."""
    told = []
    n = field.values.size
    if missing := int((np.isnan(field.values) & ~field.marks.get(IDLE, np.zeros(1, bool))).sum()):
        told.append(f"no value at {missing:,} of {n:,}")
    if EXTRAPOLATED in field.marks:
        told.append(f"extrapolated at {int(field.marks[EXTRAPOLATED].sum()):,} of {n:,}")
    if not field.line:
        return None
    return field.line + (f" ({', '.join(told)})" if told else "")


def runs(where: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of each run of True."""
    cuts = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
