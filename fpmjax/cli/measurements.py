"""Measurements in CSV or Parquet, as typed columns that remember where in their file each row stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from fpmjax.cli.arguments import UsageError
from fpmjax.cli.files import PARQUET, csv_table, open_input, refuse_repeated, whole
from fpmjax.cli.output import note, tell
from fpmjax.errors import FpmError, TableError

if TYPE_CHECKING:
    import pyarrow as pa


class Measurements:
    """Rows as typed columns, with the place of each row in its file and what could not be read."""

    def __init__(self, name: str):
        self.lines: list[int] | None = None  # of a CSV file; a Parquet file counts rows
        self.unreadable: dict[int, str] = {}
        with open_input(name) as (self.label, stream, head):
            self.columns = read_parquet(self.label, stream) if head == PARQUET else self._read_csv(stream)
        self.size = self.columns.num_rows
        if not self.size:
            raise UsageError(f"{self.label} holds no rows\nhint: one measured iteration per row")
        self._tell_unknown()

    def place(self, row: int) -> str:
        return f"row {row}" if self.lines is None else f"line {self.lines[row]}"

    def faults(self, identity: dict[str, Any], policy: str) -> list[tuple[int, str]]:
        """(row, why) of every bad row in file order: what cannot be read, or the first rule that it breaks."""
        import pyarrow as pa

        from fpmjax.tables.write import table_faults

        readable = [row for row in range(self.size) if row not in self.unreadable]
        try:
            broken = table_faults(self.columns.take(pa.array(readable, pa.int64())), identity=identity, policy=policy)
        except FpmError as error:  # of a column or of the identity; unreadable values are worth knowing all the same
            self.tell(list(self.unreadable.items()))
            raise TableError(f"{self.label}: {error}", code=error.code) from None
        bad = {readable[row]: self._in_file(message, readable) for row, _, message in broken} | self.unreadable
        return sorted(bad.items())

    def tell(self, bad: list[tuple[int, str]]) -> None:
        """Every bad row on stderr; one line where all rows are bad for the same reason."""
        if len(bad) == self.size > 1 and len({text for _, text in bad}) == 1:
            tell(f"{self.label}, every row: {bad[0][1]}")
            return
        for row, text in bad:
            tell(f"{self.label}, {self.place(row)}: {text}")

    def _in_file(self, message: str, readable: list[int]) -> str:
        """A rule's message with rows named as the file counts them, and about `the row` where nothing else is named."""
        message = re.sub(r"^FPM database contains a duplicate physical row key: row \d+ ", "the row ", message)
        message = re.sub(r"^FPM (?:median )?row \d+ (?=(?:has|is|cannot|collides) )", "the row ", message)
        message = re.sub(r"^FPM (?:median )?row \d+:? ", "", message)
        return re.sub(r"\brow (\d+)\b", lambda found: self.place(readable[int(found[1])]), message)

    def _read_csv(self, stream: BinaryIO) -> pa.Table:
        import pyarrow as pa

        from fpmjax.tables.rows import TYPES

        names, records = csv_table(self.label, stream)
        readers = [reader(TYPES.get(name)) for name in names]
        values: list[list[Any]] = [[] for _ in names]
        self.lines = []
        for line, record, width in records:
            row = len(self.lines)
            self.lines.append(line)
            faults = []
            if record is None:
                faults.append(f"{width} fields under {len(names)} column names")
                record = [""] * len(names)
            for column, name, read, text in zip(values, names, readers, record, strict=True):
                try:
                    column.append(read(text.strip()))
                except ValueError as error:
                    column.append(None)
                    faults.append(f"{name} is {text.strip()[:40]!r}, {error}")
            if faults:
                self.unreadable[row] = "; ".join(faults)
        arrays = [pa.array(column, TYPES.get(name, pa.string())) for column, name in zip(values, names, strict=True)]
        return pa.table(dict(zip(names, arrays, strict=True)))

    def _tell_unknown(self) -> None:
        from fpmjax.tables.rows import TYPES

        if unknown := [name for name in self.columns.column_names if name not in TYPES]:
            note(f"{self.label}: columns that are kept but never read: {', '.join(unknown)[:200]}")


def reader(wanted: pa.DataType | None) -> Callable[[str], Any]:
    """Text of a CSV field -> a value of a column's type; empty is null; ValueError says what is expected."""
    kind = str(wanted)
    if kind == "int64":
        return whole_number
    if kind == "double":
        return real
    if kind == "bool":
        return flag
    return str


def whole_number(text: str) -> int | None:
    if not text:
        return None
    if not re.fullmatch(r"-?\d+", text, re.ASCII):
        raise ValueError("not a whole number")
    if len(text.lstrip("-0")) > 19 or not -(2**63) <= int(text) < 2**63:
        raise ValueError("more than 64 bits can hold")
    return int(text)


def real(text: str) -> float | None:
    if not text:
        return None
    if "_" in text or not text.isascii():  # what Python reads as a number and other tools do not
        raise ValueError("not a number")
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def flag(text: str) -> bool | None:
    if not text:
        return None
    if text.lower() not in ("true", "false"):
        raise ValueError("neither true nor false")
    return text.lower() == "true"


def read_parquet(label: str, stream: BinaryIO) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(whole(label, stream)))
        refuse_repeated(label, file.schema_arrow.names)
        return file.read()
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise UsageError(f"{label} is not a readable Parquet file: {str(error)[:200]}") from None
