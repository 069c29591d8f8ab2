"""Results in files: one Parquet file that appears when it is complete, or a folder of parts that can go on later.

    folder/_manifest.json     what is asked (a digest), which parts are complete, their rows and statuses
    folder/part-00000.parquet rows in order, a few million in a part
    folder/_lock              while it is written, the process that writes it

Every file is written under a temporary name and renamed, so that an interruption at any moment leaves complete files
only.  A folder that was not finished takes up where its manifest ends.
"""

from __future__ import annotations

import errno
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa

from fpmjax.atomic import replacing
from fpmjax.errors import FpmError, refuse_option
from fpmjax.folder_lock import LOCK, FolderLock
from fpmjax.metrics import show
from fpmjax.status import Status

FORMAT, VERSION = "fpmjax sweep", 1
MANIFEST = "_manifest.json"  # readers of datasets skip names that begin so; others take "folder/*.parquet"
SUFFIX = ".parquet"
PART = re.compile(r"part-\d{5,}\.parquet", re.ASCII)
PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial", re.ASCII)  # what `replacing` leaves when it is killed
PART_ROWS = 1 << 22  # at least, before the next part begins
AHEAD = 2  # pieces computed before the writer has taken them
FAULTS = 8  # messages that are kept; all of them stand in the result
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Tally:
    """Rows, by status where that is known, and rows that could not be asked."""

    rows: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faulty: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, status: np.ndarray, faults: Mapping[int, str]) -> None:
        self.rows += len(status)
        counts = np.bincount(status).tolist()
        self.statuses.update({Status(kind).code: count for kind, count in enumerate(counts) if count})
        self.faulty += len(faults)
        self.faults += [faults[i] for i in sorted(faults)[: FAULTS - len(self.faults)]]

    def document(self) -> dict[str, Any]:
        return {"rows": self.rows, "statuses": dict(self.statuses), "faulty": self.faulty, "faults": self.faults}

    def __iadd__(self, other: Tally) -> Tally:
        self.rows += other.rows
        self.statuses += other.statuses
        self.faulty += other.faulty
        self.faults += other.faults[: FAULTS - len(self.faults)]
        return self


@dataclass(frozen=True)
class Settings:
    """How columns are stored: dictionaries only where few values occur, which makes writing several times as fast."""

    schema: pa.Schema
    dictionaries: list[str]

    def open(self, path: Path) -> Any:
        import pyarrow.parquet as pq

        few: Any = self.dictionaries
        return pq.ParquetWriter(str(path), self.schema, compression="zstd", use_dictionary=few)


class Part:
    """One Parquet file on its way: it takes its place in `finish`, and leaves nothing behind in `abandon`."""

    def __init__(self, path: Path, settings: Settings):
        self.path = path
        with ExitStack() as held:
            self.writer = settings.open(held.enter_context(replacing(path)))
            self.held = held.pop_all()

    def write(self, batch: pa.RecordBatch) -> None:
        self.writer.write_batch(batch, row_group_size=max(1, batch.num_rows))

    def finish(self) -> None:
        self.writer.close()
        self.held.close()

    def abandon(self) -> None:
        with suppress(OSError, pa.ArrowException):
            self.writer.close()
        stop = InterruptedError()
        self.held.__exit__(InterruptedError, stop, None)


def write_whole(path: Path, table: pa.Table, *, overwrite: bool) -> None:
    """A table that is there as one file."""
    out = FileOut(path, Settings(table.schema, table.schema.names), overwrite=overwrite)
    try:
        for batch in table.to_batches():
            out.write(batch, Tally())
        out.finish()
    except BaseException:
        out.abandon()
        raise


class FileOut:
    """One Parquet file; `begin` is the row to go on with, always 0."""

    begin = 0

    def __init__(self, path: Path, settings: Settings, *, overwrite: bool):
        check_free(path, overwrite)
        self.path, self.done = path, Tally()
        with named_errors(path):
            self.part = Part(path, settings)

    def write(self, batch: pa.RecordBatch, tally: Tally) -> None:
        with named_errors(self.path):
            self.part.write(batch)
        self.done += tally

    def finish(self) -> None:
        with named_errors(self.path):
            self.part.finish()

    def abandon(self) -> None:
        self.part.abandon()


def check_free(path: Path, overwrite: bool) -> None:
    """OptionError (`exists`) where a file stands that was not meant to be replaced."""
    if path.exists() and not overwrite:
        refuse_option(
            "exists", f"{path} exists", "name another file, or say overwrite to replace it when the new one is complete"
        )


class FolderOut:
    """A folder of parts; `begin` is the row to go on with."""

    def __init__(self, path: Path, settings: Settings, digest: str, about: Mapping[str, Any], *, overwrite: bool):
        self.path, self.settings, self.digest, self.about = path, settings, digest, about
        self.overwrite = overwrite
        self.parts: list[dict[str, Any]] = []
        self.done, self.tally = Tally(), Tally()
        self.part: Part | None = None
        with named_errors(path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = FolderLock(path)
            try:
                self.enter(overwrite)
            except BaseException:
                self.lock.release()
                raise
        self.begin = self.done.rows

    def enter(self, overwrite: bool) -> None:
        """Begin the folder, go on with it, or clear it."""
        there = sorted(p.name for p in self.path.iterdir() if p.name != LOCK)
        if not there:
            return self.note(complete=False)
        foreign = [name for name in there if not is_ours(name) or not (self.path / name).is_file()]
        if MANIFEST not in there or foreign:
            shown = ", ".join((foreign or there)[:3])
            refuse_option("exists", f"{self.path} holds other files ({shown})", "name a new folder, or an empty one")
        found = read_manifest(self.path / MANIFEST)
        if not overwrite:
            if found.get("digest") != self.digest:
                what = f"{self.path} holds a result of another question: {differing(found, self.about)}"
                refuse_option("resume", what, "ask the same again to go on, name another folder, or say overwrite")
            for i, part in enumerate(found["parts"]):
                tally = tally_of(part, i, self.path)
                if tally is None:
                    break
                self.parts.append(part)
                self.done += tally
            if found.get("complete") and len(self.parts) == len(found["parts"]):
                refuse_option("exists", f"{self.path} holds this result, complete", "read it, or say overwrite")
        keep = {part["file"] for part in self.parts}
        self.note(complete=False)  # before other parts go: they belong to no result then
        for name in there:
            if name not in keep and name != MANIFEST:
                (self.path / name).unlink()

    def write(self, batch: pa.RecordBatch, tally: Tally) -> None:
        same = "the same call without overwrite" if self.overwrite else "the same call"
        with named_errors(self.path, f"; {self.done.rows:,} rows are complete, and {same} goes on from there"):
            if self.part is None:
                self.part = Part(self.path / part_name(len(self.parts)), self.settings)
            self.part.write(batch)
            self.tally += tally
            if self.tally.rows >= PART_ROWS:
                self.close_part()

    def close_part(self) -> None:
        assert self.part is not None
        self.part.finish()
        self.parts.append({"file": self.part.path.name, **self.tally.document()})
        self.done += self.tally
        self.part, self.tally = None, Tally()
        self.note(complete=False)

    def finish(self) -> None:
        with named_errors(self.path):
            if self.part is None and not self.parts:  # a result without rows still has columns
                self.part = Part(self.path / part_name(0), self.settings)
            if self.part is not None:
                self.close_part()
            self.note(complete=True)
        self.lock.release()

    def abandon(self) -> None:
        try:
            if self.part is not None:
                self.part.abandon()
        finally:
            self.lock.release()

    def note(self, *, complete: bool) -> None:
        document = {"format": FORMAT, "version": VERSION, "complete": complete, "digest": self.digest}
        document |= {"rows": sum(part["rows"] for part in self.parts), "parts": self.parts, **self.about}
        with replacing(self.path / MANIFEST) as partial:
            partial.write_text(json.dumps(document, indent=1), encoding="utf-8")


def is_ours(name: str) -> bool:
    """Whether a sweep gives such a name to a file; every other file in its folder is the user's."""
    return name == MANIFEST or bool(PART.fullmatch(name) or PARTIAL.fullmatch(name))


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("parts"), list):
        refuse_option("resume", f"{path} is not the manifest of a result", "name a new folder, or an empty one")
    return found


def tally_of(part: Any, position: int, folder: Path) -> Tally | None:
    """What the manifest says of a part, compared with the file; None where that is gone, and is to be made again.

    Raises OptionError (`resume`) for a manifest that no sweep writes, and a file with other rows than it says.
    """
    name, again = part_name(position), "say overwrite to begin anew, or name another folder"
    if not is_record(part) or part["file"] != name:
        refuse_option("resume", f"{folder / MANIFEST} is damaged: part {position} is {show(part)}", again)
    path = folder / name
    if not path.is_file():
        return None
    import pyarrow.parquet as pq

    try:
        rows = pq.read_metadata(str(path)).num_rows
    except (pa.ArrowException, OSError) as error:
        refuse_option("resume", f"{path} is not readable Parquet: {str(error).splitlines()[0]}", again)
    if rows != part["rows"]:
        refuse_option("resume", f"{path} has {rows:,} rows, but the manifest says {part['rows']:,}", again)
    return Tally(rows, Counter(part["statuses"]), part["faulty"], list(part["faults"]))


def part_name(position: int) -> str:
    return f"part-{position:05}{SUFFIX}"


def is_record(part: Any) -> bool:
    """Whether this describes a part as `Tally.document` does."""
    if not isinstance(part, dict) or not isinstance(part.get("statuses"), dict):
        return False
    counts = (part.get("rows"), part.get("faulty"), *part["statuses"].values())
    texts = part.get("faults")
    whole = isinstance(texts, list) and all(isinstance(text, str) for text in texts) and "file" in part
    return whole and all(type(count) is int and count >= 0 for count in counts)


def differing(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What two questions differ in, as far as their documents tell."""
    names = [name for name in about if found.get(name) != json.loads(json.dumps(about[name]))]
    return ", ".join(names) or "the values of its axes, or the content of its models"


@contextmanager
def named_errors(path: Path, more: str = "") -> Iterator[None]:
    """Turns an OSError into FpmError `disk_full` or `unwritable`; more: what is safe all the same."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            what, hint = f"the disk is full: {path} cannot be written{more}", "make room and ask again"
            raise FpmError(f"{what}\nhint: {hint}", code="disk_full") from error
        what = f"{path} cannot be written: {error.strerror or error}{more}"
        raise FpmError(f"{what}\nhint: name a file or folder in a writable place", code="unwritable") from error


def beside(pieces: Iterable[Any], write: Callable[[Any], None]) -> None:
    """`write` every piece in a thread of its own while the next ones are made; the first error of either is raised."""
    queue: Queue[Any] = Queue(AHEAD)
    failed: list[BaseException] = []

    def take() -> None:
        while (piece := queue.get()) is not None:
            if not failed:
                try:
                    write(piece)
                except BaseException as error:
                    failed.append(error)

    thread = Thread(target=take, name="fpmjax writer", daemon=True)
    thread.start()
    try:
        for piece in pieces:
            if failed:
                break
            queue.put(piece)
    finally:
        queue.put(None)
        thread.join()
    if failed:
        raise failed[0]
