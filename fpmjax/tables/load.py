"""A table artifact becomes cells: find the pair, validate it, choose what fake-KV rows become, group.

The order of the checks is the peer's, so that a table with several faults is refused for the same one: file,
sidecar, digest, columns, row count, rows, duplicates, collisions.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

import numpy as np

from fpmjax.errors import TableError
from fpmjax.tables.cell import Cell, Points
from fpmjax.tables.cells import Cells
from fpmjax.tables.checks import check_rows
from fpmjax.tables.columns import absent, group
from fpmjax.tables.heal import healed
from fpmjax.tables.identity import FIELDS, Identity, column
from fpmjax.tables.oddities import table_warnings
from fpmjax.tables.policy import FAKE_KV, FAKE_KV_CHOICES, REAL_KV
from fpmjax.tables.repeats import identity_columns
from fpmjax.tables.rows import COORDINATES, Rows, open_table, typed_rows
from fpmjax.tables.sidecar import Declared, check_row_count, check_sidecar, read_sidecar

DEFAULT_NAME = "fpm_forward_perf.parquet"
SIDECAR_SUFFIX = ".metadata.json"


def load_cells(
    path: str | os.PathLike[str],
    *,
    system: str | None = None,
    backend: str | None = None,
    backend_version: str | None = None,
    fake_kv: str = "drop",
) -> Cells:
    """The validated cells of a table artifact: a Parquet file with its sidecar beside it.

    path: the Parquet file, its `.metadata.json`, or a folder that holds the pair under its default name.
    system, backend, backend_version: what the table must have been measured on; each one that is not given is
    taken from the sidecar.
    fake_kv: what becomes of rows measured on fabricated KV: `"drop"` leaves them out (the direct rule), `"heal"`
    replaces decode latencies by the line through two real rows below, `"keep"` uses them as recorded.

    Raises `TableError` for the first fault, naming file, row (zero-based, of the Parquet file) and column.
    Nothing is remembered between calls.
    """
    parquet_path = _parquet_path(path)
    asked = {"system": system, "backend": backend, "backend_version": backend_version}
    for name, value in asked.items():
        if not isinstance(value, str | None):
            raise TypeError(f"{name} must be a string or None, not {type(value).__name__}")
    if fake_kv not in FAKE_KV_CHOICES:
        raise TableError(
            f"fake_kv={fake_kv!r} is not a way to treat fake-KV rows\nhint: choose {', '.join(FAKE_KV_CHOICES)}",
            code="fake_kv",
        )
    sidecar_path = parquet_path.with_suffix(SIDECAR_SUFFIX)
    if not os.path.isfile(parquet_path):
        if os.path.exists(parquet_path) and not os.path.isdir(parquet_path):
            raise TableError(
                f"{parquet_path} is not a regular file\n"
                "hint: a table is read from a Parquet file with its sidecar beside it, not from a pipe or a device",
                code="unreadable",
            )
        raise TableError(_nothing_at(parquet_path), code="not_collected")
    if not os.path.isfile(sidecar_path):
        raise TableError(
            f"FPM database is missing its metadata sidecar: {sidecar_path}\n"
            "hint: the Parquet file and its .metadata.json are one artifact; fetch both",
            code="sidecar_missing",
        )
    return read_pair(_read(parquet_path), _read(sidecar_path), str(parquet_path), str(sidecar_path), asked, fake_kv)


def read_pair(
    parquet: bytes,
    sidecar: bytes,
    label: str,
    sidecar_label: str,
    asked: dict[str, str | None],
    fake_kv: str = "drop",
) -> Cells:
    """As `load_cells`, from the bytes of the pair; the labels, usually the paths, name both in messages."""
    fields = read_sidecar(sidecar, sidecar_label)
    declared = check_sidecar(fields, parquet, sidecar_label, asked)
    table = open_table(parquet, declared.schema_version, declared.policy, label)
    check_row_count(declared, table.num_rows, label)
    rows = typed_rows(table, declared.schema_version, label)
    check_rows(rows, declared, label)
    cells = _cells(rows, declared, label, fake_kv)
    return Cells(
        {cell.identity: cell for cell in cells},
        policy=declared.policy.name,
        digest=declared.digest,
        path=label,
        sidecar=MappingProxyType(fields),
        warnings=tuple(table_warnings(cells, rows, declared, fake_kv)),
    )


def _cells(rows: Rows, declared: Declared, label: str, fake_kv: str) -> list[Cell]:
    groups, first = group([c.keys() for c in identity_columns(rows)])
    order = np.argsort(groups, kind="stable")  # rows of a cell side by side, still in file order
    members = np.split(order, np.cumsum(np.bincount(groups))[:-1])
    batch, tokens, kv = (rows[name].values for name in COORDINATES)
    latency, decode = rows["latency_ms"].values, rows["workload_kind"].equals("decode")
    seed = rows.get("kv_seed_regime") or absent("kv_seed_regime", len(latency))
    fake, real = seed.equals(FAKE_KV), seed.equals(REAL_KV)
    names = rows["cell_id"]

    def cell(start: int, mine: np.ndarray) -> Cell:
        is_decode, is_fake, value = decode[mine], fake[mine], latency[mine]
        used, replaced = np.ones(len(mine), bool), np.zeros(len(mine), bool)
        if fake_kv == "drop":
            used = ~is_fake
        elif fake_kv == "heal":
            value, replaced = healed(batch[mine], kv[mine], value, is_decode & is_fake, is_decode & real[mine])

        def points(phase: np.ndarray) -> Points:
            row = mine[phase & used]
            return Points.of(batch[row], tokens[row], kv[row], value[phase & used], row)

        return Cell(
            identity=_identity(rows, start),
            decode=points(is_decode),
            prefill=points(~is_decode),
            policy=declared.policy.name,
            cell_ids=tuple(dict.fromkeys(names.at(row) for row in mine)),
            fake_dropped=int((~used).sum()),
            fake_healed=int(replaced.sum()),
            fake_kept=int((is_fake & used & ~replaced).sum()),
            digest=declared.digest,
            path=label,
            schema_version=declared.schema_version,
        )

    return [cell(int(start), mine) for start, mine in zip(first, members, strict=True)]


def _identity(rows: Rows, row: int) -> Identity:
    named = {field: rows[column(field)] for field in FIELDS if column(field) in rows}
    return Identity(**{field: stated.at(row) for field, stated in named.items()})


def _parquet_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"path must be a string or a Path, not {type(path).__name__}")
    found = Path(text)
    if found.name.endswith(SIDECAR_SUFFIX):
        return found.with_name(found.name.removesuffix(SIDECAR_SUFFIX) + ".parquet")
    return found / DEFAULT_NAME if os.path.isdir(found) else found


def _nothing_at(path: Path) -> str:
    full = Path(os.path.abspath(path))
    folder = full.parent
    if not os.path.isdir(folder):
        hint = f"there is no folder {folder}"
    elif others := sorted(p.name for p in folder.glob("*.parquet")):
        hint = f"{folder} has {', '.join(others[:5])}: name the file where it is not called {DEFAULT_NAME}"
    else:
        hint = f"{folder} has no Parquet file; a table's default name is {DEFAULT_NAME}"
    return f"File does not exist at {full}. No fpm_forward data collected for this backend/version\nhint: {hint}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}\nhint: check its permissions"
        raise TableError(message, code="unreadable") from None
