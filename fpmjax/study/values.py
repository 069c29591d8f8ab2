"""One column of a calibration file as NumPy: from Arrow's types, or from the text of a CSV field.

Nothing is converted that could be meant otherwise: `1,024`, `4.0` and `true` are no counts, `NaN` is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from fpmjax.metrics import show
from fpmjax.study.columns import EXACT, Column

pc: Any = pyarrow.compute  # it makes its functions at run time, where no type checker finds them

# What a CSV field may be.
COUNT = r"^-?[0-9]{1,18}$"
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?$"
FLAG = r"^(?i:true|false)$"
WANTED = {"count": "a whole number", "number": "a number", "flag": "true or false", "text": "text"}


@dataclass(frozen=True, eq=False)
class Values:
    """n values; text is int32 codes into sorted `words`, a flag is int8.  Where nothing is said: -1, NaN or ""."""

    array: np.ndarray
    null: np.ndarray
    """bool [n]"""
    words: tuple[str, ...] = ()
    wrong: np.ndarray | None = None
    """bool [n] where a CSV field is not what the column holds."""
    say: Callable[[int], str] = show


def absent(column: Column, rows: int) -> Values:
    """An optional column that the file lacks."""
    null = np.ones(rows, bool)
    if column.kind == "text":
        return Values(np.zeros(rows, np.int32), null, ("",))
    dtype, fill = {"number": (np.float64, np.nan), "flag": (np.int8, -1)}.get(column.kind, (np.int64, -1))
    return Values(np.full(rows, fill, dtype), null)


def typed(column: Column, found: pa.ChunkedArray) -> Values:
    """A column of an Arrow table.  TypeError, with the reason, where its type cannot hold what the column means."""
    kind = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
    if pa.types.is_null(kind):
        return absent(column, len(found))
    if not _holds(column.kind, kind):
        row = next((i for i, value in enumerate(found[:1000].to_pylist()) if value is not None), 0)
        raise TypeError(
            f"{column.name} has type {kind} and not {WANTED[column.kind]} (row {row + 1} holds {_at(found, row)})"
        )
    if pa.types.is_dictionary(found.type) and column.kind != "text":
        found = found.cast(kind)
    if column.kind == "text":
        found = found.cast(pa.large_string())
        return _coded(flat(found.dictionary_encode()), found.is_null().to_numpy())
    null = found.is_null().to_numpy()
    fill = {"number": np.nan, "flag": False}.get(column.kind, 0)
    array = found.fill_null(pa.scalar(fill, kind)).to_numpy() if found.null_count else found.to_numpy()
    if column.kind == "count":
        array = np.minimum(array, EXACT + 1).astype(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
    array = array.astype({"number": np.float64, "flag": np.int8}.get(column.kind, np.int64))
    if column.kind != "number" and null.any():
        array = np.where(null, array.dtype.type(-1), array)
    return Values(array, null)


def textual(column: Column, found: pa.ChunkedArray) -> Values:
    """A column of a CSV, dictionaries of its fields; each distinct field is looked at once."""
    fields = flat(found)
    blank = pc.equal(fields.dictionary, "").to_numpy(zero_copy_only=False)
    codes = fields.indices.to_numpy(zero_copy_only=False)
    if column.kind == "text":
        return _coded(fields, blank[codes])
    pattern = {"count": COUNT, "number": NUMBER}.get(column.kind, FLAG)
    right = pc.match_substring_regex(fields.dictionary, pattern)
    kind, filler = {"count": (pa.int64(), "-1"), "number": (pa.float64(), "0")}.get(column.kind, (pa.bool_(), "false"))
    kept = pc.if_else(right, fields.dictionary, filler)
    if column.kind == "flag":
        kept = pc.utf8_lower(kept)
    array = kept.cast(kind).to_numpy(zero_copy_only=False)
    array = array.astype(np.int8) if column.kind == "flag" else array.copy()
    array[blank] = -1 if column.kind != "number" else np.nan
    wrong = ~right.to_numpy(zero_copy_only=False) & ~blank
    return Values(
        array[codes],
        blank[codes],
        wrong=wrong[codes] if wrong.any() else None,
        say=lambda row: f"{show(fields.dictionary[int(codes[row])].as_py())} is not {WANTED[column.kind]}",
    )


def flat(found: pa.ChunkedArray) -> pa.DictionaryArray:
    """The chunks as one, with one dictionary."""
    whole = found.unify_dictionaries().combine_chunks()
    if not isinstance(whole, pa.ChunkedArray):
        return whole
    return whole.chunk(0) if whole.num_chunks else pa.array([], found.type)


def _coded(fields: pa.DictionaryArray, null: np.ndarray) -> Values:
    """Codes into the sorted distinct words that occur; a null reads ""."""
    codes = fields.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    found: list[str] = fields.dictionary.to_pylist() or [""]  # UnicodeDecodeError for other bytes
    used = np.bincount(codes[~null], minlength=len(found)) > 0
    words = sorted({word for word, here in zip(found, used, strict=True) if here} | ({""} if null.any() else set()))
    place = {word: i for i, word in enumerate(words)}
    code = np.array([place.get(word, 0) for word in found], np.int32)[codes]
    if null.any():
        code[null] = place[""]
    return Values(code, null, tuple(words))


def _holds(kind: str, found: pa.DataType) -> bool:
    if kind == "text":
        views = hasattr(pa.types, "is_string_view") and pa.types.is_string_view(found)
        return pa.types.is_string(found) or pa.types.is_large_string(found) or views
    if kind == "number":
        return pa.types.is_floating(found) or pa.types.is_integer(found)
    return pa.types.is_integer(found) if kind == "count" else pa.types.is_boolean(found)


def _at(found: pa.ChunkedArray, row: int) -> str:
    return show(found[row].as_py()) if len(found) else "nothing"
