"""Which rounds are left out of a study, each for one reason that was known before any error was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.study.columns import INVALID, WARMUP
from fpmjax.study.read import Study

REASONS = (INVALID, "warmup", "prefill_or_mixed", "non_graph", "short_batch")
MOST_REASONS = 100  # of the file's own, so that codes fit int8


@dataclass(frozen=True, eq=False)
class Exclusions:
    """code: int8 [rows], 0 for a kept row, otherwise 1 + index into `reasons`."""

    code: np.ndarray
    reasons: tuple[str, ...]

    @property
    def kept(self) -> np.ndarray:
        """bool [rows]"""
        return self.code == 0

    def counts(self, rows: np.ndarray | None = None) -> dict[str, int]:
        """Reason -> how many of the rows of a mask (of all of them) are left out for it; reasons that occur."""
        code = self.code if rows is None else self.code[rows]
        found = np.bincount(code, minlength=len(self.reasons) + 1)[1:]
        return {reason: int(n) for reason, n in zip(self.reasons, found, strict=True) if n}


def exclude(study: Study, *, warmup: int = WARMUP) -> Exclusions:
    """A row has the first reason that holds: those of `REASONS` in that order, then the file's own words.

    warmup: rounds at the start of every run.  `non_graph` holds where the file says that no CUDA graph was replayed,
    `short_batch` where it says that fewer requests than the batch were running.  A row may bring any of these words,
    or its own, in `reason`.  The size of an error is never a reason.

    Raises OptionError `study_warmup`, `study_reasons`.
    """
    if type(warmup) is not int or warmup < 0:
        refuse_option("study_warmup", f"warmup is {warmup!r}", "rounds to drop at the start of a run, from 0")
    c = study.columns
    marked = study.words["reason"]
    own = tuple(word for word in marked if word and word not in REASONS)
    if len(own) > MOST_REASONS:
        refuse_option(
            "study_reasons",
            f"{study.label}: column reason holds {len(own)} different words",
            f"a reason is a short word that many rows share; at most {MOST_REASONS} of them",
        )
    reasons = REASONS + own
    found = {
        "warmup": c["round_index"] < warmup,
        "non_graph": c["cuda_graph"] == 0,
        "short_batch": (c["active_requests"] >= 0) & (c["active_requests"] < c["batch_size"]),
    }
    code = np.zeros(study.rows, np.int8)
    for i in range(len(reasons) - 1, -1, -1):  # the first reason is written last
        if reasons[i] in marked:
            code[c["reason"] == marked.index(reasons[i])] = i + 1
        if reasons[i] in found:
            code[found[reasons[i]]] = i + 1
    return Exclusions(code, reasons)
