"""MODEL on the command line: a saved model, a learned artifact of the peer, or a table for its direct rule."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from fpmjax.cli.arguments import EMBEDDED, INSIDE, UsageError, add_table, is_artifact, is_saved, open_cell, require_path
from fpmjax.cli.describe import cell_of
from fpmjax.cli.output import fake_kv_rows

HELP = (
    "model that `fpmjax fit` wrote, learned artifact (JSON), or table: Parquet file, folder that holds the pair, or "
    f"`{EMBEDDED}`"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and what a table needs beside its name."""
    add_table(parser, "MODEL", HELP)


def open_model(args: argparse.Namespace, *, verify_width: int = 1) -> Any:
    """The saved model, or the direct rule over the one cell that --select leaves."""
    if not is_saved(args.table):
        if args.table != EMBEDDED:
            require_path(args.table, f"a file that `fpmjax fit` wrote, a table, or {INSIDE}")
        cell = open_cell(args)
        from fpmjax.models.direct import direct

        return direct(cell, verify_width=verify_width)
    for flag, given in (
        ("--select", args.select),
        ("--fake-kv", args.fake_kv),
        ("--verify-width", verify_width > 1),
    ):
        if given:
            raise UsageError(f"{flag} is about tables, but {args.table} is a saved model\nhint: leave {flag} out")
    return load(args.table)


def load(name: str) -> Any:
    """A saved model, or a learned artifact; a stack of models is none that can be asked one question."""
    from fpmjax.guard import is_stacked

    if is_artifact(name):
        from fpmjax.models.forest import load_forest

        return load_forest(Path(name))
    from fpmjax.store import load_model

    model = load_model(name)
    if is_stacked(model):
        raise UsageError(
            f"{name} holds a stack of models\n"
            "hint: save the one that is meant, jax.tree.map(lambda x: x[i], stack) in Python"
        )
    return model


def manifest(name: str) -> tuple[str | None, str]:
    """(version of the package that wrote it, None for an artifact; digest in hexadecimal) of a saved model."""
    if is_artifact(name):
        return None, hashlib.sha256(Path(name).read_bytes()).hexdigest()
    from fpmjax.store import DIGEST, array_of, read_manifest, read_members

    members = read_members(name)
    return read_manifest(members, name)["package"], array_of(members[DIGEST]).tobytes().hex()


def about(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What was asked, for JSON: the saved model, and the table behind it where there is one."""
    cell, head = cell_of(model), {}
    if is_saved(args.table):
        head = {"model": args.table, "kind": type(model).__name__}
    if cell is None:
        return head
    return head | {
        "table": cell.path,
        "digest": cell.digest,
        "policy": cell.policy,
        "cell": dict(cell.identity),
        "fake_kv_rows": fake_kv_rows(cell),
    }
