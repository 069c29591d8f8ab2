"""The 135 features of the peer's learned estimator, in its order: 21 of totals, 18 of requests, 96 of slots.

Written over the array namespace (`numpy` or `jax.numpy`), float64; work is that of `iteration.askable`.  A rank is
active where it computes prefill tokens or decodes; the others contribute nothing, not even their lists.  Per active
rank: N, P, H prefill requests, tokens and cached tokens, B, K decode requests and KV, v the variances, not below 0.

    prefill_attention_pairs = sum over ranks with prefill of  H P / N + P^2 / (2 N) + P / 2
    sum_decode_kv_squared   = sum over ranks with decode of   B v + B (K / B)^2

Lists of a rank are usable where there is one entry per scheduled request and past tokens sum to at most H + K + P + B:
some producers read the KV one step late.  Without usable lists on every active rank, request features are NaN and
slots are empty.  Slots hold the 32 requests of the longest past, then of the longest extension.

A draft length widens requests (`speculative.widen`): every feature is then that of the split batch, whose rows are
counted and never built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import log1p
from typing import Any, NamedTuple

import numpy as np

from fpmjax.iteration import askable
from fpmjax.observe.features import rounded
from fpmjax.work import Array, Work

SLOTS = 32
ZERO = np.float64(0.0)


def features_of(work: Work, names: Sequence[str] | None = None) -> Array:
    """float64 [n..., features] on the host, all 135 in the order of `NAMES` or those named.

    Logarithms are libm's, as the peer's are: the vectorised ones of NumPy and XLA may differ in the last bit.
    Raises KeyError for an unknown name, MetricsError for fields that are no work.
    """
    names = NAMES if names is None else names
    values = raw_features(np, askable(np, work)[0], names)
    for i, name in enumerate(names):
        if name in LOGARITHMS:
            column = values[..., i].ravel()
            values[..., i] = np.fromiter(map(log1p, column.tolist()), np.float64, column.size).reshape(work.shape)
    return values


def raw_features(xp: Any, work: Work, names: Sequence[str]) -> Array:
    """float64 [n..., len(names)]: the features named, but where it is a logarithm, what log1p is taken of."""
    iteration = Iteration(xp, work)
    columns = [FEATURES[LOGARITHMS.get(name, name)](iteration) for name in names]
    if not columns:
        return xp.zeros((*work.shape, 0))
    return xp.stack([xp.broadcast_to(column, work.shape) for column in columns], -1)


def need_lists(names: Sequence[str]) -> bool:
    """Whether some of the features are of requests or slots."""
    return any(name.startswith(("req_", "slot")) for name in names)


def usable_lists(xp: Any, work: Work) -> Array:
    """bool [n..., r]: lists that are there, aligned and consistent with the totals; idle ranks need none."""
    iteration = Iteration(xp, work)
    return iteration.usable | ~iteration.active


class Rows(NamedTuple):
    """Rows of equal lengths, float64 [n..., m] each: e computed and p past tokens, and how many such rows there are."""

    e: Array
    p: Array
    times: Array


class Iteration:
    """Sums and extremes of every iteration, float64 [n...]; each is made when it is first asked for."""

    def __init__(self, xp: Any, work: Work):
        self.xp, self.work = xp, work
        self.shape = (*work.shape, work.ranks)

    def field(self, name: str) -> Array:
        """A count of the active ranks, float64 [n..., r]."""
        x = getattr(self.work, name)
        return self.xp.zeros(self.shape) if x is None else self.xp.where(self.active, x, 0).astype(np.float64)

    def variance(self, name: str) -> Array:
        """A variance of the active ranks, not below zero, float64 [n..., r]."""
        x = getattr(self.work, name)
        return self.xp.zeros(self.shape) if x is None else self.xp.where(self.active, self.xp.maximum(x, ZERO), ZERO)

    @cached_property
    def active(self) -> Array:
        computes, decodes = (
            self.xp.zeros(self.shape, bool) if x is None else x > 0
            for x in (self.work.prefill_tokens, self.work.decode_requests)
        )
        return computes | decodes

    @cached_property
    def N(self) -> Array:
        return self.field("prefill_requests")

    @cached_property
    def P(self) -> Array:
        return self.field("prefill_tokens")

    @cached_property
    def H(self) -> Array:
        return self.field("prefill_kv")

    @cached_property
    def B(self) -> Array:
        return self.field("decode_requests")

    @cached_property
    def K(self) -> Array:
        return self.field("decode_kv")

    @cached_property
    def decode_variance(self) -> Array:
        """Of the KV of decode requests; of a widened query that of its rows, where lists tell them."""
        stated, lists = self.variance("decode_kv_var"), self.work.lists
        if lists is None or lists.rows is None:
            return stated
        rows, some = self.rows, self.xp.maximum(self.B, 1.0)
        mean = (rows.times * rows.p).sum(-1) / some
        away = rows.p - mean[..., None]
        return self.xp.where(self.aligned & self.active, (rows.times * away * away).sum(-1) / some, stated)

    @cached_property
    def pairs(self) -> Array:
        some = self.xp.maximum(self.N, 1.0)
        each = self.H * self.P / some + self.P * self.P / (2.0 * some) + self.P / 2.0
        return self.in_order(self.xp.where((self.P > 0.0) & (self.N > 0.0), each, ZERO))

    @cached_property
    def squares(self) -> Array:
        xp, B = self.xp, self.B
        mean = self.K / xp.maximum(B, 1.0)
        each = rounded(xp, B * self.decode_variance) + rounded(xp, B * mean * mean)
        return self.in_order(xp.where(B > 0.0, each, ZERO))

    def in_order(self, x: Array) -> Array:
        """Sum over ranks [n..., r], first to last: fractions round differently in another order."""
        if self.xp is np:
            return np.cumsum(x, -1)[..., -1]
        from jax import lax

        by_rank = self.xp.moveaxis(x, -1, 0)
        return lax.scan(lambda total, more: (total + more, None), self.xp.zeros_like(by_rank[0]), by_rank)[0]

    @cached_property
    def aligned(self) -> Array:
        """bool [n..., r]: lists with one entry per scheduled request."""
        lists = self.work.lists
        if lists is None or not lists.extend.shape[-1]:
            return self.xp.zeros(self.shape, bool)
        rows = 1.0 if lists.rows is None else lists.rows.astype(np.float64)
        return (lists.count > 0) & (lists.count.astype(np.float64) * rows == self.N + self.B)

    @cached_property
    def listed(self) -> Array:
        """bool [n..., r, q]: entries of active ranks with aligned lists."""
        lists: Any = self.work.lists  # only asked for where there are some
        position = np.arange(lists.extend.shape[-1], dtype=np.int32).reshape((1,) * len(self.shape) + (-1,))
        return (position < lists.count[..., None]) & (self.active & self.aligned)[..., None]

    @cached_property
    def usable(self) -> Array:
        lists = self.work.lists
        if lists is None or not lists.extend.shape[-1]:
            return self.xp.zeros(self.shape, bool)
        most = (self.H + self.K + self.P + self.B).astype(np.uint64)
        past = self.xp.where(self.listed, lists.past, np.uint64(0))
        # No sum wraps where no entry exceeds what a sum may be: at most 2**34 each.
        small = (past <= most[..., None]).all(-1)
        return small & (past.sum(-1) <= most) & self.active & self.aligned

    @cached_property
    def all_usable(self) -> Array:
        """bool [n...]: every active rank has usable lists, and there is one."""
        fine: Any = self.xp.where(self.active, self.usable, True)
        return fine.all(-1) & self.active.any(-1)

    @cached_property
    def rows(self) -> Rows:
        """Per rank, [n..., r, m]: an entry is one kind of row, a widened one two, the longer ones first."""
        xp, lists = self.xp, self.work.lists
        if lists is None or not lists.extend.shape[-1]:
            return Rows(*[xp.zeros((*self.shape, 1))] * 3)
        e, there = lists.extend.astype(np.float64), self.listed.astype(np.float64)
        if lists.rows is None:
            return Rows(e, lists.past.astype(np.float64), there)
        w = xp.maximum(lists.rows.astype(np.uint64), np.uint64(1))[..., None]
        share, longer = (lists.past // w).astype(np.float64), (lists.past % w).astype(np.float64)
        pasts, times = [share + 1.0, share], [there * longer, there * (w.astype(np.float64) - longer)]
        return Rows(*(xp.concatenate(x, -1) for x in ([e, e], pasts, times)))

    @cached_property
    def batch(self) -> Rows:
        """Rows of all ranks, [n..., r * m]."""
        return Rows(*(x.reshape(*self.shape[:-1], -1) for x in self.rows))

    def total(self, x: Array) -> Array:
        """Sum over rows; NaN without usable lists."""
        return self.known((self.batch.times * x).sum(-1))

    def largest(self, x: Array) -> Array:
        return self.known(self.xp.where(self.batch.times > 0.0, x, -np.inf).max(-1))

    def smallest(self, x: Array) -> Array:
        return self.known(self.xp.where(self.batch.times > 0.0, x, np.inf).min(-1))

    def known(self, x: Array) -> Array:
        return self.xp.where(self.all_usable, x, np.nan)

    @cached_property
    def ranked(self) -> tuple[Array, Array, Array]:
        """(past, extend, number of rows so far) [n..., r * m], the longest past first, then the longest extension."""
        xp, (e, p, times) = self.xp, self.batch
        keys = [xp.where(times > 0.0, -x, np.inf) for x in (p, e)]
        if xp is np:
            order = np.lexsort(keys[::-1], axis=-1)
            past, extend, times = (np.take_along_axis(x, order, -1) for x in (*keys, times))
        else:
            from jax import lax

            past, extend, times = lax.sort((*keys, times), num_keys=2)
        return -past, -extend, xp.cumsum(times, -1)

    @cached_property
    def slots(self) -> dict[str, Array]:
        """Per part, float64 [n..., 32]; 0 behind the last row."""
        xp, (past, extend, so_far) = self.xp, self.ranked
        slot = np.arange(SLOTS, dtype=np.float64).reshape((1,) * len(self.work.shape) + (SLOTS,))
        there = (so_far[..., -1:] > slot) & self.all_usable[..., None]
        place = (so_far[..., None, :] <= slot[..., None]).sum(-1)
        place = xp.minimum(place, so_far.shape[-1] - 1)
        e, p = (xp.where(there, xp.take_along_axis(x, place, -1), ZERO) for x in (extend, past))
        return {"present": there.astype(np.float64), "past": p, "extend": e}

    def mean(self, total: Array, count: Array) -> Array:
        """Quotient of sums over ranks, 0 of nothing."""
        total, count = total.sum(-1), count.sum(-1)
        return self.xp.where(count > 0.0, total / self.xp.maximum(count, 1.0), ZERO)


Feature = Callable[[Iteration], Array]

TOTALS: dict[str, Feature] = {
    "num_active_ranks": lambda i: i.active.astype(np.float64).sum(-1),
    "num_prefill_requests": lambda i: i.N.sum(-1),
    "sum_prefill_tokens": lambda i: i.P.sum(-1),
    "sum_prefill_kv_tokens": lambda i: i.H.sum(-1),
    "var_prefill_length": lambda i: i.variance("prefill_length_var").max(-1),
    "num_decode_requests": lambda i: i.B.sum(-1),
    "sum_decode_kv_tokens": lambda i: i.K.sum(-1),
    "var_decode_kv_tokens": lambda i: i.decode_variance.max(-1),
    "max_rank_prefill_tokens": lambda i: i.P.max(-1),
    "max_rank_decode_kv_tokens": lambda i: i.K.max(-1),
    "max_rank_num_decode_requests": lambda i: i.B.max(-1),
    "mean_prefill_chunk": lambda i: i.mean(i.P, i.N),
    "mean_prefill_kv": lambda i: i.mean(i.H, i.N),
    "prefill_attention_pairs": lambda i: i.pairs,
    "mean_decode_kv": lambda i: i.mean(i.K, i.B),
    "sum_decode_kv_squared": lambda i: i.squares,
}
REQUESTS: dict[str, Feature] = {
    "req_batch_size": lambda i: i.total(1.0),
    "req_sum_extend": lambda i: i.total(i.batch.e),
    "req_max_extend": lambda i: i.largest(i.batch.e),
    "req_min_extend": lambda i: i.smallest(i.batch.e),
    "req_sum_past": lambda i: i.total(i.batch.p),
    "req_max_past": lambda i: i.largest(i.batch.p),
    "req_min_past": lambda i: i.smallest(i.batch.p),
    "req_sum_extend_x_past": lambda i: i.total(i.batch.e * i.batch.p),
    "req_sum_extend_squared": lambda i: i.total(i.batch.e * i.batch.e),
    "req_sum_past_squared": lambda i: i.total(i.batch.p * i.batch.p),
    "req_sum_attn_flops": lambda i: i.total(i.batch.e * (i.batch.p + i.batch.e / 2.0)),
    "req_sum_extend_x_max_past": lambda i: i.total(i.batch.e) * i.largest(i.batch.p),
    "req_batch_size_x_sum_extend": lambda i: i.total(1.0) * i.total(i.batch.e),
    "req_max_past_minus_min_past": lambda i: i.largest(i.batch.p) - i.smallest(i.batch.p),
    "req_is_decode": lambda i: i.known((i.largest(i.batch.e) <= 1.0).astype(np.float64)),
    "req_is_prefill": lambda i: i.known((i.largest(i.batch.e) > 1.0).astype(np.float64)),
}
PARTS = ("present", "past", "extend")
FEATURES: dict[str, Feature] = {
    **TOTALS,
    **REQUESTS,
    **{f"slot{k}_{part}": lambda i, k=k, part=part: i.slots[part][..., k] for k in range(SLOTS) for part in PARTS},
}
# Features that are log1p of another one.
LOGARITHMS = {
    **{
        f"log1p_{name}": name
        for name in (
            "sum_prefill_tokens",
            "sum_prefill_kv_tokens",
            "sum_decode_kv_tokens",
            "prefill_attention_pairs",
            "sum_decode_kv_squared",
        )
    },
    "req_log1p_sum_past": "req_sum_past",
    "req_log1p_sum_attn_flops": "req_sum_attn_flops",
}
_OF_REQUESTS = list(REQUESTS)
NAMES = (
    *TOTALS,
    *(name for name in LOGARITHMS if name.startswith("log1p_")),
    *_OF_REQUESTS[:12],
    *(name for name in LOGARITHMS if name.startswith("req_")),
    *_OF_REQUESTS[12:],
    *(name for name in FEATURES if name.startswith("slot")),
)
