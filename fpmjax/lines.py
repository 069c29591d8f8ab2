"""From a grid to what is left of it: blocks of lines, folded on the device.

A line is a stretch of cells along one reduced axis; every other axis stands still on it.  A block is a fixed number of
lines of a fixed length, so that a few compiled functions serve every grid, and so that the order of every sum is a
property of the grid alone.  Any model answers a block cell by cell; the direct rule reads whole lines along the KV
totals (`lookup.outer`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fpmjax.estimate import IN_FLIGHT
from fpmjax.grid import DECODE, MODEL, Grid, work_of
from fpmjax.lookup.kernel import look_up_decode
from fpmjax.lookup.outer import batch_classes, find_rows, read_rows
from fpmjax.metrics import U32_MAX
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import for_draft, is_published, speculate

CELLS = 2**18  # of a block that is answered cell by cell
LENGTHS = (8, 256)  # of its lines; two, so that few functions are compiled
BESIDE = 16  # cells that the joining of one line costs
KV, ROWS = 1024, 256  # length and number of lines that are read whole
PAYS = 3  # lines a class from which that is faster
GROUP = 2**20  # lines that are laid out at a time
LANES = (8, 64)  # cells of a line that are folded side by side: where lines run down a block, and across it
STEPS = 8  # at least
ANSWERED = 2**16  # of a count that holds two: answered cells above this, those within the limit below
KV_AXIS, PER_REQUEST, DRAFT, FACTOR = "decode_kv", "kv_per_request", "draft_length", "factor"
MANTISSA = 7  # bits of it that a bin of a histogram keeps
SHIFT = 52 - MANTISSA
FLOOR = (1023 - 30) << MANTISSA  # first bin: everything below 2**-30 ms


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
    whole = reads_lines(model, axes)
    along = KV_AXIS if whole else longest(axes)
    others = tuple(name for name in (*axes.keep, *axes.reduced) if name not in (along, MODEL))
    values, count = asked_values(axes, rule), axes.cells(others)
    for begin in range(0, count, GROUP):
        digits = axes.digits(others, np.arange(begin, min(begin + GROUP, count)))
        size = min(GROUP, count - begin)
        at = {**digits, MODEL: np.int64(number), along: np.int64(0)}
        kept, base = axes.place(at, axes.keep, size), axes.place(at, axes.reduced, size)
        columns = {name: values[name][x] for name, x in digits.items()}
        if DRAFT in digits:
            columns[FACTOR] = values[FACTOR][digits[DRAFT]]
        lines = Lines(along, axes.stride.get(along, 0), kept, base, columns)
        yield from (read_whole(copies, lines, values) if whole else answer_cells(copies, lines, values, rule))


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
    width = columns[DRAFT].astype(np.int64) + 1 if DRAFT in columns else model.verify_width
    batch = columns[DECODE].astype(np.int64) * width
    order = np.argsort(batch, kind="stable")
    batch = np.minimum(batch[order], U32_MAX).astype(np.uint32)
    kept, base = lines.kept[order], lines.base[order]
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


def on_lines(base: np.ndarray, stride: int, offset: np.ndarray) -> np.ndarray:
    return base + offset * stride


def longest(axes: Axes) -> str:
    """The longest reduced axis that a model is asked along; a name of no axis where there is none."""
    return max((name for name in axes.reduced if name != MODEL), key=lambda n: len(axes.values[n]), default="")


def reads_lines(model: Any, axes: Axes) -> bool:
    """Whether whole lines along the KV totals answer this grid, and faster than cell by cell."""
    names = axes.values.keys()
    if not hasattr(model, "walk_classes") or KV_AXIS not in axes.reduced or names - {DECODE, KV_AXIS, DRAFT, MODEL}:
        return False
    n, lines = len(axes.values[KV_AXIS]), axes.cells([name for name in names if name not in (KV_AXIS, MODEL)])
    padded = -(-n // KV) * KV * -(-lines // ROWS) * ROWS
    worth = padded <= 2 * n * lines and lines >= PAYS * len(model.walk_classes.offset)
    return worth and bool(axes.values[DECODE].min() > 0)  # no requests are idle, or invalid with KV


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


@partial(jax.jit, static_argnames=("length", "plain", "published", "ordinary"), donate_argnames="state")
def fold_cells(
    model: Any,
    state: Any,
    limit: Any,
    bins: Any,
    *,
    columns: dict[str, Any],
    stretch: dict[str, Any],
    left: Any,
    length: int,
    plain: bool,
    published: bool,
    ordinary: bool,
) -> Any:
    """Cells [length, lines] of a grid.

    columns: values [1, lines] of the axes across the lines; stretch: those [length, lines] of the one along them.
    left: int32 [1, lines], how many cells are real on each line.
    """
    shape = (length, left.shape[1])
    columns = columns | stretch
    flat = answer_plainly(model, columns, shape) if plain else answer(model, columns, shape, published, ordinary)
    ms = flat.reshape(shape)
    real = lax.broadcasted_iota(jnp.int32, ms.shape, 0) < left
    return leave(jnp.where(real, ms, jnp.nan), 0, state, limit, bins)


def answer(model: Any, columns: dict[str, Any], shape: tuple[int, int], published: bool, ordinary: bool) -> Any:
    """Any model: milliseconds, flat, of columns of a grid that broadcast to the shape; NaN where refused.

    ordinary: whether a draft length may be 0, which is asked of the model as it is."""
    flat = {name: spread(x, shape) for name, x in columns.items()}
    factor = flat.pop(FACTOR, None)
    work, depth = work_of(flat)
    if depth is None:
        return model(work).latency_ms
    ms = speculate(jnp, for_draft(model), work, depth, factor, published).latency_ms
    return jnp.where(depth == 0, model(work).latency_ms, ms) if ordinary else ms


def answer_plainly(model: Any, columns: dict[str, Any], shape: tuple[int, int]) -> Any:
    """The direct rule where `is_plain` found that nothing else can happen."""
    requests, factor = columns[DECODE], columns.get(FACTOR)
    kv = columns[PER_REQUEST] * requests if PER_REQUEST in columns else columns[KV_AXIS]
    width = columns[DRAFT].astype(jnp.int64) + 1 if DRAFT in columns else model.verify_width
    batch = jnp.minimum(requests.astype(jnp.int64) * width, U32_MAX).astype(jnp.uint32)
    ms, _ = look_up_decode(model.decode, spread(batch, shape), spread(kv, shape))
    return ms if factor is None else spread(factor, shape) * ms


def spread(x: Any, shape: tuple[int, int]) -> Any:
    """Flat: a trailing axis costs XLA much of its speed."""
    return jnp.broadcast_to(x, shape).reshape(-1)


def is_plain(model: Any, values: Mapping[str, np.ndarray]) -> bool:
    """Whether every cell is decode of valid work by the direct rule, whatever the combination."""
    if not hasattr(model, "walk_classes") or values.keys() - {DECODE, KV_AXIS, PER_REQUEST, DRAFT, FACTOR}:
        return False
    kv = values.get(PER_REQUEST, values.get(KV_AXIS))
    return kv is not None and kv.dtype == np.uint32 and bool(values[DECODE].min() > 0)


@partial(jax.jit, donate_argnames="state")
def fold_rows(rows: Any, state: Any, limit: Any, bins: Any, *, of: Any, batch: Any, factor: Any) -> Any:
    """Lines of `batch` [lines] over the KV totals that `rows` was found for."""
    ms = read_rows(rows, of, batch)
    return leave(ms if factor is None else factor[:, None] * ms, 1, state, limit, bins)


def leave(ms: Any, axis: int, state: Any, limit: Any, bins: Any) -> Any:
    """What every line of a block leaves, of which `axis` runs along the lines.

    Without `bins` (minimum, its first offset, maximum, sum, how many are answered, how many lie within the limit), all
    [lines].  With them (row [lines], first bin, bins a row) the histograms `state`, the block counted in.

    The loop folds lanes side by side, and makes XLA compute every latency once: fused reductions would do so each.
    """
    if bins is not None:
        row, first, width = bins
        code = jnp.maximum(lax.bitcast_convert_type(ms, jnp.int64) >> SHIFT, FLOOR) - first
        at = jnp.where(ms == ms, jnp.expand_dims(row, axis) * width + code, state.shape[0])
        return state.at[at.reshape(-1).astype(jnp.int32)].add(1, mode="drop")
    n = ms.shape[axis]
    lanes = min(LANES[axis], n // STEPS)
    one, other = jnp.int32(ANSWERED + 1), jnp.int32(ANSWERED)

    def step(i: Any, left: Any) -> Any:
        x = lax.dynamic_slice_in_dim(ms, i * lanes, lanes, axis)
        low, at, high, total, counts = left
        found, lower = x == x, x < low
        return (
            jnp.where(lower, x, low),
            jnp.where(lower, i.astype(jnp.int32), at),
            jnp.where(x > high, x, high),
            total + jnp.where(found, x, 0.0),
            counts + jnp.where(found, jnp.where(x <= limit, one, other), jnp.int32(0)),
        )

    none, zero = (jnp.zeros_like(lax.slice_in_dim(ms, 0, lanes, axis=axis), t) for t in (ms.dtype, jnp.int32))
    left = lax.fori_loop(0, n // lanes, step, (none + jnp.inf, zero, none - jnp.inf, none, zero))
    low, at, high, total, counts = left if axis == 0 else (x.T for x in left)
    at = at * lanes + lax.broadcasted_iota(jnp.int32, at.shape, 0)
    while lanes > 1:
        lanes //= 2
        (a, b), (i, j) = ((x[:lanes], x[lanes:]) for x in (low, at))
        second = (b < a) | ((b == a) & (j < i))
        low, at = jnp.where(second, b, a), jnp.where(second, j, i)
        high = jnp.maximum(high[:lanes], high[lanes:])
        total, counts = (x[:lanes] + x[lanes:] for x in (total, counts))
    return low[0], at[0], high[0], total[0], counts[0] // ANSWERED, counts[0] % ANSWERED
