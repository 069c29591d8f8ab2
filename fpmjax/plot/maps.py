"""A quantity over two axes: colours, labelled contours or numbers in the cells, and hatches where there is no value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpmjax.plot.field import BEST, MEASURED, Field
from fpmjax.plot.scale import Places, Shades, plain, set_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW = 60  # cells of a panel that have room for a number each
FEW_ACROSS = 8  # of them side by side
LETTER, LINE, ROOM = 0.066, 0.11, 0.05  # inches, of a number on a contour: a letter across, a line up, and around it
SHORTEST = 0.08  # of the axes: a piece of a contour that has room for a number
WHERE = (0.5, 0.38, 0.62, 0.26, 0.74, 0.14, 0.86)  # on a piece, where its number may stand
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
FINE = 40  # cells along an axis up to which categories are drawn cell by cell
HATCHED = {"facecolor": "none", "edgecolor": "0.35", "linewidth": 0.0}


def draw_map(
    axes: Axes, field: Field, x: Places, y: Places, shades: Shades | None, hatch: Mapping[str, str]
) -> tuple[Any, bool]:
    """The panel; returns what a colour bar needs, None without values, and whether numbers stand in the panel."""
    axes.grid(False)
    mesh, told = None, False
    if field.quantity.categories:
        draw_categories(axes, field, x, y)
    elif shades is not None:
        shown = np.ma.masked_invalid(field.values)
        mesh = axes.pcolormesh(x.edges, y.edges, shown, cmap=shades.cmap, norm=shades.norm, rasterized=True)
        if field.values.size <= FEW and len(x.at) <= FEW_ACROSS:
            write_numbers(axes, field, x, y, shades)
            told = True
        elif min(field.values.shape) > 1:
            told = draw_contours(axes, field, x, y, shades)
    for label, where in field.marks.items():
        if where.any():
            draw_hatches(axes, where, x, y, hatch[label], label)
    axes.set_xlim(x.edges[0], x.edges[-1])
    axes.set_ylim(y.edges[0], y.edges[-1])
    return mesh, told


def draw_categories(axes: Axes, field: Field, x: Places, y: Places) -> None:
    """Flat colours, and the hatches of those that have one."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import PathPatch

    categories = field.quantity.categories
    cmap = ListedColormap([colour for _, colour, _ in categories])
    norm = BoundaryNorm(np.arange(len(categories) + 1) - 0.5, len(categories))
    axes.pcolormesh(x.edges, y.edges, np.ma.masked_invalid(field.values), cmap=cmap, norm=norm, rasterized=True)
    lines = {"color": "white", "lw": 0.6}
    if len(y.at) <= FINE:
        axes.hlines(y.edges[1:-1], x.edges[0], x.edges[-1], **lines)
    if len(x.at) <= FINE:
        axes.vlines(x.edges[1:-1], y.edges[0], y.edges[-1], **lines)
    for i, (label, colour, hatch) in enumerate(categories):
        if not (where := field.values == i).any():
            continue
        if label == MEASURED:  # of single cells among thousands nothing would be left
            axes.add_patch(PathPatch(outline(where, x, y), facecolor=colour, edgecolor=colour, linewidth=0.7))
        if hatch:
            draw_hatches(axes, where, x, y, hatch, label)
        if word := label.partition(": ")[2].partition(",")[0] if label.startswith(BEST) else "":
            write_within(axes, where, x, y, word)


def write_within(axes: Axes, where: np.ndarray, x: Places, y: Places, word: str) -> None:
    """A word in the middle of the widest run of cells."""
    from matplotlib.patheffects import withStroke

    corners = rectangles(where)
    scaled = [np.log(one.edges) if one.log else one.edges for one in (x, y)]
    width, height = (scaled[i][corners[:, j]] - scaled[i][corners[:, k]] for i, j, k in ((0, 2, 1), (1, 3, 0)))
    row, first, end, top = corners[(width * height).argmax()]
    middle = [(one[a] + one[b]) / 2 for one, a, b in zip(scaled, (first, row), (end, top), strict=True)]
    at = [np.exp(m) if one.log else m for m, one in zip(middle, (x, y), strict=True)]
    halo = [withStroke(linewidth=3.0, foreground="white")]
    axes.text(float(at[0]), float(at[1]), word, ha="center", va="center", fontsize=11, weight="bold", path_effects=halo)


def draw_hatches(axes: Axes, where: np.ndarray, x: Places, y: Places, hatch: str, label: str) -> None:
    """Hatch cells; one path of rectangles, neighbours in a row joined, so that a hatch runs through them."""
    from matplotlib.patches import PathPatch

    axes.add_patch(PathPatch(outline(where, x, y), hatch=hatch, label=label, **HATCHED))


def outline(where: np.ndarray, x: Places, y: Places) -> Any:
    """The path of rectangles that cover these cells."""
    from matplotlib.path import Path

    corners = rectangles(where)
    left, right = x.edges[corners[:, 1]], x.edges[corners[:, 2]]
    low, high = y.edges[corners[:, 0]], y.edges[corners[:, 3]]
    points = np.stack([left, low, right, low, right, high, left, high, left, low], 1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(corners))
    return Path(points, codes.astype(np.uint8))


def rectangles(where: np.ndarray) -> np.ndarray:
    """int [n, 4], (row, first, end, row end): rectangles that cover the cells, as high as runs are equal."""
    out: list[list[int]] = []
    open_runs: dict[tuple[int, int], list[int]] = {}
    for row, cells in enumerate(where):
        cuts = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(np.int8)))
        runs = [(int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        now = {}
        for run in runs:
            if run not in open_runs:
                out.append([row, *run, row])
            now[run] = open_runs.get(run, out[-1])
            now[run][3] = row + 1
        open_runs = now
    return np.array(out, np.int64).reshape(-1, 4)


def draw_contours(axes: Axes, field: Field, x: Places, y: Places, shades: Shades) -> bool:
    """Lines of equal value with their numbers, broken below zero; whether there is any number.

    They run between the centres of neighbours that all have a value: elsewhere nothing is known of them.
    """
    from matplotlib.path import Path
    from matplotlib.patheffects import withStroke

    values = np.ma.masked_invalid(field.values)
    levels = [level for level in shades.levels if values.min() < level < values.max()] if values.count() else []
    if not levels:
        return False
    lines: dict[str, Any] = {"colors": "black", "negative_linestyles": "dashed"}
    lines["linewidths"] = [1.6 if level == 0 and field.quantity.signed else 0.8 for level in levels]
    found = axes.contour(x.at, y.at, values, levels=levels, corner_mask=False, **lines)
    found.set_path_effects([withStroke(linewidth=2.4, foreground="white", alpha=0.5)])
    sign = "+" if field.quantity.signed and shades.norm.vmin < 0 else ""
    words = [sign + plain(level) if level > 0 else plain(level) for level in levels]
    axes.set_xlim(x.edges[0], x.edges[-1])
    axes.set_ylim(y.edges[0], y.edges[-1])
    pieces = [[piece for piece in pieces_of(axes, path) if piece.long] for path in found.get_paths()]
    found.set_paths([Path.make_compound_path(*(piece.path for piece in some)) for some in pieces])
    return bool(write_on_lines(axes, dict(zip(words, pieces, strict=True))))


class Piece(NamedTuple):
    """A connected piece of a line: itself, and float64 [points, 3]: across, up, and the length so far, in parts of the
    axes."""

    path: Any
    along: np.ndarray

    @property
    def length(self) -> float:
        return float(self.along[-1, 2])

    @property
    def long(self) -> bool:
        """Long enough for a number; what is shorter would be a scratch without one."""
        return self.length >= SHORTEST


def write_on_lines(axes: Axes, lines: Mapping[str, list[Piece]]) -> int:
    """Numbers on the pieces of lines, the longest first, where they hide no other one; how many there are.

    Upright and on white, as the dashes of a line would be taken for a minus.
    """
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    width, height = box.width / dpi, box.height / dpi
    pieces = [(word, piece) for word, some in lines.items() for piece in some]
    taken: list[tuple[float, float, float]] = []  # middle, and half the width, of numbers, all in parts of the axes
    for word, piece in sorted(pieces, key=lambda one: -one[1].length):
        half, tall = (0.5 * LETTER * len(word) + ROOM) / width, (LINE + ROOM) / height
        for share in WHERE:
            far = piece.along[:, 2]
            across, up = (float(np.interp(share * far[-1], far, piece.along[:, i])) for i in (0, 1))
            if not (half < across < 1 - half and tall / 2 < up < 1 - tall / 2):
                continue
            if all(abs(across - a) > half + h or abs(up - u) > tall for a, u, h in taken):
                taken.append((across, up, half))
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "bbox": LABEL}
                axes.text(across, up, word, transform=axes.transAxes, **look)
                break
    return len(taken)


def pieces_of(axes: Axes, path: Any) -> list[Piece]:
    """The pieces of all lines of one level."""
    from matplotlib.path import Path

    if not len(path.vertices):
        return []
    at = axes.transAxes.inverted().transform(axes.transData.transform(path.vertices))
    found = []
    for rows in np.split(np.arange(len(at)), np.flatnonzero(path.codes == path.MOVETO)[1:]):
        steps = np.hypot(*np.diff(at[rows], axis=0).T)
        along = np.column_stack([at[rows], np.concatenate([[0.0], np.cumsum(steps)])])
        found.append(Piece(Path(path.vertices[rows], path.codes[rows]), along))
    return found


def span_of(field: Field) -> str:
    """The least and the largest value of a panel, in words; empty where there is none."""
    known = field.values[np.isfinite(field.values)]
    if not len(known):
        return ""
    low, high = float(known.min()), float(known.max())
    if low == high == 0 and field.quantity.zero:
        return field.quantity.zero
    if low == high:
        return f"{plain(low)} everywhere"
    words = plain(low), plain(high)
    return " to ".join(words if words[0] != words[1] else (f"{low:.8g}", f"{high:.8g}"))


def write_numbers(axes: Axes, field: Field, x: Places, y: Places, shades: Shades) -> None:
    """The value in every cell."""
    sign = field.quantity.signed and shades.norm.vmin < 0
    for row, column in np.argwhere(np.isfinite(field.values)).tolist():
        value = float(field.values[row, column])
        red, green, blue, _ = shades.cmap(shades.norm(value))
        colour = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        text = f"{value:+.3g}" if sign else in_cell(value)
        axes.text(x.at[column], y.at[row], text, ha="center", va="center", fontsize=7.5, color=colour)


def in_cell(value: float) -> str:
    """Four digits, zeros at their end included."""
    return plain(value) if abs(value) >= 1000 or abs(value) < 1e-3 else f"{value:#.4g}".rstrip(".")


def add_rows_axis(axes: Axes, x: Places, rows: int) -> None:
    """A second axis above: the decode rows that a widened batch is looked up at."""
    from matplotlib.ticker import NullLocator

    widen: Any = (lambda b: b * rows, lambda r: r / rows)
    second = axes.secondary_xaxis("top", functions=widen)
    positions, _ = x.ticks()
    second.xaxis.set_ticks([p * rows for p in positions], [plain(p * rows) for p in positions])
    second.xaxis.set_minor_locator(NullLocator())
    second.set_xlabel(f"decode rows that are looked up, {rows} a request", fontsize=8)


def name_axes(axes: Axes, x: Places, y: Places, labels: tuple[str, str | None]) -> None:
    """Ticks and labels; a picture of one axis has none along the other."""
    set_axis(axes, "x", x, labels[0])
    if labels[1] is None:
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    else:
        set_axis(axes, "y", y, labels[1])
