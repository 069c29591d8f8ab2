"""What was asked of a measured table and how it answered: counts of lookups, and the gaps that were met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpmjax.answer import Resolution
from fpmjax.lookup.scalar import Answer
from fpmjax.status import Status

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

GAP_LIMIT = 128  # distinct gaps that are kept (the peer's bound); totals are never truncated
# Columns of a gap's `cell_identity`, in the peer's order.
IDENTITY = (
    "attention_backend",
    "comm_quant_mode",
    "cp",
    "dp",
    "enable_eplb",
    "enable_wideep",
    "fmha_quant_mode",
    "gemm_quant_mode",
    "kv_cache_dtype",
    "moe_backend",
    "moe_ep",
    "moe_quant_mode",
    "moe_tp",
    "pp",
    "tp",
)


class QueryCoverage:
    """Running counts over one cell; `snapshot` gives them under the peer's keys."""

    def __init__(self, cell: Cell):
        self._cell = cell
        self._counts = {
            kind: {"measured": 0, "interpolated": 0, "unsupported": 0}
            for kind in ("queries", "prefill", "decode", "mixed_decode_baseline")
        }
        self._gaps: dict[tuple, int] = {}
        self._omitted = 0

    def count(self, kind: str, batch: int, tokens: int | None, kv: int, answer: Answer, missing: Status) -> None:
        """Count one lookup of a kind (prefill, decode, mixed_decode_baseline); `missing` says what a refusal means."""
        if answer.ms is None:
            outcome = "unsupported"
            gap = (kind, batch, tokens, kv, missing)
            if gap in self._gaps or len(self._gaps) < GAP_LIMIT:
                self._gaps[gap] = self._gaps.get(gap, 0) + 1
            else:
                self._omitted += 1
        else:
            outcome = "measured" if answer.resolution == Resolution.EXACT else "interpolated"
        self._counts["queries"][outcome] += 1
        self._counts[kind][outcome] += 1

    def snapshot(self) -> dict[str, Any]:
        """A copy of all counts and gaps."""
        identity = self._cell.identity
        return {
            "counting_unit": "native_lookup_resolutions",
            **{kind: dict(counts) for kind, counts in self._counts.items()},
            "gaps": [
                {
                    "phase": kind,  # a baseline is only asked where its decode was answered, so it leaves no gap
                    "purpose": "forward_pass",
                    "model_path": identity.model,
                    "cell_identity": {name: str(getattr(identity, name)) for name in IDENTITY},
                    "cell_ids": list(self._cell.cell_ids),
                    "coordinates": {
                        "batch_size": float(batch),
                        "total_kv_read_tokens": float(kv),
                        **({} if tokens is None else {"total_prefill_tokens": float(tokens)}),
                    },
                    "reason": status.sentence,
                    "occurrences": occurrences,
                }
                for (kind, batch, tokens, kv, status), occurrences in self._gaps.items()
            ],
            "gap_limit": GAP_LIMIT,
            "omitted_gap_queries": self._omitted,
        }
