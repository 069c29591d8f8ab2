"""Is the fixed rule right here, in one plain sentence: from the document alone."""

from __future__ import annotations

from typing import Any

from fpmjax.study.reading import formula, number, pooled, span

DOUBTS = ("other_reference", "mixed_scopes", "ratios_too_low", "ratios_too_high", "draft_time_missing", "merged_rounds")
"""Diagnoses after which the answer is rather about the measurement than about the rule."""


def verdict(document: dict[str, Any]) -> str:
    """Whether the fixed rule lies within what the rounds allow, and how far off it is on average.

    What they allow is the joint region of the pooled refit's draws (`fpmjax.study.bootstrap.standing`): a pair may lie
    in both intervals and still fit no draw.
    """
    overall = document["overall"]
    if not overall["rounds"]:
        return "no answer: no round has a reference"
    bias = overall["round_weighted_bias"]
    off = "off by no finite number" if bias is None else f"{number(abs(bias))} % too {'high' if bias >= 0 else 'low'}"
    rule = f"the fixed rule {formula(document['rule'])}"
    fit = pooled(document)
    if fit is None:
        return f"no answer: anchors allow no refit; {rule} is on average {off}"
    found = fit.get("fixed_rule")
    if not found:
        return f"no answer: {rule} is on average {off}; how sure that is, these rounds do not say"
    doubt = any(told["code"] in DOUBTS for told in document["diagnoses"])
    first = "; but first see what to look at" if doubt else ""
    if found["inside"]:
        return f"yes: {rule} is within what your rounds allow; on average it is {off}{first}"
    return f"no: {rule} is outside of what your rounds allow; on average it is {off}{first}"


def meaning(document: dict[str, Any]) -> str:
    """Why that is the answer, and what follows for the user."""
    fit = pooled(document)
    found = fit.get("fixed_rule") if fit else None
    if not fit or not found:
        why = fit and fit.get("no_interval")
        return f"There is no interval{f': {why}' if why else ''}. Measure more configurations before deciding."
    draws = f"{100 * document['intervals']['level']:g} % of the refit's draws"
    if found["inside"]:
        return f"It lies among {draws}, so these rounds cannot tell it from the refit: keep it. A larger study could."
    out = [name for name in ("slope", "intercept") if not found[f"inside_{name}"]]
    where = " and ".join(f"its {name} outside of {span(fit[f'{name}_interval'], 4)}" for name in out)
    where = where or "each coefficient in its interval, but the two together not"
    return (
        f"It lies outside of {draws}, {where}. For this engine take the refit, unless what to look at makes the "
        "measurement doubtful."
    )
