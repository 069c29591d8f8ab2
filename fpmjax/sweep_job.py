"""One sweep before it runs: who is asked what, checked, and what its rows look like; and the answers of one piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from fpmjax.errors import refuse_option
from fpmjax.estimate import check_arguments, estimate
from fpmjax.grid import Grid
from fpmjax.guard import check_concrete, check_one_model, is_model
from fpmjax.query_source import GridQueries, Piece, Source, with_models
from fpmjax.query_table import TableQueries
from fpmjax.result_columns import PHASES, STATUS, Arrays, Layout, arrays_of, blank, gathered, ordinary
from fpmjax.result_files import FORMAT, VERSION
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.speculative import require_eligible
from fpmjax.status import Status
from fpmjax.work import Work

CHUNK = 1 << 18  # rows: the largest compiled size, and a row group that readers skip and spread well
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
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        refuse_option("chunk", f"chunk is {chunk!r}", "give a number of rows, from 1")
    names, asked, several = named(models, queries)
    nothing = Work.decode(0, 0)
    for model in asked:
        check_arguments(model, nothing, rule)
    if isinstance(queries, Grid):
        source: Source = GridQueries(queries if not several or queries.models else with_models(queries, asked))
    elif isinstance(queries, (str, os.PathLike, pa.Table)):
        source = TableQueries(queries)
    elif hasattr(queries, "__arrow_c_stream__"):
        source = TableQueries(pa.table(queries))
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


def named(models: Any, queries: Any) -> tuple[list[str], tuple[Any, ...], bool]:
    """(names, models, whether rows say which model they are of)."""
    own = queries.models if isinstance(queries, Grid) else None
    if own is not None:
        if models is not None:
            refuse_option(
                "models", "the grid has an axis of models, and models are given beside it", "give models=None"
            )
        return names_of(own), own, True
    if isinstance(models, Mapping):
        names, asked = [str(name) for name in models], tuple(models.values())
    elif isinstance(models, Sequence) and not isinstance(models, str) and not is_model(models):
        asked = tuple(models)
        names = []
    else:
        asked, names = (models,), []
    if not asked or not all(map(is_model, asked)):
        shown = type(models).__name__ if is_bare(models) else "no list of models"
        refuse_option("models", f"models is {shown}", "give fpmjax.direct(cell), a list of models, or {name: model}")
    for model in asked:
        check_one_model(model, "sweep")
        check_concrete(model, "sweep", "inside jit call model(work)")
    several = isinstance(models, Mapping) or len(asked) > 1
    return names or names_of(asked), asked, several


def is_bare(models: Any) -> bool:
    return not isinstance(models, (list, tuple, Mapping))


def names_of(models: Sequence[Any]) -> list[str]:
    """A name for each: what tells the cells apart, where that is enough, or the position."""
    cells = [getattr(model, "cell", None) for model in models]
    identities = [dict(cell.identity) for cell in cells if cell is not None]
    if len(identities) == len(cells):
        apart = [name for name in identities[0] if len({str(x[name]) for x in identities}) > 1]
        names = [" ".join(f"{name}={x[name]}" for name in apart) for x in identities]
        if len(set(names)) == len(names) and all(names):
            return names
    return [f"model {i}" for i in range(len(models))]


def given(model: Any, drafted: bool, evidence: bool) -> set[str]:
    """Names of the columns that this model fills, found by asking it for nothing."""
    idle = Work.decode(np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    draft = np.ones(1, np.int64) if drafted else None
    return set(arrays_of(estimate(model, idle, draft_length=draft, check=False, evidence=evidence)))


def about_of(models: Any, names: list[str], source: Source, layout: Layout, rule: Any) -> dict[str, Any]:
    """What a reader of the result has to know: its schema carries this, and so does the manifest of a folder."""
    from fpmjax import __version__

    rule = rule or PUBLISHED
    stated = {"slope": str(rule.slope), "intercept": str(rule.intercept), "provenance": rule.provenance}
    return {
        "result": {"format": FORMAT, "version": VERSION},
        "versions": {"fpmjax": __version__, "jax": jax.__version__},
        "models": [{"name": name, **about_model(model)} for name, model in zip(names, models, strict=True)],
        "rule": stated if source.drafted else None,
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
    return out if piece.refused is None else refusing(out, piece)


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
    """The rows that could not be asked, and stood idle, as refused ones."""
    out = {}
    for name, x in arrays.items():
        x = x.copy()
        x[piece.refused] = Status.INVALID_WORK if name == STATUS else blank(name, 1)[0]
        out[name] = x
    return out
