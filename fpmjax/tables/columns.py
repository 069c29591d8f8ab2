"""Typed columns of a table: Arrow in, NumPy out, with the faults kept as masks instead of raised.

Text is held as small integer codes into the list of its distinct values, so that a rule about text is
evaluated once per distinct value and then gathered over the rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.errors import TableError


@dataclass(frozen=True, eq=False)
class Column:
    """One column of n rows; values are codes for text, 0 or "" where the cell is null."""

    name: str
    values: np.ndarray
    null: np.ndarray
    """bool [n], True where the cell is null."""
    words: list[str] | None = None
    """Text only: the distinct values that the codes point at."""
    wanted: str = ""
    """The type that the column must have, in words."""
    fault: str | None = None
    """What makes every value of this column unusable, for example another type; None for a good column."""

    def where(self, predicate: Callable[[str], bool]) -> np.ndarray:
        """bool [n]: a predicate on text, called once per distinct value."""
        assert self.words is not None
        return np.array([predicate(word) for word in self.words], bool)[self.values]

    def equals(self, value: int | float | str | bool) -> np.ndarray:
        """bool [n]: equal to one value, never where the column is unusable; text that is null reads ""."""
        if self.fault:
            return np.zeros(len(self.values), bool)
        if self.words is not None:
            return self.where(lambda word: word == value)
        return (self.values == value) & ~self.null

    def at(self, row: int) -> Any:
        """The Python value in one row; None for a null that is not text."""
        if self.words is not None:
            return self.words[self.values[row]]
        return None if self.null[row] else self.values[row].item()

    def keys(self) -> np.ndarray:
        """int64 [n]: equal exactly where the values are equal; a null count is -1."""
        return np.where(self.null & (self.words is None), np.int64(-1), self.values.astype(np.int64))


def constant(name: str, value: str, rows: int) -> Column:
    """A text column that holds one value everywhere."""
    return Column(name, np.zeros(rows, np.int64), np.zeros(rows, bool), [value])


def absent(name: str, rows: int) -> Column:
    """What a column that the table lacks reads as: text that is null everywhere."""
    return Column(name, np.zeros(rows, np.int64), np.ones(rows, bool), [""])


def read(table: pa.Table, name: str, wanted: pa.DataType) -> Column:
    """A column of exactly the wanted type, where text may be any Arrow string type, dictionary included.

    Another type is the column's fault.  A null reads "", 0, NaN or False; a column of nulls has any type.
    """
    column = table.column(name)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    textual = pa.types.is_string(wanted)
    if not (pa.types.is_null(kind) or (is_text(kind) if textual else column.type.equals(wanted))):
        words = "a string column" if textual else type_name(wanted)
        return _unusable(table, name, words, type_name(column.type), textual)
    if textual:
        return _text(table, name)
    column = column.cast(wanted)
    filler = {"double": float("nan"), "bool": False}.get(str(wanted), 0)
    return Column(name, column.fill_null(filler).to_numpy(), column.is_null().to_numpy())


def _text(table: pa.Table, name: str) -> Column:
    encoded = table.column(name).cast(pa.large_string()).combine_chunks().dictionary_encode()
    try:
        words = encoded.dictionary.to_pylist()
    except UnicodeDecodeError:
        return _unusable(table, name, "UTF-8 text", "other bytes", True)
    null = encoded.indices.is_null().to_numpy(zero_copy_only=False)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if null.any():
        if "" not in words:
            words.append("")
        codes = np.where(null, words.index(""), codes)
    return Column(name, codes, null, words)


def _unusable(table: pa.Table, name: str, wanted: str, fault: str, textual: bool) -> Column:
    rows = table.num_rows
    return Column(name, np.zeros(rows, np.int64), np.ones(rows, bool), [""] if textual else None, wanted, fault)


def type_name(kind: pa.DataType) -> str:
    """An Arrow type under the name that NumPy and the specification give it."""
    return {"double": "float64", "float": "float32", "halffloat": "float16", "bool": "boolean"}.get(
        str(kind), str(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of the string types."""
    views = hasattr(pa.types, "is_string_view") and pa.types.is_string_view(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or views


def group(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows with equal keys get one number: (group of each row [n], first row of each group [g]).

    Groups are numbered in the order of their first rows.  Columns are integers [n].
    """
    key, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        if (column == column[0]).all():
            continue
        _, codes = np.unique(column, return_inverse=True)
        width = int(codes.max()) + 1
        if size * width >= 2**62:
            _, key = np.unique(key, return_inverse=True)
            size = int(key.max()) + 1
        key, size = key * width + codes, size * width
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return rank[inverse], np.sort(first)


def missing_column(name: str, have: list[str], label: str) -> TableError:
    """The error for a column that a table of this schema and policy must have."""
    close = difflib.get_close_matches(name, have, 1)
    hint = f"did you mean {close[0]!r} to be it?" if close else f"the file has {', '.join(have) or 'no columns'}"
    return TableError(f'parquet column "{name}" missing: {label}\nhint: {hint}', code="column_missing")
