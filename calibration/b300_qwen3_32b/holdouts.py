"""The direct rule on measured lattices: what it answers for points that were taken away."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibration.common import read_rows
from fpmjax import Hardware, Observations, Work, direct, embedded_table, load_cells
from fpmjax.status import Status
from fpmjax.tables.cell import Cell, Points
from fpmjax.tables.identity import Identity

DATA = Path(__file__).parent / "data"
LIVE = (1, 4)  # tensor parallel sizes with live runs
COMPOSED = "RTX 4090"  # the lattice of another machine and model, composed from measured kernels
CONTEXTS, BATCHES, DEPTHS = (1024, 4096), (1, 4, 8), (1, 2, 3, 4)  # of the published depth study


class Lattice(NamedTuple):
    """Every measured decode point of one deployment, and what its datasheet says of one rank."""

    name: str
    points: Points
    hardware: Hardware

    @property
    def seen(self) -> Observations:
        return Observations.of(Work.decode(self.points.batch, self.points.kv), self.points.latency_ms)


@cache
def lattices() -> tuple[Lattice, ...]:
    """The measured lattices on B300.  None of them is composed."""
    b300 = read_rows(DATA / "b300_vllm0201_grid_decode_qwen3_32b.csv.gz")
    return tuple(
        Lattice(f"B300 TP{n}", points_of([r for r in b300 if r["tp"] == f"{n}"]), qwen3_32b(n)) for n in (1, 2, 4)
    )


@cache
def composed() -> Lattice:
    """The lattice of another machine and model, whose steps are sums of measured kernels and were never timed."""
    rows = read_rows(DATA / "llmservingsim_rtx4090_llama31_8b_decode.csv.gz")
    return Lattice(COMPOSED, points_of(rows), Hardware(16.1e9, 16.1e9, 131_072, 1.008e12, 1.65e14))


def qwen3_32b(tp: int) -> Hardware:
    """One of `tp` ranks of Qwen3-32B on B300: weights of 65.5 GB, read and multiplied once a token."""
    return Hardware(65.5e9 / tp, 65.5e9 / tp, 262_144 / tp, 8e12, 2.25e15)


def points_of(rows: list[dict[str, str]]) -> Points:
    batch, kv = ([int(row[name]) for row in rows] for name in ("batch_size", "total_kv_read_tokens"))
    return Points.of(batch, 0, kv, [float(row["latency_ms"]) for row in rows])


def ask(points: Points, batch: Any, kv: Any) -> np.ndarray:
    """Milliseconds of decode that the direct rule answers from these points alone, float64 [n]; NaN where refused."""
    told = direct(Cell(any_identity(), points, Points.of([], 0, [], []))).on_host(Work.decode(batch, kv))
    return np.where(np.asarray(told.status) == Status.OK, told.latency_ms, np.nan)


@cache
def any_identity() -> Identity:
    """Of any deployment: the direct rule does not look at it."""
    return next(iter(load_cells(embedded_table())))


def part(points: Points, which: np.ndarray) -> Points:
    return Points.of(points.batch[which], 0, points.kv[which], points.latency_ms[which])


def without_a_rung(points: Points) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, what is answered for them) with all points of one batch taken away; each batch but the outer two."""
    for batch in np.unique(points.batch)[1:-1]:
        own = points.batch == batch
        yield np.flatnonzero(own), ask(part(points, ~own), points.batch[own], points.kv[own])


def without_a_point(points: Points) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same with one point of a batch taken away, never its first or last.

    A measured batch is answered from its own points alone, so one point of every batch goes at a time.
    """
    position = np.arange(len(points)) - np.searchsorted(points.batch, points.batch)
    count = np.bincount(points.batch)[points.batch]
    for i in range(1, int(count.max()) - 1):
        own = (position == i) & (position < count - 1)
        yield np.flatnonzero(own), ask(part(points, ~own), points.batch[own], points.kv[own])


def held_out(points: Points, way: Any) -> tuple[np.ndarray, np.ndarray]:
    """(rows that were asked, answers), all of one way to take points away."""
    rows, answers = zip(*way(points), strict=True)
    return np.concatenate(rows), np.concatenate(answers)


def decreasing_steps(points: Points) -> int:
    """Neighbours of one batch of which the one with more KV is faster."""
    same = np.diff(points.batch) == 0
    return int((same & (np.diff(points.latency_ms) < 0)).sum())


def widened() -> tuple[np.ndarray, np.ndarray]:
    """int64 [24]: batches and KV totals that the published study's design asks an ordinary model for."""
    design = [((d + 1) * b, b * context) for b in BATCHES for d in DEPTHS for context in CONTEXTS]
    batch, kv = np.array(design).T
    return batch, kv


@cache
def rounds(tp: int) -> tuple[Observations, np.ndarray, np.ndarray]:
    """(the rounds of a live run in order, the kind of work of each, the segment of the run)."""
    path = DATA / f"b300_vllm0201_fpm_rounds_qwen3_32b_tp{tp}.csv.gz"
    seen = Observations.read(path)
    prefill, decode = (np.asarray(getattr(seen.work, n))[:, 0] > 0 for n in ("prefill_tokens", "decode_requests"))
    segment = np.array([row["segment"] for row in read_rows(path)])
    return seen, np.where(prefill, np.where(decode, "mixed", "prefill"), "decode"), segment


def live_points(tp: int) -> Points:
    """Pure decode of a live run as a table would hold it: the median of equal batch and KV."""
    seen, kind, _ = rounds(tp)
    own = seen.where(kind == "decode")
    at = np.stack([np.asarray(own.work.decode_requests)[:, 0], np.asarray(own.work.decode_kv)[:, 0]]).astype(np.int64)
    places, which = np.unique(at, axis=1, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(np.asarray(own.wall_ms)[order], np.cumsum(np.bincount(which.ravel()))[:-1])
    return Points.of(places[0], 0, places[1], [float(np.median(group)) for group in groups])


def two_clocks(tp: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(batch, lattice's answer, live median) of the cells of a live run; NaN where the lattice does not reach."""
    rows = read_rows(DATA / "b300_vllm0201_fpm_decode_cells_qwen3_32b.csv")
    live = points_of([row for row in rows if row["tp"] == f"{tp}"])
    (lattice,) = (x for x in lattices() if x.name == f"B300 TP{tp}")
    return live.batch, ask(lattice.points, live.batch, live.kv), live.latency_ms
