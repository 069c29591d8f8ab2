"""Measurements become a table artifact: the pair of Parquet file and sidecar, both or neither.

The pair is made and validated in memory by the loader's own checks, so nothing that the loader refuses ever
reaches the disk.  Both files are then written under temporary names in the target folder, synced, and renamed:
the Parquet file first, the sidecar with its digest last.  A reader in between, or after a crash, sees either no
sidecar or one whose digest does not match, and refuses; a failure that can be caught restores what was there.
Without `overwrite` a name is only ever taken where nothing has it, so that of several writers at once one succeeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fpmjax.errors import TableError
from fpmjax.tables.assemble import assemble
from fpmjax.tables.checks import every_fault
from fpmjax.tables.identity import DATABASE, Identity, shorten
from fpmjax.tables.load import DEFAULT_NAME, SIDECAR_SUFFIX, read_pair
from fpmjax.tables.policy import COORDINATE_SYSTEM, POLICIES, SCHEMA_NAME, SCHEMA_VERSIONS, SINGLE_SAMPLE, Policy
from fpmjax.tables.rows import TYPES, typed_rows
from fpmjax.tables.sidecar import Declared


def write_table(
    directory: str | os.PathLike[str],
    rows: Mapping[str, Any] | pa.Table,
    *,
    identity: Identity | Mapping[str, Any],
    policy: str = SINGLE_SAMPLE,
    schema_version: int = 7,
    sidecar: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a table artifact under its default name into `directory`, and return the path of its Parquet file.

    rows: columns by their names in the table, as arrays of n values (one value stands for all rows) or as an
    Arrow table.  At least `workload_kind`, `batch_size`, `total_prefill_tokens`, `total_kv_read_tokens` and
    `latency_ms`; columns of the identity where several cells share the table; what the policy demands of a row.
    identity: what is the same in all rows, as an `Identity` or a mapping of its fields.
    sidecar: more sidecar fields, for example `{"timing_boundary": "schedule_to_update"}`; those that follow
    from the rows cannot be contradicted.

    Raises `TableError` for everything that `load_cells` would refuse, `exists` for a pair that is already there
    and may not be overwritten, `unwritable` where the file system fails.  What it writes loads in the peer.
    """
    rule = _policy(policy, schema_version)
    table = assemble(rows, identity, rule, schema_version)
    if not table.num_rows:
        raise TableError("no rows to write\nhint: a table needs at least one measured iteration", code="empty")
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    parquet = buffer.getvalue().to_pybytes()
    seal = _sidecar(table, rule, schema_version, parquet, sidecar)
    parquet_path = Path(directory) / DEFAULT_NAME
    sidecar_path = parquet_path.with_suffix(SIDECAR_SUFFIX)
    read_pair(parquet, seal, "the rows to write", "the sidecar to write", dict.fromkeys(DATABASE))
    try:
        _commit(parquet_path, parquet, sidecar_path, seal, overwrite)
    except TableError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with NUL or with a lone surrogate
        shown, why = shorten(str(parquet_path))[1:-1], getattr(error, "strerror", None) or error
        raise TableError(f"cannot write {shown}: {why}\nhint: nothing was changed", code="unwritable") from error
    return parquet_path


def table_faults(
    rows: Mapping[str, Any] | pa.Table,
    *,
    identity: Identity | Mapping[str, Any],
    policy: str = SINGLE_SAMPLE,
    schema_version: int = 7,
) -> list[tuple[int, str, str]]:
    """Every bad row that `write_table` would refuse, as (row, code, message) in row order.

    `write_table` raises for the first of them; this is for a tool that reports them all.
    """
    rule = _policy(policy, schema_version)
    table = assemble(rows, identity, rule, schema_version)
    if not table.num_rows:
        return []
    known = [name for name in table.column_names if name in TYPES]
    columns = typed_rows(table.select(known), schema_version, "rows")
    database = {name: columns[name].at(0) for name in DATABASE}
    return every_fault(columns, Declared(schema_version, rule, database, None, "", table.num_rows))


def _policy(name: str, schema_version: int) -> Policy:
    if not isinstance(name, str) or name not in POLICIES:
        raise TableError(
            f"unsupported FPM measurement_policy={shorten(name)}\nhint: known policies: {', '.join(POLICIES)}",
            code="measurement_policy",
        )
    if type(schema_version) is not int or schema_version not in SCHEMA_VERSIONS:
        raise TableError(
            f"unsupported FPM schema_version={shorten(schema_version)}\nhint: write schema 7, or 6 for older readers",
            code="schema_version",
        )
    return POLICIES[name]


def _sidecar(
    table: pa.Table, policy: Policy, schema_version: int, parquet: bytes, extra: Mapping[str, Any] | None
) -> bytes:
    first = {name: table.column(name)[0].as_py() for name in DATABASE}
    fields = {
        "schema_name": SCHEMA_NAME,
        "schema_version": schema_version,
        "coordinate_system": COORDINATE_SYSTEM,
        "measurement_policy": policy.name,
        **dict(policy.sidecar),
        **first,
        "row_count": table.num_rows,
        "parquet_sha256": sha256(parquet).hexdigest(),
    }
    if not isinstance(extra, Mapping | None):
        raise TableError(
            f"sidecar is {shorten(extra)}\nhint: give a mapping of sidecar fields, such as timing_boundary",
            code="sidecar_json",
        )
    more = dict(extra or {})
    for name in fields.keys() & more.keys():
        if not isinstance(more[name], str | int | float) or more[name] != fields[name]:
            raise TableError(
                f"sidecar field {name}={shorten(more[name])} contradicts {fields[name]!r}, which follows from the rows"
                "\nhint: leave it out",
                code="sidecar_conflict",
            )
    try:  # what every reader needs stands first, the writer's own fields after it in the writer's order
        return json.dumps(fields | more | fields, indent=1, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise TableError(
            f"sidecar fields are not JSON: {error}\nhint: use text, numbers, lists and dicts", code="sidecar_json"
        ) from None


def _commit(parquet_path: Path, parquet: bytes, sidecar_path: Path, sidecar: bytes, overwrite: bool) -> None:
    folder = parquet_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for path in (parquet_path, sidecar_path):
        if path.exists() and not overwrite:
            raise _exists(path)
    token = uuid.uuid4().hex
    new_parquet, new_sidecar, old_parquet = (folder / f".fpm-{token}.{part}" for part in ("table", "seal", "old"))
    try:
        _write_synced(new_parquet, parquet)
        _write_synced(new_sidecar, sidecar)
        if overwrite and parquet_path.exists():
            _keep(parquet_path, old_parquet)
        publish = os.replace if overwrite else _publish_new
        publish(new_parquet, parquet_path)
        try:
            publish(new_sidecar, sidecar_path)
        except BaseException:
            if old_parquet.exists():
                os.replace(old_parquet, parquet_path)
            else:
                parquet_path.unlink()
            raise
        _sync_folder(folder)
    finally:
        for path in (new_parquet, new_sidecar, old_parquet):
            path.unlink(missing_ok=True)


def _exists(path: Path) -> TableError:
    return TableError(f"{path} exists already\nhint: pass overwrite=True to replace the pair", code="exists")


def _publish_new(new: Path, path: Path) -> None:
    """Give a file its name unless another writer, who may be racing, has given it to one: checked by the system."""
    try:
        try:
            os.link(new, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            _write_synced(path, new.read_bytes())
    except FileExistsError:
        raise _exists(path) from None


def _keep(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, copy)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _sync_folder(folder: Path) -> None:
    """Make the renames durable where the file system can; the pair is complete either way."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
