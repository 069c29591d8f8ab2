"""How far a long job is: one line that redraws itself on a terminal, and nothing anywhere else.

with Progress("reading traces", total, unit="B") as bar:
    bar(done)

reading traces [#########...........]  45%  1.3 GB of 2.9 GB, 85 MB/s, 0:19 left

Where the package rich is installed, it draws the line, with the same words.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from fpmjax.rich_bar import RichBar

DELAY, PAUSE = 0.5, 0.1  # seconds before the first line, so that short jobs show none, and between two of them
CELLS = 20  # of the bar
PREFIXES = ("", "k", "M", "G", "T", "P")


class Progress:
    """Call it with what is done so far, as often as you like; the line is gone when the block ends.

    what: the job in a few words; total: all there is to do, or None where nobody knows; unit: "B" for bytes, else a
    plural noun such as "observations".  file: where the line goes, stderr as it is when the block begins; clock:
    seconds.  rich: whether that package may draw.  Nothing is written unless `file` is a terminal that can take a line
    back, and a terminal that goes away ends the line, never the job.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        unit: str = "",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        rich: bool = True,
    ):
        self.what, self.total, self.unit, self.file, self.clock = what, total, unit, file, clock
        self.watched, self.shown = False, 0
        self.rich = rich
        self.bar: RichBar | None = None  # once there is something to draw
        self.begin = self.next = 0.0

    def __enter__(self) -> Progress:
        self.file = self.file or sys.stderr
        self.watched = is_terminal(self.file)
        self.begin = self.clock()
        self.next = self.begin + DELAY
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.bar is not None:
                self.bar.close()
        except (OSError, ValueError):  # closed, or gone
            pass
        if self.shown:
            self._write("\r" + " " * self.shown + "\r")

    def __call__(self, done: float, total: float | None = None) -> None:
        """`done` of `total`; without a total the one known so far holds."""
        if total is not None:
            self.total = total
        if not self.watched:
            return
        now = self.clock()
        if now < self.next:
            return
        self.next = now + PAUSE
        if self.rich and self._drawn_by_rich(done, now - self.begin):
            return
        line = self._line(done, now - self.begin)
        columns = shutil.get_terminal_size().columns
        line = line[: max(columns - 1, 0)]  # the last column would wrap
        self._write("\r" + line.ljust(self.shown))
        self.shown = len(line)

    def _drawn_by_rich(self, done: float, seconds: float) -> bool:
        from fpmjax.rich_bar import rich_bar

        if self.bar is None and self.file is not None:
            self.bar = rich_bar(self.what, self.file)
            self.rich = self.bar is not None
        if self.bar is None:
            return False
        try:
            self.bar.draw(done, self._total_at(done), self._told(done, seconds))
        except (OSError, ValueError):  # closed, or gone
            self.watched, self.bar = False, None
        return True

    def _line(self, done: float, seconds: float) -> str:
        told, total = self._told(done, seconds), self._total_at(done)
        if total is None:
            return f"{self.what}: {told}"
        share = done / total
        bar = "#" * int(CELLS * share)
        return f"{self.what} [{bar.ljust(CELLS, '.')}] {math.floor(100 * share):3d}%  {told}"

    def _total_at(self, done: float) -> float | None:
        """The total, if there is one; one that was wrong says nothing."""
        return self.total if self.total and done <= self.total else None

    def _told(self, done: float, seconds: float) -> str:
        """Amounts, rate and time left."""
        rate = done / seconds if seconds > 0 else 0.0
        short = self.unit if self.unit == "B" else ""  # of plain things the total alone carries the noun
        speed = f", {amount(rate, short)}/s" if rate else ""
        total = self._total_at(done)
        if total is None:
            return f"{amount(done, self.unit)}{speed}"
        left = f", {clock_time((total - done) / rate)} left" if rate else ""
        return f"{amount(done, short)} of {amount(total, self.unit)}{speed}{left}"

    def _write(self, text: str) -> None:
        try:
            print(text, end="", file=self.file, flush=True)
        except (OSError, ValueError):  # closed, or gone
            self.watched, self.shown = False, 0


def is_terminal(file: TextIO | None) -> bool:
    """Whether a line can be drawn there and taken back."""
    try:
        return file is not None and file.isatty() and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError):  # closed
        return False


def amount(value: float, unit: str) -> str:
    """A quantity in three digits with a decimal prefix where it counts bytes, else a whole number and its unit."""
    if unit != "B":
        return f"{value:,.0f} {unit}".rstrip()
    power = 0
    while value >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if not power or value >= 99.5 else 1
    return f"{value:.{digits}f} {PREFIXES[power]}B"


def clock_time(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
