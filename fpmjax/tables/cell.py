"""A cell: the measured points of one exact deployment, and what can be said about its coverage.

Everything here is NumPy on the host; `fpmjax.models` compiles a cell into a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fpmjax.errors import CoverageError, MetricsError
from fpmjax.tables.identity import Identity, shorten
from fpmjax.tables.policy import POLICIES, SINGLE_SAMPLE, SPECULATIVE_ROUND

ROLES: dict[str, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "aggregated": ("prefill", "decode"),
}
"""Worker role -> the phases that it runs."""

FLAT_DEVIATION = 0.05  # median relative deviation up to which prefill does not depend on its batch (peer)
FLAT_SAMPLES = 3  # deviations needed before that is said at all (peer)

Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Points:
    """n measured iterations of one phase, sorted by (batch, tokens, kv), all on iteration totals.

    batch   int64 [n]    requests in the iteration
    tokens  int64 [n]    prefill tokens computed; 0 for decode
    kv      int64 [n]    KV tokens read: past KV of decode, cached prefix of prefill
    latency_ms  float64 [n]  milliseconds of the whole iteration
    row     int32 [n]    zero-based row of the Parquet file
    """

    batch: np.ndarray
    tokens: np.ndarray
    kv: np.ndarray
    latency_ms: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, batch: Any, tokens: Any, kv: Any, latency_ms: Any, row: Any = None) -> Points:
        """Sorted, read-only points; the arguments broadcast, `row` defaults to the position."""
        coordinates = np.broadcast_arrays(*(np.asarray(a, np.int64) for a in (batch, tokens, kv)))
        shape = coordinates[0].shape
        latency = np.broadcast_to(np.asarray(latency_ms, np.float64), shape)
        number = np.arange(latency.size, dtype=np.int32) if row is None else np.asarray(row, np.int32)
        order = np.lexsort(coordinates[::-1])
        arrays = [np.ascontiguousarray(a[order]) for a in (*coordinates, latency, number)]
        for array in arrays:
            array.flags.writeable = False
        return cls(*arrays)

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True, eq=False)
class Cell:
    """The measured points of one deployment, with what was done to its fake-KV rows and where it comes from."""

    identity: Identity
    decode: Points
    prefill: Points
    policy: str = SINGLE_SAMPLE
    cell_ids: tuple[str, ...] = ()
    """The producer's names for these rows, in file order."""
    fake_dropped: int = 0
    fake_healed: int = 0
    fake_kept: int = 0
    digest: str = ""
    """SHA-256 of the Parquet file, lower-case hex."""
    path: str = ""
    schema_version: int = 7

    @property
    def execution(self) -> str:
        """What a row times: `"autoregressive"` or `"speculative_round"`."""
        return POLICIES[self.policy].execution

    @property
    def native_ar_only(self) -> bool:
        """Whether the rows are native CUDA timings of plain decoding, which answer no verification width."""
        return POLICIES[self.policy].full_text_only

    @cached_property
    def decode_batches(self) -> tuple[int, ...]:
        """Batch sizes with decode points, ascending."""
        return tuple(np.unique(self.decode.batch).tolist())

    @cached_property
    def capture_rungs(self) -> tuple[int, ...]:
        """Decode batches b such that b + 1 is measured too: where a captured graph size ends."""
        batches = set(self.decode_batches)
        return tuple(b for b in self.decode_batches if b + 1 in batches)

    @property
    def decode_kv_ceiling(self) -> int | None:
        """The largest KV total of any decode point, None without decode points; no promise for any one batch."""
        return int(self.decode.kv.max()) if len(self.decode) else None

    @property
    def prefill_domain(self) -> Bounds | None:
        """(min, max) of each prefill axis on its own: a box around the points, not what is covered."""
        points = self.prefill
        axes = {"batch_size": points.batch, "total_prefill_tokens": points.tokens, "total_kv_read_tokens": points.kv}
        return _bounds(axes)

    @property
    def decode_domain(self) -> Bounds | None:
        """(min, max) of each decode axis on its own: a box around the points, not what is covered."""
        return _bounds({"batch_size": self.decode.batch, "total_kv_read_tokens": self.decode.kv})

    @cached_property
    def decode_curve_bounds(self) -> dict[int, tuple[int, int]]:
        """Decode batch -> (smallest, largest) KV total measured at it."""
        first = np.searchsorted(self.decode.batch, self.decode_batches, side="left")
        last = np.searchsorted(self.decode.batch, self.decode_batches, side="right") - 1
        ends = zip(self.decode.kv[first].tolist(), self.decode.kv[last].tolist(), strict=True)
        return dict(zip(self.decode_batches, ends, strict=True))

    @cached_property
    def prefill_batch_clamp_max(self) -> int | None:
        """The largest prefill batch where prefill was found not to depend on the batch, else None.

        Neighbouring batches are compared at equal KV: each point of the larger one with the line through the
        smaller one's points around it.  Flat means at least three comparisons with a median relative
        deviation of at most 5 %.
        """
        points = self.prefill
        curves: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        for batch in np.unique(points.batch).tolist():
            at_batch = points.batch == batch
            curves[batch] = {}
            for kv in np.unique(points.kv[at_batch]).tolist():
                curve = at_batch & (points.kv == kv)
                curves[batch][kv] = points.tokens[curve], points.latency_ms[curve]
        batches = list(curves)
        deviations = [
            deviation
            for low, high in pairwise(batches)
            for kv in curves[low].keys() & curves[high].keys()
            for deviation in _deviations(*curves[low][kv], *curves[high][kv])
        ]
        flat = len(deviations) >= FLAT_SAMPLES and np.median(deviations) <= FLAT_DEVIATION
        return batches[-1] if flat else None

    def check_ready(self, role: str, *, verify_width: int = 1) -> None:
        """Return where a worker of this role can be asked at all; raise the reason where it cannot.

        role: `"prefill"`, `"decode"` or `"aggregated"` (both phases must hold points).
        verify_width: tokens that one request verifies in one pass, at least 1.
        Raises `CoverageError` (`no_rows`, `native_ar_only`, `measured_round`), and `MetricsError` (`role`,
        `verify_width`) for arguments that mean nothing.
        """
        if not isinstance(role, str) or role not in ROLES:
            raise MetricsError(
                f"unknown role {shorten(role)}\nhint: a worker's role is one of {', '.join(ROLES)}", code="role"
            )
        check_width(verify_width, self.execution, self.native_ar_only)
        for phase in ROLES[role]:
            if not len(self.prefill if phase == "prefill" else self.decode):
                dropped = f"; {self.fake_dropped} fake-KV rows were left out" if self.fake_dropped else ""
                raise CoverageError(
                    f"direct FPM {phase} interpolation has no genuine measurements for {self.identity}{dropped}\n"
                    f"hint: a worker of role {role} needs measured {' and '.join(ROLES[role])} rows",
                    code="no_rows",
                )

    def __repr__(self) -> str:
        return f"<Cell {self.identity}: {len(self.decode)} decode and {len(self.prefill)} prefill points>"


def check_width(verify_width: int, execution: str, native_ar_only: bool) -> None:
    """Raise where measurements of this kind do not answer a verification of this many tokens per request.

    `MetricsError` (`verify_width`) for anything but a positive integer, `CoverageError` (`native_ar_only`,
    `measured_round`) for a width above 1 that the rows say nothing about.
    """
    integer = isinstance(verify_width, (int, np.integer)) and not isinstance(verify_width, bool)
    if not integer or verify_width < 1:
        raise MetricsError(
            f"verify_width={shorten(verify_width)} is not a positive integer\n"
            "hint: it counts the tokens that each request verifies in one pass",
            code="verify_width",
        )
    if verify_width > 1 and native_ar_only:
        raise CoverageError(
            f"verify_width={shorten(verify_width)} is refused: the rows are native CUDA timings of autoregressive "
            "steps, which say nothing about verifying several tokens at once\n"
            "hint: use speculative-round measurements (policy vllm_native_fpm_model_step_cuda_v1); a draft length "
            "is an ordinary query and is answered here",
            code="native_ar_only",
        )
    if verify_width > 1 and execution == SPECULATIVE_ROUND:
        raise CoverageError(
            f"verify_width={shorten(verify_width)} is refused: each row is a whole speculative round, verification "
            "included\n"
            "hint: ask for the logical batch, with verify_width=1",
            code="measured_round",
        )


def _bounds(axes: dict[str, np.ndarray]) -> Bounds | None:
    if not len(axes["batch_size"]):
        return None
    return {name: (int(axis.min()), int(axis.max())) for name, axis in axes.items()}


def _deviations(x: np.ndarray, y: np.ndarray, tokens: np.ndarray, latency: np.ndarray) -> list[float]:
    inside = (tokens >= x[0]) & (tokens <= x[-1])
    tokens, latency = tokens[inside], latency[inside]
    low = np.clip(np.searchsorted(x, tokens, side="right") - 1, 0, len(x) - 1)
    high = np.minimum(low + 1, len(x) - 1)
    weight = (tokens - x[low]) / np.maximum(x[high] - x[low], 1)
    return np.abs(latency / (y[low] + (y[high] - y[low]) * weight) - 1.0).tolist()
