"""`fpmjax sweep`: every combination of lists, or every row of a table, as CSV, Parquet or a reduction."""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path
from typing import Any

from fpmjax.cli.arguments import BAD_INPUT, NOT_COVERED, UsageError, add_choice, add_command, is_saved, shorten
from fpmjax.cli.axes import ABOUT as AXES_ABOUT
from fpmjax.cli.axes import SHORT, add_axes, models_of, names_of, queries_of, rule_for
from fpmjax.cli.flags import is_given, real, spelled
from fpmjax.cli.output import breakdown, note, print_json
from fpmjax.cli.saved import HELP
from fpmjax.cli.translate import in_flags, spelled_out

SHOWS = ("latency", "throughput", "coverage", "draft-length", "sensitivity")
ABOUT = f"""\
Answers come as rows: the inputs, latency_ms, status (a word), with a draft length scaling_factor, stp_latency_ms and
calibrated (inside the published study), and what the model says of its own errors.  A refused row keeps its place.

Without --out the rows go to stdout as CSV.  --out FILE.parquet appears when it is complete; --out FOLDER/ is written
in parts, and the same command goes on where an interrupted one stopped.  With several MODELs, or --every-cell, a
column says whose row it is, and all of one model come before the next.

--keep reduces instead: one row per combination of the axes it names, with the least, mean and largest latency, how
many cells are answered, where the least one stands (best_*), and what --limit-ms and --quantiles add.  No cell is
stored, so that a grid may have billions of them.

--plot draws the whole grid, of up to 2**20 cells, over its first two axes of several values, batch before context;
models and draft lengths make panels, and a grid of one such axis is drawn as lines.  Alone it draws and prints no rows;
with --out or --keep the rows or the reduction are made as well.  --show says what is drawn:
  latency        ms of a pass, or of a round with a draft length (default)
  throughput     decode requests / latency, a second
  coverage       what was measured, what is interpolated and between what, and why other cells are refused; with draft
                 lengths, where the widened batches fall
  draft-length   tokens that a round must yield to be no slower than ordinary decoding; or, with --tokens-per-round, the
                 draft length of most tokens a second and what it gains
  sensitivity    ms of one more KV token, and of one more request of the same context

{AXES_ABOUT}"""
EXAMPLES = """\
  fpmjax sweep embedded --select tp=1 --decode-requests 1:64 --kv-per-request 512:4096:x2 > rows.csv
  fpmjax sweep embedded --every-cell --decode-requests 1:512 --kv-per-request 512:65536:x2 --draft-length 1:4 \\
    --out rows.parquet
  fpmjax sweep TABLE --spec queries.parquet --evidence --out answers/
  fpmjax sweep TABLE --decode-requests 1:512 --kv-per-request 512:65536:64 --draft-length 1:4 \\
    --keep decode_requests --limit-ms 25 --quantiles 0.5,0.99
  fpmjax sweep embedded --select tp=1 --batch 1:512 --kv-per-request 512:65536:x2 --draft-length 1:4 \\
    --plot draft.svg --show draft-length --tokens-per-round 1,1.6,2,2.25,2.4
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
    rows.add_argument("--columns", metavar="LIST", type=columns, help="columns to keep, in the order of all of them")
    rows.add_argument("--json", action="store_true", help="with --out: what was written as JSON (default: text)")
    reduction = parser.add_argument_group("reduction")
    reduction.add_argument("--keep", metavar="AXES", type=kept, help="axes that stay, all others are reduced; or none")
    reduction.add_argument("--limit-ms", metavar="MS", type=real, help="add the share of latencies up to it")
    reduction.add_argument("--quantiles", metavar="LIST", type=reals, help="add quantiles, from 0 to 1")
    reduction.add_argument(
        "--pareto", action="store_true", help="instead: cells that none beats in latency and in throughput"
    )
    pictures = parser.add_argument_group("picture")
    add_plot(pictures, "draw the grid")
    pictures.add_argument("--show", choices=SHOWS, help="what is drawn, see above (default: latency)")
    pictures.add_argument(
        "--tokens-per-round",
        metavar="LIST",
        type=reals,
        help="with --show draft-length: tokens that a round yields, the accepted ones and the one always gained, at "
        "draft length 0 (where it is 1), 1, 2, ...",
    )


def add_plot(group: Any, text: str) -> None:
    group.add_argument("--plot", metavar="FILE", help=f"{text}, as .png or .svg (needs matplotlib)")


def kept(text: str) -> tuple[str, ...]:
    """Axes, in underscores or hyphens, or short; an argparse type."""
    return () if text == "none" else columns(text.replace("-", "_"))


def columns(text: str) -> tuple[str, ...]:
    """Names of columns, of axes also the short ones; an argparse type."""
    return tuple(SHORT.get(name, name) for name in names_of(text))


def reals(text: str) -> tuple[float, ...]:
    """Comma-separated numbers; an argparse type."""
    return tuple(real(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    with spelled_out():
        return answered(args)


def answered(args: argparse.Namespace) -> int:
    check_flags(args)
    queries = queries_of(args)
    several = len(args.models) > 1 or args.every_cell
    models: Any = models_of(args.models, args, every_cell=args.every_cell)
    asked = models if several else next(iter(models.values()))
    rule = rule_for(args)
    check_outputs(args, asked, queries, rule)
    code = None
    if args.keep is not None:
        code = summarised(args, asked, queries, rule)
    elif args.out is not None:
        code = written(args, asked, queries, rule)
    elif args.plot is None:
        code = streamed(asked, queries, {"columns": args.columns, "rule": rule})
    if args.plot is None:
        assert code is not None
        return code
    counts = drawn(args, asked, queries, rule).counts
    rows, some = sum(counts.values()), sum(counts.get(word, 0) for word in ("ok", "idle"))
    line = f"{args.plot}: {args.show or SHOWS[0]} of {rows:,} cells, {some:,} answered"
    if code is not None:  # stdout is of the rows
        note(line)
        return code
    print(line)
    return told(rows, counts, 0, ())


def written(args: argparse.Namespace, models: Any, queries: Any, rule: Any) -> int:
    """Rows in a file, or in a folder of parts."""
    from fpmjax.sweep import sweep

    options: dict[str, Any] = {"columns": args.columns, "evidence": args.evidence, "rule": rule}
    try:
        done = sweep(models, queries, out=args.out, overwrite=args.overwrite, **options)
    except KeyboardInterrupt:
        if parts := parts_in(args.out):
            same = "the same command, without --overwrite," if args.overwrite else "the same command"
            note(f"{args.out}: complete parts stay ({parts:,}), and {same} goes on from there")
        raise
    if args.json:
        document = {"path": str(done.path), "rows": done.rows, "answered": done.answered}
        print_json(document | {"statuses": dict(done.statuses), "faulty": done.faulty, "faults": list(done.faults)})
    else:
        print(f"{done.path}: {done.rows:,} rows, {done.answered:,} answered")
    return told(done.rows, done.statuses, done.faulty, done.faults)


def parts_in(name: str) -> int:
    """How many complete parts of a result a folder holds."""
    from fpmjax.result_files import PART

    return sum(bool(PART.fullmatch(one)) for one in os.listdir(name)) if os.path.isdir(name) else 0


def check_flags(args: argparse.Namespace) -> None:
    """What goes together, before anything is read."""
    refuse_without(
        args, "keep", ("limit_ms", "quantiles", "pareto"), "reduces", "--keep decode_requests, or --keep none"
    )
    refuse_without(args, "plot", ("show", "tokens_per_round"), "is about the picture", "for example --plot grid.png")
    if args.tokens_per_round and args.show != "draft-length":
        raise UsageError("--tokens-per-round needs --show draft-length\nhint: add it, or leave --tokens-per-round out")
    if args.keep is not None:
        for flag in ("evidence", "columns"):
            if is_given(args, flag):
                raise UsageError(f"{spelled(flag)} is about rows, but --keep reduces them\nhint: leave one of them out")
    refuse_without(args, "out", ("evidence", "overwrite", "json"), "", "for example --out rows.parquet")
    if args.plot and not args.out and args.columns:
        raise UsageError("--columns is about rows, and --plot alone prints none\nhint: give --out, or leave it out")
    if args.every_cell and all(map(is_saved, args.models)):
        raise UsageError(f"--every-cell is about tables, but {args.models[0]} is a saved model\nhint: leave it out")


def refuse_without(args: argparse.Namespace, needed: str, names: tuple[str, ...], why: str, hint: str) -> None:
    """Raise for the first flag that is given without the one that it needs."""
    if getattr(args, needed) is None and (given := next((name for name in names if is_given(args, name)), None)):
        why = f" {why}, and" if why else ""
        raise UsageError(f"{spelled(given)}{why} needs {spelled(needed)}\nhint: {hint}")


def check_outputs(args: argparse.Namespace, models: Any, queries: Any, rule: Any) -> None:
    """Raise before a long computation for what could not be written or drawn after it."""
    if args.plot:
        require_grid(queries)
        check_picture(args)
        from fpmjax.plot.grids import checked

        with in_flags():
            checked(models, queries, show_of(args), args.tokens_per_round, rule)
    if args.out is None:
        return
    if args.keep is not None:
        file_for_a_table(args.out, args.overwrite)
    elif args.out.lower().endswith(".parquet"):
        require_folder(args.out)
    if args.plot and os.path.abspath(args.plot) == os.path.abspath(args.out):
        raise UsageError(f"{args.out} is to be the rows and the picture\nhint: name two files")


def file_for_a_table(name: str, overwrite: bool) -> Path:
    """Where one Parquet file can be written; UsageError, OptionError `exists`."""
    from fpmjax.result_files import check_free

    path = Path(name)
    if name.endswith(("/", os.sep)) or path.is_dir():
        raise UsageError(f"{name} is a folder, but one file is written\nhint: name one in it, {path / 'x.parquet'}")
    if path.suffix.lower() != ".parquet":
        raise UsageError(f"{name} is no Parquet file by its name\nhint: name {path.with_suffix('.parquet')}")
    require_folder(name)
    check_free(path, overwrite)
    return path


def require_folder(name: str) -> None:
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"the folder {folder} does not exist\nhint: make it first, or name another file")


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
    tell_faults(faulty, faults)
    if refused:
        note(f"{sum(refused.values()):,} of {rows:,} queries have no answer ({breakdown(refused)})")
    if not rows or sum(refused.values()) < rows:
        return 0
    uncovered = any(issubclass(s.error, CoverageError) for s in Status if s.code in refused)
    return NOT_COVERED if uncovered else BAD_INPUT


def tell_faults(faulty: int, faults: Any) -> None:
    """Note rows of a table that cannot be asked; faults: what is wrong with the first ones."""
    if faulty:
        shown = "".join(f"\n  {shorten(fault, 200)[1:-1]}" for fault in faults)
        more = f"\n  and {faulty - len(faults):,} more, see the column fault" if faulty > len(faults) else ""
        note(f"{faulty:,} rows cannot be asked, and are kept as refused ones:{shown}{more}")


def summarised(args: argparse.Namespace, models: Any, queries: Any, rule: Any) -> int:
    """One row per combination of the kept axes: CSV on stdout, or a Parquet file."""
    from fpmjax.grid import Grid
    from fpmjax.reduce import Reduce
    from fpmjax.result_files import write_whole
    from fpmjax.sweep import sweep

    if not isinstance(queries, Grid):
        raise UsageError("--keep reduces a grid, not a table of queries\nhint: give axes, or leave --keep out")
    reduce = Reduce(keep=args.keep, limit_ms=args.limit_ms, quantiles=args.quantiles or (), pareto=args.pareto)
    table = sweep(models, queries, reduce=reduce, rule=rule)
    path = args.out
    if path is None:
        print_csv(table, True)
    else:
        write_whole(Path(path), table, overwrite=args.overwrite)
        if args.json:
            print_json({"path": path, "rows": table.num_rows})
        else:
            print(f"{path}: {table.num_rows:,} rows")
    if any(table.column("latency_ms" if args.pareto else "answered").to_pylist()):
        return 0
    note("no cell has an answer" + (" with decode requests, so the front is empty" if args.pareto else ""))
    return NOT_COVERED


# Pictures


def require_grid(queries: Any) -> None:
    from fpmjax.grid import Grid

    if not isinstance(queries, Grid):
        raise UsageError("--plot draws a grid, not a table of queries\nhint: give axes, or leave --plot out")


def check_picture(args: argparse.Namespace) -> None:
    """Raise before anything is computed for a picture that could not be written."""
    from fpmjax.plot import check_figure_path

    check_figure_path(args.plot)


def drawn(args: argparse.Namespace, models: Any, queries: Any, rule: Any) -> Any:
    """The picture of a sweep, written: its `Picture`."""
    from fpmjax.plot.figure import write_figure
    from fpmjax.plot.grids import draw_grid

    with in_flags():
        picture = draw_grid(models, queries, show_of(args), args.tokens_per_round, rule, True)
    write_figure(picture.figure, args.plot)
    return picture


def show_of(args: argparse.Namespace) -> str:
    return (args.show or SHOWS[0]).replace("-", "_")
