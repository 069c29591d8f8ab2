"""How many recorded answers of the peer are equal: `python calibration/peer_parity/rebuild.py`.

Reads `tests/cases` with the readers of the tests, so it needs the `test` extra.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from calibration.common import Result, command, result_of, study_page, table  # noqa: E402
from calibration.panel import LOOKS, drawing, legend  # noqa: E402
from calibration.peer_parity import kinds  # noqa: E402
from fpmjax.progress import Progress  # noqa: E402
from fpmjax.study.svg import bar, text  # noqa: E402

QUESTION = "How many of the peer's recorded answers does this package give too, bit for bit?"
PEER = "0.13.0.dev202610270000000085"
CASES = kinds.TESTS / "cases"
READ = (
    "interpolation/cases.jsonl.gz",
    "interpolation/tables/*/*",
    "speculation_tables/*",
    "metrics_cases.jsonl.gz",
    "speculative_cases.jsonl.gz",
    "regression_cases.jsonl.gz",
    "tables.tar.xz",
    "learned/*.gz",
)
SOURCES: tuple[Callable[[], Iterable[kinds.Found]], ...] = (
    kinds.iterations,
    kinds.in_bulk,
    kinds.inputs,
    kinds.tables,
    kinds.speculative,
    kinds.features,
    kinds.regressions,
    kinds.regressions_on_odd_inputs,
    kinds.corrections,
    kinds.forests,
)


def measure() -> Result:
    bits: dict[str, Result] = {}
    words: dict[str, Result] = {}
    apart: dict[str, list[float]] = {}
    with Progress("recorded answers", len(SOURCES), unit="kinds") as told:
        for done, source in enumerate(SOURCES, 1):
            for found in source():
                if isinstance(found, kinds.Within):
                    apart.setdefault(found.kind, []).append(found.difference)
                else:
                    count_in(bits if isinstance(found, kinds.Bits) else words, found)
            told(done)
    again = bits.pop(kinds.IN_BULK)
    fits = {k: {"numbers": len(v), "relatively_apart_at_most": power_of_ten(max(v))} for k, v in sorted(apart.items())}
    numbers = {
        "peer": PEER,
        "totals": {"bits": total(bits), "again": again, "words": total(words), "fits": total_of_fits(fits)},
        "bits": bits,
        "words": words,
        "fits": fits,
        "not_compared": kinds.without_peer(),
    }
    files = [path for pattern in READ for path in CASES.glob(pattern) if path.is_file()]
    return result_of(HERE, QUESTION, files, numbers, answer)


def count_in(counts: dict[str, Result], found: kinds.Bits | kinds.Words) -> None:
    own = counts.setdefault(found.kind, {"compared": 0, "same": 0, "meant_to_differ": 0})
    if isinstance(found, kinds.Bits):
        own["numbers_same"] = own.get("numbers_same", 0) + (found.numbers if found.same else 0)
    own["compared"] += 1
    own["same"] += bool(found.same)
    own["meant_to_differ"] += found.meant and not found.same


def total(counts: dict[str, Result]) -> Result:
    return {name: sum(c[name] for c in counts.values()) for name in next(iter(counts.values()))}


def total_of_fits(fits: dict[str, Result]) -> Result:
    worst = max(fit["relatively_apart_at_most"] for fit in fits.values())
    return {"numbers": sum(fit["numbers"] for fit in fits.values()), "relatively_apart_at_most": worst}


def power_of_ten(value: float) -> float:
    """The next one above, never below the last bit of a float64."""
    return 10.0 ** max(math.ceil(math.log10(value)) if value else -15, -15)


def answer(r: Result) -> str:
    bits, again, words, fits = (r["totals"][name] for name in ("bits", "again", "words", "fits"))
    rest = sum(c["compared"] - c["same"] - c["meant_to_differ"] for c in (bits, again, words))
    others = "none differs otherwise" if not rest else f"{rest:,} differ otherwise"
    return f"""Of {bits["compared"]:,} recorded answers that no fit is in, {bits["same"]:,} are the same in every bit of
        their {bits["numbers_same"]:,} numbers, and so are the milliseconds of {again["same"]:,} of
        {again["compared"]:,} that are asked a second time, all at once.
        Of {words["compared"]:,} refusals, verdicts and states, which hold no number to compare, {words["same"]:,}
        are the same word. {bits["meant_to_differ"] + words["meant_to_differ"]:,} differ on
        purpose, {others}. {fits["numbers"]:,} more answers come out of fits or trees, whose sums round
        otherwise: no pair is further apart than {fits["relatively_apart_at_most"]:.0e}, relatively."""


def readme(r: Result) -> str:
    def rows(counts: Result, *more: str) -> list[tuple[Any, ...]]:
        names = ("compared", "same", "meant_to_differ", *more)
        return [(kind, *(c[name] for name in names)) for kind, c in counts.items()]

    header = ("kind", "compared", "same", "meant to differ")
    fits = [(kind, fit["numbers"], f"{fit['relatively_apart_at_most']:.0e}") for kind, fit in r["fits"].items()]
    left_out = "\n".join(f"- {count:,} {what}" for what, count in r["not_compared"].items())
    bits = rows(r["bits"] | {kinds.IN_BULK: r["totals"]["again"]}, "numbers_same")
    return study_page(
        HERE,
        r,
        bits=table((*header, "numbers that are the same"), bits),
        words=table(header, rows(r["words"])),
        fits=table(("model", "numbers", "relatively apart at most"), fits),
        left_out=left_out,
    )


def chart(r: Result) -> str:
    """One bar a kind: the share that is the same, then the share that differs on purpose, then the rest."""
    same, meant, other = LOOKS[0], LOOKS[1], LOOKS[3]
    left, width, step = 380, 330, 18
    y, parts = 60.0, []
    sections = {
        "answers, by the bits of their numbers": r["bits"] | {kinds.IN_BULK: r["totals"]["again"]},
        "refusals, verdicts and states, by word": r["words"],
    }
    for section, kinds_of in sections.items():
        parts.append(text(16, y + 4, section, size=12, bold=True))
        for kind, c in kinds_of.items():
            y += step
            parts.append(text(left - 8, y + 4, kind, size=11, anchor="end"))
            x = float(left)
            rest = c["compared"] - c["same"] - c["meant_to_differ"]
            for look, count in ((same, c["same"]), (meant, c["meant_to_differ"]), (other, rest)):
                if count:
                    wide = width * count / c["compared"]
                    parts.append(bar(x, y - 6, wide, 12, look))
                    x += wide
            parts.append(text(left + width + 8, y + 4, f"{c['same']:,} of {c['compared']:,}", size=11))
        y += 26
    entries = [(same, "bar", "the same"), (meant, "bar", "differs on purpose"), (other, "bar", "differs otherwise")]
    parts += legend(left, y + 6, entries)
    words = "Bars: of each kind of recorded answer, the share that this package gives in the same bits and words."
    return drawing(820, y + 60, "Recorded answers of the peer that are the same", words, parts)


if __name__ == "__main__":
    command(HERE, measure, readme, chart)
