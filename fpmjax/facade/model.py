"""`ForwardPassPerfModel`: one query at a time, over a measured table in plain numbers, over others by `estimate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from fpmjax.answer import SpeculativeEstimate
from fpmjax.errors import FpmError, OptionError, SpeculationError
from fpmjax.estimate import estimate
from fpmjax.facade.measured import Factors, Measured, explain
from fpmjax.facade.shapes import detail_of, known, scaling_factor, speculative_detail, stated
from fpmjax.facade.tuning import learn
from fpmjax.guard import check_one_model, is_model
from fpmjax.metrics import U32_MAX, RankMetrics, parse_iteration, read_count, refuse
from fpmjax.models.corrected import Corrected
from fpmjax.models.direct import Direct
from fpmjax.models.forest import Forest
from fpmjax.models.intervals import WithIntervals
from fpmjax.models.regression import Regression
from fpmjax.speculative import LARGEST_DRAFT, check_draft_length, require_eligible
from fpmjax.status import Status
from fpmjax.work import Work

if TYPE_CHECKING:
    from fpmjax.config import Origin

STATIC_STRIDE = 32  # static decode prices this many steps by the first of them (the peer's integration)


class ForwardPassPerfModel:
    """One model behind the peer's interface.  Answers are milliseconds; None means "not ready yet", never zero.

    model: what answers now; `tune_with_fpms` puts its successor here.
    collect_coverage: count lookups for `fpm_query_coverage`; needs `direct(cell)` as it was built.

    Estimates raise MetricsError, CoverageError and, with a draft length, SpeculationError, each with `.code`.
    """

    def __init__(self, model: Any, *, collect_coverage: bool = False):
        if not is_model(model):
            raise FpmError(
                f"ForwardPassPerfModel takes a model, not a {type(model).__name__}\n"
                "hint: e.g. ForwardPassPerfModel(direct(cell)), or ForwardPassPerfModel.best_available(config)",
                code="not_a_model",
            )
        check_one_model(model, "ForwardPassPerfModel")
        self._origin: Origin | None = None
        table = model
        while isinstance(table, Corrected):
            table = table.model
        self._measured: Measured | None = None
        if hasattr(table, "walk_decode") and (table is model or table is model.model):
            self._measured = Measured(table, collect_coverage=collect_coverage and table.cell is not None)
        if collect_coverage and (self._measured is None or self._measured.coverage is None):
            raise OptionError(
                f"collect_coverage counts lookups in a measured cell, but this {type(model).__name__} has none\n"
                "hint: pass the model that `direct(cell)` returned, or leave collect_coverage out",
                code="collect_coverage",
            )
        self._follow(model)

    @classmethod
    def best_available(cls, config: Any) -> ForwardPassPerfModel:
        """The model that the peer's configuration names: a mapping, or the peer's own frozen dataclass.

        Built are `fpm_interpolation` with method `direct` and `fpm_learned` with a frozen artifact (both corrected by
        what is tuned unless disabled), and `fpm_regression`.  Raises OptionError for every other mode, an unknown field
        or a value outside its range; TableError, CellNotFoundError and CoverageError for a table, ModelFileError for an
        artifact.
        """
        from fpmjax.config import best_available

        model, origin = best_available(config)
        facade = cls(model, collect_coverage=origin.collect_coverage)
        facade._origin = origin
        return facade

    def _follow(self, model: Any) -> None:
        """Answer from this model from now on."""
        self.model = model
        heard = isinstance(model, Corrected) and model.factors.size
        self._factors = Factors(model.boxes) if heard and self._measured is not None else None

    # One iteration

    def estimate_forward_pass_time_ms(self, metrics: Any, *, draft_length: Any = None) -> float | None:
        """One iteration: a rank dict, a list of rank dicts, or JSON text; 0.0 where no rank has work.

        With a draft length: one whole speculative round, draft and verification.
        """
        measured = self._measured
        if measured is None:
            return self._ask(metrics, draft_length)["latency_ms"]
        if draft_length is None:
            ranks = parse_iteration(metrics)
            ms = measured.iteration(metrics, ranks)[0]
            return ms if self._factors is None else ms * self._factors(ranks)
        depth, ranks = self._widened(metrics, draft_length)
        ms = measured.iteration(metrics, ranks, depth)[0]
        return scaling_factor(depth) * (ms if self._factors is None else ms * self._factors(ranks))

    def estimate_forward_pass_detailed(self, metrics: Any, *, draft_length: Any = None) -> dict[str, Any]:
        """The same answer with its composition and the measured points behind it.

        Keys: latency_ms, native_latency_ms, correction_factor, max_rank, ranks.  With a draft length: latency_ms,
        draft_length, scaling_factor, and stp_reference, the ordinary unscaled detail at the widened work.  A model that
        states them adds interval (low_ms, high_ms, level, calibrated_on), with a draft length scaled beside the
        latency, and support (extrapolated, e_folds, model_spread); either is None where there is no answer.  A learned
        model adds its source.
        """
        measured = self._measured
        if measured is None:
            return self._ask(metrics, draft_length)
        depth = None
        if draft_length is None:
            ranks = parse_iteration(metrics)
        else:
            depth, ranks = self._widened(metrics, draft_length)
        ms, slowest, answers = measured.iteration(metrics, ranks, depth)
        factor = 1.0 if self._factors is None else self._factors(ranks)
        detail = detail_of(ms * factor, ms, factor, slowest, measured.rank_details(answers))
        return detail if depth is None else speculative_detail(depth, detail)

    def _widened(self, metrics: Any, draft_length: Any) -> tuple[int, list[RankMetrics]]:
        """(depth, ranks with depth + 1 rows per request), checked in the order of the speculative rule."""
        plain = type(draft_length) is int and 0 < draft_length <= LARGEST_DRAFT
        depth = draft_length if plain else check_draft_length(draft_length)
        self._require_eligible()
        ranks = parse_iteration(metrics)
        for rank in ranks:
            several = rank.extend_lengths and any(n != 1 for n in rank.extend_lengths)
            if rank.prefill_requests or several or rank.decode_requests > U32_MAX // (depth + 1):
                explain(self.model, Work.from_metrics(metrics), depth)
        return depth, [rank._replace(decode_requests=rank.decode_requests * (depth + 1)) for rank in ranks]

    def _require_eligible(self) -> None:
        require_eligible(self.model)
        if self._origin is not None and self._origin.speculation is not None:
            raise SpeculationError(
                f"this model is configured with {self._origin.speculation}, so a draft length would count speculation "
                "twice\nhint: leave it out of the configuration, and ask with draft_length",
                code="speculative_config",
            )

    def _ask(self, metrics: Any, draft_length: Any) -> dict[str, Any]:
        """The detail of a model without a table, through `estimate`."""
        depth = None
        if draft_length is not None:
            depth = check_draft_length(draft_length)
            self._require_eligible()
        work = Work.from_metrics(metrics)
        answer = estimate(self.model, work, draft_length=depth, check=False)
        stp = answer.stp if isinstance(answer, SpeculativeEstimate) else answer
        status = Status(int(stp.status))
        if not status.answered and status != Status.NOT_READY:
            explain(self.model, work, depth)
        native, factor = known(stp.native_ms), known(stp.factor) if status.answered else None
        if isinstance(self.model, Regression):  # it fits the whole answer: nothing native stands behind it
            native = factor = None
        detail = detail_of(known(stp.latency_ms), native, factor, int(stp.rank) if stp.rank >= 0 else None)
        detail |= stated(stp) | ({"source": self._source()[1]} if is_learned(self._native()) else {})
        if depth is None:
            return detail
        scaled = {"interval": stated(answer)["interval"]} if answer.interval is not None else {}
        return speculative_detail(depth, detail) | scaled

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
        return self._phases().phase(batch, None, kv) if batch else 0.0

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
        return self._phases().phase(batch, tokens, kv) if tokens else 0.0

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
        total, measured = 0.0, self._phases()
        for i in range(0, steps - 1, STATIC_STRIDE):
            ms = measured.phase(batch, None, batch * (length + i + 1), count=False)
            total += ms * min(STATIC_STRIDE, steps - 1 - i)
        return total

    def _uniform_prefill(self, batch: int, length: int, cached: int, count: bool = True) -> float:
        if length <= cached:
            refuse(
                "prefill_tokens_per_request",
                f"{length} input tokens with {cached} of them cached leave nothing to compute",
                "the input length includes the cached prefix and exceeds it by at least one token",
            )
        return self._phases().phase(batch, batch * (length - cached), batch * cached, count)

    def _phases(self) -> Measured:
        if self._measured is None:
            refuse(
                "unsupported_estimator",
                f"a {type(self.model).__name__} model has no phases of its own to ask for",
                "ask for a whole iteration with estimate_forward_pass_time_ms",
            )
        return self._measured

    # Learning

    def tune_with_fpms(self, iterations: Any) -> None:
        """Learn from ForwardPassMetrics with wall times (seconds): all of them or, on error, none.

        A dict is one iteration of one rank, a list of dicts one iteration, a list of lists many; JSON text is any of
        these.  Idle iterations and those without a positive wall time are left out.

        Raises MetricsError (also `role`, `lists_needed`), TraceError `speculative` where request lists show that a
        pass verified draft tokens, CoverageError where a corrected table has no answer of its own to compare with, and
        OptionError (`unsupported_estimator`) for a model that does not learn.
        """
        self._follow(learn(self.model, iterations))

    def get_min_correction_factor(self) -> float | None:
        """The smallest factor in use; None before there is one, and for a regression always."""
        factors = self._known_factors()
        return float(min(factors)) if factors else None

    def get_max_correction_factor(self) -> float | None:
        """The largest factor in use, or None."""
        factors = self._known_factors()
        return float(max(factors)) if factors else None

    def get_avg_correction_factor(self) -> float | None:
        """The mean of the factors in use, or None."""
        factors = self._known_factors()
        return sum(factors) / len(factors) if factors else None

    def _known_factors(self) -> list[float]:
        return self.model.factors.tolist() if isinstance(self.model, Corrected) else []

    # About the model

    def fpm_decode_kv_ceiling(self) -> int | None:
        """Largest KV total of any measured decode point; None without one.  No batch is promised to reach it."""
        if isinstance(self.model, Regression):
            self._phases()
        cell = getattr(self.model, "cell", None)
        return None if cell is None else cell.decode_kv_ceiling

    def fpm_query_coverage(self) -> dict[str, Any] | None:
        """Lookups by phase and outcome, and the first 128 distinct gaps; None unless collected."""
        coverage = None if self._measured is None else self._measured.coverage
        return None if coverage is None else coverage.snapshot()

    def regression_store_diagnostics(self) -> list[dict[str, Any]]:
        """Per store of a regression: workload_kind, ready, retained_observations, and spline where it has one."""
        return [dict(store) for store in self.model.stores] if isinstance(self.model, Regression) else []

    def diagnostics(self) -> dict[str, Any]:
        """Source, readiness and provenance under the peer's keys."""
        model, origin = self.model, self._origin
        mode, source = self._source()
        if isinstance(model, Regression):
            retained = sum(store["retained_observations"] for store in model.stores)
        else:
            retained = model.retained if isinstance(model, Corrected) else 0
        warning = "; ".join(origin.failures) if origin and origin.failures else None
        cell = getattr(model, "cell", None)
        here = {} if cell is None else {**asdict(cell.identity), "verify_width": model.verify_width}
        return {
            "source": source,
            "readiness": "ready" if model.ready else "unsupported_config" if warning else "insufficient_data",
            "retained_observations": retained,
            "correction_ready_buckets": model.ready_buckets if isinstance(model, Corrected) else 0,
            "last_warning": warning,
            "provenance": {
                "config": origin.config if origin else here,
                "selected_systems_root": origin.root if origin else None if cell is None else cell.path,
                "requested_estimation_mode": origin.requested if origin else mode,
                "selected_estimation_mode": origin.selected if origin else mode,
                "selection_failures": list(origin.failures) if origin else [],
            },
        }

    def _native(self) -> Any:
        """The model that a correction stands over, or the model."""
        model = self.model
        while isinstance(model, Corrected):
            model = model.model
        return model

    def _source(self) -> tuple[str, str]:
        """(estimation mode, source) in the peer's words, as far as it has any."""
        native = self._native()
        if isinstance(native, Regression):
            mode, source = "fpm_regression", "fallback_regression"
        elif is_learned(native):
            mode, source = "fpm_learned", "learned"
        elif isinstance(native, (Direct, WithIntervals)) or native is not self.model:
            mode, source = "fpm_interpolation", "aic"  # the peer's word for what was there before any observation
        else:
            mode = source = f"fpm_{type(native).__name__.lower()}"
        return mode, source + ("_with_correction" if self._known_factors() else "")

    # What only the peer's learned models have

    def flush_updates(self) -> NoReturn:
        self._not_learned("flush_updates requires online fpm_learned")

    def export_learned_artifact(self) -> NoReturn:
        self._not_learned("artifact export requires fpm_learned")

    def save_online_checkpoint(self, path: Any) -> NoReturn:
        self._not_learned("checkpoint saving requires online fpm_learned")

    def learned_feature_names(self) -> list[str] | None:
        """Features of a learned artifact in its order; None for other models."""
        native = self._native()
        return list(native.features) if isinstance(native, Forest) else None

    def learned_metadata(self) -> None:
        """None: nothing is kept beside a model; so are the next two, for no model is updated online."""

    def learned_online_diagnostics(self) -> None: ...

    def learned_selector_diagnostics(self) -> None: ...

    def close(self) -> None:
        """Nothing is held open; here so that code that closes the peer's model runs unchanged."""

    def _not_learned(self, what: str) -> NoReturn:
        raise OptionError(
            f"unsupported model: {what}\nhint: fpmjax.save_model keeps any model", code="unsupported_estimator"
        )


def is_learned(model: Any) -> bool:
    return type(model).__name__ in ("Learned", "Forest")  # by name: optax is slow to import


def counts(**arguments: Any) -> list[int]:
    """The arguments as counts of 0..2**32-1; MetricsError names the one that is none."""
    return [read_count(value, name) for name, value in arguments.items()]
