"""Errors of predictions against measured rounds: every number says in its name what has one vote in it.

`round_weighted_*` and `*_round_*`   every scored round
`equal_config_*` and `*_config_*`    every configuration with a scored round
`wape`                               every measured millisecond

Percent throughout; over-prediction is positive.  An absolute percentage error is unbounded above and ends at 100 % for
under-prediction, so a mean of them belongs beside its bias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fpmjax.study.scored import Scored

PARTIAL = 0.05  # share of unmatched rounds above which a configuration is only partly seen
PERCENTILE = 90
TIED = 1e-9  # configurations that differ by less, relatively, differ by rounding: the first is the worst


def errors(predicted: Any, measured: Any) -> dict[str, Any]:
    """Of two float64 [n], one vote per entry; None in place of every number where n is 0, and of one beyond float64."""
    p, t = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    if not len(t):
        return {"rounds": 0, **dict.fromkeys(ROUND_STATISTICS)}
    signed = percent(p, t)
    ape = np.abs(signed)
    with quiet():
        return {"rounds": len(t)} | {
            "round_weighted_mape": finite(ape.mean()),
            "round_weighted_bias": finite(signed.mean()),
            "wape": finite(100.0 * (np.abs(p - t).sum() / t.sum())),
            "p90_round_ape": finite(np.percentile(ape, PERCENTILE)),
            "max_round_ape": finite(ape.max()),
        }


def quiet() -> np.errstate:
    """Where what is not finite is told as None, and needs no warning."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def percent(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """float64 [n], signed errors; infinite where a measured latency is too small to divide by."""
    with np.errstate(over="ignore"):
        return 100.0 * ((predicted - measured) / measured)


def finite(value: Any) -> float | None:
    """A number of a document: None where latencies that none can be left no finite one; a diagnosis names them."""
    return float(value) if math.isfinite(value) else None


ROUND_STATISTICS = ("round_weighted_mape", "round_weighted_bias", "wape", "p90_round_ape", "max_round_ape")


def by_config(scored: Scored, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(config_mape, config_bias), float64 [configs]; NaN without a scored round."""
    signed = percent(predicted, scored.measured_ms)
    with np.errstate(invalid="ignore", over="ignore"):
        return tuple(  # pyright: ignore[reportReturnType]
            np.bincount(scored.config, x, len(scored.configs)) / scored.count for x in (np.abs(signed), signed)
        )


def statistics(scored: Scored, predicted: np.ndarray) -> dict[str, Any]:
    """Everything over all configurations: counts, coverage, errors, the worst configuration.

    predicted: float64 [n], milliseconds, for example `scored.predict(rule)`.
    """
    mape, bias = by_config(scored, predicted)
    some = scored.count > 0
    document = marks(scored, np.ones_like(some)) | counts(scored, np.arange(len(scored.configs)))
    document |= errors(predicted, scored.measured_ms)
    if not some.any():
        return document | dict.fromkeys(("equal_config_mape", "equal_config_bias", "p90_config_mape", "worst_config"))
    with quiet():
        means = [finite(x) for x in (mape[some].mean(), bias[some].mean(), np.percentile(mape[some], PERCENTILE))]
    worst = int(np.argmax(mape >= np.nanmax(mape) * (1 - TIED)))  # the first: configurations are sorted
    return document | {
        **dict(zip(("equal_config_mape", "equal_config_bias", "p90_config_mape"), means, strict=True)),
        "worst_config": {"config_mape": finite(mape[worst]), **scored.configs[worst]._asdict()},
    }


def cells(scored: Scored, predicted: np.ndarray) -> list[dict[str, Any]]:
    """One row per (gpu, model, method, draft_length), sorted; None where nothing was scored.

    tensor_parallel_sizes: those that the cell pools, for they are no part of its key.
    """
    mape, bias = by_config(scored, predicted)
    rows = []
    round_cell = scored.cells[scored.config]
    for i, (gpu, model, method, depth) in enumerate(scored.cell_keys):
        here = scored.cells == i
        some = here & (scored.count > 0)
        rounds = round_cell == i
        found = errors(predicted[rounds], scored.measured_ms[rounds])
        with quiet():
            means = [finite(x[some].mean()) if some.any() else None for x in (mape, bias)]
        rows.append(
            {"gpu": gpu, "model": model, "method": method, "draft_length": depth}
            | {"tensor_parallel_sizes": sorted({scored.configs[c].tp for c in np.flatnonzero(here)})}
            | marks(scored, here)
            | counts(scored, np.flatnonzero(here))
            | {f"cell_{name}": found[name] for name in ROUND_STATISTICS}
            | {"cell_equal_config_mape": means[0], "cell_equal_config_bias": means[1]}
        )
    return rows


def configurations(scored: Scored, predicted: np.ndarray) -> list[dict[str, Any]]:
    """One row per configuration, in the order of `scored.configs`; None where nothing was scored.

    config_ratio_median: the median of T / F over its rounds.
    """
    mape, bias = by_config(scored, predicted)
    with quiet():
        ratio = medians(scored.measured_ms / scored.reference_ms, scored.config, scored.count)
    lean, partly = thin(scored), partial(scored)
    each = zip(mape.tolist(), bias.tolist(), ratio.tolist(), strict=True)
    rows = []
    for i, (config, numbers) in enumerate(zip(scored.configs, each, strict=True)):
        names = ("config_mape", "config_bias", "config_ratio_median")
        found = {name: finite(x) if scored.count[i] else None for name, x in zip(names, numbers, strict=True)}
        flags = {"thin": bool(lean[i]), "partial": bool(partly[i])}
        rows.append(config._asdict() | counts(scored, np.array([i])) | found | flags)
    return rows


def counts(scored: Scored, configs: np.ndarray) -> dict[str, Any]:
    """Of the configurations [k] by index: their rounds scored, unmatched and excluded, and the share scored."""
    excluded = {reason: int(n[configs].sum()) for reason, n in scored.excluded.items()}
    rounds, unmatched = int(scored.count[configs].sum()), int(scored.unmatched[configs].sum())
    total = rounds + unmatched + sum(excluded.values())
    return {
        "rounds": rounds,
        "unmatched": unmatched,
        "excluded": {reason: n for reason, n in excluded.items() if n},
        "coverage": rounds / total if total else None,
    }


def marks(scored: Scored, configs: np.ndarray) -> dict[str, int]:
    """How many configurations a mask [configs] has, and how many of them have rounds, too few, or unmatched ones."""
    return {
        "configurations": int(configs.sum()),
        "scored_configurations": int((configs & (scored.count > 0)).sum()),
        "thin_configurations": int((configs & thin(scored)).sum()),
        "partial_configurations": int((configs & partial(scored)).sum()),
    }


def thin(scored: Scored) -> np.ndarray:
    """bool [configs]: no scored round, or one."""
    return scored.count <= 1


def partial(scored: Scored) -> np.ndarray:
    """bool [configs]: more than 5 % of the rounds that were looked up have no reference."""
    return scored.unmatched > PARTIAL * (scored.unmatched + scored.count)


def medians(values: np.ndarray, group: np.ndarray, count: np.ndarray) -> np.ndarray:
    """float64 [groups], the median of the values [n] of each group, NaN for an empty one; count: of each group."""
    ordered = np.append(values[np.lexsort((values, group))], np.nan)
    start = np.append(0, np.cumsum(count))[:-1]
    # Halved before the sum, which is exact and does not overflow.
    middle = ordered[np.minimum(start + (count - 1) // 2, len(values))] / 2 + ordered[start + count // 2] / 2
    return np.where(count > 0, middle, np.nan)
