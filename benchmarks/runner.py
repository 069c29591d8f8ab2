"""Paired benchmarks: several ways to do one job, timed by one process, told as ratios.

    results = compare([Case("ours", run, items), Case("theirs", other, items)], reference="theirs")

A loaded machine moves wall time by factors, and two runs of one script disagree.  What survives is the ratio of two
ways measured side by side.  So: rounds are interleaved (every case once a round, in turning order), the clock is the
processor time of the whole process (all of its threads), a sample repeats its case until it is long enough to trust,
each case is represented by its fastest sample, and only ratios to the reference leave this module.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MARK = "<!-- results -->"
SAMPLE_SECONDS = 0.06  # processor time of other threads is credited late: a few ms can read twice too good


@dataclass(frozen=True)
class Case:
    """One way to do the job: `run()` handles `items` items; its result, if it has one, is waited for.

    `clock` tells processor seconds of whoever does the work; None: of this process.
    """

    name: str
    run: Callable[[], Any]
    items: int
    clock: Callable[[], float] | None = None


@dataclass(frozen=True)
class Result:
    """Speed of a case in items per processor second, divided by that of the reference.

    `ratio` compares the fastest samples; `low` and `high` are the quartiles of the ratio within each round.
    """

    case: str
    reference: str
    ratio: float
    low: float
    high: float
    items: int
    rounds: int


def compare(cases: Sequence[Case], *, reference: str, rounds: int = 15) -> list[Result]:
    """Time all cases in interleaved rounds; one result per case, in their order."""
    names = [case.name for case in cases]
    if len(set(names)) != len(names) or reference not in names:
        raise ValueError(f"cases need distinct names and `{reference}` among them: {', '.join(names)}")
    repeats = [_repeats(case) for case in cases]
    cost = [[0.0] * rounds for _ in cases]  # processor seconds per item
    for turn in range(rounds):
        for k in range(len(cases)):
            i = (k + turn) % len(cases)  # no case always follows the same neighbour
            cost[i][turn] = _sample(cases[i], repeats[i]) / cases[i].items
    base = cost[names.index(reference)]
    return [
        Result(
            case=case.name,
            reference=reference,
            ratio=min(base) / min(own),
            **dict(zip(("low", "high"), _quartiles(b / o for b, o in zip(base, own, strict=True)), strict=True)),
            items=case.items,
            rounds=rounds,
        )
        for case, own in zip(cases, cost, strict=True)
    ]


def _sample(case: Case, repeats: int) -> float:
    """Processor seconds of one run of the case, the mean of `repeats`."""
    clock = case.clock or time.process_time
    start = clock()
    for _ in range(repeats):
        _wait(case.run())
    return (clock() - start) / repeats


def _repeats(case: Case) -> int:
    """How often a sample must repeat the case to last `SAMPLE_SECONDS`; also compiles and warms it."""
    _wait(case.run())
    repeats = 1
    while (spent := _sample(case, repeats) * repeats) < SAMPLE_SECONDS:
        repeats = max(2 * repeats, int(repeats * SAMPLE_SECONDS / max(spent, 1e-3)))
    return repeats


def _wait(result: Any) -> None:
    """Wait for results that jax computes in the background; NumPy arrays are there already."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.block_until_ready(result)


def _quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]


def environment() -> dict[str, str]:
    """What the ratios depend on besides the code."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    for package in ("fpmjax", "jax", "jaxlib", "numpy", "scipy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    if (jax := sys.modules.get("jax")) is not None:
        found["device"] = jax.devices()[0].device_kind
    return found


def versions() -> str:
    """`environment` as a line of a page."""
    return "Versions: " + ", ".join(f"{k} {v}" for k, v in environment().items())


def table(title: str, results: Sequence[Result]) -> str:
    """The results as a Markdown table; it says which case is 1."""
    rows: list[tuple[str, ...]] = [("case", f"speed, `{results[0].reference}` = 1", "quartiles of the rounds")]
    rows += [(r.case, f"{r.ratio:.3g}", f"{r.low:.3g} to {r.high:.3g}") for r in results]
    width = [max(len(row[i]) for row in rows) for i in range(3)]
    rows.insert(1, tuple("-" * w for w in width))
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)) + " |" for row in rows]
    return "\n".join([f"**{title}**", "", *lines])


def put(path: Path, text: str, mark: str = MARK) -> None:
    """Replace what stands between the two lines `mark` of a page."""
    before, _, after = path.read_text(encoding="utf-8").split(mark)
    path.write_text(mark.join([before, f"\n\n{text}\n\n", after]), encoding="utf-8")


def main(
    benchmarks: Mapping[str, Callable[[], tuple[Any, ...]]],
    argv: Sequence[str] | None = None,
    *,
    rounds: int = 15,
    mark: str = MARK,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> None:
    """Command line of a benchmark file: each entry makes its cases, names the reference, and may add a note.

    Options of the file's own come as `parents` of the parser; the file reads them itself.
    """
    parser = argparse.ArgumentParser(description="Paired benchmarks; prints ratios, never times", parents=parents)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"default: all of {', '.join(benchmarks)}")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true", help="one JSON line per case instead of tables")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help=f"put the tables between the lines `{mark}` of a page"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.only) - set(benchmarks):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    pages = []
    for name in options.only or benchmarks:
        cases, reference, *notes = benchmarks[name]()
        results = compare(cases, reference=reference, rounds=options.rounds)
        if options.json:
            for result in results:
                print(json.dumps({"benchmark": name} | asdict(result) | environment()), flush=True)
        else:
            pages.append("\n\n".join([table(name, results), *notes]))
            print(pages[-1], end="\n\n", flush=True)
    if not options.json:
        pages.append(versions())
        print(pages[-1])
    if options.into:
        put(options.into, "\n\n".join(pages), mark)
