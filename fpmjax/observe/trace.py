"""Engine traces become observations: every line has one outcome, and every outcome is counted.

The file is streamed; what stays in memory is a row of numbers per record.  From those rows, after the last line:
repeated records are dropped, counters that fall mark a restart, ranks are joined where asked, and the iterations are
put in the order of (time observed, counter).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fpmjax.errors import OptionError
from fpmjax.metrics import as_float, as_index, show
from fpmjax.observe.artifact import read_artifact
from fpmjax.observe.joining import Records, iterations_of
from fpmjax.observe.observations import Observations, with_report
from fpmjax.observe.record import MIXED, UNSPECIFIED, Rejected, Row, Stream
from fpmjax.observe.rows import RowReader
from fpmjax.observe.segments import Progress, Source, Truncated, find, items, read_lines, refuse

# Every outcome of a line, in the order of the report.
OUTCOMES = (
    "accepted",
    "blank",
    "bad_json",
    "not_object",
    "bad_envelope",
    "bad_schema",
    "bad_version",
    "bad_field",
    "inconsistent",
    "not_stp",
    "other_component",
    "idle",
    "no_wall_time",
    "duplicate",
)
EXAMPLES = 3  # of every reason


def read_trace(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    speculative: bool,
    strict: bool = False,
    component: str | Iterable[str] | None = None,
    group: str | None = None,
    tolerance_ms: float | None = None,
    skip_first: int = 0,
    mixed_timing: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Observations:
    """Observations from trace segments (`.jsonl`, `.jsonl.gz`), self-benchmark artifacts (`.json`), globs and folders.

    speculative:  whether the engine ran speculative decoding.  There is no default, because totals cannot show it;
                  only False is accepted: a fit sees ordinary decoding.
    strict:       raise at the first malformed line instead of counting it.  The last line of a file may be cut inside
                  a row, as a writer that dies leaves it; that is told, not counted.
    component:    keep the records of this component, or of these; prefill workers and decode workers publish apart.
    group:        None: every record is one iteration, and a worker of several attention-DP ranks is refused, as its
                  records do not say which belong together.  "nearest": join the records of one worker, one per rank,
                  that are each other's nearest in time and lie within `tolerance_ms`; others are `unmatched`.
    skip_first:   leave out the first iterations of every worker, and again after each of its restarts (warm-up).
    mixed_timing: allow records of different clocks in one store; its timing is then "mixed".
    progress:     called as progress(bytes read, bytes in all), a few times a second at most, and once at the end.

    Iterations come in the order of (time observed, counter), those of artifacts after them.  Wall times are the
    recorded seconds x 1000.0; KV counts are kept as recorded.

    `.report` counts `lines` and what became of them, by reason: `accepted`, `blank`, `bad_json`, `not_object`,
    `bad_envelope`, `bad_schema`, `bad_version`, `bad_field`, `inconsistent`, `not_stp`, `other_component`, `idle`,
    `no_wall_time`, `duplicate`; their sum is `lines`.  Beside them: `defaulted` (accepted without queued_requests),
    `speculation_keys` (accepted records by key, none of which shows drafts), `files`, `files_left_out` (in folders,
    by name no segment), `iterations`, `unmatched`, `skipped`, `gaps` and `missing` (counters passed over, in full
    capture), `restarts`, `truncated`, `artifact_iterations`, `timing` and `components` (records by name), `examples`
    (the first of every reason, as file:line: message) and `warnings`.

    Raises TraceError: `speculative`, `multi_rank`, `mixed_timing`, `conflict` (one key, two contents), `truncated`
    (a cut segment that is not the newest), `gzip`, `file`, `paths`, `no_files`, `long_line`, `too_large`, `artifact`,
    and with `strict` the reason of the line.  OptionError, its code the name of the option, for the other options.
    """
    if speculative is not False:
        refuse(
            "speculative",
            f"speculative is {show(speculative)}, but observations are ordinary decoding",
            "pass speculative=False for an engine without draft tokens; a draft length belongs to the query, "
            "as in estimate(model, work, draft_length=3)",
        )
    for name, value in (("strict", strict), ("mixed_timing", mixed_timing)):
        if not isinstance(value, (bool, np.bool_)):
            _bad(name, f"is {show(value)}, but it is True or False", f"leave {name} out for False")
    _check_joining(group, tolerance_ms, skip_first)
    components = _names(component)
    if progress is not None and not callable(progress):
        _bad("progress", f"is {show(progress)}, but it is a function", "progress=lambda read, total: ...")
    sources, left_out = find(paths)
    reading, told = _Reading(bool(strict), components), Progress(progress, sources)
    artifacts: dict[str, Observations] = {}
    seen: dict[str, str] = {}
    for source in sources:
        if not source.is_artifact:
            reading.read(source, told)
            told.done(source.path)
            continue
        observations, run = read_artifact(source.path)
        if (first := seen.setdefault(run, str(source.path))) != str(source.path):
            reading.warnings.append(f"{source.path}: the same groups as in {first}; read once")
        else:
            artifacts[first] = observations
        told.done(source.path)
    told.end()
    records = reading.records()
    traced, counts = iterations_of(records, group, tolerance_ms, skip_first)
    report: dict[str, Any] = reading.report(records) | counts
    clocks = dict(reading.clocks(records))
    for path, observations in artifacts.items():
        if len(observations):
            clocks.setdefault(observations.timing, path)
    if len(clocks) > 1 and not mixed_timing:
        first, second = list(clocks.items())[:2]
        refuse(
            "mixed_timing",
            f"{first[1]} has the clock {first[0]!r}, {second[1]} has {second[0]!r}",
            "read one clock at a time, or pass mixed_timing=True where they are known to agree",
        )
    timing = next(iter(clocks), UNSPECIFIED) if len(clocks) < 2 else MIXED
    parts = [Observations(*traced, timing), *artifacts.values()] if len(records.wall) else [*artifacts.values()]
    whole = Observations.concat(parts, mixed_timing=True)
    taken = sum(map(len, artifacts.values()))
    report |= {"files": len(sources), "iterations": len(whole), "artifact_iterations": taken}
    report |= {"files_left_out": len(left_out), "warnings": (*report["warnings"], *_left_out(left_out))}
    return with_report(Observations(whole.work, whole.wall_ms, timing), report)


def _left_out(paths: list[Path]) -> Iterable[str]:
    """A warning per folder."""
    for folder in dict.fromkeys(path.parent for path in paths):
        names = [path.name for path in paths if path.parent == folder]
        what = "is" if len(names) == 1 else f"and {len(names) - 1} more are"
        yield f"{folder}: {show(names[0])} {what} left out, by name no segment; name the file, or a glob, to read it"


def _bad(name: str, what: str, hint: str) -> NoReturn:
    raise OptionError(f"{name} {what}\nhint: {hint}", code=name)


def _check_joining(group: Any, tolerance_ms: Any, skip_first: Any) -> None:
    hint = 'group="nearest", tolerance_ms=5.0 joins ranks'
    if group is not None and not (isinstance(group, str) and group == "nearest"):
        _bad("group", f"is {show(group)}, but it is None or 'nearest'", hint)
    if (group is None) != (tolerance_ms is None):
        raise OptionError(f"group and tolerance_ms go together\nhint: {hint}", code="tolerance_ms")
    number = as_float(tolerance_ms)
    if tolerance_ms is not None and (number is None or number < 0):
        _bad("tolerance_ms", f"is {show(tolerance_ms)}, but it is a number of milliseconds from 0", hint)
    count = as_index(skip_first)
    if count is None or count < 0:
        _bad(
            "skip_first",
            f"is {show(skip_first)}, but it is a whole number from 0",
            "skip_first=10 leaves out ten iterations per worker",
        )


def _names(component: Any) -> frozenset[str] | None:
    """The components to keep; None for all."""
    if component is None:
        return None
    hint = 'component="backend", or a list of names; leave it out to keep all'
    names = [component] if isinstance(component, str) else items(component)
    if names is None:
        _bad("component", f"is {show(component)}, but it is a name or several", hint)
    for name in names:
        if not isinstance(name, str) or not name:
            _bad("component", f"names {show(name)}, but a component is named by text", hint)
    if not names:
        _bad("component", "names none, so nothing would be kept", hint)
    return frozenset(names)


class _Reading:
    """What has been read so far: a row of numbers per record in typed buffers, and the counts."""

    def __init__(self, strict: bool, components: frozenset[str] | None):
        self.strict = strict
        self.reader = RowReader(components)
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.lines = self.defaulted = self.truncated = 0
        self.examples: dict[str, list[str]] = {}
        self.warnings: list[str] = []
        self.files: list[str] = []
        self.streams: dict[Stream, int] = {}
        self.scopes: dict[str, int] = {}
        self.speculation: dict[str, int] = {}
        self.numbers = {
            name: array(kind)
            for name, kind in {
                **{"stream": "i", "counter": "Q", "observed": "q", "full": "b", "scope": "i", "wall": "d"},
                **{"counts": "I", "variances": "d", "digest": "q", "file": "i", "line": "q"},
                **{"listed": "i", "extend": "Q", "past": "Q"},
            }.items()
        }

    def read(self, source: Source, progress: Progress) -> None:
        """All lines of one file."""
        self.files.append(str(source.path))
        file = len(self.files) - 1
        try:
            for first, block in read_lines(source.path, progress.at):
                self.lines += len(block)
                for number, line in enumerate(block, first):
                    line = line.strip(b" \t\r")
                    if not line:
                        self.counts["blank"] += 1
                        continue
                    try:
                        row = self.reader.read(line)
                    except Rejected as rejected:
                        self.reject(rejected, f"{source.path}:{number}")
                        continue
                    self.append(row, file, number)
        except Truncated as cut:
            if not source.last:
                refuse(
                    "truncated",
                    f"{cut}, but later segments of the series exist",
                    "only the newest segment of a writer that died is cut; copy this one again",
                )
            self.truncated += 1
            self.warnings.append(f"{cut}; the records before the cut are kept")

    def reject(self, rejected: Rejected, place: str) -> None:
        if self.strict and rejected.reason != "other_component":
            refuse(rejected.reason, f"{place}: {rejected}", "strict=False counts such lines and goes on")
        self.counts[rejected.reason] += 1
        shown = self.examples.setdefault(rejected.reason, [])
        if len(shown) < EXAMPLES:
            shown.append(f"{place}: {str(rejected)[:300]}")

    def append(self, row: Row, file: int, line: int) -> None:
        to = self.numbers
        to["stream"].append(self.streams.setdefault(row.stream, len(self.streams)))
        to["counter"].append(row.counter)
        to["observed"].append(row.observed_ms)
        to["full"].append(row.full)
        to["scope"].append(self.scopes.setdefault(row.scope, len(self.scopes)))
        to["wall"].append(row.wall_time)
        to["counts"].extend(row.counts)
        to["variances"].extend(row.variances)
        to["digest"].append(hash(row[4:10]))
        to["file"].append(file)
        to["line"].append(line)
        if row.extend is None or row.past is None:
            to["listed"].append(-1)
        else:
            to["listed"].append(len(row.extend))
            to["extend"].extend(row.extend)
            to["past"].extend(row.past)
        self.defaulted += row.defaulted
        for key in row.speculation:
            self.speculation[key] = self.speculation.get(key, 0) + 1

    def records(self) -> Records:
        columns = {name: np.frombuffer(values, values.typecode) for name, values in self.numbers.items()}
        n = len(columns["wall"])
        columns["counts"] = columns["counts"].reshape(n, 5)
        columns["variances"] = columns["variances"].reshape(n, 2)
        return Records(**columns, streams=tuple(self.streams), files=tuple(self.files))

    def clocks(self, records: Records) -> Iterable[tuple[str, str]]:
        """Every clock of the usable records, and the first place of each."""
        for name, code in self.scopes.items():
            of = np.flatnonzero(records.usable & (records.scope == code))
            if of.size:
                yield name, records.place(of[0])

    def report(self, records: Records) -> dict[str, Any]:
        counts = self.counts | {
            "accepted": int(records.usable.sum()),
            "idle": int((records.fresh & ~records.busy).sum()),
            "no_wall_time": int((records.fresh & records.busy & (records.wall <= 0)).sum()),
            "duplicate": int((~records.fresh).sum()),
        }
        usable = records.usable
        names = [stream.component for stream in records.streams]
        each = np.bincount(records.stream[usable], minlength=len(names)).tolist()
        scope = np.bincount(records.scope[usable], minlength=len(self.scopes)).tolist()
        return {
            "lines": self.lines,
            **counts,
            "defaulted": self.defaulted,
            "speculation_keys": self.speculation,
            "truncated": self.truncated,
            "timing": dict(zip(self.scopes, scope, strict=True)),
            "components": {c: sum(k for m, k in zip(names, each, strict=True) if m == c) for c in dict.fromkeys(names)},
            "kv_convention": "as_recorded",
            "examples": {reason: tuple(shown) for reason, shown in self.examples.items()},
            "warnings": tuple(self.warnings),
        }
