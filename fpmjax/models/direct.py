"""`direct`: the measured points of one cell, and nothing else, answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Estimate, Parts
from fpmjax.errors import FpmError, TableError
from fpmjax.iteration import INVALID, OK, Lookups, askable, compose, estimate_of, has_decode, has_prefill, shape_of
from fpmjax.lookup.compile import compile_cell
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.evidence import baseline_evidence, collect_evidence, decode_evidence, prefill_evidence
from fpmjax.lookup.kernel import decode_baseline, look_up_decode, look_up_prefill
from fpmjax.lookup.nearby import near_decode, near_prefill
from fpmjax.lookup.outer import Classes, batch_classes
from fpmjax.lookup.prefill import PrefillTable
from fpmjax.lookup.scalar import REFUSED, DecodeWalk, PrefillWalk
from fpmjax.status import Status
from fpmjax.tables.cell import Cell, check_width
from fpmjax.work import COUNTS, Array, Work

NO_ROWS, NO_BATCH_BRACKET, NO_PREFILL_SUPPORT = (
    np.int8(s) for s in (Status.NO_ROWS, Status.NO_BATCH_BRACKET, Status.NO_PREFILL_SUPPORT)
)


def direct(cell: Cell, *, verify_width: int = 1) -> Direct:
    """The direct rule over one cell.

    verify_width: decode rows that the engine schedules per request; work then holds logical requests, and the
    lookup is at (verify_width * B, K), unscaled.

    Raises CoverageError (`native_ar_only`, `measured_round`) where the cell cannot answer such a width, MetricsError
    (`verify_width`) where it is no positive integer, and TableError (`batch_too_large`, `table_too_large`) where the
    cell cannot be tabulated.
    """
    if not isinstance(cell, Cell):
        raise TableError(
            f"direct takes one cell, not {type(cell).__name__}\n"
            "hint: direct(load_cells(path).select(...)); select names the fields of the cell you mean",
            code="not_a_cell",
        )
    check_width(verify_width, cell.execution, cell.native_ar_only)
    decode, prefill = compile_cell(cell)
    model = Direct(decode, prefill, int(verify_width), cell.execution, cell.native_ar_only)
    object.__setattr__(model, "cell", cell)
    return model


@pytree("verify_width", "execution", "native_ar_only")
class Direct:
    """Model over the compiled tables of one cell; call it with `Work`.

    `cell` is the measured cell on the host.  It is no part of the pytree, so that models of different cells share
    compiled code; what a transformation returns has none, and loses only the names in messages.
    """

    decode: DecodeTable
    prefill: PrefillTable
    verify_width: int = 1
    execution: str = "autoregressive"
    native_ar_only: bool = False

    composition: ClassVar[str] = "whole_forward"
    cell: ClassVar[Cell | None] = None
    ready: ClassVar[bool] = True

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: an estimate of every query in `work`, any batch shape; `evidence` adds the per-rank parts."""
        require_x64()
        self._check()
        asked, status = askable(jnp, flat_counts(work), self.verify_width)
        shape = (*work.shape, work.ranks)
        status = self._round_limits(jnp, asked, status, shape)
        prefill, decode = has_prefill(asked), has_decode(asked)
        prefill_ms = decode_ms = baseline_ms = on_prefill = on_decode = None
        if decode is not None:
            decode_ms, on_decode = look_up_decode(self.decode, asked.decode_requests, asked.decode_kv)
        if prefill is not None:
            prefill_ms, on_prefill = look_up_prefill(
                self.prefill, asked.prefill_requests, asked.prefill_tokens, asked.prefill_kv
            )
            if on_decode is not None:
                baseline_ms = decode_baseline(self.decode, on_decode)
        found = Lookups(prefill_ms, decode_ms, baseline_ms, *self._missing(jnp))
        ms, rank_status = compose(jnp, asked, status, found)
        parts = None
        if evidence:
            parts = self._parts(found, asked, status == OK, on_prefill, on_decode)
            parts = jax.tree.map(lambda x: x.reshape(shape), parts)
        return estimate_of(jnp, ms.reshape(shape), rank_status.reshape(shape), parts)

    def _parts(self, found: Lookups, asked: Work, ok: Array, on_prefill: Any, on_decode: Any) -> Parts:
        """Per-rank pieces of a traced call; the fields of a phase that no query has stay None."""
        pieces: dict[str, Any] = dict.fromkeys(f.name for f in fields(Parts))

        def put(name: str, ms: Array, where: Array, evidence_of: Any, table: Any, support: Any) -> None:
            pieces[f"{name}_ms"] = jnp.where(where, ms, jnp.nan)
            pieces[name] = evidence_of(table, support, where)

        in_prefill, in_decode = (None if x is None else x & ok for x in (has_prefill(asked), has_decode(asked)))
        if in_prefill is not None:
            put("prefill", found.prefill_ms, in_prefill, prefill_evidence, self.prefill, on_prefill)
        if in_decode is not None:
            put("decode", found.decode_ms, in_decode, decode_evidence, self.decode, on_decode)
        if in_prefill is not None and in_decode is not None:
            put("baseline", found.baseline_ms, in_prefill & in_decode, baseline_evidence, self.decode, on_decode)
        return Parts(**pieces)

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries, in plain numbers: the same bits and no compile."""
        self._check()
        asked, status = askable(np, flat_counts(work), self.verify_width)
        shape = (*work.shape, work.ranks)
        status = self._round_limits(np, asked, status, shape)
        ms, answers = np.full((3, status.size), np.nan), []
        for i, (requests, tokens, cached, batch, kv) in enumerate(plain_counts(asked)):
            prefill = self.walk_prefill(requests, tokens, cached) if tokens else REFUSED
            decode = self.walk_decode(batch, kv) if batch else REFUSED
            baseline = self.walk_decode.baseline(decode) if tokens else REFUSED
            answers.append((prefill, decode, baseline))
            ms[:, i] = [np.nan if a.ms is None else a.ms for a in answers[-1]]
        rank_ms, rank_status = compose(np, asked, status, Lookups(*ms, *self._missing(np)))
        parts = None
        if evidence:
            ok = status == OK
            walks = (self.walk_prefill, self.walk_decode, self.walk_decode)
            each = [collect_evidence(w, [a[i] for a in answers], ok) for i, w in enumerate(walks)]
            parts = Parts(*np.where(ok, ms, np.nan), *each)
            parts = jax.tree.map(lambda x: x.reshape(shape), parts)
        return estimate_of(np, rank_ms.reshape(shape), rank_status.reshape(shape), parts)

    @cached_property
    def walk_decode(self) -> DecodeWalk:
        """Decode lookups of one query at a time, in plain numbers."""
        return DecodeWalk(self.decode)

    @cached_property
    def walk_prefill(self) -> PrefillWalk:
        """Prefill lookups of one query at a time, in plain numbers."""
        return PrefillWalk(self.prefill)

    @cached_property
    def walk_classes(self) -> Classes:
        """Batches whose decode lookups behave alike, for grids."""
        return batch_classes(self.decode)

    def explain(self, reason: Status, work: Work) -> str:
        """Why the first refusing rank of one iteration (fields [r]) is refused, and what is measured nearby."""
        asked, _ = askable(np, flat_counts(work), self.verify_width)
        for rank, (requests, tokens, cached, batch, kv) in enumerate(plain_counts(asked)):
            if tokens and self.walk_prefill(requests, tokens, cached).ms is None:
                query = f"prefill batch_size={requests}, total_prefill_tokens={tokens}, total_kv_read_tokens={cached}"
                nearby = near_prefill(self.cell, requests, tokens, cached) if self.cell else ""
            elif batch and self.walk_decode(batch, kv).ms is None:
                query = f"decode batch_size={batch}, total_kv_read_tokens={kv}"
                if self.verify_width > 1:
                    query = f"verify_width={self.verify_width} makes {batch // self.verify_width} requests {query}"
                nearby = near_decode(self.cell, batch, kv) if self.cell else ""
            else:
                continue
            return f"{query}{f' on rank {rank}' if work.ranks > 1 else ''}: {reason.sentence}{nearby}"
        return reason.sentence

    def with_latencies(self, latency_ms: Array) -> Direct:
        """The same model with other milliseconds, float64 [rows of the Parquet file]; differentiable in them.

        What was measured in row i of the file counts latency_ms[i], so `cell.decode.row` and `cell.prefill.row` say
        where a point stands.  An answer that does not come out positive is refused.

        Raises TableError (`latencies`) for another type or shape, FpmError (`x64_required`) for jax arrays outside
        `fpmjax.x64()`.
        """
        on_host = isinstance(latency_ms, np.ndarray)
        if not on_host:
            require_x64()
        xp = np if on_host else jnp
        rows = 1 + max(int(np.max(t.knots.row)) for t in (self.decode, self.prefill)) if self.cell else 0
        dtype, shape = getattr(latency_ms, "dtype", None), np.shape(latency_ms)
        if dtype is None or np.dtype(dtype).kind != "f" or len(shape) != 1 or shape[0] < rows:
            raise TableError(
                f"latencies are one float per row of the Parquet file (this cell reaches row {rows - 1}), "
                f"not {type(latency_ms).__name__} of shape {shape}\n"
                "hint: latencies[cell.decode.row] = cell.decode.latency_ms, and the same for prefill",
                code="latencies",
            )
        values = latency_ms.astype(np.float64)

        def at_rows(row: Array) -> Array:
            return values[row] if on_host else values.at[row].get(mode="fill", fill_value=np.nan)

        changed = [
            replace(t, knots=replace(t.knots, ms=at_rows(xp.asarray(t.knots.row)), checked=True))
            for t in (self.decode, self.prefill)
        ]
        model = replace(self, decode=changed[0], prefill=changed[1])
        object.__setattr__(model, "cell", self.cell)
        return model

    def __repr__(self) -> str:
        width = f", verify_width={self.verify_width}" if self.verify_width > 1 else ""
        return f"<Direct: {self.cell.identity if self.cell else self.execution}{width}>"

    def __getstate__(self) -> dict[str, Any]:
        """Without the walks, which are views that are made again where they are needed."""
        return {name: x for name, x in vars(self).items() if not name.startswith("walk_")}

    def _check(self) -> None:
        """Refuse a width the rows say nothing about, and tables that lost their 64 bits on the way to a device."""
        check_width(self.verify_width, self.execution, self.native_ar_only)
        for table in (self.decode, self.prefill):
            if table.knots.ms.dtype != np.float64:
                raise FpmError(
                    f"this model's latencies became {table.knots.ms.dtype}\n"
                    "hint: move or map a model inside `with fpmjax.x64():`",
                    code="x64_required",
                )

    def _missing(self, xp) -> tuple:
        """What a missing prefill or decode answer means: no rows of the phase at all, or none that support it."""
        return (
            xp.where(self.prefill.rows > 0, NO_PREFILL_SUPPORT, NO_ROWS),
            xp.where(self.decode.rows > 0, NO_BATCH_BRACKET, NO_ROWS),
        )

    def _round_limits(self, xp, work: Work, status, shape: tuple[int, ...]):
        """A measured speculative round is one rank's decode or prefill: nothing says how rounds compose."""
        if self.execution != "speculative_round":
            return status
        prefill, decode = (
            xp.zeros(status.shape, bool) if x is None else x for x in (has_prefill(work), has_decode(work))
        )
        busy = (prefill | decode).reshape(shape)
        earlier = xp.cumsum(busy.astype(np.int32), axis=-1) > 1
        return xp.where((prefill & decode) | (busy & earlier).reshape(status.shape), INVALID, status)


def flat_counts(work: Work) -> Work:
    """Counts and refusals, every field [n... * r]: a trailing axis of length one costs XLA a third of its speed."""
    fields = {name: getattr(work, name) for name in (*COUNTS, "refusal")}
    shape_of({name: fields[name] for name in COUNTS})
    return Work(**{name: x.reshape(-1) for name, x in fields.items() if x is not None})


def plain_counts(work: Work) -> Iterator[tuple[int, ...]]:
    """The five counts of every rank as Python integers."""
    size = next(x.size for x in (getattr(work, name) for name in COUNTS) if x is not None)
    zero = [0] * size
    return zip(*(zero if x is None else x.tolist() for x in (getattr(work, name) for name in COUNTS)), strict=True)
