"""`fpmjax compare`: the same questions asked of two models, and where their answers differ most."""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from typing import Any

from fpmjax.cli.arguments import (
    NOT_COVERED,
    UsageError,
    add_choice,
    add_command,
    is_saved,
    one_count,
    selection,
    separating_flags,
)
from fpmjax.cli.axes import ABOUT as AXES_ABOUT
from fpmjax.cli.axes import add_axes, models_of, queries_of, rule_for
from fpmjax.cli.describe import cell_of, contents, in_words
from fpmjax.cli.output import aligned, breakdown, ms, note, print_json
from fpmjax.cli.saved import HELP
from fpmjax.cli.study import rule_document
from fpmjax.cli.sweep import add_plot, check_picture, file_for_a_table, require_grid, tell_faults
from fpmjax.cli.translate import in_flags, spelled_out

TOP, FAULTS = 10, 8  # rows, and faults of rows, that are shown
OUTPUTS = ("a_latency_ms", "b_latency_ms", "a_status", "b_status", "difference_ms", "difference_pct", "fault")
ABOUT = f"""\
A and B are two models, or two versions of one table.  Told are the median of the differences b - a, in ms and in
percent of a, the 90th percentile of their sizes, the worst one, how many rows only one of them answers, and the rows
that differ most.  --out keeps all rows, beside --json too; --plot draws the differences of a grid of up to 2**20 cells
over its first two axes of several values, and hatches what only one of them answers.

{AXES_ABOUT}"""
EXAMPLES = """\
  fpmjax compare table-v1/ table-v2/ --decode-requests 1:256 --kv-per-request 512:65536:x2
  fpmjax compare embedded embedded --select tp=1 --select-b tp=4 --batch 1:64 --kv-per-request 1024,4096
  fpmjax compare embedded model.npz --select tp=1 --decode-requests 1:64 --kv-per-request 1024 --draft-length 1:4
  fpmjax compare embedded embedded --select tp=1 --select-b tp=2 --batch 1:512 --kv-per-request 512:65536:x2 \\
    --plot tp.png
  fpmjax compare before.npz after.npz --spec queries.parquet --out differences.parquet --json
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands, "compare", "where two models, or two versions of a table, differ", run, about=ABOUT, examples=EXAMPLES
    )
    parser.add_argument("a", metavar="A", help=HELP)
    parser.add_argument("b", metavar="B", help="another one")
    add_choice(parser)
    parser.add_argument(
        "--select-b",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        type=selection,
        help="choose B's cell otherwise than A's; may be repeated (default: as --select)",
    )
    add_axes(parser)
    other = parser.add_argument_group("other")
    other.add_argument("--top", metavar="N", type=one_count, default=TOP, help=f"rows that are shown (default: {TOP})")
    other.add_argument("--out", metavar="FILE", help="a Parquet file with every row")
    other.add_argument("--overwrite", action="store_true", help="replace it where it is there")
    add_plot(other, "draw the differences of a grid")
    other.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def run(args: argparse.Namespace) -> int:
    with spelled_out():
        return compared(args)


def compared(args: argparse.Namespace) -> int:
    check_flags(args)
    queries = queries_of(args)
    a, b = open_both(args)
    names = names_of_both(args, a, b)
    rule = rule_for(args)
    path = None if args.out is None else file_for_a_table(args.out, args.overwrite)
    if args.plot:
        check_picture_of(args, a, b, queries, rule)
    from fpmjax.compare import compare, difference_summary, worst_rows
    from fpmjax.result_files import write_whole

    table = compare(a, b, queries, rule=rule)
    if path is not None:
        write_whole(path, table, overwrite=args.overwrite)
    summary = difference_summary(table)
    rows = table.take(worst_rows(table, args.top)).to_pylist()
    if args.json:
        factor = {} if rule is None else rule_document(args.rule, rule)
        who = {"a": names[0], "b": names[1], "a_model": contents(a), "b_model": contents(b)}
        print_json({**who, **factor, **summary, "largest": rows})
    else:
        heads = [f"{letter} {name}: {what(model)}" for letter, name, model in zip("AB", names, (a, b), strict=True)]
        print("\n".join(as_text(heads, summary, rows)))
    if "fault" in table.column_names:
        faults = table.column("fault").drop_null()
        tell_faults(len(faults), faults[:FAULTS].to_pylist())
    if summary["rows"] and summary["neither"] == summary["rows"]:
        reasons = Counter(table.column("a_status").to_pylist() + table.column("b_status").to_pylist())
        note(f"neither answers any of the {summary['rows']:,} rows ({breakdown(reasons)})")
        return NOT_COVERED
    if args.plot:
        from fpmjax.plot.figure import write_figure
        from fpmjax.plot.grids import draw_difference

        write_figure(draw_difference(a, b, queries, names, rule, True).figure, args.plot)
        note(f"{args.plot}: differences of {summary['rows']:,} cells")
    return 0


def check_flags(args: argparse.Namespace) -> None:
    """What goes together, before anything is read."""
    if args.overwrite and args.out is None:
        raise UsageError("--overwrite needs --out\nhint: for example --out differences.parquet")
    if args.select_b and is_saved(args.b):
        raise UsageError(f"--select-b is about tables, but {args.b} is a saved model\nhint: leave it out")


def check_picture_of(args: argparse.Namespace, a: Any, b: Any, queries: Any, rule: Any) -> None:
    """Raise before a long computation for a picture that could not be drawn or written after it."""
    require_grid(queries)
    check_picture(args)
    from fpmjax.plot.grids import checked_pair

    with in_flags():
        checked_pair(a, b, queries, rule)


def names_of_both(args: argparse.Namespace, a: Any, b: Any) -> tuple[str, str]:
    """As they were given, with what tells their cells apart, such as `embedded tp=1`."""
    cells = [cell for model in (a, b) if (cell := cell_of(model)) is not None]
    words = [""] * 2 if len(cells) < 2 else separating_flags([cell.identity for cell in cells])
    one, other = (word.replace("--select ", "") for word in words)
    return f"{args.a} {one}".strip(), f"{args.b} {other}".strip()


def what(model: Any) -> str:
    """What a model is, in one line."""
    return in_words(model)[0].partition(" ")[2].strip()


def open_both(args: argparse.Namespace) -> list[Any]:
    """A and B; B's cell may be chosen by flags of its own."""
    other = copy.copy(args)
    other.select = args.select_b or args.select
    names = [args.a, args.b]
    return [
        next(iter(models_of([name], one, beside=names).values()))
        for name, one in zip(names, (args, other), strict=True)
    ]


def as_text(heads: list[str], summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    lines = [*heads, ""]
    lines += [f"{summary['rows']:,} rows, {summary['both']:,} answered by both"]
    lines += [f"only A answers {summary['only_a']:,}, only B {summary['only_b']:,}, neither {summary['neither']:,}"]
    if not summary["both"]:
        return lines
    headers = ["B - A", "median", "90 % are within", "worst"]
    table = [
        [unit, *(signed(summary[f"{name}_{key}"], name != "p90") for name in ("median", "p90", "worst"))]
        for unit, key in (("ms", "ms"), ("%", "pct"))
    ]
    lines += ["", *aligned(headers, table, left=[0]), ""]
    if not rows:
        return [*lines[:-1], "no answer differs"]
    inputs = [name for name in rows[0] if name not in OUTPUTS] if rows else []
    cells = [
        [
            *(str(row[name]) for name in inputs),
            *(ms(row[f"{letter}_latency_ms"]) for letter in "ab"),
            signed(row["difference_ms"], True),
            signed(row["difference_pct"], True),
        ]
        for row in rows
    ]
    return lines + aligned([*(name.replace("_", " ") for name in inputs), "A ms", "B ms", "B - A ms", "%"], cells)


def signed(value: float | None, sign: bool) -> str:
    if value is None:
        return "-"
    return f"{value:+.4g}" if sign else f"{value:.4g}"
