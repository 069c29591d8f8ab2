"""Which few ordinary points to measure so that the widened queries of a draft length stay near observed work.

A draft length asks for batches (d + 1) times as large, each request with a (d + 1)-th of its context: points that
ordinary traffic does not visit.  Two contexts at each of about four wide batches hold the form of `learned` there;
the measurements that say so stand in `benchmarks/README.md`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fpmjax.guard import check_concrete
from fpmjax.iteration import askable
from fpmjax.metrics import U32_MAX, refuse
from fpmjax.models.intake import check_observations
from fpmjax.models.settings import whole
from fpmjax.observe.observations import Observations
from fpmjax.observe.sizes import sizes_of
from fpmjax.speculative import check_draft_length
from fpmjax.speculative import draft_lengths as as_draft_lengths

BATCHES = 4  # wide batches at most
NEAR = 0.25  # e-folds within which an observed point counts as the anchor


class Anchor(NamedTuple):
    """One ordinary decode pass to measure, per rank: so many requests, so many past KV tokens over all of them."""

    decode_requests: int
    decode_kv: int


def recommend_anchors(
    observations: Observations, *, draft_lengths: Any, largest_batch: int | None = None
) -> tuple[Anchor, ...]:
    """Points whose measurement makes widened queries of the observed work safe; none where nothing decodes.

    draft_lengths: an int or several, each at least 1.  The widened batches beyond the largest one are covered by
    powers of two and the largest itself, at most four of them; each with the least and the largest KV total that
    observed work of any of these depths has at about that batch, one of them with the shortest context of all.  A
    point that was observed nearly so is left out.
    largest_batch: requests of a rank that a draft length will be asked for; None: as many as were observed.  Name it
    when anchors are among the observations, which would otherwise be widened too: with it, measured anchors are done.

    Measure them as ordinary decoding (every request one token) and fit again.  Raises MetricsError `payload`,
    DraftLengthTypeError, SpeculationError where a draft length is out of range, OptionError `largest_batch`.
    """
    if not isinstance(observations, Observations):
        refuse(
            "payload",
            f"recommend_anchors takes Observations, not a {type(observations).__name__}",
            "Observations.of, .read or read_trace",
        )
    check_concrete((observations, draft_lengths), "recommend_anchors", "call it outside of jit")
    check_observations(observations)
    depths = np.unique([check_draft_length(d) for d in np.atleast_1d(as_draft_lengths(draft_lengths)).ravel().tolist()])
    sizes = sizes_of(np, askable(np, jax.tree.map(np.asarray, observations.work))[0])
    decodes = (sizes.decode > 0) & (sizes.tokens == 0)
    batch, kv = sizes.decode[decodes], sizes.kv[decodes]
    asked = batch <= (np.inf if largest_batch is None else whole("largest_batch", largest_batch, U32_MAX))
    if not asked.any() or not depths.size:
        return ()
    wide = (batch[asked, None] * (depths + 1)).ravel()
    total = np.repeat(kv[asked], len(depths))
    context = total / wide
    batches = np.array(wide_batches(float(batch[asked].max()), min(float(wide.max()), float(U32_MAX))))
    found = []
    for size in batches:
        near = total[np.abs(np.log(wide / size)) <= np.log(2.0) / 2.0 + 1e-9]
        if not near.size:
            near = total
        least = near.min()
        if size == batches[np.abs(np.log(batches / wide[context.argmin()])).argmin()]:
            least = min(least, size * context.min())
        for level in sorted({max(int(x), int(size)) for x in (least, near.max())}):  # a request has a past
            gap = np.maximum(np.abs(np.log(batch / size)), np.abs(np.log(np.maximum(kv, 1) / max(level, 1))))
            if gap.min() > NEAR:
                found.append(Anchor(int(size), level))
    return tuple(found)


def wide_batches(known: float, largest: float) -> list[float]:
    """At most `BATCHES` sizes above `known`, up to and with the largest, evenly spread over the powers of two."""
    if largest <= known:
        return []
    powers = 2.0 ** np.arange(np.floor(np.log2(known)) + 1, np.ceil(np.log2(largest)))
    sizes = [*powers[(powers > known) & (powers < largest)].tolist(), largest]
    if len(sizes) > BATCHES:
        sizes = [sizes[i] for i in np.unique(np.round(np.linspace(0, len(sizes) - 1, BATCHES)).astype(int))]
    return sizes
