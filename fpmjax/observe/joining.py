"""From the records of a trace to its iterations: repeats, restarts, gaps, ranks joined in time, warm-up left out.

All of it on whole columns, one entry per record, in the order in which the lines were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fpmjax.observe.record import MOST_ENTRIES, Stream
from fpmjax.observe.segments import refuse
from fpmjax.work import COUNTS, VARIANCES, RequestLists, Work


@dataclass(frozen=True, eq=False)
class Records:
    """n records that the reader took, idle ones included.

    stream, counter, observed (ms), full (bool), scope, wall (seconds), digest, file, line, listed (requests listed,
    -1 without lists): [n]; counts [n, 5] and variances [n, 2] in the order of `fpmjax.work`; extend, past: all lists,
    one after another; streams, files: what the codes mean.
    """

    stream: np.ndarray
    counter: np.ndarray
    observed: np.ndarray
    full: np.ndarray
    scope: np.ndarray
    wall: np.ndarray
    counts: np.ndarray
    variances: np.ndarray
    digest: np.ndarray
    file: np.ndarray
    line: np.ndarray
    listed: np.ndarray
    extend: np.ndarray
    past: np.ndarray
    streams: tuple[Stream, ...]
    files: tuple[str, ...]

    @cached_property
    def busy(self) -> np.ndarray:
        """bool [n]: tokens are computed, or requests decode."""
        tokens, decode = COUNTS.index("prefill_tokens"), COUNTS.index("decode_requests")
        return (self.counts[:, tokens] > 0) | (self.counts[:, decode] > 0)

    @cached_property
    def fresh(self) -> np.ndarray:
        """bool [n]: not a repeat of an earlier record.

        A repeat is the same line again, wherever it stands: same stream, counter, content and time observed.  The
        same counter and content at another time is a repeat only right after the record itself, as of a writer that
        flushes its last record twice; further on, the counter has started anew.
        """
        fresh = np.ones(len(self.stream), bool)
        order = np.lexsort((self.digest, self.observed, self.counter, self.stream))
        fresh[order[1:][self._alike(order, self.observed)]] = False
        order = np.flatnonzero(fresh)
        order = order[np.argsort(self.stream[order], kind="stable")]
        fresh[order[1:][self._alike(order)]] = False
        return fresh

    def _alike(self, order: np.ndarray, *further: np.ndarray) -> np.ndarray:
        """Whether each record after the first has the stream, counter and content of the one before it."""
        keys = [x[order] for x in (self.stream, self.counter, self.digest, *further)]
        return np.logical_and.reduce([x[1:] == x[:-1] for x in keys])

    @cached_property
    def usable(self) -> np.ndarray:
        """bool [n]: an observation by itself."""
        return self.fresh & self.busy & (self.wall > 0)

    def place(self, i: int) -> str:
        return f"{self.files[self.file[i]]}:{self.line[i]}"


def iterations_of(
    records: Records, group: str | None, tolerance_ms: float | None, skip_first: int
) -> tuple[tuple[Work, np.ndarray], dict[str, int]]:
    """((work [m, r], wall_ms float64 [m]), counts for the report)."""
    life, counts = _lives(records)
    workers: dict[tuple[str, ...], dict[int, int]] = {}  # worker -> dp_rank -> code of its stream
    for code, stream in enumerate(records.streams):
        workers.setdefault(stream[:4], {})[stream.dp_rank] = code
    _refuse_loose_ranks(records, workers, joining=group is not None)
    if group is None:
        members = np.flatnonzero(records.usable)[:, None]
    else:
        joined = [_nearest(records, ranks, tolerance_ms or 0.0) for ranks in workers.values()]
        width = max((m.shape[1] for m in joined), default=1)
        members = np.concatenate([np.zeros((0, width), np.intp), *(_widen(m, width) for m in joined)])
        there = members >= 0
        counts["unmatched"] = int(records.usable.sum() - records.usable[members[there]].sum())
        busy = (records.busy[members] & there).any(-1)
        members = members[busy & (np.where(there, records.wall[members], 0.0).max(-1, initial=0.0) > 0)]
    first = members[:, 0]
    members = members[np.lexsort((records.counter[first], records.observed[members].max(-1)))]
    keep = _position(life[members[:, 0]]) >= skip_first
    counts["skipped"] = int((~keep).sum())
    return _gather(records, members[keep]), counts


def _lives(records: Records) -> tuple[np.ndarray, dict[str, int]]:
    """For each record the incarnation of its publisher, int [n] (-1 for repeats); restarts and gaps, counted."""
    life = np.full(len(records.stream), -1)
    fresh = np.flatnonzero(records.fresh)
    order = fresh[np.argsort(records.stream[fresh], kind="stable")]
    before, after = order[:-1], order[1:]
    same = records.stream[after] == records.stream[before]
    was, now = records.counter[before], records.counter[after]
    conflict = np.flatnonzero(same & (now == was))
    if conflict.size:
        i, j = int(before[conflict[0]]), int(after[conflict[0]])
        refuse(
            "conflict",
            f"{records.place(j)} and {records.place(i)} are the same record of "
            f"{records.streams[records.stream[i]].words()}, counter {records.counter[i]}, with different content",
            "read one copy of each trace",
        )
    restart = same & (now < was)
    life[order] = np.concatenate([np.zeros(min(1, len(order)), int), np.cumsum(~same | restart)])
    full = records.full.astype(bool)
    gap = same & ~restart & full[after] & full[before] & (now > was + np.uint64(1))
    missing = sum((now[gap] - was[gap]).tolist()) - int(gap.sum())
    return life, {
        "restarts": int(restart.sum()),
        "gaps": int(gap.sum()),
        "missing": missing,
        "unmatched": 0,
        "skipped": 0,
    }


def _refuse_loose_ranks(records: Records, workers: dict[tuple[str, ...], dict[int, int]], *, joining: bool) -> None:
    """Refuse ranks that nothing joins, and workers of which a rank is missing: a part is no iteration."""
    for worker, ranks in workers.items():
        seen, highest = ", ".join(map(str, sorted(ranks))), max(ranks)
        complete = len(ranks) == highest + 1
        if highest == 0 or (joining and complete):
            continue
        place = records.place(int(np.argmax(records.stream == ranks[highest])))
        who = f"{place}: worker {worker[3]!r} publishes for attention-DP rank {seen}"
        if not complete:
            refuse(
                "multi_rank",
                f"{who}, but there are at least {highest + 1} ranks",
                "read the traces of all ranks of the worker together; an iteration takes as long as its slowest rank",
            )
        refuse(
            "multi_rank",
            f"{who}; its records carry no step id, and its counters drift, so they do not say which are one iteration",
            'pass group="nearest" with tolerance_ms to join ranks by the time observed, or give a self-benchmark '
            "artifact, whose groups are exact",
        )


def _nearest(records: Records, ranks: dict[int, int], tolerance_ms: float) -> np.ndarray:
    """Records of one worker joined across its ranks, int [m, ranks]: each other's nearest, within the tolerance."""
    columns = []
    for rank in sorted(ranks):
        of = np.flatnonzero(records.fresh & (records.stream == ranks[rank]))
        columns.append(of[np.lexsort((records.counter[of], records.observed[of]))])
    lead = columns[0]
    members = np.stack([lead, *(_mutual(records.observed, lead, other) for other in columns[1:])], axis=-1)
    members = members[(members >= 0).all(-1)]
    times = records.observed[members]
    return members[times.max(-1) - times.min(-1) <= tolerance_ms]


def _mutual(time: np.ndarray, lead: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each record of `lead` the one of `other` (both sorted by time) that is nearest, as it is to it; else -1."""
    if not (len(lead) and len(other)):
        return np.full(len(lead), -1)
    there = _closest(time[lead], time[other])
    back = _closest(time[other], time[lead])
    return np.where(back[there] == np.arange(len(lead)), other[there], -1)


def _closest(queries: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Index into sorted `times` of the nearest to each query, the earlier of two."""
    right = np.clip(np.searchsorted(times, queries), 0, len(times) - 1)
    left = np.maximum(right - 1, 0)
    nearer = np.abs(queries - times[left]) <= np.abs(times[right] - queries)
    return np.searchsorted(times, times[np.where(nearer, left, right)])  # the first of equal times


def _widen(members: np.ndarray, width: int) -> np.ndarray:
    return np.pad(members, ((0, 0), (0, width - members.shape[1])), constant_values=-1)


def _position(group: np.ndarray) -> np.ndarray:
    """How many entries of the same group stand before each."""
    order = np.argsort(group, kind="stable")
    begin = np.flatnonzero(np.concatenate([[True], group[order][1:] != group[order][:-1]])[: len(order)])
    position = np.empty(len(group), np.intp)
    position[order] = np.arange(len(order)) - np.repeat(begin, np.diff(begin, append=len(order)))
    return position


def _gather(records: Records, members: np.ndarray) -> tuple[Work, np.ndarray]:
    """Records by iteration and rank, int [m, r], -1 for an idle rank."""
    there = members >= 0

    def spread(column: np.ndarray) -> np.ndarray:
        return np.where(there, column[members], column.dtype.type(0)) if len(column) else there.astype(column.dtype)

    fields: dict[str, Any] = {name: spread(records.counts[:, i]) for i, name in enumerate(COUNTS)}
    fields |= {name: spread(records.variances[:, i]) for i, name in enumerate(VARIANCES)}
    wall_ms = spread(records.wall).max(-1, initial=0.0) * 1000.0
    count = np.where(there, records.listed[members], -1) if len(records.listed) else np.full(members.shape, -1)
    if not (count >= 0).any():
        return Work(**fields), wall_ms
    given = np.maximum(count, 0)
    starts = np.cumsum(np.maximum(records.listed, 0)) - np.maximum(records.listed, 0)
    if given.size * int(given.max()) > MOST_ENTRIES:
        refuse(
            "too_large",
            f"the longest of {given.size} request lists has {given.max()} entries, and all are padded to that length",
            "read fewer segments at a time",
        )
    inside = np.arange(given.max()) < given[..., None]
    begin = np.where(there, starts[members], 0)
    ends = np.cumsum(given.ravel())
    flat = np.arange(int(ends[-1])) + np.repeat(begin.ravel() - (ends - given.ravel()), given.ravel())
    lists = []
    for values in (records.extend, records.past):
        rows = np.zeros(inside.shape, np.uint64)
        rows[inside] = values[flat]
        lists.append(rows)
    return Work(**fields, lists=RequestLists(lists[0], lists[1], count.astype(np.int32))), wall_ms
