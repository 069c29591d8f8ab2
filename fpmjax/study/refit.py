"""The two coefficients that fit a study best: T = (a d + b) F, a straight line through the ratios r = T / F against d.

Every loss of section "refit" is a weighted distance of r from that line, which is why they share one solve:

    rel_l2   sum w ((p - T) / T)^2 = sum w / r^2 (a d + b - r)^2       every round counts, in per cent
    abs_l2   sum w (p - T)^2       = sum w F^2 (a d + b - r)^2         milliseconds, so slow rounds decide
    rel_l1   sum w |p - T| / T     = sum w / r |a d + b - r|           the MAPE itself

w is 1 (`round`), or 1 / n_c with n_c rounds in the round's configuration (`configuration`).  Percentages are
asymmetric: a prediction too high is wrong without bound, one too low by 100 % at most, so `rel_l1` and `rel_l2` lean
towards low predictions.  Read the bias beside every MAPE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.metrics import show

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule
    from fpmjax.study.scored import Scored

LOSSES, WEIGHTS, METHODS = ("rel_l2", "abs_l2", "rel_l1"), ("round", "configuration"), ("closed_form", "optax")
START = (0.08, 1.25)  # where the optax path begins: the published rule
STEPS = 50  # of lbfgs
HUBER = (1e-1, 1e-2, 1e-3, 1e-4)  # relative error below which |error| is smoothed, one descent each
PLAUSIBLE = (1e-9, 1e9)
"""What T / F may be in a fit.  No mistake of units reaches that far; beyond it one round's square is all that counts,
and soon no float64 number any more.  Errors are told all the same: only a fit of such rounds has no meaning."""
HALVINGS = 200  # of an interval of float64 numbers; more than it takes to arrive at two neighbours


@dataclass(frozen=True)
class Refit:
    """The pair of smallest loss with slope >= 0 and intercept >= 0, the only pairs that a rule can have.

    slope, intercept: NaN where `status` is `singular` or `implausible`.
    status:     `ok`; `clipped`: the smallest loss of all lies at `unclipped`, outside, and the pair is the best one on
                the border (slope 0, or intercept 0, which stands for one as small as you like); `singular`: rounds of
                fewer than two draft lengths, which say nothing about a slope; `implausible`: some T / F lies outside
                of `PLAUSIBLE`, and nothing is fitted.
    unclipped:  (slope, intercept) of smallest loss without constraints; NaN where nothing was fitted.
    ratio_mean: weighted mean of T / F, all that one draft length shows; NaN without rounds, and where implausible.
    value:      loss per weight at (slope, intercept): mean squared relative error (`rel_l2`), mean squared error in
                ms^2 (`abs_l2`), mean absolute relative error (`rel_l1`; 0.02 is a MAPE of 2 %).
    rounds, configurations, depths: what was fitted; depths are the draft lengths, ascending.
    steps:      of lbfgs; 0 for the closed form.
    anchors_only: fitted to interpolated references on request; no evidence for a rule.
    """

    slope: float
    intercept: float
    status: str
    unclipped: tuple[float, float]
    ratio_mean: float
    value: float
    rounds: int
    configurations: int
    depths: tuple[int, ...]
    loss: str
    weights: str
    method: str
    steps: int = 0
    anchors_only: bool = False

    @property
    def fitted(self) -> bool:
        """Whether there is a pair."""
        return self.status in ("ok", "clipped")

    def predict(self, scored: Scored) -> np.ndarray:
        """float64 [n], milliseconds of every round; NaN where nothing was fitted."""
        return (self.slope * scored.depth + self.intercept) * scored.reference_ms

    def rule(self, provenance: str, digits: int = 9) -> SpeculativeRule:
        """The pair as a rule, to so many significant digits; OptionError (its status) where there is none."""
        from fpmjax.rule import SpeculativeRule

        if not self.fitted:
            refuse_unfitted(self.status, self.depths)
        slope, intercept = (Decimal(f"{x:.{digits}g}") for x in (self.slope, self.intercept))
        return SpeculativeRule(slope, intercept, provenance)


def refit(
    scored: Scored,
    *,
    loss: str = "rel_l2",
    weights: str = "round",
    method: str = "closed_form",
    anchors: bool = False,
) -> Refit:
    """The pair that fits the scored rounds best; see the module for the losses and weights.

    method: `closed_form`, for `rel_l1` a bisection that ends at neighbouring float64 numbers; or `optax`, lbfgs in
    float64 over every round, which knows nothing of the closed form (`rel_l1` is smoothed, and agrees in the loss to
    about HUBER[-1]).  Where several pairs share the smallest `rel_l1`, one of them is found.
    anchors: fit even where the reference was interpolated between batches; the result says so.

    Raises OptionError: `loss`, `weights`, `method`, and `anchors` for interpolated references not asked for.
    """
    chosen("loss", loss, LOSSES)
    chosen("weights", weights, WEIGHTS)
    chosen("method", method, METHODS)
    check_anchors(scored, anchors)
    ratio, weight = ratio_of(scored), weight_of(scored, weights)
    depths, sound = np.unique(scored.depth), bool(plausible(ratio).all())
    told: dict[str, Any] = {
        "ratio_mean": float(np.average(ratio, weights=weight)) if sound and len(ratio) else math.nan,
        "rounds": len(ratio),
        "configurations": int((scored.count > 0).sum()),
        "depths": tuple(depths.tolist()),
        "loss": loss,
        "weights": weights,
        "method": method,
        "anchors_only": scored.anchors_only,
    }
    nothing = {"slope": math.nan, "intercept": math.nan, "unclipped": (math.nan, math.nan), "value": math.nan}
    if not sound:
        return Refit(**nothing, status="implausible", **told)
    if len(depths) < 2:
        return Refit(**nothing, status="singular", **told)
    v = pull(scored, loss) * weight
    steps = 0
    if method == "optax":
        a, b, steps = descend(scored.depth, ratio, v, loss)
    elif loss == "rel_l1":
        a, b = least_absolute(scored.depth, ratio, v)
    else:
        a, b = map(float, Sums.of(scored.depth, ratio, v).line())
        if not math.isfinite(a):  # the other draft lengths weigh nothing beside one
            return Refit(**nothing, status="singular", **told)
    slope, intercept = a, b
    if a < 0:
        slope, intercept = 0.0, flat(np.ones_like(ratio), ratio, v, loss)
    elif b < 0:
        slope, intercept = flat(scored.depth.astype(np.float64), ratio, v, loss), 0.0
    status = "ok" if (slope, intercept) == (a, b) else "clipped"
    miss = np.abs(slope * scored.depth + intercept - ratio)
    value = float(np.sum(v * (miss if loss == "rel_l1" else miss * miss)) / np.sum(weight))
    return Refit(slope, intercept, status, (a, b), value=value, steps=steps, **told)


def ratio_of(scored: Scored) -> np.ndarray:
    """float64 [n], r = T / F."""
    with np.errstate(over="ignore", under="ignore"):
        return scored.measured_ms / scored.reference_ms


def plausible(ratio: np.ndarray) -> np.ndarray:
    """bool [n], which T / F can be fitted."""
    low, high = PLAUSIBLE
    return (ratio >= low) & (ratio <= high)


def weight_of(scored: Scored, weights: str) -> np.ndarray:
    """float64 [n], w."""
    return np.ones(len(scored)) if weights == "round" else 1.0 / scored.count[scored.config]


def pull(scored: Scored, loss: str) -> np.ndarray:
    """float64 [n]: what turns a distance of the ratio (its square, but for `rel_l1`) into the loss."""
    with np.errstate(over="ignore", under="ignore"):
        if loss == "abs_l2":
            return scored.reference_ms * scored.reference_ms
        y = scored.reference_ms / scored.measured_ms
        return y if loss == "rel_l1" else y * y


class Sums(NamedTuple):
    """The normal equations of weighted lines, arrays of one shape: sums over rounds of v, v d, v d^2, v r, v d r."""

    v: Any
    d: Any
    dd: Any
    r: Any
    dr: Any

    @classmethod
    def of(cls, depth: np.ndarray, ratio: np.ndarray, v: np.ndarray) -> Sums:
        """One line; the sums of each draft length come first, which are few and exact in d."""
        depths, at = np.unique(depth, return_inverse=True)
        each, total = np.bincount(at, v), np.bincount(at, v * ratio)
        return cls(
            each.sum(), (each * depths).sum(), (each * depths * depths).sum(), total.sum(), (total * depths).sum()
        )

    def line(self) -> tuple[Any, Any]:
        """(slope, intercept) of smallest loss, without constraints; NaN where there is no slope."""
        with np.errstate(divide="ignore", invalid="ignore"):
            middle, level = self.d / self.v, self.r / self.v
            spread = self.dd - middle * self.d
            spread = np.where(spread > 1e-12 * self.dd, spread, np.nan)
            slope = (self.dr - middle * self.r) / spread
            return slope, level - slope * middle

    def constrained(self) -> tuple[Any, Any, Any]:
        """(slope, intercept, clipped) with both at least 0; a convex loss has its best such pair on the border."""
        a, b = self.line()
        clipped = (a < 0) | (b < 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(a < 0, 0.0, np.where(b < 0, self.dr / self.dd, a))
            intercept = np.where(a < 0, self.r / self.v, np.where(b < 0, 0.0, b))
        return slope, intercept, clipped


def flat(x: np.ndarray, ratio: np.ndarray, v: np.ndarray, loss: str) -> float:
    """The c of smallest loss where the prediction is c x F."""
    if loss != "rel_l1":
        return float(np.sum(v * x * ratio) / np.sum(v * x * x))
    each, weight = ratio / x, v * x
    order = np.lexsort((weight, each))
    reached = np.cumsum(weight[order])
    return float(each[order][np.searchsorted(reached, reached[-1] / 2)])


def least_absolute(depth: np.ndarray, ratio: np.ndarray, v: np.ndarray) -> tuple[float, float]:
    """(slope, intercept) of smallest sum v |a d + b - r|.

    The best intercept of a slope is a weighted median, and what is left is convex in the slope, so both are found by
    halving; sorted by draft length once, a million rounds cost no more than a sort.
    """
    depths = np.unique(depth).astype(np.float64)
    parts = []
    for d in depths:
        at = depth == d
        order = np.lexsort((v[at], ratio[at]))
        parts.append((ratio[at][order], np.concatenate([[0.0], np.cumsum(v[at][order])])))
    totals = np.array([reached[-1] for _, reached in parts])

    def below(a: float, b: float) -> np.ndarray:
        """The weight of each draft length that lies under the line."""
        return np.array([w[np.searchsorted(r, a * d + b)] for d, (r, w) in zip(depths, parts, strict=True)])

    def intercept(a: float) -> float:
        """The weighted median of r - a d: the largest b with no more than half of the weight below."""
        left = min(float(r[0] - a * d) for d, (r, _) in zip(depths, parts, strict=True))
        right = max(float(r[-1] - a * d) for d, (r, _) in zip(depths, parts, strict=True))
        right = math.nextafter(right, math.inf)
        return halved(left, right, lambda b: bool(below(a, b).sum() <= totals.sum() / 2))

    def falling(a: float) -> bool:
        """Whether a larger slope is better; the median follows, through a point that itself weighs nothing."""
        b = intercept(a)
        under, over = below(a, b), totals - below(a, math.nextafter(b, math.inf))
        at = totals - under - over
        pivot = (at * depths).sum() / at.sum() if at.sum() > 0 else 0.0
        return bool(((over - under) * (depths - pivot)).sum() > 0)

    tops, bottoms = np.array([r[-1] for r, _ in parts]), np.array([r[0] for r, _ in parts])
    steepest = float((tops.max() - bottoms.min()) / np.diff(depths).min()) or 1.0
    a = halved(-2 * steepest, 2 * steepest, falling)
    return a, intercept(a)


def halved(left: float, right: float, go_right: Any) -> float:
    """The float64 number up to which `go_right` holds, from an interval at whose left end it does."""
    for _ in range(HALVINGS):
        middle = left + (right - left) / 2
        if not left < middle < right:
            break
        left, right = (middle, right) if go_right(middle) else (left, middle)
    return left


def descend(depth: np.ndarray, ratio: np.ndarray, v: np.ndarray, loss: str) -> tuple[float, float, int]:
    """(slope, intercept, steps) by optax.lbfgs; see `fpmjax.study.descent`."""
    from fpmjax.study.descent import minimum

    scale = float(v.sum() if loss == "rel_l1" else np.sum(v * ratio * ratio))  # losses of size one, whatever the unit
    return minimum(depth, ratio, v / scale, START, HUBER if loss == "rel_l1" else None, STEPS)


def refuse_unfitted(status: str, depths: Sequence[int]) -> NoReturn:
    """OptionError, the status as its code: why a fit of these draft lengths has no pair."""
    if status == "implausible":
        low, high = PLAUSIBLE
        what = f"some T / F lies outside of {low:g}..{high:g}, so nothing was fitted"
        refuse_option(status, what, "mend the latencies that the diagnosis names, or mark their rows invalid")
    refuse_option(
        status,
        f"rounds of one draft length or none ({', '.join(map(str, depths))}) fix no slope",
        "measure two draft lengths or more",
    )


def chosen(code: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        refuse_option(code, f"{code} is {show(value)}", f"one of {', '.join(allowed)}")


def check_anchors(scored: Scored, anchors: bool) -> None:
    """OptionError where interpolated references would become a fit unasked."""
    if scored.anchors_only and not anchors:
        refuse_option(
            "anchors",
            "references interpolated between batches are anchors, not data for a fit",
            "measure ordinary steps at every widened batch, or pass anchors=True and say so beside the numbers",
        )
