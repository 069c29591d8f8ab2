"""What one panel shows, as plain arrays: `Field`, and what is hatched in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fpmjax.plot.plane import Answers
from fpmjax.status import Status

# Refusals in the words of a legend; `Status.code` for the others.
REASONS = {
    Status.NO_BATCH_BRACKET: "no measured batches on both sides cover it",
    Status.NO_PREFILL_SUPPORT: "no measured prompts on both sides",
    Status.NO_ROWS: "no rows of this phase",
    Status.NOT_READY: "not ready: not observed enough for this",
    Status.COUNT_OVERFLOW: "widened beyond 32 bits",
    Status.INVALID_WORK: "cannot be asked",
}
IDLE = "idle: no request is served, 0 ms"
MEASURED = "measured exactly"
EXTRAPOLATED = "extrapolated: outside of what was observed"
# Hatches in the order in which they are given out; a label has the same one in every panel of a figure.
HATCHES = ("////", "\\\\\\\\", "xxx", "++", "---", "||", "oo", "**")
SOME_MISSING = "some draft length has no answer here"
HATCH_OF = {EXTRAPOLATED: "..", SOME_MISSING: "oo"}
BEST = "best draft length: "  # how a category begins whose number is written into its cells


class Quantity(NamedTuple):
    """What is shown, the same in several panels.

    title: what it is; label: with its unit; signed: below and above zero are told apart; categories: of values that
    are positions in it, (words, colour, hatch); zero: what a panel of nothing but zeros says.
    """

    title: str
    label: str
    signed: bool = False
    categories: tuple[tuple[str, str, str], ...] = ()
    zero: str = ""


@dataclass(frozen=True, eq=False)
class Field:
    """One panel, or one line of a panel.

    panel: its title; line: its name among the lines of a panel.  values: float64 [ny, nx], NaN where there are none.
    marks: label -> bool [ny, nx], hatched.  exact: bool [ny, nx], measured there.  low, high: float64 [ny, nx], a
    range.  rows: decode rows of each request, which a second axis shows; 0 for none.
    """

    quantity: Quantity
    panel: str
    line: str
    values: np.ndarray
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)
    exact: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    rows: int = 0


def refusals(status: np.ndarray) -> dict[str, np.ndarray]:
    """Label -> where it is so, of every reason that occurs."""
    kinds = [Status(kind) for kind in np.unique(status) if not Status(kind).answered]
    return {f"no answer: {REASONS.get(kind, kind.code.replace('_', ' '))}": status == kind for kind in kinds}


def blanks(status: np.ndarray) -> dict[str, np.ndarray]:
    """`refusals`, and idle cells, which have no latency either."""
    idle = status == Status.IDLE
    return refusals(status) | ({IDLE: idle} if idle.any() else {})


def marks_of(answers: Answers, i: int) -> dict[str, np.ndarray]:
    """What is hatched in panel i: refused cells by their reason, idle ones, and extrapolated ones."""
    found = blanks(answers.status[i])
    if answers.distance is not None and (beyond := answers.distance[i] > 0).any():
        found[EXTRAPOLATED] = beyond
    return found


def hatches(labels: Any) -> dict[str, str]:
    """Label -> hatch."""
    plain = [label for label in dict.fromkeys(labels) if label not in HATCH_OF]
    return HATCH_OF | {label: HATCHES[i % len(HATCHES)] for i, label in enumerate(plain)}
