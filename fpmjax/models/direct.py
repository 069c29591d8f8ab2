"""`direct`: the measured points of one cell, and nothing else, answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Estimate, Parts, Resolution
from fpmjax.errors import CoverageError
from fpmjax.iteration import INVALID, OK, Lookups, askable, compose, has_decode, has_prefill
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.evidence import baseline_evidence, collect_evidence, gather_evidence, gather_prefill_evidence
from fpmjax.lookup.kernel import decode_baseline, look_up_decode, look_up_prefill
from fpmjax.lookup.nearby import near_decode, near_prefill
from fpmjax.lookup.prefill import PrefillTable
from fpmjax.lookup.scalar import REFUSED, DecodeWalk, PrefillWalk
from fpmjax.lookup.tables import compile_cell
from fpmjax.status import Status
from fpmjax.work import COUNTS, Work

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

NO_ROWS, NO_BATCH_BRACKET, NO_PREFILL_SUPPORT = (
    np.int8(s) for s in (Status.NO_ROWS, Status.NO_BATCH_BRACKET, Status.NO_PREFILL_SUPPORT)
)
ACROSS_BATCH = np.int8(Resolution.ACROSS_BATCH)


def direct(cell: Cell, *, verify_width: int = 1) -> Direct:
    """The direct rule over one cell.

    verify_width: decode rows that the engine schedules per request; work then holds logical requests, and the
    lookup is at (verify_width * B, K), unscaled.

    Raises CoverageError (`native_ar_only`, `measured_round`) where the cell cannot answer such a width, and
    TableError where a batch is too large to be tabulated.
    """
    check_width(verify_width, cell.execution, cell.native_ar_only)
    decode, prefill = compile_cell(cell)
    model = Direct(decode, prefill, verify_width, cell.execution, cell.native_ar_only)
    object.__setattr__(model, "cell", cell)
    return model


@pytree("verify_width", "execution", "native_ar_only")
class Direct:
    """Model over the compiled tables of one cell; call it with `Work`.

    `cell` is the measured cell on the host; transformations of the pytree drop it, and with it only the names in
    messages.
    """

    decode: DecodeTable
    prefill: PrefillTable
    verify_width: int = 1
    execution: str = "autoregressive"
    native_ar_only: bool = False

    composition = "whole_forward"
    cell = None
    ready = True

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: an estimate of every query in `work`, any batch shape; `evidence` adds the per-rank parts."""
        require_x64()
        check_width(self.verify_width, self.execution, self.native_ar_only)
        work, status = askable(jnp, work, self.verify_width)
        status = self._round_limits(jnp, work, status)
        prefill, decode = has_prefill(work), has_decode(work)
        prefill_ms = decode_ms = baseline_ms = on_prefill = on_decode = None
        if prefill is not None:
            prefill_ms, on_prefill = look_up_prefill(
                self.prefill, work.prefill_requests, work.prefill_tokens, work.prefill_kv
            )
        if decode is not None:
            decode_ms, on_decode = look_up_decode(self.decode, work.decode_requests, work.decode_kv)
            baseline_ms = None if prefill is None else decode_baseline(self.decode, on_decode)
        found = Lookups(prefill_ms, decode_ms, baseline_ms, *self._missing(jnp))
        parts = None
        if evidence:
            no = jnp.zeros(status.shape, bool)
            asked = [no if x is None else x & (status == OK) for x in (prefill, decode)]
            parts = Parts(
                *(
                    jnp.full(status.shape, jnp.nan) if ms is None else jnp.where(of, ms, jnp.nan)
                    for ms, of in zip((prefill_ms, decode_ms, baseline_ms), (*asked, asked[0] & asked[1]), strict=True)
                ),
                gather_prefill_evidence(self.prefill, on_prefill, asked[0]),
                gather_evidence(self.decode.knots, on_decode, asked[1], ACROSS_BATCH),
                baseline_evidence(self.decode.knots, on_decode, asked[0] & asked[1]),
            )
        return compose(jnp, work, status, found, parts)

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries, in plain numbers: the same bits and no compile."""
        check_width(self.verify_width, self.execution, self.native_ar_only)
        work, status = askable(np, work, self.verify_width)
        status = self._round_limits(np, work, status)
        shape = status.shape
        zero = np.zeros(shape, np.uint32)
        counts = [
            np.broadcast_to(zero if x is None else x, shape).ravel().tolist()
            for x in (getattr(work, name) for name in COUNTS)
        ]
        ms, answers = np.full((3, status.size), np.nan), []
        for i, (requests, tokens, cached, batch, kv) in enumerate(zip(*counts, strict=True)):
            prefill = self.walk_prefill(requests, tokens, cached) if tokens else REFUSED
            decode = self.walk_decode(batch, kv) if batch else REFUSED
            baseline = self.walk_decode.baseline(decode) if tokens else REFUSED
            answers.append((prefill, decode, baseline))
            for phase, answer in enumerate(answers[-1]):
                if answer.ms is not None:
                    ms[phase, i] = answer.ms
        ms = ms.reshape(3, *shape)
        parts = None
        if evidence:
            ok = status.ravel() == OK
            walks = (self.walk_prefill, self.walk_decode, self.walk_decode)
            ms = np.where(status == OK, ms, np.nan)
            parts = Parts(*ms, *(collect_evidence(w, [a[i] for a in answers], ok, shape) for i, w in enumerate(walks)))
        return compose(np, work, status, Lookups(*ms, *self._missing(np)), parts)

    @cached_property
    def walk_decode(self) -> DecodeWalk:
        """Decode lookups of one query at a time, in plain numbers."""
        return DecodeWalk(self.decode)

    @cached_property
    def walk_prefill(self) -> PrefillWalk:
        """Prefill lookups of one query at a time, in plain numbers."""
        return PrefillWalk(self.prefill)

    def explain(self, reason: Status, work: Work) -> str:
        """Why the first refusing rank of one iteration (fields [r]) is refused, and what is measured nearby."""
        work, _ = askable(np, work, self.verify_width)
        zero = np.zeros(work.ranks, np.uint32)
        counts = [(zero if x is None else np.asarray(x)).tolist() for x in (getattr(work, name) for name in COUNTS)]
        for rank, (requests, tokens, cached, batch, kv) in enumerate(zip(*counts, strict=True)):
            if tokens and self.walk_prefill(requests, tokens, cached).ms is None:
                query = f"prefill batch_size={requests}, total_prefill_tokens={tokens}, total_kv_read_tokens={cached}"
                nearby = near_prefill(self.cell, requests, tokens, cached) if self.cell else ""
            elif batch and self.walk_decode(batch, kv).ms is None:
                query = f"decode batch_size={batch}, total_kv_read_tokens={kv}"
                nearby = near_decode(self.cell, batch, kv) if self.cell else ""
            else:
                continue
            return f"{query}{f' on rank {rank}' if work.ranks > 1 else ''}: {reason.sentence}{nearby}"
        return reason.sentence

    def with_latencies(self, latency_ms: jax.Array) -> Direct:
        """The same model with other milliseconds, float64 [rows of the Parquet file]; differentiable in them."""
        decode, prefill = (
            replace(t, knots=replace(t.knots, ms=jnp.asarray(latency_ms)[t.knots.row]))
            for t in (self.decode, self.prefill)
        )
        return replace(self, decode=decode, prefill=prefill)

    def _missing(self, xp) -> tuple:
        """What a missing prefill or decode answer means: no rows of the phase at all, or none that support it."""
        return (
            xp.where(self.prefill.rows > 0, NO_PREFILL_SUPPORT, NO_ROWS),
            xp.where(self.decode.rows > 0, NO_BATCH_BRACKET, NO_ROWS),
        )

    def _round_limits(self, xp, work: Work, status):
        """A measured speculative round is one rank's decode or prefill: nothing says how rounds compose."""
        if self.execution != "speculative_round":
            return status
        prefill, decode = has_prefill(work), has_decode(work)
        if prefill is not None and decode is not None:
            status = xp.where(prefill & decode, INVALID, status)
        busy = sum(x.astype(np.int32) for x in (prefill, decode) if x is not None)
        return xp.where((busy > 0) & (xp.cumsum(busy > 0, axis=-1) > 1), INVALID, status)


def check_width(verify_width: int, execution: str, native_ar_only: bool) -> None:
    """CoverageError where measurements of this kind cannot answer a verify width above 1."""
    if verify_width == 1:
        return
    if native_ar_only:
        raise CoverageError(
            f"verify_width={verify_width} selects a native autoregressive CUDA cell, which times one token per request\n"
            "hint: measure speculative rounds, or ask with draft_length, which reads the cell at width 1",
            code="native_ar_only",
        )
    if execution != "autoregressive":
        raise CoverageError(
            f"verify_width={verify_width} selects measured speculative rounds, which are already whole rounds\n"
            "hint: use verify_width=1; the batch of a measured round counts logical requests",
            code="measured_round",
        )
