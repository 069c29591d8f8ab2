"""Does a refit hold on rounds that it has not seen: fitted on one part, scored on what was held out.

repetition       fitted on the earlier repetition, scored on the later one
gpu              every GPU in turn
tp               every tensor-parallel size in turn; cells and strata pool them
model + method   every pair in turn; a refit per group has seen nothing of it then
draft_length     every depth in turn; the deepest is extrapolation
initial_context  every context in turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fpmjax.study.reading import group_name
from fpmjax.study.refit import refit
from fpmjax.study.scored import Config
from fpmjax.study.statistics import by_config, errors, finite, quiet

if TYPE_CHECKING:
    from fpmjax.rule import SpeculativeRule
    from fpmjax.study.scored import Scored

# Split -> what configurations are told apart by, and how the part held out is called.
LEAVE_OUT: dict[str, tuple[Callable[[Config], Any], Callable[[Any], str]]] = {
    "gpu": (lambda c: c.gpu, str),
    "tp": (lambda c: c.tp, lambda n: f"TP{n}"),
    "model + method": (lambda c: group_name(c._asdict()), str),
    "draft_length": (lambda c: c.draft_length, lambda d: f"d = {d}"),
    "initial_context": (lambda c: c.initial_context, lambda n: f"{n:,} tokens"),
}


def splits(
    scored: Scored,
    rule: SpeculativeRule,
    *,
    earlier: Scored | None = None,
    loss: str = "rel_l2",
    weights: str = "round",
    anchors: bool = False,
) -> list[dict[str, Any]]:
    """Every split that the rounds allow, in the order of the module; one with nothing to fit or to score is left out.

    earlier: rounds of an earlier repetition, scored by themselves; None: those of the first of several in `scored`.
    loss, weights, anchors: as `refit` takes them.

    A row says `split`, `held_out`, `rounds` and `configurations`, and of `fixed` (the rule), `pooled` (one refit) and
    `per_group` (one of each model + method) the errors on what was held out.  `pooled` and `per_group` hold their
    pairs too; each is None where some held-out round has no pair, so that the numbers of a row are of the same rounds.

    Raises OptionError as `refit` does.
    """
    options = {"loss": loss, "weights": weights, "anchors": anchors}
    parts = [*repetitions(scored, earlier), *left_out(scored)]
    return [row(*part, rule, options) for part in parts]


def repetitions(scored: Scored, earlier: Scored | None) -> Iterator[tuple[str, str, Scored, Scored]]:
    """(split, held out, fitted, scored)"""
    found = np.unique(scored.repetition).tolist()
    if earlier is None and len(found) > 1:
        first = scored.repetition == found[0]
        earlier, scored, found = scored.where(first), scored.where(~first), found[1:]
    if earlier is not None and len(earlier) and len(scored):
        yield "repetition", f"repetition {', '.join(map(str, found))}", earlier, scored


def left_out(scored: Scored) -> Iterator[tuple[str, str, Scored, Scored]]:
    """(split, held out, fitted, scored)"""
    for split, (key, name) in LEAVE_OUT.items():
        keys = [key(config) for config in scored.configs]
        there = sorted({keys[i] for i in np.flatnonzero(scored.count > 0)})
        for one in there if len(there) > 1 else ():
            held = np.array([k == one for k in keys])[scored.config]
            yield split, name(one), scored.where(~held), scored.where(held)


def row(
    split: str, held_out: str, seen: Scored, held: Scored, rule: SpeculativeRule, options: dict[str, Any]
) -> dict[str, Any]:
    fit = refit(seen, **options)
    told = {"split": split, "held_out": held_out, "rounds": len(held), "configurations": int((held.count > 0).sum())}
    pair = {"slope": fit.slope, "intercept": fit.intercept, "status": fit.status}
    return told | {
        "fixed": of(held, held.predict(rule)),
        "pooled": pair | of(held, fit.predict(held)) if fit.fitted else None,
        "per_group": per_group(seen, held, options),
    }


def per_group(seen: Scored, held: Scored, options: dict[str, Any]) -> dict[str, Any] | None:
    """The errors where every model + method has a refit of its own."""
    predicted, fits = np.full(len(held), np.nan), []
    of_seen, of_held = (np.array([group_name(c._asdict()) for c in s.configs], object) for s in (seen, held))
    for name in sorted(set(of_held[held.count > 0].tolist())):
        fit = refit(seen.where((of_seen == name)[seen.config]), **options)
        if not fit.fitted:
            return None
        here = (of_held == name)[held.config]
        predicted[here] = fit.predict(held)[here]
        fits.append({"group": name, "slope": fit.slope, "intercept": fit.intercept, "status": fit.status})
    return {"fits": fits} | of(held, predicted)


def of(held: Scored, predicted: np.ndarray) -> dict[str, float | None]:
    """Both MAPEs and both biases, in percent."""
    found = errors(predicted, held.measured_ms)
    with quiet():
        mape, bias = (finite(x[held.count > 0].mean()) for x in by_config(held, predicted))
    rounds = {name: found[name] for name in ("round_weighted_mape", "round_weighted_bias")}
    return rounds | {"equal_config_mape": mape, "equal_config_bias": bias}
