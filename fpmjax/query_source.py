"""What a sweep asks, piece by piece: `Piece`, and the pieces of a grid; those of a table are in `query_table`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from fpmjax.estimate import fill
from fpmjax.grid import DRAFT, MODEL, Grid
from fpmjax.metrics import U32_MAX
from fpmjax.work import COUNTS, Work

TOTALS = {  # axis -> its requests, and the total that it makes
    "kv_per_request": ("decode_requests", "decode_kv"),
    "tokens_per_request": ("prefill_requests", "prefill_tokens"),
}


@dataclass(frozen=True, eq=False)
class Piece:
    """n queries of one rank each.

    inputs: their columns in the result; work: [n]; depth: int64 [n], 0 for ordinary decoding, or None for all so;
    model: int64 [n], which model is asked, or None for the only one; refused: bool [n] or None, rows that cannot be
    asked at all and stand idle in `work`; faults: position -> what is wrong with a row, such or one that is asked.
    """

    inputs: Mapping[str, Any]
    work: Work
    depth: np.ndarray | None
    model: np.ndarray | None = None
    refused: np.ndarray | None = None
    faults: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.work.shape[0]


class Source(Protocol):
    """Queries in a fixed order.

    fields: of the input columns; size: queries; phases: of lookups that they may need; drafted: whether any has a draft
    length; faulty: whether single rows may be malformed.
    """

    fields: list[pa.Field]
    size: int
    phases: tuple[str, ...]
    drafted: bool
    faulty: bool

    def pieces(self, start: int, chunk: int) -> Iterator[Piece]:
        """The queries from `start` on, at most `chunk` in a piece."""
        ...

    def digest(self) -> str:
        """SHA-256 of everything that is asked, in hexadecimal."""
        ...

    def about(self) -> dict[str, Any]:
        """What is asked, for a document."""
        ...


class GridQueries:
    """The cells of a grid in row-major order."""

    faulty = False

    def __init__(self, grid: Grid):
        self.grid, self.size = grid, grid.size
        self.axes = {name: x for name, x in zip(grid.names, grid.values, strict=True) if name != MODEL}
        self.fields = [pa.field(name, pa.int64()) for name in self.axes]
        self.phases = phases_of(self.axes)
        self.drafted = DRAFT in self.axes

    def pieces(self, start: int, chunk: int) -> Iterator[Piece]:
        views = {name: self.view(name) for name in self.grid.names}
        for begin in range(start, self.size, chunk):
            n = min(chunk, self.size - begin)
            columns = {name: np.empty(n, np.int64) for name in views}
            for name, view in views.items():
                fill(columns[name], view, begin, view.ndim)
            model = columns.pop(MODEL, None)
            work, refused = work_of(columns, n)
            yield Piece(columns, work, columns.get(DRAFT), model, refused)

    def view(self, name: str) -> np.ndarray:
        """An axis, broadcast over the grid without being copied."""
        place = self.grid.names.index(name)
        lengths = [1] * len(self.grid.shape)
        lengths[place] = -1
        return np.broadcast_to(self.grid.values[place].reshape(lengths), self.grid.shape)

    def digest(self) -> str:
        found = hashlib.sha256(repr(self.grid.shape).encode())
        for name, x in zip(self.grid.names, self.grid.values, strict=True):
            found.update(name.encode())
            found.update(x.tobytes())
        return found.hexdigest()

    def about(self) -> dict[str, Any]:
        axes = {name: {"values": len(x), "least": int(x.min()), "most": int(x.max())} for name, x in self.axes.items()}
        return {"axes": axes, "cells": self.size}


def phases_of(axes: Collection[str]) -> tuple[str, ...]:
    """The lookups that work on these axes may need."""
    prefill, decode = (name in axes for name in ("prefill_requests", "decode_requests"))
    asked = {"prefill": prefill, "decode": decode, "baseline": prefill and decode}
    return tuple(phase for phase, needed in asked.items() if needed)


def work_of(columns: Mapping[str, np.ndarray], n: int) -> tuple[Work, np.ndarray | None]:
    """The work uint32 [n] of columns of counts in 0 .. 2**32 - 1, int64 [n]; totals may be given per request.

    Where a total does not fit in 32 bits the row stands idle, and is marked in the second value.
    """
    counts = {name: x for name, x in columns.items() if name in COUNTS}
    refused = None
    for each, (requests, total) in TOTALS.items():
        if each not in columns:
            continue
        many, of_each = columns[requests], columns[each]
        product = many * of_each
        if n and int(many.max()) * int(of_each.max()) > U32_MAX:
            # int64 would wrap beyond 2**63, so the factors are compared and not their product
            over = of_each > U32_MAX // np.maximum(many, 1)
            over &= many > 0
            if over.any():
                refused = over if refused is None else refused | over
        counts[total] = product
    if refused is not None:
        counts = {name: np.where(refused, 0, x) for name, x in counts.items()}
    fields: dict[str, Any] = {name: x.astype(np.uint32)[:, None] for name, x in counts.items()}
    return Work(**fields), refused
