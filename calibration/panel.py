"""Axes for the charts of this folder, over the shapes of `fpmjax.study.svg`; the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fpmjax.study.svg import GRID, Look, bar, document, hatches, line, look, mark, text, upright

SMALL = 11
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 3", "4 4")  # of lines, by the hatch of a look
LOOKS = tuple(look(i) for i in range(len(DASHES)))

Ticks = Sequence[tuple[float, str]]


def steps(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """Ticks with their words."""
    count = round((high - low) / step)
    return [(low + i * step, f"{low + i * step:g}") for i in range(count + 1)]


@dataclass
class Panel:
    """One pair of linear axes at a place of the drawing, in pixels; `parts` collects what is drawn into it."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    parts: list[str] = field(default_factory=list)

    def at_x(self, x: float) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * self.width

    def at_y(self, y: float) -> float:
        return self.top + self.height - (y - self.y[0]) / (self.y[1] - self.y[0]) * self.height

    def axes(self, title: str, xticks: Ticks, yticks: Ticks, xlabel: str = "", ylabel: str = "") -> Panel:
        bottom, right = self.top + self.height, self.left + self.width
        self.parts.append(text(self.left, self.top - 8, title))
        for value, words in yticks:
            y = self.at_y(value)
            self.parts.append(line([(self.left, y), (right, y)], colour=GRID))
            self.parts.append(text(self.left - 6, y + 4, words, anchor="end", size=SMALL))
        for value, words in xticks:
            x = self.at_x(value)
            self.parts.append(line([(x, bottom), (x, bottom + 4)]))
            self.parts.append(text(x, bottom + 17, words, anchor="middle", size=SMALL))
        zero = self.at_y(min(max(0.0, self.y[0]), self.y[1]))
        self.parts.append(line([(self.left, zero), (right, zero)]))
        if xlabel:
            self.parts.append(text(self.left + self.width / 2, bottom + 34, xlabel, anchor="middle", size=SMALL))
        if ylabel:
            self.parts.append(upright(self.left - 36, self.top + self.height / 2, ylabel, size=SMALL))
        return self

    def bar(self, x: float, width: float, y: float, look: Look) -> None:
        """From zero to y, centred on x."""
        low, high = sorted((self.at_y(0.0), self.at_y(y)))
        left, right = self.at_x(x - width / 2), self.at_x(x + width / 2)
        self.parts.append(bar(left, low, right - left, high - low, look))

    def line(self, points: Iterable[tuple[float, float]], look: Look) -> None:
        placed = [(self.at_x(x), self.at_y(y)) for x, y in points]
        self.parts.append(line(placed, colour=look.colour, width=1.5, dash=DASHES[look.hatch]))

    def across(self, y: float, look: Look) -> None:
        """A level over the whole width."""
        self.line([(self.x[0], y), (self.x[1], y)], look)

    def marks(self, points: Iterable[tuple[float, float]], look: Look) -> None:
        self.parts.extend(mark(self.at_x(x), self.at_y(y), look) for x, y in points)


def legend(x: float, y: float, entries: Iterable[tuple[Look, str, str]]) -> list[str]:
    """One below another: (look, "bar" | "mark" | "line", words)."""
    parts = []
    for i, (series, kind, words) in enumerate(entries):
        here = y + 18 * i
        if kind == "bar":
            parts.append(bar(x, here - 9, 14, 10, series))
        elif kind == "mark":
            parts.append(mark(x + 7, here - 4, series))
        else:
            ends = [(x - 2, here - 4), (x + 18, here - 4)]
            parts.append(line(ends, colour=series.colour, width=1.5, dash=DASHES[series.hatch]))
        parts.append(text(x + 24, here, words, size=SMALL))
    return parts


def drawing(width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """The whole file; the title is drawn too."""
    return document(width, height, title, description, [hatches(LOOKS), text(16, 24, title, size=14), *parts])
