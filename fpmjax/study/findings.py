"""What is wrong with the rows of a study, gathered so that one refusal shows several faults at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fpmjax.errors import refuse_option

SHOWN = 5  # findings that a message tells; the rest are counted


class Findings:
    """Faults of n rows.  A row that has one is not looked at by later rules, which could only repeat it.

    place: row -> how the user finds it, for example `line 7 (row 6)`.
    """

    def __init__(self, label: str, rows: int, place: Callable[[int], str]):
        self.label, self.place = label, place
        self.bad = np.zeros(rows, bool)
        self.total = 0
        self.told: list[tuple[int, str, str, str]] = []  # row, column, what, hint

    def add(self, column: str, wrong: np.ndarray, say: Callable[[int], str], hint: str) -> None:
        """Rows of a mask [n]; say: row -> what is wrong there, after the column's name."""
        rows = np.flatnonzero(wrong & ~self.bad)
        if rows.size:
            self.total += rows.size
            self.told += [(row, column, say(row), hint) for row in rows[:SHOWN].tolist()]
            self.bad[rows] = True

    def refuse(self) -> None:
        """Raise OptionError `study_rows` for the first rows that have a finding, or return where none has."""
        if not self.told:
            return
        told = sorted(self.told, key=lambda finding: finding[0])[:SHOWN]
        lines = [f"{self.place(row)}, {column}: {what}" for row, column, what, _ in told]
        if self.total == 1:
            refuse_option("study_rows", f"{self.label}, {lines[0]}", told[0][3])
        if self.total > len(told):
            lines.append(f"and {self.total - len(told):,} more")
        refuse_option("study_rows", "\n  ".join([f"{self.label}: {self.total:,} rows are refused", *lines]), told[0][3])
