"""`fpmjax demo`: what the embedded table knows, ordinary and speculative, and what it refuses."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax import __version__
from fpmjax.cli.arguments import add_command
from fpmjax.cli.evidence import Details, in_short
from fpmjax.cli.inspect import batches_of, clock
from fpmjax.cli.output import aligned, ms, span, wrapped

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell
    from fpmjax.tables.cells import Cells

TP = 1
BATCHES, KV_PER_REQUEST, DRAFTS = (1, 4, 8), (1024, 4096), (1, 2, 3, 4)
REFUSED = 128, 1024, 4  # batch, KV per request, draft length: its 640 rows lie beyond every measured batch
EXAMPLES = """\
  fpmjax demo
"""
ABOUT = "Needs no file: the table is part of this package.\n"


def add(commands: Any) -> None:
    add_command(commands, "demo", "the embedded table, asked a few questions", run, about=ABOUT, examples=EXAMPLES)


def run(args: argparse.Namespace) -> int:
    from fpmjax.data import embedded_table
    from fpmjax.tables.load import load_cells

    cells = load_cells(embedded_table())
    cell = cells.select(tp=TP)
    print("\n".join([*coverage(cells, cell), "", *latencies(cell), "", *refusal(cell), "", *next_steps()]))
    return 0


def coverage(cells: Cells, cell: Cell) -> list[str]:
    who, sizes = cell.identity, ", ".join(str(identity.tp) for identity in cells)
    decode, prefill = cell.decode, cell.prefill
    return [
        f"fpmjax {__version__}: forward-pass latencies, looked up in measurements",
        "",
        f"The embedded table: {who.model}, {who.gemm_quant_mode}, on {who.system} under {who.backend} "
        f"{who.backend_version}; TP {sizes}, here TP {TP}",
        f"  clock    {clock(cells)}",
        f"  decode   {len(decode)} points: {batches_of(decode)}, KV totals {span(decode.kv.min(), decode.kv.max())}",
        f"  prefill  {len(prefill)} points: {batches_of(prefill)}, {span(prefill.tokens.min(), prefill.tokens.max())} "
        f"new tokens beside {span(prefill.kv.min(), prefill.kv.max())} cached",
    ]


def latencies(cell: Cell) -> list[str]:
    from fpmjax.estimate import estimate
    from fpmjax.models.direct import direct
    from fpmjax.work import Work

    model = direct(cell)
    batch = np.repeat(BATCHES, len(KV_PER_REQUEST))
    each = np.tile(KV_PER_REQUEST, len(BATCHES))
    depths = np.array(DRAFTS)
    work = Work.decode(batch, batch * each)
    plain = estimate(model, work, evidence=True)
    wide = Work.decode(*(np.repeat(x, len(depths)) for x in (batch, batch * each)))
    asked = np.tile(depths, len(batch))
    rounds = estimate(model, wide, draft_length=asked, evidence=True)
    plain_details = Details(cell, work, plain.parts, np.ones_like(batch))  # type: ignore[union-attr]
    round_details = Details(cell, wide, rounds.stp.parts, asked + 1)  # type: ignore[union-attr]
    rows = []
    for i, (b, kv) in enumerate(zip(batch.tolist(), each.tolist(), strict=True)):
        (rank,) = plain_details.ranks(i)
        support = in_short(rank["lookups"][0]["support"])
        rows.append([str(b), f"{kv:,}", "none", str(b), ms(plain.latency_ms[i]), "", "", support])
        for j, d in enumerate(DRAFTS, start=i * len(DRAFTS)):
            (rank,) = round_details.ranks(j)
            factor, stp = f"{rounds.scaling_factor[j]:.2f}", ms(rounds.stp.latency_ms[j])  # type: ignore[union-attr]
            support = in_short(rank["lookups"][0]["support"])
            rows.append(
                ["", "", str(d), str(b * (d + 1)), ms(rounds.latency_ms[j]), f"= {factor}", f"x {stp}", support]
            )
    headers = [
        "batch",
        "KV/request",
        "draft",
        "rows",
        "latency ms",
        "factor",
        "STP ms",
        "evidence: weight (batch, total KV)",
    ]
    return [
        "Milliseconds per pass.  Without a draft: an ordinary pass, one token per request (STP).  With d draft tokens:",
        "one whole speculative round, draft and verification, which is (0.08 d + 1.25) x the ordinary pass over d + 1",
        "times the rows at the same total KV.  Its factor: a study on TP1, BF16, batch to 8, KV to 4,096, d to 4.",
        "",
        *aligned(headers, rows, left=[7]),
    ]


def refusal(cell: Cell) -> list[str]:
    from fpmjax.errors import CoverageError
    from fpmjax.estimate import estimate
    from fpmjax.models.direct import direct
    from fpmjax.work import Work

    batch, each, depth = REFUSED
    try:
        estimate(direct(cell), Work.decode(batch, batch * each), draft_length=depth)
    except CoverageError as error:
        why = str(error)
    else:
        raise AssertionError("the demo's refused query is answered")
    asked = f"Batch {batch} at {each:,} KV per request, draft length {depth}"
    return [f"Where nothing is measured there is no answer.  {asked}:", *wrapped(why)]


def next_steps() -> list[str]:
    return [
        "Next:",
        "  fpmjax inspect embedded",
        "  fpmjax estimate embedded --select tp=2 --batch 1:64 --kv-per-request 4096 --draft-length 1:4",
        "  fpmjax calibrate --template study.csv   (is that factor right for my engine?)",
        "  fpmjax --help",
        "In the repository: notebooks/ (five questions in ten minutes each), calibration/ (studies of its errors)",
    ]
