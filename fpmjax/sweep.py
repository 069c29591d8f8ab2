"""`sweep`: every query of a grid or a table, asked of one or many models, as a table, in files, or reduced.

Rows stream: while one piece is written, the next is computed, and no more than a few pieces lie in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fpmjax.errors import refuse_option
from fpmjax.given import flag, word
from fpmjax.metrics import show
from fpmjax.progress import Progress
from fpmjax.result_columns import STATUS, as_numpy
from fpmjax.result_files import SUFFIX, FileOut, FolderOut, Settings, Tally, beside, check_free, write_whole
from fpmjax.rule import SpeculativeRule
from fpmjax.status import Status
from fpmjax.sweep_job import Job, answers, digest, job_of

MOST_IN_MEMORY = 1 << 28  # rows of a table or of NumPy arrays
FORMS = ("table", "reader", "numpy")


@dataclass(frozen=True)
class Swept:
    """What a sweep has written.

    path: the file or folder; rows: all of them; statuses: how many by word; faulty: rows of a table that could not be
    asked at all, faults: what is wrong with the first of them.
    """

    path: Path
    rows: int
    statuses: Mapping[str, int]
    faulty: int = 0
    faults: tuple[str, ...] = ()

    @property
    def answered(self) -> int:
        return sum(self.statuses.get(word, 0) for word in (Status.OK.code, Status.IDLE.code))


def sweep(
    models: Any,
    queries: Any,
    *,
    out: str | os.PathLike[str] | None = None,
    form: str = "table",
    columns: Sequence[str] | None = None,
    reduce: Any = None,
    chunk: int | None = None,
    rule: SpeculativeRule | None = None,
    evidence: bool = False,
    progress: bool = True,
    overwrite: bool = False,
) -> Any:
    """Ask everything, in order, and keep every row, refused ones with their status.

    models: one; several in a list; or {name: model}.  Several are asked everything in turn, or where the grid's own
        axis `model` says.  None where the grid has that axis.
    queries: `grid(...)`, or a table of queries: Arrow, a data frame of pandas or Polars, a Parquet or CSV file; see
        `query_table`.  A row that cannot be asked is kept, and its column `fault` says why.
    out: None returns the rows; "x.parquet" writes one file, which appears when it is complete; any other name is a
        folder of numbered parts, which an interrupted sweep goes on with when it is asked the same again.  Both return
        `Swept`.  A reader that takes every file of a folder for data is given "folder/*.parquet".
    form: of returned rows: "table" (pyarrow Table), "reader" (RecordBatchReader, computed as it is read), "numpy" (dict
        of arrays: NaN for a missing number, status and resolution as the integers of `Status` and `Resolution`); not
        taken with `out`.
    columns: names to keep (`result_columns.COLUMNS` and the inputs); None keeps all.
    reduce: a `Reduce`: not the rows of a grid but their reduction is returned, or written to a file (`summarise`);
        columns, form, chunk and evidence are then not taken.
    chunk: rows computed at a time, 2**18, at most 2**28; memory grows with it, no answer depends on it.
    rule: factor of speculative rounds; None is the published one.
    evidence: add the lookups of every row: resolution, rows of the table's Parquet file and their weights.
    overwrite: replace an existing file when the new one is complete, and an existing result folder at once.

    Raises OptionError (the argument, `exists`, `resume`, `busy`, `file`, `rows`), FpmError (`disk_full`, `unwritable`)
    and what `estimate` raises for a model or a rule.
    """
    word("form", form, FORMS)
    for name, value in {"evidence": evidence, "progress": progress, "overwrite": overwrite}.items():
        flag(name, value)
    if reduce is not None:
        rows_only = {"columns": columns, "evidence": evidence or None, "form": None if form == "table" else form}
        for name, value in (rows_only | {"chunk": chunk}).items():
            if value is not None:
                refuse_option(name, f"{name} is about single rows, which a reduction has none of", f"leave {name} out")
        return reduced(models, queries, reduce, out, rule, progress, overwrite)
    if out is not None and form != "table":
        refuse_option("form", f"form={form!r} is about rows that are returned, but out writes them", "leave form out")
    job = job_of(models, queries, columns, chunk, rule, evidence)
    if out is not None:
        return to_files(job, out, progress=progress, overwrite=overwrite)
    if form == "reader":
        return pa.RecordBatchReader.from_batches(job.layout.schema, (batch for batch, _ in watched(job, 0, progress)))
    if job.rows > MOST_IN_MEMORY:
        what = f"{job.rows:,} rows are more than the {MOST_IN_MEMORY:,} that are returned at once"
        refuse_option("rows", what, 'give out="folder/", form="reader", or reduce=')
    table = pa.Table.from_batches([batch for batch, _ in watched(job, 0, progress)], job.layout.schema)
    if form == "numpy":
        return {name: as_numpy(name, table.column(name)) for name in table.column_names}
    return table


def reduced(models: Any, queries: Any, reduce: Any, out: Any, rule: Any, progress: bool, overwrite: bool) -> Any:
    """The table of `summarise`, or where it was written."""
    from fpmjax.reduce import summarise

    path = None if out is None else file_of(out)
    if path is not None:
        check_free(path, overwrite)  # before a long computation
    table = summarise(models, queries, reduce=reduce, rule=rule, progress=progress)
    if path is None:
        return table
    write_whole(path, table, overwrite=overwrite)
    return Swept(path, table.num_rows, {})


def watched(job: Job, start: int, progress: bool) -> Iterator[tuple[pa.RecordBatch, Tally]]:
    """The rows from `start` on, and their tallies; on a terminal with a line that tells how far they are."""
    done = 0
    with Progress("sweeping", job.rows - start, unit="queries") if progress else nullcontext() as bar:
        for piece in job.pieces(start):
            arrays = answers(job, piece)
            tally = Tally()
            tally.add(arrays[STATUS], piece.faults)
            yield job.layout.batch(piece.inputs, arrays, piece.model, piece.faults), tally
            done += len(piece)
            if bar is not None:
                bar(done)


# Files


def to_files(job: Job, out: Any, *, progress: bool, overwrite: bool) -> Swept:
    path = path_of(out)
    settings = Settings(job.layout.schema, [f.name for f in job.layout.schema if holds_few_values(f)])
    if is_file(out, path):
        target: Any = FileOut(path, settings, overwrite=overwrite)
    else:
        target = FolderOut(path, settings, digest(job), job.about, overwrite=overwrite)
    try:
        beside(watched(job, target.begin, progress), lambda piece: target.write(*piece))
        target.finish()
    except BaseException:
        target.abandon()
        raise
    done = target.done
    return Swept(path, done.rows, dict(done.statuses), done.faulty, tuple(done.faults))


def holds_few_values(field: pa.Field) -> bool:
    """Whether a dictionary pays: axes, words, flags and factors repeat, measured numbers do not."""
    return field.name == "scaling_factor" or not (pa.types.is_floating(field.type) or pa.types.is_nested(field.type))


def path_of(out: Any) -> Path:
    """OptionError (`out`) for what no file can be named."""
    hint = "name a .parquet file or a folder"
    name = os.fspath(out) if isinstance(out, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name:
        refuse_option("out", f"out is {show(out)}", hint)
    try:
        os.lstat(name)
    except ValueError as error:  # an embedded NUL, or half a surrogate pair
        refuse_option("out", f"out is {show(name)}: {error}", hint)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            refuse_option("out", f"the name {show(name)} is too long", hint)
    return Path(name)


def file_of(out: Any) -> Path:
    """The one file that is meant; OptionError (`out`) for a folder."""
    path = path_of(out)
    if not is_file(out, path):
        refuse_option("out", f"one table is written, but {path} is a folder", "name x.parquet")
    return path


def is_file(out: Any, path: Path) -> bool:
    """Whether one file is meant; OptionError (`out`) for what is neither Parquet nor the name of a folder."""
    if str(out).endswith(("/", os.sep)) or path.is_dir():
        return False
    if path.exists() and not path.is_file():
        refuse_option("out", f"{path} is neither a file nor a folder", "name x.parquet, or a folder")
    if path.suffix.lower() == SUFFIX:
        return True
    if path.is_file() or path.suffix.lower() in (".csv", ".json", ".arrow", ".feather", ".npz", ".gz", ".txt"):
        refuse_option("out", f"{path} is no Parquet file", "name x.parquet, or a folder")
    return False
