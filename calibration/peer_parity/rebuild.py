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
SECTIONS: dict[str, tuple[Callable[[], Iterable[Any]], ...]] = {
    "answers": (kinds.iterations, kinds.in_bulk, kinds.inputs),
    "tables": (kinds.tables,),
    "speculation": (kinds.speculative,),
    "fitted": (
        kinds.features,
        kinds.regressions,
        kinds.regressions_on_odd_inputs,
        kinds.corrections,
        kinds.forests,
    ),
}


def measure() -> Result:
    exact: dict[str, dict[str, dict[str, int]]] = {}
    apart: dict[str, list[float]] = {}
    weights = {"count": 0, "differ": 0}
    total = sum(map(len, SECTIONS.values()))
    with Progress("recorded answers", total, unit="kinds") as told:
        done = iter(range(1, total + 1))
        for section, sources in SECTIONS.items():
            for source in sources:
                for found in source():
                    if isinstance(found, kinds.Within):
                        apart.setdefault(found.kind, []).append(found.difference)
                        continue
                    if source is kinds.iterations:
                        found, named = found
                        weights["count"] += named.count if named else 0
                        weights["differ"] += named.differ if named else 0
                    count_in(exact.setdefault(section_of(section, found.kind), {}), found)
                told(next(done))
    fits = {k: {"compared": len(v), "apart_at_most": power_of_ten(max(v))} for k, v in sorted(apart.items())}
    every = [count for counts in exact.values() for count in counts.values()]
    numbers = {
        "peer": PEER,
        "compared": sum(c["compared"] for c in every),
        "same": sum(c["same"] for c in every),
        "meant": sum(c["meant_to_differ"] for c in every),
        "weights": weights,
        "exact": exact,
        "fits": fits,
        "not_compared": kinds.without_peer(),
    }
    files = [path for pattern in READ for path in CASES.glob(pattern) if path.is_file()]
    return result_of(HERE, QUESTION, files, numbers, answer)


def section_of(section: str, kind: str) -> str:
    return "refusals" if section == "answers" and "refused" in kind else section


def count_in(counts: dict[str, dict[str, int]], found: kinds.Compared) -> None:
    own = counts.setdefault(found.kind, {"compared": 0, "same": 0, "meant_to_differ": 0})
    own["compared"] += 1
    own["same"] += bool(found.same)
    own["meant_to_differ"] += found.meant and not found.same


def power_of_ten(value: float) -> float:
    """The next one above, never below the last bit of a float64."""
    return 10.0 ** max(math.ceil(math.log10(value)) if value else -15, -15)


def answer(r: Result) -> str:
    rest = r["compared"] - r["same"] - r["meant"]
    fits = sum(fit["compared"] for fit in r["fits"].values())
    worst = max(fit["apart_at_most"] for fit in r["fits"].values())
    others = "none differs otherwise" if not rest else f"{rest:,} differ otherwise"
    return f"""{r["same"]:,} of {r["compared"]:,} comparisons are the same in every bit and word, {r["meant"]:,} differ
        on purpose, {others}. {fits:,} more numbers come out of fits; they agree to {worst:.0e} or better."""


def readme(r: Result) -> str:
    def counts(section: str, words: str = "kind") -> str:
        rows = [
            (kind.removeprefix("refused: "), c["compared"], c["same"], c["meant_to_differ"])
            for kind, c in r["exact"][section].items()
        ]
        return table((words, "compared", "same", "meant to differ"), rows)

    fits = [(kind, fit["compared"], f"{fit['apart_at_most']:.0e}") for kind, fit in r["fits"].items()]
    left_out = "\n".join(f"- {count:,} {what}" for what, count in r["not_compared"].items())
    return study_page(
        HERE,
        r,
        answered=counts("answers"),
        refused=counts("refusals", "reason"),
        tables=counts("tables"),
        speculation=counts("speculation"),
        states=counts("fitted"),
        fits=table(("model", "answers", "apart at most"), fits),
        left_out=left_out,
    )


def chart(r: Result) -> str:
    """One bar a kind: the share that is the same, then the share that differs on purpose, then the rest."""
    same, meant, other = LOOKS[0], LOOKS[1], LOOKS[3]
    left, width, step = 380, 330, 18
    y, parts = 60.0, []
    for section, kinds_of in r["exact"].items():
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
