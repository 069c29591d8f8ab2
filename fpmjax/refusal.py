"""The edge where a refusal becomes an exception: which query, why, what is measured nearby, what would work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fpmjax.answer import Estimate, SpeculativeEstimate
from fpmjax.errors import CoverageError
from fpmjax.metrics import U32_MAX
from fpmjax.speculative import check_range, widen
from fpmjax.status import Status
from fpmjax.work import COUNTS, PAIRS, Array, Work

SHORTER_DRAFTS = 32  # shorter draft lengths that a hint looks through

HINTS = {
    Status.NOT_READY: "give the model more observations of this kind of work",
    Status.NOT_PURE_DECODE: "ask for prefill and mixed work without draft_length",
    Status.NOT_SINGLE_TOKEN: "give ordinary decode rows (extend_lengths of 1); they are widened by the estimate",
    Status.COUNT_OVERFLOW: f"a rank's requests times the rows per request must not exceed {U32_MAX}",
    Status.INVALID_WORK: "build work with `fpmjax.Work.of`, which checks it",
}
ROUNDS = (
    "measured speculative rounds compose neither with prefill on the same rank nor over several ranks\n"
    "hint: ask for one rank's decode or prefill"
)


def raise_first_refusal(
    model: Any, work: Work, result: Estimate | SpeculativeEstimate, draft_length: Any, ask: Callable
) -> None:
    """Raise the error of the first refused query, or return when every query is answered.

    ask: (work, draft lengths) -> their estimate without a check, for a hint of what would be answered.
    """
    status = np.asarray(result.status)
    refused = status > Status.IDLE
    if not refused.any():
        return
    first = np.unravel_index(int(refused.argmax()), status.shape)
    reason = Status(int(status[first]))
    text = ""
    if status.ndim:
        where = ", ".join(map(str, first))
        text = f"{int(refused.sum()):,} of {status.size:,} queries have no answer; the first, [{where}]: "
    if reason is Status.BAD_DRAFT_LENGTH:
        given = np.broadcast_to(np.asarray(draft_length, object), status.shape)[first]
        check_range(given, text)
    asked = one_query(work, first, status.ndim)
    depth = None
    if isinstance(result, SpeculativeEstimate):
        depth = int(np.asarray(result.draft_length)[first])
    error, code = reason.error, reason.code
    if reason is Status.INVALID_WORK and model.execution != "autoregressive":
        error, code, why = CoverageError, "measured_round", ROUNDS
    elif reason is Status.INVALID_WORK and hasattr(model, "malformed"):
        code, why = model.malformed(asked)
    elif error is not CoverageError:
        why = f"{describe(reason, asked, depth)}\nhint: {HINTS[reason]}"
    elif depth is None:
        why = explained(model, reason, asked)
    else:
        wide = widen(np, asked, np.asarray(depth), np.zeros(asked.ranks, np.int8))
        batch = ", ".join(map(str, asked.decode_requests.tolist()))
        why = explained(model, reason, replace(wide, refusal=None))
        why = f"draft_length={depth} makes {depth + 1} rows of each request (batch_size={batch}): {why}"
        if shorter := longest_answered(ask, asked, depth):
            why = f"{why.split(chr(10))[0]}\nhint: draft_length={shorter} is answered for this work"
    raise error(text + why, code=code)


def explained(model: Any, reason: Status, asked: Work) -> str:
    """The model's own words for a missing answer, or the status's."""
    if hasattr(model, "explain"):
        return model.explain(reason, asked)
    return f"{reason.sentence}\nhint: {HINTS.get(reason, 'ask for work nearer to what was measured')}"


def describe(reason: Status, asked: Work, depth: int | None) -> str:
    """The rank and the values that a refusal of the work itself is about."""
    counts = {name: getattr(asked, name).tolist() for name in COUNTS if getattr(asked, name) is not None}
    requests = counts.get("decode_requests", [0] * asked.ranks)

    def said(rank: int, names: tuple[str, ...]) -> str:
        values = ", ".join(f"{name}={counts[name][rank]}" for name in names if name in counts)
        return f"{reason.sentence} (rank {rank}: {values})"

    for rank in range(asked.ranks):
        prefill = any(counts[name][rank] for name in COUNTS[:3] if name in counts)
        if reason is Status.NOT_PURE_DECODE and prefill:
            return said(rank, COUNTS[:3])
        if reason is Status.COUNT_OVERFLOW and requests[rank] > U32_MAX // ((depth or 0) + 1):
            return f"{said(rank, COUNTS[3:4])}; draft_length={depth} makes {(depth or 0) + 1} rows of each request"
        if reason is Status.INVALID_WORK and any(
            counts[total][rank] and not counts[of][rank] for of, total, _ in PAIRS if total in counts and of in counts
        ):
            return said(rank, COUNTS)
    return reason.sentence


def longest_answered(ask: Callable, asked: Work, depth: int) -> int | None:
    """The longest draft length below `depth` that is answered for this work, among the next few."""
    few = max(1, SHORTER_DRAFTS // asked.ranks)  # a small job, which needs no compiled code
    shorter = np.arange(depth - 1, max(0, depth - 1 - few), -1)
    answered = np.flatnonzero(ask(asked, shorter).status <= Status.IDLE) if shorter.size else shorter
    return int(shorter[answered[0]]) if answered.size else None


def one_query(work: Work, index: tuple, axes: int) -> Work:
    """One query of the work, fields [r, rest], as it was asked."""
    lead = len(work.shape)
    last = index[axes - lead :]  # draft lengths may have brought more axes in front

    def pick(x: Array) -> Array:
        x = np.asarray(x)
        return x[tuple(i if n > 1 else 0 for i, n in zip(last, x.shape, strict=False))]

    return jax.tree.map(pick, replace(work, refusal=None))
