"""A compiled cell: both phases' tables, padded so that cells of similar size share compiled code."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fpmjax.lookup.axis import Axis
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable, compile_decode
from fpmjax.lookup.prefill import PrefillTable, compile_prefill

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

T = TypeVar("T", DecodeTable, PrefillTable, Axis, Knots)


def compile_cell(cell: Cell) -> tuple[DecodeTable, PrefillTable]:
    """The direct rule over one cell, as padded host arrays."""
    return pad(compile_decode(cell.decode)), pad(compile_prefill(cell.prefill))


def pad(table: T) -> T:
    """Every axis of every array up to a power of two by repeating its last entry.

    A batch past the end keeps meeting the refusing entry, a cell end past the end stays 2**32 - 1, and no other
    tail is ever read.  The bucket table of an `Axis` keeps its length, which carries its mantissa bits.
    """
    changed = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, (Axis, Knots)):
            changed[field.name] = pad(value)
        elif np.ndim(value) and field.name != "start":
            widths = [(0, (1 << (n - 1).bit_length()) - n) for n in np.shape(value)]
            changed[field.name] = np.pad(value, widths, mode="edge")
    return replace(table, **changed)
