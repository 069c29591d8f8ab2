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
from fpmjax.lookup.curves import Knots, covering, curves_by, join, knots_at

if TYPE_CHECKING:
    from fpmjax.tables.cell import Points

OCTAVES = 2.0  # a candidate's largest |log2| distance (direct rule, decode step 2a)
NEIGHBOURS = 4  # candidates that are kept, nearest first (direct rule, decode step 2)
LARGEST_BATCH = 65_536  # the batch axis is tabulated; no engine schedules more requests in one pass
LARGEST_TABLE = 2**26  # cells of 8 bytes, and entries of any array on the way; a real table needs thousands
LARGEST_CHOICE = 2**35  # candidates looked at over all batches and coverages: about a minute
SLAB = 32  # candidates looked at together; hardly ever are more needed


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
    """Measured decode points -> the compiled rule.

    Raises TableError where a batch exceeds `LARGEST_BATCH` (`batch_too_large`), or where so many curves have so many
    KV totals of their own that the rule does not fit in memory (`table_too_large`).
    """
    curves = curves_by(points.batch, points.kv)
    check_batch("decode", curves[-1].at if curves else 0)
    starts, ends = (np.array([c.x[i] for c in curves], np.int64) for i in (0, -1))
    kv = compile_axis(np.concatenate([points.kv, ends + 1]))
    begins = cell_begins(kv)
    changes = np.unique(np.concatenate([[0], starts, ends + 1]))  # coverage changes at the ends of curves only
    check_size("decode", len(curves) * max(len(begins), len(changes)))
    knots, head = join(curves, points.latency_ms, points.row)
    sets = covering(curves, changes)
    of_batch, pairs = choose_curves(np.array([c.at for c in curves], np.int64), sets)
    check_size("decode", len(pairs) * len(begins))
    position = np.concatenate(
        [knots_at(curves, head, begins), np.full((1, len(begins)), -1, np.int32)]
    )  # curve number -1 refuses
    which = np.searchsorted(changes, begins, "right") - 1
    lo, hi = np.empty((2, len(pairs), len(begins)), np.int32)
    every = np.arange(len(begins))
    for i, pair in enumerate(pairs):
        lo[i], hi[i] = (position[pair[which, side], every] for side in (0, 1))
    row = (of_batch * len(begins)).astype(np.int32)
    return DecodeTable(kv, row, lo.ravel(), hi.ravel(), knots, np.int32(len(points.batch)))


def check_batch(phase: str, largest: int) -> None:
    """TableError for a batch that is not tabulated."""
    if largest > LARGEST_BATCH:
        raise TableError(
            f"{phase} batch_size={largest} exceeds the largest batch that can be looked up: {LARGEST_BATCH}\n"
            "hint: leave rows of that batch size out of the table",
            code="batch_too_large",
        )


def check_size(phase: str, entries: int, limit: int = LARGEST_TABLE) -> None:
    """TableError for a rule that would not fit, before memory is asked for."""
    if entries > limit:
        raise TableError(
            f"the {phase} rule of this cell takes {entries:,} entries, more than {limit:,}\n"
            "hint: measure batches at common token and KV totals; distinct ones multiply",
            code="table_too_large",
        )


def capture_rungs(batches: np.ndarray) -> np.ndarray:
    """Measured batches b whose successor b + 1 is measured too: the last batch of a CUDA-graph capture regime."""
    return batches[np.isin(batches + 1, batches)]


def choose_curves(batches: np.ndarray, sets: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The row choice of the rule.

    batches: int64 [curves], ascending; sets: bool [curves, sets], which curves cover, for each distinct coverage.
    Returns the class of each batch 0 .. largest + 1 (int64), and the curves of each class (int64 [sets, 2], lower and
    upper for each coverage, -1 refused).
    """
    block = np.arange(int(batches.max(initial=0)) + 2)  # above the largest batch there is never an upper side
    own_log, log = log2(batches), log2(block)
    rungs = capture_rungs(batches)
    regime = np.searchsorted(rungs, batches)
    # Candidates are neighbours in the sorted list: one regime, cut at the octaves (exactly, further down).
    of = np.searchsorted(rungs, block)
    first = np.maximum(np.searchsorted(regime, of, "left"), np.searchsorted(own_log, log - OCTAVES - 1e-9))
    last = np.minimum(np.searchsorted(regime, of, "right"), np.searchsorted(own_log, log + OCTAVES + 1e-9))
    check_size("decode", int(np.maximum(last - first, 0).sum()) * sets.shape[1], LARGEST_CHOICE)
    middle = np.searchsorted(batches, block)
    measured = np.isin(block, batches)
    classes: dict[bytes, int] = {}
    pairs: list[np.ndarray] = []
    of_batch = np.empty(len(block), np.int64)
    for b in block.tolist():
        near = np.arange(first[b], last[b])
        distance = np.abs(own_log[near] - log[b])
        allowed = (distance <= OCTAVES) & (batches[near] != b)
        near = near[allowed][np.argsort(distance[allowed], kind="stable")]  # nearest first, ties: smaller batch
        pair = cross(sets, int(middle[b]), near)
        if measured[b]:
            pair = np.where(sets[middle[b]][:, None], middle[b], pair)
        of_batch[b] = classes.setdefault(pair.tobytes(), len(classes))
        if len(pairs) < len(classes):
            pairs.append(pair)
    return of_batch, pairs


def log2(values: np.ndarray) -> np.ndarray:
    """libm's log2: at a ratio of exactly 4 its last bit decides who is a candidate, and NumPy's differs."""
    return np.array([math.log2(v) if v else -math.inf for v in values.tolist()])


def cross(sets: np.ndarray, middle: int, nearest: np.ndarray) -> np.ndarray:
    """The two curves to cross for each coverage, int64 [sets, 2], -1 where one side is missing.

    nearest: candidate curves in order of distance; those from `middle` on lie above the batch.
    """
    pair = np.full((sets.shape[1], 2), -1)
    count = np.zeros(sets.shape[1], np.int64)
    for start in range(0, len(nearest), SLAB):
        open_ = np.flatnonzero(count < NEIGHBOURS)  # coverages that may keep more candidates
        if not open_.size:
            break
        slab = nearest[start : start + SLAB]
        kept = sets[np.ix_(slab, open_)]
        kept &= count[open_] + kept.cumsum(0) <= NEIGHBOURS
        count[open_] += kept.sum(0)
        for side, own in enumerate((slab < middle, slab >= middle)):
            if own.any():  # nearest of a side: the largest below, the smallest above
                found = kept[own]
                first = found.any(0) & (pair[open_, side] < 0)
                pair[open_[first], side] = slab[own][found[:, first].argmax(0)]
    pair[(pair < 0).any(1)] = -1
    return pair
