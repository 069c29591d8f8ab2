"""Writes the answers that `fpmjax selfcheck` replays: `python tests/oracles/build_selfcheck.py`.

They come from the plain-Python oracle beside this file.  Two tables are asked: the TP1 cell of the embedded one, and a
small made-up one where everything awkward happens: capture rungs, gaps beyond two octaves, ragged and falling curves,
prefill that has to go KV-first, totals up to 2**32 - 1.  The made-up table travels with its answers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fpmjax.data import embedded_table

SEED = 561630
U32 = 2**32 - 1
RESOLUTIONS = {
    "exact_lookup": 0,
    "within_curve_interpolation": 1,
    "cross_batch_interpolation": 2,
    "cross_kv_interpolation": 3,
    "kv_first_interpolation": 4,
}
REFUSALS = {"decode_no_two_sided_batch_bracket": 2, "prefill_no_two_sided_support": 3}  # as in fpmjax.status
KINDS = {"decode": (400, 1), "prefill": (300, 1), "mixed": (250, 2)}  # queries and ranks
ROUNDS = 300

Row = tuple[str, int, int, int, float]  # phase, batch, tokens, KV, ms


def load_oracle() -> Any:
    path = Path(__file__).with_name("interp_ref.py")
    spec = importlib.util.spec_from_file_location("interp_ref", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def embedded_rows() -> list[Row | None]:
    """The rows of the Parquet file in its order, None for those of other cells."""
    names = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms")
    table = pq.read_table(embedded_table())
    rows = zip(*(table.column(name).to_pylist() for name in names), strict=True)
    return [row if tp == 1 else None for row, tp in zip(rows, table.column("tp").to_pylist(), strict=True)]


def awkward_rows(rng: random.Random) -> list[Row | None]:
    """Small integers and huge ones, rungs, lonely batches, holes."""
    rows: list[Row] = []
    for batch in (1, 2, 3, 5, 6, 8, 9, 16, 17, 24, 40, 41, 100, 900, 65536):
        kv = {rng.randrange(batch, 40 * batch + 2) for _ in range(6)} | {rng.randrange(U32) for _ in range(3)}
        if batch in (2, 9, 41):
            kv |= {0, U32}
        rows += [("decode", batch, 0, k, rng.uniform(0.5, 80.0)) for k in sorted(kv)]
    for batch in (1, 4, 7):
        tokens = sorted({rng.randrange(1, 3000) for _ in range(9)} | {U32})
        cached = sorted({rng.randrange(0, 9000) for _ in range(8)} | {0, U32 - 1})
        for t in tokens:
            if batch == 7:  # no KV total twice: only curves along KV can answer
                cached = sorted({rng.randrange(0, 9000) for _ in range(6)})
            rows += [("prefill", batch, t, k, rng.uniform(1.0, 500.0)) for k in cached if rng.random() < 0.5]
    rng.shuffle(rows)
    return list(rows)


def near(rng: random.Random, values: list[int]) -> int:
    """A count that is measured, or lies between or beside measured ones."""
    low, high = rng.choice(values), rng.choice(values)
    way = rng.random()
    if way < 0.35:
        return low
    if way < 0.45:
        return min(max(low + rng.choice((-1, 1)), 0), U32)
    return round(math.exp(rng.uniform(*sorted((math.log(low + 1), math.log(high + 1)))))) - 1


def questions(rng: random.Random, rows: list[Row | None], kind: str) -> np.ndarray:
    """uint32 [n, ranks, 5]: prefill requests, tokens and KV; decode requests and KV."""
    queries, ranks = KINDS[kind]
    points = {phase: [row[1:4] for row in rows if row and row[0] == phase] for phase in ("prefill", "decode")}
    out = np.zeros((queries, ranks, 5), np.uint32)
    for at in np.ndindex(queries, ranks):
        if kind != "prefill" and (kind == "decode" or rng.random() < 0.8):
            batch = max(near(rng, [b for b, _, _ in points["decode"]]), 1)
            own = [k for b, _, k in points["decode"] if b == batch] or [k for _, _, k in points["decode"]]
            out[at][3:] = batch, near(rng, own)
        if kind != "decode" and (kind == "prefill" or rng.random() < 0.6):
            batch = rng.choice(points["prefill"])[0]
            own = [(t, k) for b, t, k in points["prefill"] if b == batch]
            out[at][:3] = batch, max(near(rng, [t for t, _ in own]), 1), near(rng, [k for _, k in own])
    return out


def ask(oracle: Any, model: Any, work: np.ndarray, row_of: dict[tuple, int]) -> dict[str, np.ndarray]:
    """Answers and evidence to uint32 work [n, r, 5]."""
    n, ranks, _ = work.shape
    latency, status, slowest = np.full(n, np.nan), np.zeros(n, np.int8), np.full(n, -1, np.int8)
    parts = np.full((n, ranks, 3), np.nan)  # prefill, decode, baseline
    resolution = np.full((n, ranks, 3), -1, np.int8)
    row, weight = np.full((n, ranks, 3, 4), -1, np.int32), np.zeros((n, ranks, 3, 4))
    names = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
    names += ("num_decode_requests", "sum_decode_kv_tokens")
    for i in range(n):
        metrics = [{"scheduled_requests": dict(zip(names, each, strict=True))} for each in work[i].tolist()]
        try:
            answer = model.estimate(metrics)
        except oracle.Unsupported as refusal:
            status[i] = REFUSALS[refusal.reason]
            continue
        latency[i], status[i] = answer["latency_ms"], 0 if answer["ranks"] else 1
        slowest[i] = -1 if answer["max_rank"] is None else answer["max_rank"]
        for rank in answer["ranks"]:
            for query in rank["queries"]:
                part = 2 if query["decode_baseline"] else ("prefill", "decode").index(query["phase"])
                at = i, rank["rank"], part
                parts[at], resolution[at] = query["latency_ms"], RESOLUTIONS[query["resolution"]]
                for slot, ((b, t, k), _, share) in enumerate(query["support"]):
                    row[at][slot], weight[at][slot] = row_of[query["phase"], b, t or 0, k], share
    return {
        "latency_ms": latency,
        "status": status,
        "rank": slowest,
        "parts_ms": parts,
        "resolution": resolution,
        "row": row,
        "weight": weight,
    }


def rounds(rng: random.Random, oracle: Any, model: Any, rows: list[Row | None]) -> dict[str, np.ndarray]:
    """Speculative rounds: the ordinary answer at (d + 1) B requests and the same KV, scaled once."""
    batches = [row[1] for row in rows if row and row[0] == "decode"]
    kv = [row[3] for row in rows if row and row[0] == "decode"]
    work, depth = np.zeros((ROUNDS, 1, 5), np.uint32), np.zeros(ROUNDS, np.int64)
    latency, status = np.full(ROUNDS, np.nan), np.zeros(ROUNDS, np.int8)
    for i in range(ROUNDS):
        d = rng.choice((1, 2, 3, 4, 4, 7, 8, 15))
        requests = max(near(rng, batches) // (d + 1), 1)
        work[i, 0, 3:], depth[i] = (requests, near(rng, kv)), d
        try:
            latency[i] = (
                (125 + 8 * d) / 100 * model.predict_decode_latency_total(requests * (d + 1), int(work[i, 0, 4]))
            )
        except oracle.Unsupported as refusal:
            status[i] = REFUSALS[refusal.reason]
    return {"work": work, "draft_length": depth, "latency_ms": latency, "status": status}


def golden() -> dict[str, np.ndarray]:
    """Everything that the file holds; names are `table.kind.field`."""
    oracle, rng = load_oracle(), random.Random(SEED)
    sidecar = json.loads(embedded_table().with_suffix(".metadata.json").read_text())
    made_up = awkward_rows(rng)
    out: dict[str, np.ndarray] = {
        "digest": np.array(sidecar["parquet_sha256"]),
        "awkward.points": np.array([(r[0] == "decode", *r[1:4]) for r in made_up if r], np.int64),
        "awkward.latency_ms": np.array([r[4] for r in made_up if r]),
    }
    for table, rows in (("embedded", embedded_rows()), ("awkward", made_up)):
        model = oracle.Direct([row for row in rows if row])
        row_of = {row[:4]: i for i, row in enumerate(rows) if row}
        for kind in KINDS:
            work = questions(rng, rows, kind)
            answers = ask(oracle, model, work, row_of)
            if kind != "mixed":  # the mixed ones show every way that evidence can take
                answers = {name: answers[name] for name in ("latency_ms", "status", "rank")}
            out |= {f"{table}.{kind}.{name}": value for name, value in {"work": work, **answers}.items()}
        out |= {f"{table}.speculative.{k}": v for k, v in rounds(rng, oracle, model, rows).items()}
    return out


if __name__ == "__main__":
    target = embedded_table().with_name("selfcheck.npz")
    np.savez_compressed(target, **golden())  # type: ignore[arg-type]
    print(f"{target}: {target.stat().st_size:,} bytes")
