"""How fast inverse questions and sensitivities are answered, beside what one would write instead.

    python benchmarks/inverse.py [--json] [--rounds N] [largest | rows] ...

On the TP1 cell of the embedded table.

`largest`: the largest batch under a limit, both answers, for log-uniform contexts and uniform limits.  The NumPy scan
looks at every batch up to the largest measured one, vectorised over tiles of questions that stay in the cache.  It is
given the compiled rule (which curves answer where), so that it has only to find the KV cell, read both curves and cross
them; it returns neither latencies nor what ended the stretch, where ours does.  Both were seen to agree.

`rows`: which measured rows carry the mean of a decode workload, beside the flat lookup of its latencies: by the jitted
model on arrays that lie on the device, and by `estimate` from NumPy arrays, as the row sensitivity starts from.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from runner import Case, main

import fpmjax
from fpmjax.inverse import largest_batch
from fpmjax.sensitivity import row_sensitivity
from fpmjax.work import Work

QUESTIONS, SCANNED, TILE = 1 << 15, 1 << 10, 128  # the scan answers fewer of them, in tiles
N = 2**18
SEED = 22


@functools.cache
def model() -> fpmjax.Direct:
    """The model under test."""
    return fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))


def questions() -> tuple[np.ndarray, np.ndarray]:
    """Limits in milliseconds and KV tokens per request."""
    rng = np.random.default_rng(SEED)
    return rng.uniform(13, 45, QUESTIONS), np.exp(rng.uniform(np.log(64), np.log(16384), QUESTIONS)).astype(np.int64)


def numpy_scan():
    """(limits, contexts) -> largest batch anywhere and throughout, by looking at every batch; 0 where there is none."""
    table = model().decode
    last, row, lo_of, hi_of = (np.asarray(x) for x in (table.kv.last, table.row, table.lo, table.hi))
    last = np.unique(last).astype(np.int64)
    x, ms, at = (np.asarray(v) for v in (table.knots.x, table.knots.ms, table.knots.at))
    x, at = x.astype(np.int64), at.astype(np.int64)
    batch = np.arange(1, int(at.max()) + 1)

    def scan(limit: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kv = context[:, None] * batch
        cell = row[batch] + np.searchsorted(last, kv)
        lo, hi = lo_of[cell], hi_of[cell]
        covered = lo >= 0
        lo, hi = np.maximum(lo, 0), np.maximum(hi, 0)
        u = ms[lo] + (ms[lo + 1] - ms[lo]) * (kv - x[lo]) / (x[lo + 1] - x[lo])
        v = ms[hi] + (ms[hi + 1] - ms[hi]) * (kv - x[hi]) / (x[hi + 1] - x[hi])
        answer = u + (v - u) * ((batch - at[lo]) / np.maximum(at[hi] - at[lo], 1))
        within = covered & (answer <= limit[:, None])
        anywhere = np.where(within.any(1), batch[-1] - within[:, ::-1].argmax(1), 0)
        return anywhere, np.where(within.all(1), batch[-1], within.argmin(1))

    return scan


def largest() -> tuple[list[Case], str]:
    """The largest batch under a limit, beside a vectorised look at every batch."""
    limit, context = questions()
    scan = numpy_scan()

    def by_scan():
        parts = [scan(limit[i : i + TILE], context[i : i + TILE]) for i in range(0, SCANNED, TILE)]
        return [np.concatenate(x) for x in zip(*parts, strict=True)]

    def ours():
        return largest_batch(model(), limit_ms=limit, kv_per_request=context)

    found = ours()
    for mine, theirs in zip((found.anywhere, found.throughout), by_scan(), strict=True):
        assert np.array_equal(np.maximum(mine[:SCANNED], 0), theirs)
    return [Case("NumPy scan", by_scan, SCANNED), Case("largest_batch", ours, QUESTIONS)], "NumPy scan"


def rows() -> tuple[list[Case], str]:
    """Row sensitivity of a decode workload, beside its latencies."""
    rng = np.random.default_rng(SEED)
    batch, kv = (
        np.exp(rng.uniform(np.log(low), np.log(high), N)).astype(np.uint32) for low, high in ((1, 513), (512, 32769))
    )
    work = Work.decode(batch, kv)
    on_device = Work(decode_requests=jax.device_put(batch[:, None]), decode_kv=jax.device_put(kv[:, None]))
    flat = jax.jit(fpmjax.Direct.__call__)

    def lookup():
        with fpmjax.x64():
            return flat(model(), on_device)

    return [
        Case("flat lookup", lookup, N),
        Case("estimate", lambda: fpmjax.estimate(model(), work), N),
        Case("row_sensitivity", lambda: row_sensitivity(model(), work), N),
    ], "flat lookup"


if __name__ == "__main__":
    main({"largest": largest, "rows": rows}, mark="<!-- inverse -->")
