"""What is measured near a refused query, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fpmjax.lookup.decode import NEIGHBOURS, OCTAVES

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell, Points


def near_decode(cell: Cell, batch: int, kv: int) -> str:
    """What goes behind the sentence of a refused decode query: where its KV total lies, its neighbours, a hint."""
    points = cell.decode
    batches = np.unique(points.batch)
    if not batches.size:
        return "\nhint: measure decode passes, or ask for prefill only"
    below, above = batches[batches < batch], batches[batches > batch]
    lowest, highest = points.kv.min(), points.kv.max()
    notes = []
    if not lowest <= kv <= highest:
        side, end = ("above", highest) if kv > highest else ("below", lowest)
        notes.append(f"total_kv_read_tokens={kv} lies {side} every measured curve ({end})")
    if batch in batches:
        notes.append(f"batch_size={batch} is measured for {span(points, batch)}")
    rungs = np.array(cell.capture_rungs)
    for side in (*below[-1:], *above[:1]):
        note = f"batch {side} is measured for {span(points, side)}"
        if np.searchsorted(rungs, side) != np.searchsorted(rungs, batch):
            note += " but stands in another capture regime"
        elif abs(np.log2(side) - np.log2(batch)) > OCTAVES:
            note += " but lies more than two octaves away"
        notes.append(note)
    if crowd := crowding(points, batches, rungs, batch, kv):
        notes.append(
            f"the {len(crowd)} nearest batches that cover it all lie on one side ({', '.join(map(str, crowd))})"
        )
    notes += [f"no {side} batch is measured" for side, of in (("smaller", below), ("larger", above)) if not of.size]
    nearest = batches[np.argmin(np.abs(np.log2(batches) - np.log2(max(batch, 1))))]
    return f"; {'; '.join(notes)}\nhint: batch_size={nearest} answers {span(points, nearest)}"


def crowding(points: Points, batches: np.ndarray, rungs: np.ndarray, batch: int, kv: int) -> list[int]:
    """The nearest covering candidates where they fill the rule's neighbourhood from one side alone."""
    distance = {int(b): abs(math.log2(b) - math.log2(batch)) for b in batches if b != batch and batch}
    regime = np.searchsorted(rungs, batch)
    near = [b for b in sorted(distance, key=lambda b: (distance[b], b)) if distance[b] <= OCTAVES]
    near = [b for b in near if np.searchsorted(rungs, b) == regime and covers(points, b, kv)]
    kept = near[:NEIGHBOURS]
    one_sided = all(b < batch for b in kept) or all(b > batch for b in kept)
    return sorted(kept) if len(near) > NEIGHBOURS and one_sided else []


def covers(points: Points, batch: int, kv: int) -> bool:
    own = points.kv[points.batch == batch]
    return bool(own[0] <= kv <= own[-1])


def near_prefill(cell: Cell, batch: int, tokens: int, kv: int) -> str:
    """Why a prefill query finds no answer, and a hint of what would."""
    points = cell.prefill
    batches = np.unique(points.batch)
    if not batches.size:
        return "\nhint: measure prefill passes, or ask for decode only"
    if batch not in batches:
        few = ", ".join(map(str, batches[:8])) + (", ..." if batches.size > 8 else "")
        return f"; batch_size={batch} has no prefill rows (measured: {few})\nhint: prefill never crosses batch sizes"
    own = points.batch == batch
    t, k = points.tokens[own], points.kv[own]
    distance = np.abs(np.log2(t + 1) - np.log2(tokens + 1)) + np.abs(np.log2(k + 1) - np.log2(kv + 1))
    i = int(np.argmin(distance))
    return (
        f"; batch_size={batch} is measured for total_prefill_tokens {t.min()}..{t.max()} "
        f"and total_kv_read_tokens {k.min()}..{k.max()}, though not for every pair\n"
        f"hint: the nearest measured point is total_prefill_tokens={t[i]}, total_kv_read_tokens={k[i]}"
    )


def span(points: Points, batch: int) -> str:
    kv = points.kv[points.batch == batch]
    return f"total_kv_read_tokens={kv[0]}" if kv.min() == kv.max() else f"total_kv_read_tokens {kv.min()}..{kv.max()}"
