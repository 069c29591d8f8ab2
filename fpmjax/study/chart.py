"""The chart of a study from its document alone: for every GPU the error by draft length, and the ratio behind it.

Above: bars, the round-weighted MAPE of each cell under the fixed rule; ticks, its equal-configuration MAPE; whiskers,
the cluster interval of the bar.  Below: dots, the median of r = T / F((d+1)B, K) in each configuration; lines, the
fixed rule and the pooled refit.  At the end, for all GPUs: how the signed error of the rounds moves with (d+1)B and
with K.  The same document gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fpmjax.study import svg
from fpmjax.study.reading import (
    drawable,
    error_interval,
    formula,
    group_name,
    headline,
    line_of,
    nothing_drawn,
    number,
    panel_name,
    pooled,
    residuals,
    span,
)

WIDTH, COLUMNS = 1000, 2  # pixels of the chart, and panels beside each other
GAP, LEFT, RIGHT = 24, 58, 12  # around panels, and inside one beside its plots
ERRORS, RATIOS = 190, 170  # heights of the two plots
ABOVE, BETWEEN, BELOW = 34, 34, 46
SLIM = 3.0  # the narrowest bar
ROW = 18  # of the legend


@dataclass(frozen=True)
class Axis:
    """Values from low to high on pixels from one end to the other."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def chart(document: dict[str, Any]) -> str:
    """The SVG of a study's document."""
    cells = [cell for cell in document["cells"] if cell["rounds"] and all(map(drawable, errors_of(cell)))]
    series = sorted({group_name(cell) for cell in cells})
    looks = {name: svg.look(i) for i, name in enumerate(series)}
    gpus = sorted({cell["gpu"] for cell in cells})
    columns = max(1, min(COLUMNS, len(gpus)))
    wide = (WIDTH - (columns + 1) * GAP) / columns
    legend, top = legend_of(document, series, looks)
    tall = ABOVE + ERRORS + BETWEEN + RATIOS + BELOW
    bottom = top + max(1, -(-len(gpus) // columns)) * tall
    height = bottom + (ABOVE + RATIOS + BELOW if gpus else 0)
    title = f"Error of the rule {formula(document['rule'])} by draft length"
    body = [
        svg.hatches(list(looks.values())),
        svg.text(GAP, 28, svg.fitted(title, WIDTH - 2 * GAP, 17), size=17, bold=True),
        svg.text(GAP, 49, svg.fitted(headline(document), WIDTH - 2 * GAP, 12), size=12, colour=svg.FAINT),
        *legend,
    ]
    if not gpus:
        body.append(svg.text(WIDTH / 2, top + tall / 2, nothing_drawn(document), size=14, anchor="middle"))
    shared = Shared(document, series, looks, wide, highest_error(document, cells), span_of_ratios(document, cells))
    for i, gpu in enumerate(gpus):
        row, column = divmod(i, columns)
        x, y = GAP + column * (wide + GAP), top + row * tall
        own = [cell for cell in cells if cell["gpu"] == gpu]
        body += panel(shared, gpu, own, x, y)
    body += leanings(document, looks, bottom)
    return svg.document(WIDTH, height, f"{title}: {headline(document)}", described(document, cells), body)


@dataclass(frozen=True, eq=False)
class Shared:
    """What all panels have in common, so that they compare."""

    document: dict[str, Any]
    series: Sequence[str]
    looks: dict[str, svg.Look]
    width: float
    error_ticks: list[float]
    ratio_ticks: list[float]


def highest_error(document: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[float]:
    ends = [x for cell in cells for x in (*(error_interval(cell) or ()), *errors_of(cell))]
    return svg.ticks(0.0, 1.08 * max(ends, default=1.0) or 1.0)


def span_of_ratios(document: dict[str, Any], cells: Sequence[dict[str, Any]]) -> list[float]:
    found = [c["config_ratio_median"] for c in document["configurations"] if drawable(c["config_ratio_median"])]
    depths = [cell["draft_length"] for cell in cells]
    lines = [line_of(document["rule"]), line_of(pooled(document))]
    found += [line(d) for line in lines if line for d in depths]
    return svg.ticks(min(found, default=1.0), max(found, default=2.0))


def errors_of(cell: dict[str, Any]) -> tuple[float, float]:
    """(round-weighted, equal-configuration) MAPE."""
    return cell["cell_round_weighted_mape"], cell["cell_equal_config_mape"]


def legend_of(document: dict[str, Any], series: Sequence[str], looks: dict[str, svg.Look]) -> tuple[list[str], float]:
    """Series first, each on as much of a row as its name needs; then what the shapes mean.  (shapes, next y)"""
    out: list[str] = []
    x, y = float(GAP), 66.0
    plain = svg.Look(svg.INK, 0, "circle")
    refit = pooled(document)
    rule = f"fixed rule {formula(document['rule'])}"
    level = document["intervals"]["level"] if document.get("intervals") else None
    entries: list[tuple[str, str]] = [(name, name) for name in series]
    entries += [("bar", "bar: round-weighted MAPE"), ("tick", "tick: equal-configuration MAPE")]
    if level is not None:
        entries.append(("whisker", f"whisker: {100 * level:g} % cluster interval of the bar"))
    entries += [("dot", "mark: median r of a configuration"), ("rule", rule)]
    if refit and line_of(refit):
        entries.append(("refit", f"pooled refit {formula(refit)}"))
    for kind, words in entries:
        words = svg.fitted(words, WIDTH - 2 * GAP - 40, 12)
        needs = 34 + svg.width_of(words, 12) + 18
        if x > GAP and x + needs > WIDTH - GAP + 18:
            x, y = float(GAP), y + ROW
        middle = y + 4
        if kind in looks:
            out.append(svg.bar(x, y - 3, 16, 13, looks[kind]))
            out.append(svg.mark(x + 24, middle, looks[kind]))
        elif kind == "bar":
            out.append(svg.line([(x + 2, y + 10), (x + 2, y - 3), (x + 18, y - 3), (x + 18, y + 10)]))
        elif kind == "tick":
            out += tick(x + 4, x + 24, middle)
        elif kind == "whisker":
            out += whisker(x + 14, y - 3, y + 11)
        elif kind == "dot":
            out.append(svg.mark(x + 14, middle, plain))
        else:
            out.append(svg.line([(x, middle), (x + 28, middle)], width=1.6, dash=DASH[kind]))
        out.append(svg.text(x + 34, y + 8, words))
        x += needs
    return out, y + ROW + 10


DASH = {"rule": "", "refit": "7 4"}


def tick(left: float, right: float, y: float) -> list[str]:
    """The second weighting: a bold line across the bar, white beside it so that it is seen on every hatch."""
    return [svg.line([(left, y), (right, y)], colour="#ffffff", width=4.5), svg.line([(left, y), (right, y)], width=2)]


def whisker(x: float, low: float, high: float) -> list[str]:
    ends = [svg.line([(x - 3.5, y), (x + 3.5, y)]) for y in (low, high)]
    return [svg.line([(x, low), (x, high)]), *ends]


def panel(shared: Shared, gpu: str, cells: Sequence[dict[str, Any]], x: float, y: float) -> Iterator[str]:
    """Both plots of one GPU; its draft lengths stand side by side, whatever lies between them."""
    left, right = x + LEFT, x + shared.width - RIGHT
    depths = sorted({cell["draft_length"] for cell in cells})
    slot = (right - left) / len(depths)
    middle = {d: left + (i + 0.5) * slot for i, d in enumerate(depths)}
    names = [name for name in shared.series if any(group_name(cell) == name for cell in cells)]
    wide = max(SLIM, min(44.0, 0.8 * slot / len(names)))
    place = {name: (i - (len(names) - 1) / 2) * wide for i, name in enumerate(names)}

    top, bottom = y + ABOVE, y + ABOVE + ERRORS
    up = Axis(shared.error_ticks[0], shared.error_ticks[-1], bottom, top)
    yield svg.text(x, y + 20, svg.fitted(panel_name(shared.document, gpu), shared.width, 15.5), size=14, bold=True)
    yield from frame(up, shared.error_ticks, left, right)
    yield svg.upright(x + 12, (top + bottom) / 2, "MAPE, %")
    for cell in cells:
        name = group_name(cell)
        yield from error_bar(cell, shared.looks[name], middle[cell["draft_length"]] + place[name], wide, up)

    top, bottom = bottom + BETWEEN, bottom + BETWEEN + RATIOS
    up = Axis(shared.ratio_ticks[0], shared.ratio_ticks[-1], bottom, top)
    yield from frame(up, shared.ratio_ticks, left, right)
    yield svg.upright(x + 12, (top + bottom) / 2, "r = T / F")
    for kind, rule in (("rule", shared.document["rule"]), ("refit", pooled(shared.document))):
        if ratio := line_of(rule):
            points = [(middle[d], up(ratio(d))) for d in depths]
            (_, first), (_, last) = points[0], points[-1]
            points = [(left + 0.1 * slot, first), (right - 0.1 * slot, last)] if len(points) == 1 else points
            yield svg.line(points, width=1.6, dash=DASH[kind])
    yield from dots(shared, gpu, middle, place, wide, up)
    skip = -(-len(depths) * 30 // int(right - left))  # labels apart by 30 pixels at least
    for i, d in enumerate(depths):
        if i % max(skip, 1) == 0:
            for base in (y + ABOVE + ERRORS, bottom):
                yield svg.text(middle[d], base + 15, str(d), anchor="middle")
    yield svg.text((left + right) / 2, bottom + 32, "draft length d", anchor="middle")


def frame(up: Axis, ticks: Sequence[float], left: float, right: float) -> Iterator[str]:
    for value in ticks:
        colour = svg.INK if value == ticks[0] else svg.GRID
        yield svg.line([(left, up(value)), (right, up(value))], colour=colour)
        yield svg.text(left - 6, up(value) + 4, f"{value:.4g}", anchor="end", size=11)


def error_bar(cell: dict[str, Any], look: svg.Look, x: float, wide: float, up: Axis) -> Iterator[str]:
    mape, equal = errors_of(cell)
    where = f"{cell['gpu']}, {group_name(cell)}, d = {cell['draft_length']}"
    interval = error_interval(cell)
    between = f" ({span(interval)})" if interval else ""
    tip = f"{where}: {number(mape)} %{between} round-weighted, {number(equal)} % equal-configuration"
    yield svg.bar(x - wide / 2, up(mape), wide, up(up.low) - up(mape), look, tip)
    top = max(mape, equal)
    if interval:
        yield from whisker(x, up(interval[0]), up(interval[1]))
        top = max(top, interval[1])
    yield from tick(x - wide / 2 + 1, x + wide / 2 - 1, up(equal))
    if svg.width_of(words := f"{mape:.1f}", 10) <= wide + 4:
        yield svg.text(x, up(top) - 5, words, size=10, anchor="middle")


def dots(
    shared: Shared, gpu: str, middle: dict[int, float], place: dict[str, float], wide: float, up: Axis
) -> Iterator[str]:
    """Configurations of one cell beside each other in their order, so that equal ones do not hide."""
    found: dict[tuple[int, str], list[float]] = {}
    for c in shared.document["configurations"]:
        if c["gpu"] == gpu and drawable(c["config_ratio_median"]) and c["draft_length"] in middle:
            found.setdefault((c["draft_length"], group_name(c)), []).append(c["config_ratio_median"])
    for (d, name), ratios in sorted((key, ratios) for key, ratios in found.items() if key[1] in place):
        for i, ratio in enumerate(ratios):
            aside = ((i + 0.5) / len(ratios) - 0.5) * 0.8 * wide
            yield svg.mark(middle[d] + place[name] + aside, up(ratio), shared.looks[name], 2.8)


LEANINGS = {"widened_batch": "widened batch (d+1)B", "kv_tokens": "past KV tokens K"}


def leanings(document: dict[str, Any], looks: dict[str, svg.Look], y: float) -> Iterator[str]:
    """Signed errors over (d+1)B and over K, each over the doublings of its values."""
    found = {key: residuals(document, key) for key in document["residuals"]}
    found = {key: rows for key, rows in found.items() if rows}
    if not found:
        return
    title = "Error of the rounds, all GPUs: mark, their median; bar, 80 % of them; above 0 the rule says too much"
    yield svg.text(GAP, y + 20, svg.fitted(title, WIDTH - 2 * GAP, 13), size=13, bold=True)
    ends = [row[f"{name}_round_error"] for rows in found.values() for row in rows for name in ("p10", "p90")]
    errors = svg.ticks(min(0.0, *ends), max(0.0, *ends), 7)
    top, bottom = y + ABOVE, y + ABOVE + RATIOS
    up = Axis(errors[0], errors[-1], bottom, top)
    wide = (WIDTH - 3 * GAP) / 2
    for i, (key, rows) in enumerate(found.items()):
        left, right = GAP + i * (wide + GAP) + LEFT, GAP + i * (wide + GAP) + wide - RIGHT
        yield from frame(up, errors, left, right)
        yield svg.line([(left, up(0)), (right, up(0))])
        yield svg.upright(left - LEFT + 12, (top + bottom) / 2, "error, %")
        middles = [math.log2(max(row["low"], 1) * max(row["high"], 1)) / 2 for row in rows]
        low, high = math.floor(min(middles)), math.ceil(max(middles) + 1e-9)
        across = Axis(low - 0.3, max(high, low + 1) + 0.3, left, right)
        for power in range(low, max(high, low + 1) + 1, -(-(high - low + 1) // 8)):
            yield svg.text(across(power), bottom + 15, f"{2**power:,}", anchor="middle")
            yield svg.line([(across(power), bottom), (across(power), bottom + 4)])
        yield svg.text((left + right) / 2, bottom + 32, LEANINGS[key], anchor="middle")
        names = sorted({row["group"] for row in rows})
        for name in names:
            own = [(x, row) for x, row in zip(middles, rows, strict=True) if row["group"] == name]
            aside = 5 * (names.index(name) - (len(names) - 1) / 2)  # so that one bar does not hide another
            points = [(across(x) + aside, up(row["median_round_error"])) for x, row in own]
            yield svg.line(points, colour=looks[name].colour)
            for (x, middle), (_, row) in zip(points, own, strict=True):
                yield svg.line([(x, up(row["p10_round_error"])), (x, up(row["p90_round_error"]))])
                yield svg.mark(x, middle, looks[name])


def described(document: dict[str, Any], cells: Sequence[dict[str, Any]]) -> str:
    """The chart in words: every bar."""
    told = []
    for cell in cells:
        mape, equal = errors_of(cell)
        told.append(
            f"{cell['gpu']}, {group_name(cell)}, d = {cell['draft_length']}: round-weighted MAPE {number(mape)} %, "
            f"equal-configuration MAPE {number(equal)} %"
        )
    hidden = sum(cell["rounds"] > 0 for cell in document["cells"]) - len(cells)
    if hidden:
        told.append(f"{hidden} cells have errors beyond any scale, by latencies that none can be, and are not drawn")
    return ". ".join(told) or "No round was scored"
