"""`fpmjax table build`: measurements in CSV or Parquet become a table artifact, or a report of every bad row."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from fpmjax.cli.arguments import UsageError, add_command
from fpmjax.cli.files import PARQUET, csv_header, csv_records, open_input, whole
from fpmjax.cli.output import note
from fpmjax.errors import FpmError, TableError
from fpmjax.tables.policy import POLICIES, SINGLE_SAMPLE

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = """\
ROWS holds one measured iteration per row under the table's column names.  Needed: workload_kind (prefill or decode),
batch_size, total_prefill_tokens (0 for decode), total_kv_read_tokens, latency_ms; totals are over the iteration.
Columns of the identity, such as tp, may differ from row to row and then make several cells.  Any other column is kept
in the table, and no reader looks at it.

ID is a JSON object with the identity that all rows share:
  {"model": "org/name", "system": "h200_sxm", "backend": "vllm", "backend_version": "0.20.1", "gemm_quant_mode":
   "bfloat16", "moe_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16", "comm_quant_mode": "half",
   "kv_cache_dtype": "bfloat16", "tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1}

Every bad row is reported by its line, and nothing is written then.
"""
EXAMPLES = """\
  fpmjax table build rows.csv --identity id.json -o my_table
  fpmjax table build rows.parquet --identity id.json -o my_table --policy vllm_native_ar_model_step_cuda_v1
"""


def add(commands: Any) -> None:
    about = "build makes a table of measurements; see `fpmjax table build --help`.\n"
    table = add_command(commands, "table", "make a table", run, about=about, examples=EXAMPLES)
    kinds = table.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = add_command(
        kinds, "build", "measurements in CSV or Parquet to a table", run, about=ABOUT, examples=EXAMPLES
    )
    parser.add_argument("rows", metavar="ROWS", help="CSV (UTF-8, first line names the columns) or Parquet; - is stdin")
    parser.add_argument("--identity", metavar="ID", required=True, help="JSON file with the identity of the deployment")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder for the pair of files")
    parser.add_argument(
        "--policy",
        choices=list(POLICIES),
        default=SINGLE_SAMPLE,
        metavar="POLICY",
        help=f"what the milliseconds are (default: {SINGLE_SAMPLE}); one of: {', '.join(POLICIES)}",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a table that is there (default: refuse)")


def run(args: argparse.Namespace) -> int:
    from fpmjax.tables.load import load_cells
    from fpmjax.tables.write import write_table

    identity = read_identity(args.identity)
    measured = Measurements(args.rows)
    bad = measured.faults(identity, args.policy)
    if bad:
        for number, text in bad:
            print(f"{measured.label}, {measured.place(number)}: {text}", file=sys.stderr)
        raise TableError(
            f"{len(bad):,} of {measured.size:,} rows are bad, nothing was written\nhint: mend or remove the rows above",
            code="rows",
        )
    try:
        path = write_table(
            args.output, measured.columns, identity=identity, policy=args.policy, overwrite=args.overwrite
        )
    except TableError as error:
        if error.code != "exists":
            raise
        raise UsageError(f"{str(error).splitlines()[0]}\nhint: --overwrite replaces the pair", code="exists") from None
    cells = load_cells(path)
    for text in cells.warnings:
        note(text)
    decode, prefill = (sum(len(getattr(c, phase)) for c in cells.values()) for phase in ("decode", "prefill"))
    print(f"wrote   {path}")
    print(f"rows    {decode:,} decode, {prefill:,} prefill; cells {len(cells)}")
    print(f"sha256  {cells.digest}")
    print(f"next    fpmjax inspect {args.output}")
    return 0


def read_identity(name: str) -> dict[str, Any]:
    """A JSON object; its fields are checked when the table is assembled."""
    with open_input(name) as (label, stream, _):
        data = whole(label, stream)
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{label} is not JSON: {error}\nhint: see `fpmjax table build --help` for the fields"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{label} is not a JSON object, but a {type(value).__name__}\nhint: it maps fields to values")
    for field, given in value.items():
        if isinstance(given, (list, dict, float)):
            raise UsageError(
                f"{label}: {field} is {str(given)[:60]}, but a field is text, a whole number, true or false"
            )
    return value


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
        from fpmjax.tables.rows import TYPES
        from fpmjax.tables.write import table_faults

        read = self.columns.select([name for name in self.columns.column_names if name in TYPES])
        try:
            broken = table_faults(read, identity=identity, policy=policy)
        except (
            FpmError
        ):  # a column is missing or an identity is wrong; the unreadable values are worth knowing all the same
            for row, text in self.unreadable.items():
                print(f"{self.label}, {self.place(row)}: {text}", file=sys.stderr)
            raise
        bad = {row: self._in_file(message) for row, _, message in broken} | self.unreadable
        return sorted(bad.items())

    def _in_file(self, message: str) -> str:
        """A rule's message with rows named as the file counts them."""
        message = re.sub(r"^FPM (?:median )?row \d+:? ", "", message)
        return re.sub(r"\brow (\d+)\b", lambda found: self.place(int(found[1])), message)

    def _read_csv(self, stream: BinaryIO) -> pa.Table:
        import pyarrow as pa

        from fpmjax.tables.rows import TYPES

        records = csv_records(self.label, stream)
        names = csv_header(self.label, records)
        readers = [reader(TYPES.get(name)) for name in names]
        values: list[list[Any]] = [[] for _ in names]
        self.lines = []
        for line, record in records:
            row = len(self.lines)
            self.lines.append(line)
            faults = []
            if len(record) != len(names):
                faults.append(f"{len(record)} fields under {len(names)} column names")
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
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise ValueError("not a whole number")
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
        return pq.read_table(pa.BufferReader(whole(label, stream)))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise UsageError(f"{label} is not a readable Parquet file: {str(error)[:200]}") from None
