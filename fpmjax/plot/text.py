"""Text that others chose, such as names of models: as the font of pictures can show it, and not longer than it may be.

A letter that the font lacks is written as its escape (a Chinese 'model' as \\u6a21\\u578b): another font would be
another picture on every machine, and a box in its place would make two names one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from functools import lru_cache

LONGEST = 48  # letters of a name
FONT = "DejaVu Sans"  # comes with matplotlib: the same on every machine


@lru_cache(1)
def letters() -> frozenset[int]:
    """Code points of the font."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(FONT)).get_charmap())


def legible(text: str, most: int | None = None) -> str:
    """In one line and in letters of the font; of a longer one than `most` letters both ends, with dots between."""
    known = letters()
    line = " ".join(text.split())
    out = "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in line)
    if most is None or len(out) <= most:
        return out
    tail = (most - 1) // 2
    return f"{out[: most - 1 - tail]}…{out[-tail:]}"


def told_apart(names: Iterable[str]) -> list[str]:
    """`legible` names of at most `LONGEST` letters; those that look the same then are numbered."""
    out: list[str] = []
    for name in names:
        shown, again = legible(name, LONGEST), 1
        while shown in out:
            again += 1
            shown = f"{legible(name, LONGEST - 6)} ({again})"
        out.append(shown)
    return out


def wrapped(text: str, letters: int) -> str:
    """In lines of so many letters."""
    return "\n".join(textwrap.wrap(text, letters))
