"""Small tables for tests: built from plain rows, drawn at random, and asked near their own points."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracles import interp_ref

from fpmjax.metrics import U32_MAX
from fpmjax.status import Status
from fpmjax.tables.cell import Cell, Points
from fpmjax.tables.identity import Identity
from fpmjax.work import COUNTS, Work

Row = tuple[str, int, int, int, float]  # phase, batch, prefill tokens, KV, milliseconds
WIRE = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)

IDENTITY = Identity(
    model="acme/small",
    system="h200_sxm",
    backend="vllm",
    backend_version="0.24.0",
    gemm_quant_mode="bfloat16",
    moe_quant_mode="bfloat16",
    fmha_quant_mode="bfloat16",
    comm_quant_mode="half",
    kv_cache_dtype="bfloat16",
    tp=1,
    pp=1,
    dp=1,
    moe_tp=1,
    moe_ep=1,
    cp=1,
)


def cell_of(rows: list[Row], **fields: Any) -> Cell:
    """A cell of these rows, numbered as they stand."""

    def points(phase: str) -> Points:
        own = [(i, r) for i, r in enumerate(rows) if r[0] == phase]
        columns = [[r[k] for _, r in own] for k in (1, 2, 3, 4)]
        return Points.of(*columns, row=[i for i, _ in own])

    return Cell(IDENTITY, points("decode"), points("prefill"), **fields)


def decode_rows(curves: dict[int, list[tuple[int, float]]]) -> list[Row]:
    return [("decode", b, 0, k, ms) for b, curve in curves.items() for k, ms in curve]


def surface(batches, kvs) -> list[Row]:
    """Decode takes B + K / 1024 ms."""
    return [("decode", b, 0, k, b + k / 1024) for b in batches for k in kvs]


def work_of(queries: Any) -> Work:
    """Rows of the five counts, [n, 5], or [n, ranks, 5]."""
    queries = np.asarray(queries, np.int64)
    fields = {name: queries[..., i] for i, name in enumerate(COUNTS)}
    return Work.of(**fields, ranks=queries.ndim == 3)


def metrics_of(query: Any) -> dict:
    return {"scheduled_requests": dict(zip(WIRE, map(int, query), strict=True))}


def oracle_answer(oracle: interp_ref.Direct, ranks: Any) -> tuple[float | str, int]:
    """(milliseconds or the code of the refusal, slowest rank) of one iteration."""
    try:
        detail = oracle.estimate([metrics_of(rank) for rank in ranks])
    except interp_ref.Unsupported as refusal:
        return refusal.reason, -1
    return detail["latency_ms"], -1 if detail["max_rank"] is None else detail["max_rank"]


def answers_of(result: Any, phases: dict[str, bool]) -> list[tuple[float | str, int]]:
    """The same of an estimate; an absent phase is the oracle's plain refusal of it."""
    status, latency, rank = (np.ravel(x).tolist() for x in (result.status, result.latency_ms, result.rank))
    empty = "decode_no_two_sided_batch_bracket" if not phases["decode"] else "prefill_no_two_sided_support"
    out: list[tuple[float | str, int]] = []
    for s, ms, r in zip(status, latency, rank, strict=True):
        if s <= Status.IDLE:
            out.append((ms, r))
        else:
            assert np.isnan(ms)
            code = Status(s).code
            out.append((empty if code == "no_rows" else code, r))
    return out


# Coordinates that meet often enough for every way of answering: few values, their neighbours, and the extremes.
BATCHES = st.one_of(st.integers(1, 24), st.sampled_from([3, 5, 12, 20, 43, 48, 172, 192, 512]))
TOTALS = st.one_of(st.integers(0, 40), st.sampled_from([2**24, 2**24 + 1, 2**31, U32_MAX - 1, U32_MAX]))
LATENCIES = st.floats(1e-3, 1e4, allow_nan=False)


@st.composite
def tables(draw: st.DrawFn, decode_only: bool = False) -> list[Row]:
    """Rows with distinct coordinates in every phase, in any order, not monotone."""
    decode = draw(st.lists(st.tuples(BATCHES, TOTALS), unique=True, min_size=1, max_size=24))
    few = st.integers(1, 3)
    prefill = st.lists(st.tuples(few, st.integers(1, 12), st.integers(0, 12)), unique=True, max_size=24)
    points = [("decode", b, 0, k) for b, k in decode]
    if not decode_only:
        points += [("prefill", *p) for p in draw(prefill)]
    ms = draw(st.lists(LATENCIES, min_size=len(points), max_size=len(points)))
    return draw(st.permutations([(*p, y) for p, y in zip(points, ms, strict=True)]))


def near(rng: np.random.Generator, value: int, low: int) -> int:
    """The value itself, one beside it, or somewhere around."""
    step = int(rng.choice([0, 0, 1, -1, int(rng.integers(-value - 3, value + 3))]))
    return min(max(value + step, low), U32_MAX)


def queries_near(rows: list[Row], n: int, seed: int) -> np.ndarray:
    """Decode, prefill, mixed and idle work around the measured points, int64 [n, 5]."""
    rng = np.random.default_rng(seed)
    decode, prefill = ([r for r in rows if r[0] == phase] for phase in ("decode", "prefill"))
    out = np.zeros((n, 5), np.int64)
    for query in out:
        if prefill and rng.random() < 0.6:
            _, batch, tokens, kv, _ = prefill[rng.integers(len(prefill))]
            query[:3] = batch if rng.random() < 0.8 else near(rng, batch, 1), near(rng, tokens, 0), near(rng, kv, 0)
        if decode and rng.random() < 0.7:
            (_, batch, _, _, _), (_, _, _, kv, _) = (decode[i] for i in rng.integers(len(decode), size=2))
            query[3:] = near(rng, batch, 1), near(rng, kv, 0)
    return out
