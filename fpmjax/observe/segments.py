"""Finds the files of an engine trace, orders them and streams their lines.

A trace is a series of segments `<prefix>.<producer-id>.<index>.jsonl[.gz]`: rolled by size, the oldest deleted first,
so a series may start above index 0 and have holes.  Compressed segments are concatenated gzip members, one per flush;
a writer that died leaves the last member of the newest segment cut, and what stands before the cut is good.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fpmjax.errors import TraceError

SEGMENT = re.compile(r"(?P<prefix>[^.].*)\.(?P<producer>[A-Za-z0-9_-]+)\.(?P<index>\d{6,18})\.jsonl(\.gz)?")
PROBE = "_worker_probe.json"  # written beside an artifact, not one
GIVE = "pass a file, a glob, a folder, or a list of these"
CHUNK = 1 << 18
LONGEST_LINE = 1 << 26
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"  # some editors begin a file with it
# Where a JSON text is cut: inside a string, an escape, a number or a word.
PARTIAL = re.compile(r'\s*|"(?:[^"\\\x00-\x1f]|\\.)*\\?|-|\.|[eE][-+]?|t|tr|tru|f|fa|fal|fals|n|nu|nul')
PARTIAL_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,4}$")
EVERY_SECONDS = 0.25  # between two calls of a progress function


class Truncated(Exception):
    """The file ends inside a gzip member or inside a row."""


@dataclass(frozen=True)
class Source:
    """One file to read.

    series: what its segments have in common; index: its place there; last: no later segment of the series is read.
    """

    path: Path
    series: tuple[str, str]
    index: int
    last: bool = True

    @property
    def is_artifact(self) -> bool:
        return self.path.suffix == ".json"


class Progress:
    """Tells `call(bytes read, bytes in all)`, as they lie on disk, a few times a second and once at the end."""

    def __init__(self, call: Callable[[int, int], None] | None, sources: Iterable[Source]):
        self.call = call
        self.sizes = {source.path: _size(source.path) for source in sources} if call else {}
        self.total = sum(self.sizes.values())
        self.before = 0  # bytes of the files that are done
        self.due = 0.0

    def at(self, position: int) -> None:
        """So far into the present file."""
        if self.call and (now := time.monotonic()) >= self.due:
            self.due = now + EVERY_SECONDS
            self.call(min(self.before + position, self.total), self.total)  # a file may grow meanwhile

    def done(self, path: Path) -> None:
        self.before += self.sizes.get(path, 0)

    def end(self) -> None:
        if self.call:
            self.call(self.total, self.total)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # whoever opens it says why
        return 0


def refuse(code: str, message: str, hint: str) -> NoReturn:
    """Raise TraceError with its hint line."""
    raise TraceError(f"{message}\nhint: {hint}", code=code)


def find(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[list[Source], list[Path]]:
    """Every file that `paths` name, each once, segments of a series in the order of their index; and what is left out.

    A folder gives the segments in it (not below it); a glob also plain `.jsonl` files and `.json` artifacts.  Lock
    files, write probes and anything else there are passed over, other `.jsonl` files are told as left out; a file that
    is named itself has to be readable.

    Raises TraceError: `no_files`, `file`, `paths`.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else items(paths)
    if given is None:
        refuse("paths", f"paths is of type {type(paths).__name__}", GIVE)
    found: dict[str, Source] = {}
    passed: dict[str, Path] = {}
    for item in given:
        name = os.fspath(item) if isinstance(item, (str, os.PathLike)) else None
        if not isinstance(name, str):
            refuse("paths", f"a path is of type {type(item).__name__}", "pass text or pathlib.Path")
        if not name or "\0" in name:
            refuse("paths", f"a path is {name!r}, which names nothing", GIVE)
        try:
            for path in _expand(name):
                found.setdefault(os.path.realpath(path), _source(path))
            for path in _others(name):
                passed.setdefault(os.path.realpath(path), path)
        except OSError as error:
            refuse("file", f"{name} cannot be read: {error.strerror}", "check the name and the permissions")
    if not found:
        refuse("no_files", "paths names no file", GIVE)
    ordered = sorted(found.values(), key=lambda s: (s.series, s.index, s.path.name))
    highest = {source.series: source.index for source in ordered}
    sources = [Source(s.path, s.series, s.index, s.index == highest[s.series]) for s in ordered]
    return sources, sorted(path for real, path in passed.items() if real not in found)


def items(several: Any) -> list[Any] | None:
    """What an iterable of names holds; None for anything else, also bytes and mappings."""
    if not isinstance(several, Iterable) or isinstance(several, (bytes, bytearray, Mapping)):
        return None
    try:
        return list(several)
    except TypeError:  # an array without axes
        return None


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        inside = [p for p in path.iterdir() if SEGMENT.fullmatch(p.name) and p.is_file()]
        return inside or _nothing(name, "the folder holds no segment")
    if path.is_file():
        if path.name.endswith((".jsonl", ".jsonl.gz", ".json")) and not path.name.endswith(PROBE):
            return [path]
        refuse(
            "file",
            f"{name} is neither a trace nor an artifact",
            "traces end in .jsonl or .jsonl.gz, artifacts in .json",
        )
    if glob.has_magic(name):
        matched = [Path(p) for p in glob.glob(name) if os.path.isfile(p)]
        kept = [p for p in matched if p.name.endswith((".jsonl", ".jsonl.gz", ".json")) and not p.name.endswith(PROBE)]
        return kept or _nothing(name, "the glob matches no trace file")
    if path.exists():
        refuse("file", f"{name} is not a regular file", "write what comes through it to a file, and read that")
    _nothing(name, "there is no such file")


def _others(name: str) -> list[Path]:
    """In a folder: what looks like a trace, but is no segment by its name."""
    inside = Path(name).iterdir() if os.path.isdir(name) else ()
    kept = (p for p in inside if p.name.endswith((".jsonl", ".jsonl.gz")) and not p.name.startswith("."))
    return [p for p in kept if not SEGMENT.fullmatch(p.name)]


def _nothing(name: str, why: str) -> NoReturn:
    refuse("no_files", f"{name}: {why}", "segments are named <prefix>.<producer-id>.<6 digits>.jsonl or .jsonl.gz")


def _source(path: Path) -> Source:
    parts = SEGMENT.fullmatch(path.name)
    if parts is None:
        return Source(path, (str(path), ""), 0)
    return Source(path, (str(path.parent / parts["prefix"]), parts["producer"]), int(parts["index"]))


def read_lines(path: Path, at: Callable[[int], None] = lambda position: None) -> Iterator[tuple[int, list[bytes]]]:
    """Blocks of whole lines without their newline, each with the number of its first line.

    at: told before each block how many bytes of the file were read.
    Raises Truncated after the last whole line where the file is cut; TraceError `file`, `gzip` or `long_line`.
    """
    number = 1
    begun: list[bytes] = []  # pieces of a line that goes on, joined once: a long one would be copied over and over
    size = 0
    cut: Truncated | None = None
    try:
        with open(path, "rb") as stream:
            blocks = _blocks(stream, path)
            while True:
                try:
                    block = next(blocks, b"")
                except Truncated as error:
                    cut, block = error, b""
                if not block:
                    break
                at(stream.tell())
                begun.append(block)
                size += len(block)
                lines: list[bytes] = []
                if b"\n" in block:
                    *lines, rest = b"".join(begun).split(b"\n")
                    begun, size = [rest], len(rest)
                if number == 1 and lines:
                    lines[0] = lines[0].removeprefix(BOM)
                if size > LONGEST_LINE:
                    refuse(
                        "long_line",
                        f"{path}:{number + len(lines)}: the line is longer than {LONGEST_LINE} bytes",
                        "a trace row is one short JSON object per line",
                    )
                yield number, lines
                number += len(lines)
    except zlib.error as error:
        refuse("gzip", f"{path}:{number}: the compressed data is damaged: {error}", "copy the segment again")
    except OSError as error:
        refuse("file", f"{path} cannot be read: {error}", "check the file and its permissions")
    if cut is not None:
        raise cut
    tail = b"".join(begun)
    if number == 1:
        tail = tail.removeprefix(BOM)
    if _is_cut(tail):
        raise Truncated(f"{path}:{number}: the last line is cut")
    if tail:
        yield number, [tail]


def _is_cut(line: bytes) -> bool:
    """Whether a line without its newline is the beginning of a JSON object; anything else is as bad as it looks."""
    try:
        text = line.decode().strip(" \t\r")
    except UnicodeDecodeError as error:
        if error.end < len(line) or error.reason != "unexpected end of data":
            return False
        text = line[: error.start].decode().strip(" \t\r")
    if not text.startswith("{"):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        escape = PARTIAL_ESCAPE.search(text)
        return PARTIAL.fullmatch(text, error.pos) is not None or (escape is not None and error.pos >= escape.start())
    except (ValueError, RecursionError):
        pass
    return False


def _blocks(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Bytes of the file, decompressed where its name or its first bytes say gzip."""
    chunk = stream.read(CHUNK)
    if path.suffix != ".gz" and chunk[:2] != GZIP:
        while chunk:
            yield chunk
            chunk = stream.read(CHUNK)
        return
    member = None
    while chunk:
        if member is None:
            chunk = chunk.lstrip(b"\0")  # padding between members is allowed
            member = zlib.decompressobj(wbits=31) if chunk else None
        while member is not None and chunk:
            if block := member.decompress(chunk, CHUNK):
                yield block
            chunk = member.unconsumed_tail
            if member.eof:
                chunk = member.unused_data.lstrip(b"\0")
                member = zlib.decompressobj(wbits=31) if chunk else None
        chunk = stream.read(CHUNK)
    if member is not None:
        raise Truncated(f"{path}: the last gzip member is cut")
