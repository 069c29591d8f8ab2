"""One broken rule of a table, and how a value is shown in its message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fpmjax.tables.columns import Column
from fpmjax.tables.identity import shorten


@dataclass(frozen=True, eq=False)
class Fault:
    """One rule: the rows that break it, and what to say about one of them."""

    code: str
    bad: np.ndarray
    """bool [n]."""
    message: Callable[[int], str]
    """Row number -> the sentence, starting with the row."""
    hint: str


def seen(stated: Column, row: int) -> str:
    """The value in one row for a message, `null` and unreadable ones included."""
    if stated.fault:
        return f"<{stated.fault}>"
    value = stated.at(row)
    return "null" if value is None or (stated.words is not None and stated.null[row]) else shorten(value)
