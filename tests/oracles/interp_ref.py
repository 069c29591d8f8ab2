"""The direct rule in plain Python and float64: slow, readable, and independent of the package.

    Direct(rows)    rows = (phase, batch, total_prefill_tokens, total_kv_read_tokens, latency_ms[, kv_seed_regime])

Measured points only, never extrapolated; all operations in the order of the published rule.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalOperand=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import bisect
import math

U32 = 2**32 - 1


class Unsupported(Exception):
    """Refusal; .reason is its class."""

    def __init__(self, reason, phase=None, coords=None):
        super().__init__(f"{reason} {phase} {coords}")
        self.reason, self.phase, self.coords = reason, phase, coords


class InvalidMetrics(Exception):
    def __init__(self, reason):
        super().__init__(reason)
        self.reason = reason


class Curve:
    """Sorted measured 1-D curve: integer keys -> latency."""

    __slots__ = ("x", "y")

    def __init__(self, mapping):
        self.x = sorted(mapping)
        self.y = [mapping[k] for k in self.x]

    def bracket(self, q):
        """None when q is outside [x0, xn]; (i, i) exact; (i, i+1) strictly inside."""
        if not (math.isfinite(q) and 0.0 <= q <= U32):
            return None
        i = bisect.bisect_right(self.x, q) - 1
        if i < 0:
            return None
        if self.x[i] == q:
            return i, i
        return (i, i + 1) if i + 1 < len(self.x) else None

    def value(self, q):
        br = self.bracket(q)
        if br is None:
            return None
        i, j = br
        if i == j:
            return self.y[i]
        return self.y[i] + (self.y[j] - self.y[i]) * (q - self.x[i]) / (self.x[j] - self.x[i])

    def support(self, q):
        """[(coordinate, latency, weight)]"""
        i, j = self.bracket(q)
        if i == j:
            return [(self.x[i], self.y[i], 1.0)]
        w = (q - self.x[i]) / (self.x[j] - self.x[i])
        return [(self.x[i], self.y[i], 1.0 - w), (self.x[j], self.y[j], w)]

    @property
    def lo(self):
        return self.x[0]

    @property
    def hi(self):
        return self.x[-1]


def _heal(rows):
    """Decode rows seeded by the fake-KV fallback are replaced by the line through the two highest
    real_kv rows strictly below them at the same batch.  Returns [(row, is_fake)] with healed latency."""
    anchors = {}
    for r in rows:
        if r[0] == "decode" and len(r) > 5 and r[5] == "real_kv":
            anchors.setdefault(r[1], []).append((r[3], r[4]))
    for a in anchors.values():
        a.sort()
    out = []
    for r in rows:
        fake = len(r) > 5 and r[5] == "fake_fallback"
        lat = r[4]
        if fake and r[0] == "decode":
            below = [a for a in anchors.get(r[1], []) if a[0] < r[3]]
            if len(below) >= 2:
                (k1, l1), (k2, l2) = below[-2], below[-1]
                v = l2 + (float(r[3]) - float(k2)) * ((l2 - l1) / (float(k2) - float(k1)))
                if math.isfinite(v) and v > 0:
                    lat = v
        out.append(((r[0], r[1], r[2], r[3], lat), fake))
    return out


def rungs_of(batches):
    """Capture rungs: collected batches b whose successor b+1 is collected too."""
    s = set(batches)
    return sorted(b for b in s if b + 1 in s)


class _Base:
    """Composition of the phases of one iteration."""

    model_path = ""

    # --- to be supplied: _prefill(b,t,kv) / _decode(b,kv) / _baseline(b,kv), each -> (ms, resolution, support)

    def _q(self, fn, phase, coords, baseline=False):
        ms, res, sup = fn(*coords)
        if not (math.isfinite(ms) and ms > 0):
            raise Unsupported("invalid_latency", phase, coords)
        b, t, kv = coords if phase == "prefill" else (coords[0], None, coords[1])
        return ms, dict(
            phase=phase,
            decode_baseline=baseline,
            resolution=res,
            latency_ms=ms,
            query=(float(b), None if t is None else float(t), float(kv)),
            support=sup,
        )

    @staticmethod
    def _validate(rank):
        s = rank.get("scheduled_requests", {})
        npf, pt, pk = (s.get(k, 0) for k in ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"))
        nd, dk = s.get("num_decode_requests", 0), s.get("sum_decode_kv_tokens", 0)
        if rank.get("version", 1) != 1:
            raise InvalidMetrics("schema_version")
        for v in (npf, pt, pk, nd, dk):
            if type(v) is not int or not 0 <= v <= U32:
                raise InvalidMetrics("u32")
        if npf == 0 and (pt > 0 or pk > 0):
            raise InvalidMetrics("prefill_sums_without_requests")
        if nd == 0 and dk > 0:
            raise InvalidMetrics("decode_kv_without_requests")
        return npf, pt, pk, nd, dk

    def estimate(self, metrics):
        """One iteration: a rank dict or a list of rank dicts -> detailed result (uncorrected)."""
        ranks = [metrics] if isinstance(metrics, dict) else list(metrics)
        if not ranks:
            raise InvalidMetrics("no_ranks")
        work = [self._validate(r) for r in ranks]
        if not any(pt > 0 or nd > 0 for _, pt, _, nd, _ in work):
            return dict(latency_ms=0.0, native_latency_ms=0.0, correction_factor=1.0, max_rank=None, ranks=[])
        out, best, best_rank = [], 0.0, None
        for i, (npf, pt, pk, nd, dk) in enumerate(work):
            r = dict(
                rank=i,
                latency_ms=0.0,
                prefill_ms=None,
                decode_ms=None,
                decode_baseline_ms=None,
                marginal_decode_ms=None,
                queries=[],
            )
            total = 0.0
            if pt > 0:
                r["prefill_ms"], q = self._q(self._prefill, "prefill", (npf, pt, pk))
                r["queries"].append(q)
                total += r["prefill_ms"]
            if nd > 0:
                r["decode_ms"], q = self._q(self._decode, "decode", (nd, dk))
                r["queries"].append(q)
                if pt > 0:
                    r["decode_baseline_ms"], q = self._q(self._baseline, "decode", (nd, dk), True)
                    r["queries"].append(q)
                    r["marginal_decode_ms"] = max(r["decode_ms"] - r["decode_baseline_ms"], 0.0)
                    total += r["marginal_decode_ms"]
                else:
                    total += r["decode_ms"]
            r["latency_ms"] = total
            if total > best:
                best, best_rank = total, i
            out.append(r)
        return dict(latency_ms=best, native_latency_ms=best, correction_factor=1.0, max_rank=best_rank, ranks=out)

    # --- phase helpers -------------------------------------------------
    def predict_decode_latency_total(self, batch, total_kv):
        work = {"num_decode_requests": batch, "sum_decode_kv_tokens": total_kv}
        return self.estimate({"scheduled_requests": work})["latency_ms"]

    def predict_prefill_latency(self, batch, isl, prefix):
        if isl <= prefix:
            raise InvalidMetrics("isl_not_above_prefix")
        if batch < 1:
            raise InvalidMetrics("batch")
        return self._q(self._prefill, "prefill", (batch, batch * (isl - prefix), batch * prefix))[0]

    def predict_prefill_latency_total(self, batch, tokens, kv):
        if tokens == 0:
            return 0.0
        return self._q(self._prefill, "prefill", (batch, tokens, kv))[0]

    def static_phase_latency(self, batch_size, input_tokens, output_tokens, prefill):
        if prefill:
            return self.predict_prefill_latency(batch_size, input_tokens, 0)
        total, upper, i = 0.0, max(output_tokens - 1, 0), 0
        while i < upper:  # one lookup per stride of 32 generated tokens
            step = self._q(self._decode, "decode", (batch_size, batch_size * (input_tokens + i + 1)))[0]
            total += step * float(min(32, upper - i))
            i += 32
        return total


class Direct(_Base):
    MAX_OCTAVES = 2.0
    NEIGHBOURS = 4

    def __init__(self, rows, drop_fake=True):
        pre, dec, kvc = {}, {}, {}
        for (phase, b, t, kv, ms), fake in _heal(rows):
            if fake and drop_fake:
                continue  # only genuine measurements are used
            if phase == "prefill":
                pre.setdefault(b, {}).setdefault(kv, {})[t] = ms
                kvc.setdefault(b, {}).setdefault(t, {})[kv] = ms
            else:
                dec.setdefault(b, {})[kv] = ms
        # batch -> sorted [(kv site, token curve)],  batch -> sorted [(token, kv curve)]
        self.by_kv = {b: [(k, Curve(c)) for k, c in sorted(s.items())] for b, s in pre.items()}
        self.by_tok = {b: [(t, Curve(c)) for t, c in sorted(s.items())] for b, s in kvc.items()}
        self.dec = {b: Curve(c) for b, c in dec.items()}
        self.rows = sorted(self.dec)
        self.rungs = rungs_of(self.rows)

    def decode_kv_ceiling(self):
        return max((c.hi for c in self.dec.values()), default=None)

    # --- prefill
    def _prefill(self, b, t, kv):
        sites = self.by_kv.get(b, [])
        for k, c in sites:  # 1. own KV site
            if k == kv:
                v = c.value(t)
                if v is not None:
                    sup = c.support(t)
                    return (
                        v,
                        ("exact_lookup" if len(sup) == 1 else "within_curve_interpolation"),
                        [((b, x, kv), y, w) for x, y, w in sup],
                    )
        for name, axis, q, p in (
            ("cross_kv_interpolation", sites, kv, t),  # 2. token-first
            ("kv_first_interpolation", self.by_tok.get(b, []), t, kv),
        ):  # 3. KV-first
            cov = [(s, c) for s, c in axis if s != q and c.value(p) is not None]
            lo = [e for e in cov if e[0] < q]
            hi = [e for e in cov if e[0] > q]
            if not lo or not hi:
                continue
            (low, lc), (high, hc) = lo[-1], hi[0]
            w = (q - low) / (high - low)
            lv, hv = lc.value(p), hc.value(p)
            sup = [(s, x, y, ow * iw) for s, c, ow in ((low, lc, 1.0 - w), (high, hc, w)) for x, y, iw in c.support(p)]
            if name[0] == "c":
                sup = [((b, x, s), y, ww) for s, x, y, ww in sup]
            else:
                sup = [((b, s, x), y, ww) for s, x, y, ww in sup]
            # the two methods round differently: token-first multiplies by the rounded weight,
            # KV-first evaluates the two token values as a curve
            v = lv + (hv - lv) * w if name[0] == "c" else lv + (hv - lv) * (q - low) / (high - low)
            return v, name, sup
        raise Unsupported("prefill_no_two_sided_support", "prefill", (b, t, kv))

    # --- decode
    def decode_rows(self, b, kv):
        c = self.dec.get(b)
        if c is not None and c.value(kv) is not None:
            return b, b
        regime = bisect.bisect_left(self.rungs, b)
        lb = math.log2(b)
        near = sorted(
            (d, r)
            for r in self.rows
            if r != b
            and (d := abs(math.log2(r) - lb)) <= self.MAX_OCTAVES
            and bisect.bisect_left(self.rungs, r) == regime
            and self.dec[r].value(kv) is not None
        )[: self.NEIGHBOURS]
        lo = [r for _, r in near if r < b]
        hi = [r for _, r in near if r > b]
        if not lo or not hi:
            raise Unsupported("decode_no_two_sided_batch_bracket", "decode", (b, kv))
        return max(lo), min(hi)

    def _blend(self, b, kv, floor):
        lo, hi = self.decode_rows(b, kv)

        def sup(r):
            c = self.dec[r]
            return [(c.x[0], c.y[0], 1.0)] if floor else c.support(kv)

        def val(r):
            return self.dec[r].y[0] if floor else self.dec[r].value(kv)

        if lo == hi:
            s = sup(lo)
            return (
                val(lo),
                ("exact_lookup" if len(s) == 1 else "within_curve_interpolation"),
                [((lo, None, x), y, w) for x, y, w in s],
            )
        w = (b - lo) / (hi - lo)
        lv = val(lo)
        return (
            lv + (val(hi) - lv) * w,
            "cross_batch_interpolation",
            [((r, None, x), y, ow * iw) for r, ow in ((lo, 1.0 - w), (hi, w)) for x, y, iw in sup(r)],
        )

    def _decode(self, b, kv):
        return self._blend(b, kv, False)

    def _baseline(self, b, kv):
        return self._blend(b, kv, True)
