"""Where a study comes from: the columns of a Parquet file, a CSV, an Arrow table or a data frame, not yet looked at."""

from __future__ import annotations

import gzip
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.errors import FpmError, first_line, refuse_option
from fpmjax.file_name import file_name
from fpmjax.metrics import show
from fpmjax.study.columns import BY_NAME

FILES = (".parquet", ".csv", ".csv.gz")
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # that are not read, but told


@dataclass(frozen=True, eq=False)
class Source:
    """What is to be read: columns of text (CSV) or of Arrow's types."""

    label: str
    table: pa.Table
    digest: str | None = None
    path: str | None = None
    content: bytes = b""
    """Of the file."""
    lines: np.ndarray | None = None
    text: bool = False


def place_of(lines: np.ndarray | None, row: int) -> str:
    return f"row {row + 1}" if lines is None else f"line {lines[row]} (row {row + 1})"


def open_source(source: Any) -> Source:
    if isinstance(source, pa.Table):
        return Source("the table", source)
    if hasattr(source, "__arrow_c_stream__"):
        try:
            return Source("the data frame", pa.table(source))
        except (pa.ArrowException, TypeError, ValueError) as error:
            hint = "a column of a data frame holds one type; mixed integers, floats and text are none"
            refuse_option("study_columns", f"the data frame is refused: {first_line(error)}", hint)
    path = file_name(source)
    if path is None or not path.lower().endswith(FILES):
        given = show(source) if isinstance(source, (str, os.PathLike)) else f"of type {type(source).__name__}"
        refuse_option("study_file", f"the study is {given}", "name a .parquet, .csv or .csv.gz file, or pass a table")
    label = os.path.basename(path)
    try:
        content = Path(path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if path.lower().endswith(".parquet"):
            import pyarrow.parquet as pq

            return Source(label, pq.ParquetFile(pa.BufferReader(content)).read(), digest, path, content)
        text = gzip.decompress(content) if path.lower().endswith(".gz") else content
        table, lines = read_csv(label, text)
    except FpmError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        refuse_option("study_file", f"{path} cannot be read: {reason}", f"a study ends in {', '.join(FILES)}")
    return Source(label, table, digest, path, content, lines, text=True)


def read_csv(label: str, content: bytes) -> tuple[pa.Table, np.ndarray | None]:
    """(dictionaries of text, the line of every row).  Blank lines are left out; fields stay as they stand."""
    import pyarrow.csv as pacsv

    if content.startswith(BYTE_ORDER_MARKS):
        refuse_option(
            "study_file", f"{label}, line 1 starts with a byte order mark (BOM)", "save it as UTF-8 without a BOM"
        )
    torn: list[tuple[int, int, int]] = []

    def tear(row: Any) -> str:
        torn.append((row.number, row.actual_columns, row.expected_columns))
        return "skip"

    parse = pacsv.ParseOptions(ignore_empty_lines=False, invalid_row_handler=tear, newlines_in_values=True)
    read = pacsv.ReadOptions(use_threads=False, block_size=1 << 24)
    with pacsv.open_csv(pa.BufferReader(content), read_options=read, parse_options=parse) as opened:
        names = opened.schema.names
    torn.clear()
    check_header(label, names)
    known = [name for name in names if name in BY_NAME]
    if not known:  # which is refused with the columns that are missing; include_columns=[] would read all of them
        return pa.table([pa.nulls(0)] * len(names), names=names), None
    convert = pacsv.ConvertOptions(
        column_types=dict.fromkeys(known, pa.dictionary(pa.int32(), pa.string())),
        include_columns=list(dict.fromkeys(known)),
        strings_can_be_null=False,
    )
    table = pacsv.read_csv(pa.BufferReader(content), read_options=read, parse_options=parse, convert_options=convert)
    if torn:
        line, got, wanted = torn[0]
        refuse_option(
            "study_rows",
            f"{label}, line {line} has {got} fields under {wanted} column names"
            + (f" (so have {len(torn) - 1:,} more lines)" if len(torn) > 1 else ""),
            "one field per column; quote text that holds commas",
        )
    if twice := [name for name in names if names.count(name) > 1]:
        refuse_option("study_columns", f"{label}: column {twice[0]!r} occurs twice", "keep one of them")
    blank = blank_rows(table)
    lines = np.arange(2, table.num_rows + 2)
    whole = content.count(b"\n") + (not content.endswith(b"\n")) == table.num_rows + 1
    for name in (name for name in names if name not in BY_NAME):
        table = table.append_column(name, pa.nulls(table.num_rows))
    if blank.any():
        table, lines = table.filter(pa.array(~blank)), lines[~blank]
    return table, lines if whole else None


def check_header(label: str, names: list[str]) -> None:
    """Refuse a file that is empty, or whose fields something else than commas separates."""
    if not any(name.strip() for name in names):
        refuse_option("study_file", f"{label}, line 1 names no columns", "the first line names the columns")
    for mark, word in DELIMITERS.items():
        if any(part.strip().lower() in BY_NAME for name in names if mark in name for part in name.split(mark)):
            refuse_option(
                "study_file",
                f"{label}, line 1: fields are separated by {word}, not by commas",
                "save it as CSV with commas, and with a point in decimal numbers",
            )


def blank_rows(table: pa.Table) -> np.ndarray:
    """bool [rows]: nothing in any column."""
    blank = np.ones(table.num_rows, bool)
    for column in table.columns:
        if not blank.any():
            break
        at = 0
        for chunk in column.chunks:
            words = np.array([word == "" for word in chunk.dictionary.to_pylist()] or [True], bool)
            blank[at : at + len(chunk)] &= words[chunk.indices.to_numpy()]
            at += len(chunk)
    return blank
