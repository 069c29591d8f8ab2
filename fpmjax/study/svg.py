"""Shapes of an SVG as text with the same bytes everywhere: two decimals, no ids or dates, names escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

INK, FAINT, GRID = "#1a1a1a", "#595959", "#d9d9d9"
FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
WIDE = 0.62  # of the font size: what a letter of these fonts takes on average, with some room
MARKS = ("circle", "square", "triangle", "diamond", "cross", "ring")


class Look(NamedTuple):
    """How a series is drawn: its colour, and a hatch and a mark that tell it apart without one."""

    colour: str
    hatch: int
    mark: str


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8a4f7d", "#7a6200", "#4d4d4d")  # distinct to the colour-blind, dark


def look(i: int) -> Look:
    """That of the i-th series; they repeat after six, and the labels tell more."""
    return Look(COLOURS[i % 6], i % 6, MARKS[i % 6])


def at(value: float) -> str:
    """A coordinate in as few digits as a hundredth of a pixel needs."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def width_of(words: str, size: float) -> float:
    """Pixels that a text takes, rather too many."""
    return WIDE * size * len(words)


def fitted(words: str, room: float, size: float) -> str:
    """The text, its middle left out where it would be wider than the room."""
    most = max(int(room / (WIDE * size)), 3)
    if len(words) <= most:
        return words
    head = (most - 1 + 1) // 2
    tail = most - 1 - head
    return words[:head] + "…" + (words[-tail:] if tail else "")


def text(
    x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", colour: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{at(x)}" y="{at(y)}" font-size="{at(size)}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{weight}>{escape(words)}</text>'


def upright(x: float, y: float, words: str, *, size: float = 12) -> str:
    """A text that reads from below upwards, centred at the point."""
    return (
        f'<text transform="translate({at(x)} {at(y)}) rotate(-90)" font-size="{at(size)}" '
        f'text-anchor="middle" fill="{INK}">{escape(words)}</text>'
    )


def line(points: Iterable[tuple[float, float]], *, colour: str = INK, width: float = 1, dash: str = "") -> str:
    joined = " ".join(f"{at(x)},{at(y)}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{at(width)}"{dashed}/>'


def bar(x: float, y: float, width: float, height: float, look: Look, tip: str = "") -> str:
    """A hatched box from its top left corner; tip: what a pointer over it is told."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{at(x)}" y="{at(y)}" width="{at(width)}" height="{at(height)}" '
        f'fill="url(#h{look.hatch})" stroke="{look.colour}">{title}</rect>'
    )


def mark(x: float, y: float, look: Look, size: float = 3.5) -> str:
    """A point of a series, by its shape."""
    style = f'fill="{look.colour}" fill-opacity="0.75" stroke="{look.colour}"'
    if look.mark in ("circle", "ring"):
        if look.mark == "ring":
            style = f'fill="none" stroke="{look.colour}" stroke-width="1.5"'
        return f'<circle cx="{at(x)}" cy="{at(y)}" r="{at(size)}" {style}/>'
    if look.mark == "square":
        return f'<rect x="{at(x - size)}" y="{at(y - size)}" width="{at(2 * size)}" height="{at(2 * size)}" {style}/>'
    if look.mark == "cross":
        a, b, c, d = at(x - size), at(x + size), at(y - size), at(y + size)
        return f'<path d="M{a},{c}L{b},{d}M{a},{d}L{b},{c}" stroke="{look.colour}" stroke-width="1.5"/>'
    corners = {
        "triangle": ((0, -1.2), (1.1, 0.9), (-1.1, 0.9)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[look.mark]
    points = " ".join(f"{at(x + size * dx)},{at(y + size * dy)}" for dx, dy in corners)
    return f'<polygon points="{points}" {style}/>'


def hatches(looks: Sequence[Look]) -> str:
    """Definitions of the hatches that are used."""
    drawn = {
        0: "",
        1: '<path d="M-2,2L2,-2M0,8L8,0M6,10L10,6" {}/>',
        2: '<circle cx="2" cy="2" r="1.3" {}/><circle cx="6" cy="6" r="1.3" {}/>',
        3: '<path d="M0,0L8,8M0,8L8,0" {}/>',
        4: '<path d="M0,2H8M0,6H8" {}/>',
        5: '<path d="M2,0V8M6,0V8" {}/>',
    }
    out = []
    for one in looks:
        pen = f'stroke="{one.colour}" stroke-width="1.5" fill="none"'
        ground = f'<rect width="8" height="8" fill="{one.colour}" fill-opacity="{0.55 if one.hatch == 0 else 0.12}"/>'
        shapes = drawn[one.hatch].replace("{}", pen)
        out.append(
            f'<pattern id="h{one.hatch}" width="8" height="8" patternUnits="userSpaceOnUse">{ground}{shapes}</pattern>'
        )
    return "<defs>" + "".join(dict.fromkeys(out)) + "</defs>"


def document(width: float, height: float, title: str, description: str, body: Iterable[str]) -> str:
    """The whole file; the title and the description are what a screen reader says."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {at(width)} {at(height)}" width="{at(width)}" '
            f'height="{at(height)}" role="img" aria-labelledby="title desc" font-family="{FONT}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f'<rect width="{at(width)}" height="{at(height)}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that span low..high, at most about so many of them."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(most - 1, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]
