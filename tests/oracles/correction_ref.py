"""Plain Python oracle of the online correction: fixed, dynamic-local and hybrid stores of ratios."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from oracles.grid_ref import GridSampler


def _sched(m):
    s = m.get("scheduled_requests") or {}
    names = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
    return {k: s.get(k, 0) for k in (*names, "num_decode_requests", "sum_decode_kv_tokens")}


class CorrectionStore:
    """Fixed-range grid of bounded observed/native ratios; cell median."""

    def __init__(self, maxima, bins, capacity, min_obs, lo, hi):
        self.max = np.array(maxima, float)
        self.bins = [int(np.prod(bins))] if len(maxima) == 1 else list(bins)
        self.sampler = GridSampler(self.bins, capacity)
        self.sampler.lo, self.sampler.hi = np.zeros(len(maxima)), self.max.copy()
        self.min_obs, self.lo, self.hi = min_obs, lo, hi

    def _inside(self, x):
        return bool(np.all(x >= 0) and np.all(x <= self.max))

    def add(self, x, observed, native):
        x = np.array(x, float)
        if not (math.isfinite(native) and native > 0 and math.isfinite(observed) and observed > 0):
            return
        r = observed / native
        r = r if self.lo is None else max(r, self.lo)
        r = r if self.hi is None else min(r, self.hi)
        if self._inside(x):
            self.sampler.add(x, r)

    @property
    def ready(self):
        return self.sampler.count >= self.min_obs

    def factor(self, x):
        x = np.array(x, float)
        if not self.ready or not self._inside(x):
            return 1.0
        q = self.sampler.cells.get(self.sampler.key(x))
        if not q:
            return 1.0
        return float(np.median([it[1] for it in q if math.isfinite(it[1]) and it[1] > 0]))

    def factors(self):
        return [float(np.median([it[1] for it in q])) for q in self.sampler.cells.values()] if self.ready else []


def native_feature(ranks):
    """Workload kind and correction coordinates: last rank with the largest score sum wins."""
    best = None
    for m in ranks:
        s = _sched(m)
        p, d = s["sum_prefill_tokens"] > 0, s["num_decode_requests"] > 0 or s["sum_decode_kv_tokens"] > 0
        if not (p or d):
            continue
        if p and d:
            k, x = "mixed", [s["sum_prefill_tokens"], s["sum_decode_kv_tokens"]]
        elif p:
            k, x = "prefill", [s["sum_prefill_tokens"]]
        else:
            k, x = "decode", [s["num_decode_requests"], s["sum_decode_kv_tokens"]]
        if best is None or sum(x) >= sum(best[1]):
            best = (k, [float(v) for v in x])
    return best


class FixedCorrection:
    def __init__(self, est=None):
        c = (est or {}).get("correction", {})
        s, b = c.get("sampling", {}), c.get("factor_bounds", {})
        args = (
            s.get("bins_per_axis", [4, 4]),
            s.get("max_observations", 64),
            c.get("min_observations", 5),
            b.get("min", 0.5),
            b.get("max", 2.0),
        )
        t, n, k = c.get("max_num_tokens", 8192), c.get("max_batch_size", 512), c.get("max_kv_tokens", 2_000_000)
        self.enabled = c.get("enabled", True)
        self.stores = {
            "prefill": CorrectionStore([t], *args),
            "decode": CorrectionStore([n, k], *args),
            "mixed": CorrectionStore([t, k], *args),
        }

    def tune(self, ranks, native):
        if not self.enabled:
            return
        f = native_feature(ranks)
        walls = [float(m.get("wall_time", 0.0)) for m in ranks]
        walls = [w for w in walls if math.isfinite(w) and w > 0]
        if f and walls:
            self.stores[f[0]].add(f[1], max(walls) * 1000.0, native)

    def factor(self, ranks):
        f = native_feature(ranks)
        return 1.0 if (f is None or not self.enabled) else self.stores[f[0]].factor(f[1])

    def all_factors(self):
        return [v for s in self.stores.values() for v in s.factors()]


# ---------------------------------------------- dynamic-local / hybrid correction
def _median(v):
    v = sorted(v)
    n = len(v)
    return v[n // 2] if n % 2 else (v[n // 2 - 1] + v[n // 2]) / 2.0


class DynamicCorrectionStore:
    """Growing log1p grid shrunk toward the median of recent feedback.

    Everything here (budget split, prior weight 20, age limit, tie order) was
    inferred by probing the installed peer; no source was available for it.
    """

    PRIOR = 20.0

    def __init__(self, ndim, bins, capacity, min_obs, lo, hi):
        self.bins = [int(np.prod(bins))] if ndim == 1 else list(bins)
        window = min(capacity, max(min_obs, capacity // 4))
        self.recent: deque = deque(maxlen=window)  # (sequence, ratio)
        self.cap, self.max_age = capacity - window, 2 * capacity
        self.grid_lo, self.grid_hi = np.full(ndim, np.inf), np.full(ndim, -np.inf)
        self.rows: list = []  # (sequence, z, ratio), insertion order
        self.min_obs, self.lo, self.hi = min_obs, lo, hi
        self.seq = 0

    def _key(self, z):
        return tuple(
            0 if hi <= lo else min(max(int((v - lo) / (hi - lo) * b), 0), b - 1)
            for v, lo, hi, b in zip(z, self.grid_lo, self.grid_hi, self.bins, strict=True)
        )

    def cells(self):
        out: dict = {}
        for it in self.rows:
            out.setdefault(self._key(it[1]), []).append(it)
        return out

    def add(self, x, observed, native):
        if not (math.isfinite(native) and native > 0 and math.isfinite(observed) and observed > 0):
            return
        r = observed / native
        r = r if self.lo is None else max(r, self.lo)
        r = r if self.hi is None else min(r, self.hi)
        z = np.log1p(np.array(x, float))
        self.grid_lo, self.grid_hi = np.minimum(self.grid_lo, z), np.maximum(self.grid_hi, z)
        self.recent.append((self.seq, r))
        self.rows.append((self.seq, z, r))
        self.rows = [it for it in self.rows if self.seq - it[0] < self.max_age]
        self.seq += 1
        if len(self.rows) > self.cap:
            cells = self.cells()
            size = max(map(len, cells.values()))
            oldest = min(k for k, q in cells.items() if len(q) == size)
            gone = cells[oldest][0][0]
            self.rows = [it for it in self.rows if it[0] != gone]

    @property
    def ready(self):
        return len(self.recent) >= self.min_obs

    @property
    def local_ready(self):
        return self.ready and len(self.rows) >= self.min_obs

    @property
    def count(self):
        return len({it[0] for it in self.rows} | {it[0] for it in self.recent})

    def _global(self):
        return _median([r for _, r in self.recent])

    def _shrunk(self, q):
        g, m, n = self._global(), _median([it[2] for it in q]), len(q)
        return g * (m / g) ** (n / (n + self.PRIOR))

    def factor(self, x):
        if not self.ready:
            return 1.0
        z = np.log1p(np.array(x, float))
        inside = self.local_ready and np.all(z >= self.grid_lo) and np.all(z <= self.grid_hi)
        q = self.cells().get(self._key(z)) if inside else None
        return self._shrunk(q) if q else self._global()

    def factors(self):
        local = [self._shrunk(q) for q in self.cells().values()] if self.local_ready else []
        return ([self._global()] if self.ready else []) + local


class Correction(FixedCorrection):
    """All modes; `auto` means fixed for native estimators."""

    def __init__(self, est=None):
        super().__init__(est)
        c = (est or {}).get("correction", {})
        s, b = c.get("sampling", {}), c.get("factor_bounds", {})
        self.mode = {"auto": "fixed"}.get(c.get("mode", "auto"), c.get("mode", "fixed"))
        args = (
            s.get("bins_per_axis", [4, 4]),
            s.get("max_observations", 64),
            c.get("min_observations", 5),
            b.get("min", 0.5),
            b.get("max", 2.0),
        )
        self.dyn = {
            "prefill": DynamicCorrectionStore(1, *args),
            "decode": DynamicCorrectionStore(2, *args),
            "mixed": DynamicCorrectionStore(2, *args),
        }

    def tune(self, ranks, native):
        if not self.enabled:
            return
        f = native_feature(ranks)
        walls = [float(m.get("wall_time", 0.0)) for m in ranks]
        walls = [w for w in walls if math.isfinite(w) and w > 0]
        if not (f and walls):
            return
        y = max(walls) * 1000.0
        if self.mode != "dynamic_local":
            self.stores[f[0]].add(f[1], y, native)
        if self.mode != "fixed":
            self.dyn[f[0]].add(f[1], y, native)

    def factor(self, ranks):
        f = native_feature(ranks)
        if f is None or not self.enabled:
            return 1.0
        k, x = f
        if self.mode == "fixed" or (self.mode == "hybrid" and self.stores[k]._inside(np.array(x))):
            return self.stores[k].factor(x)
        return self.dyn[k].factor(x)

    def all_factors(self):
        out = []
        if self.mode != "dynamic_local":
            out += [v for s in self.stores.values() for v in s.factors()]
        if self.mode != "fixed":
            out += [v for s in self.dyn.values() for v in s.factors()]
        return out

    def ready_buckets(self):
        n = 0
        if self.mode != "dynamic_local":
            n += sum(len(s.sampler.cells) for s in self.stores.values() if s.ready)
        if self.mode != "fixed":
            n += sum(len(s.cells()) for s in self.dyn.values() if s.local_ready)
        return n

    def retained(self):
        n = 0
        if self.mode != "dynamic_local":
            n += sum(s.sampler.count for s in self.stores.values())
        if self.mode != "fixed":
            n += sum(s.count for s in self.dyn.values())
        return n
