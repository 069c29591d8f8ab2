"""ForwardPassMetrics, version 1: the wire schema that engines publish, read into plain checked Python values.

One iteration is a list of rank dicts, one per attention-DP rank; a bare dict is one rank.  Three stages, each
over every rank before the next begins: JSON text (code `json`), types of the fields (`payload`, `u32`), meaning
(`schema_version` and the codes of `_check`).  Unknown keys are ignored, missing ones take their default, queued
requests are checked and never used.  Stricter than some producers' own readers: duplicate keys, NaN, Infinity
and positional sequences in place of a struct are refused; more lenient: NumPy and JAX integers in a dict count
as integers.  No field is ever cast from float, text or bool.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fpmjax import strict_json
from fpmjax.errors import MetricsError

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
FPM_VERSION = 1


class RankMetrics(NamedTuple):
    """Checked values of one rank: totals of the scheduled requests, and the wall time it reported."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_kv: int = 0
    decode_requests: int = 0
    decode_kv: int = 0
    prefill_length_var: float = 0.0  # tokens**2
    decode_kv_var: float = 0.0  # tokens**2
    extend_lengths: tuple[int, ...] | None = None  # tokens computed per request; None = not supplied
    past_kv_lengths: tuple[int, ...] | None = None
    wall_time: float = 0.0  # seconds, as on the wire; never read by an estimate


def parse_iteration(obj: Any) -> list[RankMetrics]:
    """The ranks of one iteration from JSON text (str or UTF-8 bytes), a rank dict, or a list of rank dicts.

    Raises MetricsError; the message names the rank and the field.  Codes: `json`, `payload` (a wrong type),
    `u32` (a count that is not an integer of 0..2**32-1), `schema_version`, `no_ranks`,
    `prefill_sums_without_requests`, `decode_kv_without_requests`, `lists_together`, `lists_length`.
    """
    if isinstance(obj, (str, bytes, bytearray)):
        obj = read_json(obj)
    if not isinstance(obj, (list, tuple)):
        obj = (obj,)
    elif not obj:
        refuse("no_ranks", "the iteration lists no ranks", "give one dict per attention-DP rank; {} is an idle rank")
    read = [_read(RANK, raw, [FPM_VERSION, 0.0, DEFAULTS, None], f"ranks[{i}]") for i, raw in enumerate(obj)]
    for i, (version, wall_time, rank, _) in enumerate(read):
        if version != FPM_VERSION:
            refuse(
                "schema_version",
                f"ranks[{i}].version is {version}, but this reader knows version {FPM_VERSION}",
                "convert the metrics to version 1, or leave `version` out",
            )
        _check(i, rank)
        if wall_time:
            read[i][2] = rank._replace(wall_time=wall_time)
    return [rank for _, _, rank, _ in read]


def refuse(code: str, message: str, hint: str) -> NoReturn:
    """Raise MetricsError with its hint line."""
    raise MetricsError(f"{message}\nhint: {hint}", code=code)


def show(value: object) -> str:
    """A short repr of anything, for messages."""
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print the longest ones
        return f"an integer of {value.bit_length()} bits"
    try:
        return reprlib.repr(value)
    except Exception:  # a foreign object with a broken repr, a list of integers that cannot be printed
        return f"some {type(value).__name__}"


def holds_masked(value: Any, depth: int = 64) -> bool:
    """Whether a NumPy array, or one inside (nested) lists, has masked entries; no array has more axes than `depth`."""
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(type(x) is not int and holds_masked(x, depth - 1) for x in value)
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def as_index(value: Any) -> int | None:
    """The integer that `value` is (int, NumPy or JAX 0-d integer, __index__); None for bools and all else."""
    if isinstance(value, (bool, np.bool_)) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None
    if holds_masked(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """The finite float that `value` is (Python, NumPy or JAX 0-d number); None for bools and all else."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    dtype = getattr(value, "dtype", None)
    if not real and not (getattr(dtype, "kind", "") in ("i", "u", "f") and getattr(value, "ndim", None) == 0):
        return None
    if holds_masked(value):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError):  # TypeError: a JAX tracer, which has no value yet
        return None
    return number if math.isfinite(number) else None


# --- JSON text ---------------------------------------------------------------------------------------------


def read_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text; MetricsError (`json`) for anything that is not strictly JSON."""
    try:
        return strict_json.decode(text)
    except ValueError as error:
        refuse(
            "json",
            f"the metrics are not JSON text: {error}",
            "pass one JSON object per rank, or a list of them; json.dumps(...) writes it",
        )


# --- fields ------------------------------------------------------------------------------------------------


def read_count(value: Any, where: str) -> int:
    number = as_index(value)
    if number is None or not 0 <= number <= U32_MAX:
        refuse(
            "u32",
            f"{where} is {show(value)} ({type(value).__name__}), but a count is an integer from 0 to {U32_MAX}",
            "publish whole numbers; floats, text and booleans are never converted",
        )
    return number


def _integer(limit: int) -> Callable[[Any, str], int]:
    def read(value: Any, where: str) -> int:
        number = as_index(value)
        if number is None or not 0 <= number <= limit:
            refuse(
                "payload",
                f"{where} is {show(value)} ({type(value).__name__}), but it is an integer from 0 to {limit}",
                "leave the field out to take its default",
            )
        return number

    return read


def _number(value: Any, where: str) -> float:
    number = as_float(value)
    if number is None:
        refuse(
            "payload",
            f"{where} is {show(value)} ({type(value).__name__}), but it is a finite number",
            "leave the field out to take 0.0",
        )
    return number


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        refuse(
            "payload",
            f"{where} is {show(value)} ({type(value).__name__}), but it is text",
            "leave the field out, or pass a string",
        )
    return value


def _lengths(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.ndim:
        value = list(value)
    if not isinstance(value, (list, tuple)):
        refuse(
            "payload",
            f"{where} is {show(value)} ({type(value).__name__}), but it is a list of token counts",
            "give one integer per scheduled request, or leave both lists out",
        )
    if all(type(n) is int and 0 <= n <= U64_MAX for n in value):
        return tuple(value)
    return tuple(_length(n, f"{where}[{i}]") for i, n in enumerate(value))


def _read(fields: Mapping[str, Field], raw: Any, values: list[Any], where: str) -> list[Any]:
    """`values`, with what `raw` gives put into its slots."""
    if type(raw) is not dict and not isinstance(raw, Mapping):
        refuse(
            "payload",
            f"{where} is {show(raw)} ({type(raw).__name__}), but it is an object of named fields",
            "one rank is a dict, one iteration a dict or a list of dicts; many iterations go to Work.from_iterations",
        )
    for key, value in raw.items():
        field = fields.get(key)
        if field is None:
            if not isinstance(key, str):
                refuse(
                    "payload",
                    f"{where} has the key {show(key)} ({type(key).__name__}), but keys are text",
                    "use the field names of ForwardPassMetrics",
                )
            continue
        slot, convert, limit = field
        if type(value) is not int or not 0 <= value <= limit:
            value = convert(value, f"{where}.{key}")
        values[slot] = value
    return values


def _scheduled(raw: Any, where: str) -> RankMetrics:
    return RankMetrics._make(_read(SCHEDULED, raw, [0, 0, 0, 0, 0, 0.0, 0.0, None, None, 0.0], where))


def _queued(raw: Any, where: str) -> None:
    _read(QUEUED, raw, [None], where)


class Field(NamedTuple):
    """Where a field's value goes, who reads it, and up to which int it needs no reading at all (-1: always)."""

    slot: int
    read: Callable[[Any, str], Any]
    limit: int = -1


DEFAULTS = RankMetrics()
UNUSED = -1  # the last slot: checked, then forgotten
_length = _integer(U64_MAX)

SCHEDULED: Mapping[str, Field] = {
    "num_prefill_requests": Field(0, read_count, U32_MAX),
    "sum_prefill_tokens": Field(1, read_count, U32_MAX),
    "sum_prefill_kv_tokens": Field(2, read_count, U32_MAX),
    "num_decode_requests": Field(3, read_count, U32_MAX),
    "sum_decode_kv_tokens": Field(4, read_count, U32_MAX),
    "var_prefill_length": Field(5, _number),
    "var_decode_kv_tokens": Field(6, _number),
    "extend_lengths": Field(7, _lengths),
    "past_kv_lengths": Field(8, _lengths),
}
QUEUED: Mapping[str, Field] = {
    "num_prefill_requests": Field(UNUSED, read_count, U32_MAX),
    "sum_prefill_tokens": Field(UNUSED, read_count, U32_MAX),
    "var_prefill_length": Field(UNUSED, _number),
    "num_decode_requests": Field(UNUSED, read_count, U32_MAX),
    "sum_decode_kv_tokens": Field(UNUSED, read_count, U32_MAX),
    "var_decode_kv_tokens": Field(UNUSED, _number),
}
RANK: Mapping[str, Field] = {
    "version": Field(0, _integer(U32_MAX), U32_MAX),
    "worker_id": Field(UNUSED, _text),
    "dp_rank": Field(UNUSED, _integer(U32_MAX), U32_MAX),
    "counter_id": Field(UNUSED, _integer(U64_MAX), U64_MAX),
    "wall_time": Field(1, _number),
    "scheduled_requests": Field(2, _scheduled),
    "queued_requests": Field(UNUSED, _queued),
}


# --- meaning -----------------------------------------------------------------------------------------------


def _check(i: int, rank: RankMetrics) -> None:
    """Refuse what no scheduler can have meant; list sums, list values and the other ranks are not compared."""
    where = f"ranks[{i}].scheduled_requests"
    if not rank.prefill_requests and (rank.prefill_tokens or rank.prefill_kv):
        name, total = (
            ("sum_prefill_tokens", rank.prefill_tokens)
            if rank.prefill_tokens
            else ("sum_prefill_kv_tokens", rank.prefill_kv)
        )
        refuse(
            "prefill_sums_without_requests",
            f"{where}.{name} is {total} while num_prefill_requests is 0",
            "count the requests behind the tokens in num_prefill_requests",
        )
    if not rank.decode_requests and rank.decode_kv:
        refuse(
            "decode_kv_without_requests",
            f"{where}.sum_decode_kv_tokens is {rank.decode_kv} while num_decode_requests is 0",
            "count the requests behind the KV tokens in num_decode_requests",
        )
    extend, past = rank.extend_lengths, rank.past_kv_lengths
    if extend is None and past is None:
        return
    if extend is None or past is None:
        given, absent = (
            ("past_kv_lengths", "extend_lengths") if extend is None else ("extend_lengths", "past_kv_lengths")
        )
        refuse(
            "lists_together",
            f"{where} has {given} without {absent}",
            "supply both lists, one entry per scheduled request, or neither",
        )
    requests = rank.prefill_requests + rank.decode_requests
    for name, lengths in (("extend_lengths", extend), ("past_kv_lengths", past)):
        if len(lengths) != requests:
            refuse(
                "lists_length",
                f"{where}.{name} has {len(lengths)} entries for {requests} scheduled requests",
                "list every prefill and decode request of the rank once, in both lists",
            )
