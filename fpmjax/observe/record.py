"""What one line of a trace says, and the words shared by its readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fpmjax.work import Work

UNSPECIFIED = "unspecified"  # the source does not say what its clock measures
SCHEMA = "dynamo.fpm.trace.v1"
MODES = ("sampled", "full")
MOST_ENTRIES = 1 << 30  # padded request lists: 16 GiB for both
CLOCK_SECONDS = 1e8  # three years: no forward pass, but every reading of a wall clock since 1973


class Rejected(Exception):
    """The line is no record: `reason` is the word under which it is counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Stream(NamedTuple):
    """Who published: one attention-DP rank of one worker."""

    namespace: str
    component: str
    producer_id: str
    worker_id: str
    dp_rank: int

    def words(self) -> str:
        return (
            f"worker {self.worker_id!r} (namespace {self.namespace!r}, component {self.component!r}, "
            f"producer {self.producer_id!r}), attention-DP rank {self.dp_rank}"
        )


class Row(NamedTuple):
    """One accepted record; wall time in seconds, as on the wire."""

    stream: Stream
    counter: int
    observed_ms: int
    full: bool
    scope: str
    wall_time: float
    counts: tuple[int, int, int, int, int]  # in the order of `fpmjax.work.COUNTS`
    variances: tuple[float, float]
    extend: tuple[int, ...] | None = None
    past: tuple[int, ...] | None = None
    defaulted: bool = False


def decodes_twice(extend: Sequence[int], prefill_requests: int) -> bool:
    """Whether some decode request computes more than one token: speculation, or verification of drafts.

    Lists do not say which rows are prefill, but at most `prefill_requests` of them may compute several tokens.
    """
    return sum(tokens > 1 for tokens in extend) > prefill_requests


def decoding_twice(work: Work) -> np.ndarray:
    """`decodes_twice` of every rank whose requests are listed: bool [n..., r]."""
    lists = work.lists
    if lists is None:
        return np.zeros((*work.shape, work.ranks), bool)
    extend, count = np.asarray(lists.extend), np.asarray(lists.count)
    several = (extend > 1) & (np.arange(extend.shape[-1]) < count[..., None])
    prefill = 0 if work.prefill_requests is None else np.asarray(work.prefill_requests, np.int64)
    return several.sum(-1) > prefill
