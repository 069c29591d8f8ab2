"""`grid`: every combination of a few axes of work, named, in row-major order, and never built whole."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.guard import is_model
from fpmjax.metrics import U32_MAX, holds_masked, show
from fpmjax.work import Work

DECODE, PREFILL, DRAFT = "decode_requests", "prefill_requests", "draft_length"
# Axis: those of which it needs one beside it, and the ones that say the same otherwise.
AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    DECODE: (("decode_kv", "kv_per_request"), ()),
    "decode_kv": ((DECODE,), ("kv_per_request",)),
    "kv_per_request": ((DECODE,), ("decode_kv",)),
    PREFILL: (("prefill_tokens", "tokens_per_request"), ()),
    "prefill_tokens": ((PREFILL,), ("tokens_per_request",)),
    "tokens_per_request": ((PREFILL,), ("prefill_tokens",)),
    "prefill_kv": ((PREFILL,), ()),
    DRAFT: ((DECODE,), ()),
}
ALONE = (DECODE, PREFILL, DRAFT)  # which need nothing beside them where they are 0 throughout
HOW_MANY = "as many as are meant; 0 is none"
MODEL = "model"
MOST = 2**53  # cells; positions stay exact in every number type on the way
LONGEST = 2**28  # values of one axis: what memory holds
LARGEST = {DRAFT: U32_MAX - 1}


def grid(**axes: Any) -> Grid:
    """Every combination of the axes, the last one running fastest.

    decode_requests, and with it decode_kv (KV tokens of all requests together) or kv_per_request;
    prefill_requests, and with it prefill_tokens or tokens_per_request, and where there is any prefill_kv;
    draft_length, 0 being ordinary decoding; model: several models, each asked everything.

    An axis is an integer, or integers in a list, range or array; its order and repetitions are kept.  All of it is the
    work of one rank.

    Raises OptionError (code: the axis) for an unknown axis, one without values, values that are no integers of
    0 .. 2**32 - 1 or too many to hold, axes that contradict each other or lack one that belongs to them, and more
    than 2**53 cells.
    """
    models = as_models(axes[MODEL]) if MODEL in axes else None
    values = {name: np.arange(len(models or ())) if name == MODEL else as_axis(name, x) for name, x in axes.items()}
    if not values.keys() & {DECODE, PREFILL}:
        refuse_option(
            DECODE, "a grid needs decode_requests or prefill_requests", "grid(decode_requests=[1, 8], decode_kv=8192)"
        )
    for name in (name for name in values if name != MODEL):
        needs, others = AXES[name]
        if values.keys().isdisjoint(needs) and (name not in ALONE or values[name].any()):
            refuse_option(name, f"{name} needs {' or '.join(needs)} beside it", f"add {needs[0]}=1, or {HOW_MANY}")
        for other in others:
            if other in values:
                refuse_option(name, f"{name} and {other} say the same twice", "give one of them")
    if DRAFT in values and values[DRAFT].any() and PREFILL in values and values[PREFILL].any():
        refuse_option(DRAFT, "a draft length widens pure decode, not prefill", "leave the prefill axes out")
    made = Grid(tuple(values), tuple(values.values()), models)
    if made.size > MOST:
        refuse_option("size", f"this grid has {made.size:,} cells, more than 2**53", "make some axis coarser")
    return made


@dataclass(frozen=True, eq=False)
class Grid:
    """Named axes; `values` int64 arrays, of the model axis positions in `models`."""

    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    models: tuple[Any, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.values))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[self.names.index(name)]

    def columns(self, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """The value of every axis in cells start .. stop, int64 [stop - start] each; only these are built."""
        stop = self.size if stop is None else min(stop, self.size)
        flat = np.arange(start, stop)
        out = {}
        for name, x, stride in zip(self.names, self.values, self.strides, strict=True):
            out[name] = x[flat // stride % len(x)]
        return out

    @property
    def strides(self) -> tuple[int, ...]:
        """Cells between neighbours of every axis."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.names)))

    def work(self, start: int = 0, stop: int | None = None) -> tuple[Work, np.ndarray | None]:
        """(work [n], draft lengths int64 [n], 0 for ordinary decoding, or None) of cells start .. stop.

        A total that exceeds 32 bits is left above it, and is refused as invalid work where it is asked.
        """
        return work_of(self.columns(start, stop))

    def __repr__(self) -> str:
        axes = " x ".join(f"{name} {len(x)}" for name, x in zip(self.names, self.values, strict=True))
        return f"<grid of {self.size:,}: {axes}>"


def work_of(columns: dict[str, Any]) -> tuple[Work, Any]:
    """The work of columns of a grid (arrays of one shape, NumPy or traced), and their draft lengths or None."""
    totals = dict(columns)
    for each, requests, total in (
        ("kv_per_request", DECODE, "decode_kv"),
        ("tokens_per_request", PREFILL, "prefill_tokens"),
    ):
        if each in totals:
            totals[total] = totals.pop(each) * totals[requests]
    depth = totals.pop(DRAFT, None)
    totals.pop(MODEL, None)
    return Work(**{name: x[..., None] for name, x in totals.items()}), depth


def with_models(grid: Grid, models: tuple[Any, ...]) -> Grid:
    """The grid with a model axis in front."""
    return Grid((MODEL, *grid.names), (np.arange(len(models)), *grid.values), models)


def as_axis(name: str, value: Any) -> np.ndarray:
    """int64 [n], n at least 1."""
    if name not in AXES:
        close = difflib.get_close_matches(name, [*AXES, MODEL], 1)
        hint = f"did you mean {close[0]}?" if close else f"axes are {', '.join([*AXES, MODEL])}"
        refuse_option(name, f"{name} is no axis of a grid", hint)
    found = value if isinstance(value, range) else integers_of(value)
    if found is None:
        refuse_option(name, f"{name} is {show(value)}", "give an integer, or a list, range or array of them")
    if isinstance(found, range):
        low, high = sorted((found[0], found[-1])) if found else (0, -1)
    else:
        low, high = (int(found.min()), int(found.max())) if len(found) else (0, -1)
    if high < low:
        refuse_option(name, f"{name} has no values", "give at least one")
    most = LARGEST.get(name, U32_MAX)
    if low < 0 or high > most:
        refuse_option(name, f"{name} reaches {show(low if low < 0 else high)}", f"values lie from 0 to {most}")
    if len(found) > LONGEST:
        refuse_option(name, f"{name} has {len(found):,} values, more than {LONGEST:,}", "make the axis coarser")
    if isinstance(found, range):
        return np.arange(found.start, found.stop, found.step, dtype=np.int64)
    return found.astype(np.int64)


def integers_of(value: Any) -> np.ndarray | None:
    """[n], of integers or of objects that are all integers; None for everything else, and where one is masked."""
    try:
        if hasattr(value, "__array__"):
            found = np.atleast_1d(np.asarray(value))
        else:
            found = np.array([value] if np.ndim(value) == 0 else list(value), object)
    except (TypeError, ValueError):  # ragged lists, tracers of jax
        return None
    whole = found.dtype.kind in "iu" or (
        found.dtype == object and all(isinstance(x, (int, np.integer)) and type(x) is not bool for x in found.flat)
    )
    return found if whole and found.ndim == 1 and not holds_masked(value) else None


def as_models(models: Any) -> tuple[Any, ...]:
    found = tuple(models) if isinstance(models, (Sequence, tuple, list)) and not isinstance(models, str) else (models,)
    if not found or not all(map(is_model, found)):
        refuse_option(
            MODEL, f"model is {show(models)}", "give a list of models, such as [fpmjax.direct(cell) for cell in cells]"
        )
    return found
