"""From a grid to what is left of it: blocks of lines on the device, folded there, joined on the host.

A line is a stretch of reduced cells of one kept combination.  A block is a fixed number of lines of a fixed length, so
that a few compiled functions serve every grid, and so that the order of every sum is a property of the grid alone.
Two kinds of blocks: strips, which any model answers, and rows over a thin axis of KV totals (`lookup.outer`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fpmjax.estimate import IN_FLIGHT
from fpmjax.grid import DECODE, MODEL, Grid, work_of
from fpmjax.lookup.outer import find_rows, read_rows
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import for_draft, speculate

BLOCK = 2**18  # cells of a block of strips
STRIPS = (8, 256)  # lengths of a strip; two, so that few functions are compiled
BESIDE = 16  # cells that the joining of one strip costs
KV, ROWS = 1024, 512  # a block of the thin kind
GROUP = 2**20  # thin rows that are laid out at a time
PAYS = 3  # rows a class from which the thin kind pays
KV_AXIS, DRAFT, FACTOR = "decode_kv", "draft_length", "factor"
MANTISSA = 7  # bits of it that a bin of a histogram keeps
SHIFT = 52 - MANTISSA
FLOOR = (1023 - 30) << MANTISSA  # first bin: everything below 2**-30 ms
TABLES = (2**12, 2**20, 2**28, 2**36)  # lengths that the values of an axis are padded to


class Block(NamedTuple):
    """Lines that are computed together; the device pads them to `lines`.

    kept: int64 [n], row of the result of each line.  where: offset on each line, int64 [n] -> position among the
    reduced cells.  ask: (state, limit, bins) -> what `leave` leaves.
    """

    device: int
    lines: int
    kept: np.ndarray
    where: Callable[[np.ndarray], np.ndarray]
    cells: int
    ask: Callable[..., Any]


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
    axes = Axes(grid, into.keep)
    for i, model in enumerate(models):
        copies = [jax.device_put(model, d) for d in devices]
        thin = thin_axis(model, axes)
        each = thin_blocks(model, copies, axes, i, rule) if thin else strip_blocks(copies, axes, i, rule)
        for block in each:
            pending.append((block, into.ask(block, limit)))
            while len(pending) > IN_FLIGHT * len(devices):
                into.add(*pending.popleft())
            tell(block.cells)
    while pending:
        into.add(*pending.popleft())


class Axes:
    """A grid seen as kept x reduced, without its models."""

    def __init__(self, grid: Grid, keep: Sequence[str]):
        self.values = dict(zip(grid.names, grid.values, strict=True))
        self.keep = tuple(keep)
        self.reduced = tuple(name for name in grid.names if name not in keep)
        self.stride = strides(self.values, self.keep) | strides(self.values, self.reduced)

    def cells(self, names: Sequence[str]) -> int:
        return math.prod(len(self.values[name]) for name in names)

    def digits(self, names: Sequence[str], flat: np.ndarray) -> dict[str, np.ndarray]:
        """Position on each axis of row-major positions over `names`."""
        found = {}
        for name in reversed(names):
            flat, found[name] = np.divmod(flat, len(self.values[name]))
        return found

    def place(self, digits: dict[str, np.ndarray], model: int, names: Sequence[str], size: int) -> np.ndarray:
        """Position among the cells over all of `names`, the model's included, int64 [size]."""
        at = np.zeros(size, np.int64)
        for name in names:
            at = at + (model if name == MODEL else digits[name]) * self.stride[name]
        return at


def strides(values: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, int]:
    out, stride = {}, 1
    for name in reversed(names):
        out[name] = stride
        stride *= len(values[name])
    return out


def without_model(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name != MODEL)


def asked_values(axes: Axes, rule: SpeculativeRule) -> dict[str, np.ndarray]:
    """The values of every axis as the device reads them, and with draft lengths their factor."""
    values = {name: x.astype(np.uint32) for name, x in axes.values.items() if name != MODEL}
    for name in ("kv_per_request", "tokens_per_request"):
        if name in values:  # their product with the requests may exceed 32 bits, and has to be seen to
            values[name] = values[name].astype(np.int64)
    if DRAFT in values:
        values[FACTOR] = rule.factor(axes.values[DRAFT])
    return values


# Strips


def strip_blocks(copies: Sequence[Any], axes: Axes, model: int, rule: SpeculativeRule) -> Iterator[Block]:
    """Strips of the reduced cells in row-major order, one kept combination after the other."""
    keep, reduced = without_model(axes.keep), without_model(axes.reduced)
    total = axes.cells(reduced)
    length = min(STRIPS, key=lambda s: -(-total // s) * (s + BESIDE))
    values = asked_values(axes, rule)
    companions = {DRAFT: (DRAFT, FACTOR)}
    tables = {n: padded(values[n]) for name in reduced for n in companions.get(name, (name,))}
    size = {name: np.int32(len(axes.values[name])) for name in reduced}
    per_row, lines = -(-total // length), BLOCK // length
    strips = per_row * axes.cells(keep)
    on_device = [jax.device_put(tables, device) for device in jax.local_devices()]
    published = rule.integers() == SpeculativeRule().integers()
    for number, start in enumerate(range(0, strips, lines)):
        row, strip = np.divmod(np.arange(start, min(start + lines, strips)), per_row)
        first = strip * length
        on_kept, on_reduced = axes.digits(keep, row), axes.digits(reduced, first)
        left = np.minimum(total - first, length)
        kept = {n: fill(values[n][x], lines) for name, x in on_kept.items() for n in companions.get(name, (name,))}
        digit = {name: fill(x.astype(np.int32), lines) for name, x in on_reduced.items()}

        def where(at: np.ndarray, first: np.ndarray = first) -> np.ndarray:
            return axes.place(axes.digits(reduced, first + at), model, axes.reduced, len(first))

        device = number % len(copies)
        ask = partial(
            fold_strips,
            copies[device],
            kept=kept,
            digit=digit,
            tables=on_device[device],
            size=size,
            left=fill(left.astype(np.int32), lines),
            reduced=reduced,
            length=length,
            published=published,
        )
        yield Block(device, lines, axes.place(on_kept, model, axes.keep, len(row)), where, int(left.sum()), ask)


def fill(x: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """`value` at the end, up to `size`."""
    return x if len(x) == size else np.pad(x, (0, size - len(x)), constant_values=value)


def padded(x: np.ndarray) -> np.ndarray:
    return fill(x, next(size for size in TABLES if size >= len(x)))


@partial(jax.jit, static_argnames=("reduced", "length", "published"), donate_argnames="state")
def fold_strips(
    model: Any,
    state: Any,
    limit: Any,
    bins: Any,
    *,
    kept: dict[str, Any],
    digit: dict[str, Any],
    tables: dict[str, Any],
    size: dict[str, Any],
    left: Any,
    reduced: tuple[str, ...],
    length: int,
    published: bool,
) -> Any:
    """A block of strips.

    kept: values [lines] of the kept axes; digit: int32 [lines], where each strip begins on every reduced axis;
    tables, size: the values of these; left: int32 [lines], cells of each strip.
    """
    shape = (*left.shape, length)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    columns = {name: jnp.broadcast_to(x[:, None], shape) for name, x in kept.items()}
    carry = lane
    for name in reversed(reduced):
        x = digit[name][:, None] + carry
        # Exact: x is below 2**31, and the half keeps the quotient away from the next integer.
        carry = ((x.astype(jnp.float64) + 0.5) * (1.0 / size[name].astype(jnp.float64))).astype(jnp.int32)
        here = jnp.clip(x - carry * size[name], 0, size[name] - 1)
        columns[name] = tables[name][here]
        if name == DRAFT:
            columns[FACTOR] = tables[FACTOR][here]
    columns = {name: x.reshape(-1) for name, x in columns.items()}
    factor = columns.pop(FACTOR, None)
    work, depth = work_of(columns)
    if depth is None:
        ms = model(work).latency_ms
    else:
        ms = speculate(jnp, for_draft(model), work, depth, factor, published).latency_ms
    ms = jnp.where(lane < left[:, None], ms.reshape(shape), jnp.nan)
    return leave(ms, state, limit, bins)


# Rows over a thin axis


def thin_axis(model: Any, axes: Axes) -> bool:
    """Whether rows over the KV totals answer this grid, and faster than strips do."""
    names = axes.values.keys()
    if not hasattr(model, "walk_classes") or KV_AXIS not in axes.reduced or names - {DECODE, KV_AXIS, DRAFT, MODEL}:
        return False
    kv, rows = len(axes.values[KV_AXIS]), axes.cells([n for n in names if n not in (KV_AXIS, MODEL)])
    worth = -(-kv // KV) * KV <= 2 * kv and rows >= PAYS * len(model.walk_classes.offset)
    return worth and bool(axes.values[DECODE].min() > 0)  # none requested with KV is invalid, and idle without


def thin_blocks(model: Any, copies: Sequence[Any], axes: Axes, at: int, rule: SpeculativeRule) -> Iterator[Block]:
    """Rows (kept and other reduced axes, in order of their batch) over blocks of KV totals."""
    others = tuple(n for n in (*axes.keep, *axes.reduced) if n not in (KV_AXIS, MODEL))
    values, classes = asked_values(axes, rule), model.walk_classes
    kv, stride = values[KV_AXIS], axes.stride[KV_AXIS]
    count = axes.cells(others)
    for begin in range(0, count, GROUP):
        digit = axes.digits(others, np.arange(begin, min(begin + GROUP, count)))
        width = axes.values[DRAFT][digit[DRAFT]] + 1 if DRAFT in digit else model.verify_width
        batch = np.minimum(axes.values[DECODE][digit[DECODE]] * width, 2**32 - 1)
        order = np.argsort(batch, kind="stable")  # neighbours then share a class, and its row stays in the cache
        digit, batch = {name: x[order] for name, x in digit.items()}, batch[order].astype(np.uint32)
        kept = axes.place(digit, at, axes.keep, len(batch))
        base = axes.place({**digit, KV_AXIS: np.int64(0)}, at, axes.reduced, len(batch))
        of, factor = classes(batch), values[FACTOR][digit[DRAFT]] if DRAFT in digit else None
        for number, k in enumerate(range(0, len(kv), KV)):
            device, columns = number % len(copies), min(KV, len(kv) - k)
            rows = find_rows(copies[device].decode, classes.offset, fill(kv[k : k + KV], KV), np.int32(columns))
            for r in range(0, len(batch), ROWS):
                here = slice(r, r + ROWS)

                def where(offset: np.ndarray, base: np.ndarray = base[here], k: int = k) -> np.ndarray:
                    return base + (k + offset) * stride

                ask = partial(
                    fold_rows,
                    rows,
                    of=fill(of[here], ROWS, classes.of[-1]),  # of which every answer is refused
                    batch=fill(batch[here], ROWS),
                    factor=None if factor is None else fill(factor[here], ROWS),
                )
                yield Block(device, ROWS, kept[here], where, len(kept[here]) * columns, ask)


@partial(jax.jit, donate_argnames="state")
def fold_rows(rows: Any, state: Any, limit: Any, bins: Any, *, of: Any, batch: Any, factor: Any) -> Any:
    """A block of rows, `batch` [lines] over the KV totals that `rows` was found for."""
    ms = read_rows(rows, of, batch)
    return leave(ms if factor is None else factor[:, None] * ms, state, limit, bins)


# What a block leaves


def leave(ms: Any, state: Any, limit: Any, bins: Any) -> Any:
    """Of float64 [lines, n]: what each line leaves; or, with a histogram, that with the block counted in."""
    if bins is not None:
        row, first, width = bins
        code = jnp.maximum(lax.bitcast_convert_type(ms, jnp.int64) >> SHIFT, FLOOR) - first
        at = jnp.where(ms == ms, row[:, None] * width + code, state.shape[0]).astype(jnp.int32)
        return state.at[at.reshape(-1)].add(1, mode="drop")
    found = ms == ms
    start = (jnp.float64(jnp.inf), jnp.int32(ms.shape[1]), jnp.float64(-jnp.inf), jnp.float64(0), *(jnp.int32(0),) * 2)
    operands = (
        jnp.where(found, ms, jnp.inf),
        lax.broadcasted_iota(jnp.int32, ms.shape, 1),
        jnp.where(found, ms, -jnp.inf),
        jnp.where(found, ms, 0.0),
        found.astype(jnp.int32),
        (ms <= limit).astype(jnp.int32),
    )

    def join(a: Any, b: Any) -> Any:
        earlier = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
        low, at = jnp.where(earlier, b[0], a[0]), jnp.where(earlier, b[1], a[1])
        return low, at, jnp.where(a[2] > b[2], a[2], b[2]), a[3] + b[3], a[4] + b[4], a[5] + b[5]

    return lax.reduce(operands, start, join, (1,))
