"""Plain NumPy oracle of the spline store: active-set NNLS and a knot search, one candidate at a time."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from oracles.grid_ref import GridSampler
from oracles.regression_ref import FLOOR_MS, fit_plane, plane_value


def _hinges(x, knots):
    """Segment lengths covered on one axis: columns for [0,t1], [t1,t2], ..., [tk,inf)."""
    left, cols = 0.0, []
    for t in knots:
        cols.append(np.minimum(np.maximum(x - left, 0.0), t - left))
        left = t
    cols.append(np.maximum(x - left, 0.0))
    return cols


def _nnls(G, h):
    p = len(h)
    x, on = np.zeros(p), np.zeros(p, bool)
    tol = 1e-12 * max(1.0, float(np.abs(h).max()))
    for _ in range(4 * p + 8):
        grad = np.where(on, -np.inf, h - G @ x)
        if grad.max() <= tol:
            break
        on[int(np.argmax(grad))] = True
        while True:
            z = np.zeros(p)
            z[on] = np.linalg.lstsq(G[np.ix_(on, on)], h[on], rcond=1e-13)[0]
            if np.all(z[on] > 0):
                x = z
                break
            bad = on & (z <= 0)
            step = min(x[i] / (x[i] - z[i]) if x[i] > z[i] else 0.0 for i in np.flatnonzero(bad))
            x = x + step * (z - x)
            drop = on & (x <= tol * 1e-3)
            x[drop], on[drop] = 0.0, False
            if not on.any():
                break
    return x


def spline_fit(X, y, knots):
    """X already divided by the axis scale.  -> dict(knots, w, c, sse)."""
    A = np.column_stack([c for a in range(2) for c in _hinges(X[:, a], knots[a])])
    mu, yb = A.mean(0), y.mean()
    C = A - mu
    norm = np.sqrt((C * C).sum(0))
    act = norm > 1e-12 * math.sqrt(len(y))
    U = np.where(act, C / np.where(act, norm, 1.0), 0.0)
    w = np.where(act, _nnls(U.T @ U, U.T @ (y - yb)) / np.where(act, norm, 1.0), 0.0)
    c = yb - float(w @ mu)
    return {"knots": knots, "w": w, "c": c, "sse": float(((y - c - A @ w) ** 2).sum())}


def _quantile(u, q):
    pos = (len(u) - 1) * q
    lo, hi = math.floor(pos), math.ceil(pos)
    return u[lo] + (u[hi] - u[lo]) * (pos - lo)


def _initial_knots(X, k):
    out = []
    for a in range(2):
        u = np.unique(X[:, a])
        m = min(k, len(u) - 1)
        out.append(list(dict.fromkeys(float(_quantile(u, j / (m + 1))) for j in range(1, m + 1))))
    return out


def _candidates(x):
    u = np.unique(x)
    c = [_quantile(u, 0.05 * (j + 1)) for j in range(19)]
    pos = u[u > 0]
    if len(pos):
        lo, hi = math.log(max(pos[0], 1e-8)), math.log(u[-1])
        c += [math.exp(lo + j * (hi - lo) / 18.0) for j in range(1, 18)]
    return sorted(set(float(v) for v in c))


def spline_search(X, y, k, previous=None):
    knots = _initial_knots(X, k)
    best = spline_fit(X, y, knots)
    if previous is not None and [len(v) for v in previous] == [len(v) for v in knots]:
        t = spline_fit(X, y, previous)
        if t["sse"] < best["sse"]:
            knots, best = previous, t
    grids = [_candidates(X[:, a]) for a in range(2)]
    for _ in range(2):
        for a in range(2):
            for j in range(len(knots[a])):
                low = knots[a][j - 1] if j else 0.0
                high = knots[a][j + 1] if j + 1 < len(knots[a]) else float(X[:, a].max())
                for t in grids[a]:
                    if not (low + 1e-10 < t < high - 1e-10):
                        continue
                    trial_knots = [list(v) for v in knots]
                    trial_knots[a][j] = t
                    trial = spline_fit(X, y, trial_knots)
                    if trial["sse"] < best["sse"] - 1e-12:
                        best = trial
                knots = [list(v) for v in best["knots"]]
    return best


def spline_value(model, x):
    h = np.array([float(c) for a in range(2) for c in _hinges(np.float64(x[a]), model["knots"][a])])
    return model["c"] + float(model["w"] @ h)


class SplineStore:
    def __init__(self, cfg):
        f = cfg["fit"]
        sp = f.get("spline") or {}
        self.k = sp.get("knots_per_axis", 2)
        self.search = {
            "kind": "adaptive",
            "window": 16,
            "trigger": 8,
            "tolerance": 0.05,
            "absolute_tolerance_ms": 1.0,
            "cooldown": 64,
        } | (sp.get("search") or {})
        if self.search["kind"] == "periodic":
            self.search.setdefault("step", 64)
        self.ridge, self.min_obs = f.get("singular_ridge_scale", 1e-9), cfg["min_observations"]
        self.sampler = GridSampler(cfg["sampling"]["bins_per_axis"], cfg["sampling"]["max_observations"])
        self.fit = self.model = None
        self.scale = np.ones(2)
        self.accepted = self.searches = 0
        self.last = None
        self.flags: deque = deque()

    def _raw(self, x):
        return None if self.model is None else spline_value(self.model, x / self.scale)

    def add(self, x, ranks, y):
        if not (math.isfinite(y) and y > 0):
            return False
        s = self.search
        prior = self._raw(x) if s["kind"] == "adaptive" else None
        self.sampler.add(np.log1p(x), (x, y, self.accepted))
        self.accepted += 1
        if prior is not None:
            self.flags.append(abs(prior - y) > max(s["absolute_tolerance_ms"], s["tolerance"] * y))
            while len(self.flags) > s["window"]:
                self.flags.popleft()
        rows = self.sampler.rows()
        lin = fit_plane([r[0] for r in rows], [r[1] for r in rows], self.ridge) if len(rows) >= self.min_obs else None
        self.fit = lin if lin is not None and lin["usable"] else None
        rows.sort(key=lambda r: r[2])
        X, Y = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
        if len(rows) < self.min_obs:
            due = False
        elif self.last is None:
            due = self.accepted >= max(32, self.min_obs)
        elif s["kind"] == "periodic":
            due = self.accepted % s["step"] == 0
        else:
            due = self.accepted - self.last >= s["cooldown"] and sum(self.flags) >= s["trigger"]
        if due:
            scale = np.maximum(1.0, X.max(0))
            prev = (
                None
                if self.model is None
                else [[t * self.scale[a] / scale[a] for t in self.model["knots"][a]] for a in range(2)]
            )
            self.scale = scale
            self.model = spline_search(X / scale, Y, self.k, prev)
            self.searches += 1
            self.last = self.accepted
            self.flags.clear()
        elif self.model is not None:
            self.model = spline_fit(X / self.scale, Y, self.model["knots"])
        return True

    def predict(self, x, ranks):
        lin = plane_value(self.fit, x) if self.fit is not None else None
        if lin is None:
            return None
        rows = self.sampler.rows()
        X = np.array([r[0] for r in rows])
        if self.model is not None and np.any(self.model["w"] > 0) and np.all(x >= X.min(0)) and np.all(x <= X.max(0)):
            v = self._raw(x)
            if math.isfinite(v):
                return max(v, FLOOR_MS)
        return max(lin, FLOOR_MS)
