"""How far a study's numbers would move with other configurations of the same kind: a cluster bootstrap.

Rounds of one run share its clocks, its graph and its prompts, so ten times the rounds are not ten times the evidence.
Whole configurations are drawn with replacement, as many in each (gpu, model, method) as were measured, and every draw
gets its own means and its own fit.  What is said is descriptive: conditional on the reference as it is and on the
configurations that were tested, it knows nothing of other engines.

Rounds are summed once per configuration, so that the cost of a draw does not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.errors import refuse_option
from fpmjax.inverse import integers
from fpmjax.metrics import show
from fpmjax.study.reading import POOLED, group_name
from fpmjax.study.refit import WEIGHTS, Sums, check_anchors, chosen, plausible, pull, ratio_of

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule
    from fpmjax.study.scored import Scored

DRAWS, LEVEL = 2000, 0.95
BLOCK = 64  # draws that share a generator; fixed, so that no other size shows in a number
ROUNDS = 16  # in a moving block
ROUNDING = 1e-9  # relative: coefficients that differ by less are equal
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
    draft length) and `fits` (pooled, then every model + method).  A draw's refit obeys the constraints that the refit
    does; the draws in which one was active are counted, as are those of a single draft length, which have no refit.

    An interval is None, and `no_interval` says why,
      - where an end of it would be one configuration and no estimate: where a draw that repeats one configuration of
        every stratum, as that of the smallest error does, comes up as often as the tail that ends the interval.  Of m
        configurations it comes up once in m^m draws: 1/4 for two, 1/27 for three, 1/256 for four, so 2.5 % take four;
      - where more draws than that tail had no refit: they say that the slope may be anything, so either end is open.

    Every fit also has `fixed_rule`, where the rule that is judged lies among the draws: see `standing`.

    Raises OptionError: `loss`, `weights`, `draws`, `seed`, `level`, `anchors`.
    """
    chosen("loss", loss, ("rel_l2", "abs_l2"))
    chosen("weights", weights, WEIGHTS)
    check_anchors(scored, anchors)
    count, seed = int(integers("draws", draws, 1)), int(integers("seed", seed, 0))
    if not isinstance(level, float) or not 0 < level < 1:
        refuse_option("level", f"level is {show(level)}", "the share of draws inside, e.g. 0.95")
    clusters = Clusters(scored, scored.predict(rule), loss, weights)
    pair = (float(rule.slope), float(rule.intercept))
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
        **clusters.report(found, level, pair),
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
        sound = plausible(ratio)
        ratio, v = (np.where(sound, x, np.nan) for x in (ratio, v))  # there is no fit with them
        self.unsound = np.bincount(scored.config, ~sound, size) > 0
        with np.errstate(over="ignore"):
            ape = 100 * (np.abs(predicted - scored.measured_ms) / scored.measured_ms)
        self.rounds = np.stack([v, v * ratio, ape], axis=1)  # [n, 3]
        self.start = np.concatenate([[0], np.cumsum(n)])
        self.sums = np.stack([np.bincount(scored.config, x, size) for x in self.rounds.T], axis=1)
        self.count, self.alive = n, n > 0
        self.depth = np.array([config.draft_length for config in scored.configs], np.float64)
        alive = np.flatnonzero(self.alive)
        in_stratum = scored.groups[alive]
        self.strata = [alive[in_stratum == i] for i in np.unique(in_stratum)]
        self.finite = np.isfinite(self.sums[:, 2])
        self.stratum = scored.groups
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
        with np.errstate(invalid="ignore", over="ignore"):
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
        with np.errstate(invalid="ignore", over="ignore"):
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

    def report(self, found: dict[Any, np.ndarray], level: float, pair: tuple[float, float]) -> dict[str, Any]:
        """The intervals of all draws; pair: slope and intercept of the rule that is judged."""
        tail = (1 - level) / 2

        def errors(prefix: str, values: np.ndarray, members: np.ndarray) -> dict[str, Any]:
            why = None if self.finite[members].all() else "an error is no finite number"
            why = why or self.too_few(members, tail)
            names = (f"{prefix}round_weighted_mape_interval", f"{prefix}equal_config_mape_interval")
            ends = {name: None if why else interval(x, level) for name, x in zip(names, values.T, strict=True)}
            return ends | {"no_interval": why}

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
            missed = 1 - float(fitted.mean())
            why = self.unfitted(members) or self.too_few(members, tail)
            if not why and missed > tail:
                why = f"{100 * missed:.0f} % of the draws hold one draft length only, which fixes no slope"
            fits.append(
                {"group": name, "clusters": len(members)}
                | {"slope_interval": None if why else interval(slope, level)}
                | {"intercept_interval": None if why else interval(intercept, level)}
                | {"no_interval": why}
                | {"clipped_draws": int(clipped[fitted].sum()), "singular_draws": int((~fitted).sum())}
                | {"fixed_rule": None if why else standing(slope[fitted], intercept[fitted], pair, level)}
            )
        return errors("", found["overall"], np.flatnonzero(self.alive)) | {"cells": cells, "fits": fits}

    def too_few(self, members: np.ndarray, tail: float) -> str | None:
        """Why resampling these configurations gives no interval, or None."""
        sizes = np.unique(self.stratum[members], return_counts=True)[1].astype(np.float64)
        if not (sizes > 1).any():
            return "every configuration is alone in its GPU, model and method, so resampling changes nothing"
        if float(np.prod(sizes**-sizes)) < tail:
            return None
        return f"{len(members)} configurations are too few to resample: an end would be one of them"

    def unfitted(self, members: np.ndarray) -> str | None:
        """Why no draw of these configurations has a fit, or None."""
        if len(np.unique(self.depth[members])) < 2:
            return "one draft length fixes no slope"
        if self.unsound[members].any():
            return "some T / F is implausible, so nothing is fitted"
        return None


def standing(slope: np.ndarray, intercept: np.ndarray, pair: tuple[float, float], level: float) -> dict[str, Any]:
    """Where a rule lies among the pairs [draws] of a refit.

    inside_slope, inside_intercept: whether each coefficient lies in its own interval.
    distance, limit, inside: the two of them together, which is what counts, for a larger slope goes with a smaller
    intercept: the rule's Mahalanobis distance from the mean of the draws, and the distance that `level` of the draws
    stay below (2.45 for normal ones at 95 %).
    """
    draws, rule = np.stack([slope, intercept], axis=1), np.array(pair)
    bounds = [interval(x, level) or [math.nan] * 2 for x in draws.T]
    room = np.maximum(ROUNDING * np.abs(draws).max(0), 1e-300)  # rounds without noise scatter by rounding
    inside = [low - r <= x <= high + r for (low, high), r, x in zip(bounds, room.tolist(), pair, strict=True)]
    middle, scale = draws.mean(0), np.hypot(draws.std(0), room)
    together = np.mean(np.prod((draws - middle) / scale, axis=1))  # their correlation

    def distance(x: np.ndarray) -> np.ndarray:
        a, b = np.moveaxis((x - middle) / scale, -1, 0)
        left = (b - together * a) ** 2 / max(1 - together**2, ROUNDING)
        return np.sqrt(a * a + left)

    limit = max(float(np.percentile(distance(draws), 100 * level)), 1.0)
    far = float(distance(rule))
    return {
        "inside_slope": inside[0],
        "inside_intercept": inside[1],
        "distance": float(f"{far:.4g}"),
        "limit": float(f"{limit:.4g}"),
        "inside": far <= limit,
    }


def interval(values: np.ndarray, level: float) -> list[float] | None:
    """[low, high] with `level` of the numbers inside, NaN left out; None where nothing is left."""
    values = values[np.isfinite(values)]
    tail = 50 * (1 - level)
    return np.percentile(values, [tail, 100 - tail]).tolist() if len(values) else None
