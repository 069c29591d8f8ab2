"""The figures of a study from its document alone: errors by draft length, ratios, and where errors lean."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fpmjax.plot.figure import as_bytes, blank, log_axis, nothing, style
from fpmjax.study.reading import (
    drawable,
    error_interval,
    formula,
    group_name,
    headline,
    line_of,
    nothing_drawn,
    panel_name,
    pooled,
    residuals,
)
from fpmjax.study.svg import COLOURS, WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = ("o", "s", "^", "D", "x", "P")
HATCHES = ("", "////", "..", "xx", "--", "||")
TITLE = 8.5  # points of its letters
MOST = 4  # GPUs beside each other


def study_figures(document: dict[str, Any]) -> dict[str, bytes]:
    """name.png -> bytes, the same for the same document and matplotlib; FpmError `matplotlib` where it is missing."""
    made = {"errors.png": error_figure, "ratios.png": ratio_figure, "residuals.png": residual_figure}
    return {name: as_bytes(draw(document), "png") for name, draw in made.items()}


def error_figure(document: dict[str, Any]) -> Figure:
    """MAPE of the fixed rule by draft length, a panel per GPU: round-weighted with its interval, and the other one."""
    errors = ("cell_round_weighted_mape", "cell_equal_config_mape")
    cells = [cell for cell in document["cells"] if cell["rounds"] and all(drawable(cell[name]) for name in errors)]
    with style():
        figure, panels = panels_of(cells, document)
        for gpu, axes in panels.items():
            own = [cell for cell in cells if cell["gpu"] == gpu]
            names, depths = series(cells), sorted({cell["draft_length"] for cell in own})
            wide = 0.8 / len(names)
            for i, name in enumerate(names):
                some = [cell for cell in own if group_name(cell) == name]
                x = [depths.index(cell["draft_length"]) + (i - (len(names) - 1) / 2) * wide for cell in some]
                y = [cell["cell_round_weighted_mape"] for cell in some]
                axes.bar(x, y, 0.92 * wide, color=tint(i), edgecolor=COLOURS[i % 6], hatch=HATCHES[i % 6], label=name)
                equal = [cell["cell_equal_config_mape"] for cell in some]
                axes.hlines(equal, [v - 0.4 * wide for v in x], [v + 0.4 * wide for v in x], colors="k", linewidths=1.8)
                ends = [error_interval(cell) or (v, v) for cell, v in zip(some, y, strict=True)]
                axes.vlines(x, [low for low, _ in ends], [high for _, high in ends], colors="0.25", linewidths=1)
            axes.set_xticks(range(len(depths)), [str(d) for d in depths])
            label(axes, panel_name(document, gpu), "draft length d", "MAPE of the fixed rule, %")
        finish(figure, document, "bar: round-weighted, line across: equal-configuration, whisker: cluster interval")
    return figure


def ratio_figure(document: dict[str, Any]) -> Figure:
    """The median of T / F in each configuration against the draft length, with the fixed rule and the pooled refit."""
    found = [c for c in document["configurations"] if drawable(c["config_ratio_median"])]
    with style():
        figure, panels = panels_of(found, document)
        for gpu, axes in panels.items():
            own, names = [c for c in found if c["gpu"] == gpu], series(found)
            for i, name in enumerate(names):
                some = [c for c in own if group_name(c) == name]
                x = [c["draft_length"] + 0.16 * ((i + 0.5) / len(names) - 0.5) for c in some]
                y = [c["config_ratio_median"] for c in some]
                axes.scatter(x, y, s=18, c=COLOURS[i % 6], marker=MARKS[i % 6], alpha=0.75, label=name)
            ends = [min(c["draft_length"] for c in own), max(c["draft_length"] for c in own)]
            ends = [ends[0] - 0.3, ends[1] + 0.3]
            for kind, dash, rule in (("fixed rule", "-", document["rule"]), ("pooled refit", "--", pooled(document))):
                if rule and (line := line_of(rule)):
                    axes.plot(ends, [line(d) for d in ends], dash, color="k", label=f"{kind} {formula(rule)}")
            if ends[1] < 16:
                axes.set_xticks(sorted({c["draft_length"] for c in own}))
            label(axes, panel_name(document, gpu), "draft length d", "r = T / F, median of a configuration")
        finish(figure, document, "one mark per configuration")
    return figure


def residual_figure(document: dict[str, Any]) -> Figure:
    """Signed errors of the fixed rule over (d+1)B and over K: the median of each model + method, and 80 % of rounds."""
    with style():
        figure = blank((9, 4.2))
        panels: Any = figure.subplots(1, 2, sharey=True)
        names = {"widened_batch": "widened batch (d+1)B", "kv_tokens": "past KV tokens K"}
        for axes, (key, words) in zip(panels, names.items(), strict=True):
            rows = residuals(document, key)
            if not rows:
                nothing(axes, nothing_drawn(document))
                continue
            groups = sorted({row["group"] for row in rows})
            middles = [(row["low"] * row["high"]) ** 0.5 if row["low"] > 0 else float(row["high"]) for row in rows]
            log = min(middles) > 0 and max(middles) > 4 * min(middles)
            for i, group in enumerate(groups):
                own = [(x, row) for x, row in zip(middles, rows, strict=True) if row["group"] == group]
                aside = 1.02 ** (i - (len(groups) - 1) / 2) if log else 1.0  # so that one whisker does not hide another
                x = [aside * middle for middle, _ in own]
                low, middle, high = ([row[f"{n}_round_error"] for _, row in own] for n in ("p10", "median", "p90"))
                axes.vlines(x, low, high, colors=COLOURS[i % 6], linewidths=2.5, alpha=0.35)
                axes.plot(x, middle, color=COLOURS[i % 6], marker=MARKS[i % 6], markersize=4, label=group)
            axes.axhline(0, color="k", linewidth=0.8)
            if log:
                axes.set_xscale("log")
                log_axis(axes.xaxis, min(middles), max(middles), base=2 if key == "widened_batch" else 10)
                if key == "kv_tokens":
                    axes.xaxis.set_major_formatter(thousands)
            label(axes, "", words, "error of the fixed rule, %")
        finish(figure, document, "mark: median, bar: 80 % of the rounds; above 0 the rule says too much")
    return figure


def panels_of(rows: Sequence[dict[str, Any]], document: dict[str, Any]) -> tuple[Figure, dict[str, Axes]]:
    gpus = sorted({row["gpu"] for row in rows})
    columns, lines = max(1, min(MOST, len(gpus))), max(1, -(-len(gpus) // MOST))
    figure = blank((max(5.0, 3.3 * columns), 3.6 * lines + 0.8))
    flat = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel().tolist()
    for axes in flat[len(gpus) :]:
        axes.set_axis_off()
    if not gpus:
        nothing(flat[0], nothing_drawn(document))
    return figure, dict(zip(gpus, flat, strict=False))


def series(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({group_name(row) for row in rows})


def tint(i: int) -> tuple[str, float]:
    """The ground of a bar; hatched ones are paler, so that the hatch is seen."""
    return COLOURS[i % 6], 0.55 if not HATCHES[i % 6] else 0.15


def thousands(value: float, _: int) -> str:
    """Tokens of one axis alike: 500, 5k and 10k."""
    return f"{value / 1000:.4g}k" if abs(value) >= 1000 else f"{value:.4g}"


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title if len(title) <= 32 else f"{title[:20]}…{title[-11:]}")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.label_outer()


def finish(figure: Figure, document: dict[str, Any], what: str) -> None:
    """The title with what was studied, as wide as the figure, and one legend below for all panels."""
    room = int(figure.get_figwidth() * 72 / (WIDE * TITLE))
    lines = [line for words in (headline(document), what) for line in textwrap.wrap(words, room)]
    figure.suptitle("\n".join(lines), fontsize=TITLE, x=0.01, ha="left")
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        longest = max(map(len, found))
        figure.legend(
            list(found.values()), list(found), loc="outside lower left", ncols=max(1, min(4, 110 // (longest + 8)))
        )
