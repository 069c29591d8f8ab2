"""`fpmjax coverage`: what share of some traffic a table answers, plain and at each draft length."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax import __version__
from fpmjax.cli import study
from fpmjax.cli.arguments import BAD_INPUT, NOT_COVERED, UsageError, add_command, add_table, counts, open_cell
from fpmjax.cli.flags import add_rule, rule_of
from fpmjax.cli.output import ALL_IDLE, aligned, fake_kv_rows, note, percent, print_json, wrapped
from fpmjax.cli.queries import Asked, explain
from fpmjax.cli.traffic import Block, read_traffic
from fpmjax.progress import Progress

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

DRAFTS = (0, 1, 2, 3, 4)  # ordinary decoding and the depths of the published study
ABOUT = """\
Traffic is a file, plain or gzip, or - for stdin:
  JSON lines    ForwardPassMetrics, one iteration a line: a rank, a list of ranks, or an engine's trace row
                {"event": {"fpm": ...}}, each row one rank
  CSV, Parquet  one single-rank iteration a row: decode_requests (or batch) and decode_kv (or kv),
                prefill_requests, prefill_tokens, prefill_kv; count says how often the row occurred

A draft length d widens every decode request to d + 1 rows at the same KV total; 0 is ordinary decoding.  What is
counted is whether the table answers the widened pass, not whether the study behind the factor covers it.
The share is that of the iterations that can be asked at all: not the idle ones, and with a draft length not those
that prefill.
"""
EXAMPLES = """\
  fpmjax coverage embedded --select tp=1 --traffic iterations.jsonl
  fpmjax coverage TABLE --traffic trace.000000.jsonl.gz --draft-length 0:8 --json
"""


@dataclass
class Tally:
    """Counts for one draft length; 0 is ordinary decoding."""

    draft: int
    queries: int = 0
    idle: int = 0
    prefill: int = 0
    """Iterations that prefill, where there is a draft length: none applies to them."""
    answered: int = 0
    largest: int = 0
    """Decode rows of the largest rank, widened."""
    refused: dict[int, int] = field(default_factory=dict)
    example: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Status -> (place in the file, why)."""

    @property
    def asked(self) -> int:
        return self.queries - self.idle - self.prefill


def add(commands: Any) -> None:
    parser = add_command(
        commands, "coverage", "what share of my traffic a table answers", run, about=ABOUT, examples=EXAMPLES
    )
    add_table(parser)
    parser.add_argument("--traffic", metavar="FILE", required=True, help="iterations; - is stdin")
    parser.add_argument(
        "--draft-length", metavar="LIST", type=counts, help="draft tokens per round, 0 for none (default: 0:4)"
    )
    add_rule(parser)


def run(args: argparse.Namespace) -> int:
    cell = open_cell(args)
    from fpmjax.models.direct import direct
    from fpmjax.speculative import check_range

    for depth in filter(None, args.draft_length or ()):
        check_range(depth)
    model = direct(cell)
    drafts = args.draft_length or DRAFTS
    if not args.draft_length and model.execution != "autoregressive":
        note("the table holds measured speculative rounds, which carry no draft length: asked as they are")
        drafts = (0,)
    rule = rule_of(args, drafted=any(drafts))  # it changes no share: the answer says whose factor it would be
    tallies = [Tally(draft) for draft in dict.fromkeys(drafts)]
    for block in progress(read_traffic(args.traffic)):
        for tally in tallies:
            add_block(tally, model, block)
    if not any(tally.queries for tally in tallies):
        raise UsageError(f"{args.traffic} holds no iterations\nhint: see `fpmjax coverage --help` for what it reads")
    if args.json:
        print_json(document(args, cell, tallies, rule))
    else:
        print("\n".join(as_text(cell, tallies, rule)))
    if all(tally.idle == tally.queries for tally in tallies):
        note(ALL_IDLE)
    return verdict(tallies)


def verdict(tallies: list[Tally]) -> int:
    """The exit code: 0 where anything is answered or nothing was to be asked, else what the refusals are about."""
    from fpmjax.errors import CoverageError
    from fpmjax.status import Status

    if any(t.answered for t in tallies) or not any(t.asked for t in tallies):
        return 0
    uncovered = any(issubclass(Status(code).error, CoverageError) for t in tallies for code in t.refused)
    return NOT_COVERED if uncovered else BAD_INPUT


def progress(blocks: Iterable[Block]) -> Iterable[Block]:
    """The blocks, counted on stderr where a person is watching a long file."""
    seen = 0
    with Progress("traffic", unit="iterations") as bar:
        for block in blocks:
            yield block
            seen += len(block.place)
            bar(seen)


def add_block(tally: Tally, model: Any, block: Block) -> None:
    from fpmjax.estimate import estimate
    from fpmjax.status import Status

    depth = np.full(block.work.shape, tally.draft, np.int64) if tally.draft else None
    status = np.asarray(estimate(model, block.work, draft_length=depth, check=False).status)
    many = block.count
    tally.queries += int(many.sum())
    tally.idle += int(many[status == Status.IDLE].sum())
    tally.prefill += int(many[status == Status.NOT_PURE_DECODE].sum())
    tally.answered += int(many[status == Status.OK].sum())
    requests = np.asarray(block.work.decode_requests)
    tally.largest = max(tally.largest, int(requests.max(initial=0)) * (tally.draft + 1))
    for code in np.unique(status[(status > Status.IDLE) & (status != Status.NOT_PURE_DECODE)]).tolist():
        tally.refused[code] = tally.refused.get(code, 0) + int(many[status == code].sum())
        if code not in tally.example:
            first = int(np.argmax(status == code))
            tally.example[code] = block.place[first], str(explain(model, Asked(block.work, depth), first))


def document(args: argparse.Namespace, cell: Cell, tallies: list[Tally], rule: Any) -> dict[str, Any]:
    from fpmjax.status import Status

    factor: dict[str, Any] = {}
    if any(t.draft for t in tallies):
        factor = study.rule_document(args.rule, rule) if rule else {"study": study.document(cell)}

    return {
        "fpmjax": __version__,
        "table": cell.path,
        "digest": cell.digest,
        "cell": dict(cell.identity),
        "fake_kv_rows": fake_kv_rows(cell),
        **factor,
        "traffic": args.traffic,
        "largest_measured_batch": max(cell.decode_batches, default=None),
        "draft_lengths": [
            {
                "draft_length": t.draft,
                "queries": t.queries,
                "idle": t.idle,
                "with_prefill": t.prefill,
                "answered": t.answered,
                "share": t.answered / t.asked if t.asked else None,
                "largest_batch": t.largest,
                "refused": [
                    {
                        "reason": Status(code).code,
                        "queries": count,
                        "example": dict(zip(("at", "message"), t.example[code], strict=True)),
                    }
                    for code, count in sorted(t.refused.items())
                ],
            }
            for t in tallies
        ],
    }


def as_text(cell: Cell, tallies: list[Tally], rule: Any) -> list[str]:
    from fpmjax.status import Status

    measured = max(cell.decode_batches, default=0)
    rows = [
        [
            str(t.draft) if t.draft else "none",
            f"{t.queries:,}",
            f"{t.idle:,}",
            f"{t.prefill:,}" if t.draft else "-",
            f"{t.answered:,}",
            percent(t.answered, t.asked),
            f"{t.largest:,}" + (" !" if t.largest > measured else "  "),
        ]
        for t in tallies
    ]
    headers = ["draft length", "iterations", "idle", "prefill", "answered", "share", "largest batch  "]
    lines = [str(cell.identity), "", *aligned(headers, rows)]
    if any(t.largest > measured for t in tallies):
        lines.append(f"! beyond the largest measured batch, {measured:,}")
    if rule is not None:
        lines.append(study.rule_legend(rule))
    elif any(t.draft for t in tallies):
        about = study.document(cell)
        lines.append(f"the factor's study ran {about['deployment']}, this cell is {about['this_cell']}")
    for t in tallies:
        for code, count in sorted(t.refused.items()):
            at, why = t.example[code]
            name = f"draft length {t.draft}" if t.draft else "no draft"
            lines += ["", f"{name}: {count:,} refused, {Status(code).code}; first at {at}:"]
            lines += wrapped(why)
    return lines
