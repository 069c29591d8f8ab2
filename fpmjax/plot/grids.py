"""`plot_grid`, `plot_difference`: pictures of whole grids of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpmjax.errors import CoverageError, refuse_option
from fpmjax.grid import DRAFT, Grid
from fpmjax.metrics import show as show_value
from fpmjax.plot.figure import style
from fpmjax.plot.plane import AXES, MOST_LINES, MOST_PANELS, Plane, check_panels, plane_of, rounds_of
from fpmjax.plot.sheet import draw_sheet
from fpmjax.plot.shows import SHOWS, Question, Show, difference, whole
from fpmjax.plot.text import LONGEST, legible
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import check_rule
from fpmjax.tables.policy import POLICIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, and how many cells of what it shows have which status."""

    figure: Figure
    counts: Mapping[str, int]


def plot_grid(
    models: Any,
    grid: Any,
    *,
    show: str = "latency",
    tokens_per_round: Any = None,
    rule: SpeculativeRule | None = None,
    progress: bool = True,
) -> Figure:
    """One picture of a whole grid: every cell is asked, and drawn over two of its axes.

    models: one, several in a list, or {name: model}, as `sweep` takes them; None where the grid has its own.
    grid: `fpmjax.grid(...)`, of at most 2**20 cells.  Its first two axes of several values, batch before context, are
        the plane, logarithmic where they span a factor of 8; models and draft lengths make panels, 12 at most.  A grid
        with one such axis is drawn as lines, 8 in a panel at most.
    show: "latency", ms of a pass, or of a round where the grid has a draft length;
        "throughput", decode requests / latency, a second;
        "coverage", which cells were measured, which are interpolated and between what, and why others are refused; at a
        draft length this is the lookup at the widened batch, which a second axis shows;
        "draft_length", the tokens that a round must yield to be no slower than ordinary decoding, T(d) / F; or, with
        `tokens_per_round`, the draft length of most tokens a second and what it gains over ordinary decoding;
        "sensitivity", d ms / d KV, and F(B + 1) - F(B) at the same context, of pure decode.
    tokens_per_round: of "draft_length": what a round yields, the accepted tokens and the one that is always gained: an
        `Acceptance`, a list from draft length 0 on ([1, 1.7, 2.2]) or {draft length: tokens}.
    rule: factor of a speculative round; None is the published one.

    Nothing is told by colour alone: contours and cells carry numbers, refused and extrapolated cells hatches, lines
    dashes and markers (a filled one stands where a row was measured; of a round, the ordinary pass behind it).  Ranges
    of a model are shaded around lines.  Contours run between the centres of cells that all have a latency, and nowhere
    else; a panel that has no room for one says what its values span.  Idle cells are hatched: 0 ms is no latency.
    Names are shown as they are, shortened in the middle beyond 48 letters; letters that DejaVu Sans lacks as escapes.

    Write it with `fpmjax.plot.write_figure`.  Raises OptionError (`show`, `grid`, `models`, `axes`, `cells`, `panels`,
    `tokens_per_round`, `rule`), CoverageError `nothing_answered`, FpmError `matplotlib`, and what `sweep` raises.
    """
    return draw_grid(models, grid, show, tokens_per_round, rule, progress).figure


def plot_difference(
    a: Any,
    b: Any,
    grid: Any,
    *,
    names: Sequence[str] = ("A", "B"),
    rule: SpeculativeRule | None = None,
    progress: bool = True,
) -> Figure:
    """Where two models, or two versions of a table, differ: 100 (b - a) / a of every cell, as `compare` tells it.

    grid, rule: as of `plot_grid`; the grid has no models of its own.  names: what they are called in the title.
    The scale is symmetrical and leaves out the outermost hundredth; contours are signed, broken below zero; cells that
    only one of them answers are hatched.

    Raises OptionError (`names`) and what `plot_grid` raises.
    """
    return draw_difference(a, b, grid, names, rule, progress).figure


def draw_grid(
    models: Any, grid: Any, show: str, tokens_per_round: Any, rule: SpeculativeRule | None, progress: bool
) -> Picture:
    plane, kind = checked(models, grid, show, tokens_per_round, rule)
    with style():
        question = Question(plane, rule, tokens_per_round, progress)
        answers = question.ask(evidence=kind.evidence or plane.y is None)
        if not answers.answered.any() and show != "coverage":
            nothing_answered(answers.counts())
        fields = kind.fields(question, answers)
        title = headline(plane, kind, tokens_per_round)
        named = dict(zip(plane.names, plane.models, strict=True)) if len(plane.models) > 1 else plane.models
        return Picture(draw_sheet(plane, fields, title, subtitle(named)), answers.counts())


def draw_difference(a: Any, b: Any, grid: Any, names: Any, rule: SpeculativeRule | None, progress: bool) -> Picture:
    planes = checked_pair(a, b, grid, rule)
    names = names_of(names)
    with style():
        first, second = (Question(plane, rule, None, progress).ask() for plane in planes)
        counts = Counter(first.counts()) + Counter(second.counts())
        if not (first.answered | second.answered).any():
            nothing_answered(counts)
        plane = planes[0]
        what = f"{names[1]} against {names[0]}: difference of the latency of {whole(plane)}{over(plane)}"
        fields = difference(plane, first, second)
        models = {f"A, {names[0]}" if names[0] != "A" else "A": a, f"B, {names[1]}" if names[1] != "B" else "B": b}
        return Picture(draw_sheet(plane, fields, what, subtitle(models)), counts)


def checked(models: Any, grid: Any, show: Any, tokens_per_round: Any, rule: Any = None) -> tuple[Plane, Show]:
    """Whatever can be refused before anything is computed."""
    if not isinstance(show, str) or show not in SHOWS:
        if isinstance(show, str) and show == "difference":
            refuse_option("show", "a difference is of two models", "plot_difference(a, b, grid)")
        refuse_option("show", f"show is {show_value(show)}", f"one of {', '.join(SHOWS)}")
    plane, kind = plane_of(models, drafted(grid) if show == "draft_length" else grid), SHOWS[show]
    kind.check(plane)
    refuse_rule(plane, rule)
    if tokens_per_round is not None:
        if show != "draft_length":
            refuse_option("tokens_per_round", f"tokens_per_round has no part in {show}", "show='draft_length'")
        rounds_of(tokens_per_round, plane.grid[DRAFT])
    quantities = kind.quantities
    panels = len(plane.places())
    if show == "draft_length" and plane.y is not None and tokens_per_round is not None:
        panels //= len(plane.grid[DRAFT])
    elif show == "draft_length":
        quantities = 1
    check_size(plane, panels, quantities)
    return plane, kind


def drafted(grid: Any) -> Any:
    """The grid without draft length 0, which every draft length is compared with anyway."""
    if not isinstance(grid, Grid) or DRAFT not in grid.names or not grid[DRAFT].any():
        return grid
    values = [x[x > 0] if name == DRAFT else x for name, x in zip(grid.names, grid.values, strict=True)]
    return Grid(grid.names, tuple(values), grid.models)


def refuse_rule(plane: Plane, rule: Any) -> None:
    """As `sweep` does, also where nothing would need it."""
    check_rule(rule)
    if rule is not None and DRAFT not in plane.grid.names:
        refuse_option("rule", "a rule scales speculative rounds, but no draft_length is there", "give draft_length too")


def names_of(names: Any) -> tuple[str, str]:
    """What A and B are called; OptionError (`names`)."""
    if not isinstance(names, (list, tuple)) or len(names) != 2 or not all(isinstance(x, str) and x for x in names):
        refuse_option("names", f"names is {show_value(names)}", "give two, such as names=('before', 'after')")
    return legible(names[0], LONGEST), legible(names[1], LONGEST)


def checked_pair(a: Any, b: Any, grid: Any, rule: Any = None) -> tuple[Plane, Plane]:
    planes = plane_of(a, grid), plane_of(b, grid)
    if any(len(plane.models) != 1 for plane in planes):
        refuse_option("models", "one model is compared with one other", "plot_difference(model, other, grid)")
    refuse_rule(planes[0], rule)
    check_size(planes[0], len(planes[0].places()), 1)
    return planes


def check_size(plane: Plane, panels: int, quantities: int) -> None:
    if plane.y is not None:
        check_panels(panels * quantities, MOST_PANELS, "panels")
        return
    places = plane.places()
    check_panels(len({panel for panel, _ in places}) * quantities, MOST_PANELS, "panels")
    check_panels(len({line for _, line in places}), MOST_LINES, "lines")


def nothing_answered(counts: Mapping[str, int]) -> None:
    told = ", ".join(f"{many:,} {word}" for word, many in counts.items())
    raise CoverageError(
        f"no cell of this grid has an answer ({told})\nhint: a picture of the coverage tells why",
        code="nothing_answered",
    )


# Titles


def headline(plane: Plane, kind: Show, tokens_per_round: Any) -> str:
    widened = " in the widened pass behind a round" if plane.drafted else ""
    words = kind.title.format(whole=whole(plane), widened=widened) + over(plane)
    if tokens_per_round is None:
        return words
    depths = plane.grid[DRAFT]
    pairs = zip(depths.tolist(), rounds_of(tokens_per_round, depths).tolist(), strict=True)
    return f"Draft lengths{over(plane)}; a round yields {', '.join(f'{e:.4g} at {d:,}' for d, e in pairs)} tokens"


def over(plane: Plane) -> str:
    axes = [AXES[name][1] for name in (plane.x, plane.y) if name is not None]
    fixed = f", {plane.fixed}" if plane.fixed else ""
    return f" over {' and '.join(axes)}{fixed}"


def about(model: Any) -> tuple[str, str]:
    """(what a model is, which clock it tells), the latter empty where nobody knows."""
    cell = getattr(model, "cell", None)
    if cell is not None:
        return str(cell.identity), POLICIES[cell.policy].clock
    role, clock, inner = (getattr(model, name, None) for name in ("role", "timing", "model"))
    words = f"{type(model).__name__.lower()} model" + (f" of {role} work" if role else "")
    if inner is None:
        return words, clock if isinstance(clock, str) else ""
    around, native = about(inner)
    return f"{words} around {around}", native


def subtitle(models: Any) -> list[str]:
    """A line for each model, with its clock, which is said once where it is the same one."""
    named = list(models.items()) if isinstance(models, Mapping) else [("", model) for model in models]
    told = [(f"{name}: " if name else "", *about(model)) for name, model in named]
    clocks = {clock for _, _, clock in told}
    if len(told) == 1 or len(clocks) > 1:
        return [f"{name}{what}" + (f"; clock: {clock}" if clock else "") for name, what, clock in told]
    return [*(f"{name}{what}" for name, what, _ in told), *(f"clock of all: {clock}" for clock in clocks if clock)]
