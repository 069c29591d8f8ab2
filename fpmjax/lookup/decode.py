"""The decode rule, compiled (host, NumPy): which curves answer (batch, KV), tabulated over all integers.

The rule is that of the peer's `direct` method.  A batch's own curve answers alone where it covers the KV total.
Elsewhere the other measured batches that lie within two octaves, stand in the same capture regime and cover the
KV total are candidates; the four nearest in log2 are kept, and the largest below and the smallest above are crossed
linearly in batch.  Without both, the query is refused.

Who is a candidate depends on the batch alone, who covers depends on the KV total alone, and both are integers: so
batches with the same behaviour share a class, and (class, KV cell) names the two knots to read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fpmjax._jax import pytree
from fpmjax.answer import Array
from fpmjax.errors import TableError
from fpmjax.lookup.axis import Axis, cell_begins, compile_axis
from fpmjax.lookup.curves import Knots, curves_by, join, read_positions

if TYPE_CHECKING:
    from fpmjax.tables.cell import Points

OCTAVES = 2.0  # a candidate's largest |log2| distance (direct rule, decode step 2a)
NEIGHBOURS = 4  # candidates that are kept, nearest first (direct rule, decode step 2)
LARGEST_BATCH = 65_536  # the batch axis is tabulated; no engine schedules more requests in one pass
LARGEST_TABLE = 2**28  # cells of 8 bytes; a real table needs thousands
BLOCK = 4_096  # batches classified together, which bounds the host's memory


@pytree()
class DecodeTable:
    """Compiled decode rule.

    kv:   cells of the KV total.
    row:  int32 [largest batch + 2], offset of each batch's cells; the last entry refuses every larger batch.
    lo:   int32 [classes * KV cells], knot at or below the query on the lower curve, -1 where refused.
    hi:   int32, the same on the upper curve; equal to lo where one curve answers alone.
    rows: int32 [], measured rows of the phase.
    """

    kv: Axis
    row: Array
    lo: Array
    hi: Array
    knots: Knots
    rows: Array


def compile_decode(points: Points) -> DecodeTable:
    """Measured decode points -> the compiled rule; `TableError` where a batch exceeds `LARGEST_BATCH`."""
    curves = curves_by(points.batch, points.kv)
    if curves and curves[-1].at > LARGEST_BATCH:
        raise TableError(
            f"decode batch_size={curves[-1].at} exceeds the largest batch that can be looked up: {LARGEST_BATCH}\n"
            "hint: leave rows of that batch size out of the table",
            code="batch_too_large",
        )
    knots, head = join(curves, points.latency_ms, points.row)
    ends = np.array([c.x[-1] + 1 for c in curves], np.int64)
    kv = compile_axis(np.concatenate([points.kv, ends]))
    position, covers = read_positions(curves, head, cell_begins(kv))
    # Coverage changes at curve ends only: decide once for each distinct set of covering curves, then expand.
    sets, which = np.unique(covers, axis=1, return_inverse=True)
    of_batch, pair = choose_curves(np.array([c.at for c in curves], np.int64), sets)
    cells = len(kv.last)
    if len(pair) * cells > LARGEST_TABLE:
        raise TableError(
            f"the decode table compiles to {len(pair) * cells:,} cells, more than {LARGEST_TABLE:,}\n"
            "hint: fewer distinct KV totals or batch sizes answer the same questions",
            code="table_too_large",
        )
    pair = pair[:, which.ravel()]  # [classes, KV cells, 2]
    refusing = np.full((1, cells), -1, np.int64)  # curve number -1 refuses
    knot = np.concatenate([position, refusing])[pair, np.arange(cells)[None, :, None]].astype(np.int32)
    return DecodeTable(
        kv,
        (of_batch * cells).astype(np.int32),
        knot[..., 0].ravel(),
        knot[..., 1].ravel(),
        knots,
        np.int32(len(points.batch)),
    )


def capture_rungs(batches: np.ndarray) -> np.ndarray:
    """Measured batches b whose successor b + 1 is measured too: the last batch of a CUDA-graph capture regime."""
    return batches[np.isin(batches + 1, batches)]


def choose_curves(batches: np.ndarray, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row choice of the rule.

    batches: int64 [curves], ascending; sets: bool [curves, sets], which curves cover, for each distinct coverage.
    Returns the class of each batch 0 .. largest + 1 (int64), and the curves of each class and coverage
    (int64 [classes, sets, 2], lower and upper; -1 refused).
    """
    largest = int(batches.max(initial=0))
    classes: dict[bytes, int] = {}
    pairs: list[np.ndarray] = []
    of_batch = np.empty(largest + 2, np.int64)
    for first in range(0, largest + 2, BLOCK):  # above the largest batch there is never an upper side
        block = np.arange(first, min(first + BLOCK, largest + 2))
        hoods, hood_of = np.unique(neighbourhoods(batches, block), axis=0, return_inverse=True)
        class_of = np.empty(len(hoods), np.int64)
        for i, (own, middle, *nearest) in enumerate(hoods.tolist()):
            pair = cross(sets, own, middle, [c for c in nearest if c >= 0])
            class_of[i] = classes.setdefault(pair.tobytes(), len(classes))
            if len(pairs) < len(classes):
                pairs.append(pair)
        of_batch[block] = class_of[hood_of.ravel()]
    return of_batch, np.array(pairs)


def neighbourhoods(batches: np.ndarray, block: np.ndarray) -> np.ndarray:
    """For each batch of the block: its own curve or -1, the first curve not below it, its candidates nearest first."""
    rungs = capture_rungs(batches)
    distance = np.abs(log2(batches)[None] - log2(block)[:, None])
    regime = np.searchsorted(rungs, batches)[None] == np.searchsorted(rungs, block)[:, None]
    candidate = (distance <= OCTAVES) & regime & (batches[None] != block[:, None])
    width = candidate.sum(1).max(initial=0)
    order = np.argsort(np.where(candidate, distance, np.inf), axis=1, kind="stable")[:, :width]  # ties: smaller batch
    order = np.where(np.take_along_axis(candidate, order, 1), order, -1)
    middle = np.searchsorted(batches, block)
    own = np.where(np.isin(block, batches), middle, -1)
    return np.column_stack([own, middle, order])


def log2(values: np.ndarray) -> np.ndarray:
    """libm's log2: at a ratio of exactly 4 its last bit decides who is a candidate, and NumPy's differs."""
    return np.array([math.log2(v) if v else -math.inf for v in values.tolist()])


def cross(sets: np.ndarray, own: int, middle: int, nearest: list[int]) -> np.ndarray:
    """Curves to cross for each coverage, int64 [sets, 2]; `nearest` holds candidate curves in order of distance."""
    count = np.zeros(sets.shape[1], np.int64)
    lower = np.full(sets.shape[1], -1)
    upper = np.full(sets.shape[1], len(sets))
    for curve in nearest:
        kept = sets[curve] & (count < NEIGHBOURS)
        count += kept
        if curve < middle:
            lower = np.where(kept, np.maximum(lower, curve), lower)
        else:
            upper = np.where(kept, np.minimum(upper, curve), upper)
        if count.min(initial=NEIGHBOURS) >= NEIGHBOURS:
            break
    both = (lower >= 0) & (upper < len(sets))
    alone = sets[own] if own >= 0 else np.zeros_like(both)
    return np.stack([np.where(alone, own, np.where(both, side, -1)) for side in (lower, upper)], axis=-1)
