"""What one line of a trace says, and the words shared by its readers."""

from __future__ import annotations

from typing import NamedTuple

UNSPECIFIED = "unspecified"  # the source does not say what its clock measures
MIXED = "mixed"  # several clocks, by explicit permission
LONGEST_CLOCK = 200  # characters
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
    speculation: tuple[str, ...] = ()  # keys of it, sorted, none of which shows drafts


def names_clock(name: object) -> bool:
    """Whether this may name a clock: short text that a terminal prints as it is."""
    return isinstance(name, str) and 0 < len(name) <= LONGEST_CLOCK and name.isprintable()
