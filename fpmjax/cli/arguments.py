"""Arguments that several commands share: lists of counts, and the table with its cell."""

from __future__ import annotations

import argparse
import difflib
import gzip
import os
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from fpmjax.cli.output import note
from fpmjax.errors import CellNotFoundError, FpmError
from fpmjax.metrics import U32_MAX
from fpmjax.model_file import ends_of, is_model_file
from fpmjax.tables.policy import FAKE_KV_CHOICES

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell
    from fpmjax.tables.cells import Cells
    from fpmjax.tables.identity import Identity

UNEQUAL, BAD_INPUT, NOT_COVERED = 1, 2, 3  # exit codes beside 0
MOST_VALUES = 1_000_000  # in one list, and queries in one product: what a terminal or one JSON document can carry
EMBEDDED = "embedded"
ARTIFACT = b'"aic_fpm_learned_forward_perf"'  # what marks a learned artifact
INSIDE = f"`{EMBEDDED}`, which is the table inside this package"
LISTED = 8  # cells named when several match

LIST = """\
lists: 1,4,8 or ranges, both ends included: 1:64 (every one), 0:4096:512 (steps of 512), 512:65536:x2 (doubling)
"""


class UsageError(FpmError):
    """The command line or an input file cannot be understood."""

    default_code = "usage"


class Parser(argparse.ArgumentParser):
    """argparse that keeps the line breaks of its texts, takes no abbreviations and raises instead of exiting."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings, allow_abbrev=False)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse itself would be silent about help that cannot be written

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Every word is understood; of an unknown flag the nearest one of its own command is named."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            command = getattr(found, "parser", self)
            name = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
            close = difflib.get_close_matches(name, command._option_string_actions, 1)
            hint = f"\nhint: did you mean {close[0]}?" if close else ""
            command.error(f"unrecognized arguments: {' '.join(map(str, rest))}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        hint = "" if "\nhint: " in message else f"\nhint: see `{self.prog} --help`"
        raise UsageError(message + hint)


def add_command(commands: Any, name: str, summary: str, run: Callable[..., int], *, about: str = "", examples: str):
    """A subcommand's parser: `summary` in the list of commands, `about` and `examples` in its own help."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{about}",
        epilog=f"examples:\n{examples}",
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


# Counts


def counts(text: str) -> tuple[int, ...]:
    """Comma-separated counts and ranges (`LIST`), in the order given; an argparse type."""
    values: list[int] = []
    for part in text.split(","):
        span = expand(part.strip())
        if len(values) + len(span) > MOST_VALUES:
            raise argparse.ArgumentTypeError(f"{part!r} makes the list longer than {MOST_VALUES:,} values")
        values.extend(span)
    return tuple(values)


def expand(part: str) -> range | list[int]:
    """One count or one range."""
    found = re.fullmatch(r"(\d+)(?::(\d+)(?::(x?)(\d+))?)?", part, re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"{shorten(part)} is not a count or a range\nhint: {LIST.strip()}")
    begin, end, kind, step = found.groups()
    first = count(begin)
    if end is None:
        return [first]
    last, by = count(end), count(step or "1")
    if last < first:
        raise argparse.ArgumentTypeError(f"the range {part} ends before it begins")
    if not kind:
        if not by:
            raise argparse.ArgumentTypeError(f"the range {part} has a step of 0")
        return range(first, last + 1, by)
    if by < 2 or not first:
        raise argparse.ArgumentTypeError(f"the range {part} never ends: it needs a factor from 2 and a begin from 1")
    values = [first]
    while values[-1] * by <= last:
        values.append(values[-1] * by)
    return values


def count(digits: str) -> int:
    """One unsigned 32-bit count from ASCII digits."""
    significant = digits.lstrip("0")
    if len(significant) > 10 or int(significant or "0") > U32_MAX:
        raise argparse.ArgumentTypeError(f"{shorten(digits)} is out of range: counts go from 0 to {U32_MAX}")
    return int(significant or "0")


def one_count(text: str) -> int:
    """A single count from 1; an argparse type."""
    if not re.fullmatch(r"\d+", text, re.ASCII) or not count(text):
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a whole number from 1")
    return count(text)


def shorten(text: str, width: int = 40) -> str:
    return repr(text) if len(text) <= width else f"{text[:width]!r}..."


# Table and cell


TABLE = "Parquet file, folder that holds the pair, or `embedded`"


def add_table(parser: argparse.ArgumentParser, metavar: str = "TABLE", about: str = TABLE) -> None:
    """TABLE, --select, --fake-kv and --json."""
    parser.add_argument("table", metavar=metavar, help=about)
    add_choice(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def add_choice(parser: Any) -> None:
    """--select and --fake-kv: which cell of a table, and which of its rows."""
    parser.add_argument(
        "--select",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        type=selection,
        help="choose among several cells by identity, e.g. tp=2; may be repeated (default: the only cell)",
    )
    parser.add_argument(
        "--fake-kv",
        choices=FAKE_KV_CHOICES,
        help="rows measured on fabricated KV: drop them, heal decode rows by the line through two real rows below, or "
        "keep what was recorded (default: drop)",
    )


def selection(text: str) -> tuple[str, Any]:
    """`FIELD=VALUE` as a typed pair; an argparse type.  Unknown fields are left to `Cells.select`."""
    from fpmjax.tables.identity import FLAGS, SIZES

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not FIELD=VALUE\nhint: for example --select tp=2")
    if name in (*SIZES, "dcp"):
        if value.lower() == "none":
            return name, None
        if not re.fullmatch(r"\d{1,10}", value, re.ASCII):
            raise argparse.ArgumentTypeError(f"{name}={shorten(value)}: {name} is a whole number, or none")
        return name, int(value)
    if name in FLAGS:
        if value.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name}={shorten(value)}: {name} is true or false")
        return name, value.lower() == "true"
    return name, value


def selected(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of --select."""
    fields: dict[str, Any] = {}
    for name, value in args.select:
        if name in fields:
            raise UsageError(f"--select {name} is given twice\nhint: a cell has one {name}")
        fields[name] = value
    return fields


def open_cells(args: argparse.Namespace) -> Cells:
    """The cells of the table that was named."""
    from fpmjax.tables.load import load_cells

    if args.table != EMBEDDED:
        refuse_what_is_no_table(args.table)
        return load_cells(args.table, fake_kv=args.fake_kv or FAKE_KV_CHOICES[0])
    from fpmjax.data import embedded_table

    return load_cells(embedded_table(), fake_kv=args.fake_kv or FAKE_KV_CHOICES[0])


def refuse_what_is_no_table(name: str) -> None:
    """Raise where TABLE is nothing at all, or measurements that nobody has made a table of yet."""
    require_path(name, f"a Parquet file, the folder that holds the pair, or {INSIDE}")
    if is_saved(name):
        raise UsageError(
            f"{name} is a saved model, not a table\nhint: `fpmjax inspect`, `estimate` and `evaluate` take saved models"
        )
    if holds_observations(name):
        raise UsageError(
            f"{name} holds observations, not a table\n"
            f"hint: `fpmjax fit {name}` makes a model of them, `fpmjax evaluate MODEL {name}` scores one on them"
        )
    if os.path.isfile(name) and holds_rows(name):
        raise UsageError(
            f"{name} holds measurements, but is no table yet\n"
            f"hint: make one with `fpmjax table build {name} --identity ID.json -o DIR`"
        )


def is_saved(name: str) -> bool:
    """Whether a file is a model: one that `fpmjax fit` wrote, or a learned artifact."""
    return is_model_file(name) or is_artifact(name)


def is_artifact(name: str) -> bool:
    """Whether a file is a JSON object that names the schema of the peer's learned artifacts near one of its ends."""
    ends = ends_of(name)
    if ends is None:
        return False
    head, tail = ends
    return head.lstrip().startswith(b"{") and (ARTIFACT in head or ARTIFACT in tail)


def require_path(name: str, wanted: str) -> None:
    """Raise where a path is nothing at all, naming what is near to it, else what is wanted."""
    if os.path.exists(name):
        return
    folder, last = os.path.split(name)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    hint = f"give {wanted}"
    if near := difflib.get_close_matches(last, [*beside, EMBEDDED], 1, 0.8):
        hint = f"did you mean {INSIDE if near[0] not in beside else os.path.join(folder, near[0])}"
    raise UsageError(f"the path {name} does not exist\nhint: {hint}")


def holds_observations(name: str) -> bool:
    """Whether a file has the column of wall times, which no table has, or is, or a folder holds, traces by name."""
    if os.path.isdir(name):
        found = os.listdir(name)
        return any(map(is_trace, found)) and not any(x.lower().endswith(".parquet") for x in found)
    if is_trace(name):
        return True
    if name.lower().endswith((".csv", ".csv.gz")):
        with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
            try:
                return b"wall_ms" in file.readline(1000)
            except (OSError, EOFError, zlib.error):
                return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return "wall_ms" in pq.read_schema(name).names
    except (pa.ArrowException, OSError, ValueError):
        return False


def is_trace(name: str) -> bool:
    return name.lower().endswith((".jsonl", ".jsonl.gz"))


def holds_rows(name: str) -> bool:
    """Whether a file is CSV by its name or its first line."""
    if name.lower().endswith((".csv", ".csv.gz", ".tsv")):
        return True
    with open(name, "rb") as file:
        head = file.read(1000)
    return not head.startswith(b"PAR1") and b"workload_kind" in head.partition(b"\n")[0]


def open_cell(args: argparse.Namespace) -> Cell:
    """The one cell that --select leaves; otherwise an error that lists the flags which would tell them apart."""
    wanted, cells = selected(args), open_cells(args)
    try:
        cell = cells.select(**wanted)
        tell_fate(args, [cell])
        return cell
    except CellNotFoundError as error:
        if error.code != "cell_ambiguous":
            raise
    flags = separating_flags([identity for identity in cells if not identity.differences(wanted)])
    lines = [f"  {flag}" for flag in flags[:LISTED]]
    if len(flags) > LISTED:
        lines.append(f"  and {len(flags) - LISTED} more, see `fpmjax inspect`")
    raise UsageError(
        f"{args.table} holds {len(flags)} cells that match; choose one with\n" + "\n".join(lines) + "\n"
        f"hint: add {flags[0]}, or another of these",
        code="cell_ambiguous",
    )


def tell_fate(args: argparse.Namespace, cells: list[Cell]) -> None:
    """What became of rows on fabricated KV, where --fake-kv says that it matters."""
    from fpmjax.tables.oddities import fake_fate

    if args.fake_kv:
        fate = fake_fate(cells, args.fake_kv)
        note(f"rows measured on fabricated KV: {fate or 'none in this cell'}")


def separating_flags(identities: list[Identity]) -> list[str]:
    """For each of several identities the fewest --select flags, field by field, that tell them all apart."""
    from fpmjax.tables.identity import FIELDS

    names: list[str] = []
    seen = 1
    for name in sorted(FIELDS, key=lambda field: field != "tp"):  # tp first: it is what people think of
        kinds = len({tuple(getattr(i, n) for n in (*names, name)) for i in identities})
        if kinds > seen:
            names, seen = [*names, name], kinds
    return [" ".join(f"--select {n}={flag_value(getattr(identity, n))}" for n in names) for identity in identities]


def flag_value(value: Any) -> str:
    import shlex

    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return shlex.quote(text) if text else "''"
