"""The study behind the factor of a speculative round, and how the cell that is asked compares with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

SHORT = {"bfloat16": "BF16", "float16": "FP16"}  # the study's own way to write a precision
IN_RANGE = "in study range"


def rule_document(name: str, rule: Any) -> dict[str, Any]:
    """For JSON: the rule of --rule, and its file."""
    return {"rule": {"file": name, **rule.document()}}


def rule_legend(rule: Any) -> str:
    """The rule of --rule in one line."""
    told = f"factor: {rule.slope} * draft + {rule.intercept}, {' '.join(rule.provenance.split())}"
    return told if rule.interval is None else f"{told}; {rule.interval}"


def document(cell: Cell | None) -> dict[str, Any]:
    """For JSON: where the study lies, and what was asked instead.

    A fitted model has no cell.  A query's `in_study_range` compares its batch, KV and draft length with these; nothing
    compares the deployments.
    """
    from fpmjax.speculative import CALIBRATED_DRAFT, CALIBRATED_KV_PER_REQUEST, CALIBRATED_REQUESTS

    return {
        "deployment": "TP1, BF16",
        "largest_batch": CALIBRATED_REQUESTS,
        "largest_kv_per_request": CALIBRATED_KV_PER_REQUEST,
        "largest_draft_length": CALIBRATED_DRAFT,
        "this_cell": None if cell is None else deployment(cell),
    }


def legend(cell: Cell | None) -> str:
    """What `in study range` compares and what it does not."""
    study = document(cell)
    return (
        f"{IN_RANGE}: batch to {study['largest_batch']}, KV to {study['largest_kv_per_request']:,} a request, draft "
        f"length to {study['largest_draft_length']}; the study ran {study['deployment']}"
        + (f", this cell is {study['this_cell']}" if cell else "")
    )


def deployment(cell: Cell) -> str:
    """A cell's size and precision as short as the study's, for example `TP4, fp8, KV BF16`."""
    who = cell.identity
    gemm, kv = (SHORT.get(kind, kind) for kind in (who.gemm_quant_mode, who.kv_cache_dtype))
    return f"TP{who.tp}, {gemm}" + (f", KV {kv}" if kv != gemm else "")
