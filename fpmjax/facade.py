"""`ForwardPassPerfModel`: the peer's method names and result shapes over any model of this package.

Code that calls the Rust peer moves over by one import.  One query runs in plain Python numbers over the model's
`walk_prefill` and `walk_decode`: no compile, and the bits of `estimate`.  A model without such walks is asked
through `estimate`.  Refusals are explained by `estimate` too, so that a mistake reads the same everywhere.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn

from fpmjax.answer import SpeculativeEstimate
from fpmjax.errors import CoverageError
from fpmjax.estimate import estimate
from fpmjax.lookup.scalar import REFUSED, Answer
from fpmjax.metrics import U32_MAX, RankMetrics, parse_iteration, read_count, refuse
from fpmjax.query_coverage import QueryCoverage
from fpmjax.rule import PUBLISHED
from fpmjax.speculative import LARGEST_DRAFT, check_draft_length, require_eligible
from fpmjax.status import Status
from fpmjax.work import Work

SLOPE, INTERCEPT, UNIT = PUBLISHED.integers()
STATIC_STRIDE = 32  # static decode prices this many steps by the first of them (the peer's integration)


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


IDLE = RankAnswer()


class Refused(Exception):
    """A lookup without an answer; the entry point turns it into the explained error."""


class ForwardPassPerfModel:
    """One model behind the peer's interface.  Answers are milliseconds; None means "not ready yet", never zero.

    collect_coverage: count lookups for `fpm_query_coverage`; needs `direct(cell)` as it was built.

    Estimates raise MetricsError, CoverageError and, with a draft length, SpeculationError, each with `.code`.
    """

    def __init__(self, model: Any, *, collect_coverage: bool = False):
        self.model = model
        self._cell = getattr(model, "cell", None)
        self._width = getattr(model, "verify_width", 1)
        self._walks = hasattr(model, "walk_decode")
        if self._walks:
            self._prefill, self._decode = model.walk_prefill, model.walk_decode
            self._one_round = model.execution != "autoregressive"
            unsupported = {"prefill": Status.NO_PREFILL_SUPPORT, "decode": Status.NO_BATCH_BRACKET}
            rows = {"prefill": self._prefill.rows, "decode": self._decode.rows}
            self._missing = {phase: unsupported[phase] if rows[phase] else Status.NO_ROWS for phase in rows}
        self._coverage: QueryCoverage | None = None
        if collect_coverage:
            if not self._walks or self._cell is None:
                raise ValueError(
                    f"collect_coverage counts lookups in a measured cell, but this {type(model).__name__} has none\n"
                    "hint: pass the model that `direct(cell)` returned, or leave collect_coverage out"
                )
            self._coverage = QueryCoverage(self._cell)

    # One iteration

    def estimate_forward_pass_time_ms(self, metrics: Any, *, draft_length: Any = None) -> float | None:
        """One iteration: a rank dict, a list of rank dicts, or JSON text; 0.0 where no rank has work.

        With a draft length: one whole speculative round, draft and verification.
        """
        if not self._walks:
            return self._ask(metrics, draft_length)["latency_ms"]
        if draft_length is None:
            return self._iteration(metrics, parse_iteration(metrics))[0]
        depth, ranks = self._widened(metrics, draft_length)
        return scaling_factor(depth) * self._iteration(metrics, ranks, depth)[0]

    def estimate_forward_pass_detailed(self, metrics: Any, *, draft_length: Any = None) -> dict[str, Any]:
        """The same answer with its composition and the measured points behind it.

        Keys: latency_ms, native_latency_ms, correction_factor, max_rank, ranks.  With a draft length: latency_ms,
        draft_length, scaling_factor, and stp_reference, the ordinary unscaled detail at the widened work.
        """
        if not self._walks:
            return self._ask(metrics, draft_length)
        if draft_length is None:
            return self._detail(*self._iteration(metrics, parse_iteration(metrics)))
        depth, ranks = self._widened(metrics, draft_length)
        return speculative_detail(depth, self._detail(*self._iteration(metrics, ranks, depth)))

    # One phase by its totals

    def predict_decode_latency_total(self, batch_size: int, total_past_kv_tokens: int) -> float:
        """Decode of `batch_size` requests over their past KV in total; (0, 0) takes 0.0."""
        batch, kv = counts(batch_size=batch_size, total_past_kv_tokens=total_past_kv_tokens)
        if not batch and kv:
            refuse(
                "decode_kv_without_requests",
                f"total_past_kv_tokens is {kv} while batch_size is 0",
                "count the requests behind the KV tokens in batch_size",
            )
        return self._phase(batch, None, kv) if batch else 0.0

    def predict_prefill_latency_total(
        self, batch_size: int, total_prefill_tokens: int, total_kv_read_tokens: int
    ) -> float:
        """Prefill by totals; no tokens take 0.0, otherwise every request computes at least one."""
        batch, tokens, kv = counts(
            batch_size=batch_size,
            total_prefill_tokens=total_prefill_tokens,
            total_kv_read_tokens=total_kv_read_tokens,
        )
        if tokens and not 0 < batch <= tokens:
            refuse(
                "prefill_tokens_per_request",
                f"total_prefill_tokens is {tokens} for batch_size={batch}, but every request computes a token",
                "pass totals over the whole batch, and the number of requests behind them",
            )
        return self._phase(batch, tokens, kv) if tokens else 0.0

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Prefill of `bs` requests of `isl` tokens each, the first `prefix` of them cached."""
        batch, length, cached = counts(bs=bs, isl=isl, prefix=prefix)
        return self._uniform_prefill(batch, length, cached)

    def static_phase_latency(self, batch_size: int, input_tokens: int, output_tokens: int, prefill: bool) -> float:
        """A whole static phase: the prefill of the inputs, or every decode step after the first output token.

        Decode looks up the first of every 32 steps and takes it for all of them.  Never counted as coverage.
        """
        batch, length, steps = counts(batch_size=batch_size, input_tokens=input_tokens, output_tokens=output_tokens)
        if prefill:
            return self._uniform_prefill(batch, length, 0, count=False)
        total = 0.0
        for i in range(0, steps - 1, STATIC_STRIDE):
            ms = self._phase(batch, None, batch * (length + i + 1), count=False)
            total += ms * min(STATIC_STRIDE, steps - 1 - i)
        return total

    # About the model

    def fpm_decode_kv_ceiling(self) -> int | None:
        """Largest KV total of any measured decode point; None without one.  No batch is promised to reach it."""
        return None if self._cell is None else self._cell.decode_kv_ceiling

    def fpm_query_coverage(self) -> dict[str, Any] | None:
        """Lookups by phase and outcome, and the first 128 distinct gaps; None unless collected."""
        return None if self._coverage is None else self._coverage.snapshot()

    def diagnostics(self) -> dict[str, Any]:
        """Source, readiness and provenance under the peer's keys."""
        mode = "fpm_interpolation" if self._walks else f"fpm_{type(self.model).__name__.lower()}"
        config = {} if self._cell is None else {**asdict(self._cell.identity), "verify_width": self._width}
        return {
            "source": "aic" if self._walks else mode,  # "aic" is the peer's word for measured tables
            "readiness": "ready" if self.model.ready else "insufficient_data",
            "retained_observations": 0,
            "correction_ready_buckets": 0,
            "last_warning": None,
            "provenance": {
                "config": config,
                "selected_systems_root": None if self._cell is None else self._cell.path,
                "requested_estimation_mode": mode,
                "selected_estimation_mode": mode,
                "selection_failures": [],
            },
        }

    # How an iteration is answered

    def _iteration(
        self, metrics: Any, ranks: list[RankMetrics], depth: int | None = None
    ) -> tuple[float, int | None, list[RankAnswer]]:
        """(milliseconds, first slowest rank, every rank's answer); all ranks idle: (0.0, None, [])."""
        latency, slowest, answers = 0.0, None, []
        try:
            for i, rank in enumerate(ranks):
                answer = self._rank(rank)
                answers.append(answer)
                if answer.ms > latency:
                    latency, slowest = answer.ms, i
        except Refused:
            self._explain(Work.from_metrics(metrics), depth)
        if self._one_round and sum(len(answer.lookups) for answer in answers) > 1:
            self._explain(Work.from_metrics(metrics), depth)  # nothing is measured about how rounds compose
        return latency, slowest, answers if slowest is not None else []

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
        if self._coverage is not None:
            self._coverage.count("mixed_decode_baseline", decode.batch, None, decode.kv, below, Status.OK)
        marginal = max(decode.ms - baseline.ms, 0.0)
        return RankAnswer(prefill.ms + marginal, marginal, (prefill, decode, baseline))

    def _look_up(self, batch: int, tokens: int | None, kv: int, count: bool = True) -> Lookup:
        """One lookup (tokens None: decode), counted as coverage; Refused where it has no answer."""
        if tokens is None:
            batch *= self._width
            phase, askable = "decode", batch <= U32_MAX and kv <= U32_MAX
            answer = self._decode(batch, kv) if askable else REFUSED
        else:
            phase, askable = "prefill", tokens <= U32_MAX and kv <= U32_MAX
            answer = self._prefill(batch, tokens, kv) if askable else REFUSED
        if count and self._coverage is not None:
            self._coverage.count(phase, batch, tokens, kv, answer, self._missing[phase])
        if answer.ms is None:
            raise Refused
        return Lookup(phase, False, batch, tokens, kv, answer.ms, answer)

    def _phase(self, batch: int, tokens: int | None, kv: int, count: bool = True) -> float:
        """Milliseconds of one lookup for the phase methods, whose products may leave 32 bits (never wrapped)."""
        if not self._walks:
            refuse(
                "unsupported_estimator",
                f"a {type(self.model).__name__} model has no phases of its own to ask for",
                "ask for a whole iteration with estimate_forward_pass_time_ms",
            )
        if batch:
            try:
                return self._look_up(batch, tokens, kv, count).ms
            except Refused:
                if max(tokens or 0, kv) <= U32_MAX:
                    decode = tokens is None
                    self._explain(Work.decode(batch, kv) if decode else Work.prefill(batch, tokens, kv), None)
        phase, totals = ("decode", "") if tokens is None else ("prefill", f"total_prefill_tokens={tokens}, ")
        raise CoverageError(
            f"{phase} at batch_size={batch}, {totals}total_kv_read_tokens={kv} is outside every table\n"
            f"hint: a table holds batches of at least 1 and totals of at most {U32_MAX} tokens",
            code=self._missing[phase].code,
        )

    def _uniform_prefill(self, batch: int, length: int, cached: int, count: bool = True) -> float:
        if length <= cached:
            refuse(
                "prefill_tokens_per_request",
                f"{length} input tokens with {cached} of them cached leave nothing to compute",
                "the input length includes the cached prefix and exceeds it by at least one token",
            )
        return self._phase(batch, batch * (length - cached), batch * cached, count)

    def _widened(self, metrics: Any, draft_length: Any) -> tuple[int, list[RankMetrics]]:
        """(depth, ranks with depth + 1 rows per request), checked in the order of the speculative rule."""
        plain = type(draft_length) is int and 0 < draft_length <= LARGEST_DRAFT
        depth = draft_length if plain else check_draft_length(draft_length)
        require_eligible(self.model)
        ranks = parse_iteration(metrics)
        for rank in ranks:
            several = rank.extend_lengths and any(n != 1 for n in rank.extend_lengths)
            if rank.prefill_requests or several or rank.decode_requests > U32_MAX // (depth + 1):
                self._explain(Work.from_metrics(metrics), depth)
        return depth, [rank._replace(decode_requests=rank.decode_requests * (depth + 1)) for rank in ranks]

    def _explain(self, work: Work, depth: int | None) -> NoReturn:
        """Raise what `estimate` raises for this work."""
        estimate(self.model, work, draft_length=depth)
        raise AssertionError(f"estimate answers what the facade refuses: {work}")

    def _ask(self, metrics: Any, draft_length: Any) -> dict[str, Any]:
        """The detail of a model without walks, through `estimate`."""
        depth = None
        if draft_length is not None:
            depth = check_draft_length(draft_length)
            require_eligible(self.model)
        work = Work.from_metrics(metrics)
        answer = estimate(self.model, work, draft_length=depth, check=False)
        stp = answer.stp if isinstance(answer, SpeculativeEstimate) else answer
        status = Status(int(stp.status))
        if not status.answered and status != Status.NOT_READY:
            self._explain(work, depth)
        detail = {
            "latency_ms": known(stp.latency_ms),
            "native_latency_ms": known(stp.native_ms),
            "correction_factor": known(stp.factor) if status.answered else None,
            "max_rank": int(stp.rank) if stp.rank >= 0 else None,
            "ranks": [],
        }
        return detail if depth is None else speculative_detail(depth, detail)

    # How an answer is shown

    def _detail(self, latency: float, slowest: int | None, answers: list[RankAnswer]) -> dict[str, Any]:
        return {
            "latency_ms": latency,
            "native_latency_ms": latency,
            "correction_factor": 1.0,
            "max_rank": slowest,
            "ranks": [self._rank_detail(i, answer) for i, answer in enumerate(answers)],
        }

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
            "model_path": "" if self._cell is None else self._cell.identity.model,
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


def counts(**arguments: Any) -> list[int]:
    """The arguments as counts of 0..2**32-1; MetricsError names the one that is none."""
    return [read_count(value, name) for name, value in arguments.items()]


def coordinates(batch: int, tokens: int | None, kv: int) -> dict[str, float | None]:
    """One point under the peer's keys; the peer shows floats."""
    return {
        "batch_size": float(batch),
        "total_prefill_tokens": None if tokens is None else float(tokens),
        "total_kv_read_tokens": float(kv),
    }


def known(number: Any) -> float | None:
    """NaN, the device's word for no answer, as None."""
    return None if number != number else float(number)


def scaling_factor(depth: int) -> float:
    return (INTERCEPT + SLOPE * depth) / UNIT


def speculative_detail(depth: int, stp: dict[str, Any]) -> dict[str, Any]:
    """The ordinary detail, scaled once; not ready stays not ready."""
    factor, latency = scaling_factor(depth), stp["latency_ms"]
    return {
        "latency_ms": None if latency is None else factor * latency,
        "draft_length": depth,
        "scaling_factor": factor,
        "stp_reference": stp,
    }
