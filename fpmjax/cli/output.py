"""How answers are shown: aligned columns, numbers, JSON, and notes on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: Iterable[int] = ()) -> list[str]:
    """Lines of a table, two blanks between its columns; columns are right-aligned except those in `left`."""
    return list(aligned_lines(headers, lambda: rows, left=left))


def aligned_lines(
    headers: Sequence[str], rows: Callable[[], Iterable[Sequence[str]]], *, left: Iterable[int] = ()
) -> Iterator[str]:
    """`aligned` of rows that are made twice, first for their widths, so that many of them need no memory."""
    widths = list(map(len, headers))
    for row in rows():
        widths = [max(w, len(cell)) for w, cell in zip(widths, row, strict=True)]
    left = set(left)

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    yield line(headers)
    yield from map(line, rows())


def ms(value: float | None) -> str:
    """Milliseconds for people: four decimals, or six digits where those would say little; `-` where there are none."""
    if value is None or value != value:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e9 else f"{value:.6g}"


def weight(value: float) -> str:
    """A weight, or a share of one, in three decimals that never claim a whole that it is not."""
    text = f"{value:.3f}"
    return text if text not in ("0.000", "1.000") or value in (0, 1) else f"{value:.9g}"


def percent(part: int, whole: int) -> str:
    """A share in per cent, never rounded to 0 or 100 where it is not."""
    if not whole:
        return "-"
    text = f"{100 * part / whole:.1f}%"
    if text == "100.0%" and part < whole:
        return ">99.9%"
    return "<0.1%" if text == "0.0%" and part else text


def span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def wrapped(text: str, width: int = 112) -> list[str]:
    """An explanation as indented lines of a readable length."""
    indent = {"initial_indent": "  ", "subsequent_indent": "  "}
    return [line for part in text.splitlines() for line in textwrap.wrap(part, width, **indent)]  # type: ignore[arg-type]


def number(value: Any) -> float | None:
    """A float for JSON: NaN, which JSON does not have, as null."""
    return None if value != value else float(value)


def print_json(document: dict[str, Any]) -> None:
    """One JSON document; ASCII, so that it survives any terminal, and NaN refused rather than written."""
    print(json.dumps(document, indent=1, allow_nan=False))


def print_json_with(document: dict[str, Any], name: str, items: Iterable[dict[str, Any]]) -> None:
    """`print_json` of a document whose list `name` is written item by item, as it may be long."""
    head, tail = json.dumps(document | {name: []}, indent=1, allow_nan=False).split(f'\n "{name}": []')
    print(f'{head}\n "{name}": [', end="")
    separator = ""
    for item in items:
        text = json.dumps(item, indent=1, allow_nan=False).replace("\n", "\n  ")
        print(f"{separator}\n  {text}", end="")
        separator = ","
    print(f"\n ]{tail}" if separator else f"]{tail}")


ALL_IDLE = "every iteration is idle and takes 0 ms: no rank is given any work"


def fake_kv_rows(cell: Any) -> dict[str, int]:
    """What became of a cell's rows on fabricated KV, for JSON."""
    return {"dropped": cell.fake_dropped, "healed": cell.fake_healed, "kept": cell.fake_kept}


def note(text: str) -> None:
    """Something worth knowing beside the data."""
    tell(f"note: {text}")


def tell(text: str, end: str = "\n") -> None:
    """Text on stderr; where it cannot be written, the data on stdout matters all the same."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # full, or closed
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """Nobody reads this any more: what is still buffered must not fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def breakdown(reasons: dict[str, int]) -> str:
    """`2 decode_no_two_sided_batch_bracket, 1 no_rows`"""
    return ", ".join(f"{count:,} {word}" for word, count in reasons.items())
