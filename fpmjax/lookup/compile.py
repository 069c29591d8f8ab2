"""A compiled cell: both phases' tables, padded so that cells of similar size share compiled code."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fpmjax.errors import TableError
from fpmjax.lookup.axis import Axis
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable, compile_decode
from fpmjax.lookup.prefill import PrefillTable, compile_prefill

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

FLOORS = {1: (1024,), 2: (16, 128)}  # smallest padded sizes by dimensions: most small tables then look alike

T = TypeVar("T", bound=DecodeTable | PrefillTable | Axis | Knots)


SMALLEST_MS, LARGEST_MS = float(np.finfo(np.float64).tiny), 1e290
"""Latencies between these stay normal numbers under every interpolation, composition and draft factor: XLA flushes
subnormal ones to zero, and larger ones could overflow."""


def compile_cell(cell: Cell) -> tuple[DecodeTable, PrefillTable]:
    """The direct rule over one cell, as padded host arrays; TableError (`latency_range`) beyond the range above."""
    for phase, points in (("decode", cell.decode), ("prefill", cell.prefill)):
        absurd = (points.latency_ms < SMALLEST_MS) | (points.latency_ms > LARGEST_MS)
        if absurd.any():
            i = int(absurd.argmax())
            raise TableError(
                f"{phase} row {points.row[i]} has latency_ms={points.latency_ms[i]}, outside "
                f"{SMALLEST_MS}..{LARGEST_MS}\nhint: milliseconds of a forward pass are meant",
                code="latency_range",
            )
    return pad(compile_decode(cell.decode)), pad(compile_prefill(cell.prefill))


def pad(table: T) -> T:
    """Every axis of every array up to a power of two, and not below a floor, by repeating its last entry.

    A batch past the end keeps meeting the refusing entry, a cell end past the end stays 2**32 - 1, and no other
    tail is ever read.  The bucket table of an `Axis` keeps its length, which carries its mantissa bits.
    """
    changed: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, (Axis, Knots)):
            changed[field.name] = pad(value)
        elif np.ndim(value) and field.name != "start":
            shape = np.shape(value)
            sizes = [max(low, 1 << (n - 1).bit_length()) for n, low in zip(shape, FLOORS[len(shape)], strict=True)]
            widths = [(0, size - n) for n, size in zip(shape, sizes, strict=True)]
            changed[field.name] = np.pad(value, widths, mode="edge")
    return replace(table, **changed)
