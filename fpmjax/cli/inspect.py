"""`fpmjax inspect`: what a table holds and where it can answer, and what a saved model holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.cli.arguments import add_command, is_saved, open_cells, selected
from fpmjax.cli.describe import contents, in_words
from fpmjax.cli.output import aligned, fake_kv_rows, print_json, span
from fpmjax.cli.saved import add_model, manifest, open_model
from fpmjax.errors import CellNotFoundError
from fpmjax.tables.policy import POLICIES

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell, Points
    from fpmjax.tables.cells import Cells

ABOUT = """\
Cells, measurement policy and clock, digest, coverage per batch size, warnings.  Every batch size answers the KV
totals that it was measured for; a decode batch in between needs measured batches on both sides.

Of a saved model or a learned artifact: its digest, its kind, and what each of its stores holds; of a model that was
learned also the box in which it was observed, outside of which its answers are extrapolated.
"""
EXAMPLES = """\
  fpmjax inspect embedded
  fpmjax inspect folder/ --select tp=2
  fpmjax inspect table.parquet --json
  fpmjax inspect model.npz
"""
TIMING = ("timing_boundary", "timing_scope")  # what a sidecar may say about its clock beyond the policy
CELLS = 4  # cells shown in full without --select; of more, one line each


def add(commands: Any) -> None:
    parser = add_command(commands, "inspect", "what a table or a model holds", run, about=ABOUT, examples=EXAMPLES)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    if is_saved(args.table):
        return show_saved(args)
    wanted, cells = selected(args), open_cells(args)
    chosen = matching(cells, wanted)
    if args.json:
        print_json(table_document(cells) | {"cells": [cell_document(cell) for cell in chosen]})
    else:
        print("\n".join(as_text(cells, chosen, args.fake_kv or "", brief=len(chosen) > CELLS)))
    return 0


def show_saved(args: argparse.Namespace) -> int:
    model, (package, digest) = open_model(args), manifest(args.table)
    if args.json:
        print_json({"path": args.table, "digest": digest, "written_by": package} | contents(model))
    else:
        written = f"by fpmjax {package}" if package else "by the trainer of aisimulate"
        head = [f"model     {args.table}", f"sha256    {digest}", f"written   {written}"]
        print("\n".join([*head, *in_words(model)]))
    return 0


def matching(cells: Cells, wanted: dict[str, Any]) -> list[Cell]:
    """All cells with these fields; `select` explains where there are none."""
    try:
        return [cells.select(**wanted)]
    except CellNotFoundError as error:
        if error.code != "cell_ambiguous":
            raise
    return [cell for identity, cell in cells.items() if not identity.differences(wanted)]


def clock(cells: Cells) -> str:
    """What the milliseconds of a table time: its policy's words, and the sidecar's own."""
    stated = [f"{name}={cells.sidecar[name]}" for name in TIMING if name in cells.sidecar]
    return "; ".join([POLICIES[cells.policy].clock, *stated])


def table_document(cells: Cells) -> dict[str, Any]:
    return {
        "path": cells.path,
        "digest": cells.digest,
        "schema_version": next(iter(cells.values())).schema_version,
        "policy": cells.policy,
        "execution": POLICIES[cells.policy].execution,
        "clock": POLICIES[cells.policy].clock,
        **{name: cells.sidecar[name] for name in TIMING if name in cells.sidecar},
        "warnings": list(cells.warnings),
    }


def cell_document(cell: Cell) -> dict[str, Any]:
    return {
        "identity": dict(cell.identity),
        "cell_ids": list(cell.cell_ids),
        "fake_kv_rows": fake_kv_rows(cell),
        "native_ar_only": cell.native_ar_only,
        "decode_points": len(cell.decode),
        "decode_kv_ceiling": cell.decode_kv_ceiling,
        "capture_rungs": list(cell.capture_rungs),
        "decode": per_batch(cell.decode, ("kv",)),
        "prefill_points": len(cell.prefill),
        "prefill": per_batch(cell.prefill, ("tokens", "kv")),
    }


def per_batch(points: Points, axes: tuple[str, ...]) -> list[dict[str, Any]]:
    """For each batch size the number of its points and the (min, max) of each axis."""
    batches, first, sizes = np.unique(points.batch, return_index=True, return_counts=True)
    names = {"tokens": "total_prefill_tokens", "kv": "total_kv_read_tokens"}
    rows = []
    for batch, begin, size in zip(batches.tolist(), first.tolist(), sizes.tolist(), strict=True):
        row: dict[str, Any] = {"batch_size": batch, "points": size}
        for axis in axes:
            values = getattr(points, axis)[begin : begin + size]
            row[names[axis]] = [int(values.min()), int(values.max())]
        rows.append(row)
    return rows


def as_text(cells: Cells, chosen: list[Cell], fake_kv: str, *, brief: bool) -> list[str]:
    about = table_document(cells)
    lines = [
        f"table     {about['path']}",
        f"sha256    {about['digest']}",
        f"policy    {about['policy']} (schema {about['schema_version']})",
        f"clock     {clock(cells)}",
        f"a row is  {'one speculative round' if about['execution'] == 'speculative_round' else 'one ordinary pass'}",
        *(f"warning   {text}" for text in cells.warnings),
    ]
    shown = "" if len(chosen) == len(cells) else f", {len(chosen)} shown"
    lines += [f"cells     {len(cells)}{shown}"]
    for cell in chosen:
        lines += ["", str(cell.identity), *(brief_lines(cell) if brief else cell_lines(cell, fake_kv))]
    if brief:
        lines += ["", "coverage per batch: add --select FIELD=VALUE, or --json"]
    return lines


def brief_lines(cell: Cell) -> list[str]:
    points = (("decode", cell.decode), ("prefill", cell.prefill))
    return [f"  {name}: {len(p):,} points, {batches_of(p)}" for name, p in points if len(p)]


def batches_of(points: Points) -> str:
    batches = np.unique(points.batch)
    return f"{'batch' if len(batches) == 1 else f'{len(batches)} batches'} {span(batches[0], batches[-1])}"


def cell_lines(cell: Cell, fake_kv: str) -> list[str]:
    from fpmjax.tables.oddities import fake_fate

    about, lines = cell_document(cell), []
    if fate := fake_fate([cell], fake_kv):
        lines.append(f"  rows on fabricated KV: {fate}")
    if cell.native_ar_only:
        lines.append("  native CUDA timings of plain decoding: no verify width above 1")
    if len(cell.decode):
        rungs = ", ".join(map(str, cell.capture_rungs)) or "none"
        lines += ["", f"  decode: {len(cell.decode):,} points; capture rungs {rungs}"]
        rows = [[f"{r['batch_size']:,}", f"{r['points']:,}", span(*r["total_kv_read_tokens"])] for r in about["decode"]]
        lines += [f"    {line}" for line in aligned(["batch", "points", "KV tokens, total"], rows)]
    if len(cell.prefill):
        lines += ["", f"  prefill: {len(cell.prefill):,} points"]
        rows = [
            [
                f"{r['batch_size']:,}",
                f"{r['points']:,}",
                span(*r["total_prefill_tokens"]),
                span(*r["total_kv_read_tokens"]),
            ]
            for r in about["prefill"]
        ]
        headers = ["batch", "points", "new tokens, total", "cached KV tokens, total"]
        lines += [f"    {line}" for line in aligned(headers, rows)]
    return lines
