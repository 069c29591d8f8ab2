"""One sweep before it runs: who is asked what, checked, and what its rows look like; and the answers of one piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from fpmjax.errors import first_line, refuse_option
from fpmjax.estimate import check_arguments, estimate
from fpmjax.grid import Grid, with_models
from fpmjax.metrics import as_index, show
from fpmjax.model_names import named
from fpmjax.query_source import GridQueries, Piece, Source
from fpmjax.query_table import TableQueries
from fpmjax.result_columns import PHASES, STATUS, Arrays, Layout, arrays_of, blank, gathered, ordinary
from fpmjax.result_files import FORMAT, VERSION
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import require_eligible
from fpmjax.status import Status
from fpmjax.work import Work

CHUNK = 1 << 18  # rows: the largest compiled size, and a row group that readers skip and spread well
MOST_CHUNK = 1 << 28
NOTE = b"fpmjax"  # key in the schema metadata


@dataclass(frozen=True, eq=False)
class Job:
    """One sweep: who is asked what, how, and what its rows look like; about: all of it as a document."""

    models: tuple[Any, ...]
    source: Source
    layout: Layout
    chunk: int
    rule: SpeculativeRule | None
    evidence: bool
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """How often the source is asked from its beginning: a table once a model; a grid holds its models itself."""
        return 1 if isinstance(self.source, GridQueries) else len(self.models)

    @property
    def rows(self) -> int:
        return self.source.size * self.turns

    def pieces(self, start: int) -> Iterator[Piece]:
        turn, row = divmod(start, self.source.size) if self.source.size else (0, 0)
        for model in range(turn, self.turns):
            for piece in self.source.pieces(row if model == turn else 0, self.chunk):
                own = piece.model is not None or self.layout.models is None
                yield piece if own else replace(piece, model=np.full(len(piece), model))


def job_of(models: Any, queries: Any, columns: Any, chunk: Any, rule: Any, evidence: bool) -> Job:
    """Everything checked, before anything is computed."""
    if chunk is not None:
        size = as_index(chunk)
        if size is None or not 1 <= size <= MOST_CHUNK:
            refuse_option("chunk", f"chunk is {show(chunk)}", f"give a number of rows, from 1 to {MOST_CHUNK}")
        chunk = size
    names, asked, several = named(models, queries, "sweep")
    nothing = Work.decode(0, 0)
    for model in asked:
        check_arguments(model, nothing, rule)
    if isinstance(queries, Grid):
        source: Source = GridQueries(queries if not several or queries.models else with_models(queries, asked))
    elif isinstance(queries, (str, os.PathLike, pa.Table)):
        source = TableQueries(queries)
    elif hasattr(queries, "__arrow_c_stream__"):
        source = TableQueries(arrow_of(queries))
    else:
        what = f"queries is a {type(queries).__name__}"
        refuse_option("queries", what, "give fpmjax.grid(...), an Arrow table, a data frame, or a Parquet or .csv file")
    if source.drafted:
        for model in asked:
            require_eligible(model)
    elif rule is not None:
        refuse_option("rule", "a rule scales speculative rounds, but no draft_length is there", "give draft_length too")
    found = {name for model in asked for name in given(model, source.drafted, evidence)}
    found = {name for name in found if name.partition("_")[0] not in {*PHASES} - {*source.phases}}
    layout = Layout(source.fields, found, names if several else None, faulty=source.faulty, chosen=columns)
    about = about_of(asked, names, source, layout, rule)
    layout.schema = layout.schema.with_metadata({NOTE: json.dumps(about)})
    return Job(asked, source, layout, chunk or CHUNK, rule if source.drafted else None, evidence, about)


def arrow_of(frame: Any) -> pa.Table:
    """A data frame as Arrow; OptionError (`queries`) where it has no such form, as a series or a mixed column."""
    try:
        return pa.table(frame)
    except Exception as error:  # of Arrow, or of whatever library the frame is from
        what = f"the {type(frame).__name__} of queries is no Arrow table: {first_line(error)}"
        refuse_option("queries", what, "give a frame whose columns hold values of one type each, counts as integers")


def given(model: Any, drafted: bool, evidence: bool) -> set[str]:
    """Names of the columns that this model fills, found by asking it for nothing."""
    idle = Work.decode(np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    draft = np.ones(1, np.int64) if drafted else None
    return set(arrays_of(estimate(model, idle, draft_length=draft, check=False, evidence=evidence)))


def about_of(models: Any, names: list[str], source: Source, layout: Layout, rule: Any) -> dict[str, Any]:
    """What a reader of the result has to know: its schema carries this, and so does the manifest of a folder."""
    from fpmjax import __version__

    rule = rule or PUBLISHED
    return {
        "result": {"format": FORMAT, "version": VERSION},
        "versions": {"fpmjax": __version__, "jax": jax.__version__},
        "models": [{"name": name, **about_model(model)} for name, model in zip(names, models, strict=True)],
        "rule": rule.document() if source.drafted else None,
        "queries": source.about(),
        "columns": layout.schema.names,
        "outputs": [name for name in layout.schema.names if name not in {f.name for f in source.fields}],
        "units": layout.units,
    }


def about_model(model: Any) -> dict[str, Any]:
    cell = getattr(model, "cell", None)
    kind = {"kind": type(model).__name__, "digest": digest_of(model)}
    if cell is None:
        return kind
    table = {"table": os.path.basename(cell.path), "table_digest": cell.digest, "policy": cell.policy}
    return kind | table | {"cell": dict(cell.identity)}


def digest_of(model: Any) -> str:
    """SHA-256 of everything that a model's answers depend on."""
    leaves, tree = jax.tree.flatten(model)
    found = hashlib.sha256(f"{type(model).__qualname__} {tree}".encode())
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype.str} {np.shape(leaf)}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def digest(job: Job) -> str:
    """SHA-256 of what the rows of a result depend on: queries, models, rule, columns, versions."""
    document = {name: x for name, x in job.about.items() if name != "versions"} | {"evidence": job.evidence}
    document["fpmjax"] = job.about["versions"]["fpmjax"]
    found = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    found.update(job.source.digest().encode())
    return found.hexdigest()


# Answers


def answers(job: Job, piece: Piece) -> Arrays:
    """Every query of a piece, each by its model, ordinary passes and drafted ones apart."""
    n = len(piece)
    parts = []
    for rows, model in by_model(piece.model, job.models):
        for where, drafted in by_depth(rows, piece.depth):
            work = piece.work if where is None else some(piece.work, where)
            depth = piece.depth if where is None or piece.depth is None else piece.depth[where]
            asked = {"draft_length": depth, "rule": job.rule} if drafted else {}
            found = arrays_of(estimate(model, work, check=False, evidence=job.evidence, **asked))
            parts.append((where, ordinary(found) if piece.depth is not None and not drafted else found))
    out = gathered(n, job.layout.found, parts)
    return refusing(out, piece) if piece.faults or piece.refused is not None else out


def by_model(asked: np.ndarray | None, models: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """(rows, None for all; model) for every model that is asked something."""
    if asked is None:
        yield None, models[0]
        return
    for i in np.unique(asked).tolist():
        rows = np.flatnonzero(asked == i)
        yield (None if len(rows) == len(asked) else rows), models[i]


def by_depth(rows: np.ndarray | None, depth: np.ndarray | None) -> Iterator[tuple[Any, bool]]:
    """(rows, whether drafted) of the ordinary and the drafted ones among these rows."""
    if depth is None:
        yield rows, False
        return
    plain = (depth if rows is None else depth[rows]) == 0
    every = np.arange(len(depth)) if rows is None else rows
    for which, drafted in ((~plain, True), (plain, False)):
        if which.all():
            yield rows, drafted
        elif which.any():
            yield every[which], drafted


def some(work: Work, rows: np.ndarray) -> Work:
    return jax.tree.map(lambda x: x[rows], work)


def refusing(arrays: Arrays, piece: Piece) -> Arrays:
    """The rows that cannot be asked without any number, and those that stood idle as refused ones."""
    idle = np.zeros(len(piece), bool) if piece.refused is None else piece.refused
    without = idle.copy()
    without[list(piece.faults)] = True
    out = {}
    for name, x in arrays.items():
        x = x.copy()
        if name == STATUS:
            x[idle] = Status.INVALID_WORK
        else:
            x[without] = blank(name, 1)[0]
        out[name] = x
    return out
