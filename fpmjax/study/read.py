"""Reads a calibration study: Parquet, CSV with or without a sidecar, an Arrow table or a data frame."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.errors import refuse_option
from fpmjax.metrics import show
from fpmjax.study.columns import BY_NAME, COLUMNS, PRIMARY_KEY
from fpmjax.study.findings import Findings
from fpmjax.study.rules import check_engines, check_rows, missing_hint
from fpmjax.study.sidecar import read_sidecar, sidecar_name
from fpmjax.study.source import Source, open_source, place_of
from fpmjax.study.values import Values, absent, textual, typed

IN_MEMORY = "study.parquet"  # name of a table's file in a folder
MISSPELT = 0.8  # likeness from which a column that is not known is taken for one that is missing


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
    ignored: tuple[str, ...] = ()
    """Columns of the file that no study has."""
    kept: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> the bytes that were read: the file, and its sidecar under the name that is found beside the file."""
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


def read_study(source: Any, *, sidecar: str | os.PathLike[str] | None = None, anchors: bool = False) -> Study:
    """Load and check a study; nothing is converted, averaged or dropped.

    source: name of a `.parquet`, `.csv` or `.csv.gz` file, a pyarrow Table, or a data frame (pandas, polars).
    sidecar: JSON beside the file, by default the file's name ending in `.json` where there is one.  Its `sha256` and
      its `rows` by kind must be the file's.
    anchors: accept rows without `total_kv_tokens` and `initial_context`, as public step times are published; both read
      -1.  Rows without KV are scored with the reference `interpolated_batch` only.

    Raises OptionError: `study_file` (cannot be read), `study_columns` (missing, twice, of another type), `study_rows`
    (rows that break a rule, each named), `study_mixed` (two clocks, two engines), `study_sidecar`, `study_anchors`.
    """
    if not isinstance(anchors, bool):
        refuse_option("study_anchors", f"anchors is {show(anchors)}", "True or False")
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
        ignored=tuple(name for name in read.table.column_names if name not in BY_NAME),
        anchors=anchors,
    )
    study = study if read.digest else replace(study, digest=study.content())
    note, content = read_sidecar(study, sidecar)
    kept = {label: read.content} if read.path else {}
    if content is not None:
        kept[sidecar_name(label if read.path else IN_MEMORY)] = content
    return replace(study, sidecar=note, kept=kept)


# --- columns -----------------------------------------------------------------------------------------------


def meant(name: str, missing: Sequence[str]) -> str | None:
    """The column that a name misspells: one in another case, or a missing one that is much like it or abbreviated."""
    plain = name.strip().lower().replace(" ", "_").replace("-", "_")
    if plain in BY_NAME:
        return plain
    for one in missing:
        if min(len(plain), len(one)) > 2 and (plain.startswith(one) or one.startswith(plain)):
            return one
    return next(iter(difflib.get_close_matches(plain, missing, 1, MISSPELT)), None)


def read_columns(read: Source) -> dict[str, Values]:
    """Every column of the schema; those that are missing or of another type are refused together."""
    have = read.table.column_names
    if twice := sorted({name for name in have if have.count(name) > 1}):
        refuse_option("study_columns", f"{read.label}: column {twice[0]!r} occurs twice", "keep one of them")
    missing = [column for column in COLUMNS if column.name not in have]
    unknown = [name for name in have if name not in BY_NAME]
    for name in unknown:
        if close := meant(name, [column.name for column in missing]):
            hint = f"did you mean {close}? What is something else has a name of its own"
            hint = f"column {close} is there too: keep one of them" if close in have else hint
            refuse_option("study_columns", f"{read.label}: column {show(name)} is unknown", hint)
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
