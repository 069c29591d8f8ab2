"""From a grid to what is left of it: blocks of lines, folded on the device.

A line is a stretch of cells along one reduced axis; every other axis stands still on it.  A block is a fixed number of
lines of a fixed length, so that a few compiled functions serve every grid, and so that the order of every sum is a
property of the grid alone.  Any model answers a block cell by cell; the direct rule reads whole lines along the KV
totals (`lookup.outer`), or along those per request (`lookup.rays`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np

from fpmjax.estimate import IN_FLIGHT
from fpmjax.fold import FACTOR, KV_AXIS, PER_REQUEST, fold_cells, fold_rays, fold_rows
from fpmjax.grid import DECODE, DRAFT, MODEL, Grid
from fpmjax.lookup.outer import batch_classes, find_rows
from fpmjax.lookup.rays import Pieces, Turns, cut_rays, turns_of
from fpmjax.metrics import U32_MAX
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import is_published

CELLS = 2**18  # of a block that is answered cell by cell
LENGTHS = (8, 256)  # of its lines; two, so that few functions are compiled
BESIDE = 16  # cells that the joining of one line costs
KV, ROWS = 1024, 256  # length and number of lines that are read whole
PAYS = 3  # lines a class from which that is faster
AXIS = 2**15  # KV totals per request along which rays are cut at a time
PIECE = 128  # most of them that are read with the same knots at a time
BESIDE_PIECE = 40  # cells that the cutting and joining of a piece costs
RAY_CELLS = 3  # cells of pieces that cost what one costs on its own
GROUP = 2**20  # lines that are laid out at a time


class Block(NamedTuple):
    """Lines that are answered together; the device pads them to `lines`.

    kept: int64 [n], row of the result of each line.  where: offset on each line, int64 [n] -> position among the
    reduced cells.  ask: (state, limit, bins) -> what `leave` leaves.
    """

    device: int
    lines: int
    kept: np.ndarray
    where: Callable[[np.ndarray], np.ndarray]
    cells: int
    ask: Callable[..., Any]


class Axes:
    """A grid seen as kept x reduced."""

    def __init__(self, grid: Grid, keep: Sequence[str]):
        self.values = dict(zip(grid.names, grid.values, strict=True))
        self.keep = tuple(keep)
        self.reduced = tuple(name for name in grid.names if name not in keep)
        self.stride: dict[str, int] = {}
        for names in (self.keep, self.reduced):
            self.stride |= {name: self.cells(names[i + 1 :]) for i, name in enumerate(names)}

    def cells(self, names: Sequence[str]) -> int:
        return math.prod(len(self.values[name]) for name in names)

    def digits(self, names: Sequence[str], flat: np.ndarray) -> dict[str, np.ndarray]:
        """Where row-major positions over `names` stand on each axis, int64."""
        found = {}
        for name in reversed(names):
            flat, found[name] = np.divmod(flat, len(self.values[name]))
        return {name: found[name] for name in names}

    def place(self, digits: Mapping[str, Any], names: Sequence[str], size: int) -> np.ndarray:
        """Row-major positions over `names`, int64 [size]."""
        return sum((digits[name] * self.stride[name] for name in names), np.zeros(size, np.int64))


def fold_grid(
    models: Sequence[Any],
    grid: Grid,
    into: Any,
    rule: SpeculativeRule,
    tell: Callable[[int], None],
    limit_ms: float | None = None,
) -> None:
    """Every block of the grid into `into` (`Totals` or `Histogram`), a few in flight on every local device.

    tell: is told how many cells are on their way since the last time.
    """
    limit = np.float64(np.nan if limit_ms is None else limit_ms)
    devices = jax.local_devices()
    pending: deque[tuple[Block, Any]] = deque()
    for i, model in enumerate(models):
        for block in blocks(model, devices, into.axes, i, rule):
            pending.append((block, into.ask(block, limit)))
            while len(pending) > IN_FLIGHT * len(devices):
                into.add(*pending.popleft())
            tell(block.cells)
    while pending:
        into.add(*pending.popleft())


def blocks(model: Any, devices: Sequence[Any], axes: Axes, number: int, rule: SpeculativeRule) -> Iterator[Block]:
    """All cells of one model, which is number `number` on its axis, if there is one."""
    copies = [jax.device_put(model, device) for device in devices]
    whole, turns = reads_lines(model, axes), turns_on(model, axes)
    along = KV_AXIS if whole else PER_REQUEST if turns else longest(axes)
    others = tuple(name for name in (*axes.keep, *axes.reduced) if name not in (along, MODEL))
    values, cells = asked_values(axes, rule), axes.cells(others)
    for begin in range(0, cells, GROUP):
        digits = axes.digits(others, np.arange(begin, min(begin + GROUP, cells)))
        size = min(GROUP, cells - begin)
        at = {**digits, MODEL: np.int64(number), along: np.int64(0)}
        kept, base = axes.place(at, axes.keep, size), axes.place(at, axes.reduced, size)
        columns = {name: values[name][x] for name, x in digits.items()}
        if DRAFT in digits:
            columns[FACTOR] = values[FACTOR][digits[DRAFT]]
        lines = Lines(along, axes.stride.get(along, 0), kept, base, columns)
        if whole:
            yield from read_whole(copies, lines, values)
        elif turns:
            yield from read_rays(copies, lines, values, turns)
        else:
            yield from answer_cells(copies, lines, values, rule)


class Lines(NamedTuple):
    """Lines `along` an axis, whose neighbours are `stride` reduced cells apart; per line, [n]: row of the result,
    position of its first cell among the reduced ones, values of all other axes."""

    along: str
    stride: int
    kept: np.ndarray
    base: np.ndarray
    columns: dict[str, np.ndarray]


def answer_cells(copies: Sequence[Any], lines: Lines, values: dict[str, Any], rule: SpeculativeRule) -> Iterator[Block]:
    """Cell by cell.  Long lines are cut into pieces of equal length, which the rest of this takes for lines."""
    names = [name for name in (lines.along, FACTOR if lines.along == DRAFT else "") if name]
    n = len(values[lines.along]) if names else 1
    length = min(LENGTHS, key=lambda size: -(-n // size) * (size + BESIDE))
    width, pieces = CELLS // length, -(-n // length)
    plain = is_plain(copies[0], values)
    # A block lies [length, lines], so that lines are folded side by side; those of one block are pieces in turn.
    turns = 1 + -(-width // pieces)
    stretch = {x: np.tile(fill(values[x], pieces * length).reshape(pieces, length).T, turns) for x in names}
    for turn, start in enumerate(range(0, len(lines.kept) * pieces, width)):
        line, piece = np.divmod(np.arange(start, min(start + width, len(lines.kept) * pieces)), pieces)
        left = np.minimum(n - piece * length, length)
        first = start % pieces
        device = turn % len(copies)
        ask = partial(
            fold_cells,
            copies[device],
            columns={name: fill(x[line], width)[None] for name, x in lines.columns.items()},
            stretch={name: x[:, first : first + width] for name, x in stretch.items()},
            left=fill(left.astype(np.int32), width)[None],
            length=length,
            plain=plain,
            published=is_published(rule),
            ordinary=DRAFT in values and not values[DRAFT].all(),
        )
        where = partial(on_lines, lines.base[line] + piece * (length * lines.stride), lines.stride)
        yield Block(device, width, lines.kept[line], where, int(left.sum()), ask)


def read_whole(copies: Sequence[Any], lines: Lines, values: dict[str, Any]) -> Iterator[Block]:
    """Whole lines along the KV totals.  In order of the batch neighbours share a class, and it stays in the cache."""
    model, columns, kv = copies[0], lines.columns, values[KV_AXIS]
    classes = batch_classes(model.decode)
    batch = batches(model, columns)
    order = np.argsort(batch, kind="stable")
    batch, kept, base = batch[order], lines.kept[order], lines.base[order]
    factor = columns[FACTOR][order] if FACTOR in columns else None
    of = classes(batch)
    for turn, first in enumerate(range(0, len(kv), KV)):
        device, cells = turn % len(copies), min(KV, len(kv) - first)
        rows = find_rows(copies[device].decode, classes.offset, fill(kv[first : first + KV], KV), np.int32(cells))
        for start in range(0, len(batch), ROWS):
            here = slice(start, start + ROWS)
            ask = partial(
                fold_rows,
                rows,
                of=fill(of[here], ROWS, classes.of[-1]),  # the class of which every answer is refused
                batch=fill(batch[here], ROWS),
                factor=None if factor is None else fill(factor[here], ROWS),
            )
            where = partial(on_lines, base[here] + first * lines.stride, lines.stride)
            yield Block(device, ROWS, kept[here], where, len(kept[here]) * cells, ask)


def read_rays(copies: Sequence[Any], lines: Lines, values: dict[str, Any], turns: Turns) -> Iterator[Block]:
    """Lines along the KV totals per request, cut where other knots answer.  What is refused is not even asked."""
    columns, kv = lines.columns, values[PER_REQUEST]
    requests, batch = columns[DECODE], batches(copies[0], columns)
    of = batch_classes(copies[0].decode)(batch)
    width, number = CELLS // PIECE, count()
    together = max(1, GROUP // (int(np.diff(turns.first).max()) + AXIS // PIECE))
    for first in range(0, len(kv), AXIS):
        axis = kv[first : first + AXIS]
        held = [jax.device_put(fill(axis, AXIS + PIECE), x.decode.row.sharding) for x in copies]
        for begin in range(0, len(of), together):
            here = slice(begin, begin + together)
            pieces = cut_rays(turns, of[here], requests[here], axis, PIECE)
            refused = len(of[here]) * len(axis) - int(pieces.left.sum())
            for start in range(0, max(len(pieces.ray), 1), width):
                some = Pieces(*(x[start : start + width] for x in pieces))
                ray, device = begin + some.ray, next(number) % len(copies)
                ask = partial(
                    fold_rays,
                    copies[device].decode.knots,
                    kv=held[device],
                    lo=fill(turns.lo[some.turn], width),
                    hi=fill(turns.hi[some.turn], width),
                    batch=fill(batch[ray], width),
                    requests=fill(requests[ray], width),
                    start=fill(some.start.astype(np.int32), width),
                    left=fill(some.left.astype(np.int32), width),
                    factor=fill(columns[FACTOR][ray], width) if FACTOR in columns else None,
                    length=PIECE,
                )
                where = partial(on_lines, lines.base[ray] + (first + some.start) * lines.stride, lines.stride)
                yield Block(device, width, lines.kept[ray], where, int(some.left.sum()) + refused, ask)
                refused = 0


def batches(model: Any, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Decode rows of every line, uint32 [lines]; beyond 32 bits the largest number, which no table answers either."""
    width = columns[DRAFT].astype(np.int64) + 1 if DRAFT in columns else model.verify_width
    return np.minimum(columns[DECODE].astype(np.int64) * width, U32_MAX).astype(np.uint32)


def on_lines(base: np.ndarray, stride: int, offset: np.ndarray) -> np.ndarray:
    return base + offset * stride


def longest(axes: Axes) -> str:
    """The longest reduced axis that a model is asked along; a name of no axis where there is none.

    Draft lengths only where nothing else is reduced: every axis that takes turns as the longest is compiled anew.
    """
    names = [name for name in axes.reduced if name not in (MODEL, DRAFT)] or [x for x in axes.reduced if x == DRAFT]
    return max(names, key=lambda name: len(axes.values[name]), default="")


def decodes(model: Any, values: Mapping[str, np.ndarray], *kv: str) -> bool:
    """Whether every cell is decode of some requests by the direct rule, over one of these axes of KV totals."""
    if not hasattr(model, "walk_classes") or values.keys() - {DECODE, DRAFT, FACTOR, MODEL, *kv}:
        return False
    return any(name in values for name in kv) and bool(values[DECODE].min() > 0)  # none are idle, or invalid with KV


def is_plain(model: Any, values: Mapping[str, np.ndarray]) -> bool:
    """Whether every cell is decode of valid work by the direct rule, whatever the combination."""
    return decodes(model, values, KV_AXIS, PER_REQUEST) and values[DECODE].dtype == np.uint32


def reads_lines(model: Any, axes: Axes) -> bool:
    """Whether whole lines along the KV totals answer this grid, and faster than cell by cell."""
    if KV_AXIS not in axes.reduced or not decodes(model, axes.values, KV_AXIS):
        return False
    n, lines = len(axes.values[KV_AXIS]), axes.cells([x for x in axes.values if x not in (KV_AXIS, MODEL)])
    padded = -(-n // KV) * KV * -(-lines // ROWS) * ROWS
    return padded <= 2 * n * lines and lines >= PAYS * len(model.walk_classes.offset)


def turns_on(model: Any, axes: Axes) -> Turns | None:
    """Where lines along the KV totals per request can be cut; None where they cannot, or cell by cell is faster."""
    if PER_REQUEST not in axes.reduced or not decodes(model, axes.values, PER_REQUEST):
        return None
    kv, requests = axes.values[PER_REQUEST], axes.values[DECODE]
    if int(kv.max()) * int(requests.max()) > U32_MAX or (np.diff(kv) < 0).any():
        return None
    turns = turns_of(model.decode)
    half_empty = len(turns.begin) / (len(turns.first) - 1) / 2  # pieces of a line, one for every other turn
    cost = (len(kv) / PIECE + half_empty) * (PIECE + BESIDE_PIECE)
    return turns if cost <= RAY_CELLS * len(kv) else None


def asked_values(axes: Axes, rule: SpeculativeRule) -> dict[str, np.ndarray]:
    """The values of every axis as the device reads them, and with draft lengths their factor."""
    values: dict[str, Any] = {name: x.astype(np.uint32) for name, x in axes.values.items() if name != MODEL}
    for name, requests in ((PER_REQUEST, DECODE), ("tokens_per_request", "prefill_requests")):
        if name in values and int(values[name].max()) * int(values[requests].max()) > U32_MAX:
            for x in (name, requests):  # their product is to be seen above 32 bits, and refused
                values[x] = values[x].astype(np.int64)
    if DRAFT in values:
        values[FACTOR] = np.where(values[DRAFT] > 0, rule.factor(axes.values[DRAFT]), 1.0)
    return values


def fill(x: np.ndarray, size: int, value: Any = 0) -> np.ndarray:
    """`value` at the end, up to `size`."""
    return x if len(x) == size else np.pad(x, (0, size - len(x)), constant_values=value)
