"""Measured curves laid end to end, and which of them cover a coordinate (host, NumPy).

A curve is a sorted list of integer coordinates with milliseconds; it covers the integers from its first to its
last point and nothing else.  Every curve ends with a copy of its last point one token further, so that knot p + 1
exists for every knot p that a query may be read from, and is measured data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.metrics import U32_MAX


class Curve(NamedTuple):
    """One measured curve: where it stands across curves, its coordinates and its points (indices into a phase)."""

    at: int
    x: np.ndarray
    point: np.ndarray


@pytree("checked")
class Knots:
    """All curves of a phase, end to end.

    x:     uint32 [knots], coordinate along the curve (a closing knot holds last + 1, modulo 2**32).
    ms:    float64 [knots], milliseconds.
    at:    uint32 [knots], where the curve stands across curves: batch, KV site or token site.
    head:  int32 [knots], first knot of the same curve.
    row:   int32 [knots], row of the Parquet file.
    checked: whether the latencies were replaced by ones the host has not seen; every answer is then looked at.
    """

    x: Array
    ms: Array
    at: Array
    head: Array
    row: Array
    checked: bool = False


def curves_by(at: np.ndarray, x: np.ndarray) -> list[Curve]:
    """Points with coordinates (at, x) -> curves along x, one for each value of `at`, both ascending."""
    order = np.lexsort((x, at))
    cuts = np.flatnonzero(np.diff(at[order])) + 1
    return [Curve(int(at[p[0]]), x[p], p) for p in np.split(order, cuts) if p.size]


def join(curves: list[Curve], latency_ms: np.ndarray, row: np.ndarray) -> tuple[Knots, np.ndarray]:
    """Curves -> (their knots end to end, first knot of each curve and the total, int64 [curves + 1])."""
    sizes = np.array([c.x.size + 1 for c in curves], np.int64)
    head = np.append(0, np.cumsum(sizes))
    if not curves:  # two knots that are never read, so that gathers have something to point at
        gap = np.arange(2, dtype=np.uint32)
        zeros = np.zeros(2, np.int32)
        return Knots(gap, zeros.astype(np.float64), zeros.astype(np.uint32), zeros, zeros), head
    x = np.concatenate([np.append(c.x, c.x[-1] + 1) for c in curves]) & U32_MAX
    point = np.concatenate([np.append(c.point, c.point[-1]) for c in curves])
    at = np.repeat([c.at for c in curves], sizes)
    return Knots(
        x.astype(np.uint32),
        latency_ms[point].astype(np.float64),
        at.astype(np.uint32),
        np.repeat(head[:-1], sizes).astype(np.int32),
        row[point].astype(np.int32),
    ), head


def knots_at(curves: list[Curve], head: np.ndarray, q: np.ndarray) -> np.ndarray:
    """For each curve and coordinate the knot at or below, int32 [curves, q]; one of its own where it does not cover."""
    knot = np.zeros((len(curves), q.size), np.int32)
    for i, curve in enumerate(curves):
        knot[i] = head[i] + np.maximum(np.searchsorted(curve.x, q, "right") - 1, 0)
    return knot


def covering(curves: list[Curve], q: np.ndarray) -> np.ndarray:
    """For each curve and coordinate whether it covers, bool [curves, q]."""
    starts, ends = (np.array([c.x[i] for c in curves], np.int64)[:, None] for i in (0, -1))
    return (q >= starts) & (q <= ends)
