"""What pictures of grids show: each `show` a function from answers to the fields of its panels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fpmjax.answer import Resolution
from fpmjax.errors import refuse_option
from fpmjax.grid import DECODE, DRAFT, MODEL, PREFILL, Grid
from fpmjax.plot.field import (
    BEST,
    EXTRAPOLATED,
    IDLE,
    MEASURED,
    SOME_MISSING,
    Field,
    Quantity,
    blanks,
    marks_of,
    refusals,
)
from fpmjax.plot.plane import Answers, Plane, rounds_of
from fpmjax.query_source import GridQueries, Piece
from fpmjax.sensitivity import sensitivity
from fpmjax.status import Status
from fpmjax.sweep_job import by_depth, some

NO_ORDINARY = "no ordinary answer to compare with"
NEVER = "never pays: more than a round can yield"
NO_NEIGHBOUR = "the next one has no answer"
ONLY_A, ONLY_B, NEITHER = "only A answers", "only B answers", "neither answers"
FITTED, BEYOND, NO_WORK = 5, 6, 7  # behind `Resolution`, of answers that are no lookups
# Dark to light, so that a print in grey tells them apart.
COVERAGE = (
    (MEASURED, "#08306b", ""),
    ("interpolated along one measured curve", "#3f8fc5", ""),
    ("interpolated between batches", "#a6cfe5", ""),
    ("interpolated between cached prefixes", "#c6dbef", ".."),
    ("interpolated between prompts", "#deebf7", "|||"),
    ("answered by a fit, inside of what it learned", "#a6cfe5", ""),
    (EXTRAPOLATED, "#e8eef4", ".."),
    ("idle, 0 ms", "#f7f7f7", "---"),
)
DRAFTS = (  # (colour, hatch) of the best draft length, the ordinary pass first
    ("#ffffff", ""),
    ("#fff0d6", "."),
    ("#fdd8a4", "/"),
    ("#fdbe85", "\\"),
    ("#f7a072", "x"),
    ("#ec8667", "+"),
    ("#dd7a6b", "-"),
    ("#cf7277", "|"),
    ("#bd6f86", "*"),
)


@dataclass(frozen=True, eq=False)
class Question:
    """What is to be drawn: the plane, and the options of the picture."""

    plane: Plane
    rule: Any
    tokens_per_round: Any
    progress: bool

    def ask(self, plane: Plane | None = None, **more: Any) -> Answers:
        plane = plane or self.plane
        return plane.ask(rule=self.rule if DRAFT in plane.grid.names else None, progress=self.progress, **more)


class Show(NamedTuple):
    """One kind of picture.

    title: in a few words, {whole} for the pass or round, {widened} where rounds are looked up; fields: what its panels
    hold; check: raises for a plane that it cannot be drawn of; quantities: panels per place, at most; evidence:
    whether it asks for the lookups.
    """

    title: str
    fields: Callable[[Question, Answers], list[Field]]
    check: Callable[[Plane], None] = lambda plane: None
    quantities: int = 1
    evidence: bool = False


def whole(plane: Plane) -> str:
    return "one round" if plane.drafted else "one pass"


# Latency and throughput


def latency(question: Question, answers: Answers) -> list[Field]:
    return over_answers(question, answers, Quantity("Latency", f"latency of {whole(question.plane)}, ms"), 1.0)


def throughput(question: Question, answers: Answers) -> list[Field]:
    """Decode requests of a pass, or of a round, over its latency."""
    unit = "request rounds" if question.plane.drafted else "request steps"
    return over_answers(
        question, answers, Quantity("Throughput", f"{unit} a second"), 1e3 * question.plane.column(DECODE)
    )


def over_answers(question: Question, answers: Answers, quantity: Quantity, batch: Any) -> list[Field]:
    """The latency itself, or a batch over it, with the range that it brings along."""

    served = answers.status == Status.OK

    def of(ms: np.ndarray | None) -> np.ndarray | None:
        if ms is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(served & (ms > 0), ms if np.ndim(batch) == 0 else batch / ms, np.nan)

    shown, low, high = of(answers.latency_ms), of(answers.low_ms), of(answers.high_ms)
    assert shown is not None
    out = []
    for i, (panel, line) in enumerate(question.plane.places()):
        exact = None if answers.resolution is None else answers.resolution[i] == Resolution.EXACT
        span = (None, None) if low is None or high is None else (low[i], high[i])
        out.append(Field(quantity, panel, line, shown[i], marks_of(answers, i), exact, *span))
    return out


def needs_decode(plane: Plane) -> None:
    if DECODE not in plane.grid.names:
        refuse_option(DECODE, "this picture is about decode requests, none are asked", "give the grid decode_requests")


def needs_pure_decode(plane: Plane) -> None:
    needs_decode(plane)
    if any(name.startswith(("prefill", "tokens")) and plane.grid[name].any() for name in plane.grid.names):
        refuse_option(PREFILL, "sensitivity is of pure decode", "leave the prefill axes out")


# Coverage


def coverage(question: Question, answers: Answers) -> list[Field]:
    """How each answer was found, and why there is none; at a draft length, at the widened work."""
    plane = question.plane
    quantity = Quantity("Coverage", "", categories=COVERAGE)
    kind = np.full(plane.shape, float(FITTED))
    if answers.distance is not None:
        kind[answers.distance > 0] = BEYOND
    if answers.resolution is not None:
        looked_up = answers.resolution >= 0
        kind[looked_up] = answers.resolution[looked_up]
    kind[answers.status == Status.IDLE] = NO_WORK
    kind[answers.status > Status.IDLE] = np.nan
    widened = plane.column(DRAFT)[:, 0, 0] + 1 if plane.drafted and plane.x == DECODE else None
    return [
        Field(
            quantity,
            panel or line,
            "",
            kind[i],
            refusals(answers.status[i]),
            rows=0 if widened is None else int(widened[i]),
        )
        for i, (panel, line) in enumerate(plane.places())
    ]


# Draft lengths


def needs_drafts(plane: Plane) -> None:
    if not plane.drafted:
        refuse_option(DRAFT, "this picture compares draft lengths, none is asked", "give the grid draft_length=[1, 2]")
    if plane.x == DRAFT:
        refuse_option("axes", "draft lengths are compared over batch or context", "give several batches, or contexts")


def draft_length(question: Question, answers: Answers) -> list[Field]:
    """Break-even tokens of every draft length; or which one yields most tokens a second, and how much it gains."""
    plane = question.plane
    depths = plane.grid[DRAFT]
    ordinary = question.ask(plane.without(DRAFT))
    without = ordinary.served_ms
    rounds = answers.served_ms.reshape(len(without), len(depths), *without.shape[1:])
    if question.tokens_per_round is None:
        return break_even(plane, answers, depths, rounds / without[:, None])
    yields = rounds_of(question.tokens_per_round, depths)
    gain = 100.0 * (yields[:, None, None] * without[:, None] / rounds - 1.0)
    if plane.y is None:
        quantity = Quantity("Gain over ordinary decoding", "tokens a second, % above ordinary decoding", signed=True)
        flat = gain.reshape(answers.latency_ms.shape)
        return [
            Field(quantity, panel, line or f"draft length {depths[0]:,}", flat[i], blanks(answers.status[i]))
            for i, (panel, line) in enumerate(plane.places())
        ]
    return best_of(
        plane, ordinary, answers, depths, np.concatenate([1 / without[:, None], yields_of(yields, rounds)], 1)
    )


def yields_of(yields: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Tokens of one request a millisecond."""
    return yields[:, None, None] / rounds


def break_even(plane: Plane, answers: Answers, depths: np.ndarray, ratio: np.ndarray) -> list[Field]:
    """T(d) / F: the tokens that a round has to yield to be as fast as ordinary decoding."""
    quantity = Quantity("Break-even", "tokens a round must yield to pay")
    flat, depth = ratio.reshape(answers.latency_ms.shape), plane.column(DRAFT)
    out = []
    for i, (panel, line) in enumerate(plane.places()):
        marks = blanks(answers.status[i])
        more = {NEVER: flat[i] > depth[i] + 1, NO_ORDINARY: np.isnan(flat[i]) & (answers.status[i] == Status.OK)}
        marks |= {label: where for label, where in more.items() if where.any()}
        name = f"draft length {depths[0]:,}" if len(depths) == 1 else ""
        out.append(Field(quantity, panel or (name if plane.y else ""), line or name, flat[i], marks))
    return out


def best_of(plane: Plane, ordinary: Answers, answers: Answers, depths: np.ndarray, speed: np.ndarray) -> list[Field]:
    """speed: float64 [places, 1 + draft lengths, ny, nx], tokens of a request a millisecond, ordinary ones first."""
    known = np.where(np.isnan(speed), -np.inf, speed)
    some = np.asarray((known > -np.inf).any(1))
    best = np.where(some, known.argmax(1), np.nan)
    gain = 100.0 * (np.where(some, known.max(1), np.nan) / speed[:, 0] - 1.0)
    names = ["0, ordinary decoding", *(f"{depth:,}" for depth in depths)]
    categories = tuple(
        (BEST + name, *DRAFTS[i if i < len(DRAFTS) else 1 + i % (len(DRAFTS) - 1)]) for i, name in enumerate(names)
    )
    which = Quantity("Best draft length", "", categories=categories)
    how_much = Quantity("Gain over ordinary decoding", "tokens a second, % above ordinary decoding")
    widened = answers.status.reshape(len(speed), len(depths), *speed.shape[2:])
    out = []
    for i, (panel, _) in enumerate(plane.without(DRAFT).places()):
        nothing = {label: where & ~some[i] for label, where in blanks(ordinary.status[i]).items()}
        nothing = {label: where for label, where in nothing.items() if where.any()}
        missing = some[i] & (widened[i] > Status.IDLE).any(0)
        marks = nothing | ({SOME_MISSING: missing} if missing.any() else {})
        alone = some[i] & np.isnan(speed[i, 0])
        out.append(Field(which, titled(panel, "best draft length"), "", best[i], marks))
        marks = nothing | ({NO_ORDINARY: alone} if alone.any() else {})
        out.append(Field(how_much, titled(panel, "what it gains over ordinary decoding"), "", gain[i], marks))
    return out


def titled(panel: str, what: str) -> str:
    return f"{panel}: {what}" if panel else what


# Sensitivity


def slopes(question: Question, answers: Answers) -> list[Field]:
    """Of one more KV token, and of one more request with the same context."""
    plane = question.plane
    kv = Quantity("One more KV token", "ms per 1,000 more KV tokens", signed=True)
    request = Quantity("One more request", "ms for one more request of the same context", signed=True)
    names = [n for n in plane.grid.names if n != MODEL]
    (piece,) = GridQueries(Grid(tuple(names), tuple(plane.grid[n] for n in names))).pieces(0, answers.status.size)
    found = [slope_of(model, piece, question.rule) for model in plane.models]
    values = [np.stack(column).reshape(plane.shape) for column in zip(*found, strict=True)]
    out = []
    for i, (panel, line) in enumerate(plane.places()):
        for quantity, x in ((kv, 1000.0 * values[0][i]), (request, values[1][i])):
            x = np.where(answers.status[i] == Status.OK, x, np.nan)
            marks, alone = marks_of(answers, i), np.isnan(x) & (answers.status[i] == Status.OK)
            marks |= {NO_NEIGHBOUR: alone} if alone.any() else {}
            out.append(Field(quantity, titled(panel, quantity.title) if plane.y else panel, line, x, marks))
    return out


def slope_of(model: Any, piece: Piece, rule: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ms per KV token, ms for the next request), float64 [n] each; ordinary decoding is asked as such."""
    depth = np.zeros(len(piece), np.int64) if piece.depth is None else piece.depth
    out = np.full((2, len(piece)), np.nan)
    for where, drafted in by_depth(None, depth):
        rows = np.arange(len(piece)) if where is None else where
        more = {"draft_length": depth[rows], "rule": rule} if drafted else {}
        one = sensitivity(model, some(piece.work, rows), **more)
        out[0, rows], out[1, rows] = one.per_kv_token, one.next_same_context
    return out[0], out[1]


# Difference


def difference(plane: Plane, a: Answers, b: Answers) -> list[Field]:
    """100 (b - a) / a, and where only one of them has an answer."""
    quantity = Quantity("Difference", "B - A, % of A", signed=True, zero="no difference")
    percent = 100.0 * (b.served_ms - a.served_ms) / a.served_ms
    masks = {ONLY_A: a.answered & ~b.answered, ONLY_B: b.answered & ~a.answered, NEITHER: ~a.answered & ~b.answered}
    masks[IDLE] = (a.status == Status.IDLE) & (b.status == Status.IDLE)
    return [
        Field(quantity, panel, line, percent[i], {label: mask[i] for label, mask in masks.items() if mask[i].any()})
        for i, (panel, line) in enumerate(plane.places())
    ]


SHOWS: dict[str, Show] = {
    "latency": Show("Latency of {whole}", latency),
    "throughput": Show("Throughput, decode requests / latency,", throughput, needs_decode),
    "coverage": Show("What is measured, interpolated and refused{widened}", coverage, evidence=True),
    "draft_length": Show("Tokens that a round must yield to pay", draft_length, needs_drafts, quantities=2),
    "sensitivity": Show("Sensitivity of {whole}", slopes, needs_pure_decode, quantities=2),
}
