"""Plain NumPy oracle of the regression: features, axes, the linear store; the spline stands in `spline_ref`.

A batch fit of the retained rows, one row at a time; independent of the package.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from oracles.grid_ref import GridSampler

STORES = {
    "prefill": ("pure_prefill",),
    "decode": ("pure_decode",),
    "aggregated": ("pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill"),
}
SCALAR_AXES = ("attention", "moe", "n", "logN", "n2")
LIST_AXES = ("E", "P", "maxE", "maxP", "minP", "P2", "F", "nE", "logF", "meanE", "meanP", "cvE2", "cvP2", "logP")
FLOOR_MS = 1e-6
SCALE_RTOL = 1e-12
PIVOT_MIN = 1e-12


class MetricsError(ValueError):
    pass


def _sched(m):
    s = m.get("scheduled_requests") or {}
    return {
        k: s.get(k, 0)
        for k in (
            "num_prefill_requests",
            "sum_prefill_tokens",
            "sum_prefill_kv_tokens",
            "num_decode_requests",
            "sum_decode_kv_tokens",
        )
    } | {"extend_lengths": s.get("extend_lengths"), "past_kv_lengths": s.get("past_kv_lengths")}


def validate(m):
    if m.get("version", 1) != 1:
        raise MetricsError("version")
    s = _sched(m)
    if s["num_prefill_requests"] == 0 and (s["sum_prefill_tokens"] or s["sum_prefill_kv_tokens"]):
        raise MetricsError("prefill token sums need prefill requests")
    if s["num_decode_requests"] == 0 and s["sum_decode_kv_tokens"]:
        raise MetricsError("decode KV sum needs decode requests")


def features(ranks, role, alpha=1.0, beta=1.0, gamma=1.0):
    """-> None (no work) or (np.array([attention, moe]), store_label)."""
    if not ranks:
        raise MetricsError("no ranks")
    any_p = any_d = any_mixed = False
    for m in ranks:
        validate(m)
        s = _sched(m)
        if role == "prefill" and s["num_decode_requests"] > 0:
            raise MetricsError("decode work on a prefill worker")
        if role == "decode" and s["sum_prefill_tokens"] > 0:
            raise MetricsError("prefill work on a decode worker")
        p, d = s["sum_prefill_tokens"] > 0, s["num_decode_requests"] > 0
        any_p |= p
        any_d |= d
        any_mixed |= p and d
    if not (any_p or any_d):
        return None
    if any_p and any_d:
        kind = "contains_locally_mixed" if any_mixed else "cross_rank_aggregated"
    else:
        kind = "pure_prefill" if any_p else "pure_decode"
    att, p_sum, b_sum = 0.0, 0.0, 0.0
    for m in ranks:
        s = _sched(m)
        P, H, N = float(s["sum_prefill_tokens"]), float(s["sum_prefill_kv_tokens"]), float(s["num_prefill_requests"])
        B, K = float(s["num_decode_requests"]), float(s["sum_decode_kv_tokens"])
        if P > 0:
            Q = H * P / N + P * P / (2.0 * N) + P / 2.0
        else:
            H = Q = 0.0
        score = {"prefill": alpha * H + beta * Q, "decode": alpha * K, "aggregated": alpha * (H + K) + beta * Q}[role]
        att = max(att, score)
        p_sum += P
        b_sum += B
    moe = gamma * {"prefill": p_sum, "decode": b_sum, "aggregated": p_sum + b_sum}[role]
    return np.array([att, moe]), kind


def project(am, ranks, axes):
    """Catalogue of selectable axes; `am` = [attention, moe]."""
    if all(a in ("attention", "moe") for a in axes):
        return np.array([am[0] if a == "attention" else am[1] for a in axes])
    need_lists = any(a not in SCALAR_AXES for a in axes)
    n = e = p = e2 = p2 = f = 0.0
    mx_e = mx_p = 0.0
    mn_p = math.inf
    for m in ranks:
        s = _sched(m)
        c = s["num_prefill_requests"] + s["num_decode_requests"]
        if c == 0:
            continue
        if not need_lists:
            n += c
            continue
        E, P = s["extend_lengths"], s["past_kv_lengths"]
        if E is None or P is None:
            raise MetricsError("request lists needed on every active rank")
        if len(E) != len(P) or len(E) != c:
            raise MetricsError("list length")
        for x, y in zip(map(float, E), map(float, P), strict=False):
            n += 1
            e += x
            p += y
            e2 += x * x
            p2 += y * y
            f += x * y + x * x / 2.0
            mx_e, mx_p, mn_p = max(mx_e, x), max(mx_p, y), min(mn_p, y)
    if n == 0:
        raise MetricsError("no scheduled request")

    def cv2(total, squares):
        return 0.0 if total == 0 else max(n * squares / (total * total) - 1.0, 0.0)

    val = {
        "attention": am[0],
        "moe": am[1],
        "n": n,
        "E": e,
        "P": p,
        "maxE": mx_e,
        "maxP": mx_p,
        "minP": mn_p,
        "P2": p2,
        "F": f,
        "nE": n * e,
        "logF": math.log1p(f),
        "meanE": e / n,
        "meanP": p / n,
        "cvE2": cv2(e, e2),
        "cvP2": cv2(p, p2),
        "logN": math.log1p(n),
        "n2": n * n,
        "logP": math.log1p(p),
    }
    out = np.array([val[a] for a in axes])
    if not np.all(np.isfinite(out)) or np.any(out < 0):
        raise MetricsError("selected features")
    return out


def _solve(a, b):
    """Dense solve with partial pivoting; None when a pivot is below 1e-12."""
    a, b = np.array(a, float), np.array(b, float)
    m = len(b)
    for c in range(m):
        r = c + int(np.argmax(np.abs(a[c:, c])))
        if abs(a[r, c]) < PIVOT_MIN:
            return None
        if r != c:
            a[[c, r]], b[[c, r]] = a[[r, c]], b[[r, c]]
        d = a[c, c]
        a[c, c:] /= d
        b[c] /= d
        for i in range(m):
            if i != c and a[i, c] != 0.0:
                f = a[i, c]
                a[i, c:] -= f * a[c, c:]
                b[i] -= f * b[c]
    return b


def fit_plane(X, y, ridge_scale=1e-9, non_negative=True):
    """Standardised (non-negative) least squares -> dict or None, plus usability."""
    X, y = np.asarray(X, float), np.asarray(y, float)
    n, d = X.shape
    mu = X.mean(0)
    s = np.sqrt(np.maximum(((X - mu) ** 2).mean(0), 0.0))
    active = np.isfinite(s) & (s > SCALE_RTOL * np.maximum(1.0, np.abs(mu)))
    axes = np.flatnonzero(active)
    if len(axes) == 0:
        return None
    U = np.zeros_like(X)
    U[:, axes] = (X[:, axes] - mu[axes]) / s[axes]
    best = None
    full = (1 << len(axes)) - 1
    for mask in range(full + 1) if non_negative else (full,):
        S = [int(a) for i, a in enumerate(axes) if mask >> i & 1]
        A = np.column_stack([np.ones(n)] + [U[:, a] for a in S])
        H, r = A.T @ A, A.T @ y
        c = _solve(H, r)
        if c is None:
            lam = ridge_scale * max(1.0, float(np.abs(np.diag(H)).sum()))
            Hr = H + lam * np.diag([0.0] + [1.0] * len(S))
            c = _solve(Hr, r)
        if c is None or not np.all(np.isfinite(c)) or (non_negative and np.any(c[1:] < 0)):
            continue
        b = np.zeros(d)
        b[S] = c[1:]
        sse = float(((c[0] + U @ b - y) ** 2).sum())
        if not math.isfinite(sse):
            continue
        if best is None or sse < best["sse"]:
            best = {"a": float(c[0]), "b": b, "mu": mu, "s": s, "active": active, "sse": sse, "n": n}
    if best is not None:
        best["usable"] = n <= len(axes) or bool(np.any(best["b"] != 0.0))
    return best


def plane_value(fit, x):
    u = np.where(fit["active"], (x - fit["mu"]) / np.where(fit["active"], fit["s"], 1.0), 0.0)
    if not np.all(np.isfinite(u)):
        return None
    v = fit["a"] + float((fit["b"] * u).sum())
    return v if math.isfinite(v) else None


class LinearStore:
    def __init__(self, cfg):
        s, f = cfg["sampling"], cfg["fit"]
        lin = f.get("linear") or {}
        self.axes = lin.get("feature_axes", ["attention", "moe"])
        self.sample_axes = s.get("axes", ["attention", "moe"])
        self.nonneg = lin.get("non_negative", True)
        self.policy = lin.get("update_policy", {"kind": "always"})
        self.ridge = f.get("singular_ridge_scale", 1e-9)
        self.interval = f.get("rebuild_interval")
        self.min_obs = cfg["min_observations"]
        self.sampler = GridSampler(s["bins_per_axis"], s["max_observations"])
        self.fit = None
        self.flags: deque = deque()
        self.accepted = self.age = self.mutations = 0

    def add(self, am, ranks, y):
        x = project(am, ranks, self.axes)
        z = np.log1p(project(am, ranks, self.sample_axes))
        if not (np.all(np.isfinite(x)) and np.all(x >= 0) and math.isfinite(y) and y > 0):
            return False
        lazy = self.policy["kind"] == "error_threshold"
        prior = plane_value(self.fit, x) if (lazy and self.fit) else None
        ok, gone = self.sampler.add(z, (x, y))
        if not ok:
            return False
        self.mutations += 1 + (gone is not None)
        rebuild = self.interval is not None and self.mutations >= self.interval
        if lazy:
            p = self.policy
            self.accepted += 1
            self.age += 1
            if prior is not None:
                self.flags.append(abs(prior - y) > max(p["absolute_tolerance_ms"], p["relative_tolerance"] * y))
                while len(self.flags) > p["window"]:
                    self.flags.popleft()
            due = (
                rebuild
                or self.fit is None
                or prior is None
                or self.accepted <= p.get("startup_observations", 10)
                or (sum(self.flags) >= p["trigger"] and self.age >= p["cooldown"])
            )
            if not due:
                return True
        if rebuild:
            self.mutations = 0
        rows = self.sampler.rows()
        cand = None
        if len(rows) >= self.min_obs:
            cand = fit_plane([r[0] for r in rows], [r[1] for r in rows], self.ridge, self.nonneg)
        usable = cand is not None and cand["usable"]
        if usable or cand is None:
            self.fit = cand
        if lazy and usable:
            self.age = 0
            self.flags.clear()
        return True

    def predict(self, am, ranks):
        x = project(am, ranks, self.axes)
        if self.fit is None or not (np.all(np.isfinite(x)) and np.all(x >= 0)):
            return None
        v = plane_value(self.fit, x)
        return None if v is None else max(v, FLOOR_MS)


def resolve(est):
    est = est or {}
    r = est.get("fpm_regression", {})
    s, f, w = r.get("sampling", {}), r.get("fit", {}), est.get("features", {})
    return {
        "alpha": w.get("attention_kv_weight", 1.0),
        "beta": w.get("prefill_attention_pair_weight", 1.0),
        "gamma": w.get("ffn_token_weight", 1.0),
        "sampling": {
            "axes": s.get("axes", ["attention", "moe"]),
            "bins_per_axis": s.get("bins_per_axis", [4, 4]),
            "max_observations": s.get("max_observations", 64),
        },
        "min_observations": r.get("min_observations", 5),
        "fit": f,
    }


class RegressionModel:
    def __init__(self, role, est=None):
        self.role, self.cfg = role, resolve(est)
        from oracles.spline_ref import SplineStore

        kind = SplineStore if self.cfg["fit"].get("kind") == "spline" else LinearStore
        self.stores = {k: kind(self.cfg) for k in STORES[role]}

    def _feat(self, ranks):
        return features(ranks, self.role, self.cfg["alpha"], self.cfg["beta"], self.cfg["gamma"])

    def tune(self, iterations):
        for ranks in iterations:
            f = self._feat(ranks)
            if f is None:
                continue
            walls = [float(m.get("wall_time", 0.0)) for m in ranks]
            walls = [w for w in walls if math.isfinite(w) and w > 0]
            if not walls:
                continue
            self.stores[f[1]].add(f[0], ranks, max(walls) * 1000.0)

    def estimate(self, ranks):
        f = self._feat(ranks)
        if f is None:
            return 0.0
        return self.stores[f[1]].predict(f[0], ranks)

    def store_diagnostics(self):
        return [
            {"workload_kind": k, "ready": st.fit is not None, "retained_observations": st.sampler.count}
            for k, st in self.stores.items()
        ]

    @property
    def ties(self):
        return sum(st.sampler.ties for st in self.stores.values())

    @property
    def evictions(self):
        return sum(st.sampler.evictions for st in self.stores.values())
