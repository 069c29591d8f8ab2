"""What callers give beside models and work, read and checked: numbers, draft lengths, words, flags."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.metrics import U32_MAX, as_index, show
from fpmjax.speculative import check_range, draft_lengths


def limits(value: Any) -> np.ndarray:
    """float64 of any shape; OptionError where one is no positive number."""
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "iuf" or np.ma.is_masked(value):
            raise ValueError
    except ValueError:
        refuse_option("limit_ms", f"limit_ms is {show(value)}", "give positive milliseconds, or an array of them")
    found = found.astype(np.float64)
    if not (found > 0).all():
        refuse_option(
            "limit_ms", f"limit_ms holds {found[~(found > 0)][0]}", "a limit is a positive number of milliseconds"
        )
    return found


def integers(name: str, value: Any, least: int) -> np.ndarray:
    """int64 of any shape; OptionError where one is no integer of least .. 2**32 - 1."""
    hint = f"give integers from {least} to {U32_MAX}"
    try:
        found = np.asarray(operator.index(value) if not hasattr(value, "__array__") and np.ndim(value) == 0 else value)
        whole = found.dtype.kind in "iu" or not found.size or all(type(x) is int for x in found.ravel())
        if isinstance(value, bool) or np.ma.is_masked(value) or not whole:
            raise TypeError
    except (TypeError, ValueError):
        refuse_option(name, f"{name} is {show(value)}", hint)
    if found.size and not least <= int(found.min()) <= int(found.max()) <= U32_MAX:
        outside = int(found.min()) if int(found.min()) < least else int(found.max())
        refuse_option(name, f"{name} holds {show(outside)}", hint)
    return found.astype(np.int64)


def integer(name: str, value: Any, least: int, most: int = U32_MAX) -> int:
    """One integer; OptionError where it is none of least .. most."""
    found = as_index(value)
    if found is None or not least <= found <= most:
        refuse_option(name, f"{name} is {show(value)}", f"give one integer from {least} to {most}")
    return found


def flag(name: str, value: Any) -> bool:
    """OptionError for everything but True and False: a text, or a series, would be true whatever it says."""
    if not isinstance(value, (bool, np.bool_)):
        refuse_option(name, f"{name} is {show(value)}", "give True or False")
    return bool(value)


def word(name: str, value: Any, words: Sequence[str]) -> str:
    """One of the words; OptionError for everything else."""
    if not isinstance(value, str) or value not in words:
        refuse_option(name, f"{name} is {show(value)}", f"one of {', '.join(words)}")
    return value


def depths(value: Any) -> np.ndarray:
    """int64 draft lengths, among several also 0, which is ordinary decoding.

    Raises DraftLengthTypeError or SpeculationError where one is not acceptable; 0 alone is not, as in `estimate`.
    """
    found = np.asarray(draft_lengths(value))
    for depth in {int(found.min()), int(found.max())} if found.size else ():
        if depth or not found.ndim:
            check_range(depth)
    return found
