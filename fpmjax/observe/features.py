"""What an iteration looks like to an online model: its workload kind and its named features.

Written over the array namespace (`numpy` or `jax.numpy`).  Work is that of `iteration.askable`: uint32 counts.
Per rank, in float64, with P, H, N the prefill tokens, cached tokens and requests, B, K the decode requests and KV:

    Q = H P / N + P^2 / (2 N) + P / 2  where P > 0, else 0;   H counts only where P > 0
    attention = max over ranks of  kv_weight (H + K) + pair_weight Q        (of whole rank scores)
    moe       = token_weight (sum P + sum B)                               (tokens that the FFN sees)

These are the peer's formulas of the aggregated role; a prefill or decode worker has no work of the other phase, so
they hold for every role.  A rank has prefill where P > 0 and decode where B > 0; idle ranks decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fpmjax.iteration import has_decode, has_prefill
from fpmjax.work import Array, Work

# Workload kinds in the order in which an aggregated worker's stores are listed.
KINDS = ("pure_decode", "contains_locally_mixed", "cross_rank_aggregated", "pure_prefill")
DECODE, LOCALLY_MIXED, ACROSS_RANKS, PREFILL, NO_KIND = (np.int8(i) for i in (0, 1, 2, 3, -1))
# The kinds of work that a worker of each role sees, each with a store of its own.
ROLES = {"prefill": ("pure_prefill",), "decode": ("pure_decode",), "aggregated": KINDS}


class Features(NamedTuple):
    """kind: int8 [n...], an index of `KINDS`, -1 where idle; attention, moe: float64 [n...]."""

    kind: Array
    attention: Array
    moe: Array


def iteration_features(xp: Any, work: Work, weights: Sequence[Any] = (1.0, 1.0, 1.0)) -> Features:
    """Kind, attention and moe work of every iteration.

    weights: of KV reads, of prefill pairs and of FFN tokens; each [] or [n...].
    """
    token_weight = weights[2]
    kv_weight, pair_weight = (w[..., None] if np.ndim(w) else w for w in weights[:2])
    shape = (*work.shape, work.ranks)
    zero, none = xp.zeros(shape), xp.zeros(shape, bool)
    tokens = decoded = read = pairs = zero
    prefill = decode = none
    if work.decode_requests is not None:
        decode = has_decode(work)
        decoded = work.decode_requests.astype(np.float64)
    if work.decode_kv is not None:
        read = work.decode_kv.astype(np.float64)
    if work.prefill_tokens is not None:
        prefill = has_prefill(work)
        tokens = work.prefill_tokens.astype(np.float64)
        cached = zero if work.prefill_kv is None else work.prefill_kv.astype(np.float64)
        requests = xp.where(prefill, zero if work.prefill_requests is None else work.prefill_requests, 1)
        requests = xp.maximum(requests.astype(np.float64), 1.0)
        pairs = cached * tokens / requests + tokens * tokens / (2.0 * requests) + tokens / 2.0
        pairs = xp.where(prefill, pairs, 0.0)
        read = xp.where(prefill, cached, 0.0) + read
    score = rounded(xp, kv_weight * read) + rounded(xp, pair_weight * pairs)
    any_prefill, any_decode = prefill.any(-1), decode.any(-1)
    both = xp.where((prefill & decode).any(-1), LOCALLY_MIXED, ACROSS_RANKS)
    kind = xp.where(any_prefill, xp.where(any_decode, both, PREFILL), xp.where(any_decode, DECODE, NO_KIND))
    return Features(kind, score.max(-1), token_weight * (tokens.sum(-1) + decoded.sum(-1)))


def rounded(xp: Any, product: Array) -> Array:
    """The product as a float64: a quotient keeps XLA from contracting it with the sum that it enters.

    The divisor is one, which XLA cannot know: that counts are not negative, it does.
    """
    return product / xp.where(product < np.inf, 1.0, 2.0)


def breaks_role(xp: Any, work: Work, role: str) -> Array:
    """bool [n..., r]: a prefill worker's rank decodes, or a decode worker's rank computes prompt tokens."""
    other = {"prefill": has_decode(work), "decode": has_prefill(work)}.get(role)
    return xp.zeros((*work.shape, work.ranks), bool) if other is None else other


def lacks_lists(xp: Any, work: Work) -> Array:
    """bool [n..., r]: ranks with requests that do not list them."""
    requests = scheduled(xp, work)
    return (requests > 0.0) & (True if work.lists is None else work.lists.count < 0)


def scheduled(xp: Any, work: Work) -> Array:
    """float64 [n..., r]: requests, those without a token to compute included."""
    some = [x.astype(np.float64) for x in (work.prefill_requests, work.decode_requests) if x is not None]
    return sum(some[1:], some[0]) if some else xp.zeros((*work.shape, work.ranks))


class Totals(NamedTuple):
    """Sums and extremes over the requests of every rank, float64 [n...]; e computed and p past tokens of a request."""

    attention: Array
    moe: Array
    n: Array
    e: Array = None
    p: Array = None
    e2: Array = None
    p2: Array = None
    pairs: Array = None  # sum of e p + e^2 / 2
    max_e: Array = None
    max_p: Array = None
    min_p: Array = None


def totals_of(xp: Any, work: Work, features: Features, *, lists: bool) -> Totals:
    """What the axes are made of; `lists=False` leaves out what only request lists can say."""
    counted = Totals(features.attention, features.moe, scheduled(xp, work).sum(-1))
    if not lists or work.lists is None:
        return counted
    listed, width = work.lists, work.lists.extend.shape[-1]
    position = np.arange(width, dtype=np.int32).reshape((1,) * listed.count.ndim + (width,))
    there = position < listed.count[..., None]
    # Each request is `rows` rows of e computed tokens; its past is spread evenly, the remainder on the first rows.
    one = np.uint64(1)
    rows = xp.full_like(listed.past, one)
    if listed.rows is not None:
        rows = xp.broadcast_to(xp.maximum(listed.rows.astype(np.uint64), one)[..., None], listed.past.shape)
    share, longer = listed.past // rows, listed.past % rows
    w, e, p, q, more = (x.astype(np.float64) for x in (rows, listed.extend, listed.past, share, longer))

    def total(x: Array) -> Array:
        return xp.where(there, x, 0.0).sum((-1, -2))

    def largest(x: Array) -> Array:
        return xp.where(there, x, 0.0).max((-1, -2), initial=0.0)

    shortest = xp.where(there, q, np.inf).min((-1, -2), initial=np.inf)
    return counted._replace(
        e=total(w * e),
        p=total(p),
        e2=total(w * e * e),
        p2=total(more * (q + 1.0) * (q + 1.0) + (w - more) * q * q),
        pairs=total(e * p + w * e * e / 2.0),
        max_e=largest(e),
        max_p=largest(q + xp.minimum(more, 1.0)),
        min_p=xp.where(xp.isinf(shortest), 0.0, shortest),
    )


def spread_of(xp: Any, n: Array, total: Array, squares: Array) -> Array:
    """Squared coefficient of variation of n lengths."""
    some = total > 0.0
    square = xp.where(some, total * total, 1.0)
    return xp.where(some, xp.maximum(n * squares / square - 1.0, 0.0), 0.0)


@dataclass(frozen=True)
class Axis:
    """One selectable feature: its value from the totals, and whether it needs request lists."""

    of: Callable[[Any, Totals], Array]
    lists: bool = True


# The peer's catalogue, under its names.
AXES = {
    "attention": Axis(lambda xp, t: t.attention, lists=False),
    "moe": Axis(lambda xp, t: t.moe, lists=False),
    "n": Axis(lambda xp, t: t.n, lists=False),
    "logN": Axis(lambda xp, t: xp.log1p(t.n), lists=False),
    "n2": Axis(lambda xp, t: t.n * t.n, lists=False),
    "E": Axis(lambda xp, t: t.e),
    "P": Axis(lambda xp, t: t.p),
    "maxE": Axis(lambda xp, t: t.max_e),
    "maxP": Axis(lambda xp, t: t.max_p),
    "minP": Axis(lambda xp, t: t.min_p),
    "P2": Axis(lambda xp, t: t.p2),
    "F": Axis(lambda xp, t: t.pairs),
    "nE": Axis(lambda xp, t: t.n * t.e),
    "logF": Axis(lambda xp, t: xp.log1p(t.pairs)),
    "logP": Axis(lambda xp, t: xp.log1p(t.p)),
    "meanE": Axis(lambda xp, t: t.e / xp.maximum(t.n, 1.0)),
    "meanP": Axis(lambda xp, t: t.p / xp.maximum(t.n, 1.0)),
    "cvE2": Axis(lambda xp, t: spread_of(xp, t.n, t.e, t.e2)),
    "cvP2": Axis(lambda xp, t: spread_of(xp, t.n, t.p, t.p2)),
}


def need_lists(axes: Sequence[str]) -> bool:
    return any(AXES[name].lists for name in axes)


def project(xp: Any, work: Work, features: Features, axes: Sequence[str]) -> Array:
    """float64 [n..., axes]: the selected features; NaN where they need lists that the work does not carry."""
    lists = need_lists(axes)
    totals = totals_of(xp, work, features, lists=lists)
    if lists and work.lists is None:
        return xp.full((*work.shape, len(axes)), np.nan)
    return xp.stack([AXES[name].of(xp, totals) for name in axes], -1)
