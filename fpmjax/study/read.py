"""Reads a calibration study: Parquet, CSV with or without a sidecar, an Arrow table or a data frame."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax import strict_json
from fpmjax.errors import FpmError, refuse_option
from fpmjax.metrics import show
from fpmjax.study.columns import BY_NAME, COLUMNS, PRIMARY_KEY
from fpmjax.study.findings import Findings
from fpmjax.study.rules import check_engines, check_rows, missing_hint
from fpmjax.study.values import Values, absent, textual, typed

FILES = (".parquet", ".csv", ".csv.gz")
SIDECAR_VERSION = 1
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
MISSPELT = 0.85  # likeness from which a column that is not known is taken for one that is missing


@dataclass(frozen=True, eq=False)
class Study:
    """Measured rounds, checked, in the order of the file."""

    columns: Mapping[str, np.ndarray]
    """Every column of `fpmjax.study.columns`, [rows]: counts int64, numbers float64, flags int8, text int32 codes into
    `words`.  Where an optional column says nothing: -1, NaN, or the word ""."""
    words: Mapping[str, tuple[str, ...]]
    """The distinct texts of each text column, sorted, so that codes are ordered as their texts are."""
    digest: str
    """sha256 of the file's bytes; of the content, in any order of rows, for a table in memory."""
    label: str
    """The file's name, or `the table`."""
    path: str | None = None
    sidecar: Mapping[str, Any] = field(default_factory=dict)
    lines: np.ndarray | None = None
    """int64 [rows], the line of every row in a CSV."""
    anchors: bool = False
    """Read with `anchors=True`: `total_kv_tokens` and `initial_context` may be -1."""

    @property
    def rows(self) -> int:
        return len(self.columns["latency_ms"])

    @cached_property
    def sd(self) -> np.ndarray:
        """bool [rows], speculative rounds."""
        return self.text("kind") == "sd"

    def text(self, name: str) -> np.ndarray:
        """object [rows], the texts of a text column."""
        return np.array(self.words[name], object)[self.columns[name]]

    def place(self, row: int) -> str:
        """How the user finds a row: counted from 1, and by its line in a CSV."""
        return place_of(self.lines, row)

    def table(self) -> pa.Table:
        """The study as an Arrow table, rows in order; optional columns that say nothing are left out."""
        arrays: dict[str, pa.Array] = {}
        for column in COLUMNS:
            values = self.columns[column.name]
            if column.kind == "text":
                silent = np.array([not word for word in self.words[column.name]], bool)[values]
                coded = pa.DictionaryArray.from_arrays(pa.array(values, mask=silent), list(self.words[column.name]))
                found: Any = coded.cast(pa.string())
            else:
                silent = np.isnan(values) if column.kind == "number" else values < 0
                found = pa.array(values != 0 if column.kind == "flag" else values, mask=silent)
            if column.required or not silent.all():
                arrays[column.name] = found
        return pa.table(arrays)

    def content(self) -> str:
        """sha256 of what the study says, whatever the order of its rows and the format of its file."""
        order = np.lexsort([self.columns[name] for name in reversed(PRIMARY_KEY)])
        found = hashlib.sha256()
        for column in COLUMNS:
            values = self.columns[column.name]
            wide = values.astype("<f8" if column.kind == "number" else "<i8")
            words = self.words.get(column.name, ())
            found.update(json.dumps([column.name, words]).encode() + wide[order].tobytes())
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class Source:
    """What is to be read: columns of text (CSV) or of Arrow's types."""

    label: str
    table: pa.Table
    digest: str | None = None
    path: str | None = None
    lines: np.ndarray | None = None
    text: bool = False


def read_study(source: Any, *, sidecar: str | os.PathLike[str] | None = None, anchors: bool = False) -> Study:
    """Load and check a study; nothing is converted, averaged or dropped.

    source: name of a `.parquet`, `.csv` or `.csv.gz` file, a pyarrow Table, or a data frame (pandas, polars).
    sidecar: JSON beside the file, by default the file's name ending in `.json` where there is one.  Its `sha256` and
      its `rows` by kind must be the file's.
    anchors: accept rows without `total_kv_tokens` and `initial_context`, as public step times are published; both read
      -1.  Rows without KV are scored with the reference `interpolated_batch` only.

    Raises OptionError: `study_file` (cannot be read), `study_columns` (missing, twice, of another type), `study_rows`
    (rows that break a rule, each named), `study_mixed` (two clocks, two engines), `study_sidecar`.
    """
    read = open_source(source)
    label = read.label
    columns = read_columns(read)
    if not read.table.num_rows:
        refuse_option("study_rows", f"{label} has no rows", "give one row per measured round")

    def place(row: int) -> str:
        return place_of(read.lines, row)

    findings = Findings(label, read.table.num_rows, place)
    check_rows(columns, findings, anchors=anchors)
    findings.refuse()
    check_engines(label, columns, place)
    study = Study(
        columns={name: values.array for name, values in columns.items()},
        words={name: values.words for name, values in columns.items() if values.words},
        digest=read.digest or "",
        label=label,
        path=read.path,
        lines=read.lines,
        anchors=anchors,
    )
    study = study if read.digest else replace(study, digest=study.content())
    return replace(study, sidecar=read_sidecar(study, sidecar))


def place_of(lines: np.ndarray | None, row: int) -> str:
    return f"row {row + 1}" if lines is None else f"line {lines[row]} (row {row + 1})"


# --- columns -----------------------------------------------------------------------------------------------


def read_columns(read: Source) -> dict[str, Values]:
    """Every column of the schema; those that are missing or of another type are refused together."""
    have = read.table.column_names
    if twice := sorted({name for name in have if have.count(name) > 1}):
        refuse_option("study_columns", f"{read.label}: column {twice[0]!r} occurs twice", "keep one of them")
    missing = [column for column in COLUMNS if column.name not in have]
    unknown = [name for name in have if name not in BY_NAME]
    for column in missing:
        close = difflib.get_close_matches(column.name, unknown, 1, MISSPELT)
        if close:
            refuse_option(
                "study_columns", f"{read.label}: column {close[0]!r} is unknown", f"did you mean {column.name}?"
            )
    if names := [column.name for column in missing if column.required]:
        hint = missing_hint(names[0])
        close = difflib.get_close_matches(names[0], unknown, 1, 0.5)
        hint += f" (the file has {close[0]!r}, which is something else or misnamed)" if close else ""
        refuse_option("study_columns", f"{read.label} lacks the column{'s'[: len(names) > 1]} {', '.join(names)}", hint)
    columns: dict[str, Values] = {}
    faults: list[str] = []
    for column in COLUMNS:
        if column.name not in have:
            columns[column.name] = absent(column, read.table.num_rows)
            continue
        try:
            columns[column.name] = (textual if read.text else typed)(column, read.table.column(column.name))
        except TypeError as error:
            faults.append(str(error))
        except (UnicodeDecodeError, pa.ArrowException):
            faults.append(f"{column.name} holds bytes that are no UTF-8")
    if faults:
        refuse_option(
            "study_columns",
            f"{read.label}: {'; '.join(faults)}",
            "counts are integers, not floats, booleans or text; a data frame's nulls make floats of them",
        )
    return columns


# --- sources -----------------------------------------------------------------------------------------------


def open_source(source: Any) -> Source:
    if isinstance(source, pa.Table):
        return Source("the table", source)
    if hasattr(source, "__arrow_c_stream__"):
        try:
            return Source("the data frame", pa.table(source))
        except (pa.ArrowException, TypeError, ValueError) as error:
            hint = "a column of a data frame holds one type; mixed integers, floats and text are none"
            refuse_option("study_columns", f"the data frame is refused: {first_line(error)}", hint)
    try:
        path = os.fspath(source)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path.lower().endswith(FILES):
        given = show(path) if isinstance(path, str) else f"of type {type(source).__name__}"
        refuse_option("study_file", f"the study is {given}", "name a .parquet, .csv or .csv.gz file, or pass a table")
    label = os.path.basename(path)
    try:
        content = Path(path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if path.lower().endswith(".parquet"):
            import pyarrow.parquet as pq

            return Source(label, pq.ParquetFile(pa.BufferReader(content)).read(), digest, path)
        text = gzip.decompress(content) if path.lower().endswith(".gz") else content
        table, lines = read_csv(label, text)
    except FpmError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        refuse_option("study_file", f"{path} cannot be read: {reason}", f"a study ends in {', '.join(FILES)}")
    return Source(label, table, digest, path, lines, text=True)


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
    known = [name for name in names if name in BY_NAME]
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


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


# --- the sidecar -------------------------------------------------------------------------------------------


def read_sidecar(study: Study, name: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The JSON beside a study, which has to describe this file and no other."""
    if name is None:
        if study.path is None:
            return {}
        stem = next(
            study.path[: -len(end)] for end in (".csv.gz", ".csv", ".parquet") if study.path.lower().endswith(end)
        )
        if not os.path.exists(name := f"{stem}.json"):
            return {}
    label = os.path.basename(os.fspath(name))
    try:
        note = strict_json.decode(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        refuse_option("study_sidecar", f"{label} cannot be read: {reason}", "the sidecar is a JSON object")
    if not isinstance(note, dict):
        refuse_option("study_sidecar", f"{label} holds {type(note).__name__}", "the sidecar is a JSON object")
    if note.get("schema_version", SIDECAR_VERSION) != SIDECAR_VERSION:
        version = show(note["schema_version"])
        refuse_option("study_sidecar", f"{label} has schema_version {version}", f"this package reads {SIDECAR_VERSION}")
    if note.get("sha256", study.digest) != study.digest:
        refuse_option(
            "study_sidecar",
            f"{label} describes a file of sha256 {show(note['sha256'])}, but {study.label} has {study.digest}",
            "the table was changed after its sidecar was written: write the sidecar again",
        )
    counts = {"sd": int(study.sd.sum()), "stp": int((~study.sd).sum())}
    said = note.get("rows", {})
    if not isinstance(said, dict) or any(said.get(kind, n) != n for kind, n in counts.items()):
        refuse_option(
            "study_sidecar", f"{label} counts rows {show(said)}, but {study.label} has {counts}", "count again"
        )
    return note
