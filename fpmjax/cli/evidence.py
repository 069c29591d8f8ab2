"""The evidence of an answer in words and as JSON: measured rows, their coordinates, milliseconds and weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.cli.output import ms, number, weight

if TYPE_CHECKING:
    from fpmjax.answer import Parts
    from fpmjax.tables.cell import Cell
    from fpmjax.work import Work

PHASES = ("prefill", "decode", "baseline")


class Details:
    """What every rank of n queries is made of.

    work, parts: [n, r]; width: int64 [n], decode rows per request at which the table was asked.
    """

    def __init__(self, cell: Cell, work: Work, parts: Parts, width: np.ndarray):
        from fpmjax.answer import Resolution

        self.work, self.width, self.words = work, width, {r.value: r.word for r in Resolution}
        self.points = {"prefill": cell.prefill, "decode": cell.decode, "baseline": cell.decode}
        self.place = {phase: {row: i for i, row in enumerate(p.row.tolist())} for phase, p in self.points.items()}
        self.ms = {phase: getattr(parts, f"{phase}_ms") for phase in PHASES}
        evidence = {phase: getattr(parts, phase) for phase in PHASES}
        self.found = {phase: (e.resolution, e.row, e.weight) for phase, e in evidence.items()}

    def ranks(self, query: int) -> list[dict[str, Any]]:
        """Every rank of one query: its milliseconds, the parts they are made of, and what carries each part."""
        return [self._rank((query, rank)) for rank in range(self.work.ranks)]

    def _rank(self, at: tuple[int, int]) -> dict[str, Any]:
        part = {phase: number(self.ms[phase][at]) for phase in PHASES}
        prefill, decode, baseline = part.values()
        marginal = decode if decode is None or baseline is None else max(decode - baseline, 0.0)
        asked = (self.work.prefill_tokens[at] > 0, prefill), (self.work.decode_requests[at] > 0, marginal)
        terms = [value for present, value in asked if present]
        found = [value for value in terms if value is not None]
        return {
            "rank": at[1],
            "latency_ms": sum(found, 0.0) if len(found) == len(terms) else None,
            **{f"{phase}_ms": value for phase, value in part.items()},
            "lookups": [self._lookup(phase, at, value) for phase, value in part.items() if value is not None],
        }

    def _lookup(self, phase: str, at: tuple[int, int], value: float) -> dict[str, Any]:
        work = self.work
        if phase == "prefill":
            point = int(work.prefill_requests[at]), int(work.prefill_tokens[at]), int(work.prefill_kv[at])
        else:
            point = int(work.decode_requests[at]) * int(self.width[at[0]]), 0, int(work.decode_kv[at])
        resolution, row, share = self.found[phase]
        support = zip(row[at].tolist(), share[at].tolist(), strict=True)
        return {
            "phase": phase,
            **coordinates(*point),
            "latency_ms": value,
            "resolution": self.words[int(resolution[at])],
            "support": [self._measured(phase, row, share) for row, share in support if row >= 0],
        }

    def _measured(self, phase: str, row: int, share: float) -> dict[str, Any]:
        points, i = self.points[phase], self.place[phase][row]
        return {
            "row": row,
            **coordinates(int(points.batch[i]), int(points.tokens[i]), int(points.kv[i])),
            "latency_ms": float(points.latency_ms[i]),
            "weight": share,
        }


def coordinates(batch: int, tokens: int, kv: int) -> dict[str, int]:
    """One point under the table's column names."""
    return {"batch_size": batch, "total_prefill_tokens": tokens, "total_kv_read_tokens": kv}


def detail_lines(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """`Details.ranks` for people; an idle rank has nothing to say."""
    for rank in ranks:
        name = f"rank {rank['rank']} " if len(ranks) > 1 else ""
        for each in rank["lookups"]:
            yield f"    {name}{each['phase']} {place(each)}: {ms(each['latency_ms'])} ms, {each['resolution']}"
            for point in each["support"]:
                measured = f"{ms(point['latency_ms'])} ms measured at {place(point)}, row {point['row']}"
                yield f"      {weight(point['weight'])} x {measured}"


def place(point: dict[str, Any]) -> str:
    tokens = f", {point['total_prefill_tokens']:,} new tokens" if point["total_prefill_tokens"] else ""
    return f"batch {point['batch_size']:,}{tokens}, {point['total_kv_read_tokens']:,} KV"


def in_short(support: list[dict[str, Any]]) -> str:
    """Decode support on one line: weight (batch, KV total)."""
    return " + ".join(f"{weight(p['weight'])} ({p['batch_size']}, {p['total_kv_read_tokens']:,})" for p in support)
