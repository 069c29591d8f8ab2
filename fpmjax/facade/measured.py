"""One query at a time over a measured table, in plain Python numbers: no compile, and the bits of `estimate`.

Refusals are explained by `estimate`, so that a mistake reads the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from fpmjax.errors import CoverageError
from fpmjax.estimate import estimate
from fpmjax.facade.shapes import coordinates
from fpmjax.lookup.scalar import REFUSED, Answer
from fpmjax.metrics import U32_MAX, RankMetrics
from fpmjax.query_coverage import QueryCoverage
from fpmjax.status import Status
from fpmjax.work import Work


class Lookup(NamedTuple):
    """One answered lookup: what was asked, and the answer."""

    phase: str  # prefill or decode
    baseline: bool
    batch: int
    tokens: int | None  # None for decode
    kv: int
    ms: float
    answer: Answer


class RankAnswer(NamedTuple):
    """One rank: its milliseconds, the decode time above the baseline (mixed ranks), and the lookups behind them."""

    ms: float = 0.0
    marginal_ms: float | None = None
    lookups: tuple[Lookup, ...] = ()


class Iteration(NamedTuple):
    """Native milliseconds, first slowest rank and every rank's answer; all ranks idle: (0.0, None, [])."""

    ms: float
    slowest: int | None
    ranks: list[RankAnswer]


IDLE = RankAnswer()


class Refused(Exception):
    """A lookup without an answer; the entry point turns it into the explained error."""


class Measured:
    """The table of a `Direct` model, corrected or not.

    table: the model with `walk_prefill` and `walk_decode`; collect_coverage: count its lookups.
    """

    def __init__(self, table: Any, *, collect_coverage: bool = False):
        self.table, self.cell, self.width = table, table.cell, table.verify_width
        self._prefill, self._decode = table.walk_prefill, table.walk_decode
        self._one_round = table.execution != "autoregressive"
        unsupported = {"prefill": Status.NO_PREFILL_SUPPORT, "decode": Status.NO_BATCH_BRACKET}
        rows = {"prefill": self._prefill.rows, "decode": self._decode.rows}
        self._missing = {phase: unsupported[phase] if rows[phase] else Status.NO_ROWS for phase in rows}
        self.coverage = QueryCoverage(self.cell) if collect_coverage else None

    def iteration(self, metrics: Any, ranks: list[RankMetrics], depth: int | None = None) -> Iteration:
        """The answer to checked ranks; `metrics` and `depth` are what was asked, for an explanation."""
        latency, slowest, answers = 0.0, None, []
        try:
            for i, rank in enumerate(ranks):
                answer = self._rank(rank)
                answers.append(answer)
                if answer.ms > latency:
                    latency, slowest = answer.ms, i
        except Refused:
            self.explain(Work.from_metrics(metrics), depth)
        if self._one_round and sum(len(answer.lookups) for answer in answers) > 1:
            self.explain(Work.from_metrics(metrics), depth)  # nothing is measured about how rounds compose
        return Iteration(latency, slowest, answers if slowest is not None else [])

    def _rank(self, rank: RankMetrics) -> RankAnswer:
        """A mixed rank takes its prefill plus the decode time above the baseline."""
        prefill = decode = None
        if rank.prefill_tokens:
            prefill = self._look_up(rank.prefill_requests, rank.prefill_tokens, rank.prefill_kv)
        if rank.decode_requests:
            decode = self._look_up(rank.decode_requests, None, rank.decode_kv)
        if prefill is None:
            return IDLE if decode is None else RankAnswer(decode.ms, None, (decode,))
        if decode is None:
            return RankAnswer(prefill.ms, None, (prefill,))
        below = self._decode.baseline(decode.answer)
        if below.ms is None:  # cannot be: its curves have just answered
            raise Refused
        baseline = Lookup("decode", True, decode.batch, None, decode.kv, below.ms, below)
        if self.coverage is not None:
            self.coverage.count("mixed_decode_baseline", decode.batch, None, decode.kv, below, Status.OK)
        marginal = max(decode.ms - baseline.ms, 0.0)
        return RankAnswer(prefill.ms + marginal, marginal, (prefill, decode, baseline))

    def _look_up(self, batch: int, tokens: int | None, kv: int, count: bool = True) -> Lookup:
        """One lookup (tokens None: decode), counted as coverage; Refused where it has no answer."""
        if tokens is None:
            batch *= self.width
            phase, askable = "decode", batch <= U32_MAX and kv <= U32_MAX
            answer = self._decode(batch, kv) if askable else REFUSED
        else:
            phase, askable = "prefill", tokens <= U32_MAX and kv <= U32_MAX
            answer = self._prefill(batch, tokens, kv) if askable else REFUSED
        if count and self.coverage is not None:
            self.coverage.count(phase, batch, tokens, kv, answer, self._missing[phase])
        if answer.ms is None:
            raise Refused
        return Lookup(phase, False, batch, tokens, kv, answer.ms, answer)

    def phase(self, batch: int, tokens: int | None, kv: int, count: bool = True) -> float:
        """Milliseconds of one lookup, for totals whose products may leave 32 bits (never wrapped)."""
        if batch:
            try:
                return self._look_up(batch, tokens, kv, count).ms
            except Refused:
                if max(tokens or 0, kv) <= U32_MAX:
                    decode = tokens is None
                    self.explain(Work.decode(batch, kv) if decode else Work.prefill(batch, tokens, kv), None)
        phase, totals = ("decode", "") if tokens is None else ("prefill", f"total_prefill_tokens={tokens}, ")
        raise CoverageError(
            f"{phase} at batch_size={batch}, {totals}total_kv_read_tokens={kv} is outside every table\n"
            f"hint: a table holds batches of at least 1 and totals of at most {U32_MAX} tokens",
            code=self._missing[phase].code,
        )

    def explain(self, work: Work, depth: int | None) -> NoReturn:
        """Raise what `estimate` raises for this work."""
        explain(self.table, work, depth)

    # How an answer is shown

    def rank_details(self, ranks: Sequence[RankAnswer]) -> list[dict[str, Any]]:
        return [self._rank_detail(i, rank) for i, rank in enumerate(ranks)]

    def _rank_detail(self, index: int, rank: RankAnswer) -> dict[str, Any]:
        parts = {(each.phase, each.baseline): each.ms for each in rank.lookups}
        return {
            "rank": index,
            "latency_ms": rank.ms,
            "prefill_ms": parts.get(("prefill", False)),
            "decode_ms": parts.get(("decode", False)),
            "decode_baseline_ms": parts.get(("decode", True)),
            "marginal_decode_ms": rank.marginal_ms,
            "queries": [self._query_detail(each) for each in rank.lookups],
        }

    def _query_detail(self, asked: Lookup) -> dict[str, Any]:
        return {
            "phase": asked.phase,
            "model_path": "" if self.cell is None else self.cell.identity.model,
            "decode_baseline": asked.baseline,
            "query": coordinates(asked.batch, asked.tokens, asked.kv),
            "resolution": asked.answer.resolution.word,
            "latency_ms": asked.ms,
            "support": self._support(asked),
        }

    def _support(self, asked: Lookup) -> list[dict[str, Any]]:
        """The one to four measured points behind an answer, with their weights."""
        decode = asked.tokens is None
        knots = self._decode.knots if decode else self._prefill.knots
        points = []
        for p, weight in knots.corners(asked.answer):
            if weight > 0:
                at, x = knots.at[p], knots.x[p]
                along_kv = not decode and p >= self._prefill.split
                point = (at, None, x) if decode else (asked.batch, at, x) if along_kv else (asked.batch, x, at)
                points.append({"coordinates": coordinates(*point), "latency_ms": knots.ms[p], "weight": weight})
        return points


class Factors:
    """The factors of a `Corrected` model, looked up in plain numbers: `observe.ratios.Boxes` for one iteration."""

    def __init__(self, boxes: Any):
        self._otherwise = boxes.otherwise.tolist()
        self._boxes = [
            [
                (*low, *high, factor)
                for low, high, factor in zip(lows.tolist(), highs.tolist(), factors.tolist(), strict=True)
                if low[0] <= high[0] and low[1] <= high[1]
            ]
            for lows, highs, factors in zip(boxes.low, boxes.high, boxes.factor, strict=True)
        ]

    def __call__(self, ranks: list[RankMetrics]) -> float:
        """The factor at the rank with the largest coordinate sum, the later of equal ones; 1 where all are idle."""
        kind, x, y = -1, -1, 0
        for rank in ranks:
            tokens, requests, kv = rank.prefill_tokens, rank.decode_requests, rank.decode_kv
            if tokens or requests:
                place = (2, tokens, kv) if tokens and requests else (0, tokens, 0) if tokens else (1, requests, kv)
                if place[1] + place[2] >= x + y:
                    kind, x, y = place
        if kind < 0:
            return 1.0
        for x0, y0, x1, y1, factor in self._boxes[kind]:
            if x0 <= x <= x1 and y0 <= y <= y1:
                return factor
        return self._otherwise[kind]


def explain(model: Any, work: Work, depth: int | None) -> NoReturn:
    """Raise what `estimate` raises for this work."""
    estimate(model, work, draft_length=depth)
    raise AssertionError(f"estimate answers what the facade refuses: {work}")
