"""How far a study's numbers would move with other configurations of the same kind: a cluster bootstrap.

Rounds of one run share its clocks, its graph and its prompts, so ten times the rounds are not ten times the evidence.
Whole configurations are drawn with replacement, as many in each (gpu, model, method) as were measured, and every draw
gets its own means and its own fit.  What is said is descriptive: conditional on the reference as it is and on the
configurations that were tested, it knows nothing of other engines.

Rounds are summed once per configuration, so that the cost of a draw does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.inverse import integers
from fpmjax.metrics import show
from fpmjax.study.reading import POOLED, group_name
from fpmjax.study.refit import WEIGHTS, Sums, check_anchors, chosen, pull, ratio_of

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule
    from fpmjax.study.scored import Scored

DRAWS, LEVEL = 2000, 0.95
BLOCK = 64  # draws that share a generator; fixed, so that no other size shows in a number
ROUNDS = 16  # in a moving block
WORDS = "descriptive, conditional on the frozen reference and the tested configurations"


def bootstrap(
    scored: Scored,
    rule: SpeculativeRule,
    *,
    loss: str = "rel_l2",
    weights: str = "round",
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
    moving_blocks: bool = False,
    anchors: bool = False,
    progress: Callable[[float, float], None] | None = None,
) -> dict[str, Any]:
    """Percentile intervals of the errors of `rule`, and of the refit with this loss and these weights.

    loss: `rel_l2` or `abs_l2`.  weights: `round` or `configuration`; both MAPEs are given in any case.
    draws, seed: the draws are the first of an endless sequence that belongs to the seed.
    moving_blocks: inside every configuration drawn, its rounds are resampled too, in runs of 16 in a row.
    anchors: as `refit` takes it.  progress: called with (draws done, draws in all).

    Returns plain values: how it was done, `*_interval` as [low, high], and a list each of `cells` (gpu, model, method,
    draft length) and `fits` (pooled, then every model + method).  An interval is None where fewer than two
    configurations could have been exchanged.  A draw's refit obeys the constraints that the refit does; the draws in
    which one was active are counted, as are those of a single draft length, which have no refit.

    Raises OptionError: `loss`, `weights`, `draws`, `seed`, `level`, `anchors`.
    """
    chosen("loss", loss, ("rel_l2", "abs_l2"))
    chosen("weights", weights, WEIGHTS)
    check_anchors(scored, anchors)
    count, seed = int(integers("draws", draws, 1)), int(integers("seed", seed, 0))
    if not isinstance(level, float) or not 0 < level < 1:
        refuse_option("level", f"level is {show(level)}", "the share of draws inside, e.g. 0.95")
    clusters = Clusters(scored, scored.predict(rule), loss, weights)
    parts = []
    for block in range(-(-count // BLOCK)):
        parts.append(clusters.draw(np.random.default_rng([seed, block]), moving_blocks))
        if progress:
            progress(min((block + 1) * BLOCK, count), count)
    found = {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}
    return {
        "what": f"cluster bootstrap over configurations, percentiles: {WORDS}",
        "level": level,
        "draws": count,
        "seed": seed,
        "moving_blocks": ROUNDS if moving_blocks else None,
        "loss": loss,
        "weights": weights,
        "clusters": int(clusters.alive.sum()),
        "strata": len(clusters.strata),
        "strata_of_one": sum(len(s) == 1 for s in clusters.strata),
        **clusters.report(found, level),
    }


class Clusters:
    """The configurations with scored rounds as sums, and how draws of them are made and summed up.

    Everything with `sums` is [configs, 3]: weighted pull, weighted pull times ratio, absolute percentage errors.
    """

    def __init__(self, scored: Scored, predicted: np.ndarray, loss: str, weights: str):
        size, n = len(scored.configs), scored.count
        ratio, v = ratio_of(scored), pull(scored, loss)
        if weights == "configuration":
            v = v / n[scored.config]
        ape = 100 * np.abs(predicted - scored.measured_ms) / scored.measured_ms
        self.rounds = np.stack([v, v * ratio, ape], axis=1)  # [n, 3]
        self.start = np.concatenate([[0], np.cumsum(n)])
        self.sums = np.stack([np.bincount(scored.config, x, size) for x in self.rounds.T], axis=1)
        self.count, self.alive = n, n > 0
        self.depth = np.array([config.draft_length for config in scored.configs], np.float64)
        alive = np.flatnonzero(self.alive)
        in_stratum = scored.groups[alive]
        self.strata = [alive[in_stratum == i] for i in np.unique(in_stratum)]
        self.exchanged = np.zeros(size, bool)  # has another configuration in its stratum
        for stratum in self.strata:
            self.exchanged[stratum] = len(stratum) > 1
        self.cells = {key: np.flatnonzero((scored.cells == i) & self.alive) for i, key in enumerate(scored.cell_keys)}
        names = np.array([group_name(config._asdict()) for config in scored.configs], object)
        self.fits = {POOLED: alive} | {name: alive[names[alive] == name] for name in sorted(set(names.tolist()))}

    def draw(self, random: np.random.Generator, moving_blocks: bool) -> dict[Any, np.ndarray]:
        """`BLOCK` draws: their numbers by what they are of, [BLOCK] or [BLOCK, k]."""
        times = np.zeros((BLOCK, len(self.count)), np.int64)
        for stratum in self.strata:
            # Plain uniform numbers: their stream is the same in every version of NumPy, a multinomial's need not be.
            picked = stratum[(random.random((BLOCK, len(stratum))) * len(stratum)).astype(np.int64)]
            np.add.at(times, (np.arange(BLOCK)[:, None], picked), 1)
        sums = self.resampled(random, times) if moving_blocks else times[:, :, None] * self.sums
        out: dict[Any, np.ndarray] = {"overall": self.errors(times, sums, np.flatnonzero(self.alive))}
        out |= {("cell", key): self.errors(times, sums, members) for key, members in self.cells.items()}
        for name, members in self.fits.items():
            v, r = sums[:, members, 0], sums[:, members, 1]
            d = self.depth[members]
            lines = Sums(*(x.sum(1) for x in (v, v * d, v * d * d, r, r * d)))
            out["fit", name] = np.stack(lines.constrained(), axis=1)
        return out

    def errors(self, times: np.ndarray, sums: np.ndarray, members: np.ndarray) -> np.ndarray:
        """[BLOCK, 2]: round-weighted and equal-configuration MAPE of some configurations; NaN where none was drawn."""
        drawn, ape, n = times[:, members], sums[:, members, 2], self.count[members]
        with np.errstate(invalid="ignore"):
            return np.stack([ape.sum(1) / (drawn * n).sum(1), (ape / n).sum(1) / drawn.sum(1)], axis=1)

    def resampled(self, random: np.random.Generator, times: np.ndarray) -> np.ndarray:
        """[BLOCK, configs, 3]: each drawn configuration as runs of `ROUNDS` of its rounds, as many rounds as it has."""
        out = np.zeros((*times.shape, 3))
        for c in np.flatnonzero(times.any(0)):
            n = int(self.count[c])
            reached = np.zeros((n + 1, 3))
            np.cumsum(self.rounds[self.start[c] : self.start[c + 1]], axis=0, out=reached[1:])
            draw = np.repeat(np.arange(len(times)), times[:, c])
            full, rest = divmod(n, ROUNDS)
            for length, many in ((ROUNDS, full), (rest, 1)):
                if length and many:
                    runs = reached[length:] - reached[:-length]  # of every start
                    first = (random.random((len(draw), many)) * len(runs)).astype(np.int64)
                    np.add.at(out[:, c], draw, runs.take(first, axis=0).sum(1))
        return out

    def report(self, found: dict[Any, np.ndarray], level: float) -> dict[str, Any]:
        """The intervals of all draws."""

        def errors(prefix: str, values: np.ndarray, members: np.ndarray) -> dict[str, Any]:
            fixed = len(members) < 2 or not self.exchanged[members].any()
            names = (f"{prefix}round_weighted_mape_interval", f"{prefix}equal_config_mape_interval")
            return {name: None if fixed else interval(x, level) for name, x in zip(names, values.T, strict=True)}

        cells = []
        for key, members in self.cells.items():
            values = found["cell", key]
            where = dict(zip(("gpu", "model", "method", "draft_length"), key, strict=True))
            told = {"clusters": len(members), "draws": int(np.isfinite(values[:, 0]).sum())}
            cells.append(where | told | errors("cell_", values, members))
        fits = []
        for name, members in self.fits.items():
            slope, intercept, clipped = found["fit", name].T
            fitted = np.isfinite(slope)
            fixed = not self.exchanged[members].any() or not fitted.any()
            fits.append(
                {"group": name, "clusters": len(members)}
                | {"slope_interval": None if fixed else interval(slope, level)}
                | {"intercept_interval": None if fixed else interval(intercept, level)}
                | {"clipped_draws": int(clipped[fitted].sum()), "singular_draws": int((~fitted).sum())}
            )
        return errors("", found["overall"], np.flatnonzero(self.alive)) | {"cells": cells, "fits": fits}


def interval(values: np.ndarray, level: float) -> list[float] | None:
    """[low, high] with `level` of the numbers inside, NaN left out; None where nothing is left."""
    values = values[np.isfinite(values)]
    tail = 50 * (1 - level)
    return np.percentile(values, [tail, 100 - tail]).tolist() if len(values) else None
