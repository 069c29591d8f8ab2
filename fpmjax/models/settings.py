"""What a regression can be told: the peer's options with its defaults, checked on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from fpmjax.errors import OptionError
from fpmjax.metrics import show
from fpmjax.models.learner import FIRST_SEARCH, Learner, Rules
from fpmjax.observe.features import AXES, ROLES
from fpmjax.observe.retain import CELL_LIMIT, Grid

DEFAULT_AXES = ("attention", "moe")
LARGEST = 2**31 - 1
MOST = 2**20  # rows or misses kept per store; more says nothing about an engine as it is now, and has to be stored
LARGEST_FLOAT = float(np.finfo(np.float64).max)
SLOTS, RING = 64, 16  # smallest padded sizes, so that small capacities and windows share compiled code


def bad(name: str, value: Any, words: str, hint: str) -> NoReturn:
    raise OptionError(f"{name}={show(value)} {words}\nhint: {hint}", code=name)


def whole(name: str, value: Any, most: int = LARGEST) -> int:
    """An integer option of 1 to `most`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
        bad(name, value, f"must be an integer of 1 to {most}", "give a whole number")
    return int(value)


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite option of at least zero, or above it."""
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.bool_))
    if not real or not 0 <= value <= LARGEST_FLOAT or (positive and value == 0):
        bad(name, value, f"must be finite and {'positive' if positive else 'nonnegative'}", "give a number such as 1.0")
    return float(value)


@dataclass(frozen=True)
class ErrorThreshold:
    """Lazy updates: rows are always retained, but the fit is made again only where the last ones were missed.

    A row is missed where the prediction before it is off by more than max(absolute_tolerance_ms,
    relative_tolerance * observed).  Refit: `trigger` misses among the last `window` rows, at least `cooldown` rows
    after the last refit; always for the first `startup_observations` rows.
    """

    relative_tolerance: float
    absolute_tolerance_ms: float
    window: int
    trigger: int
    cooldown: int
    startup_observations: int = 10

    def __post_init__(self):
        number("relative_tolerance", self.relative_tolerance)
        number("absolute_tolerance_ms", self.absolute_tolerance_ms)
        whole("window", self.window, MOST)
        for name in ("cooldown", "startup_observations", "trigger"):
            whole(name, getattr(self, name))
        if self.trigger > self.window:
            bad("trigger", self.trigger, f"must be at most window={self.window}", "a window holds that many rows")


@dataclass(frozen=True)
class Knots:
    """A spline beside the linear fit, with 2 or 3 knots per axis, first searched after 32 rows.

    step: search again every so many rows.  None: where `trigger` of the last `window` rows were missed by more
    than max(absolute_tolerance_ms, tolerance * observed), at least `cooldown` rows after the last search.
    """

    per_axis: int = 2
    step: int | None = None
    window: int = 16
    trigger: int = 8
    tolerance: float = 0.05
    absolute_tolerance_ms: float = 1.0
    cooldown: int = 64

    def __post_init__(self):
        if not isinstance(self.per_axis, (int, np.integer)) or self.per_axis not in (2, 3):
            bad("per_axis", self.per_axis, "knots per axis must be 2 or 3", "start with 2")
        if self.step is not None:
            whole("step", self.step)
        number("tolerance", self.tolerance, positive=True)
        number("absolute_tolerance_ms", self.absolute_tolerance_ms)
        whole("window", self.window, MOST)
        for name in ("trigger", "cooldown"):
            whole(name, getattr(self, name))
        if self.trigger > self.window:
            bad("trigger", self.trigger, f"must be at most window={self.window}", "a window holds that many rows")


@dataclass(frozen=True)
class Settings:
    """Every option of `fpmjax.regression`, checked; see there."""

    role: str
    feature_axes: Sequence[str]
    sampling_axes: Sequence[str]
    bins_per_axis: Sequence[int]
    max_observations: int
    min_observations: int
    non_negative: bool
    singular_ridge_scale: float
    rebuild_interval: int | None
    lazy: ErrorThreshold | None
    spline: Knots | None
    weights: tuple[float, float, float]

    def __post_init__(self):
        if not isinstance(self.role, str) or self.role not in ROLES:
            bad("role", self.role, "is no role of a worker", f"one of {', '.join(ROLES)}")
        for name in ("feature_axes", "sampling_axes"):
            object.__setattr__(self, name, axes_of(name, getattr(self, name)))
        bins = self.bins_per_axis
        if isinstance(bins, (str, bytes)) or not isinstance(bins, Sequence) or len(bins) != len(self.sampling_axes):
            bad(
                "bins_per_axis",
                bins,
                "must contain exactly one bin count per sampling axis",
                f"give {len(self.sampling_axes)} counts for {', '.join(self.sampling_axes)}",
            )
        bins = tuple(whole("bins_per_axis", b) for b in bins)
        if math.prod(bins) >= CELL_LIMIT:
            bad("bins_per_axis", bins, f"make {math.prod(bins):,} cells", f"their product stays below {CELL_LIMIT:,}")
        object.__setattr__(self, "bins_per_axis", bins)
        whole("max_observations", self.max_observations, MOST)
        if whole("min_observations", self.min_observations) > self.max_observations:
            bad(
                "min_observations",
                self.min_observations,
                f"must be at most max_observations={self.max_observations}",
                "more rows than are retained can never be there",
            )
        number("singular_ridge_scale", self.singular_ridge_scale)
        if self.rebuild_interval is not None:
            whole("rebuild_interval", self.rebuild_interval)
        if not isinstance(self.non_negative, (bool, np.bool_)):
            bad("non_negative", self.non_negative, "is no bool", "False allows falling latencies")
        for name, weight in zip(WEIGHTS, self.weights, strict=True):
            number(name, weight, positive=True)
        for name, kind in (("lazy", ErrorThreshold), ("spline", Knots)):
            if not isinstance(getattr(self, name), kind | None):
                bad(name, getattr(self, name), f"is no {kind.__name__}", f"give fpmjax.{kind.__name__}(...) or None")
        if self.spline is not None:
            if (self.feature_axes, self.sampling_axes) != (DEFAULT_AXES, DEFAULT_AXES):
                bad("spline", self.spline, f"needs the axes {DEFAULT_AXES}", "leave feature_axes and sampling_axes out")
            if self.lazy is not None or not self.non_negative:
                bad("spline", self.spline, "goes with neither lazy nor signed fits", "leave lazy and non_negative out")
            if self.max_observations < FIRST_SEARCH:
                bad(
                    "max_observations",
                    self.max_observations,
                    f"must be at least {FIRST_SEARCH} for spline fitting",
                    "64",
                )

    @property
    def rules(self) -> Rules:
        """The numbers as leaves of a model."""
        lazy = self.lazy or ErrorThreshold(0.0, 0.0, 1, 1, 1, 1)
        misses = self.spline or lazy
        return Rules(
            min_observations=np.int64(self.min_observations),
            ridge=np.float64(self.singular_ridge_scale),
            non_negative=np.bool_(self.non_negative),
            interval=np.int64(self.rebuild_interval or 0),
            lazy=np.bool_(self.lazy is not None),
            relative=np.float64(misses.tolerance if isinstance(misses, Knots) else misses.relative_tolerance),
            absolute_ms=np.float64(misses.absolute_tolerance_ms),
            window=np.int64(misses.window),
            trigger=np.int64(misses.trigger),
            cooldown=np.int64(misses.cooldown),
            startup=np.int64(lazy.startup_observations),
            step=np.int64((self.spline and self.spline.step) or 0),
        )

    @property
    def store(self) -> Learner:
        """An empty store."""
        grid = Grid.empty(tuple(self.bins_per_axis), self.max_observations, slots=padded(self.max_observations, SLOTS))
        watched = self.lazy or self.spline
        ring = padded(watched.window, RING) if watched else 0
        return Learner.new(grid, len(self.feature_axes), ring, self.spline.per_axis if self.spline else 0)


WEIGHTS = ("attention_kv_weight", "prefill_attention_pair_weight", "ffn_token_weight")


def axes_of(name: str, axes: Any) -> tuple[str, ...]:
    """1 to 6 distinct axes of the catalogue."""
    if isinstance(axes, (str, bytes)) or not isinstance(axes, Sequence) or not 1 <= len(axes) <= 6:
        bad(name, axes, "must contain 1 to 6 axes", f"names out of {', '.join(AXES)}")
    unknown = [a for a in axes if not isinstance(a, str) or a not in AXES]
    if unknown:
        bad(name, unknown[0], "is no axis", f"names out of {', '.join(AXES)}")
    if len(set(axes)) < len(axes):
        bad(name, axes, "must not contain repeated axes", "name each axis once")
    return tuple(axes)


def padded(size: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())
