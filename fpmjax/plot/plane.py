"""Which axes of a grid lie in the plane of a picture, which make panels or lines, and the answers there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fpmjax.acceptance import Acceptance
from fpmjax.errors import OptionError, refuse_option
from fpmjax.grid import DRAFT, MODEL, Grid
from fpmjax.metrics import show
from fpmjax.model_names import named
from fpmjax.plot.text import told_apart
from fpmjax.result_columns import PHASES, STATUS, as_numpy
from fpmjax.status import Status
from fpmjax.sweep import sweep

MOST_CELLS = 1 << 20
MOST_PANELS, MOST_LINES = 12, 8
# In the order in which they are taken for the plane; what is left makes panels or lines.  Axis: its label, its short
# name in a title.
AXES = {
    "decode_requests": ("batch, decode requests", "batch"),
    "kv_per_request": ("context, past KV tokens a request", "context"),
    "decode_kv": ("past KV tokens, total", "KV tokens"),
    "prefill_tokens": ("new tokens, total", "new tokens"),
    "tokens_per_request": ("new tokens a request", "new tokens a request"),
    "prefill_kv": ("cached KV tokens, total", "cached KV tokens"),
    "prefill_requests": ("prefill requests", "prefill requests"),
    DRAFT: ("draft length, tokens a round", "draft length"),
}


@dataclass(frozen=True, eq=False)
class Plane:
    """The picture's axes.

    x, y: names; y is None where one axis alone has several values.  series: names of the others that have several,
    `model` first.  fixed: what is the same everywhere, in words.  grid: the same cells, each once, ordered
    (series..., y, x).  names, models: of each what a picture calls it (`told_apart`), and itself; the grid has an axis
    of them where there are several.
    """

    x: str
    y: str | None
    series: tuple[str, ...]
    fixed: str
    grid: Grid
    names: tuple[str, ...]
    models: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Panels or lines, cells over y, cells over x."""
        across = len(self.grid[self.x])
        along = 1 if self.y is None else len(self.grid[self.y])
        return self.grid.size // (across * along), along, across

    def column(self, name: str) -> np.ndarray:
        """int64 [panels, ny, nx]: an axis in every cell."""
        return self.grid.columns()[name].reshape(self.shape)

    @property
    def drafted(self) -> bool:
        """Whether any cell is a speculative round."""
        return DRAFT in self.grid.names and bool(self.grid[DRAFT].any())

    def places(self) -> list[tuple[str, str]]:
        """(title of the panel, name of the line) of each panel; in a plane every one is a panel of its own."""
        words = {
            name: list(self.names) if name == MODEL else [f"{AXES[name][1]} {v:,}" for v in self.grid[name]]
            for name in self.series
        }
        split = len(self.series) if self.y else max(0, len(self.series) - 1)
        return [(", ".join(one[:split]), ", ".join(one[split:])) for one in itertools.product(*words.values())]

    def ask(self, *, evidence: bool = False, rule: Any = None, progress: bool = False) -> Answers:
        """Every cell."""
        asked = None if self.grid.models is not None else self.models[0]
        table = sweep(asked, self.grid, evidence=evidence, rule=rule, progress=progress)

        def column(name: str) -> np.ndarray | None:
            return as_numpy(name, table.column(name)).reshape(self.shape) if name in table.column_names else None

        status, latency = column(STATUS), column("latency_ms")
        assert status is not None and latency is not None
        found = [x for phase in PHASES if (x := column(f"{phase}_resolution")) is not None]
        return Answers(
            latency,
            status,
            column("interval_low_ms"),
            column("interval_high_ms"),
            column("support_distance"),
            np.max(found, axis=0) if found else None,
        )

    def without(self, name: str) -> Plane:
        """The plane of the grid without one of its series."""
        kept = [(n, x) for n, x in zip(self.grid.names, self.grid.values, strict=True) if n != name]
        grid = Grid(tuple(n for n, _ in kept), tuple(x for _, x in kept), self.grid.models)
        return replace(self, series=tuple(n for n in self.series if n != name), grid=grid)


@dataclass(frozen=True, eq=False)
class Answers:
    """[panels, ny, nx] each: float64 ms, NaN where refused; int8 `Status`; and what models say beyond it.

    resolution: the coarsest `Resolution` of the lookups that were made, -1 for none; None without evidence.
    """

    latency_ms: np.ndarray
    status: np.ndarray
    low_ms: np.ndarray | None
    high_ms: np.ndarray | None
    distance: np.ndarray | None
    resolution: np.ndarray | None

    @property
    def served_ms(self) -> np.ndarray:
        """Of cells that serve somebody; NaN in idle ones as well, whose 0 ms are no latency."""
        return np.where(self.status == Status.OK, self.latency_ms, np.nan)

    @property
    def answered(self) -> np.ndarray:
        return self.status <= Status.IDLE

    def counts(self) -> Mapping[str, int]:
        """How many cells have which status, by word."""
        kinds, many = np.unique(self.status, return_counts=True)
        return {Status(k).code: int(n) for k, n in zip(kinds, many, strict=True)}


def plane_of(models: Any, grid: Any) -> Plane:
    """The plane of a grid over these models.

    Raises OptionError: `grid` for what is no grid, `axes` where no axis has several values, `cells` for more than
    2**20 cells, `models` as `sweep` does.
    """
    if not isinstance(grid, Grid):
        what = f"{type(grid).__name__} is no grid"
        refuse_option("grid", what, "fpmjax.grid(decode_requests=range(1, 65), kv_per_request=[512, 2048])")
    names, asked, _ = named(models, grid, "plot_grid")
    values = {name: np.unique(grid[name]) for name in grid.names if name != MODEL}
    several = [name for name in AXES if name in values and len(values[name]) > 1]
    sizes = [name for name in several if name != DRAFT] or several
    if not sizes:
        refuse_option(
            "axes",
            "a picture needs an axis of several values, and this grid has none",
            "give several batches, contexts or both, such as decode_requests=range(1, 65)",
        )
    x, y = sizes[0], (sizes[1] if len(sizes) > 1 else None)
    left = [name for name in several if name not in (x, y)]
    fixed = ", ".join(f"{AXES[name][1]} {values[name][0]:,}" for name in values if len(values[name]) == 1)
    axes = [(name, values[name]) for name in values if len(values[name]) == 1]
    axes += [(name, values[name]) for name in left] + [(name, values[name]) for name in (y, x) if name is not None]
    if len(asked) > 1:
        left, axes = [MODEL, *left], [(MODEL, np.arange(len(asked))), *axes]
    size = math.prod(len(v) for _, v in axes)
    if size > MOST_CELLS:
        refuse_option(
            "cells", f"a picture shows at most {MOST_CELLS:,} cells, this grid has {size:,}", "make an axis coarser"
        )
    made = Grid(tuple(n for n, _ in axes), tuple(v for _, v in axes), asked if len(asked) > 1 else None)
    return Plane(x, y, tuple(left), fixed, made, tuple(told_apart(names)), asked)


def check_panels(many: int, most: int, what: str) -> None:
    """OptionError (`panels`) for more panels or lines than one can read."""
    if many > most:
        refuse_option(
            "panels", f"{many:,} {what} in one picture are more than the {most} that one can read", "ask fewer at once"
        )


def rounds_of(tokens_per_round: Any, depths: np.ndarray) -> np.ndarray:
    """float64: the tokens that a round yields at each draft length [d]; OptionError (`tokens_per_round`)."""
    given: Any = tokens_per_round
    hint = (
        f"an Acceptance, a list such as [1, 1.7, 2.2, ...] from draft length 0 to {int(depths.max())}, or "
        "{1: 1.7, 2: 2.2, ...}"
    )
    if not isinstance(given, Acceptance):
        if isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.ndim == 1):
            given = dict(enumerate(given))
        if not isinstance(given, Mapping) or not given:
            refuse_option("tokens_per_round", f"tokens_per_round is {show(tokens_per_round)}", hint)
        try:
            given = Acceptance.measured(given)
        except OptionError as error:
            raise OptionError(f"tokens_per_round: {error}", code="tokens_per_round") from None
    found = given.tokens_per_round(depths)
    if (unknown := np.isnan(found)).any():
        depth = int(depths[unknown.argmax()])
        refuse_option("tokens_per_round", f"tokens_per_round says nothing of draft length {depth}", hint)
    return found
