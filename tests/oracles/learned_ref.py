"""Plain NumPy oracle of the peer's learned artifact: features, trees, one query at a time.

    model = LearnedRef(json.loads(text))
    ms    = model.estimate(iteration)        # a dict, or a list of rank dicts
    X     = features_of(iteration)           # float64 [135]

`estimate` gives 0.0 for an idle iteration, None where no store is of its kind, ValueError for refused input, otherwise
milliseconds.  Independent of the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_AGG = (
    "num_active_ranks num_prefill_requests sum_prefill_tokens sum_prefill_kv_tokens var_prefill_length "
    "num_decode_requests sum_decode_kv_tokens var_decode_kv_tokens max_rank_prefill_tokens "
    "max_rank_decode_kv_tokens max_rank_num_decode_requests mean_prefill_chunk mean_prefill_kv "
    "prefill_attention_pairs mean_decode_kv sum_decode_kv_squared log1p_sum_prefill_tokens "
    "log1p_sum_prefill_kv_tokens log1p_sum_decode_kv_tokens log1p_prefill_attention_pairs "
    "log1p_sum_decode_kv_squared "
)
_REQ = (
    "req_batch_size req_sum_extend req_max_extend req_min_extend req_sum_past req_max_past req_min_past "
    "req_sum_extend_x_past req_sum_extend_squared req_sum_past_squared req_sum_attn_flops "
    "req_sum_extend_x_max_past req_log1p_sum_past req_log1p_sum_attn_flops req_batch_size_x_sum_extend "
    "req_max_past_minus_min_past req_is_decode req_is_prefill "
)
AGG, REQ = _AGG.split(), _REQ.split()
SLOTS = 32
NAMES = AGG + REQ + [f"slot{i}_{k}" for i in range(SLOTS) for k in ("present", "past", "extend")]
COLUMN = {name: i for i, name in enumerate(NAMES)}
ROLE_STORES = {
    "prefill": ("pure_prefill",),
    "decode": ("pure_decode",),
    "aggregated": ("pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill"),
}
FLOOR_MS = 1e-6
_COUNTS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)


class _Rank:
    """One rank's scheduled work after validation."""

    def __init__(self, fpm: dict[str, Any]):
        if fpm.get("version", 1) != 1:
            raise ValueError("unsupported FPM version")
        s = fpm.get("scheduled_requests") or {}
        counts = [s.get(k, 0) for k in _COUNTS]
        if any(type(c) is not int or not 0 <= c < 2**32 for c in counts):
            raise ValueError("scheduled counts and sums must be u32 integers")
        self.n_pre, self.p_tok, self.p_kv, self.n_dec, self.d_kv = counts
        self.v_pre = float(s.get("var_prefill_length", 0.0))
        self.v_dec = float(s.get("var_decode_kv_tokens", 0.0))
        ext, past = list(s.get("extend_lengths") or []), list(s.get("past_kv_lengths") or [])
        if not (math.isfinite(self.v_pre) and math.isfinite(self.v_dec)):
            raise ValueError("variances must be finite (JSON has no NaN)")
        if self.n_pre == 0 and (self.p_tok or self.p_kv):
            raise ValueError("prefill sums without prefill requests")
        if self.n_dec == 0 and self.d_kv:
            raise ValueError("decode KV sum without decode requests")
        if (ext or past) and not (len(ext) == len(past) == self.n_pre + self.n_dec):
            raise ValueError("per-request lists must be empty or cover every scheduled request")
        self.active = self.p_tok > 0 or self.n_dec > 0
        self.pairs = np.array([ext, past], dtype=np.float64).T if ext else None
        slack = self.p_kv + self.d_kv + self.p_tok + self.n_dec
        self.lists_ok = self.pairs is not None and sum(past) <= slack


def _ranks(iteration) -> list[_Rank]:
    items = [iteration] if isinstance(iteration, dict) else list(iteration)
    if not items:
        raise ValueError("an iteration needs at least one rank")
    return [_Rank(f) for f in items]


def workload_kind(ranks: Sequence[_Rank], worker_type: str) -> str | None:
    pre = [r.p_tok > 0 for r in ranks]
    dec = [r.n_dec > 0 for r in ranks]
    if worker_type == "prefill" and any(dec):
        raise ValueError("prefill worker received decode work")
    if worker_type == "decode" and any(pre):
        raise ValueError("decode worker received prefill work")
    if any(pre) and any(dec):
        return (
            "contains_locally_mixed" if any(a and b for a, b in zip(pre, dec, strict=True)) else "cross_rank_aggregated"
        )
    return "pure_prefill" if any(pre) else "pure_decode" if any(dec) else None


def _feature_row(ranks: Sequence[_Rank]) -> np.ndarray:
    live = [r for r in ranks if r.active]
    out = np.zeros(len(NAMES))

    def put(name, value):
        out[COLUMN[name]] = value

    total = {k: float(sum(getattr(r, k) for r in live)) for k in ("n_pre", "p_tok", "p_kv", "n_dec", "d_kv")}
    peak = {k: float(max((getattr(r, k) for r in live), default=0)) for k in ("p_tok", "n_dec", "d_kv")}
    pairs_work = squares = 0.0
    for r in live:
        if r.p_tok > 0 and r.n_pre > 0:
            pairs_work += r.p_kv * float(r.p_tok) / r.n_pre + float(r.p_tok) ** 2 / (2.0 * r.n_pre) + r.p_tok / 2.0
        if r.n_dec > 0:
            mean = r.d_kv / float(r.n_dec)
            squares += r.n_dec * max(r.v_dec, 0.0) + r.n_dec * mean * mean
    put("num_active_ranks", len(live))
    put("num_prefill_requests", total["n_pre"])
    put("sum_prefill_tokens", total["p_tok"])
    put("sum_prefill_kv_tokens", total["p_kv"])
    put("var_prefill_length", max((max(r.v_pre, 0.0) for r in live), default=0.0))
    put("num_decode_requests", total["n_dec"])
    put("sum_decode_kv_tokens", total["d_kv"])
    put("var_decode_kv_tokens", max((max(r.v_dec, 0.0) for r in live), default=0.0))
    put("max_rank_prefill_tokens", peak["p_tok"])
    put("max_rank_decode_kv_tokens", peak["d_kv"])
    put("max_rank_num_decode_requests", peak["n_dec"])
    if total["n_pre"]:
        put("mean_prefill_chunk", total["p_tok"] / total["n_pre"])
        put("mean_prefill_kv", total["p_kv"] / total["n_pre"])
    put("prefill_attention_pairs", pairs_work)
    if total["n_dec"]:
        put("mean_decode_kv", total["d_kv"] / total["n_dec"])
    put("sum_decode_kv_squared", squares)
    for name in (
        "sum_prefill_tokens",
        "sum_prefill_kv_tokens",
        "sum_decode_kv_tokens",
        "prefill_attention_pairs",
        "sum_decode_kv_squared",
    ):
        put("log1p_" + name, math.log1p(out[COLUMN[name]]))

    if not live or not all(r.lists_ok for r in live):
        out[len(AGG) : len(AGG) + len(REQ)] = np.nan
        return out
    e, p = np.concatenate([r.pairs for r in live]).T
    order = np.lexsort((-e, -p))  # past descending, then extend descending
    e, p = e[order], p[order]
    n, attn = float(len(e)), float(np.sum(e * (p + e / 2.0)))
    values = [
        n,
        e.sum(),
        e.max(),
        e.min(),
        p.sum(),
        p.max(),
        p.min(),
        (e * p).sum(),
        (e * e).sum(),
        (p * p).sum(),
        attn,
        e.sum() * p.max(),
        math.log1p(p.sum()),
        math.log1p(attn),
        n * e.sum(),
        p.max() - p.min(),
        float(np.all(e <= 1.0)),
        float(np.any(e > 1.0)),
    ]
    out[len(AGG) : len(AGG) + len(REQ)] = values
    k = min(len(e), SLOTS)
    out[len(AGG) + len(REQ) :].reshape(SLOTS, 3)[:k] = np.stack([np.ones(k), p[:k], e[:k]], axis=1)
    return out


def features_of(iteration) -> np.ndarray:
    return _feature_row(_ranks(iteration))


class Store:
    """Padded dense forest: (T, N) node tables, walked in lockstep over queries."""

    def __init__(self, raw: dict[str, Any], target: str):
        self.target, self.baseline = target, float(raw["baseline"])
        trees = raw["trees"]
        width = max((len(t["value"]) for t in trees), default=1)
        shape = (len(trees), width)
        self.left = np.full(shape, -1, np.int32)
        self.right = np.full(shape, -1, np.int32)
        self.feature = np.zeros(shape, np.int32)
        self.threshold = np.zeros(shape)
        self.value = np.zeros(shape)
        self.nan_left = np.ones(shape, bool)
        self.depth = 0
        for i, t in enumerate(trees):
            n = len(t["value"])
            self.left[i, :n], self.right[i, :n] = t["left"], t["right"]
            self.feature[i, :n] = np.maximum(t["feature"], 0)
            self.threshold[i, :n], self.value[i, :n] = t["threshold"], t["value"]
            if t.get("missing_left"):
                self.nan_left[i, :n] = t["missing_left"]
            level = [0] * n
            for j in range(n):
                for c in (t["left"][j], t["right"][j]):
                    if c >= 0:
                        level[c] = level[j] + 1
            self.depth = max(self.depth, max(level))

    def raw(self, x: np.ndarray) -> np.ndarray:
        x = np.atleast_2d(x)
        q, t = len(x), len(self.left)
        node = np.zeros((q, t), np.int64)
        rows, cols = np.arange(q)[:, None], np.arange(t)[None, :]
        for _ in range(self.depth):
            v = x[rows, self.feature[cols, node]]
            go_left = np.where(np.isnan(v), self.nan_left[cols, node], v <= self.threshold[cols, node])
            nxt = np.where(go_left, self.left[cols, node], self.right[cols, node])
            node = np.where(nxt < 0, node, nxt)
        leaves = self.value[cols, node]
        acc = np.full(q, self.baseline)
        for k in range(t):  # same summation order as the peer
            acc = acc + leaves[:, k]
        return acc

    def predict(self, x: np.ndarray) -> np.ndarray:
        raw = self.raw(x)
        with np.errstate(over="ignore"):
            ms = np.exp(raw) if self.target == "log_ms" else raw
        return np.where(np.isfinite(ms), np.maximum(ms, FLOOR_MS), np.nan)


def check_artifact(a: dict[str, Any]) -> None:
    def bad(msg):
        raise ValueError("learned artifact: " + msg)

    if a.get("schema") != "aic_fpm_learned_forward_perf":
        bad("schema")
    if type(a.get("schema_version")) is not int or a["schema_version"] != 1:
        bad("schema_version")
    if a.get("worker_type") not in ROLE_STORES:
        bad("worker_type")
    if a.get("target") not in ("log_ms", "ms"):
        bad("target")
    feats = a.get("features")
    if not feats or any(f not in COLUMN for f in feats) or len(set(feats)) != len(feats):
        bad("features")
    if not a.get("stores"):
        bad("no stores")
    for kind, s in a["stores"].items():
        if kind not in ROLE_STORES[a["worker_type"]]:
            bad(f"store {kind} not valid for {a['worker_type']}")
        if not isinstance(s.get("trees"), list) or not isinstance(s.get("baseline"), (int, float)):
            bad("store needs baseline and trees")
        if not math.isfinite(s["baseline"]):
            bad("baseline not finite")
        for t in s["trees"]:
            n = len(t["value"])
            if any(type(v) is not int for k in ("left", "right", "feature") for v in t[k]):
                bad("node indices must be integers")
            if any(type(v) not in (int, float) for k in ("threshold", "value") for v in t[k]):
                bad("thresholds and values must be numbers")
            if n == 0 or any(len(t[k]) != n for k in ("left", "right", "feature", "threshold")):
                bad("node arrays")
            if t.get("missing_left") and len(t["missing_left"]) != n:
                bad("missing_left length")
            for j in range(n):
                lo, hi = t["left"][j], t["right"][j]
                if lo < 0 and hi < 0:
                    if not math.isfinite(t["value"][j]):
                        bad("leaf not finite")
                elif lo < 0 or hi < 0 or not (j < lo < n and j < hi < n):
                    bad("children")
                elif not 0 <= t["feature"][j] < len(feats):
                    bad("feature index")
                elif not math.isfinite(t["threshold"][j]):
                    bad("threshold not finite")


class LearnedRef:
    def __init__(self, artifact: dict[str, Any]):
        check_artifact(artifact)
        self.worker_type = artifact["worker_type"]
        self.features = artifact["features"]
        self.columns = np.array([COLUMN[f] for f in self.features])
        self.needs_lists = any(f.startswith(("req_", "slot")) for f in self.features)
        self.stores = {k: Store(s, artifact["target"]) for k, s in artifact["stores"].items()}

    def estimate(self, iteration) -> float | None:
        ranks = _ranks(iteration)
        kind = workload_kind(ranks, self.worker_type)
        if kind is None:
            return 0.0
        if kind not in self.stores:  # the peer checks the store before it checks the lists
            return None
        if self.needs_lists and not all(r.lists_ok for r in ranks if r.active):
            raise ValueError("per-request features need aligned, consistent lists on every active rank")
        y = float(self.stores[kind].predict(_feature_row(ranks)[self.columns])[0])
        if math.isnan(y):
            raise ValueError("non-finite prediction")
        return y
