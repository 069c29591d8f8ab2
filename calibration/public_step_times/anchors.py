"""Public step times as anchors: read as a study that lacks KV, against references interpolated between batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from calibration.common import read_rows
from fpmjax.acceptance import Acceptance, BestDraft, best_measured_draft_length
from fpmjax.rule import PUBLISHED
from fpmjax.study.read import Study, read_study
from fpmjax.study.scored import Scored, score

DATA = Path(__file__).parent / "data"
UNSTATED = "unstated"
GOODPUT_SOURCE = "vLLM PR 32374"
DEPTHS = (0, 1, 3, 5)  # that source measured


def sources() -> list[dict[str, str]]:
    return read_rows(DATA / "sources.csv")


def rows_of(source: str) -> list[dict[str, str]]:
    return [row for row in read_rows(DATA / "step_times.csv") if row["source"] == source]


def study_of(source: dict[str, str]) -> Study:
    """The rows of one source in the columns of a calibration file; no KV, and `unstated` for what it does not say.

    A row is the median or the mean of rounds that nobody published, so it stands for one round, after the warm-up.
    """
    rows = []
    for i, row in enumerate(rows_of(source["source"])):
        drafted = row["phase"] == "sd_round"
        rows.append(
            {
                "study_id": source["name"],
                "gpu": row["gpu"],
                "tp": 1,
                "dtype": UNSTATED,
                "framework": source["framework"],
                "framework_version": UNSTATED,
                "model": row["model"].split(" + ")[0],
                "method": row["method"],
                "attention_backend": UNSTATED,
                "timing_scope": "client_itl",
                "kind": "sd" if drafted else "stp",
                "draft_length": int(row["draft_length"]),
                "topk": 1,
                "batch_size": int(row["batch_size"]),
                "initial_context": 1,
                "repetition": int(drafted),
                "round_index": i,
                "total_kv_tokens": None,
                "latency_ms": float(row["latency_ms"]),
            }
        )
    return read_study(pa.Table.from_pylist(rows), anchors=True)


def scored_of(study: Study) -> Scored:
    return score(study, reference="interpolated_batch", warmup=0)


def batch_of(scored: Scored) -> np.ndarray:
    """int64 [n], the requests of each scored round."""
    return np.array([config.batch_size for config in scored.configs], np.int64)[scored.config]


def ordinary(source: dict[str, str]) -> dict[int, float]:
    """Batch -> milliseconds of an ordinary step."""
    return {int(r["batch_size"]): float(r["latency_ms"]) for r in rows_of(source["source"]) if r["phase"] == "decode"}


def rounds_over_own_batch(source: dict[str, str]) -> list[dict[str, Any]]:
    """Every speculative row, with its time over that of an ordinary step of the *same* batch."""
    plain = ordinary(source)
    out = []
    for row in rows_of(source["source"]):
        if row["phase"] == "sd_round":
            batch, depth = int(row["batch_size"]), int(row["draft_length"])
            ms = float(row["latency_ms"])
            factor = float(PUBLISHED.factor(depth))
            out.append(
                {
                    "draft_length": depth,
                    "batch": batch,
                    "round_ms": ms,
                    "over_own_batch": ms / plain[batch],
                    "factor": factor,
                }
            )
    return out


def position_rates() -> list[float]:
    return [float(row["unconditional_rate"]) for row in read_rows(DATA / "position_rates.csv")]


def payoffs(source: dict[str, str], scored: Scored) -> tuple[list[int], BestDraft, BestDraft]:
    """(batches, best draft lengths by measured times and by the rule's).

    The rule's times are factors times the interpolated ordinary steps; NaN where there is none.
    """
    plain = ordinary(source)
    batches = sorted(plain)
    measured, ruled = np.full((2, len(batches), len(DEPTHS)), np.nan)
    for row in rows_of(source["source"]):
        place = batches.index(int(row["batch_size"])), DEPTHS.index(int(row["draft_length"]))
        measured[place] = float(row["latency_ms"])
    ruled[:, 0] = [plain[b] for b in batches]
    for batch, depth, ms in zip(
        batch_of(scored).tolist(), scored.depth.tolist(), scored.predict(PUBLISHED), strict=True
    ):
        ruled[batches.index(batch), DEPTHS.index(depth)] = ms
    rates = Acceptance.unconditional(position_rates())
    told = [best_measured_draft_length(list(DEPTHS), ms, np.array(batches), rates) for ms in (measured, ruled)]
    return batches, told[0], told[1]


def iid_errors() -> list[dict[str, Any]]:
    """Tokens per round by the i.i.d. formula through d = 1, against those that were counted."""
    rows = read_rows(DATA / "acceptance.csv")
    first = {(r["dataset"], r["method"]): float(r["tokens_per_round"]) - 1 for r in rows if int(r["draft_length"]) == 1}
    out = []
    for row in rows:
        depth, counted = int(row["draft_length"]), float(row["tokens_per_round"])
        if depth > 1:
            formula = float(Acceptance.iid(first[row["dataset"], row["method"]]).tokens_per_round(depth))
            out.append(
                {
                    "method": row["method"],
                    "dataset": row["dataset"],
                    "draft_length": depth,
                    "counted": counted,
                    "iid_formula": formula,
                    "error_percent": 100 * (formula - counted) / counted,
                }
            )
    return out
