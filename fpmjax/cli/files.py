"""Input files of the command: bytes from a path or stdin, gzip or not, and CSV with true line numbers."""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fpmjax.cli.arguments import UsageError
from fpmjax.cli.output import note

DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)  # what a gzip stream raises
GZIP, PARQUET, BOM = b"\x1f\x8b", b"PAR1", b"\xef\xbb\xbf"  # the first bytes of such files; a name proves nothing


class Piecewise(io.RawIOBase):
    """A gzip stream that hands out what it has before it complains about how it ends."""

    def __init__(self, unpacked: gzip.GzipFile):
        self.unpacked = unpacked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = self.unpacked.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_input(name: str) -> Iterator[tuple[str, BinaryIO, bytes]]:
    """(name for messages, stream, its first bytes) of a path, or of stdin for `-`; gzip is unpacked."""
    label = "stdin" if name == "-" else name
    with ExitStack() as opened:
        try:
            if not name:
                raise UsageError("the name of the input file is empty\nhint: name one file, or - for stdin")
            if name == "-" and sys.stdin is None:  # `<&-`
                raise UsageError("stdin is closed\nhint: name a file instead of -")
            if name != "-" and Path(name).is_dir():
                raise UsageError(f"{name} is a folder\nhint: name one file")
            raw = sys.stdin.buffer if name == "-" else opened.enter_context(Path(name).open("rb"))
        except ValueError as error:  # an embedded NUL
            raise UsageError(f"{name!r} is not a path: {error}") from None
        stream = opened.enter_context(io.BufferedReader(cast(io.RawIOBase, raw)))
        if stream.peek(2)[:2] == GZIP:
            unpacked = opened.enter_context(gzip.GzipFile(fileobj=stream))
            stream = opened.enter_context(io.BufferedReader(Piecewise(unpacked)))
        try:
            head = stream.peek(4)[:4]
        except DAMAGED as error:
            raise UsageError(f"{label} is not a readable gzip file: {error}") from None
        yield label, stream, head


def whole(label: str, stream: BinaryIO) -> bytes:
    """Everything that is left."""
    try:
        return stream.read()
    except DAMAGED as error:
        raise UsageError(f"{label} is not a readable gzip file: {error}") from None


def lines(label: str, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1, text) of every line that is not blank.

    A gzip file that breaks off, as the newest segment of a running engine does, ends with a note.
    """
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line
    except EOFError:
        note(f"{label} ends inside a gzip member; its {number} whole lines are used")
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{label} is damaged after line {number}: {error}") from None


def csv_records(label: str, stream: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """(line on which it begins, fields) of every record that is not blank; the header is the first.

    Lines are counted as an editor counts them, those inside quotes included.
    """
    begin = 1
    try:
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:  # CSV counts the line ends itself
            reader = csv.reader(text, strict=True)
            for record in reader:
                if any(field.strip() for field in record):
                    yield begin, record
                begin = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{label}, line {begin}: not CSV: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{label}, from line {begin}: not UTF-8 text: {error.reason}") from None
    except DAMAGED as error:
        raise UsageError(f"{label} is damaged after line {begin}: {error}") from None


def csv_table(label: str, stream: BinaryIO) -> tuple[list[str], Iterator[tuple[int, list[str] | None, int]]]:
    """The column names, and (line, fields under them, number of fields) of every record.

    The fields are None where their number does not fit the names.  Columns without a name, as a comma at the end of
    every line makes them, are left out where they are empty; a value in one of them is an error.
    """
    records = csv_records(label, stream)
    header = csv_header(label, records)
    return [name for name in header if name], named_fields(label, header, records)


def named_fields(
    label: str, header: list[str], records: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str] | None, int]]:
    named = [i for i, name in enumerate(header) if name]
    surplus = False
    for line, record in records:
        nameless = [i for i in range(len(record)) if i >= len(header) or not header[i]]
        filled = next((i for i in nameless if record[i].strip()), None)
        if filled is not None and filled < len(header):
            raise UsageError(
                f"{label}, line {line}: field {filled + 1} is {record[filled].strip()[:40]!r}, but its column has no "
                "name\nhint: name every column in the first line, or remove the column"
            )
        fits = filled is None and len(record) > named[-1]
        surplus |= fits and bool(nameless)
        yield line, [record[i] for i in named] if fits else None, len(record)
    if surplus:
        note(f"{label}: fields without a column name are left out, all of them are empty")


def csv_header(label: str, records: Iterator[tuple[int, list[str]]]) -> list[str]:
    """The column names, "" where a column has none; an empty file and a repeated name are refused."""
    _, names = next(records, (1, []))
    names = [name.strip() for name in names]
    if not names:
        raise UsageError(f"{label} is empty\nhint: its first line names the columns")
    for mark, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and mark in names[0]:
            raise UsageError(
                f"{label}, line 1: one column, {names[0][:40]!r}; fields seem to be separated by {word}\n"
                "hint: separate them with commas, with a point in decimal numbers"
            )
    refuse_repeated(f"{label}, line 1", [name for name in names if name])
    return names


def refuse_repeated(where: str, names: list[str]) -> None:
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"{where}: column {twice[0]!r} occurs {names.count(twice[0])} times")
