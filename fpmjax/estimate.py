"""`estimate`: the edge between the host and a model.

In: any batch shape, NumPy.  Between: a few fixed sizes, so that a thousand different jobs share a handful of
compiled functions; chunks, so that memory beyond inputs and outputs does not grow; 64-bit scope, whatever the
caller's jax settings.  Out: NumPy arrays, and exceptions where they were asked for.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fpmjax._jax import own_scope
from fpmjax.answer import Estimate, SpeculativeEstimate, no_evidence
from fpmjax.errors import FpmError, SpeculationError
from fpmjax.guard import check_concrete, check_one_model, check_work, is_model
from fpmjax.iteration import PHASES, shape_of
from fpmjax.refusal import raise_first_refusal
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import (
    check_range,
    check_rule,
    common_shape,
    countable,
    draft_lengths,
    for_draft,
    is_published,
    require_eligible,
    speculate,
)
from fpmjax.status import Status
from fpmjax.work import COUNTS, Work

SMALL = 64  # queries and ranks up to which plain Python beats dispatching a kernel
SIZES = (1 << 10, 1 << 14, 1 << 18)  # compiled sizes in queries and ranks; the largest keeps outputs inside the cache
IN_FLIGHT = 2  # chunks computed while an earlier one is copied out


def estimate(
    model: Any,
    work: Work,
    *,
    draft_length: Any = None,
    rule: SpeculativeRule | None = None,
    check: bool = True,
    evidence: bool = False,
) -> Estimate | SpeculativeEstimate:
    """How long each iteration of `work` takes, in milliseconds.

    draft_length: None for ordinary decoding; an integer from 1, or an array of them that broadcasts against
        `work.shape`, for speculative rounds.
    rule: factor of a speculative round; None is the published 0.08 d + 1.25.
    check: raise on the first refused query (CoverageError, SpeculationError, MetricsError), with how many there
        are, where the first is and what is measured nearby.  False: NaN and a `Status` there, numbers elsewhere.
    evidence: add the per-rank parts: resolution, rows of the Parquet file and weights.

    Returns NumPy arrays of the common shape, float64 and to be read only; scalars for a single query.
    """
    check_arguments(model, work, rule)
    if draft_length is None:
        if rule is not None:
            raise SpeculationError("a rule scales speculative rounds\nhint: give draft_length too", code="rule")
        lengths = depth = factor = None
        shape = work.shape
    else:
        lengths = draft_lengths(draft_length)
        if check and not lengths.ndim:
            check_range(draft_length)
        require_eligible(model)
        depth = countable(np, lengths)
        factor = np.where(depth > 0, (rule or PUBLISHED).factor(depth), np.nan)
        shape = common_shape(work.shape, depth.shape)
        if depth.ndim:  # one depth for all stays a scalar, which costs the kernel no input
            depth, factor = np.broadcast_to(depth, shape), np.broadcast_to(factor, shape)
    queries = math.prod(shape)
    if queries * work.ranks <= SMALL and hasattr(model, "on_host"):
        ask = partial((model if depth is None else for_draft(model)).on_host, evidence=evidence)
        asked = work if shape == work.shape else spread(work, shape)
        result = ask(asked) if depth is None else speculate(np, ask, asked, depth, factor, is_published(rule))
    else:
        asked = spread(only_what_is_there(work, needs_lists=depth is not None, model=model), shape)
        result = in_chunks(model, asked, depth, factor, shape, evidence=evidence, published=is_published(rule))
    if lengths is not None:
        result = replace(result, draft_length=np.broadcast_to(lengths, shape))
    if not shape:
        result = jax.tree.map(lambda x: x[()], result)  # the scalars of a single query
    for x in jax.tree.leaves(result):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    if check:
        raise_first_refusal(
            model,
            work,
            result,
            draft_length,
            lambda one, depths: estimate(model, one, draft_length=depths, check=False),
        )
    return result


def check_arguments(model: Any, work: Any, rule: Any) -> None:
    """FpmError (`not_a_model`, `stacked`, `traced`), MetricsError (`payload`, `u32`), SpeculationError (`rule`)."""
    if not is_model(model):
        raise FpmError(
            f"estimate asks a model, not a {type(model).__name__}\n"
            "hint: make one first, e.g. fpmjax.direct(cell); a function of your own goes inside your own jit",
            code="not_a_model",
        )
    check_one_model(model, "estimate")
    check_work(work, "estimate")
    inside = "inside jit, vmap or grad call model(work), or fpmjax.speculative(model, work, draft_length)"
    check_concrete((work, model), "estimate", inside)
    shape_of({name: getattr(work, name) for name in COUNTS})
    check_rule(rule)


def only_what_is_there(work: Work, *, needs_lists: bool, model: Any) -> Work:
    """The work without phases that no query has, and without what the model does not read."""
    fields: dict[str, Any] = {name: getattr(work, name) for name in COUNTS}
    prefill, decode = PHASES
    if not any(present(fields[name]) for name in prefill):
        fields |= dict.fromkeys(prefill)
    if not any(present(fields[name]) for name in decode) and fields["prefill_tokens"] is not None:
        fields |= dict.fromkeys(decode)
    reads = getattr(model, "reads", ())
    for name in ("prefill_length_var", "decode_kv_var"):
        fields[name] = getattr(work, name) if "variance" in reads else None
    fields["lists"] = work.lists if needs_lists or "lists" in reads else None
    return Work(**fields)


def present(x: Any) -> bool:
    """Whether a count is anywhere above zero; a broadcast view is looked at once."""
    if x is None or not np.size(x):
        return False
    x = np.asarray(x)
    return bool(x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)].any())


def spread(work: Work, shape: tuple[int, ...]) -> Work:
    """The work as views of the full batch shape."""
    lead = len(work.shape)
    return jax.tree.map(lambda x: np.broadcast_to(x, (*shape, *np.shape(x)[lead:])), work)


def in_chunks(model: Any, work: Work, depth: Any, factor: Any, shape: tuple[int, ...], **static: bool) -> Any:
    """`answer` over every query, in chunks of a few compiled sizes, two of them in flight."""
    queries = math.prod(shape)
    ranks = 1 << (work.ranks - 1).bit_length()  # idle ranks change nothing, and fewer rank counts compile
    arrays = (work, depth, factor)
    out: Any = None
    pending: deque[tuple[slice, Any]] = deque()

    def drain(limit: int) -> None:
        nonlocal out
        while len(pending) > limit:
            where, result = pending.popleft()
            part = jax.tree.map(lambda x: np.asarray(x)[: where.stop - where.start], result)  # noqa: B023
            if where.stop - where.start == queries:
                out = part  # the only chunk: a view of the device's own output
                return
            if out is None:
                out = jax.tree.map(lambda x: np.empty((queries, *x.shape[1:]), x.dtype), part)
            for whole, piece in zip(jax.tree.leaves(out), jax.tree.leaves(part), strict=True):
                whole[where] = piece

    with own_scope():
        on_device = device_copy(model)
        for where, size in chunks(queries, ranks):
            part = jax.tree.map(lambda x: rows(x, where, size, len(shape)), arrays)  # noqa: B023
            part = (pad_ranks(part[0], ranks), *part[1:])
            pending.append((where, answer(on_device, *part, **static)))
            drain(IN_FLIGHT)
        drain(0)
    out = jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), out)
    return complete(out, depth, factor, work.ranks)


def chunks(queries: int, ranks: int) -> Iterator[tuple[slice, int]]:
    """(queries, compiled size in queries) of each chunk: the largest size that is at least half filled."""
    sizes = [max(1, size // ranks) for size in SIZES]
    start = 0
    while start < queries or not queries:
        left = queries - start
        size = next((s for s in reversed(sizes) if left > s // 2), sizes[0])
        yield slice(start, min(start + size, queries)), size
        start += size
        if not queries:
            return


def rows(x: np.ndarray, where: slice, size: int, axes: int) -> np.ndarray:
    """Queries `where` of a field [n..., rest] as [size, rest], the tail zero; only these are ever copied."""
    if not x.ndim:
        return x  # one draft length for all
    if not axes:  # a single query
        x, axes = x[None], 1
    rest = x.shape[axes:]
    if x.flags.c_contiguous and where.stop - where.start == size:
        return x.reshape(-1, *rest)[where]
    part = np.zeros((size, *rest), x.dtype)
    fill(part[: where.stop - where.start], x, where.start, axes)
    return part


def fill(out: np.ndarray, x: np.ndarray, start: int, axes: int) -> None:
    """Queries from `start` on of a field [n..., rest], row-major, into `out` [queries, rest].

    Whole slices of the leading axis are copied at once, its ends by recursion: a broadcast view costs what a
    contiguous array costs, where indexing it by flat positions costs several times that.
    """
    if axes == 1:
        out[...] = x[start : start + len(out)]
        return
    inner = math.prod(x.shape[1:axes])
    done = 0
    while done < len(out):
        i, offset = divmod(start + done, inner)
        whole = 0 if offset else (len(out) - done) // inner
        if whole:
            stop = done + whole * inner
            out[done:stop].reshape(whole, *x.shape[1:])[...] = x[i : i + whole]
        else:
            stop = min(len(out), done + inner - offset)
            fill(out[done:stop], x[i], offset, axes - 1)
        done = stop


def pad_ranks(work: Work, ranks: int) -> Work:
    """Idle ranks up to `ranks`."""
    missing = ranks - work.ranks
    if not missing:
        return work

    def pad(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])

    return jax.tree.map(pad, work)


@partial(jax.jit, static_argnames=("evidence", "published"))
def answer(model: Any, work: Work, depth: Any, factor: Any, *, evidence: bool, published: bool) -> Any:
    """One chunk; what the host can fill in is left out, for every output costs memory bandwidth."""
    if depth is None:
        return slim(model, model(work, evidence=evidence), work)
    ask = partial(for_draft(model), evidence=evidence)
    result = speculate(jnp, ask, work, depth, factor, published)
    return replace(result, stp=slim(model, result.stp, work), draft_length=None, scaling_factor=None)


def slim(model: Any, result: Estimate, work: Work) -> Estimate:
    """The estimate without the rank of single-rank work, where the model tells ranks apart."""
    return replace(result, rank=None) if work.ranks == 1 and getattr(model, "by_rank", True) else result


def complete(result: Any, depth: Any, factor: Any, ranks: int) -> Any:
    """What `slim` and `answer` left out, as views where it is constant."""
    if depth is not None:
        factor = np.broadcast_to(factor, result.latency_ms.shape)
        return replace(result, stp=complete(result.stp, None, None, ranks), scaling_factor=factor)
    shape = result.latency_ms.shape
    if result.rank is None:
        result = replace(result, rank=(result.status == Status.OK).astype(np.int32) - np.int32(1))
    if result.parts is not None:
        parts = jax.tree.map(lambda x: x[..., :ranks], result.parts)
        for name in ("prefill", "decode", "baseline"):
            if getattr(parts, name) is None:
                nothing = np.broadcast_to(np.float64(np.nan), (*shape, ranks))
                parts = replace(parts, **{name: no_evidence(np, (*shape, ranks)), f"{name}_ms": nothing})
        result = replace(result, parts=parts)
    return result


_copies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def device_copy(model: Any) -> Any:
    """The model with its arrays on the device, kept as long as the model lives."""
    if model not in _copies:
        _copies[model] = jax.device_put(model)  # jnp.asarray would compile a copy of every shape
    return _copies[model]
