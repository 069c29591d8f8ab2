"""The parts of a study's document, each from the study or from its scored rounds, as plain JSON values."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fpmjax.study.exclude import exclude
from fpmjax.study.read import IN_MEMORY, Study
from fpmjax.study.reading import POOLED, group_name
from fpmjax.study.refit import LOSSES, WEIGHTS, refit
from fpmjax.study.scored import Scored
from fpmjax.study.statistics import finite, percent, quiet, statistics

DIGITS = 9  # significant ones of every number: the last bits differ between machines
SCOPE = ("study_id", "gpu", "tp", "dtype", "framework", "framework_version", "model", "method", "attention_backend")
SCOPE += ("timing_scope", "topk")
BINS = 20  # at most, of (d+1)B and of K


def data_name(study: Study) -> str:
    """Name of the rounds' file in the folder."""
    return f"data/{study.label if study.path else IN_MEMORY}"


def kept_files(study: Study) -> dict[str, bytes]:
    """Name in the folder -> bytes: the study's file as it was read, or a table as Parquet; and its sidecar."""
    files = {f"data/{name}": data for name, data in study.kept.items()}
    if study.path is not None:
        return files
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = pa.BufferOutputStream()
    pq.write_table(study.table(), out)
    return {data_name(study): out.getvalue().to_pybytes()} | files


def inputs_of(study: Study, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What the numbers were made of, each with its digest."""
    found: list[dict[str, Any]] = [
        {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    ]
    found[0] |= {"rows": study.rows, "content_sha256": study.content()}
    if study.ignored:
        found[0]["ignored_columns"] = list(study.ignored)
    if study.sidecar:
        found[0]["sidecar"] = dict(study.sidecar)
    return found


def scope_of(study: Study) -> dict[str, list[Any]]:
    """Every value of the columns that say what was measured, sorted; of the method, those of speculative rounds."""
    found: dict[str, list[Any]] = {}
    for name in SCOPE:
        values = study.columns[name]
        if name == "method":
            values = values[study.sd]
        codes = np.unique(values).tolist()
        found[name] = [study.words[name][code] for code in codes] if name in study.words else codes
    for name in ("draft_length", "batch_size", "initial_context"):
        values = np.unique(study.columns[name][study.sd])
        found[name] = values[values >= 0].tolist()  # anchors may not say their context
    return found


def rows_of(study: Study, warmup: int) -> dict[str, Any]:
    """Rows of the file by kind, and how many of each are left out for which reason."""
    left_out = exclude(study, warmup=warmup)
    kinds = {"sd": study.sd, "stp": ~study.sd}
    return {kind: {"rows": int(mask.sum()), "excluded": left_out.counts(mask)} for kind, mask in kinds.items()}


def models_of(model: Any) -> Any:
    """An estimator, or those of several deployments: kind, digest, and of its table, if any, identity and clock."""
    from fpmjax.study.identity import clock_of
    from fpmjax.sweep_job import about_model

    def about(one: Any) -> dict[str, Any]:
        found = about_model(one)
        return found | {"clock": clock_of(found)} if "policy" in found else found

    if not isinstance(model, Mapping):
        return about(model)
    return {", ".join(map(str, key)): about(one) for key, one in sorted(model.items())}


def refits_of(scored: Scored) -> Iterator[dict[str, Any]]:
    """Every loss and weighting, over all rounds and over each model and method: the main one of each first."""
    for name, mask in ({POOLED: np.ones(len(scored), bool)} | groups_of(scored)).items():
        part = scored.where(mask)
        for loss in LOSSES:
            for weights in WEIGHTS:
                yield refit_row(part, name, loss, weights)


def refit_row(scored: Scored, group: str, loss: str, weights: str) -> dict[str, Any]:
    fit = refit(scored, loss=loss, weights=weights)
    fitted = {"slope": fit.slope, "intercept": fit.intercept, "unclipped": list(fit.unclipped)}
    row = {"group": group, "loss": loss, "weights": weights, "status": fit.status}
    row |= fitted if fit.fitted else dict.fromkeys(fitted)
    row |= {"ratio_mean": fit.ratio_mean, "value": fit.value, "draft_lengths": list(fit.depths)}
    if not fit.fitted:
        return row | {"rounds": fit.rounds, "configurations": fit.configurations}
    found = statistics(scored, fit.predict(scored))
    names = ("rounds", "scored_configurations", "round_weighted_mape", "round_weighted_bias", "equal_config_mape")
    row |= {name: found[name] for name in (*names, "equal_config_bias", "wape", "p90_round_ape", "p90_config_mape")}
    row["configurations"] = row.pop("scored_configurations")
    return row | {"worst_config": found["worst_config"]}


def residuals(scored: Scored, predicted: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """How the signed errors of each model + method move with (d+1)B and with K: by value, or in bins of equal ratio."""
    signed = percent(predicted, scored.measured_ms)
    groups = groups_of(scored)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, x in {"widened_batch": scored.widened, "kv_tokens": scored.kv}.items():
        place = bins_of(x)
        found[name] = [
            {"group": group} | row
            for group, mask in groups.items()
            for row in binned(x[mask], place[mask], signed[mask])
        ]
    return found


def bins_of(x: np.ndarray) -> np.ndarray:
    """int64 [n], the bin of each value: one per distinct value, or of equal ratio where those are many."""
    distinct = np.unique(x)
    if len(distinct) <= BINS:
        return np.searchsorted(distinct, x)
    edges = np.geomspace(max(distinct[0], 1), distinct[-1], BINS + 1)[1:-1]
    return np.searchsorted(edges, x, "right")


def binned(x: np.ndarray, place: np.ndarray, signed: np.ndarray) -> Iterator[dict[str, Any]]:
    """One row per bin that has rounds; those that do not say their KV are left out."""
    for i in np.unique(place[x >= 0]).tolist():
        here = (place == i) & (x >= 0)
        with quiet():
            low, middle, high = (finite(x) for x in np.percentile(signed[here], [10, 50, 90]))
            bias = finite(signed[here].mean())
        yield (
            {"low": int(x[here].min()), "high": int(x[here].max()), "rounds": int(here.sum())}
            | {"p10_round_error": low, "median_round_error": middle, "p90_round_error": high}
            | {"round_weighted_bias": bias}
        )


def groups_of(scored: Scored) -> dict[str, np.ndarray]:
    """`model + method` -> bool [n], its rounds; sorted."""
    named = np.array([group_name(config._asdict()) for config in scored.configs], object)
    return {name: (named == name)[scored.config] for name in sorted(set(named.tolist()))}


def rounded(value: Any) -> Any:
    """Plain JSON values: floats to `DIGITS` significant digits, NaN as null, tuples as lists, text keys."""
    if isinstance(value, Mapping):
        return {str(key): rounded(x) for key, x in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [rounded(x) for x in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.{DIGITS}g}") + 0.0 if math.isfinite(value) else None  # + 0.0: no minus zero
    return value if value is None or isinstance(value, str) else os.fspath(value)
