"""Rows that say the same thing twice: duplicates of the physical key, and collisions of two cells' slots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fpmjax.tables.columns import Column, group
from fpmjax.tables.faults import Fault, seen
from fpmjax.tables.identity import EXECUTION, FLAGS, SIZES, TEXTS, column
from fpmjax.tables.rows import COORDINATES, Rows


def duplicates(rows: Rows, among: np.ndarray | None = None) -> Iterator[Fault]:
    """A later row with the whole physical key of an earlier one, even where the rest is equal too.

    among: bool [n], the rows that are compared; None is all of them.
    """
    names = rows["cell_id"]
    keys = [*_slot(rows), names.keys(), rows["weight_quantization"].keys()]
    earlier, bad = _repeats(keys, among)
    yield Fault(
        "duplicate_row",
        bad,
        lambda i: (
            f"FPM database contains a duplicate physical row key: row {i} repeats row {earlier[i]} "
            f"({_where(rows, i)}, cell_id={seen(names, i)})"
        ),
        "latency and kv_seed_regime are not part of the key; keep one of the two rows",
    )


def collisions(rows: Rows, among: np.ndarray | None = None) -> Iterator[Fault]:
    """A later row at the coordinates of an earlier one in the same cell, under another producer's name."""
    earlier, bad = _repeats(_slot(rows), among)
    yield Fault(
        "coordinate_collision",
        bad,
        lambda i: (
            f"FPM row {i} collides with an earlier row at the same cell coordinates ({_where(rows, i)}), "
            f"row {earlier[i]}; refusing to silently overwrite latencies"
        ),
        "cell_id and weight_quantization do not make a cell of their own; keep one of the two rows",
    )


def identity_columns(rows: Rows) -> list[Column]:
    """The columns that make a cell, those of the database apart (they are equal in every row)."""
    names = (*map(column, TEXTS), *SIZES, *FLAGS, *EXECUTION, "dcp")
    return [rows[name] for name in names if name in rows]


def _slot(rows: Rows) -> list[np.ndarray]:
    coordinates = (rows[name] for name in ("workload_kind", *COORDINATES))
    return [c.keys() for c in (*identity_columns(rows), *coordinates)]


def _repeats(keys: list[np.ndarray], among: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """For each row the first compared row with equal keys, and whether that is an earlier one."""
    every = np.arange(len(keys[0]))
    compared = every if among is None else np.flatnonzero(among)
    earlier = every.copy()
    if len(compared):
        groups, first = group([key[compared] for key in keys])
        earlier[compared] = compared[first[groups]]
    return earlier, earlier != every


def _where(rows: Rows, row: int) -> str:
    totals = ", ".join(f"{name}={rows[name].at(row)}" for name in COORDINATES)
    return f'phase="{rows["workload_kind"].at(row)}", {totals}'
