"""With a model as reference: what the measured one says of the same rule, and how wrong the model itself is.

An estimator adds its error to the rule's.  Where both references have a round, the two are told apart on the same
rounds; a comparison of different rounds would say nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fpmjax.errors import OptionError
from fpmjax.rule import SpeculativeRule
from fpmjax.study.read import Study
from fpmjax.study.scored import Scored, score
from fpmjax.study.statistics import errors, statistics

NAMES = ("rounds", "scored_configurations", "round_weighted_mape", "round_weighted_bias", "equal_config_mape")
NAMES += ("equal_config_bias",)


def beside(
    study: Study, scored: Scored, rule: SpeculativeRule, repetition: int | None, warmup: int
) -> dict[str, Any] | None:
    """scored: rounds with the model's reference.  None for another reference, and where no round has a measured one.

    measured: the statistics on every round that has a measured reference.
    common: on the rounds that have both, `measured` and `estimator`, the rule's errors by each reference, and
        `estimator_error`, of the model's F against the measured one, a round each.
    """
    if scored.reference != "estimator":
        return None
    try:
        other = score(study, repetition=repetition, warmup=warmup)
    except OptionError:
        return None
    if not len(other):
        return None
    assert scored.row is not None and other.row is not None
    one, both = scored.where(np.isin(scored.row, other.row)), other.where(np.isin(other.row, scored.row))
    found = {name: statistics(x, x.predict(rule)) for name, x in {"measured": both, "estimator": one}.items()}
    common: dict[str, Any] = {"rounds": len(both), "configurations": int((both.count > 0).sum())}
    common |= {name: {key: row[key] for key in NAMES} for name, row in found.items()}
    common["estimator_error"] = errors(one.reference_ms, both.reference_ms)
    return {"measured": statistics(other, other.predict(rule)), "common": common}
