"""Traffic: the iterations that an engine ran or will run, read in blocks so that its length does not matter."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from fpmjax.cli.arguments import UsageError, count
from fpmjax.cli.files import BOM, PARQUET, csv_table, lines, open_input, whole
from fpmjax.cli.output import note
from fpmjax.errors import MetricsError
from fpmjax.metrics import RANK, SCHEDULED, read_json, show

if TYPE_CHECKING:
    from fpmjax.work import Work

BLOCK = 1 << 14  # iterations; one compiled size
PADDED = 1 << 24  # bytes of a block if all its lines were as long as the longest: request lists are padded to that

# Column of a CSV or Parquet file -> field of Work: its own name, the engine's, and the short one of a decode sweep.
COLUMNS = {
    "prefill_requests": "prefill_requests",
    "num_prefill_requests": "prefill_requests",
    "prefill_tokens": "prefill_tokens",
    "sum_prefill_tokens": "prefill_tokens",
    "prefill_kv": "prefill_kv",
    "sum_prefill_kv_tokens": "prefill_kv",
    "decode_requests": "decode_requests",
    "num_decode_requests": "decode_requests",
    "batch": "decode_requests",
    "decode_kv": "decode_kv",
    "sum_decode_kv_tokens": "decode_kv",
    "kv": "decode_kv",
    "count": "count",
}
LARGEST_COUNT = 2**53  # sums of counts stay exact far beyond any file


@dataclass(frozen=True, eq=False)
class Block:
    """Some iterations: work [n], how often each occurred int64 [n], and where each stands in the file."""

    work: Work
    count: np.ndarray
    place: Sequence[str]


def read_traffic(name: str) -> Iterator[Block]:
    """The iterations of a file, a block at a time.

    JSON lines: one iteration each, a rank dict, a list of rank dicts, or a trace row {"event": {"fpm": rank dict}}.
    CSV or Parquet: one single-rank iteration per row, columns as in `COLUMNS`, absent ones 0; `count` says how
    often the row occurred.
    """
    with open_input(name) as (label, stream, head):
        if head == PARQUET:
            read = from_parquet
        elif head.removeprefix(BOM).lstrip(b" \t\r\n")[:1] in (b"{", b"["):
            read = from_json
        else:
            read = from_csv
        yield from read(label, stream)


def from_json(label: str, stream: BinaryIO) -> Iterator[Block]:
    return iterations(label, lines(label, stream))


def iterations(label: str, source: Iterable[tuple[int, bytes]]) -> Iterator[Block]:
    """Numbered lines, one iteration each, in blocks; the first note about a suspicious idle one is enough."""
    told = False
    for block in json_blocks(source):
        place = [f"line {number}" for number, _ in block]
        items = [unwrap(label, at, line) for at, (_, line) in zip(place, block, strict=True)]
        for first, part in fitting(label, place, items):
            here = items[first : first + len(part.place)]
            told = told or tell_unread(label, part.place, here, part.work)
            yield part


def fitting(label: str, place: Sequence[str], items: list[Any], first: int = 0) -> Iterator[tuple[int, Block]]:
    """(position of its first item, block): all of them, halved where padding to the longest list is too much."""
    try:
        yield first, Block(read_iterations(label, place, items), np.ones(len(items), np.int64), place)
        return
    except MetricsError as error:
        if error.code != "lists_too_large" or len(items) == 1:
            raise
    half = len(items) // 2
    yield from fitting(label, place[:half], items[:half], first)
    yield from fitting(label, place[half:], items[half:], first + half)


def json_blocks(source: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Lines, `BLOCK` at a time; fewer, of few sizes, where one of them is very long."""
    block: list[tuple[int, bytes]] = []
    longest = 1
    for numbered in source:
        longest = max(longest, len(numbered[1]))
        room = 1 << max(PADDED // longest, 1).bit_length() - 1
        if len(block) >= min(BLOCK, room):
            yield block
            block, longest = [], len(numbered[1])
        block.append(numbered)
    if block:
        yield block


def read_iterations(label: str, place: Sequence[str], items: list[Any]) -> Work:
    """`Work.from_iterations`, its errors saying where in the file."""
    from fpmjax.work import Work

    try:
        return Work.from_iterations(items)
    except MetricsError as error:
        found = re.match(r"iterations\[(\d+)\]: ", str(error))
        if not found:
            raise MetricsError(f"{label}: {error}", code=error.code) from None
        text = f"{label}, {place[int(found[1])]}: {str(error)[found.end() :]}"
        raise MetricsError(text, code=error.code) from None


def unwrap(label: str, place: str, line: bytes) -> Any:
    """The metrics in a trace row's envelope; any other line as it is."""
    if b'"event"' not in line:
        return line
    try:
        row = read_json(line)
    except MetricsError as error:
        raise MetricsError(f"{label}, {place}: {error}", code=error.code) from None
    if not isinstance(row, dict) or "event" not in row:
        return row
    event = row["event"]
    if not isinstance(event, dict) or "fpm" not in event:
        raise MetricsError(
            f"{label}, {place}: the trace row carries no event.fpm\nhint: keep the rows of schema dynamo.fpm.trace.v1",
            code="payload",
        )
    return event["fpm"]


def metrics_file(name: str) -> Iterator[Block]:
    """The iterations of a file in blocks: one JSON document is one iteration, JSON lines are many."""
    with open_input(name) as (label, stream, _):
        source = lines(label, stream)
        begin = list(islice(source, 2))
        if not begin:
            raise UsageError(f"{label} is empty\nhint: give the metrics of one iteration as JSON, or one per line")
        source = chain(begin, source)
        if len(begin) > 1 and not stands_alone(begin[0][1]):  # one document, written over many lines
            source = [(begin[0][0], b"".join(line for _, line in source))]
        yield from iterations(label, source)


def tell_unread(label: str, place: Sequence[str], items: Sequence[Any], work: Work) -> bool:
    """Note the first idle iteration whose unknown keys suggest that it was not meant to be idle; whether there is one.

    Unknown keys are ignored, as the schema wants it, and an object without any known one is an idle rank.
    """
    busy = (np.asarray(work.prefill_tokens) > 0) | (np.asarray(work.decode_requests) > 0)
    for i in np.flatnonzero(~busy.any(-1)).tolist():
        if why := unread(items[i]):
            note(f"{label}, {place[i]} is idle: {why}")
            return True
    return False


def unread(item: Any) -> str:
    """Which unknown keys of one iteration look like work, in words; empty where none do."""
    item = read_json(item) if isinstance(item, bytes) else item
    for rank in item if isinstance(item, list) else [item]:
        unknown = [name for name in rank if name not in RANK]
        if "scheduled_requests" in rank:
            scheduled = rank["scheduled_requests"]
            absent = [name for name in SCHEDULED if name not in scheduled]
            for name in scheduled:
                if name not in SCHEDULED and (close := difflib.get_close_matches(name, absent, 1, cutoff=0.85)):
                    return f"the unknown key {show(name)} is ignored; did you mean {close[0]}?"
        elif unknown:
            close = [name for name in unknown if difflib.get_close_matches(name, ["scheduled_requests"])]
            keys, it = ("key", "it") if len(unknown) == 1 else ("keys", "them")
            shown = ", ".join(map(show, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
            meant = "scheduled_requests" if close else f"{it} inside scheduled_requests"
            return f"the unknown {keys} {shown} {'is' if it == 'it' else 'are'} ignored; did you mean {meant}?"
    return ""


def stands_alone(line: bytes) -> bool:
    """Whether a line is JSON by itself."""
    try:
        read_json(line)
    except MetricsError:
        return False
    return True


def from_csv(label: str, stream: BinaryIO) -> Iterator[Block]:
    names, records = csv_table(label, stream)
    fields = known_columns(label, names)
    while block := list(islice(records, BLOCK)):
        place = [f"line {number}" for number, *_ in block]
        columns: dict[str, list[int]] = {field: [] for field in fields}
        for at, (_, record, width) in zip(place, block, strict=True):
            if record is None:
                raise UsageError(f"{label}, {at}: {width} fields under {len(names)} column names")
            for field, i in fields.items():
                columns[field].append(whole_number(record[i], label, at, names[i]))
        yield table_block(label, place, columns)


def from_parquet(label: str, stream: BinaryIO) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(whole(label, stream)))
        names = file.schema_arrow.names
        fields = known_columns(label, names)
        begin = 0
        for batch in file.iter_batches(batch_size=BLOCK, columns=[names[i] for i in fields.values()]):
            place = [f"row {begin + i}" for i in range(batch.num_rows)]
            columns = {}
            for field, i in fields.items():
                column = batch.column(names[i])
                if not pa.types.is_integer(column.type) or column.null_count:
                    fault = "nulls" if column.null_count else f"type {column.type}"
                    raise UsageError(f"{label}: column {names[i]} has {fault}, but counts are whole numbers")
                columns[field] = column.to_numpy(zero_copy_only=False)
            begin += batch.num_rows
            yield table_block(label, place, columns)
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        if isinstance(error, (UsageError, MetricsError)):
            raise
        raise UsageError(f"{label} is not a readable Parquet file: {str(error)[:200]}") from None


def known_columns(label: str, names: Sequence[str]) -> dict[str, int]:
    """Field -> position of its column; other columns are not read, and that is said."""
    fields: dict[str, int] = {}
    for i, name in enumerate(names):
        field = COLUMNS.get(name)
        if field in fields:
            raise UsageError(f"{label}: columns {names[fields[field]]!r} and {name!r} are the same quantity")
        if field:
            fields[field] = i
    if not {"decode_requests", "prefill_requests"} & set(fields):
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise UsageError(
            f"{label} has no column decode_requests or prefill_requests (found: {shown[:200]})\n"
            f"hint: traffic is JSON lines of metrics, or columns named {', '.join(COLUMNS)}"
        )
    if ignored := [name for name in names if name not in COLUMNS]:
        note(f"{label}: columns that are not read: {', '.join(ignored)[:200]}")
    return fields


def whole_number(text: str, label: str, place: str, column: str) -> int:
    text = text.strip()
    try:
        if re.fullmatch(r"\d+", text, re.ASCII):
            return count(text)
    except argparse.ArgumentTypeError as error:
        refuse(f"{label}, {place}, column {column}: {error}")
    refuse(f"{label}, {place}, column {column}: {text[:40]!r} is not a whole number from 0")


def refuse(text: str) -> NoReturn:
    raise UsageError(text)


def table_block(label: str, place: Sequence[str], columns: dict[str, Any]) -> Block:
    from fpmjax.work import Work

    number = np.asarray(columns.pop("count", np.ones(len(place), np.int64)))
    if number.size and (number.min() < 0 or number.max() > LARGEST_COUNT):
        refuse(f"{label}, {place[int(np.argmax((number < 0) | (number > LARGEST_COUNT)))]}: count is out of range")
    try:
        return Block(Work.of(**columns), number.astype(np.int64), place)
    except MetricsError as error:
        found = re.match(r"(\w+)\[(\d+)\]", str(error))
        if not found:
            raise
        text = f"{label}, {place[int(found[2])]}: {found[1]}{str(error)[found.end() :]}"
        raise MetricsError(text, code=error.code) from None
