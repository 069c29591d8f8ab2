"""What is accepted in a table, but worth knowing before its numbers are trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fpmjax.tables.cell import Cell
from fpmjax.tables.identity import SIZES
from fpmjax.tables.policy import FAKE_KV
from fpmjax.tables.rows import Rows
from fpmjax.tables.sidecar import Declared

LONELY = 0.5  # share of decode batches with a single point from which this is said


def table_warnings(cells: Sequence[Cell], rows: Rows, declared: Declared, fake_kv: str) -> Iterator[str]:
    """One sentence for each oddity that the table shows."""
    yield from _fake(cells, rows, fake_kv)
    yield from _phases(cells)
    yield from _one_point_curves(cells)
    yield from _odd_totals(rows)
    yield from _relabelled(rows, declared)
    for name in SIZES:
        if count := int(rows[name].null.sum()):
            yield f"{count} rows have no {name}: they form a cell of their own, with {name}=None"


def fake_fate(cells: Sequence[Cell], fake_kv: str) -> str:
    """What became of the fake-KV rows of some cells, for example `3 healed`; empty where there are none."""
    unhealed = ", which could not be healed" if fake_kv == "heal" else ""
    counts = {what: sum(getattr(cell, f"fake_{what}") for cell in cells) for what in ("dropped", "healed", "kept")}
    return ", ".join(f"{n} {what}{unhealed if what == 'kept' else ''}" for what, n in counts.items() if n)


def _fake(cells: Sequence[Cell], rows: Rows, fake_kv: str) -> Iterator[str]:
    if fate := fake_fate(cells, fake_kv):
        fakes = sum(cell.fake_dropped + cell.fake_healed + cell.fake_kept for cell in cells)
        yield f"{fakes} of {len(rows['latency_ms'].values)} rows were measured on {FAKE_KV} KV: {fate}"


def _phases(cells: Sequence[Cell]) -> Iterator[str]:
    for phase in ("decode", "prefill"):
        empty = [cell for cell in cells if not len(getattr(cell, phase))]
        if empty:
            where = f"{len(empty)} of {len(cells)} cells have" if len(cells) > 1 else "the cell has"
            yield f"{where} no {phase} rows, so {phase} work is refused there"


def _one_point_curves(cells: Sequence[Cell]) -> Iterator[str]:
    sizes = [low == high for cell in cells for low, high in cell.decode_curve_bounds.values()]
    if sizes and sum(sizes) > LONELY * len(sizes):
        yield f"{sum(sizes)} of {len(sizes)} decode batches have a single KV total, and answer at that total only"


def _odd_totals(rows: Rows) -> Iterator[str]:
    batch, tokens, kv = (rows[n].values for n in ("batch_size", "total_prefill_tokens", "total_kv_read_tokens"))
    decode = rows["workload_kind"].equals("decode")
    for what, odd in (
        ("prefill rows compute fewer tokens", ~decode & (tokens < batch)),
        (
            "decode rows read fewer KV tokens",
            decode & (kv < batch),
        ),
    ):
        if count := int(odd.sum()):
            yield f"{count} {what} than they have requests, first in row {int(np.argmax(odd))}"


def _relabelled(rows: Rows, declared: Declared) -> Iterator[str]:
    """Columns that policy or schema tell the loader to ignore, where they contradict it."""
    if declared.policy.self_named or declared.policy.row_pairs:
        return
    stated, scope = rows.get("measurement_policy"), rows.get("timing_scope")
    for column, fine in ((stated, declared.policy.name), (scope, "")):
        if column is None or column.fault:
            continue
        odd = ~(column.equals(fine) | column.equals(""))
        if odd.any():
            yield (
                f"{int(odd.sum())} rows say {column.name}={column.at(int(odd.argmax()))}, which policy "
                f"{declared.policy.name} ignores: check that they were not relabelled"
            )
