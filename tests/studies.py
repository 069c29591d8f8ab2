"""Synthetic calibration studies with known answers, as Arrow tables and as scored rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.study.scored import Config, Scored

GPUS = ("B200", "GB200", "H100", "H200")
MTP, EAGLE = ("Qwen3.5-4B", "mtp"), ("Qwen3-8B", "eagle3")
TRUE = {MTP: (0.08, 1.25), EAGLE: (0.10, 1.15)}  # (model, method) -> slope, intercept
DEPTHS, BATCHES, CONTEXTS = (1, 2, 3, 4), (1, 4, 8), (1024, 4096)
WARMUP = 16
SHARED: dict[str, Any] = {
    "study_id": "synthetic",
    "tp": 1,
    "dtype": "bf16",
    "framework": "sglang",
    "framework_version": "0.5.0",
    "attention_backend": "flashinfer",
    "timing_scope": "model_worker_forward_cuda",
    "topk": 1,
}


def forward_ms(batch: Any, kv: Any) -> Any:
    """F(b, K) of the synthetic studies."""
    return 5 + 0.02 * batch + 4e-5 * kv


def table(rows: Sequence[Mapping[str, Any]], **shared: Any) -> pa.Table:
    """Rows that say what differs, `SHARED` for the rest."""
    names = dict.fromkeys(name for row in rows for name in {**SHARED, **shared, **row})
    return pa.Table.from_pylist([{**dict.fromkeys(names), **SHARED, **shared, **row} for row in rows])


def runs(each: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Runs of rounds: entries that are arrays hold one value per round, the others are the same in all of them."""
    lengths = [len(run["latency_ms"]) for run in each]
    names = list({name: None for run in each for name in {**SHARED, **run}})
    columns: dict[str, Any] = {}
    for name in names:
        values = [{**SHARED, **run}[name] for run in each]
        if any(isinstance(value, np.ndarray) for value in values):
            columns[name] = np.concatenate([np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)])
        elif isinstance(values[0], str):
            words = sorted(set(values))
            codes = np.repeat([words.index(value) for value in values], lengths).astype(np.int32)
            columns[name] = pa.DictionaryArray.from_arrays(codes, words).cast(pa.string())
        else:
            columns[name] = np.repeat(np.array(values), lengths)
    return pa.table(columns)


def synthetic(
    *,
    gpus: Sequence[str] = GPUS,
    true: Mapping[tuple[str, str], tuple[float, float]] = TRUE,
    depths: Sequence[int] = DEPTHS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    rounds: Callable[[int], int] = lambda d: 100 - 10 * d,
    repetitions: Sequence[int] = (1,),
    cluster_noise: float = 0.0,
    round_noise: float = 0.0,
    seed: int = 0,
) -> pa.Table:
    """The study of calibration.md section 9 B: 192 configurations, 14,400 rounds after 16 slow ones of each.

    true: (model, method) -> (a, b), T = (a d + b) F.  Noise: relative standard deviations of a factor per
    configuration and repetition, and of one per round.  STP runs (repetition 0) cover every widened batch.
    """
    random = np.random.default_rng(seed)
    made = []
    for gpu in gpus:
        for (model, method), (slope, intercept) in true.items():
            for d in depths:
                n = rounds(d)
                for size in batches:
                    for context in contexts:
                        wide = (d + 1) * size
                        stp = np.arange(WARMUP + 2 * n // (d + 1) + WARMUP + 2)
                        kv = size * context + wide * (stp - WARMUP)  # starts 16 tokens early: warm-up rounds go
                        latency = np.where(stp < WARMUP, 3.0, 1.0) * forward_ms(wide, kv)
                        run: dict[str, Any] = {"gpu": gpu, "model": model}
                        made.append(
                            run
                            | {"method": "none", "kind": "stp", "draft_length": 0, "batch_size": wide}
                            | {"initial_context": context // (d + 1) - WARMUP, "repetition": 0}
                            | {"round_index": stp, "total_kv_tokens": kv, "latency_ms": latency}
                        )
                        for repetition in repetitions:
                            i = np.arange(-WARMUP, n)
                            kv = size * (context + WARMUP + np.where(i < 0, i, 2 * i))
                            factor = (slope * d + intercept) * (1 + cluster_noise * random.standard_normal())
                            factor = factor * (1 + round_noise * random.standard_normal(len(i)))
                            latency = np.where(i < 0, 5.0, 1.0) * factor * forward_ms(wide, kv)
                            made.append(
                                run
                                | {"method": method, "kind": "sd", "draft_length": d, "batch_size": size}
                                | {"initial_context": context, "repetition": repetition}
                                | {"round_index": i + WARMUP, "total_kv_tokens": kv, "latency_ms": latency}
                            )
    return runs(made)


# Section 9 A: (configuration, F, d, B, T of every round).
SIX = (("A", 10.0, 1, 1, (13.3, 14.63)), ("B", 8.0, 3, 2, (11.92,)), ("C", 20.0, 4, 1, (25.12, 25.12, 25.12)))


def six_rounds() -> pa.Table:
    """The six rounds of calibration.md section 9 A, each configuration on a GPU of its letter."""
    rows = []
    for gpu, reference, d, size, measured in SIX:
        where = {"gpu": gpu, "model": "M", "initial_context": 64, "total_kv_tokens": 64 * size}
        stp = {"method": "none", "kind": "stp", "draft_length": 0, "batch_size": (d + 1) * size, "repetition": 0}
        rows.append(where | stp | {"round_index": WARMUP, "latency_ms": reference})
        sd = {"method": "mtp", "kind": "sd", "draft_length": d, "batch_size": size, "repetition": 1}
        rows += [where | sd | {"round_index": WARMUP + i, "latency_ms": t} for i, t in enumerate(measured)]
    return table(rows)


def scored(depth: Any, reference: Any, measured: Any, config: Any, configs: Sequence[Config]) -> Scored:
    """Scored rounds by hand, sorted by configuration; nothing excluded, nothing unmatched."""
    order = np.argsort(np.asarray(config), kind="stable")
    n = len(order)
    return Scored(
        depth=np.asarray(depth, np.int64)[order],
        reference_ms=np.asarray(reference, np.float64)[order],
        measured_ms=np.asarray(measured, np.float64)[order],
        config=np.asarray(config, np.int32)[order],
        kv=np.zeros(n, np.int64),
        repetition=np.ones(n, np.int32),
        round_index=WARMUP + np.arange(n),
        configs=tuple(configs),
        unmatched=np.zeros(len(configs), np.int64),
    )


def six_scored() -> Scored:
    """`six_rounds`, scored."""
    rounds = [(d, f, t, c) for c, (_, f, d, _, measured) in enumerate(SIX) for t in measured]
    configs = [Config(gpu, 1, "M", "mtp", d, size, 64) for gpu, _, d, size, _ in SIX]
    depth, reference, measured, config = zip(*rounds, strict=True)
    return scored(depth, reference, measured, config, configs)


def synthetic_scored(**options: Any) -> Scored:
    """`synthetic`, scored at the exact F: what `fpmjax.study.score` finds up to rounding."""
    full = synthetic(**options)
    columns = {name: full.column(name).to_pylist() for name in (*Config._fields, "kind")}
    warm, kind = full.column("round_index").to_numpy() >= WARMUP, np.array(columns["kind"]) == "sd"
    chosen = np.flatnonzero(warm & kind)
    keys = [Config(*(columns[name][i] for name in Config._fields)) for i in chosen.tolist()]
    configs = sorted(set(keys))
    place = {key: i for i, key in enumerate(configs)}
    depth, size, kv, measured = (
        full.column(name).to_numpy()[chosen] for name in ("draft_length", "batch_size", "total_kv_tokens", "latency_ms")
    )
    result = scored(depth, forward_ms((depth + 1) * size, kv), measured, [place[key] for key in keys], configs)
    order = np.argsort([place[key] for key in keys], kind="stable")
    repetition = full.column("repetition").to_numpy()[chosen][order].astype(np.int32)
    rounds = full.column("round_index").to_numpy()[chosen][order]
    return replace(result, kv=kv[order], repetition=repetition, round_index=rounds)
