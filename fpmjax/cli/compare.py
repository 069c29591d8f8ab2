"""`fpmjax compare`: the same questions asked of two models, and where their answers differ most."""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from typing import Any

from fpmjax.cli.arguments import NOT_COVERED, add_choice, add_command, one_count, selection
from fpmjax.cli.axes import ABOUT as AXES_ABOUT
from fpmjax.cli.axes import add_axes, models_of, queries_of, rule_for
from fpmjax.cli.output import aligned, breakdown, ms, note, print_json
from fpmjax.cli.saved import HELP
from fpmjax.cli.study import rule_document

TOP = 10
OUTPUTS = ("a_latency_ms", "b_latency_ms", "a_status", "b_status", "difference_ms", "difference_pct", "fault")
ABOUT = f"""\
A and B are two models, or two versions of one table.  Told are the median of the differences b - a, in ms and in
percent of a, the 90th percentile of their sizes, the worst one, how many rows only one of them answers, and the rows
that differ most.  --out keeps all rows.

{AXES_ABOUT}"""
EXAMPLES = """\
  fpmjax compare table-v1/ table-v2/ --decode-requests 1:256 --kv-per-request 512:65536:x2
  fpmjax compare embedded embedded --select tp=1 --select-b tp=4 --batch 1:64 --kv-per-request 1024,4096
  fpmjax compare embedded model.npz --select tp=1 --decode-requests 1:64 --kv-per-request 1024 --draft-length 1:4
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
    other.add_argument("--json", action="store_true", help="one JSON document on stdout (default: text)")


def run(args: argparse.Namespace) -> int:
    queries = queries_of(args)
    a, b = open_both(args)
    from fpmjax.compare import compare, difference_summary, worst_rows
    from fpmjax.result_files import check_free, write_whole
    from fpmjax.sweep import file_of

    path = None if args.out is None else file_of(args.out)
    if path is not None:
        check_free(path, args.overwrite)
    rule = rule_for(args)
    table = compare(a, b, queries, rule=rule)
    if path is not None:
        write_whole(path, table, overwrite=args.overwrite)
    summary = difference_summary(table)
    rows = table.take(worst_rows(table, args.top)).to_pylist()
    if args.json:
        factor = {} if rule is None else rule_document(args.rule, rule)
        print_json({"a": args.a, "b": args.b, **factor, **summary, "largest": rows})
    else:
        print("\n".join(as_text(args, summary, rows)))
    if not summary["rows"] or summary["neither"] < summary["rows"]:
        return 0
    reasons = Counter(table.column("a_status").to_pylist() + table.column("b_status").to_pylist())
    note(f"neither answers any of the {summary['rows']:,} rows ({breakdown(reasons)})")
    return NOT_COVERED


def open_both(args: argparse.Namespace) -> list[Any]:
    """A and B; B's cell may be chosen by flags of its own."""
    other = copy.copy(args)
    other.select = args.select_b or args.select
    names = [args.a, args.b]
    return [
        next(iter(models_of([name], one, beside=names).values()))
        for name, one in zip(names, (args, other), strict=True)
    ]


def as_text(args: argparse.Namespace, summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"A {args.a}", f"B {args.b}", ""]
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
