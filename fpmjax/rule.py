"""The factor between an ordinary pass and a speculative round: intercept + slope * draft length, exactly.

Published for TP1, BF16, batches of 1, 4 and 8, contexts of 1,024 and 4,096 and depths 1 to 4:
0.08 * d + 1.25, that is 1.33, 1.41, 1.49 and 1.57.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from fpmjax.errors import SpeculationError
from fpmjax.metrics import show

COEFFICIENTS = (Decimal("1e-30"), Decimal("1e30"))  # factors of any draft length stay normal float64 numbers
EXACT_INTEGERS = 2**53  # every integer up to here is a float64
PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)  # Decimal reads more: 0_8, other scripts
MOST_DIGITS = 100  # of a coefficient
LONGEST_PROVENANCE = 2000  # characters
OUTSIDE = 1e-6  # how far beyond its interval a coefficient may lie, relatively: both are rounded


class RuleInterval(NamedTuple):
    """Where the coefficients of a refitted rule lie, each by itself: (low, high) of the cluster bootstrap.

    It describes the study that the rule comes from, given its reference and its configurations; no answer is widened
    by it.  level: the share of draws inside, such as 0.95; clusters: configurations that were drawn.
    """

    slope: tuple[float, float]
    intercept: tuple[float, float]
    level: float
    clusters: int

    def __str__(self) -> str:
        (a, b), (c, d) = self.slope, self.intercept
        return f"{100 * self.level:g} % interval: slope {a:.4g}..{b:.4g}, intercept {c:.4g}..{d:.4g}"


@dataclass(frozen=True)
class SpeculativeRule:
    """A linear rule; decimal coefficients (text, int, Decimal or float as it prints) are kept exactly.

    factor(d) = intercept + slope * d, rounded to float64 once.

    provenance: where the coefficients come from, for people: one line of text that prints.
    interval: how well the study behind them knows them, a `RuleInterval`; None where nobody says.

    Raises SpeculationError (`rule`) for coefficients that are neither 0 nor in 1e-30..1e30, or are both 0, for an
    interval that is none or lies beside its coefficient, and for a provenance that no line of text is.
    """

    slope: Decimal = field(default=Decimal("0.08"))
    intercept: Decimal = field(default=Decimal("1.25"))
    provenance: str = "unstated"
    interval: RuleInterval | None = None

    def __post_init__(self):
        if self.interval is not None:
            object.__setattr__(self, "interval", checked_interval(self.interval))
        for name in ("slope", "intercept"):
            object.__setattr__(self, name, decimal(name, getattr(self, name)))
        if self.slope == 0 and self.intercept == 0:
            raise SpeculationError("a rule of slope 0 and intercept 0 would answer 0 ms everywhere", code="rule")
        if self.interval is not None:
            for name in ("slope", "intercept"):
                ends, value = getattr(self.interval, name), getattr(self, name)
                if not inside(float(value), ends):
                    wrong_interval(f"{name}={ends[0]}..{ends[1]}, which {value} is not in")
        check_provenance(self.provenance)

    def factor(self, draft_length: Any) -> Any:
        """float64 of the shape of `draft_length`: int, integer array, or a traced one under `fpmjax.x64()`.

        Concrete lengths get the correctly rounded factor; so do traced ones while slope * d + intercept, in units
        of the last decimal place, stays below 2**53 (for the published rule: always), otherwise within one ulp.
        """
        slope, intercept, unit = self.integers()
        if isinstance(draft_length, (int, np.integer)):
            return np.float64((intercept + slope * int(draft_length)) / unit)
        if isinstance(draft_length, np.ndarray):
            top = int(draft_length.max(initial=0))
            if intercept + slope * top < EXACT_INTEGERS and unit < EXACT_INTEGERS:
                return (intercept + slope * draft_length.astype(np.int64)) / np.float64(unit)
            rounded = [(intercept + slope * d) / unit for d in draft_length.ravel().tolist()]
            return np.array(rounded, np.float64).reshape(draft_length.shape)
        # XLA turns a division by a constant, or by a broadcast of one, into a product with its reciprocal, which is
        # wrong in the last bit for hundreds of depths.  A divisor that depends on each dividend is left alone.
        numerator = np.float64(intercept) + np.float64(slope) * draft_length.astype(np.float64)
        return numerator / jnp.where(numerator >= 0, np.float64(unit), np.float64(1))

    def integers(self) -> tuple[int, int, int]:
        """(slope, intercept, unit): both coefficients as integers over one common denominator."""
        slope, intercept = Fraction(self.slope), Fraction(self.intercept)
        unit = math.lcm(slope.denominator, intercept.denominator)
        return int(slope * unit), int(intercept * unit), unit

    def __str__(self) -> str:
        return f"{self.slope} * d + {self.intercept} ({self.provenance})"

    def document(self) -> dict[str, Any]:
        """For JSON: the coefficients as decimal text, the provenance, and the interval where there is one."""
        stated = {"slope": str(self.slope), "intercept": str(self.intercept), "provenance": self.provenance}
        return stated if self.interval is None else stated | {"interval": interval_document(self.interval)}


def interval_document(interval: RuleInterval) -> dict[str, Any]:
    return {
        "slope": list(interval.slope),
        "intercept": list(interval.intercept),
        "level": interval.level,
        "clusters": interval.clusters,
    }


def checked_interval(value: Any) -> RuleInterval:
    """A `RuleInterval` of plain numbers; SpeculationError (`rule`) for what is none."""
    try:
        slope, intercept, level, clusters = value
        interval = RuleInterval(bounds("slope", slope), bounds("intercept", intercept), real("level", level), clusters)
    except (TypeError, ValueError, OverflowError):
        wrong_interval(show(value))
    if not 0 < interval.level < 1:
        wrong_interval(f"level={interval.level}")
    if not isinstance(clusters, (int, np.integer)) or isinstance(clusters, bool) or clusters < 1:
        wrong_interval(f"clusters={show(clusters)}")
    return interval._replace(clusters=int(clusters))


def inside(coefficient: float, ends: tuple[float, float]) -> bool:
    """Whether an interval holds its coefficient, but for rounding."""
    slack = OUTSIDE * max(abs(coefficient), *map(abs, ends))
    return ends[0] - slack <= coefficient <= ends[1] + slack


def check_provenance(text: Any) -> None:
    """SpeculationError (`rule`) for what is not one line of text that prints."""
    if isinstance(text, str) and text.strip() and text.isprintable() and len(text) <= LONGEST_PROVENANCE:
        return
    raise SpeculationError(
        f"provenance is {show(text)}\nhint: one line of text that prints, to {LONGEST_PROVENANCE:,} characters, "
        "e.g. 'H100, engine 1.2, my study'",
        code="rule",
    )


def bounds(name: str, value: Any) -> tuple[float, float]:
    low, high = (real(name, x) for x in value)
    if low > high:
        wrong_interval(f"{name}={low}..{high}")
    return low, high


def real(name: str, value: Any) -> float:
    if isinstance(value, (str, bool)) or not math.isfinite(value):
        wrong_interval(f"{name} with {show(value)}")
    return float(value)


def wrong_interval(what: str) -> NoReturn:
    raise SpeculationError(
        f"a rule's interval has {what}\n"
        "hint: RuleInterval(slope=(low, high), intercept=(low, high), level=0.95, clusters=192)",
        code="rule",
    )


def decimal(name: str, value: Any) -> Decimal:
    """The coefficient as it is written; a float means the number that it prints as."""
    try:
        if isinstance(value, str) and not PLAIN.fullmatch(value):
            raise ValueError
        number = Decimal(str(value) if isinstance(value, (float, np.floating)) else value)
    except (InvalidOperation, TypeError, ValueError):
        raise SpeculationError(
            f"{name}={show(value)} is not a decimal number\nhint: write it as text, e.g. '0.08'", code="rule"
        ) from None
    small, large = COEFFICIENTS
    if isinstance(value, bool) or not number.is_finite() or (number != 0 and not small <= number <= large):
        raise SpeculationError(
            f"{name}={show(value)} cannot scale a latency\nhint: a coefficient is 0 or lies in {small}..{large}",
            code="rule",
        )
    if (digits := len(number.as_tuple().digits)) > MOST_DIGITS:
        raise SpeculationError(
            f"{name} has {digits:,} digits\nhint: a coefficient has {MOST_DIGITS} digits at most", code="rule"
        )
    return number or Decimal(0)  # without the sign or the exponent of a zero


PUBLISHED = SpeculativeRule(provenance="published calibration study, TP1, BF16")
