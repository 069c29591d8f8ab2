"""The edge where a refusal becomes an exception: which query, why, what is measured nearby, what would work."""

from __future__ import annotations

from typing import Any

import numpy as np

from fpmjax.answer import Estimate, SpeculativeEstimate
from fpmjax.errors import CoverageError
from fpmjax.speculative import check_range, widen
from fpmjax.status import Status
from fpmjax.work import COUNTS, Work

HINTS = {
    Status.NOT_READY: "give the model more observations of this kind of work",
    Status.NOT_PURE_DECODE: "ask for prefill and mixed work without draft_length",
    Status.NOT_SINGLE_TOKEN: "give ordinary decode rows (extend_lengths of 1); they are widened by the estimate",
    Status.COUNT_OVERFLOW: "a rank's batch times the rows per request must stay below 4294967296",
    Status.INVALID_WORK: "build work with `fpmjax.Work.of`, which checks it",
}

WIDENED = {*(s for s in Status if s.error is CoverageError), Status.COUNT_OVERFLOW}


def raise_first_refusal(model: Any, work: Work, result: Estimate | SpeculativeEstimate, draft_length: Any) -> None:
    """Raise the error of the first refused query, or return when every query is answered."""
    status = np.asarray(result.status)
    refused = status > Status.IDLE
    if not refused.any():
        return
    first = np.unravel_index(int(refused.argmax()), status.shape)
    reason = Status(int(status[first]))
    if reason is Status.BAD_DRAFT_LENGTH:
        check_range(draft_length)
    asked = at(work, first, status.ndim)
    text = ""
    if isinstance(result, SpeculativeEstimate) and reason in WIDENED:
        depth = np.broadcast_to(np.asarray(result.draft_length), status.shape)[first]
        text = f"draft_length={depth} widens every request to {int(depth) + 1} rows: "
        if reason.error is CoverageError:
            asked, _ = widen(np, asked, np.asarray(depth), np.zeros(asked.ranks, np.int8))
    error, code = reason.error, reason.code
    if reason.error is CoverageError and hasattr(model, "explain"):
        why = model.explain(reason, asked)
    elif reason is Status.INVALID_WORK and model.execution != "autoregressive":
        error, why = CoverageError, ROUNDS
    elif reason is Status.INVALID_WORK and hasattr(model, "malformed"):
        code, why = model.malformed(asked)
    else:
        why = f"{reason.sentence}\nhint: {HINTS[reason]}" if reason in HINTS else reason.sentence
    if status.ndim:
        where = ", ".join(map(str, first))
        text = f"{int(refused.sum()):,} of {status.size:,} queries have no answer; the first, [{where}]: {text}"
    raise error(text + why, code=code)


ROUNDS = (
    "measured speculative rounds compose neither with prefill on the same rank nor over several ranks\n"
    "hint: ask for one rank's decode or prefill"
)


def at(work: Work, index: tuple, axes: int) -> Work:
    """One query of the work, counts only."""
    counts = {}
    for name in COUNTS:
        x = getattr(work, name)
        if x is not None:
            x = np.asarray(x)
            full = x.reshape((1,) * (axes + 1 - x.ndim) + x.shape)
            counts[name] = full[tuple(i if n > 1 else 0 for i, n in zip(index, full.shape, strict=False))]
    return Work(**counts)
