"""The prefill rule, compiled (host, NumPy): which curves answer (batch, tokens, KV), tabulated over all integers.

Prefill never crosses batches.  Within one batch the peer's `direct` method takes the first of three ways:

1. the token curve of the query's own KV site, where it covers the tokens;
2. token-first: the nearest KV sites below and above whose token curves cover the tokens, crossed in KV;
3. KV-first: the nearest token values below and above whose KV curves cover the KV total, crossed in tokens.

Ways 2 and 3 are one function on swapped axes.  Knots of KV curves stand behind those of token curves, from `split`
on, so the knot itself says along which axis it is read.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.lookup.axis import Axis, cell_begins, compile_axis
from fpmjax.lookup.curves import Curve, Knots, covering, curves_by, join, knots_at
from fpmjax.lookup.decode import check_batch, check_size

if TYPE_CHECKING:
    from fpmjax.tables.cell import Points


@pytree()
class PrefillTable:
    """Compiled prefill rule.

    tokens, kv: cells of the token and the KV total.
    site:   int32 [largest batch + 2], batch -> site; site 0 refuses, as does the last entry.
    row:    int32 [sites, token cells], offset of a row of cells.
    column: int32 [sites, KV cells], offset inside it.
    lo, hi: int32 [cells], knots as in `DecodeTable`.
    split:  int32 [], first knot whose curve runs along KV.
    rows:   int32 [], measured rows of the phase.
    """

    tokens: Axis
    kv: Axis
    site: Array
    row: Array
    column: Array
    lo: Array
    hi: Array
    split: Array
    knots: Knots
    rows: Array


def compile_prefill(points: Points) -> PrefillTable:
    """Measured prefill points -> the compiled rule; TableError as `compile_decode`."""
    batches = np.unique(points.batch)
    check_batch("prefill", int(batches.max(initial=0)))
    tokens, kv = (compile_axis(knots_and_gaps(x)) for x in (points.tokens, points.kv))
    check_size("prefill", (len(batches) + 1) * max(len(tokens.last), len(kv.last)))
    members = [np.flatnonzero(points.batch == b) for b in batches]
    by_kv = [along(p, points.kv, points.tokens) for p in members]
    by_tokens = [along(p, points.tokens, points.kv) for p in members]
    token_curves, kv_curves = list(chain.from_iterable(by_kv)), list(chain.from_iterable(by_tokens))
    knots, head = join(token_curves + kv_curves, points.latency_ms, points.row)
    rows, columns = [np.zeros(len(tokens.last), np.int64)], [np.zeros(len(kv.last), np.int64)]
    cells, size = [np.full((1, 2), -1, np.int32)], 1  # cell 0 refuses
    at_token, at_kv = 0, len(token_curves)
    for token, across in zip(by_kv, by_tokens, strict=True):
        t_cell, t_local = local_cells(tokens, np.array([c.at for c in across]))
        k_cell, k_local = local_cells(kv, np.array([c.at for c in token]))
        check_size("prefill", size + len(t_cell) * len(k_cell))
        check_size("prefill", max(len(token) * len(t_cell), len(across) * len(k_cell)))
        best = choose(token, head[at_token:], across, head[at_kv:], t_cell, k_cell)
        rows.append(size + t_local * len(k_cell))
        columns.append(k_local)
        cells.append(best.reshape(-1, 2))
        size += best.size // 2
        at_token, at_kv = at_token + len(token), at_kv + len(across)
    site = np.zeros(int(batches.max(initial=0)) + 2, np.int32)
    site[batches] = np.arange(1, batches.size + 1)
    lo, hi = np.concatenate(cells).astype(np.int32).T
    return PrefillTable(
        tokens,
        kv,
        site,
        np.array(rows, np.int32),
        np.array(columns, np.int32),
        np.ascontiguousarray(lo),
        np.ascontiguousarray(hi),
        np.int32(head[len(token_curves)]),
        knots,
        np.int32(len(points.batch)),
    )


def along(members: np.ndarray, at: np.ndarray, x: np.ndarray) -> list[Curve]:
    """Curves of one batch's points along x, numbered as the phase numbers its points."""
    return [Curve(c.at, c.x, members[c.point]) for c in curves_by(at[members], x[members])]


def knots_and_gaps(x: np.ndarray) -> np.ndarray:
    """Cell begins that make every measured coordinate a cell of its own."""
    return np.concatenate([x, x + 1])


def local_cells(axis: Axis, measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells that one batch tells apart: (one integer inside each, the local cell of every cell of the axis)."""
    begins = cell_begins(axis)
    place = np.searchsorted(np.sort(knots_and_gaps(measured)), begins, "right")
    _, first, local = np.unique(place, return_index=True, return_inverse=True)
    return begins[first], local.ravel()


def choose(token, token_head, across, across_head, t: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Knots (lo, hi) for each token cell and KV cell of one batch, int32 [t, k, 2], -1 where refused."""
    own, token_first = two_sided(knots_at(token, token_head, t), covering(token, t), np.array([c.at for c in token]), k)
    _, kv_first = two_sided(knots_at(across, across_head, k), covering(across, k), np.array([c.at for c in across]), t)
    kv_first = kv_first.swapaxes(0, 1)
    return np.where(own >= 0, own, np.where(token_first >= 0, token_first, kv_first))


def two_sided(knot: np.ndarray, covers: np.ndarray, at: np.ndarray, across: np.ndarray):
    """Curves that answer q at each value across curves, as knots.

    knot, covers: [curves, q] as `knots_at` and `covering` give them; at: [curves] ascending; across: [a].
    Returns the value's own curve where it covers, and the nearest covering curves on both sides, each
    int32 [q, a, 2] with -1 where there is none.
    """
    curves, i = len(at), np.arange(len(at))[:, None]
    below = np.maximum.accumulate(np.where(covers, i, -1), 0)
    above = np.minimum.accumulate(np.where(covers, i, curves)[::-1], 0)[::-1]
    left, right = np.searchsorted(at, across, "left"), np.searchsorted(at, across, "right")
    lower = np.where(left[:, None] > 0, below[np.maximum(left - 1, 0)], -1)
    upper = np.where(right[:, None] < curves, above[np.minimum(right, curves - 1)], curves)
    both = (lower >= 0) & (upper < curves)
    exact = (right > left)[:, None] & covers[np.minimum(left, curves - 1)]

    def knots_of(curve, ok):
        return np.where(ok, knot[np.clip(curve, 0, curves - 1), np.arange(knot.shape[1])], np.int32(-1)).T

    own = knots_of(left[:, None], exact)
    return np.stack([own, own], -1), np.stack([knots_of(lower, both), knots_of(upper, both)], -1)
