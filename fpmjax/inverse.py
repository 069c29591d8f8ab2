"""`largest_batch`, `largest_context`: how far one may go under a limit, in bulk and exactly.

Measured surfaces are not monotone and tables have gaps, so there are two answers: the largest one anywhere that is
covered and within the limit, and the largest one up to which every one is.  Where they differ, the second is the safe
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import jax
import numpy as np

from fpmjax._jax import own_scope
from fpmjax.errors import FpmError, refuse_option
from fpmjax.estimate import device_copy, estimate
from fpmjax.given import depths, integer, integers, limits
from fpmjax.guard import check_concrete, check_one_model, is_model
from fpmjax.lookup.segments import Line, runs, search
from fpmjax.metrics import U32_MAX
from fpmjax.models.direct import Direct
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import check_rule, require_eligible
from fpmjax.work import Work

MOST_BATCHES, MOST_CONTEXT = 1 << 10, 1 << 17  # looked through by default where no table says where it ends
SIZES = (1 << 6, 1 << 9, 1 << 12)  # questions in one compiled walk
SHARE = 3  # of a chunk that may be left open for another one
SCANNED = 1 << 18  # answers held at once where everything is asked
NONE = -1


class Ended(IntEnum):
    """What ended the stretch in which every answer is covered and within the limit.

    What is covered ends where the measured points of a table do, and for every model where totals exceed 32 bits.  A
    fitted model that is ready answers whatever is asked, its `support` says how far outside of what it saw; it ends
    where a draft length widens the batch beyond what it may, for `learned` twice the largest one that it saw.
    """

    word: str
    sentence: str

    def __new__(cls, value: int, word: str, sentence: str):
        member = int.__new__(cls, value)
        member._value_ = value
        member.word, member.sentence = word, sentence
        return member

    LIMIT = 0, "limit", "the next one takes longer than the limit"
    GAP = 1, "gap", "the next one is not covered, though a larger one is"
    TABLE_END = 2, "end of coverage", "nothing larger, up to `most`, is covered"
    MOST = 3, "most", "every one up to `most` is covered and within the limit"


@dataclass(frozen=True, eq=False)
class Largest:
    """Answers of `largest_batch` or `largest_context`, NumPy arrays of the common shape; scalars for one question.

    anywhere:      int64, the largest that is covered and within the limit; -1 where there is none.
    anywhere_ms:   float64, the latency there; NaN where there is none.
    throughout:    int64, the largest up to which all of them, from `first` on, are covered and within the limit; -1
                   where `first` is not.
    throughout_ms: float64, the latency there.
    ended:         int8, an `Ended`: why the next one is not.
    first:         int64, where the stretch begins: batch 1, or the smallest covered context (-1 where nothing is).
    """

    anywhere: Any
    anywhere_ms: Any
    throughout: Any
    throughout_ms: Any
    ended: Any
    first: Any


@dataclass(frozen=True, eq=False)
class Asked:
    """Questions, [n] each: which x are looked through, and what x means.

    requests, kv, steps: requests + requests_step x requests with kv + kv_step x KV tokens in total, int64.
    first: int64, where the stretch begins; None: at the first covered x from 0 on.
    top: int64, the largest x that can be asked at all; most: the largest that was to be looked at.
    """

    limit_ms: np.ndarray
    depth: np.ndarray | None
    requests: np.ndarray
    requests_step: np.ndarray
    kv: np.ndarray
    kv_step: np.ndarray
    top: np.ndarray
    most: int
    rule: SpeculativeRule | None
    first: int | None

    def part(self, which: Any) -> Asked:
        """Some of the questions."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x[which] for name, x in arrays.items() if isinstance(x, np.ndarray)})

    def kinds(self) -> Iterator[tuple[Any, Asked]]:
        """(which, those questions) of ordinary decoding, and of rounds."""
        if self.depth is None or self.depth.all():
            yield slice(None), self
            return
        plain = self.depth == 0
        yield plain, replace(self.part(plain), depth=None, rule=None)
        if not plain.all():
            yield ~plain, self.part(~plain)

    def latency_ms(self, model: Any, x: np.ndarray) -> np.ndarray:
        """float64 [n, m], the model's own answers at x [n, m]; NaN where refused or negative."""
        known = np.where((x >= 0) & (x <= self.top[:, None]), x, NONE)
        at = np.maximum(known, 0)
        requests = self.requests[:, None] + self.requests_step[:, None] * at
        kv = self.kv[:, None] + self.kv_step[:, None] * at
        kv = np.where(requests > 0, kv, 0)
        depth = None if self.depth is None else self.depth[:, None]
        work = Work.decode(requests.astype(np.uint32), kv.astype(np.uint32))
        found = estimate(model, work, draft_length=depth, rule=self.rule, check=False)
        return np.where((known >= 0) & (requests > 0), found.latency_ms, np.nan)


def largest_batch(
    model: Any,
    *,
    limit_ms: Any,
    kv_per_request: Any = None,
    kv_total: Any = None,
    draft_length: Any = None,
    rule: SpeculativeRule | None = None,
    most: int | None = None,
) -> Largest:
    """How many decode requests fit into `limit_ms` on one rank; arguments broadcast against each other.

    limit_ms: positive milliseconds of one pass, or of one round where a draft length is given.
    kv_per_request: past KV tokens of each request, all alike; or kv_total: of all together, whatever the batch.
    draft_length, rule: as `estimate` takes them; among several draft lengths 0 is ordinary decoding.
    most: the largest batch that is looked at; by default all that a table can answer, and 1,024 for other models.

    A table is walked from measured point to measured point; any other model is asked at every batch.  `Ended` says what
    the end of coverage is for each.

    Raises OptionError (code: the argument), and what `estimate` raises for models, rules and draft lengths.
    """
    if (kv_per_request is None) == (kv_total is None):
        refuse_option("kv_per_request", "give kv_per_request or kv_total, and not both", "kv_per_request=4096")
    name, kv = ("kv_total", kv_total) if kv_per_request is None else ("kv_per_request", kv_per_request)
    given = {name: integers(name, kv, 0)}
    fixed = kv_per_request is None

    def line(kv: np.ndarray) -> tuple[np.ndarray, ...]:
        none = np.zeros_like(kv)
        return none, none + 1, *((kv, none) if fixed else (none, kv))

    return largest(model, "largest_batch", limit_ms, given, line, draft_length, rule, most, MOST_BATCHES, first=1)


def largest_context(
    model: Any,
    *,
    limit_ms: Any,
    decode_requests: Any,
    draft_length: Any = None,
    rule: SpeculativeRule | None = None,
    most: int | None = None,
) -> Largest:
    """How many past KV tokens each of `decode_requests` requests may have within `limit_ms`, all having the same.

    Tables seldom begin at a context of 0, so the stretch begins at the smallest covered one (`Largest.first`).  Else as
    `largest_batch`; most: by default all that a table can answer, and 131,072 tokens for other models.
    """
    given = {"decode_requests": integers("decode_requests", decode_requests, 1)}

    def line(requests: np.ndarray) -> tuple[np.ndarray, ...]:
        none = np.zeros_like(requests)
        return requests, none, none, requests

    return largest(model, "largest_context", limit_ms, given, line, draft_length, rule, most, MOST_CONTEXT, first=None)


def largest(
    model: Any,
    who: str,
    limit_ms: Any,
    given: dict[str, np.ndarray],
    line: Callable,
    draft_length: Any,
    rule: SpeculativeRule | None,
    most: int | None,
    usual: int,
    first: int | None,
) -> Largest:
    """Both questions: checked, made flat, answered in chunks, put back into shape."""
    table = check_model(model, who)
    check_rule(rule)
    ((name, value),) = given.items()
    arrays = {"limit_ms": limits(limit_ms), name: value}
    if draft_length is not None:
        require_eligible(model)
        arrays["draft_length"] = depths(draft_length)
    elif rule is not None:
        refuse_option("rule", "a rule scales speculative rounds", "give draft_length too")
    try:
        shape = np.broadcast_shapes(*(x.shape for x in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        refuse_option(
            "shape", f"shapes do not broadcast against each other: {shapes}", "add axes of length 1 where one is fixed"
        )
    limit, value, *depth = (np.broadcast_to(x, shape).ravel() for x in arrays.values())
    end = usual if table is None else 2 * U32_MAX  # no bound: nothing beyond 32 bits can be asked
    if most is not None:
        end = integer("most", most, first or 0)
    requests, requests_step, kv, kv_step = line(value)
    top = np.minimum(end, U32_MAX // np.maximum(kv_step, 1))
    asked = Asked(limit, depth[0] if depth else None, requests, requests_step, kv, kv_step, top, end, rule, first)
    out: dict[str, np.ndarray] = {}
    for which, part in asked.kinds():
        found = scan(model, part) if table is None else walk(model, table, part)
        for f in fields(found):
            answers = getattr(found, f.name)
            out.setdefault(f.name, np.empty(len(limit), answers.dtype))[which] = answers
    return Largest(**{name: x.reshape(shape)[()] for name, x in out.items()})


def walk(model: Any, table: Direct, asked: Asked) -> Largest:
    """Answers of a table, from its segments."""
    depth, factor, width = asked.depth, np.ones(len(asked.limit_ms)), table.verify_width
    if depth is not None:
        factor, width = np.asarray((asked.rule or PUBLISHED).factor(depth)), depth + 1
    tabulated = table.decode.row.shape[-1] - 1  # and every larger batch is refused
    rows, rows_step = asked.requests * width, asked.requests_step * width
    top = np.minimum(asked.top, np.where(rows_step > 0, tabulated // np.maximum(rows_step, 1), U32_MAX))
    line = Line(np.minimum(rows, tabulated), rows_step, asked.kv, asked.kv_step)
    edges = runs(table.decode)
    base = np.zeros_like(top)

    def find(which: np.ndarray, start: np.ndarray, stop: np.ndarray, limit: np.ndarray, **how: bool) -> Any:
        """`search` for some of the questions, in a few compiled sizes."""
        arrays = (jax.tree.map(lambda x: x[which], line), limit[which], factor[which], start[which], stop[which])
        return in_sizes(device_copy(model).decode, edges[how["up"]], arrays, **how)

    with own_scope():
        every = np.arange(len(top))
        unlimited = np.full(len(top), np.inf)
        first = base if asked.first is None else base + asked.first
        if asked.first is None:
            first, _ = find(every, base, top, unlimited, up=True, within=True)
        stop, stop_ms = find(every, first, top, asked.limit_ms, up=True, within=False)
        anywhere, _ = find(every, top, stop, asked.limit_ms, up=False, within=True)  # below lies what is throughout
        last = stop.copy()
        refused = np.flatnonzero((stop <= top) & np.isnan(stop_ms))
        last[refused] = find(refused, top, stop, unlimited, up=False, within=True)[0]
    nowhere = first > top
    return finish(model, asked, first, stop, anywhere, ~np.isnan(stop_ms), last > stop, nowhere, top)


def in_sizes(table: Any, edges: np.ndarray, arrays: Any, **how: bool) -> tuple[np.ndarray, np.ndarray]:
    """`search` over padded chunks; what is padded ends before it begins, what a chunk leaves open goes into another."""
    line, limit, factor, start, stop = arrays
    x, ms, open_ = start.copy(), np.full(len(start), np.nan), np.ones(len(start), bool)
    while (left := np.flatnonzero(open_)).size:
        waiting = []
        for where, size in pieces(len(left)):
            which = left[where]
            part = jax.tree.map(lambda a: padded(a[which], size), (line, limit, factor, x, stop))  # noqa: B023
            for side, edge in zip(part[-2:], (1, 0) if how["up"] else (0, 1), strict=True):
                side[len(which) :] = edge
            patience = np.int64(size // SHARE if len(left) > SIZES[1] else 0)
            waiting.append((which, search(table, edges, *part, patience, how["up"], how["within"])))
        for which, found in waiting:
            x[which], ms[which], open_[which] = (np.asarray(a)[: len(which)] for a in found)
    return x, ms


def padded(x: np.ndarray, size: int) -> np.ndarray:
    """[n] -> [size], the tail zero."""
    out = np.zeros(size, x.dtype)
    out[: len(x)] = x
    return out


def pieces(count: int) -> Iterator[tuple[slice, int]]:
    """(questions, compiled size) of each chunk: the largest size that is at least half filled."""
    start = 0
    while start < count:
        size = next((s for s in reversed(SIZES) if count - start > s // 2), SIZES[0])
        yield slice(start, min(start + size, count)), size
        start += size


def scan(model: Any, asked: Asked) -> Largest:
    """Answers of any model: every x is asked."""
    start = asked.first or 0
    columns = min(max(asked.most + 1 - start, 1), SCANNED // 64)
    rows = max(1, SCANNED // columns)
    parts = [scan_some(model, asked.part(slice(i, i + rows)), columns) for i in range(0, len(asked.limit_ms), rows)]
    if not parts:
        return scan_some(model, asked, columns)
    names = [f.name for f in fields(Largest)]
    return Largest(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def scan_some(model: Any, asked: Asked, columns: int) -> Largest:
    """`scan` of as many questions as fit into memory together, `columns` values of x at a time."""
    n, top = len(asked.limit_ms), asked.top
    beyond = top + 1
    first = beyond.copy() if asked.first is None else np.full(n, asked.first)
    stop, anywhere, last = beyond.copy(), np.full(n, NONE), np.full(n, NONE)
    stop_covered = np.zeros(n, bool)
    for x0 in range(asked.first or 0, int(top.max(initial=NONE)) + 1, columns):
        x = np.broadcast_to(np.arange(x0, x0 + columns), (n, columns))
        ms = asked.latency_ms(model, x)
        covered = ~np.isnan(ms)
        within = covered & (ms <= asked.limit_ms[:, None])
        last = np.maximum(last, np.where(covered, x, NONE).max(1))
        anywhere = np.maximum(anywhere, np.where(within, x, NONE).max(1))
        if asked.first is None:
            first = np.minimum(first, np.where(covered, x, beyond[:, None]).min(1))
        failing = np.where(~within & (x >= first[:, None]), x, beyond[:, None]).min(1)
        new = (failing < stop) & (failing <= top)
        stop = np.where(new, failing, stop)
        at = np.where(new, failing - x0, 0)
        stop_covered = np.where(new, covered[np.arange(n), at], stop_covered)
    return finish(model, asked, first, stop, anywhere, stop_covered, last > stop, first > top, top)


def finish(
    model: Any,
    asked: Asked,
    first: np.ndarray,
    stop: np.ndarray,
    anywhere: np.ndarray,
    stop_covered: np.ndarray,
    more: np.ndarray,
    nowhere: np.ndarray,
    top: np.ndarray,
) -> Largest:
    """The words and the latencies.  stop: the first that is not within; more: something beyond it is covered."""
    refused = np.where(more, Ended.GAP, Ended.TABLE_END)
    ended = np.where(stop > top, Ended.TABLE_END, np.where(stop_covered, Ended.LIMIT, refused))
    ended = np.where(stop > asked.most, Ended.MOST, ended)
    ended = np.where(nowhere, Ended.TABLE_END, ended).astype(np.int8)
    throughout = np.where(nowhere | (stop <= first), NONE, stop - 1)
    anywhere = np.where(nowhere | (anywhere < first), NONE, anywhere)
    ms = asked.latency_ms(model, np.stack([anywhere, throughout], axis=1))
    return Largest(anywhere, ms[:, 0].copy(), throughout, ms[:, 1].copy(), ended, np.where(nowhere, NONE, first))


def check_model(model: Any, who: str) -> Direct | None:
    """The model where its table can be walked, None where it has to be asked; FpmError for what is no model."""
    if not is_model(model):
        raise FpmError(
            f"{who} asks a model, not a {type(model).__name__}\nhint: make one first, e.g. fpmjax.direct(cell)",
            code="not_a_model",
        )
    check_one_model(model, who)
    check_concrete(model, who, "ask outside jit; the answers are arrays")
    if not isinstance(model, Direct):
        return None
    ms = np.asarray(model.decode.knots.ms)
    return model if not model.decode.knots.checked or bool(((ms > 0) & np.isfinite(ms)).all()) else None
