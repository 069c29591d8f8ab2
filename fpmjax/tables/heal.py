"""What becomes of rows that were measured on fabricated KV (`kv_seed_regime == "fake_fallback"`)."""

from __future__ import annotations

import numpy as np


def healed(
    batch: np.ndarray, kv: np.ndarray, latency_ms: np.ndarray, fake: np.ndarray, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Latencies of one cell's decode rows with the fake ones replaced where two real rows allow it.

    A fake row takes the line through the two largest real KV totals strictly below its own, at its own batch
    size, from the recorded latencies: l2 + (kv - k2) * ((l2 - l1) / (k2 - k1)), rounded after each operation
    as in the peer.  With fewer than two such rows, or a value that is not positive and finite, it keeps what
    was recorded.  Rows above are never used and a healed row never helps another.

    batch, kv: int64 [n], below 2**32; latency_ms: float64 [n]; fake, real: bool [n].  Any row order.
    Returns latencies float64 [n] and replaced bool [n].
    """
    # One key per (batch, kv): sorted anchors of a batch are neighbours, and two slots in front no key reaches.
    key = batch.astype(np.uint64) << np.uint64(32) | kv.astype(np.uint64)
    anchors = np.flatnonzero(real)
    anchors = anchors[np.argsort(key[anchors])]
    rows = np.flatnonzero(fake)
    below = np.searchsorted(key[anchors], key[rows])
    rows, below = rows[below >= 2], below[below >= 2]
    one, two = anchors[below - 2], anchors[below - 1]
    own = batch[one] == batch[rows]  # the nearer anchor then has this batch too
    rows, one, two = rows[own], one[own], two[own]

    k1, k2, k = (kv[i].astype(np.float64) for i in (one, two, rows))
    l1, l2 = latency_ms[one], latency_ms[two]
    with np.errstate(over="ignore", invalid="ignore"):
        value = l2 + (k - k2) * ((l2 - l1) / (k2 - k1))
    usable = np.isfinite(value) & (value > 0)
    latency, replaced = latency_ms.copy(), np.zeros(len(batch), bool)
    latency[rows[usable]] = value[usable]
    replaced[rows[usable]] = True
    return latency, replaced
