"""MODEL on the command line: a saved model, or a table for its direct rule."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.cli.arguments import EMBEDDED, INSIDE, UsageError, add_table, open_cell, require_path
from fpmjax.cli.output import fake_kv_rows
from fpmjax.model_file import is_model_file

if TYPE_CHECKING:
    from fpmjax.tables.cell import Cell

HELP = "model that `fpmjax fit` wrote, or a table: Parquet file, folder that holds the pair, or `embedded`"


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and what a table needs beside its name."""
    add_table(parser, "MODEL", HELP)


def open_model(args: argparse.Namespace, *, verify_width: int = 1) -> Any:
    """The saved model, or the direct rule over the one cell that --select leaves."""
    if not is_model_file(args.table):
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
    """A saved model; a stack of them is none that can be asked one question."""
    from fpmjax.store import load_model

    model = load_model(name)
    parts = (model, getattr(model, "model", model))  # a correction and what it corrects
    if any(np.ndim(getattr(x, "min_observations", 0)) or np.ndim(getattr(x, "weights", ())) > 1 for x in parts):
        raise UsageError(
            f"{name} holds a stack of models\n"
            "hint: save the one that is meant, jax.tree.map(lambda x: x[i], stack) in Python"
        )
    return model


def manifest(name: str) -> tuple[str, str]:
    """(version of the package that wrote it, digest in hexadecimal) of a saved model."""
    from fpmjax.store import DIGEST, array_of, read_manifest, read_members

    members = read_members(name)
    return read_manifest(members, name)["package"], array_of(members[DIGEST]).tobytes().hex()


def cell_of(model: Any) -> Cell | None:
    """The measured cell behind a model."""
    return getattr(model, "cell", None)


def about(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What was asked, for JSON: the saved model, and the table behind it where there is one."""
    cell, head = cell_of(model), {}
    if is_model_file(args.table):
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


def in_words(model: Any) -> list[str]:
    """What a model is and what it holds, a line each: `kind`, then its stores."""
    kind = type(model).__name__
    if kind == "Regression":
        lines = [
            f"kind      {'spline' if model.learners.spline is not None else 'linear'} regression of {model.role} work"
            f"{refits_in_words(model)}",
            f"axes      {', '.join(model.feature_axes)}; retained over {', '.join(model.sampling_axes)}",
        ]
        return lines + [f"store     {store_in_words(store)}" for store in model.stores]
    if kind == "Corrected":
        factors = model.factors
        what = f"between {factors.min():.4f} and {factors.max():.4f}" if factors.size else "none yet"
        lines = [
            f"kind      correction, {model.policy or 'not enabled'}; {model.retained:,} observations retained",
            f"factors   {what}",
        ]
        return lines + [f"over      {' '.join(line.split()[1:])}" for line in in_words(model.model)]
    cell = cell_of(model)
    return [f"kind      direct rule over {'arrays' if cell is None else cell.identity}"]


def refits_in_words(model: Any) -> str:
    """What is unusual about its slopes and about when they are fitted."""
    rules = model.rules
    signed = "" if rules.non_negative else ", signed slopes"
    lazy = ", refitted where rows are missed" if rules.lazy else ""
    anew = f" or {int(rules.interval):,} changes made" if rules.interval else ""
    return signed + lazy + anew


def store_in_words(store: dict[str, Any]) -> str:
    ready = "ready" if store["ready"] else "not ready"
    knots = ", knots in use" if store.get("spline", {}).get("ready") else ""
    return f"{store['workload_kind']}: {ready}, {store['retained_observations']:,} observations retained{knots}"


def contents(model: Any) -> dict[str, Any]:
    """The same for JSON."""
    kind = type(model).__name__
    if kind == "Regression":
        return {
            "kind": kind,
            "role": model.role,
            "feature_axes": list(model.feature_axes),
            "sampling_axes": list(model.sampling_axes),
            "signed": not model.rules.non_negative,
            "lazy": bool(model.rules.lazy),
            "rebuild_interval": int(model.rules.interval) or None,
            "stores": [dict(store) for store in model.stores],
        }
    if kind == "Corrected":
        factors = model.factors
        return {
            "kind": kind,
            "policy": model.policy,
            "retained_observations": model.retained,
            "ready_buckets": model.ready_buckets,
            "smallest_factor": float(factors.min()) if factors.size else None,
            "largest_factor": float(factors.max()) if factors.size else None,
            "over": contents(model.model),
        }
    cell = cell_of(model)
    named = {} if cell is None else {"table": cell.path, "digest": cell.digest, "cell": dict(cell.identity)}
    return {"kind": kind, "verify_width": model.verify_width} | named
