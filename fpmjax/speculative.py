"""Speculative decoding from an ordinary model: widen the decode work, ask once, scale once.

    T(d) = (0.08 d + 1.25) * F((d + 1) B, K)

A draft of d tokens makes every request d + 1 decode rows that share its past KV, so each rank's requests are
widened and its KV total is kept exactly.  The complete ordinary answer, rank maximum and online correction
included, is multiplied once and last.  Coverage and readiness are those of the model at the widened work.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fpmjax._jax import require_x64
from fpmjax.answer import SpeculativeEstimate
from fpmjax.errors import DraftLengthTypeError, FpmError, SpeculationError
from fpmjax.guard import check_one_model, check_work, is_model
from fpmjax.iteration import OK, askable
from fpmjax.metrics import U32_MAX
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.status import Status
from fpmjax.work import Array, RequestLists, Work

LARGEST_DRAFT = U32_MAX - 1  # d + 1 rows a request must be countable in 32 bits
CALIBRATED_REQUESTS, CALIBRATED_KV_PER_REQUEST, CALIBRATED_DRAFT = 8, 4096, 4  # the study's largest values

NOT_PURE_DECODE, NOT_SINGLE_TOKEN, COUNT_OVERFLOW, BAD_DRAFT_LENGTH, IDLE = (
    np.int8(s)
    for s in (
        Status.NOT_PURE_DECODE,
        Status.NOT_SINGLE_TOKEN,
        Status.COUNT_OVERFLOW,
        Status.BAD_DRAFT_LENGTH,
        Status.IDLE,
    )
)


def speculative(model: Any, work: Work, draft_length: Any, rule: SpeculativeRule | None = None) -> SpeculativeEstimate:
    """Pure: one speculative round per query, for use inside your own `jit`, `vmap` or `grad`.

    draft_length: an int, or an integer array (traced or not) that broadcasts against `work.shape`; its range is
    reported by the status, its type and the model's eligibility raise at trace time.
    rule: None is the published one.

    Raises DraftLengthTypeError, SpeculationError (`unsupported_estimator`, `measured_round`, `rule`,
    `draft_length_shape`), MetricsError (`payload`), and FpmError: `not_a_model`, `stacked`, and `x64_required` outside
    `fpmjax.x64()`.
    """
    require_x64()
    depth = draft_lengths(draft_length)
    require_eligible(model)
    check_one_model(model, "speculative")
    check_work(work, "speculative")
    check_rule(rule)
    common_shape(work.shape, np.shape(depth))
    factor = (rule or PUBLISHED).factor(depth)
    return speculate(jnp, for_draft(model), work, depth, factor, is_published(rule))


def for_draft(model: Any) -> Any:
    """The model as it answers widened work: some are ready there on other terms."""
    return getattr(model, "for_draft", model)


def speculate(xp: Any, ask: Any, work: Work, depth: Array, factor: Array, published: bool) -> SpeculativeEstimate:
    """`speculative` over an array namespace: `ask` answers the widened work; `depth` and `factor` are checked."""
    shape = np.broadcast_shapes(work.shape, np.shape(depth))
    depth, factor = xp.broadcast_to(depth, shape), xp.broadcast_to(factor, shape)
    work, invalid = askable(xp, work)
    wide = widen(xp, work, depth, invalid)
    stp = ask(wide)
    factor = xp.where(wide.refusal[..., 0] == BAD_DRAFT_LENGTH, np.nan, factor)  # such a refusal is that of every rank
    calibrated = in_study(xp, work, depth) & (wide.refusal == OK).all(-1) & published
    return SpeculativeEstimate(factor * stp.latency_ms, depth, factor, calibrated, stp)


def widen(xp: Any, work: Work, depth: Array, invalid: Array) -> Work:
    """The work with d + 1 decode rows per request and the same KV total, and its `refusal` where it cannot be widened.

    depth: integer [n...]; invalid: int8 [n..., r], refusals of the work itself.  All ranks of a query with a refused
    rank become idle, so that nothing is looked up for it.  Request lists stay as they are and say how many rows each
    request became; the rows themselves are never built.
    Counts are compared by division, never by a product that could wrap.
    """
    shape = (*depth.shape, work.ranks)

    def spread(x: Array) -> Array:
        return xp.zeros(shape, np.uint32) if x is None else xp.broadcast_to(x, shape)

    requests, kv = spread(work.decode_requests), spread(work.decode_kv)
    d = countable(xp, depth)[..., None]
    status = xp.where(xp.broadcast_to(d, shape) == 0, BAD_DRAFT_LENGTH, spread(invalid))
    for x in (work.prefill_requests, work.prefill_tokens, work.prefill_kv):
        if x is not None:
            status = xp.where((status == OK) & (spread(x) > 0), NOT_PURE_DECODE, status)
    width = xp.broadcast_to(d + np.uint32(1), shape)
    many = requests > np.uint32(U32_MAX) // width
    status = xp.where((status == OK) & many, COUNT_OVERFLOW, status)
    if work.lists is not None:
        position = np.arange(work.lists.extend.shape[-1], dtype=np.int32).reshape((1,) * work.lists.count.ndim + (-1,))
        several = ((position < work.lists.count[..., None]) & (work.lists.extend != 1)).any(-1)
        status = xp.where((status == OK) & spread(several) & (requests > 0), NOT_SINGLE_TOKEN, status)
    sound = (status == OK).all(-1, keepdims=True)
    lists = work.lists
    if lists is not None:
        listed = xp.broadcast_to(lists.count, shape)
        longest = (*shape, lists.extend.shape[-1])
        extend, past = (xp.broadcast_to(x, longest) for x in (lists.extend, lists.past))
        lists = RequestLists(extend, past, xp.where(sound, listed, np.int32(0)), width)
    variance = work.decode_kv_var
    if variance is not None:  # the variance of an even split; no estimator of totals reads it
        variance = spread(variance) / (width.astype(np.float64) * width.astype(np.float64))
    return replace(
        work,
        prefill_requests=None,
        prefill_tokens=None,
        prefill_kv=None,
        prefill_length_var=None,
        decode_requests=xp.where(sound, requests * width, np.uint32(0)),
        decode_kv=xp.where(sound, kv, np.uint32(0)),
        decode_kv_var=variance,
        lists=lists,
        refusal=status,
    )


def in_study(xp: Any, work: Work, depth: Array) -> Array:
    """bool [n...]: every active rank and the depth lie inside the published study."""
    inside = (depth >= 1) & (depth <= CALIBRATED_DRAFT)  # both bounds fit in any integer dtype
    if work.decode_requests is None:
        return inside
    shape = (*depth.shape, work.ranks)
    b, k = xp.broadcast_to(work.decode_requests, shape), xp.broadcast_to(work.decode_kv, shape)
    few = np.uint32(CALIBRATED_REQUESTS)
    short = k <= xp.minimum(b, few).astype(np.uint32) * np.uint32(CALIBRATED_KV_PER_REQUEST)
    return inside & ((b == 0) | ((b <= few) & short)).all(-1)


def is_published(rule: SpeculativeRule | None) -> bool:
    return rule is None or rule.integers() == PUBLISHED.integers()


def check_rule(rule: Any) -> None:
    """SpeculationError (`rule`) for what is neither a rule nor None."""
    if rule is not None and not isinstance(rule, SpeculativeRule):
        raise SpeculationError(
            f"rule is a {type(rule).__name__}\nhint: fpmjax.SpeculativeRule(slope, intercept, provenance)", code="rule"
        )


def require_eligible(model: Any) -> None:
    """SpeculationError where scaling would be wrong or would count speculation twice; FpmError for no model."""
    if not is_model(model):
        raise FpmError(
            f"a draft length is for a model, not for a {type(model).__name__}\nhint: e.g. fpmjax.direct(cell)",
            code="not_a_model",
        )
    if model.composition != "whole_forward":
        raise SpeculationError(
            f"a draft length needs a model of the whole forward pass, not of `{model.composition}`\n"
            "hint: use a table, a regression or a learned model of whole passes",
            code="unsupported_estimator",
        )
    if model.execution != "autoregressive":
        raise SpeculationError(
            "this model holds measured speculative rounds, so a draft length would count speculation twice\n"
            "hint: ask without draft_length, with logical requests",
            code="measured_round",
        )
    if getattr(model, "verify_width", 1) != 1:
        raise SpeculationError(
            f"this model already widens every request to verify_width={model.verify_width} rows\n"
            "hint: build it with verify_width=1 and ask with draft_length",
            code="unsupported_estimator",
        )


def check_draft_length(value: Any) -> int:
    """One draft length as int; DraftLengthTypeError or SpeculationError otherwise (a 0-d integer array is one)."""
    depth = draft_lengths(value)
    if np.ndim(depth):
        raise DraftLengthTypeError(
            "draft_length must be one integer here, not an array\nhint: `fpmjax.estimate` takes many"
        )
    check_range(value)
    return int(depth)


def draft_lengths(value: Any) -> Array:
    """Draft lengths as they were asked, int64 (traced ones as they are); DraftLengthTypeError for another type."""
    if isinstance(value, Tracer):
        if not jnp.issubdtype(value.dtype, np.integer):
            wrong_type(value.dtype)
        return value
    if np.ma.is_masked(value):
        wrong_type("a masked array")
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        if array.dtype.kind not in "iu":
            wrong_type(array.dtype)
        if array.dtype == np.uint64:
            array = np.minimum(array, np.uint64(2**63 - 1))
        return array.astype(np.int64)
    if isinstance(value, (list, tuple)):
        try:
            objects = np.asarray(value, object)
        except ValueError:  # ragged arrays
            wrong_type("a ragged list")
        return np.array([one_draft_length(x) for x in objects.ravel()], np.int64).reshape(objects.shape)
    return np.asarray(one_draft_length(value), np.int64)


def countable(xp: Any, lengths: Array) -> Array:
    """uint32 draft lengths, 0 for those out of range."""
    if lengths.dtype == np.uint32:
        return xp.where(lengths > np.uint32(LARGEST_DRAFT), np.uint32(0), lengths)
    wide = lengths.astype(np.int64)  # the largest draft length would wrap in int32; what exceeds int64 turns negative
    return xp.where((wide < 1) | (wide > LARGEST_DRAFT), 0, wide).astype(np.uint32)


def common_shape(work: tuple[int, ...], depth: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of both together; SpeculationError (`draft_length_shape`) where they do not broadcast."""
    try:
        return np.broadcast_shapes(work, depth)
    except ValueError:
        raise SpeculationError(
            f"draft_length of shape {depth} does not broadcast against work of shape {work}\n"
            "hint: add a length-1 axis, e.g. work of shape [n, 1] with draft lengths of shape [d]",
            code="draft_length_shape",
        ) from None


def one_draft_length(value: Any) -> int:
    """An int, clipped to what an int64 holds."""
    if isinstance(value, (bool, np.bool_, float)):
        wrong_type(type(value).__name__)
    try:
        return min(max(operator.index(value), -(2**63)), 2**63 - 1)
    except TypeError:
        wrong_type(type(value).__name__)


def wrong_type(name: Any) -> NoReturn:
    raise DraftLengthTypeError(
        f"draft_length must be an integer, not {name}\nhint: draft_length=3 drafts three tokens a round"
    )


def check_range(value: Any, where: str = "") -> None:
    """SpeculationError where one concrete draft length is out of range; `where` goes before the message."""
    depth = operator.index(value)
    if depth < 1:
        raise SpeculationError(
            f"{where}draft_length={depth} is not positive\nhint: omit draft_length for ordinary decoding",
            code="draft_length_not_positive",
        )
    if depth > LARGEST_DRAFT:
        raise SpeculationError(
            f"{where}draft_length={depth} makes more rows per request than 32 bits can count\n"
            f"hint: the largest draft length is {LARGEST_DRAFT}",
            code="width_overflow",
        )


def split_length(length: int, width: int) -> list[int]:
    """One request's past KV over its `width` rows: the remainder goes to the first rows, no token is dropped."""
    share, rest = divmod(length, width)
    return [share + 1] * rest + [share] * (width - rest)
