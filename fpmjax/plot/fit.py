"""`plot_fit`: one picture that shows how a model fits, where it was observed, and where draft lengths will ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.metrics import refuse
from fpmjax.observe.features import KINDS
from fpmjax.observe.observations import Observations
from fpmjax.observe.sizes import BOX
from fpmjax.plot.figure import blank, log_axis, nothing, short, style
from fpmjax.plot.look import EXTRAPOLATED, PURE_DECODE, REFUSED, SUPPORTED, Seen, inner, look, widened
from fpmjax.speculative import check_draft_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHIN = 10.0  # per cent, the band
CELL = 0.35  # e-folds between drawn queries of one draft length
# Told apart by their shapes; colour only helps.
MARKS: dict[int, dict[str, Any]] = {
    SUPPORTED: {"marker": "o", "color": "#009E73", "label": "supported"},
    EXTRAPOLATED: {"marker": "^", "color": "#D55E00", "label": "extrapolated"},
    REFUSED: {"marker": "x", "color": "black", "label": "no answer"},
}
SEEN: dict[str, Any] = {"marker": "o", "s": 9, "color": "#0072B2", "alpha": 0.6, "linewidths": 0}
LATER: dict[str, Any] = {"s": 20, "facecolors": "none", "linewidths": 0.8}
NAMES = {"Learned": "Learned model", "Corrected": "Correction"}
BOX_OF_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}


def plot_fit(
    model: Any, observations: Observations, *, draft_lengths: Sequence[int] = (1, 2, 3, 4), learned: int | None = None
) -> Figure:
    """Four panels: predicted against observed; residuals over batch and over time; the training box and the queries.

    observations: those that the model learned, and behind them any number that it did not.
    learned: how many of them it learned; None for all.  The others are drawn hollow.
    draft_lengths: where the observed work falls when it is asked at these draft lengths is shown beside the box: the
        shape of a mark tells whether the query is supported, extrapolated or without an answer.  A model that does not
        say counts as extrapolating outside of what it learned; a measured table answers or refuses.

    Write it with `fpmjax.plot.write_figure`.  Raises FpmError `matplotlib` where that is not installed, MetricsError
    `payload` for other arguments, SpeculationError and DraftLengthTypeError for what is no draft length.
    """
    if not isinstance(observations, Observations):
        refuse("payload", f"observations is a {type(observations).__name__}", "Observations.of, .read or read_trace")
    n = len(observations)
    learned = n if learned is None else learned
    if type(learned) is not int or not 0 <= learned <= n:
        refuse("payload", f"learned is {learned!r} of {n} observations", "give how many of the first ones, or None")
    depths = [check_draft_length(depth) for depth in draft_lengths]
    with style():
        seen = look(model, observations, learned)
        figure = blank((11.0, 8.2))
        (first, second), (third, fourth) = figure.subplots(2, 2)
        draw_predictions(first, seen)
        draw_residuals_by_size(second, seen)
        draw_box(third, model, seen, depths)
        draw_residuals_in_order(fourth, seen, learned)
        figure.suptitle(headline(model, n, learned, len(seen.position)), x=0.01, ha="left", fontsize=11)
    return figure


def headline(model: Any, n: int, learned: int, drawn: int) -> str:
    later = f", {n - learned:,} later ones were not" if n > learned else ""
    thinned = f"; {drawn:,} of them are drawn" if drawn < n else ""
    role = getattr(model, "role", None)
    work = f" of {role} work" if role else ""
    what = NAMES.get(type(model).__name__, type(model).__name__)
    return f"{what}{work}: {learned:,} observations learned{later}{thinned}"


# Panels


def draw_predictions(axes: Axes, seen: Seen) -> None:
    """Predicted against observed milliseconds, both logarithmic, and the band."""
    axes.set_title("Predicted against observed")
    axes.set_xlabel("observed ms")
    axes.set_ylabel("predicted ms")
    if not seen.answered.any():
        return nothing(axes, "no observation has an answer")
    x, y = seen.observed[seen.answered], seen.predicted[seen.answered]
    low, high = 0.93 * min(x.min(), y.min()), 1.07 * max(x.max(), y.max())
    line = np.array([low, high])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between(line, line * (1 - WITHIN / 100), line * (1 + WITHIN / 100), color="0.9", lw=0, label="±10 %")
    axes.plot(line, line, color="0.4", lw=0.8)
    scatter(axes, seen, seen.observed, seen.predicted)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    log_axis(axes.xaxis, low, high)
    log_axis(axes.yaxis, low, high)
    axes.legend(loc="upper left")
    told = [score(seen, ~seen.later, "learned"), score(seen, seen.later, "not learned")]
    text = "\n".join(line for line in told if line)
    axes.text(0.98, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, bbox=BOX_OF_TEXT)


def score(seen: Seen, which: np.ndarray, name: str) -> str:
    """`learned: MAPE 1.6 %, bias +0.1 %, range holds 91 %` of these observations; empty without any."""
    there = which & seen.answered
    if not there.any():
        return ""
    error = seen.residual[there]
    ranged = there & seen.ranged
    held = f", range holds {100.0 * seen.inside[ranged].mean():.0f} %" if ranged.any() else ""
    return f"{name}: MAPE {np.abs(error).mean():.2f} %, bias {error.mean():+.2f} %{held}"


def scatter(axes: Axes, seen: Seen, x: np.ndarray, y: np.ndarray, *, named: bool = True) -> None:
    """The answered observations: learned ones as dots, later ones hollow in the shape of their place.

    named: in the legend too; once is enough.
    """
    learned = seen.answered & ~seen.later
    if learned.any():
        axes.scatter(x[learned], y[learned], label="learned" if named else None, **SEEN)
    for place in (SUPPORTED, EXTRAPOLATED):
        there = seen.answered & seen.later & (seen.place == place)
        if there.any():
            mark = MARKS[place]
            label = f"not learned, {mark['label']}" if named else None
            axes.scatter(x[there], y[there], marker=mark["marker"], edgecolors=mark["color"], label=label, **LATER)


def draw_residuals(axes: Axes, seen: Seen, x: np.ndarray) -> None:
    """Residuals in per cent over x; what is far away stands at the edge, pointing there."""
    axes.set_ylabel("predicted - observed, % of observed")
    if not seen.answered.any():
        return nothing(axes, "no observation has an answer")
    size = np.abs(seen.residual[seen.answered])
    top = max(1.1 * WITHIN, 1.3 * float(np.quantile(size, 0.95)))
    axes.axhspan(-WITHIN, WITHIN, color="0.93", lw=0)
    axes.axhline(0.0, color="0.4", lw=0.8)
    scatter(axes, seen, x, np.where(np.abs(seen.residual) <= top, seen.residual, np.nan), named=False)
    carets: tuple[tuple[int, Any], ...] = (1, 6), (-1, 7)  # matplotlib's, pointing up and down
    for sign, marker in carets:
        beyond = seen.answered & (sign * seen.residual > top)
        if beyond.any():
            label = f"{int(beyond.sum()):,} farther {'up' if sign > 0 else 'down'}"
            y = np.full(int(beyond.sum()), sign * top * 0.99)
            axes.scatter(x[beyond], y, marker=marker, s=30, color="0.3", label=label, linewidths=0)
    axes.set_ylim(-top * 1.06, top * 1.25)  # room for the legend


def draw_residuals_by_size(axes: Axes, seen: Seen) -> None:
    """Over the batch, or over the new tokens where nothing decodes."""
    decodes = (seen.at[:, BOX.index("decode_rows")] > 1).any() or (seen.kind == PURE_DECODE).any()
    name, x = ("batch, requests of the busiest rank", seen.batch) if decodes else ("new tokens", seen.tokens)
    axes.set_title(f"Residuals over {'batch' if decodes else 'new tokens'}")
    axes.set_xlabel(name)
    x = np.maximum(x.astype(np.float64), 1.0)
    draw_residuals(axes, seen, x)
    if seen.answered.any():
        axes.set_xscale("log", base=2)
        low, high = 0.85 * x.min(), 1.18 * x.max()
        axes.set_xlim(low, high)
        log_axis(axes.xaxis, low, high, base=2)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper right", ncols=2)


def draw_residuals_in_order(axes: Axes, seen: Seen, learned: int) -> None:
    """Over the order of observation, with the median of stretches, which shows drift."""
    axes.set_title("Residuals in the order of observation")
    axes.set_xlabel("observation")
    draw_residuals(axes, seen, seen.position.astype(np.float64))
    if not seen.answered.any():
        return
    known = np.flatnonzero(seen.answered)
    pieces = np.array_split(known, max(1, min(40, len(known) // 8)))
    middle = [(seen.position[p].mean(), np.median(seen.residual[p])) for p in pieces if len(p)]
    axes.plot(*np.array(middle).T, color="black", lw=1.2, label="median of stretches")
    if seen.later.any():
        axes.axvline(learned - 0.5, color="black", lw=0.8, ls="--", label="learned up to here")
    axes.legend(loc="upper right", ncols=3)


def draw_box(axes: Axes, model: Any, seen: Seen, depths: Sequence[int]) -> None:
    """What was observed in the plane of batch and KV, its box, and where the draft lengths fall."""
    decode = seen.kind == PURE_DECODE
    if not decode.any():
        return draw_prefill_box(axes, seen)
    queries = widened(model, seen, depths)
    axes.set_title("Training box, and where draft lengths fall" if queries else "Training box")
    axes.set_xlabel("batch, rows of the pass ((draft length + 1) rows per request)" if queries else "batch")
    axes.set_ylabel("past KV tokens, total")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if PURE_DECODE in seen.boxes:
        outline(axes, *seen.boxes[PURE_DECODE])
    x, y = BOX.index("decode_rows"), BOX.index("decode_kv")
    axes.scatter(seen.at[decode, x], seen.at[decode, y], label="observed", **SEEN)
    told = []
    for place, mark in MARKS.items():
        drawn = np.concatenate([np.zeros((0, len(BOX))), *(thinned(q.at[q.place == place]) for q in queries)])
        if len(drawn):
            paint = (
                {"color": mark["color"]} if place == REFUSED else {"edgecolors": mark["color"], "facecolors": "none"}
            )
            axes.scatter(
                drawn[:, x], drawn[:, y], s=26, marker=mark["marker"], linewidths=0.9, label=mark["label"], **paint
            )
    for query in queries:
        shares = [100.0 * (query.place == place).mean() for place in MARKS]
        told.append(f"draft length {query.depth}: " + " / ".join(f"{share:.0f}" for share in shares) + " %")
    corners = seen.boxes.get(PURE_DECODE, ())
    everything = np.concatenate([seen.at[decode], *(q.at for q in queries), *(np.array([end]) for end in corners)])
    # Room for the legend below on the right, and for the shares above on the left.
    margins = ((x, 0.8, 1.25), (y, 0.4, 4.0 if queries else 1.5))
    limits = [(low * everything[:, i].min(), high * everything[:, i].max()) for i, low, high in margins]
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    log_axis(axes.xaxis, *limits[0], base=2)
    log_axis(axes.yaxis, *limits[1])
    limit_of_anchor(axes, model, limits[0][1])
    axes.legend(loc="lower right")
    if told:
        text = "\n".join([" / ".join(mark["label"] for mark in MARKS.values()), *told])
        axes.text(0.02, 0.98, text, transform=axes.transAxes, ha="left", va="top", fontsize=8, bbox=BOX_OF_TEXT)


def draw_prefill_box(axes: Axes, seen: Seen) -> None:
    """What was observed in the plane of new and cached tokens, for workers that decode nothing by itself."""
    axes.set_title("Training box of prompts")
    axes.set_xlabel("new tokens")
    axes.set_ylabel("cached KV tokens, total (none stands at 1)")
    x, y = BOX.index("prefill_tokens"), BOX.index("prefill_kv")
    if not len(seen.at):
        return nothing(axes, "nothing was observed")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for kind, (low, high) in seen.boxes.items():
        corners = [(low[x], low[y]), (high[x], low[y]), (high[x], high[y]), (low[x], high[y]), (low[x], low[y])]
        label = f"training box, {KINDS[kind].replace('_', ' ')}"
        axes.plot(*np.array(corners).T, color="#0072B2", lw=1.2, label=label)
    scatter(axes, seen, seen.at[:, x], seen.at[:, y])
    limits = [(0.8 * seen.at[:, i].min(), 1.25 * seen.at[:, i].max()) for i in (x, y)]
    axes.set_xlim(*limits[0])
    axes.set_ylim(*limits[1])
    log_axis(axes.xaxis, *limits[0])
    log_axis(axes.yaxis, *limits[1])
    axes.legend(loc="best")


def outline(axes: Axes, low: np.ndarray, high: np.ndarray) -> None:
    """The box is a range of batches, of KV totals and of KV per request; in this plane it has up to six corners."""
    rows, kv, past = (BOX.index(name) for name in ("decode_rows", "decode_kv", "decode_kv_per_request"))
    batch = np.geomspace(low[rows], max(high[rows], low[rows] * 1.0001), 200)
    bottom, top = np.maximum(low[kv], low[past] * batch), np.minimum(high[kv], high[past] * batch)
    there = top >= bottom
    batch, bottom, top = batch[there], bottom[there], top[there]
    if len(batch):
        around = [*zip(batch, bottom, strict=True), *zip(batch[::-1], top[::-1], strict=True)]
        corners = np.array([*around, around[0]])
        axes.fill(*corners.T, facecolor="#0072B2", alpha=0.12, lw=0)
        axes.plot(*corners.T, color="#0072B2", lw=1.2, label="training box")


def limit_of_anchor(axes: Axes, model: Any, right: float) -> None:
    """The widest batch that a learned model answers at a draft length."""
    learned = inner(model)
    if not hasattr(learned, "anchor") or "pure_decode" not in learned.kinds:
        return
    limit = float(learned.anchor) * float(learned.stores.largest[learned.kinds.index("pure_decode")])
    if 0 < limit < right:
        axes.axvline(limit, color="0.3", lw=0.9, ls="--", label=f"drafts ready up to {short(limit)}")


def thinned(at: np.ndarray) -> np.ndarray:
    """One of the queries in every cell of the plane."""
    columns = [BOX.index("decode_rows"), BOX.index("decode_kv")]
    _, first = np.unique(np.floor(np.log(at[:, columns]) / CELL), axis=0, return_index=True)
    return at[first]
