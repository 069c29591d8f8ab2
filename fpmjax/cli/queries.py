"""What is asked: the product of the lists on the command line, or the iterations of a metrics file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpmjax.cli.arguments import MOST_VALUES, U32_MAX, UsageError
from fpmjax.errors import FpmError

if TYPE_CHECKING:
    from fpmjax.work import Work


@dataclass(frozen=True, eq=False)
class Asked:
    """n queries in the order in which they are shown.

    work: [n] and its ranks; depth: int64 [n] or None for ordinary decoding; label: what names each query, or None
    where its own numbers do.
    """

    work: Work
    depth: np.ndarray | None
    label: list[str] | None = None


def product(args: argparse.Namespace) -> Asked:
    """Every combination of the lists, the first one outermost."""
    prefill = require_together(args, "prefill_requests", "prefill_tokens")
    if args.prefill_kv and not prefill:
        raise UsageError("--prefill-kv needs --prefill-requests and --prefill-tokens")
    decode = bool(args.batch)
    kv = args.kv or args.kv_per_request
    if decode and not kv:
        raise UsageError(
            "--batch needs --kv or --kv-per-request\nhint: --kv is the total over all requests; --kv 0 is none"
        )
    if kv and not decode:
        raise UsageError(f"--{'kv' if args.kv else 'kv-per-request'} needs --batch")
    if not (prefill or decode):
        raise UsageError(
            "nothing is asked\nhint: give --batch with --kv or --kv-per-request, --prefill-requests with "
            "--prefill-tokens, or --metrics"
        )
    absent = (0,)
    lists = [args.prefill_requests, args.prefill_tokens, args.prefill_kv, args.batch, kv]
    axes = [*(values or absent for values in lists), args.draft_length or absent]
    if (queries := math.prod(map(len, axes))) > MOST_VALUES:
        raise UsageError(
            f"the lists make {queries:,} queries, more than the {MOST_VALUES:,} that this command prints\n"
            "hint: `fpmjax.estimate` in Python streams through any number of them"
        )
    grids = [g.ravel() for g in np.meshgrid(*(np.array(a, np.uint64) for a in axes), indexing="ij")]
    requests, tokens, cached, batch, total, depth = grids
    if args.kv_per_request:
        total = total_kv(batch, total)
    from fpmjax.work import Work

    work = Work.of(
        prefill_requests=requests, prefill_tokens=tokens, prefill_kv=cached, decode_requests=batch, decode_kv=total
    )
    return Asked(work, depth.astype(np.int64) if args.draft_length else None)


def require_together(args: argparse.Namespace, *names: str) -> bool:
    """Whether all of these options are given; an error where only some are."""
    given = [bool(getattr(args, name)) for name in names]
    if any(given) and not all(given):
        flags = ["--" + name.replace("_", "-") for name in names]
        raise UsageError(f"{flags[given.index(True)]} needs {flags[given.index(False)]}")
    return all(given)


def total_kv(batch: np.ndarray, each: np.ndarray) -> np.ndarray:
    """batch * each, uint64 [n]; both factors are below 2**32, so the products are exact."""
    total = batch * each
    if (over := total > U32_MAX).any():
        i = int(over.argmax())
        raise UsageError(
            f"--batch {batch[i]} times --kv-per-request {each[i]} is {total[i]} KV tokens, more than {U32_MAX}\n"
            "hint: a total is counted in 32 bits"
        )
    return total


def with_depths(work: Work, labels: list[str], depths: Sequence[int] | None) -> Asked:
    """Every iteration at every draft length, iterations outermost."""
    if not depths:
        return Asked(work, None, labels)
    import jax

    if (queries := len(labels) * len(depths)) > MOST_VALUES:
        raise UsageError(f"{len(labels):,} iterations at {len(depths):,} draft lengths make {queries:,} queries")
    repeated = jax.tree.map(lambda x: np.repeat(x, len(depths), axis=0), work)
    return Asked(repeated, np.tile(np.array(depths, np.int64), len(labels)), [name for name in labels for _ in depths])


def explain(model, asked: Asked, query: int) -> FpmError:
    """The error of one refused query, with what is measured nearby."""
    import jax

    from fpmjax.estimate import estimate

    work = jax.tree.map(lambda x: x[query], asked.work)
    try:
        estimate(model, work, draft_length=None if asked.depth is None else int(asked.depth[query]))
    except FpmError as error:
        return error
    raise AssertionError(f"query {query} was refused in bulk and is answered alone")


def refusals(status: np.ndarray) -> dict[str, int]:
    """Reason -> how many queries, in the order of `Status`."""
    from fpmjax.status import Status

    kinds, sizes = np.unique(status[status > Status.IDLE], return_counts=True)
    return {Status(k).code: n for k, n in zip(kinds.tolist(), sizes.tolist(), strict=True)}
