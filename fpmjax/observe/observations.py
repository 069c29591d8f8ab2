"""`Observations`: work that an engine did, and the wall time that each iteration took.

Whatever the source, the same rules decide what is kept: an iteration in which no rank computes anything (idle), or
whose wall time is not above zero or is no pass at all (`overflow`: 1e8 seconds and more, as a wall clock reads), is no
observation; it is left out and counted in `.report`.  What is malformed is refused instead, and then nothing of the
batch is kept; so is what request lists show to be speculative decoding (TraceError `speculative`), as a fit sees
ordinary decoding only.  The Rust estimator learns such iterations like any other; where there are totals only, nobody
can tell.  A long wall time is kept as recorded, be it a cold start: leaving those out is the caller's choice
(`skip_first` of `read_trace`, `where`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from fpmjax._jax import pytree
from fpmjax.errors import MetricsError, TraceError
from fpmjax.metrics import RankMetrics, as_float, parse_iteration, refuse, show
from fpmjax.metrics import read_json as decode_json
from fpmjax.observe.record import CLOCK_SECONDS, MIXED, UNSPECIFIED, names_clock
from fpmjax.observe.speculation import beyond_ordinary, computed_tokens, lists_beyond_ordinary
from fpmjax.work import COUNTS, VARIANCES, Array, RequestLists, Work
from fpmjax.work import _as_array as as_array
from fpmjax.work import _elements as elements
from fpmjax.work import _pack as pack
from fpmjax.work import _refuse_dtype as refuse_dtype
from fpmjax.work import _refuse_element as refuse_element
from fpmjax.work import _refuse_masked as refuse_masked

if TYPE_CHECKING:
    import pyarrow as pa

WALL = (
    "payload",
    "a wall time is a finite number of milliseconds",
    "leave out the iterations that were not measured",
)


@pytree("timing")
class Observations:
    """n iterations in the order in which they were seen, each with its wall time.

    work:    Work [n, r].
    wall_ms: float64 [n], largest wall time over the ranks.
    timing:  what the clock measures, as the source names it: "execute_model_cuda", "scheduler_wall_time", ...;
             "unspecified" where it does not, "mixed" where several were allowed.

    Made by `of`, `from_metrics`, `read`, `concat` and `fpmjax.read_trace`, every iteration is busy on some rank and
    every wall time is finite and above zero.
    """

    work: Work
    wall_ms: Array
    timing: str = UNSPECIFIED

    @staticmethod
    def of(work: Work, wall_ms: Any, *, timing: str = UNSPECIFIED) -> Observations:
        """Work of any batch shape n... and the milliseconds it took, of the same shape; flattened in C order.

        `.report` counts `accepted`, `idle`, `no_wall_time` (zero or less) and `overflow`.  Raises MetricsError
        `payload`: a wall time that is not a finite number, or another shape; TraceError `speculative`: a decode request
        computes several tokens, requests are listed with more tokens than the totals have, or the work was widened for
        a draft length.
        """
        if not isinstance(work, Work):
            refuse("payload", f"work is a {type(work).__name__}", "Work.of, .decode, .prefill or .from_iterations")
        refuse_traced(wall_ms, work)
        wall = _milliseconds(wall_ms)
        if wall.shape != work.shape:
            refuse(
                "payload",
                f"wall_ms has shape {wall.shape}, but the work has batch shape {work.shape}",
                "give one wall time per iteration, the largest over its ranks",
            )
        if work.refusal is not None:
            _refuse_speculation("the work was widened for a draft length")
        flat = jax.tree.map(lambda x: _flatten(np.asarray(x), wall.ndim), work)
        return _keep(flat, wall.ravel(), check_timing(timing))

    @staticmethod
    def from_metrics(iterations: Any, *, timing: str = UNSPECIFIED) -> Observations:
        """ForwardPassMetrics with their wall times (seconds on the wire), validated as a whole: all or nothing.

        A dict is one iteration of one rank; a list of dicts is one iteration, a dict per rank; a list of lists is
        many iterations; JSON text is any of these.  The wall time is the largest finite positive one over all ranks,
        idle ones included, times 1000.0.  `.report` counts `accepted`, `idle`, `no_wall_time` and `overflow`.

        Raises MetricsError as `Work.from_iterations` does, and TraceError `speculative`, also for an iteration that
        would be left out.
        """
        if isinstance(iterations, (str, bytes, bytearray)):
            iterations = decode_json(iterations)
        parsed = _parse_each(_nested(iterations))
        seconds = [max((rank.wall_time for rank in ranks if rank.wall_time > 0), default=0.0) for ranks in parsed]
        wall = np.array(seconds, np.float64)
        with np.errstate(over="ignore"):
            wall = wall * 1000.0
        return _keep(pack(parsed, (len(parsed),), max(map(len, parsed), default=1)), wall, check_timing(timing))

    @staticmethod
    def read(source: str | os.PathLike[str] | pa.Table, *, timing: str | None = None) -> Observations:
        """Observations from a Parquet, Arrow (`.arrow`) or CSV (`.csv`, `.csv.gz`) file, or from an Arrow table.

        Columns, with the names of `fpmjax.observe.columns`: `wall_ms` (or `latency_ms`) and the fields of `Work`,
        absent ones zero; or `phase`, `batch_size`, `total_prefill_tokens` and `total_kv_read_tokens`.  A column of
        lists holds one entry per rank, a plain one is a single rank; other columns are not read.

        timing: what the clock measures; by default what the file says, else "unspecified".

        Raises TraceError (`file`, `columns`, `values`, `speculative`) and MetricsError for work that no engine could
        have meant.
        """
        from fpmjax.observe.columns import label_of, read_columns

        work, wall_ms, found = read_columns(source)
        try:
            return Observations.of(work, wall_ms, timing=found if timing is None else timing)
        except (MetricsError, TraceError) as error:
            raise type(error)(f"{label_of(source)}: {error}", code=error.code) from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """To a Parquet file, or by its suffix to Arrow (`.arrow`) or CSV (`.csv`, `.csv.gz`; one rank, no lists).

        Replaces the file.  Reading it back gives the same bits, ranks, lists and timing; `.report` is not kept.
        """
        from fpmjax.observe.column_writer import write_columns

        refuse_traced(self)
        write_columns(path, self.work, self.wall_ms, check_timing(self.timing))

    @staticmethod
    def concat(parts: Iterable[Observations], *, mixed_timing: bool = False) -> Observations:
        """One after another; missing ranks are idle, the counts of the reports are added.

        Raises MetricsError `mixed_timing` where the clocks differ, unless `mixed_timing` allows it.
        """
        several = isinstance(parts, Iterable) and not isinstance(parts, Observations)
        parts = list(parts) if several else []
        if not several or not all(isinstance(part, Observations) for part in parts):
            refuse("payload", "what is concatenated are no observations", "pass a list of them, concat([a, b])")
        refuse_traced(parts)
        clocks = list(dict.fromkeys(part.timing for part in parts))
        if len(clocks) > 1 and not mixed_timing:
            refuse(
                "mixed_timing",
                f"observations of different clocks: {', '.join(map(show, clocks))}",
                "keep one clock per fit, or pass mixed_timing=True where they are known to agree",
            )
        timing = clocks[0] if len(clocks) == 1 else MIXED if clocks else UNSPECIFIED
        work = _concat_work([part.work for part in parts])
        wall = np.concatenate([np.zeros(0), *(np.asarray(part.wall_ms) for part in parts)])
        total: dict[str, Any] = {}
        for part in parts:
            for key, value in part.report.items():
                if type(value) is int:
                    total[key] = total.get(key, 0) + value
        return with_report(Observations(work, wall, timing), total)

    @property
    def report(self) -> Mapping[str, Any]:
        """How many iterations were accepted and left out, by reason; empty on slices and transformed copies."""
        return self.__dict__.get("_report", {})

    def where(self, mask: Any) -> Observations:
        """The iterations for which `mask`, bool [n], is true."""
        refuse_traced(mask, self)
        try:
            mask = np.asarray(mask)
        except (ValueError, TypeError):  # ragged, or observations
            mask = np.empty((), object)
        if mask.dtype != np.bool_ or mask.shape != (len(self),):
            refuse(
                "payload",
                f"the mask is {mask.dtype} of shape {mask.shape}, but it has to be bool of shape ({len(self)},)",
                "compare columns of the observations, such as obs.wall_ms < 100.0",
            )
        return jax.tree.map(lambda x: np.asarray(x)[mask], self)

    def __getitem__(self, key: slice) -> Observations:
        """A slice of the iterations; the arrays are views."""
        if not isinstance(key, slice):
            raise TypeError("observations are sliced, obs[a:b]; for a mask use obs.where(mask)")
        return jax.tree.map(lambda x: x[key], self)

    def __len__(self) -> int:
        return int(np.shape(self.wall_ms)[0])

    def __repr__(self) -> str:
        return f"Observations({np.shape(self.wall_ms)[-1]} iterations, {self.work.ranks} ranks, timing={self.timing!r})"


def with_report(observations: Observations, report: Mapping[str, Any]) -> Observations:
    """The same observations, carrying this report.

    It rides outside the fields: as a leaf it would be traced, as metadata every other report would recompile.
    """
    object.__setattr__(observations, "_report", dict(report))
    return observations


def is_busy(work: Work) -> np.ndarray:
    """bool [n...]: some rank computes tokens or decodes; a fully cached prefill computes nothing."""
    busy = np.zeros(work.shape, bool)
    for counts in (work.prefill_tokens, work.decode_requests):
        if counts is not None:
            busy |= (np.asarray(counts) > 0).any(-1)
    return busy


def check_timing(timing: object) -> str:
    if not isinstance(timing, str) or not names_clock(timing):
        refuse(
            "payload",
            f"timing is {show(timing)}, but it names what the clock measures, in plain words",
            f"leave it out for {UNSPECIFIED!r}",
        )
    return timing


def refuse_traced(*values: Any) -> None:
    """Observations are arrays on the host: what is done with them by value cannot be traced."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(values)):
        refuse("payload", "observations are checked by value, so not inside jit", "make them first, pass them in")


def _milliseconds(value: Any) -> np.ndarray:
    """float64 array of the shape of `value`, every element finite."""
    refuse_masked(WALL, "wall_ms", value)
    array = as_array(value)
    if array is None:
        try:
            objects = elements(value)
        except TypeError:  # a sequence of its own kind, such as observations themselves
            refuse_element(WALL, "wall_ms", (), value)
        numbers = [as_float(x) for x in objects.flat]
        if None in numbers:
            i = numbers.index(None)
            refuse_element(WALL, "wall_ms", np.unravel_index(i, objects.shape), objects.flat[i])
        return np.asarray(numbers, np.float64).reshape(objects.shape)
    if array.dtype.kind not in "iuf":
        refuse_dtype(WALL, "wall_ms", array)
    array = array.astype(np.float64, copy=False)
    finite = np.isfinite(array)
    if not finite.all():
        index = np.unravel_index(np.argmin(finite), array.shape)
        refuse_element(WALL, "wall_ms", index, float(array[index]))
    return array


def _keep(work: Work, wall: np.ndarray, timing: str) -> Observations:
    """Leave out what is no observation, and say how much: work [n, r], wall [n] without NaN.

    Raises TraceError `speculative` before anything is left out.
    """
    if (beyond := lists_beyond_ordinary(work)).any():
        i, rank = (int(index) for index in np.argwhere(beyond)[0])
        assert work.lists is not None
        extend = np.asarray(work.lists.extend)[i, rank, : int(work.lists.count[i, rank])].tolist()
        prefills = 0 if work.prefill_requests is None else int(work.prefill_requests[i, rank])
        why = beyond_ordinary(extend, prefills, computed_tokens(work, i, rank))
        _refuse_speculation(
            f"iteration {i}, rank {rank}: extend_lengths {show(extend)} with {prefills} prefill requests: {why}"
        )
    busy = is_busy(work)
    measured, finite = wall > 0, wall < CLOCK_SECONDS * 1000.0
    keep = busy & measured & finite
    report = {
        "accepted": int(keep.sum()),
        "idle": int((~busy).sum()),
        "no_wall_time": int((busy & ~measured).sum()),
        "overflow": int((busy & measured & ~finite).sum()),
    }
    kept = Observations(work, wall, timing)
    return with_report(kept if keep.all() else kept.where(keep), report)


def _refuse_speculation(message: str) -> NoReturn:
    raise TraceError(
        f"{message}\nhint: observations are ordinary decoding; a draft length belongs to the query, "
        "as in estimate(model, work, draft_length=3)",
        code="speculative",
    )


def _flatten(x: np.ndarray, axes: int) -> np.ndarray:
    """The first `axes` axes as one."""
    return x if axes == 1 else x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:])


def _nested(iterations: Any) -> Sequence[Any]:
    """A sequence of iterations from the shapes that tuning takes."""
    if isinstance(iterations, Mapping):
        return [iterations]
    if not isinstance(iterations, Iterable):
        refuse(
            "payload",
            f"iterations is of type {type(iterations).__name__}, not metrics",
            "pass a rank dict, a list of rank dicts (one iteration), or a list of such lists",
        )
    items = list(iterations)
    ranks = [isinstance(item, Mapping) for item in items]
    if items and all(ranks):
        return [items]
    for i, item in enumerate(items):
        if not isinstance(item, (list, tuple)):
            word = "a rank beside whole iterations" if ranks[i] else f"of type {type(item).__name__}"
            refuse(
                "payload",
                f"iterations[{i}] is {word}",
                "a list of dicts is one iteration; for several iterations wrap each of them in a list",
            )
    return items


def _parse_each(items: Sequence[Any]) -> list[list[RankMetrics]]:
    parsed = []
    for i, item in enumerate(items):
        try:
            parsed.append(parse_iteration(item))
        except MetricsError as error:
            raise MetricsError(f"iterations[{i}]: {error}", code=error.code) from None
    return parsed


def _concat_work(works: list[Work]) -> Work:
    """Along the first axis; shorter rank and request axes are padded."""
    if len(works) == 1:
        return works[0]
    ranks = max((work.ranks for work in works), default=1)
    fields: dict[str, Any] = {}
    for names, dtype in ((COUNTS, np.uint32), (VARIANCES, np.float64)):
        for name in names:
            parts = [
                np.zeros((work.shape[0], ranks), dtype)
                if (x := getattr(work, name)) is None
                else _pad(np.asarray(x), (ranks,), 0)
                for work in works
            ]
            fields[name] = np.concatenate([np.zeros((0, ranks), dtype), *parts])
    if any(work.lists is not None for work in works):
        q = max(np.shape(work.lists.extend)[-1] for work in works if work.lists is not None)
        lists = [_lists_of(work, ranks, q) for work in works]
        fields["lists"] = jax.tree.map(lambda *xs: np.concatenate(xs), *lists)
    return Work(**fields)


def _lists_of(work: Work, ranks: int, q: int) -> RequestLists:
    n = work.shape[0]
    if work.lists is None:
        empty = np.broadcast_to(np.uint64(0), (n, ranks, q))
        return RequestLists(empty, empty, np.full((n, ranks), -1, np.int32))
    extend, past, count = (np.asarray(x) for x in (work.lists.extend, work.lists.past, work.lists.count))
    return RequestLists(_pad(extend, (ranks, q), 0), _pad(past, (ranks, q), 0), _pad(count, (ranks,), -1))


def _pad(x: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    """The axes after the first, lengthened to `shape`."""
    wide = [(0, 0), *((0, want - have) for want, have in zip(shape, x.shape[1:], strict=True))]
    return np.pad(x, wide, constant_values=fill) if any(extra for _, extra in wide) else x
