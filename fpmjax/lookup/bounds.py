"""Whether compiled tables that come from elsewhere stay inside themselves.

The kernel gathers without bounds handling, because the host's tables lie inside by construction.  Tables out of a
file have to be looked at first: what they point at and divide by, not whether the answers are right.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fpmjax.lookup.axis import STEPS, Axis
from fpmjax.lookup.curves import Knots
from fpmjax.lookup.decode import DecodeTable
from fpmjax.lookup.prefill import PrefillTable
from fpmjax.metrics import U32_MAX

DTYPES = {"x": np.uint32, "at": np.uint32, "ms": np.float64, "last": np.uint32}  # everything else is int32


class OutOfBoundsError(ValueError):
    """A table points outside; the message names the field."""


def check_tables(*tables: DecodeTable | PrefillTable) -> None:
    """Return where every gather of every table, or of every one of a stack, lies inside; OutOfBoundsError elsewhere."""
    for table in tables:
        if np.ndim(table.rows):
            for i in range(len(table.rows)):
                check_tables(jax.tree.map(lambda x: np.asarray(x)[i], table))  # noqa: B023
        elif isinstance(table, DecodeTable):
            check_decode(table)
        else:
            check_prefill(table)


def check_decode(table: DecodeTable) -> None:
    row, lo, hi = vectors(table, "row", "lo", "hi")
    within("row", row, 0, len(lo) - reach(table.kv))
    check_knots(table.knots, lo, hi)


def check_prefill(table: PrefillTable) -> None:
    site, lo, hi = vectors(table, "site", "lo", "hi")
    row, column = (array(table, name, 2) for name in ("row", "column"))
    require("row", row.shape[0] == column.shape[0] and row.shape[1] >= reach(table.tokens))
    require("column", column.shape[1] >= reach(table.kv))
    within("site", site, 0, row.shape[0] - 1)
    furthest = row.max(-1).astype(np.int64) + column.max(-1)
    require("row", min(row.min(), column.min()) >= 0 and furthest.max() < len(lo))
    array(table, "split", 0)
    check_knots(table.knots, lo, hi)


def check_knots(knots: Knots, lo: np.ndarray, hi: np.ndarray) -> None:
    """A knot that is read is followed by another one further on, and crossed with a curve that stands elsewhere."""
    parts = vectors(knots, "x", "ms", "at", "head", "row")
    size = len(parts[0])
    require("knots", all(len(part) == size for part in parts))
    require("hi", lo.shape == hi.shape and bool(((lo < 0) | (hi >= 0)).all()))
    within("lo", lo, -1, size - 2)
    within("hi", hi, -1, size - 2)
    within("head", knots.head, 0, size - 1)
    x, ms, at, head, _ = parts
    lo, hi = lo[lo >= 0], hi[lo >= 0]
    read = np.unique(np.concatenate([lo, hi]))
    closing = (x[read] == U32_MAX) & (x[read + 1] == 0)  # read at its first knot only
    require("x", ((x[read + 1] > x[read]) | closing).all())
    require("at", ((at[hi] > at[lo]) | (lo == hi)).all())
    require("checked", isinstance(knots.checked, bool))
    if not knots.checked:
        times = ms[np.concatenate([read, read + 1, head[read]])]
        require("ms", ((times > 0) & (times < np.inf)).all())


def reach(axis: Axis) -> int:
    """Cells that a coordinate can be located in."""
    last, start = vectors(axis, "last", "start")
    buckets = len(start) - 1
    require("start", buckets >= 32 and buckets & (buckets - 1) == 0)
    require("last", last[-1] == U32_MAX)
    within("start", start, 0, len(last) - 1)
    require("steps", type(axis.steps) is int and 0 <= axis.steps <= max(STEPS, 2 * len(last)))
    return max(int(start.max()), int(np.argmax(last == U32_MAX))) + 1


def vectors(table: Any, *names: str) -> list[np.ndarray]:
    return [array(table, name, 1) for name in names]


def array(table: Any, name: str, dimensions: int) -> np.ndarray:
    """A field, nonempty and of its type."""
    x = np.asarray(getattr(table, name))
    require(name, x.ndim == dimensions and x.size > 0 and x.dtype == DTYPES.get(name, np.int32))
    return x


def within(name: str, x: np.ndarray, low: int, high: int) -> None:
    require(name, low <= x.min() and x.max() <= high)


def require(name: str, holds: Any) -> None:
    if not holds:
        raise OutOfBoundsError(f"{name} is no part of a compiled table")
