"""What is asked: the product of the lists on the command line, or the iterations of a metrics file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.cli.arguments import MOST_VALUES, U32_MAX, UsageError
from fpmjax.cli.observed import in_flags
from fpmjax.errors import CoverageError, FpmError
from fpmjax.progress import Progress

if TYPE_CHECKING:
    from fpmjax.cli.traffic import Block
    from fpmjax.work import Work

LISTED = 1 << 20  # entries of padded request lists in one piece; a compiled chunk may pad them sixteenfold


@dataclass(frozen=True, eq=False)
class Asked:
    """n queries in the order in which they are shown.

    work: [n] and its ranks; depth: int64 [n], 0 for ordinary decoding, or None where no draft length is given;
    label: what names each query, or None where its own numbers do.
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


def at_depths(blocks: Iterable[Block], depths: Sequence[int] | None) -> Iterator[Asked]:
    """Every iteration at every draft length, iterations outermost, in pieces whose request lists stay small."""
    depth, seen = np.array(depths or (0,), np.int64), 0
    for block in blocks:
        seen += len(block.place)
        if depths and (queries := seen * len(depths)) > MOST_VALUES:
            raise UsageError(
                f"{seen:,} iterations at {len(depths):,} draft lengths make {queries:,} queries, more than the "
                f"{MOST_VALUES:,} that this command prints\nhint: `fpmjax.estimate` in Python takes any number of them"
            )
        lists, whole = block.work.lists, len(block.place) * len(depth)
        each = 1 if lists is None else max(1, math.prod(lists.extend.shape[1:]))
        step = max(1, LISTED // each)
        for begin in range(0, whole, step):
            at = np.arange(begin, min(begin + step, whole))
            row, column = np.divmod(at, len(depth))
            names = [str(block.place[i]) for i in row.tolist()]
            yield Asked(some(block.work, row), depth[column] if depths else None, names)


@dataclass(frozen=True, eq=False)
class Answered:
    """n queries, without their request lists, and what became of them.

    result: an estimate, [n] and the most ranks that any query has; reason: why the refused query that tells most has
    no answer, None where all have one.
    """

    asked: Asked
    result: Any
    reason: FpmError | None = None


def answered(model: Any, pieces: Iterable[Asked], *, rule: Any = None, evidence: bool = False) -> Answered:
    """The answers to all pieces as those to one; only one piece is held with its lists."""
    from fpmjax.status import Status

    done: list[Answered] = []
    reason: FpmError | None = None
    seen = 0
    with Progress("estimating", unit="queries") as bar:
        for asked in pieces:
            result = answers(model, asked, rule=rule, evidence=evidence)
            if (result.status > Status.IDLE).any() and not isinstance(reason, CoverageError):
                found = explain(model, asked, telling(result.status))
                reason = found if reason is None or isinstance(found, CoverageError) else reason
            done.append(Answered(replace(asked, work=replace(asked.work, lists=None)), result))
            seen += len(result.status)
            bar(seen)
    return joined(done, reason)


def joined(done: list[Answered], reason: FpmError | None) -> Answered:
    """Several answers as one; where another piece has more ranks, the missing ones are idle."""
    import jax

    if len(done) == 1:
        return replace(done[0], reason=reason)
    ranks = max(piece.asked.work.ranks for piece in done)
    work = concatenated([jax.tree.map(lambda x: padded(x, 0, ranks), piece.asked.work) for piece in done])
    depths = [piece.asked.depth for piece in done if piece.asked.depth is not None]
    depth = np.concatenate(depths) if depths else None
    label = [name for piece in done for name in piece.asked.label or ()]
    result = concatenated([with_idle_ranks(piece.result, ranks) for piece in done])
    return Answered(Asked(work, depth, label), result, reason)


def concatenated(trees: list[Any]) -> Any:
    import jax

    return jax.tree.map(lambda *x: np.concatenate(x), *trees)


def padded(x: Any, fill: float, ranks: int) -> np.ndarray:
    """An array [n, r] as [n, ranks]."""
    x = np.asarray(x)
    return np.pad(x, [(0, 0), (0, ranks - x.shape[1])], constant_values=np.asarray(fill, x.dtype))


def with_idle_ranks(result: Any, ranks: int) -> Any:
    """An estimate whose parts have so many ranks, the new ones without work."""
    import jax

    from fpmjax.answer import Evidence, Parts

    stp: Any = getattr(result, "stp", result)
    if stp.parts is None:
        return result
    nothing: Any = Evidence(-1, (-1,) * 4, (0.0,) * 4)
    idle = Parts(math.nan, math.nan, math.nan, nothing, nothing, nothing)
    wide = replace(stp, parts=jax.tree.map(lambda x, fill: padded(x, fill, ranks), stp.parts, idle))
    return wide if stp is result else replace(result, stp=wide)


def answers(model: Any, asked: Asked, *, rule: Any = None, evidence: bool) -> Any:
    """`estimate` of every query, refusals included; with depths a SpeculativeEstimate.

    A depth of 0, which the Python API has no use for, is the ordinary pass under a factor of 1.
    """
    from fpmjax.answer import SpeculativeEstimate
    from fpmjax.estimate import estimate

    depth = asked.depth
    if depth is None:
        return estimate(model, asked.work, check=False, evidence=evidence)
    plain, found = depth == 0, {}
    if not plain.all():
        work = some(asked.work, ~plain)
        found[False] = estimate(model, work, draft_length=depth[~plain], rule=rule, check=False, evidence=evidence)
    if plain.any():
        ordinary: Any = estimate(model, some(asked.work, plain), check=False, evidence=evidence)
        zero = np.zeros(ordinary.status.shape, np.int64)
        found[True] = SpeculativeEstimate(ordinary.latency_ms, zero, zero + 1.0, zero > 0, ordinary)
    return found.popitem()[1] if len(found) == 1 else interleaved(plain, found[True], found[False])


def some(tree: Any, which: Any) -> Any:
    """These queries of every array."""
    import jax

    return jax.tree.map(lambda x: np.asarray(x)[which], tree)


def interleaved(which: np.ndarray, yes: Any, no: Any) -> Any:
    """Two trees of arrays as one: queries of `yes` where `which` says so, of `no` elsewhere."""
    import jax

    def put(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        out = np.empty((len(which), *x.shape[1:]), x.dtype)
        out[which], out[~which] = x, y
        return out

    return jax.tree.map(put, yes, no)


def explain(model: Any, asked: Asked, query: int) -> FpmError:
    """The error of one refused query, with what is measured nearby."""
    from fpmjax.estimate import estimate

    depth = 0 if asked.depth is None else int(asked.depth[query])
    try:
        with in_flags():
            estimate(model, some(asked.work, query), draft_length=depth or None)
    except FpmError as error:
        return error
    raise AssertionError(f"query {query} was refused in bulk and is answered alone")


def telling(status: np.ndarray) -> int:
    """The refusal that is explained: the first one of coverage, else the first; it also decides the exit code."""
    from fpmjax.errors import CoverageError
    from fpmjax.status import Status

    uncovered = [kind for kind in Status if issubclass(kind.error, CoverageError)]
    about = np.isin(status, uncovered)
    return int(np.argmax(about if about.any() else status > Status.IDLE))


def refusals(status: np.ndarray) -> dict[str, int]:
    """Reason -> how many queries, in the order of `Status`."""
    from fpmjax.status import Status

    kinds, sizes = np.unique(status[status > Status.IDLE], return_counts=True)
    return {Status(k).code: n for k, n in zip(kinds.tolist(), sizes.tolist(), strict=True)}
