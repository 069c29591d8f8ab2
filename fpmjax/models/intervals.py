"""`with_intervals`: a table, and beside each of its answers the range in which a measurement is expected.

How wrong an answer between measured points is, the points themselves say: each is left out, asked of the others by
the rule of the table, and compared with what was measured, as |log(answer / measured)|.  Every way of answering has
residuals of its own:

    decode   inside a curve      a point between its neighbours of the same batch
             across batches      a point from the curves of other batches, its own batch left out
    prefill  inside a curve      a point between its neighbours of the same batch and KV total
             across KV           a point from other KV totals, its own left out
             across tokens       a point from other token totals, its own left out

Of n residuals the ceil((n + 1) level)-th smallest is the half width (split conformal), so for a point that is like
those left out the chance of lying inside is at least `level`.  The gap that a left-out point leaves is about twice
the gap that a query falls into, so the range is wide rather than narrow.  An exact hit was measured once, and how far
a second measurement would lie is not known; but whatever the others say about a point misses it by its noise and
more, so it takes the narrowest range of its phase.  A batch size beside a CUDA-graph boundary is never answered
across it, so it has no residual across batches.

On the embedded tables, a tenth of the points left out at random and the range for 0.9 made of the others, 90 to 97 %
of what was left out lies inside, by way of answering; of whole batches left out, 91 %.

Nothing is promised for one corner of a table in particular, for another deployment, or for the way in which the parts
of a mixed pass and the ranks are composed: their ends are taken together, as if all were wrong in the same direction.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fpmjax._jax import pytree, require_x64
from fpmjax.answer import Estimate, Evidence, Interval, Resolution
from fpmjax.errors import FpmError, OptionError
from fpmjax.guard import check_concrete, check_one_model, check_work, is_model
from fpmjax.iteration import IDLE, OK
from fpmjax.lookup.curves import Knots, covering, curves_by, join, knots_at
from fpmjax.lookup.decode import OCTAVES, DecodeTable, capture_rungs, cross, log2
from fpmjax.lookup.prefill import two_sided
from fpmjax.metrics import show
from fpmjax.models.around import Around
from fpmjax.tables.cell import Points
from fpmjax.work import Array, Work

PHASES = DECODE, PREFILL = 0, 1  # rows of the widths
NAMES = ("decode", "prefill")
EXACT, *_ = ANSWERED = tuple(Resolution)[1:]  # columns of the widths
UNASKED = np.int64(2**62)  # held-out rows behind a lookup that was not made: it limits nothing


def with_intervals(model: Any, *, level: float = 0.9) -> WithIntervals:
    """The table, with a relative interval beside every answer; the answers themselves keep every bit.

    model: from `direct`, with its cell; correct it afterwards, `corrected(with_intervals(table), observations)`.
    level: share of the points that were left out which lie inside.  Where a way of answering has fewer residuals than
        level / (1 - level), which is 9 for 0.9, its interval is NaN beside their count.

    Raises FpmError (`not_a_table`, `stacked`, `traced`), OptionError `level`.
    """
    check_table(model)
    real = isinstance(level, numbers.Real) and not isinstance(level, bool)
    if not real or not 0 < level < 1:
        what = f"level is {show(level)}, but it has to be a number between 0 and 1"
        raise OptionError(f"{what}\nhint: leave it out for 0.9", code="level")
    divisor, count = widths()
    for (phase, way), errors in residuals_of(model).items():
        width = conformal(errors, float(level))
        divisor[:, phase, way] = np.exp(width), np.exp(-width)
        count[phase, way] = errors.size
    for phase in PHASES:  # NaN sorts last; then the one with most residuals
        narrowest = np.lexsort((-count[phase], divisor[0, phase]))[0]
        divisor[:, phase, EXACT], count[phase, EXACT] = divisor[:, phase, narrowest], count[phase, narrowest]
    return WithIntervals(model, divisor, count, float(level))


def widths() -> tuple[np.ndarray, np.ndarray]:
    """(divisor, count) of a table without points."""
    shape = len(PHASES), len(ANSWERED)
    return np.full((2, *shape), np.nan), np.zeros(shape, np.int64)


def check_table(model: Any) -> None:
    """FpmError for what is no single table with its cell on the host."""
    if not is_model(model) or not isinstance(getattr(model, "decode", None), DecodeTable):
        what = f"with_intervals takes a table, not a {type(model).__name__}"
        hint = "with_intervals(direct(cell)); a correction goes around it, other models bring intervals of their own"
        raise FpmError(f"{what}\nhint: {hint}", code="not_a_table")
    check_one_model(model, "with_intervals")
    check_concrete(model, "with_intervals", "make it outside of jit and pass it in")
    if model.cell is None:
        what = "with_intervals needs the cell that a table was made of, but a transformation has lost it"
        raise FpmError(f"{what}\nhint: with_intervals(direct(cell)) first, then transform", code="not_a_table")


@pytree("level")
class WithIntervals(Around):
    """Model around a table, which it never changes.

    divisor: float64 [2, phases, resolutions], what an answer is divided by for its low and for its high end; quotients,
        because XLA would contract products with the sums they enter.  NaN: too few residuals, or no such lookup.
    count:   int64 [phases, resolutions], residuals.
    level:   share of them inside.
    """

    model: Any
    divisor: Array
    count: Array
    level: float

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        """Pure: the estimate of the table and its interval."""
        require_x64()
        check_work(work, "a model")
        return self._with(jnp, self.model(work, evidence=True), evidence)

    def on_host(self, work: Work, *, evidence: bool = False) -> Estimate:
        """`__call__` for a few queries, in plain numbers: the same bits and no compile."""
        check_work(work, "a model")
        return self._with(np, self.model.on_host(work, evidence=True), evidence)

    def _with(self, xp: Any, answer: Estimate, evidence: bool) -> Estimate:
        interval = self._interval(xp, answer)
        return replace(answer, interval=interval, parts=answer.parts if evidence else None)

    def _interval(self, xp: Any, answer: Estimate) -> Interval:
        """Ends of every lookup, composed like their milliseconds; a refusal stays one."""
        parts: Any = answer.parts
        shape = (*np.shape(answer.status), 1)
        lookups = [
            self._ends(xp, phase, ms, on, shape)
            for phase, ms, on in (
                (PREFILL, parts.prefill_ms, parts.prefill),
                (DECODE, parts.decode_ms, parts.decode),
                (DECODE, parts.baseline_ms, parts.baseline),
            )
        ]
        (p_low, p_high, p_count), (d_low, d_high, d_count), (b_low, b_high, b_count) = lookups
        low = p_low + xp.maximum(d_low - b_high, 0.0)
        high = p_high + xp.maximum(d_high - b_low, 0.0)
        answered = (answer.status == OK) | (answer.status == IDLE)
        low, high = (xp.where(answered, x.max(-1), np.nan) for x in (low, high))
        count = xp.minimum(xp.minimum(p_count, d_count), b_count).min(-1)
        count = xp.where((answer.status == OK) & (count < UNASKED), count, np.int64(0))
        return Interval(low, high, count, self.level)

    def _ends(self, xp: Any, phase: int, ms: Array, on: Evidence | None, shape: tuple) -> tuple[Array, Array, Array]:
        """(low ms, high ms, count) of the lookups of every rank; zeros and `UNASKED` where none was made.

        shape: what stands for all ranks where the work has none of this phase.
        """
        if on is None:
            return xp.zeros(shape), xp.zeros(shape), xp.full(shape, UNASKED)
        made = on.resolution >= 0
        way = xp.maximum(on.resolution, np.int8(0))
        low, high = (xp.where(made, ms / xp.asarray(self.divisor)[end, phase][way], 0.0) for end in (0, 1))
        return low, high, xp.where(made, xp.asarray(self.count)[phase][way], UNASKED)

    @property
    def diagnostics(self) -> tuple[dict[str, Any], ...]:
        """Per way of answering: phase, resolution, residuals behind it, half_width_pct (None: too few of them)."""
        check_one_model(self, "diagnostics")
        check_concrete(self, "diagnostics", "look at them outside of jit")
        shown = []
        for phase, way in ((DECODE, EXACT), WAYS[0], WAYS[1], (PREFILL, EXACT), *WAYS[2:]):
            wide = 100.0 * (float(self.divisor[0, phase, way]) - 1.0)
            row = {"phase": NAMES[phase], "resolution": way.word, "residuals": int(self.count[phase, way])}
            shown.append(row | {"half_width_pct": None if math.isnan(wide) else wide})
        return tuple(shown)

    def __repr__(self) -> str:
        return f"WithIntervals({self.model!r}, level={self.level})"


# Residuals, on the host

WAYS = (
    (DECODE, Resolution.WITHIN),
    (DECODE, Resolution.ACROSS_BATCH),
    (PREFILL, Resolution.WITHIN),
    (PREFILL, Resolution.ACROSS_KV),
    (PREFILL, Resolution.ACROSS_TOKENS),
)


def conformal(errors: np.ndarray, level: float) -> float:
    """The ceil((n + 1) level)-th smallest of n errors, NaN where there are fewer."""
    rank = math.ceil((errors.size + 1) * level - 1e-9)  # 10 * 0.9 is 9, whatever the last bit says
    return float(np.sort(errors)[rank - 1]) if rank <= errors.size else math.nan


def residuals_of(model: Any) -> dict[tuple[int, Resolution], np.ndarray]:
    """|log(answer / measured)| of the points that can be left out, for every way of answering."""
    decode = measured(model.cell.decode, model.decode.knots)
    prefill = measured(model.cell.prefill, model.prefill.knots)
    inside = inside_curves(decode.batch, decode.kv, decode.latency_ms)
    site = np.unique(np.stack([prefill.batch, prefill.kv]), axis=1, return_inverse=True)[1].ravel()
    inside_prefill = inside_curves(site, prefill.tokens, prefill.latency_ms)
    of_batch = [prefill.batch == b for b in np.unique(prefill.batch)]
    across = [(prefill.kv, prefill.tokens), (prefill.tokens, prefill.kv)]
    found = [[between_curves(at[own], x[own], prefill.latency_ms[own]) for own in of_batch] for at, x in across]
    kv, tokens = (np.concatenate([np.zeros(0), *errors]) for errors in found)
    errors = (inside, between_batches(decode), inside_prefill, kv, tokens)
    return dict(zip(WAYS, errors, strict=True))


def measured(points: Points, knots: Knots) -> Points:
    """The points with the latencies of a model, which need not be those of its cell."""
    if not len(points):
        return points
    by_row = np.full(1 + int(points.row.max()), np.nan)
    by_row[np.asarray(knots.row)] = np.asarray(knots.ms)
    return replace(points, latency_ms=by_row[points.row])


def inside_curves(at: np.ndarray, x: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Errors of the inner points of every curve, each between its neighbours."""
    order = np.lexsort((x, at))
    at, x, ms = at[order], x[order], ms[order]
    middle = np.flatnonzero(at[2:] == at[:-2]) + 1
    before, after = middle - 1, middle + 1
    share = (x[middle] - x[before]) / (x[after] - x[before])
    return errors_of(ms[before] + (ms[after] - ms[before]) * share, ms[middle])


def between_curves(at: np.ndarray, x: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Errors of the points of one prefill batch, each from the nearest curves on both sides of its own."""
    curves = curves_by(at, x)
    knots, head = join(curves, ms, np.zeros(ms.size, np.int32))
    (q, column), (sites, own) = (np.unique(v, return_inverse=True) for v in (x, at))
    _, pair = two_sided(knots_at(curves, head, q), covering(curves, q), sites, sites)
    lo, hi = pair[column.ravel(), own.ravel()].T
    return errors_of(read(knots, lo, hi, x, at), ms)


def between_batches(points: Points) -> np.ndarray:
    """Errors of the decode points, each from the batches that would answer if its own had not been measured.

    The capture regimes stay those of all batches: no query is answered across a boundary that was measured.
    """
    curves = curves_by(points.batch, points.kv)
    if not curves:
        return np.zeros(0)
    batches = np.array([c.at for c in curves], np.int64)
    knots, head = join(curves, points.latency_ms, points.row)
    q, column = np.unique(points.kv, return_inverse=True)
    knot, covers, column = knots_at(curves, head, q), covering(curves, q), column.ravel()
    octaves, regime = log2(batches), np.searchsorted(capture_rungs(batches), batches)
    lo, hi = np.full((2, len(points)), -1)
    for i, curve in enumerate(curves):
        distance = np.abs(octaves - octaves[i])
        near = np.flatnonzero((regime == regime[i]) & (distance <= OCTAVES) & (distance > 0))
        pair = cross(covers, i, near[np.argsort(distance[near], kind="stable")])[column[curve.point]]
        for side, where in ((lo, pair[:, 0]), (hi, pair[:, 1])):
            side[curve.point] = np.where(where < 0, -1, knot[where, column[curve.point]])
    return errors_of(read(knots, lo, hi, points.kv, points.batch), points.latency_ms)


def read(knots: Knots, lo: np.ndarray, hi: np.ndarray, q: np.ndarray, r: np.ndarray) -> np.ndarray:
    """float64 [n]: two curves read at q and crossed at r, from knots at or below q; NaN where lo is -1."""
    x, at, ms = (np.asarray(v).astype(np.float64) for v in (knots.x, knots.at, knots.ms))

    def curve(p: np.ndarray) -> np.ndarray:
        gap = np.asarray(knots.x)[p + 1] - np.asarray(knots.x)[p]  # modulo 2**32, as the closing knot is
        return ms[p] + (ms[p + 1] - ms[p]) * (q - x[p]) / gap

    there = (lo >= 0) & (at[lo] < at[hi])
    u, v = curve(lo), curve(hi)
    return np.where(there, u + (v - u) * (r - at[lo]) / np.where(there, at[hi] - at[lo], 1.0), np.nan)


def errors_of(answer: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """|log(answer / measured)| where both are numbers above zero."""
    with np.errstate(all="ignore"):
        errors = np.abs(np.log(answer) - np.log(ms))
    return errors[np.isfinite(errors)]
