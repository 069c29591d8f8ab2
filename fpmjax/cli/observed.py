"""TRACE on the command line: what engines were seen to take, from traces and from files of columns."""

from __future__ import annotations

import argparse
import glob
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fpmjax.cli.arguments import EMBEDDED, UsageError, is_artifact, require_path, shorten
from fpmjax.cli.output import breakdown, note
from fpmjax.errors import FpmError, OptionError
from fpmjax.model_file import is_model_file
from fpmjax.progress import Progress

if TYPE_CHECKING:
    from fpmjax.observe.observations import Observations

COLUMNS = (".parquet", ".csv", ".csv.gz", ".arrow", ".feather", ".ipc")
ABOUT = """\
TRACE is any of
  engine traces           .jsonl and .jsonl.gz segments, and the folder or quoted glob that finds them
  self-benchmarks         .json artifacts
  columns                 .parquet, .csv, .csv.gz, .arrow: wall_ms, and the work under the names of fpmjax.Work, or
                          phase, batch_size, total_prefill_tokens and total_kv_read_tokens

Iterations of traces come in the order of their time, rows of columns in that of the file.  What is left out is
counted on stderr.
"""
STP = """\
--not-speculative is missing: a model learns ordinary decoding, and totals do not show whether an engine drafted
hint: add --not-speculative if it ran without draft tokens; a draft length belongs to the question, \
`fpmjax estimate MODEL ... --draft-length 3`"""
# Words of the Python API in messages -> their flags.
FLAGS = {
    'group="nearest", tolerance_ms=5.0': "--group nearest --tolerance-ms 5",
    'group="nearest" with tolerance_ms': "--group nearest with --tolerance-ms",
    "group and tolerance_ms": "--group and --tolerance-ms",
    "skip_first=10": "--skip-first 10",
    "mixed_timing=True": "--mixed-timing",
    'role="aggregated"': "--role aggregated",
    "strict=False counts": "without --strict the command counts",
    "allow_extrapolation": "--allow-extrapolation",
    "fpmjax.recommend_anchors names few": "`fpmjax fit --draft-length LIST` names few",
}
# Names that begin a message of the Python API, and their flags where dashes alone do not make one of them.
OPTIONS = {"bins_per_axis": "--bins", "tolerance": "--relative-tolerance", "per_axis": "--knots-per-axis"}
OPTIONS |= {"bandwidth_bytes_per_s": "--bandwidth", "flops_per_s": "--flops"}
OPTIONS |= {"step": "--search-step", "non_negative": "--signed"}


def add_observations(parser: argparse.ArgumentParser) -> None:
    """TRACE... and how it is read."""
    parser.add_argument("traces", metavar="TRACE", nargs="+", help="traces, artifacts or columns, see above")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--not-speculative",
        action="store_true",
        help="required: the engine decoded without draft tokens, which totals cannot show",
    )
    reading.add_argument(
        "--component", metavar="C", action="append", help="keep the trace records of this component; may be repeated"
    )
    reading.add_argument(
        "--group", choices=("nearest",), help="join the records of a worker's ranks that are nearest in time"
    )
    reading.add_argument("--tolerance-ms", metavar="X", type=milliseconds, help="how far apart joined records may be")
    reading.add_argument(
        "--skip-first", metavar="N", type=int, default=0, help="leave out N iterations after each start of a worker"
    )
    reading.add_argument("--strict", action="store_true", help="stop at the first malformed trace line")
    reading.add_argument("--mixed-timing", action="store_true", help="allow several clocks in one model")
    reading.add_argument(
        "--first-share",
        metavar="X",
        type=share,
        default=None,
        help="split by order: a fit learns the first share, such as 0.6, and the rest is what it is scored on",
    )


def share(text: str) -> float:
    """A share above 0 and up to 1; an argparse type."""
    value = real(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a share, such as 0.6")
    return value


def milliseconds(text: str) -> float:
    value = real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not a number of milliseconds")
    return value


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@contextmanager
def in_flags() -> Iterator[None]:
    """Errors of the Python API in the words of the command line."""
    try:
        yield
    except FpmError as error:
        text = str(error)
        for words, flag in FLAGS.items():
            text = text.replace(words, flag)
        if isinstance(error, OptionError):
            text = re.sub(r"^\w+|\b\w+(?==)|max_observations", lambda name: flag_of(name[0]), text)
        raise type(error)(text, code=error.code) from None


def flag_of(name: str) -> str:
    return OPTIONS.get(name, "--" + name.replace("_", "-"))


def read_observations(args: argparse.Namespace) -> tuple[Observations, list[dict[str, Any]]]:
    """Everything that TRACE... names, and a report per source, which is told on stderr as well."""
    if not args.not_speculative:
        raise UsageError(STP)
    for name in filter(is_model_file, args.traces):
        raise UsageError(
            f"{name} is a saved model, not observations\nhint: `fpmjax fit TRACE... --continue {name} -o MODEL` "
            f"teaches it more, `fpmjax evaluate {name} TRACE...` scores it"
        )
    for name in filter(is_artifact, args.traces):
        raise UsageError(
            f"{name} is a learned artifact, not observations\nhint: `fpmjax evaluate {name} TRACE...` scores it"
        )
    for name in args.traces:
        if name == EMBEDDED and not os.path.exists(name):
            raise UsageError(f"{name} is a table, not observations\nhint: --correct {name} learns factors over it")
        if not glob.has_magic(name):
            require_path(name, "traces, artifacts or columns, as the command's --help lists them")
    traces = [name for name in args.traces if not name.lower().endswith(COLUMNS)]
    tables = [found for name in args.traces if name not in traces for found in expanded(name)]
    tables = list({os.path.realpath(name): name for name in tables}.values())  # each file once
    if not traces:
        for name in ("component", "group", "tolerance_ms", "skip_first", "strict"):
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} is about traces, but only columns are given\nhint: leave {flag} out")
    from fpmjax.observe.observations import Observations
    from fpmjax.observe.trace import read_trace

    parts, reports = [], []
    with in_flags():
        if traces:
            with Progress("reading traces", unit="B") as bar:
                traced = read_trace(
                    traces,
                    speculative=False,
                    strict=args.strict,
                    component=args.component,
                    group=args.group,
                    tolerance_ms=args.tolerance_ms,
                    skip_first=args.skip_first,
                    mixed_timing=args.mixed_timing,
                    progress=bar if bar.watched else None,
                )
            parts.append(traced)
            reports.append({"source": traces} | dict(traced.report))
        for name in tables:
            parts.append(Observations.read(name))
            reports.append({"source": [name]} | dict(parts[-1].report))
        whole = parts[0] if len(parts) == 1 else Observations.concat(parts, mixed_timing=args.mixed_timing)
    for part, report in zip(parts, reports, strict=True):
        tell_report(report, len(part), part.timing)
    if not len(whole):
        if not any(map(left_out, reports)):
            raise UsageError(
                f"{' '.join(args.traces)}: empty, there is no iteration at all\n"
                "hint: give what the engine wrote while it ran"
            )
        raise UsageError("no usable iteration was read\nhint: the notes above say what became of every line")
    return whole, reports


def expanded(name: str) -> list[str]:
    """The files of a glob, in order; any other name as it is."""
    return sorted(glob.glob(name)) or [name] if glob.has_magic(name) else [name]


def tell_report(report: dict[str, Any], iterations: int, timing: str) -> None:
    """What was read and what was left out, as notes."""
    names = report["source"]
    name = names[0] if len(names) == 1 else f"{len(names)} sources"
    read = f" from {report['lines']:,} lines" if report.get("lines") else ""
    note(f"{name}: {iterations:,} iterations{read}, clock {timing}")
    if left := left_out(report):
        note(f"left out: {breakdown(left)}")
    for reason, shown in report.get("examples", {}).items():
        note(f"{reason}, for example {shown[0]}")
    for warning in report.get("warnings", ()):
        note(warning)


def left_out(report: dict[str, Any]) -> dict[str, int]:
    """Reason -> how many lines or iterations were left out for it."""
    from fpmjax.observe.trace import OUTCOMES

    used = ("accepted", "blank")
    reasons = (*(outcome for outcome in OUTCOMES if outcome not in used), "overflow", "unmatched", "skipped")
    return {reason: report[reason] for reason in reasons if report.get(reason)}


def split_at(n: int, first_share: float | None) -> int:
    """How many of n observations, in their order, are the first share."""
    return n if first_share is None else int(n * first_share)
