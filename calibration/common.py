"""What the studies share: rounding, digests, pages written from results, and the command of each.

A study is a folder with `data/`, a text with places for numbers (`page.md`) and a `rebuild.py` that says three things:
`measure()` gives the numbers, `readme(result)` and `chart(result)` tell them.  What they tell is read from
`result.json` alone, so that no number on a page was typed by hand.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fpmjax.atomic import replacing

HERE = Path(__file__).parent
ROOT = HERE.parent
STUDIES = ("published_depth_study", "public_step_times", "b300_qwen3_32b", "peer_parity")
FILES = ("result.json", "README.md", "chart.svg")  # what a study writes
ARITHMETIC, FITTED = 6, 3  # significant digits: sums and quotients of data, and what a fit gives
WIDTH = 120
VERBATIM = ("#", "|", "```", "![", "<!--")  # how a block begins that is not a paragraph
ENDING = """Every number on this page is read from `result.json`; that, the chart and the page come out of one command,
and `tests/test_calibration.py` compares them byte for byte."""

INDEX = """# Calibration studies

How far answers of this package can be trusted, shown on what anyone can check: each folder holds one result, a chart,
and one command that rebuilds them byte for byte. Its data lie in its `data/`, with the notices of their owners; the
parity study has none of its own and reads the recorded cases of `tests/cases`. Errors are
`100 (predicted - measured) / measured`; they describe the data of a study and bound nothing else.

{studies}

A study of your own engine is one command: `fpmjax calibrate STUDY.parquet -o DIR`. These pages are written by the
studies' `rebuild.py` from their `result.json`."""

Result = dict[str, Any]


def significant(value: float, digits: int) -> float | None:
    """Rounded to so many significant digits, never -0; None where there is no number."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits - 1}e}") + 0.0


def fitted(percent: Any) -> float | None:
    """A percentage that a fit gives: fits end a little differently on other processors, and these digits stay."""
    return significant(round(float(percent), FITTED - 1), FITTED)


def rounded(value: Any) -> Any:
    """The same document with every float rounded, NumPy's numbers and arrays become Python's."""
    if isinstance(value, Mapping):
        return {str(k): rounded(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return significant(value, ARITHMETIC) if isinstance(value, float) else value


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, which may be compressed, as text."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return list(csv.DictReader(text.splitlines()))


def digests(paths: Iterable[Path], root: Path) -> dict[str, str]:
    """Path below `root` -> SHA-256 of the file's bytes."""
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; text to the left, numbers to the right."""
    body = [[number(cell) for cell in row] for row in rows]
    width = [max(3, *(len(row[i]) for row in [list(header), *body])) for i in range(len(header))]
    right = [all(is_number(row[i]) for row in body) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, width, right, strict=True))
        return "| " + " | ".join(cells) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + (":" if r else "-") for w, r in zip(width, right, strict=True)) + " |"
    return "\n".join([line(header), rule, *map(line, body)])


def is_number(cell: str) -> bool:
    return not cell.strip("-+0123456789.,% ")


def number(value: Any, digits: int = 2) -> str:
    """A cell: text as it is, integers with thousands, floats with so many decimals, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}"


def page(text: str) -> str:
    """Markdown whose blocks stand between blank lines: paragraphs and items are wrapped, tables and code stay."""
    return "\n\n".join(map(wrapped, text.strip().split("\n\n"))) + "\n"


def wrapped(block: str) -> str:
    if block.startswith(VERBATIM):
        return block
    if not block.startswith("- "):
        return fill(block)
    return "\n".join(fill(f"- {item}", indent="  ") for item in f"\n{block}".split("\n- ")[1:])


def fill(text: str, indent: str = "") -> str:
    """Lines of at most `WIDTH`; code is kept on one line, and a number beside its percent sign."""
    held = re.sub(r"`[^`]*`|\d %", lambda kept: kept[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.fill(held, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def study_page(folder: Path, result: Result, **tables: Any) -> str:
    """The README of a study: `page.md` of its folder with the numbers put in.

    A place such as `{r[by_depth][d1]:.2f}` takes a number of the result, `{cells}` a table of that name.
    """
    template = (folder / "page.md").read_text(encoding="utf-8")
    told = template.format(r=result, **tables)
    return page(
        f"{told}\n\n## Data and command\n\n{table(('input', 'SHA-256'), result['inputs'].items())}\n\n{ENDING}\n\n"
        f"```sh\n{result['command']}\n```"
    )


def result_of(
    folder: Path, question: str, inputs: Iterable[Path], numbers: Mapping[str, Any], answer: Callable[[Any], str]
) -> Result:
    """The document of a study.  answer: told from the rounded numbers.  inputs: files below the repository's root."""
    told = rounded(numbers)
    paths = list(inputs)
    inside = all(path.is_relative_to(folder) for path in paths)
    return {
        "format": "fpmjax_calibration",
        "version": 1,
        "study": folder.name,
        "question": question,
        "answer": " ".join(answer(told).split()),
        "command": f"python calibration/{folder.name}/rebuild.py",
        "inputs": digests(paths, folder if inside else ROOT),
        **told,
    }


def write(folder: Path, name: str, text: str) -> None:
    with replacing(folder / name) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def as_json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def rebuild(
    measure: Callable[[], Result], readme: Callable[[Result], str], chart: Callable[[Result], str], out: Path
) -> None:
    """Writes `FILES` into a folder.  Pages are told from the text of the result, as a reader has it."""
    text = as_json(measure())
    result = json.loads(text)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, (text, readme(result), chart(result)), strict=True):
        write(out, name, content)


def command(
    folder: Path, measure: Callable[[], Result], readme: Callable[[Result], str], chart: Callable[[Result], str]
) -> None:
    """`python calibration/NAME/rebuild.py [--out DIR]`; without a folder also the index is written again."""
    parser = argparse.ArgumentParser(description=f"Rebuilds the study {folder.name}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the study's own folder")
    out = parser.parse_args().out
    rebuild(measure, readme, chart, out or folder)
    if out is None:
        write(HERE, "README.md", index())


def index() -> str:
    """The page that leads to the studies, told from their results; those not built yet are left out."""
    blocks = []
    for name in STUDIES:
        path = HERE / name / "result.json"
        if path.is_file():
            result = json.loads(path.read_text(encoding="utf-8"))
            blocks.append(f"- [`{name}/`]({name}/README.md): **{result['question']}** {result['answer']}")
    return page(INDEX.format(studies="\n".join(blocks)))
