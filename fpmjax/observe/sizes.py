"""What a learned model sees of an iteration: a few totals, whatever their source.

Written over the array namespace (`numpy` or `jax.numpy`); work is that of `iteration.askable`.  Attention-DP ranks run
in lockstep, so what every rank does alone (attention, launches) counts as on its busiest rank, and what they share
(experts, weights) by the tokens of all.  Only counts are read, so an answer never depends on whether lists came with
the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fpmjax.errors import OptionError
from fpmjax.iteration import has_decode, has_prefill
from fpmjax.metrics import U32_MAX
from fpmjax.work import Array, Work


class Sizes(NamedTuple):
    """float64 [n...] each.

    decode:   decode requests of the busiest rank.
    rows:     decode rows of all ranks as the engine runs them: padded to its CUDA graph sizes.
    kv:       past KV tokens that decode reads, of the busiest rank.
    past:     KV tokens per decode request there.
    prefills: prefill requests of the busiest rank.
    tokens:   prompt tokens computed, of all ranks.
    prompt:   those of one request, of the rank where they are most.
    cached:   past KV tokens of prefill, of the busiest rank.
    pairs:    pairs of tokens that prefill attention computes, of the busiest rank (`observe.features`).
    """

    decode: Array
    rows: Array
    kv: Array
    past: Array
    prefills: Array
    tokens: Array
    prompt: Array
    cached: Array
    pairs: Array


# Coordinates of the training box, in logarithms: how wide, how much, how long each, for decode and for prefill.
BOX = (
    "decode_requests",
    "decode_rows",
    "decode_kv",
    "decode_kv_per_request",
    "prefill_tokens",
    "prefill_tokens_per_request",
    "prefill_kv",
)


def sizes_of(xp: Any, work: Work, graph_sizes: Array | None = None) -> Sizes:
    """The sizes of every iteration.

    graph_sizes: int64 [g], ascending CUDA graph batch sizes.  A pure decode rank runs at the next of them; beyond the
    largest, or beside prefill, at its own size.
    """
    shape = (*work.shape, work.ranks)
    zero = xp.zeros(shape)

    def there(x: Any, which: Any) -> Array:
        return zero if x is None or which is None else xp.where(which, x.astype(np.float64), 0.0)

    decode, prefill = has_decode(work), has_prefill(work)
    batch, kv = there(work.decode_requests, decode), there(work.decode_kv, decode)
    requests, tokens = there(work.prefill_requests, prefill), there(work.prefill_tokens, prefill)
    cached = there(work.prefill_kv, prefill)
    each = xp.maximum(requests, 1.0)
    pairs = cached * tokens / each + tokens * tokens / (2.0 * each) + tokens / 2.0
    rows = batch
    if graph_sizes is not None and decode is not None:
        ladder = xp.asarray(graph_sizes).astype(np.float64)
        at = xp.searchsorted(ladder, batch.reshape(-1)).reshape(shape)
        padded = xp.where(at < ladder.shape[0], ladder[xp.minimum(at, ladder.shape[0] - 1)], batch)
        rows = xp.where((batch > 0) & (tokens == 0), padded, batch)
    busiest, read = batch.max(-1), kv.max(-1)
    past = read / xp.maximum(busiest, 1.0)
    prompt = (tokens / each).max(-1)
    return Sizes(
        *(busiest, rows.sum(-1), read, past),
        *(requests.max(-1), tokens.sum(-1), prompt, cached.max(-1), pairs.max(-1)),
    )


def coordinates(xp: Any, sizes: Sizes) -> Array:
    """float64 [n..., 7]: the coordinates of `BOX`; what is below 1 counts as 1."""
    decode = [sizes.decode, sizes.rows, sizes.kv, sizes.past]
    x = xp.stack([*decode, sizes.tokens, sizes.prompt, sizes.cached], -1)
    return xp.log(xp.maximum(x, 1.0))


def cells_of(at: np.ndarray, side: float) -> tuple[np.ndarray, np.ndarray]:
    """(cell of every row int64 [n], rows of every cell) of coordinates [n > 0, k], in the order of the cells."""
    corner = np.round(at / side).astype(np.int64)
    corner -= corner.min(0)
    flat = np.ravel_multi_index(tuple(corner.T), tuple(corner.max(0) + 1))  # one number sorts faster than k
    _, cell, count = np.unique(flat, return_inverse=True, return_counts=True)
    return cell.reshape(-1), count


def ladder_of(sizes: Sequence[int] | None) -> np.ndarray | None:
    """int64 [g], ascending; OptionError `cuda_graph_batch_sizes`."""
    if sizes is None:
        return None
    try:
        found = np.array(list(sizes))
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.dtype.kind not in "iu" or found.ndim != 1 or not len(found) or found.min() < 1 or found.max() > U32_MAX:
        raise OptionError(
            f"cuda_graph_batch_sizes is {sizes!r}\nhint: give the batch sizes that the engine captured: [1, 2, 4, 8]",
            code="cuda_graph_batch_sizes",
        )
    return np.unique(found).astype(np.int64)
