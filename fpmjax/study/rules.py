"""What the rows of a calibration file must obey, beyond having the columns: each rule finds rows and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.metrics import show
from fpmjax.study.columns import ANCHORS, BY_NAME, COLUMNS, INT32, INVALID, PRIMARY_KEY, SHARED, Column
from fpmjax.study.findings import Findings
from fpmjax.study.values import Values

Columns = Mapping[str, Values]
HINTS = {
    "draft_length": "draft_length is what the drafter proposes per round, without the bonus token; 0 on stp rows",
    "timing_scope": "one clock for all rows: {}",
    "latency_ms": "milliseconds of the round, measured; a failed round says so in reason: invalid",
    "total_kv_tokens": "past KV summed over the batch; public anchors without it are read with anchors=True",
    "topk": "trees of drafts (topk above 1) are not studied: leave those rows out",
}


def check_rows(columns: Columns, findings: Findings, *, anchors: bool) -> None:
    """Every rule about one row, and that no two rows are the same round."""
    for column in COLUMNS:
        check_column(column, columns[column.name], findings, excused(column, columns, anchors))
    c = {name: values.array for name, values in columns.items()}
    sd, none = is_word(columns["kind"], "sd"), is_word(columns["method"], "none")
    d, size = c["draft_length"], c["batch_size"]
    findings.add(
        "draft_length",
        sd & (d < 1),
        lambda row: "0 on an sd row",
        "leave rounds out in which a speculative engine drafts nothing: they are slower than ordinary ones",
    )
    findings.add(
        "draft_length", ~sd & (d != 0), lambda row: f"{d[row]} on an stp row", "an ordinary round drafts nothing: 0"
    )
    findings.add(
        "method",
        ~sd & ~none,
        lambda row: f"{word(columns['method'], row)} on an stp row",
        "a loaded drafter slows ordinary rounds: measure the reference without one, method none",
    )
    findings.add("method", sd & none, lambda row: "none on an sd row", "say how the drafts were made")
    findings.add(
        "batch_size",
        (d + 1) * size > INT32,
        lambda row: f"{size[row]} requests of draft length {d[row]} are {(d[row] + 1) * size[row]} rows",
        f"(draft_length + 1) * batch_size is at most {INT32}",
    )
    latency, invalid = c["latency_ms"], is_word(columns["reason"], INVALID)
    findings.add(
        "latency_ms",
        ~(np.isfinite(latency) & (latency > 0)) & ~invalid,
        lambda row: f"{latency[row]} is no duration",
        HINTS["latency_ms"],
    )
    for name, most, said in (
        ("active_requests", size, "batch_size"),
        ("emitted_tokens", (d + 1) * size, "(draft_length + 1) * batch_size"),
        ("proposed_tokens", d * size, "draft_length * batch_size"),
    ):
        findings.add(
            name,
            c[name] > most,
            lambda row, name=name, most=most, said=said: f"{c[name][row]} is above {said} = {most[row]}",
            HINTS["draft_length"] if "tokens" in name else "batch_size counts the requests of the run",
        )
    var = c["var_kv"]
    findings.add(
        "var_kv",
        ~columns["var_kv"].null & ~(np.isfinite(var) & (var >= 0)),
        lambda row: f"{var[row]} is no variance",
        "tokens squared, from 0; leave it blank where it is unknown",
    )
    check_repeats(c, findings)


def check_column(column: Column, values: Values, findings: Findings, excused: np.ndarray | bool) -> None:
    """One column by itself: something there, readable, one of its words, within its bounds."""
    name, hint = column.name, HINTS.get(column.name, column.what).format(", ".join(column.words))
    if values.wrong is not None:
        findings.add(name, values.wrong, values.say, f"{hint}; plain digits, without separators or words")
    if column.required:
        findings.add(name, values.null & ~np.asarray(excused), lambda row: "nothing is given", hint)
    if column.kind == "text":
        ugly = flagged(values, lambda w: bool(w) and (w != w.strip() or not w.isprintable()))
        findings.add(
            name,
            ugly,
            lambda row: f"{show(word(values, row))} has blanks around it or characters that do not print",
            hint,
        )
        if column.required:
            empty = flagged(values, lambda w: not w)
            findings.add(name, empty, lambda row: "nothing is given", hint)
    if column.words:
        other = flagged(values, lambda w: w not in column.words)
        hint = HINTS["timing_scope"] if name == "timing_scope" else "it is one of {}"
        findings.add(
            name, other, lambda row: f"{show(word(values, row))} is unknown", hint.format(", ".join(column.words))
        )
    if column.kind == "count":
        outside = ((values.array < column.low) | (values.array > column.high)) & ~values.null
        bounds = f"{column.low}..{column.high}" if column.low < column.high else str(column.low)
        findings.add(name, outside, lambda row: f"{values.array[row]} is not {bounds}", hint)


def excused(column: Column, columns: Columns, anchors: bool) -> np.ndarray | bool:
    """Rows in which a required column may be left empty."""
    if column.name == "latency_ms":
        return is_word(columns["reason"], INVALID)
    return anchors and column.name in ANCHORS


def check_repeats(c: Mapping[str, np.ndarray], findings: Findings) -> None:
    """No two rows have one primary key."""
    code = coded([c[name] for name in PRIMARY_KEY])
    order = np.argsort(code, kind="stable")
    again = np.zeros(len(code), bool)
    again[order[1:]] = code[order[1:]] == code[order[:-1]]
    findings.add(
        "round_index",
        again,
        lambda row: f"the same round as {findings.place(int(np.argmax(code == code[row])))}",
        f"no two rows share {', '.join(PRIMARY_KEY)}; repeated runs have a repetition each",
    )


def check_engines(label: str, columns: Columns, place: Any) -> None:
    """One clock in the file, and one engine per deployment.

    Raises OptionError `study_mixed`.
    """
    scope = columns["timing_scope"]
    if len(scope.words) > 1:
        first = [f"{w} ({place(int(np.argmax(scope.array == i)))})" for i, w in enumerate(scope.words)]
        refuse_option(
            "study_mixed",
            f"{label} mixes timing scopes: {', '.join(first)}",
            "clocks differ by as much as the rule's error: make a study of each scope",
        )
    for name, among in SHARED.items():
        if len(columns[name].words) < 2:
            continue
        deployment = coded([columns[key].array for key in among])
        _, first, group = np.unique(deployment, return_index=True, return_inverse=True)
        other = columns[name].array != columns[name].array[first[group]]
        if other.any():
            row = int(other.argmax())
            was = int(first[group[row]])
            who = ", ".join(str(word(columns[key], row)) for key in among)
            refuse_option(
                "study_mixed",
                f"{label} has two engines for {who}: {name} is {word(columns[name], was)} in {place(was)} "
                f"and {word(columns[name], row)} in {place(row)}",
                "study one engine at a time",
            )


def coded(columns: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [n]: equal exactly where all the integer columns [n] are, and ordered as their tuples are."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        if not len(column):
            break
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        width, part = high - low + 1, column.astype(np.int64) - low
        if width > 2**31:
            distinct, part = np.unique(part, return_inverse=True)
            width = len(distinct)
        if size * width >= 2**62:
            distinct, code = np.unique(code, return_inverse=True)
            size = len(distinct)
        code, size = code * width + part, size * width
    return code


def is_word(values: Values, wanted: str) -> np.ndarray:
    """bool [n]"""
    return flagged(values, lambda word: word == wanted)


def flagged(values: Values, predicate: Any) -> np.ndarray:
    """bool [n]: a predicate on text, called once per distinct word."""
    return np.array([predicate(word) for word in values.words], bool)[values.array]


def word(values: Values, row: int) -> Any:
    """The value of one row as Python has it."""
    return values.words[values.array[row]] if values.words else values.array[row].item()


def missing_hint(name: str) -> str:
    """What an absent column would say."""
    return f"{name}: {BY_NAME[name].what}"
