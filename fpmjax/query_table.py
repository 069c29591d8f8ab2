"""Tables of queries: Parquet, CSV or Arrow, one iteration of one rank a row.

Columns are the axes of a grid (`decode_requests` with `decode_kv` or `kv_per_request`, `prefill_requests`,
`prefill_tokens` or `tokens_per_request`, `prefill_kv`, `draft_length`) or the names that observations and engines use
for them; requests and their tokens need each other.  A draft length of 0 or null is ordinary decoding.  Every other
column is carried through, from CSV as the text that stands there; one that is nearly called like an input that the
table lacks is refused, for nobody means that input to be 0 then.

Counts and draft lengths are integers, plain or as a dictionary, or floats that hold whole numbers below 2**53, as data
frames and CSV have them where a value is missing; NaN is such a missing one.

A row that cannot be asked is no reason to stop: it is kept, refused, and `fault` says what is wrong with it.  A field
of CSV that holds no count is null in its own column, and stands in `fault` as it was written.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.errors import first_line, refuse_option
from fpmjax.grid import AXES, DECODE, DRAFT, LARGEST, PREFILL
from fpmjax.metrics import U32_MAX, show
from fpmjax.observe.columns import CSV, NAMES
from fpmjax.query_source import Piece, phases_of, work_of
from fpmjax.result_columns import COLUMNS, FAULT, MODEL

# Name of a column -> the axis that it is.
MEANING = {name: axis for axis in AXES for name in NAMES.get(axis, (axis,))}
TAKEN = {*COLUMNS, MODEL, FAULT}
OTHERS = TAKEN.union(*NAMES.values()) - MEANING.keys()  # names with a meaning of their own
NEAR = 0.82  # how like a name has to be to be a misspelt one: `draft_len`, `kv_per_req`, but not `decode_kv_var`
SUMS = {"decode_kv": DECODE, "prefill_tokens": PREFILL, "prefill_kv": PREFILL}
RENAMED = "input_"  # before the name of a carried column that the result itself has
LARGEST_DRAFT = 2**63 - 1
EXACT = 2**53  # every integer below is a float64 of its own
MISSING = ("", "nan")  # fields of CSV, in small letters
COUNT = f"a count is a whole number from 0 to {U32_MAX}"
DRAFTS = f"a draft length is a whole number from 0 to {LARGEST[DRAFT]}"
HINT = f"name counts {', '.join(AXES)}"


@dataclass(frozen=True, eq=False)
class Rows:
    """A table in memory; places: the line of every row, or None where rows are counted from 0; faults: known ones."""

    table: pa.Table
    places: Sequence[int] | None = None
    faults: Mapping[int, str] = field(default_factory=dict)

    def place(self, row: int) -> str:
        return f"row {row}" if self.places is None else f"line {self.places[row]}"


class TableQueries:
    """The rows of a table of queries.

    source: name of a Parquet or CSV file (`.csv`, `.csv.gz`), or a pyarrow Table.  Parquet is read as it is asked, the
    others lie in memory.

    Raises OptionError: `file` (cannot be read), `columns` (none that says what is asked, one twice, or one that holds
    no whole numbers).
    """

    faulty = True

    def __init__(self, source: Any):
        self.label = "the table" if isinstance(source, pa.Table) else os.fspath(source)
        self.rows = self.file = None
        if isinstance(source, pa.Table):
            self.rows = Rows(source)
        elif self.label.lower().endswith(CSV):
            self.rows = read_csv(self.label)
        else:
            self.file = open_parquet(self.label)
        schema = self.rows.table.schema if self.rows else self.file.schema_arrow  # type: ignore[union-attr]
        self.size = self.rows.table.num_rows if self.rows else self.file.metadata.num_rows  # type: ignore[union-attr]
        self.columns = meanings(self.label, schema.names)
        for axis, name in self.columns.items():
            check_type(self.label, name, schema.field(name).type, axis)
        names = [self.renamed(name) for name in schema.names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            refuse_option("columns", f"{self.label}: column {twice!r} occurs twice in the result", "rename one of them")
        self.fields = [f.with_name(name).with_nullable(True) for f, name in zip(schema, names, strict=True)]
        self.phases = phases_of(self.columns)
        self.drafted = DRAFT in self.columns

    def renamed(self, name: str) -> str:
        return RENAMED + name if name in TAKEN else name

    def pieces(self, start: int, chunk: int) -> Iterator[Piece]:
        for begin, table in self.tables(start, chunk):
            yield self.piece(begin, table)

    def tables(self, start: int, chunk: int) -> Iterator[tuple[int, pa.Table]]:
        """(first row, rows) from `start` on."""
        if self.rows is not None:
            for begin in range(start, self.size, chunk):
                yield begin, self.rows.table.slice(begin, chunk)
            return
        begin = 0
        try:
            for batch in self.file.iter_batches(batch_size=chunk):  # type: ignore[union-attr]
                end = begin + batch.num_rows
                if end > start:
                    skip = max(0, start - begin)
                    yield begin + skip, pa.Table.from_batches([batch.slice(skip)])
                begin = end
        except (pa.ArrowException, OSError) as error:
            refuse_option(
                "file", f"{self.label} cannot be read beyond row {begin}: {first_line(error)}", "make it again"
            )

    def piece(self, begin: int, table: pa.Table) -> Piece:
        n = table.num_rows
        flat = {name: flattened(table.column(name)) for name in table.column_names}
        counts: dict[str, np.ndarray] = {}
        faults: dict[int, str] = {}
        if self.rows is not None:
            faults = {row - begin: text for row, text in self.rows.faults.items() if begin <= row < begin + n}
        place = self.rows.place if self.rows is not None else Rows(table).place
        bad = np.zeros(n, bool)
        bad[list(faults)] = True
        for axis, name in self.columns.items():
            counts[axis], wrong = counted(flat[name], axis)
            for i in np.flatnonzero(wrong & ~bad).tolist():
                faults[i] = f"{place(begin + i)}: {told(name, flat[name][i].as_py(), axis)}"
            bad |= wrong
        for axis, requests in SUMS.items():
            if axis not in counts:
                continue
            wrong = (counts[axis] > 0) & (counts[requests] == 0) & ~bad
            for i in np.flatnonzero(wrong).tolist():
                faults[i] = f"{place(begin + i)}: {self.columns[axis]} is {counts[axis][i]} without any {requests}"
            bad |= wrong
        depth = counts.pop(DRAFT, None)
        for wrong, why in () if depth is None else undrafted(depth, counts):  # asked, and refused with a status each
            for i in np.flatnonzero(wrong & ~bad).tolist():
                name = self.columns[DRAFT]
                faults[i] = f"{place(begin + i)}: {name} is {show(flat[name][i].as_py())}, but {why}"
        if bad.any():
            counts = {name: np.where(bad, 0, x) for name, x in counts.items()}
        work, over = work_of(counts, n)
        for i in () if over is None else np.flatnonzero(over).tolist():
            faults[i] = f"{place(begin + i)}: a total of tokens exceeds {U32_MAX}"
        refused = bad if over is None else bad | over
        inputs = {self.renamed(name): x for name, x in flat.items()}
        return Piece(inputs, work, depth, None, refused if refused.any() else None, faults)

    def digest(self) -> str:
        """Of the file as it stands, or of the columns of a table in memory."""
        found = hashlib.sha256()
        if self.file is not None:
            with open(self.label, "rb") as file:
                while data := file.read(1 << 22):
                    found.update(data)
        else:
            table = self.rows.table.replace_schema_metadata(None).combine_chunks()  # type: ignore[union-attr]
            with pa.BufferOutputStream() as sink:
                with pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table)
                found.update(sink.getvalue())
        return found.hexdigest()

    def about(self) -> dict[str, Any]:
        return {"queries": os.path.basename(self.label), "rows": self.size, "columns": dict(self.columns)}


def meanings(label: str, names: list[str]) -> dict[str, str]:
    """Axis -> the column that holds it."""
    found: dict[str, str] = {}
    for name in names:
        if (axis := MEANING.get(name.strip())) is None:
            continue
        if axis in found:
            refuse_option("columns", f"{label}: {found[axis]!r} and {name!r} are the same quantity", "keep one of them")
        found[axis] = name
    for axis in found:
        needs, others = AXES[axis]
        if found.keys().isdisjoint(needs) and axis != DRAFT:
            near = [f"is {name!r} meant as {like}?  rename it" for name in names if (like := resembled(name)) in needs]
            what = f"{label}: column {found[axis]!r} needs a column {' or '.join(needs)} beside it"
            refuse_option("columns", what, near[0] if near else HINT)
        for other in others:
            if other in found:
                refuse_option(
                    "columns", f"{label}: {found[axis]!r} and {found[other]!r} say one thing twice", "keep one"
                )
    if not found.keys() & {"decode_requests", "prefill_requests"}:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        refuse_option("columns", f"{label} has no column that says what is asked (found: {shown[:200]})", HINT)
    for name in names:
        like = resembled(name)
        if like is not None and found.keys().isdisjoint((like, *AXES[like][1])):
            what = f"{label}: column {show(name)} is no input, but looks like {like}, which is not there"
            refuse_option("columns", what, f"rename it to {like}, or, where it is something else, to another name")
    return found


def resembled(name: str) -> str | None:
    """The axis that a column is nearly called like; None where it is one, or has a meaning of its own."""
    plain = re.sub(r"[\W_]+", "_", name).strip("_").lower()
    if name.strip() in MEANING or plain in OTHERS:
        return None
    near = difflib.get_close_matches(plain, MEANING, 1, NEAR)
    return MEANING[near[0]] if near else None


def check_type(label: str, name: str, kind: pa.DataType, axis: str) -> None:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    number = pa.types.is_integer(plain) or pa.types.is_float32(plain) or pa.types.is_float64(plain)
    if not number and not (pa.types.is_null(kind) and axis == DRAFT):
        what = "one rank a row" if pa.types.is_nested(kind) else "whole numbers"
        refuse_option("columns", f"{label}: column {name} has type {kind}, but holds {what}", "cast it to int64")


def counted(column: pa.Array, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n], bool [n] where there is no count): 0 .. 2**32 - 1, or any draft length, which the rule judges."""
    drafts = axis == DRAFT
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.int64), np.zeros(len(column), bool)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else np.zeros(len(column), bool)
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    if values.dtype.kind != "f":
        return counted_whole(values, missing, drafts)
    nothing, whole = np.isnan(values), (np.abs(values) < EXACT) & (values == np.floor(values))
    counts, wrong = counted_whole(np.where(whole, values, 0).astype(np.int64), missing | nothing, drafts)
    return counts, wrong | ~(whole | nothing)


def counted_whole(values: np.ndarray, missing: np.ndarray, drafts: bool) -> tuple[np.ndarray, np.ndarray]:
    """`counted` of integers."""
    if drafts:
        wide = np.minimum(values, LARGEST_DRAFT).astype(np.int64) if values.dtype == np.uint64 else values
        return wide.astype(np.int64, copy=False), np.zeros(len(values), bool)
    if values.dtype in (np.uint8, np.uint16, np.uint32):
        return values.astype(np.int64), missing
    if not missing.any() and values.size and values.min() >= 0 and values.max() <= U32_MAX:
        return values.astype(np.int64, copy=False), missing
    wrong = missing | (values < 0) | (values > U32_MAX)
    return np.where(wrong, 0, values).astype(np.int64), wrong


def told(name: str, value: Any, axis: str) -> str:
    what = "empty" if value is None else show(value)
    return f"{name} is {what}, but {DRAFTS if axis == DRAFT else COUNT}"


def undrafted(depth: np.ndarray, counts: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, str]]:
    """(bool [n], why) of rows that can have no such draft length."""
    outside = (depth < 0) | (depth > LARGEST[DRAFT])
    fine = np.where(outside, 0, depth)
    yield outside, DRAFTS
    if PREFILL in counts:
        yield (fine > 0) & (counts[PREFILL] > 0), f"{PREFILL} is above 0, and a round is pure decode"
    if DECODE in counts:
        yield (fine > 0) & (counts[DECODE] > U32_MAX // (fine + 1)), f"that makes more than {U32_MAX} rows"


def flattened(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def open_parquet(label: str) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(label)
    except (pa.ArrowException, OSError, ValueError) as error:
        hint = "queries are a grid, a pyarrow Table, or a Parquet or .csv file"
        refuse_option("file", f"{label} cannot be read: {first_line(error)}", hint)


# CSV


def read_csv(label: str) -> Rows:
    """The file at once where every field is what it should be; otherwise line by line, to say where it is not."""
    for kind in (pa.int64(), pa.float64()):
        if (table := at_once(label, kind)) is not None:
            return Rows(table, range(2, table.num_rows + 2))  # the header is line 1
    return line_by_line(label)


def at_once(label: str, kind: pa.DataType) -> pa.Table | None:
    """The file, its counts read as numbers of this kind; None where a field is no count."""
    import pyarrow.csv as pacsv

    try:
        with pa.input_stream(label, compression="detect") as stream:
            names = pacsv.open_csv(stream).schema.names
        types = {name: kind if name.strip() in MEANING else pa.string() for name in names}
        options = pacsv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
        lines = pacsv.ParseOptions(ignore_empty_lines=False)  # they would shift the lines after them
        table = pacsv.read_csv(label, parse_options=lines, convert_options=options)
        table = table.rename_columns([name.strip() for name in names])
    except (pa.ArrowException, ValueError):
        return None
    except OSError as error:
        refuse_option(
            "file", f"{label} cannot be read: {error.strerror or error}", "queries are a Parquet or .csv file"
        )
    if len(set(table.column_names)) < len(table.column_names):
        return None
    for name in MEANING.keys() & {*table.column_names}:
        column = flattened(table.column(name))
        whole, wrong = counted(column, MEANING[name])
        if wrong.any():
            return None
        if kind != pa.int64():
            missing = column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
            table = table.set_column(table.column_names.index(name), name, pa.array(whole, mask=missing))
    return table


def line_by_line(label: str) -> Rows:
    places, records, faults = [], [], {}
    packed = label.lower().endswith(".gz")
    try:
        with (gzip.open if packed else open)(label, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(filter(None, reader), [])]
            begin = reader.line_num + 1
            for record in reader:
                blank = not record or (len(record) == 1 and record[0].isspace())
                if not blank:  # a row of separators only is one, though without counts
                    places.append(begin)
                    records.append(record)
                begin = reader.line_num + 1
    except (OSError, EOFError, csv.Error, ValueError) as error:  # ValueError: no UTF-8, or no name of a file
        refuse_option(
            "file", f"{label} cannot be read: {first_line(error)}", "queries are CSV in UTF-8, the first line names"
        )
    if twice := next((name for name in header if header.count(name) > 1), None):
        refuse_option("columns", f"{label}, line 1: column {twice!r} occurs twice", "rename one of them")
    for row, record in enumerate(records):
        if len(record) != len(header):
            faults[row] = f"line {places[row]}: {len(record)} fields under {len(header)} column names"
    columns = {}
    for i, name in enumerate(header):
        texts = [record[i] if i < len(record) else "" for record in records]
        if name not in MEANING:
            columns[name] = pa.array([text or None for text in texts], pa.string())
            continue
        numbers: list[int | None] = []
        for row, text in enumerate(map(str.strip, texts)):
            value = whole_number(text)
            numbers.append(value)
            if value is None and (text.lower() not in MISSING or MEANING[name] != DRAFT):
                faults.setdefault(row, f"line {places[row]}: {told(name, text or None, MEANING[name])}")
        columns[name] = pa.array(numbers, pa.int64())
    return Rows(pa.table(columns), places, faults)


def whole_number(text: str) -> int | None:
    """The integer that a field holds, be it written as 1024.0 or 1e3; None for everything else."""
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
        return None
    number = float(text)
    return int(number) if abs(number) < EXACT and number.is_integer() else None
