"""`fpmjax table build`: measurements in CSV or Parquet become a table artifact, or a report of every bad row."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from fpmjax import strict_json
from fpmjax.cli.arguments import U32_MAX, UsageError, add_command
from fpmjax.cli.files import open_input, whole
from fpmjax.cli.measurements import Measurements
from fpmjax.cli.output import note
from fpmjax.errors import TableError
from fpmjax.tables.identity import DATABASE, FIELDS, FLAGS, SIZES, Identity, no_such_field, shorten
from fpmjax.tables.policy import POLICIES, SINGLE_SAMPLE

ABOUT = """\
ROWS holds one measured iteration per row under the table's column names.  Needed: workload_kind (prefill or decode),
batch_size, total_prefill_tokens (0 for decode), total_kv_read_tokens, latency_ms; totals are over the iteration.
Columns of the identity, such as tp, may differ from row to row and then make several cells.  Any other column is kept
in the table, and no reader looks at it.

ID is a JSON object with the identity that all rows share:
  {"model": "org/name", "system": "h200_sxm", "backend": "vllm", "backend_version": "0.20.1", "gemm_quant_mode":
   "bfloat16", "moe_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16", "comm_quant_mode": "half",
   "kv_cache_dtype": "bfloat16", "tp": 1, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1}

FILE of --sidecar is a JSON object with more fields of the sidecar, for example what the clock of the measurements is:
  {"timing_boundary": "schedule_to_update"}

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
    parser.add_argument("--sidecar", metavar="FILE", help="JSON file with more fields of the sidecar (default: none)")
    parser.add_argument("--overwrite", action="store_true", help="replace a table that is there (default: refuse)")


def run(args: argparse.Namespace) -> int:
    from fpmjax.tables.load import load_cells
    from fpmjax.tables.write import write_table

    if not args.output:
        raise UsageError("--output is empty\nhint: name a folder; . is the current one")
    identity = read_identity(args.identity)
    sidecar = read_object(args.sidecar)[1] if args.sidecar else None
    measured = Measurements(args.rows)
    require_fields(args.identity, identity, measured)
    bad = measured.faults(identity, args.policy)
    if bad:
        measured.tell(bad)
        raise TableError(
            f"{len(bad):,} of {measured.size:,} rows are bad, nothing was written\nhint: mend or remove the rows above",
            code="rows",
        )
    try:
        path = write_table(
            args.output,
            measured.columns,
            identity=identity,
            policy=args.policy,
            sidecar=sidecar,
            overwrite=args.overwrite,
        )
    except TableError as error:
        if error.code == "exists":
            text = f"{str(error).splitlines()[0]}\nhint: --overwrite replaces the pair"
            raise UsageError(text, code="exists") from None
        raise UsageError(f"{args.sidecar}: {error}") from None if error.code == "sidecar_conflict" else error
    cells = load_cells(path)
    for text in cells.warnings:
        note(text)
    decode, prefill = (sum(len(getattr(c, phase)) for c in cells.values()) for phase in ("decode", "prefill"))
    print(f"wrote   {path}")
    print(f"rows    {decode:,} decode, {prefill:,} prefill; cells {len(cells)}")
    print(f"sha256  {cells.digest}")
    print(f"next    fpmjax inspect {args.output}")
    return 0


def read_object(name: str) -> tuple[str, dict[str, Any]]:
    """(name for messages, fields) of a file that holds one JSON object."""
    with open_input(name) as (label, stream, _):
        data = whole(label, stream)
    try:
        value = strict_json.decode(data.decode("utf-8-sig"))
    except ValueError as error:
        raise UsageError(
            f"{label} is not JSON: {error}\nhint: see `fpmjax table build --help` for the fields"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{label} is not a JSON object, but a {type(value).__name__}\nhint: it maps fields to values")
    return label, value


def read_identity(name: str) -> dict[str, Any]:
    """The identity in a file, every field known and of its type."""
    label, fields = read_object(name)
    for field, value in fields.items():
        known = "model" if field == "model_path" else field
        if known not in FIELDS:
            raise UsageError(f"{label}: {no_such_field(field)}", code="identity")
        wanted, good = expected(known)
        if not good(value):
            raise UsageError(
                f"{label}: {field} is {shorten(json.dumps(value))[1:-1]}, but it is {wanted}\n"
                "hint: see `fpmjax table build --help` for an example",
                code="identity",
            )
    return fields


def expected(field: str) -> tuple[str, Callable[[Any], bool]]:
    """What a field of the identity has to be: in words, and as a test."""
    if field in FLAGS:
        return "true or false", lambda value: isinstance(value, bool)
    if field in (*SIZES, "dcp"):
        return (
            f"a whole number from 0 to {U32_MAX}, or null",
            lambda value: value is None or (type(value) is int and 0 <= value <= U32_MAX),
        )
    if field in DATABASE:
        return "text that is not empty", lambda value: isinstance(value, str) and bool(value)
    return "text, or null", lambda value: isinstance(value, str | None)


def require_fields(name: str, identity: dict[str, Any], measured: Measurements) -> None:
    """Raise where neither the identity nor a column says what a deployment must say."""
    given = {"model" if field == "model_path" else field for field in (*identity, *measured.columns.column_names)}
    needed = [f.name for f in dataclasses.fields(Identity) if f.default is dataclasses.MISSING]
    if lacking := [field for field in needed if field not in given]:
        raise UsageError(
            f"{name} lacks {', '.join(lacking)}, and {measured.label} has no such column\n"
            "hint: see `fpmjax table build --help` for a whole identity",
            code="identity",
        )
