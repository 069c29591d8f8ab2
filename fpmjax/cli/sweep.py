"""`fpmjax sweep`: every combination of lists, or every row of a table, as CSV, Parquet or a reduction."""

from __future__ import annotations

import argparse
import io
import os
from typing import Any

from fpmjax.cli.arguments import BAD_INPUT, NOT_COVERED, UsageError, add_choice, add_command, shorten
from fpmjax.cli.axes import ABOUT as AXES_ABOUT
from fpmjax.cli.axes import add_axes, models_of, names_of, queries_of, rule_for
from fpmjax.cli.flags import real
from fpmjax.cli.output import breakdown, note, print_json
from fpmjax.cli.saved import HELP

ABOUT = f"""\
Answers come as rows: the inputs, latency_ms, status (a word), with a draft length scaling_factor, stp_latency_ms and
calibrated (inside the published study), and what the model says of its own errors.  A refused row keeps its place.

Without --out the rows go to stdout as CSV.  --out FILE.parquet appears when it is complete; --out FOLDER/ is written
in parts, and the same command goes on where an interrupted one stopped.  With several MODELs, or --every-cell, a
column says whose row it is, and all of one model come before the next.

--keep reduces instead: one row per combination of the axes it names, with the least, mean and largest latency, how
many cells are answered, where the least one stands (best_*), and what --limit-ms and --quantiles add.  No cell is
stored, so that a grid may have billions of them.

{AXES_ABOUT}"""
EXAMPLES = """\
  fpmjax sweep embedded --select tp=1 --decode-requests 1:64 --kv-per-request 512:4096:x2 > rows.csv
  fpmjax sweep embedded --every-cell --decode-requests 1:512 --kv-per-request 512:65536:x2 --draft-length 1:4 \\
    --out rows.parquet
  fpmjax sweep TABLE --spec queries.parquet --evidence --out answers/
  fpmjax sweep TABLE --decode-requests 1:512 --kv-per-request 512:65536:64 --draft-length 1:4 \\
    --keep decode_requests --limit-ms 25 --quantiles 0.5,0.99
  fpmjax sweep before.npz after.npz --spec axes.json --columns model,latency_ms,status --out both.parquet
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands, "sweep", "answer a whole grid or table of queries", run, about=ABOUT, examples=EXAMPLES
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help=HELP)
    add_choice(parser)
    parser.add_argument("--every-cell", action="store_true", help="ask every cell of a table that --select leaves")
    add_axes(parser)
    rows = parser.add_argument_group("rows")
    rows.add_argument("--out", metavar="PATH", help="a file x.parquet, or a folder (default: CSV on stdout)")
    rows.add_argument("--overwrite", action="store_true", help="replace what is there")
    rows.add_argument(
        "--evidence", action="store_true", help="add the measured rows and weights behind each number (needs --out)"
    )
    rows.add_argument("--columns", metavar="LIST", type=names_of, help="columns to keep (default: all)")
    rows.add_argument("--json", action="store_true", help="with --out: what was written as JSON (default: text)")
    reduction = parser.add_argument_group("reduction")
    reduction.add_argument("--keep", metavar="AXES", type=kept, help="axes that stay, all others are reduced; or none")
    reduction.add_argument("--limit-ms", metavar="MS", type=real, help="add the share of latencies up to it")
    reduction.add_argument("--quantiles", metavar="LIST", type=reals, help="add quantiles, from 0 to 1")
    reduction.add_argument(
        "--pareto", action="store_true", help="instead: cells that none beats in latency and in throughput"
    )


def kept(text: str) -> tuple[str, ...]:
    """Axes, in underscores or hyphens; an argparse type."""
    return () if text == "none" else tuple(name.replace("-", "_") for name in names_of(text))


def reals(text: str) -> tuple[float, ...]:
    return tuple(real(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    queries = queries_of(args)
    several = len(args.models) > 1 or args.every_cell
    models: Any = models_of(args.models, args, every_cell=args.every_cell)
    asked = models if several else next(iter(models.values()))
    if args.keep is not None:
        return summarised(args, asked, queries)
    options: dict[str, Any] = {"columns": args.columns, "evidence": args.evidence, "rule": rule_for(args)}
    if args.out is None:
        return streamed(asked, queries, options)
    from fpmjax.sweep import sweep

    try:
        done = sweep(asked, queries, out=args.out, overwrite=args.overwrite, **options)
    except KeyboardInterrupt:
        if os.path.isdir(args.out):
            same = "the same command, without --overwrite," if args.overwrite else "the same command"
            note(f"{args.out}: its complete parts stay, and {same} goes on from there")
        raise
    if args.json:
        document = {"path": str(done.path), "rows": done.rows, "answered": done.answered}
        print_json(document | {"statuses": dict(done.statuses), "faulty": done.faulty, "faults": list(done.faults)})
    else:
        print(f"{done.path}: {done.rows:,} rows, {done.answered:,} answered")
    return told(done.rows, done.statuses, done.faulty, done.faults)


def check_flags(args: argparse.Namespace) -> None:
    """What goes together, before anything is read."""
    if args.keep is None:
        for flag, given in (("--limit-ms", args.limit_ms), ("--quantiles", args.quantiles), ("--pareto", args.pareto)):
            if given is not None and given is not False:
                raise UsageError(f"{flag} reduces, and needs --keep\nhint: --keep decode_requests, or --keep none")
    else:
        for flag, given in (("--evidence", args.evidence), ("--columns", args.columns)):
            if given:
                raise UsageError(f"{flag} is about rows, but --keep reduces them\nhint: leave one of them out")
    if args.out is None:
        for flag, given in (("--evidence", args.evidence), ("--overwrite", args.overwrite), ("--json", args.json)):
            if given:
                raise UsageError(f"{flag} needs --out\nhint: for example --out rows.parquet")


def streamed(models: Any, queries: Any, options: dict[str, Any]) -> int:
    """Rows on stdout as CSV, as they are computed."""
    from fpmjax.result_files import Tally
    from fpmjax.sweep import watched
    from fpmjax.sweep_job import job_of

    job = job_of(models, queries, options["columns"], None, options["rule"], False)
    if nested := [f.name for f in job.layout.schema if is_nested(f.type)]:
        raise UsageError(f"CSV has no column of lists, such as {nested[0]}\nhint: give --out rows.parquet")
    tally, header = Tally(), True
    for batch, more in watched(job, 0, True):
        print_csv(batch, header)
        tally += more
        header = False
    if header:
        print(",".join(f'"{name}"' for name in job.layout.schema.names))
    return told(tally.rows, tally.statuses, tally.faulty, tally.faults)


def is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_nested(kind)


def print_csv(rows: Any, header: bool) -> None:
    """Rows of a batch or table, words as text."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
    out = io.BytesIO()
    pacsv.write_csv(table, out, pacsv.WriteOptions(include_header=header))
    print(out.getvalue().decode(), end="")


def told(rows: int, statuses: Any, faulty: int, faults: Any) -> int:
    """The exit code; refusals and rows that could not be asked are noted."""
    from fpmjax.errors import CoverageError
    from fpmjax.status import Status

    refused = {s.code: statuses[s.code] for s in Status if not s.answered and statuses.get(s.code)}
    if faulty:
        shown = "".join(f"\n  {shorten(fault, 200)[1:-1]}" for fault in faults)
        more = f"\n  and {faulty - len(faults):,} more, see the column fault" if faulty > len(faults) else ""
        note(f"{faulty:,} rows cannot be asked, and are kept as refused ones:{shown}{more}")
    if refused:
        note(f"{sum(refused.values()):,} of {rows:,} queries have no answer ({breakdown(refused)})")
    if not rows or sum(refused.values()) < rows:
        return 0
    uncovered = any(issubclass(s.error, CoverageError) for s in Status if s.code in refused)
    return NOT_COVERED if uncovered else BAD_INPUT


def summarised(args: argparse.Namespace, models: Any, queries: Any) -> int:
    """One row per combination of the kept axes: CSV on stdout, or a Parquet file."""
    from fpmjax.grid import Grid
    from fpmjax.reduce import Reduce
    from fpmjax.result_files import check_free, write_whole
    from fpmjax.sweep import file_of, sweep

    if not isinstance(queries, Grid):
        raise UsageError("--keep reduces a grid, not a table of queries\nhint: give axes, or leave --keep out")
    reduce = Reduce(keep=args.keep, limit_ms=args.limit_ms, quantiles=args.quantiles or (), pareto=args.pareto)
    path = None if args.out is None else file_of(args.out)
    if path is not None:
        check_free(path, args.overwrite)  # before a long computation
    table = sweep(models, queries, reduce=reduce, rule=rule_for(args))
    if path is None:
        print_csv(table, True)
    else:
        write_whole(path, table, overwrite=args.overwrite)
        if args.json:
            print_json({"path": str(path), "rows": table.num_rows})
        else:
            print(f"{path}: {table.num_rows:,} rows")
    if any(table.column("latency_ms" if args.pareto else "answered").to_pylist()):
        return 0
    note("no cell has an answer" + (" with decode requests, so the front is empty" if args.pareto else ""))
    return NOT_COVERED
