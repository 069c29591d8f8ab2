"""`Work`: what the engine is asked to do in one iteration, per rank, with any batch axes in front.

Everything is checked here, on the host, before it reaches a model: counts are integers of 0..2**32-1 and stay
so (nothing is wrapped, rounded, cast from float or clamped).  JAX tracers pass without value checks; device
code then reports `Status.INVALID_WORK`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from fpmjax._jax import pytree
from fpmjax.errors import MetricsError
from fpmjax.metrics import U32_MAX, RankMetrics, as_float, as_index, holds_masked, parse_iteration, refuse, show

Array = Any  # np.ndarray on the host, jax.Array or a tracer inside the caller's jit
COUNTS = ("prefill_requests", "prefill_tokens", "prefill_kv", "decode_requests", "decode_kv")
VARIANCES = ("prefill_length_var", "decode_kv_var")
MOST_AXES = 32  # of arrays whose elements NumPy lets one walk over, in every version
MOST_LISTED = 1 << 26  # entries of zero-padded request lists, of 8 bytes, in either of the two arrays
# (requests, totals that need at least one request, code of the refusal)
PAIRS = (
    ("prefill_requests", "prefill_tokens", "prefill_sums_without_requests"),
    ("prefill_requests", "prefill_kv", "prefill_sums_without_requests"),
    ("decode_requests", "decode_kv", "decode_kv_without_requests"),
)


@pytree()
class RequestLists:
    """Per-request lengths of every rank, zero-padded along the last axis (q = longest list anywhere).

    extend: uint64 [n..., r, q]  tokens computed for each scheduled request
    past:   uint64 [n..., r, q]  KV tokens present before the step
    count:  int32  [n..., r]     requests listed; -1 where the rank supplied no lists
    rows:   uint32 [n..., r]     rows that each listed request stands for, its past split evenly over them
                                 (`speculative.split_length`); None: one.  Only a widened query has more
    """

    extend: Array
    past: Array
    count: Array
    rows: Array = None


@pytree()
class Work:
    """Totals of one iteration per rank; every field is [n..., r], an idle rank is a row of zeros.

    Counts are uint32, variances float64 (tokens**2; they may be negative, no estimator reads them as spreads).
    A field that is None is statically zero everywhere; the constructors below leave none.
    """

    prefill_requests: Array = None
    prefill_tokens: Array = None  # newly computed in this step
    prefill_kv: Array = None  # read, not computed: prefix hits and earlier chunks
    decode_requests: Array = None
    decode_kv: Array = None  # past KV, summed over the decode requests
    prefill_length_var: Array = None
    decode_kv_var: Array = None
    lists: RequestLists | None = None
    refusal: Array = None  # int8, a Status known before any model is asked; written by `speculative.widen` alone

    @staticmethod
    def decode(requests: Any, kv_tokens: Any, *, ranks: bool = False) -> Work:
        """Pure decode: `requests` rows with `kv_tokens` past KV in total, broadcast as in NumPy."""
        return Work.of(decode_requests=requests, decode_kv=kv_tokens, ranks=ranks)

    @staticmethod
    def prefill(requests: Any, tokens: Any, kv_tokens: Any = 0, *, ranks: bool = False) -> Work:
        """Pure prefill: `tokens` newly computed and `kv_tokens` read, both in total over the `requests`."""
        return Work.of(prefill_requests=requests, prefill_tokens=tokens, prefill_kv=kv_tokens, ranks=ranks)

    @staticmethod
    def of(
        *,
        prefill_requests: Any = 0,
        prefill_tokens: Any = 0,
        prefill_kv: Any = 0,
        decode_requests: Any = 0,
        decode_kv: Any = 0,
        prefill_length_var: Any = 0.0,
        decode_kv_var: Any = 0.0,
        ranks: bool = False,
    ) -> Work:
        """Every field by name, broadcast against each other as in NumPy.

        With `ranks=False` the common shape is the batch shape [n...] and there is one rank; with `ranks=True`
        its last axis is the rank axis.  uint32 arrays are kept, not copied; broadcasting costs no memory.

        Raises MetricsError: `u32` (a count is not an integer of 0..2**32-1), `payload` (a variance is not a
        finite number, or shapes do not broadcast), `no_ranks`, `prefill_sums_without_requests`,
        `decode_kv_without_requests`.
        """
        given = dict(locals())
        fields = {name: _counts(name, given[name]) for name in COUNTS}
        fields |= {name: _variances(name, given[name]) for name in VARIANCES}
        shape = _common_shape(fields)
        if not ranks:
            fields = {name: a[..., None] for name, a in fields.items()}
            shape = (*shape, 1)
        elif not shape or shape[-1] == 0:
            refuse(
                "no_ranks",
                f"ranks=True takes the last axis as ranks, but the common shape is {shape}",
                "pass arrays of shape [n..., ranks], or leave ranks=False for one rank",
            )
        for requests, totals, code in PAIRS:
            _check_pair(requests, fields[requests], totals, fields[totals], code, ranks)
        return Work(**{name: _broadcast(a, shape) for name, a in fields.items()})

    @staticmethod
    def from_metrics(obj: Any) -> Work:
        """One iteration, batch shape (): a rank dict, a list of rank dicts, or JSON text of either.

        Raises MetricsError as `fpmjax.metrics.parse_iteration` does.
        """
        parsed = parse_iteration(obj)
        return _pack([parsed], (), len(parsed))

    @staticmethod
    def from_iterations(items: Iterable[Any]) -> Work:
        """Many iterations, batch shape (n,); shorter ones are padded with idle ranks.

        Raises MetricsError as `from_metrics` does, its message preceded by `iterations[i]: `; `lists_too_large`
        where request lists, padded to the longest one of them all, would not fit into a reasonable memory.
        """
        if isinstance(items, (str, bytes, bytearray, dict)) or not isinstance(items, Iterable):
            refuse(
                "payload",
                f"iterations is of type {type(items).__name__}, not a list of iterations",
                "for one iteration use Work.from_metrics",
            )
        parsed = []
        for index, item in enumerate(items):
            try:
                parsed.append(parse_iteration(item))
            except MetricsError as error:
                raise MetricsError(f"iterations[{index}]: {error}", code=error.code) from None
        return _pack(parsed, (len(parsed),), max(map(len, parsed), default=1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch shape n..., without the rank axis."""
        return self._full_shape[:-1]

    @property
    def ranks(self) -> int:
        """Length of the rank axis, idle ranks included."""
        return self._full_shape[-1]

    @property
    def _full_shape(self) -> tuple[int, ...]:
        arrays = (getattr(self, name) for name in (*COUNTS, *VARIANCES))
        return next((np.shape(a) for a in arrays if a is not None), (1,))

    def __repr__(self) -> str:
        return f"Work(shape={self.shape}, ranks={self.ranks}{', lists' if self.lists is not None else ''})"


def _at(name: str, index: tuple) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if len(index) else name


# What an element has to be: (code, words, hint)
COUNT = (
    "u32",
    f"a count is an integer from 0 to {U32_MAX}",
    "pass whole requests and tokens per rank and iteration, as int or an integer array",
)
VARIANCE = (
    "payload",
    "a variance is a finite number",
    "pass the population variance in tokens**2, or leave it out",
)


def _refuse_element(kind: tuple[str, str, str], name: str, index: tuple, value: object) -> NoReturn:
    code, words, hint = kind
    refuse(code, f"{_at(name, index)} is {show(value)} ({type(value).__name__}), but {words}", hint)


def _refuse_dtype(kind: tuple[str, str, str], name: str, array: np.ndarray) -> NoReturn:
    """Refuse an array as a whole, by its first element where it has one."""
    if array.size:
        _refuse_element(kind, name, (0,) * array.ndim, array.ravel()[:1].tolist()[0])
    _refuse_element(kind, name, (), array)


def _as_array(value: Any) -> np.ndarray | None:
    """An array-like with a dtype of its own as NumPy array; None for Python scalars, (nested) lists, and objects."""
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__"):
        array = np.asarray(value)
        return None if array.dtype == object else array
    return None


def _refuse_masked(kind: tuple[str, str, str], name: str, value: Any) -> None:
    """A masked entry is no value, and the one stored behind the mask was never meant."""
    if holds_masked(value):
        masked = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else np.empty(0)
        index = np.unravel_index(np.argmax(masked), masked.shape) if masked.any() else ()
        code, words, _ = kind
        hint = "fill masked entries with what they are, or leave these iterations out"
        refuse(code, f"{_at(name, index)} is masked, but {words}", hint)


def _elements(value: Any) -> np.ndarray:
    """Python scalars or nested lists as an array of objects, so that no type is lost on the way."""
    with suppress(ValueError):  # ragged
        objects = np.asarray(value, dtype=object)
        if objects.ndim <= MOST_AXES:
            return objects
    whole = np.empty((), dtype=object)  # one element that is no number
    whole[()] = value
    return whole


def _narrow(array: np.ndarray) -> np.ndarray:
    """One element along every zero-stride axis: a broadcast view is checked and converted once."""
    if 0 not in array.strides:
        return array
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def _counts(name: str, value: Any) -> Array:
    """uint32 array of the shape of `value`; a tracer as it is."""
    if type(value) is int and 0 <= value <= U32_MAX:
        return np.asarray(value, np.uint32)
    if isinstance(value, Tracer):
        if not np.issubdtype(value.dtype, np.integer):
            refuse(
                "u32",
                f"{name} is traced as {value.dtype}, but counts are integers",
                "differentiate in latencies instead: `model.with_latencies`",
            )
        return value
    _refuse_masked(COUNT, name, value)
    array = _as_array(value)
    if array is None:
        objects = _elements(value)
        numbers = [as_index(x) for x in objects.flat]
        for i, number in enumerate(numbers):
            if number is None or not 0 <= number <= U32_MAX:
                _refuse_element(COUNT, name, np.unravel_index(i, objects.shape), objects.flat[i])
        return np.asarray(numbers, np.uint32).reshape(objects.shape)
    if array.dtype.kind not in "iu":
        _refuse_dtype(COUNT, name, array)
    small = _narrow(array)
    if small.size and array.dtype != np.uint32 and (small.min() < 0 or small.max() > U32_MAX):
        index = np.unravel_index(np.argmax((small < 0) | (small > U32_MAX)), small.shape)
        _refuse_element(COUNT, name, index, int(small[index]))
    return np.broadcast_to(small.astype(np.uint32, copy=False), array.shape)


def _variances(name: str, value: Any) -> Array:
    """float64 array of the shape of `value`; a tracer as it is."""
    if type(value) is float and np.isfinite(value):
        return np.asarray(value)
    if isinstance(value, Tracer):
        return value
    _refuse_masked(VARIANCE, name, value)
    array = _as_array(value)
    if array is None:
        objects = _elements(value)
        numbers = [as_float(x) for x in objects.flat]
        for i, number in enumerate(numbers):
            if number is None:
                _refuse_element(VARIANCE, name, np.unravel_index(i, objects.shape), objects.flat[i])
        return np.asarray(numbers, np.float64).reshape(objects.shape)
    if array.dtype.kind not in "iuf":
        _refuse_dtype(VARIANCE, name, array)
    small = _narrow(array).astype(np.float64, copy=False)
    finite = np.isfinite(small)
    if not finite.all():
        index = np.unravel_index(np.argmin(finite), small.shape)
        _refuse_element(VARIANCE, name, index, float(small[index]))
    return np.broadcast_to(small, array.shape)


def _common_shape(fields: dict[str, Array]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(np.shape(a) for a in fields.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {np.shape(a)}" for name, a in fields.items() if np.shape(a))
        refuse(
            "payload",
            f"shapes do not broadcast against each other: {shapes}",
            "give every array the same shape, or length 1 on the axes where it is constant",
        )


def _check_pair(requests: str, r: Array, totals: str, t: Array, code: str, ranks: bool) -> None:
    """Refuse totals without requests, at their first place in the pair's common shape."""
    if isinstance(r, Tracer) or isinstance(t, Tracer) or not r.size or not t.size:
        return
    r, t = _narrow(r), _narrow(t)
    if not t.any() or r.all():
        return
    offset = 0  # blockwise: masks of 10**8 queries would be larger than the work itself
    blocks = np.nditer([r, t], flags=["external_loop", "buffered"], order="C", buffersize=1 << 16)
    for few, some in blocks:
        bad = (few == 0) & (some > 0)
        if bad.any():
            both = np.broadcast_shapes(r.shape, t.shape)
            index = np.unravel_index(offset + int(bad.argmax()), both)
            shown = index if ranks else index[:-1]
            value = np.broadcast_to(t, both)[index]
            refuse(
                code,
                f"{_at(totals, shown)} is {value} while {requests} is 0",
                f"totals belong to requests: give {requests} of at least 1 there, or {totals} of 0",
            )
        offset += bad.size


def _broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    if isinstance(array, Tracer):
        return jax.numpy.broadcast_to(array, shape)
    return array if array.shape == shape else np.broadcast_to(array, shape)


def _pack(iterations: list[list[RankMetrics]], shape: tuple[int, ...], ranks: int) -> Work:
    """Parsed iterations as arrays [*shape, ranks], the missing ranks idle."""
    flat = list(chain.from_iterable(iterations))
    columns = dict(zip(RankMetrics._fields, zip(*flat, strict=True), strict=True)) if flat else {}
    sizes = np.fromiter(map(len, iterations), np.intp, len(iterations))
    filled = np.arange(ranks) < sizes[:, None]

    def spread(values: Any, dtype: type, empty: int = 0) -> np.ndarray:
        """One entry (or row) per parsed rank, put where the rank stands."""
        values = np.asarray(values, dtype)
        out = np.full((*filled.shape, *values.shape[1:]), empty, dtype)
        out[filled] = values
        return out.reshape(*shape, ranks, *values.shape[1:])

    fields: dict[str, Array] = {name: spread(columns.get(name, ()), np.uint32) for name in COUNTS}
    fields |= {name: spread(columns.get(name, ()), np.float64) for name in VARIANCES}
    extend, past = (columns.get(name, ()) for name in ("extend_lengths", "past_kv_lengths"))
    if any(lengths is not None for lengths in extend):
        count = [-1 if lengths is None else len(lengths) for lengths in extend]
        width = max(0, *count)
        if (entries := filled.size * width) > MOST_LISTED:
            refuse(
                "lists_too_large",
                f"request lists are padded to the longest one: {filled.size:,} ranks of {width:,} requests make "
                f"{entries:,} entries, more than {MOST_LISTED:,}",
                "split the iterations, or leave both lists out: estimates from totals do not read them",
            )
        extend, past = (spread(_padded(lists, width), np.uint64) for lists in (extend, past))
        fields["lists"] = RequestLists(**{"extend": extend, "past": past, "count": spread(count, np.int32, empty=-1)})
    return Work(**fields)


def _padded(lists: Sequence[tuple[int, ...] | None], width: int) -> np.ndarray:
    """uint64 [lists, width], zeros after each list."""
    rows = np.zeros((len(lists), width), np.uint64)
    for row, lengths in zip(rows, lists, strict=True):
        if lengths:
            row[: len(lengths)] = lengths
    return rows
