"""What a study found in about ten lines, for a terminal and for the head of its README; from the document alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpmjax.metrics import show
from fpmjax.study.identity import reference_in_words
from fpmjax.study.reading import config_name, formula, line_of, number, pooled, signed, sizes_pooled, span
from fpmjax.study.verdict import verdict

IGNORED = 6  # columns that are named


def summary(document: dict[str, Any]) -> list[str]:
    """What a study found, in about ten lines."""
    overall, rule = document["overall"], document["rule"]
    lines = [
        f"scored    {overall['rounds']:,} rounds in {overall['scored_configurations']:,} of "
        f"{overall['configurations']:,} configurations; {overall['unmatched']:,} unmatched; {excluded(overall)}",
        f"          timing scope {', '.join(document['scope']['timing_scope'])}; reference "
        f"{reference_in_words(document)}",
        *ignored_lines(document),
    ]
    if pools := sizes_pooled(document):
        lines.append(f"          {pools} in a cell, which is of a GPU, model, method and draft length")
    if not overall["rounds"]:
        return [*lines, "rule      no round has a reference, so nothing is judged", *diagnosis_lines(document)]
    bounds = document["intervals"] or {}
    lines += [
        f"right?    {verdict(document)}",
        f"rule      {formula(rule)}: MAPE {number(overall['round_weighted_mape'])} % round-weighted"
        f"{between(bounds.get('round_weighted_mape_interval'))}, {number(overall['equal_config_mape'])} % "
        f"equal-configuration{between(bounds.get('equal_config_mape_interval'))}",
        f"          bias {signed(overall['round_weighted_bias'])} % round-weighted, "
        f"{signed(overall['equal_config_bias'])} % equal-configuration; P90 {number(overall['p90_round_ape'])} % of "
        f"rounds, {number(overall['p90_config_mape'])} % of configurations",
        f"          worst {number(overall['worst_config']['config_mape'])} %: {config_name(overall['worst_config'])}",
        *refit_lines(document),
    ]
    return lines + beside_lines(document) + diagnosis_lines(document)


def beside_lines(document: dict[str, Any]) -> list[str]:
    """With a model as reference: the rule by the measured one, and both on the same rounds."""
    if not document["beside"]:
        return []
    measured, common = document["beside"]["measured"], document["beside"]["common"]
    lines = [
        f"measured  against the measured reference, which {measured['rounds']:,} rounds in "
        f"{measured['scored_configurations']:,} configurations have: {number(measured['round_weighted_mape'])} % "
        f"round-weighted, {number(measured['equal_config_mape'])} % equal-configuration"
    ]
    if not common["rounds"]:
        return [*lines, "          no round has both references"]
    one, other = (number(common[name]["round_weighted_mape"]) for name in ("measured", "estimator"))
    error = common["estimator_error"]
    return [
        *lines,
        f"          on the {common['rounds']:,} rounds that have both: {one} % by the measured one, {other} % by the "
        f"estimator, whose own error is {number(error['round_weighted_mape'])} % "
        f"(bias {signed(error['round_weighted_bias'])} %)",
    ]


def ignored_lines(document: dict[str, Any]) -> list[str]:
    """Columns of the file that nothing was made of."""
    names = document["inputs"][0].get("ignored_columns", [])
    told = [name if name.isprintable() and 0 < len(name) <= 40 else show(name) for name in names]
    more = f" and {len(told) - IGNORED:,} more" if len(told) > IGNORED else ""
    return [f"ignored   columns {', '.join(told[:IGNORED])}{more}"] if told else []


def refit_lines(document: dict[str, Any]) -> list[str]:
    fit = pooled(document)
    if fit is None:
        return ["refit     none: anchors are no data for a fit"]
    if not line_of(fit):
        if fit["status"] == "implausible":
            return ["refit     none: some T / F is implausible, see below"]
        return [
            f"refit     none: one draft length fixes no slope; mean ratio T / F {number(fit['ratio_mean'], 4)}",
        ]
    ends = f"no interval: {fit.get('no_interval') or 'too few configurations'}"
    if fit.get("slope_interval") and fit.get("intercept_interval"):
        a, b = (span(fit[f"{name}_interval"], 4) for name in ("slope", "intercept"))
        ends = f"{100 * document['intervals']['level']:g} % interval: slope {a}, intercept {b}"
        if fit.get("singular_draws"):
            ends += f"; {fit['singular_draws']:,} of {document['intervals']['draws']:,} draws had no fit"
    clipped = ", clipped at its limit" if fit["status"] == "clipped" else ""
    return [
        f"refit     {formula(fit)}{clipped} ({ends})",
        f"          MAPE {number(fit['round_weighted_mape'])} % round-weighted, {number(fit['equal_config_mape'])} % "
        "equal-configuration, on the rounds that it was fitted to",
    ]


def diagnosis_lines(document: dict[str, Any]) -> list[str]:
    found = document["diagnoses"]
    if not found:
        return ["look at   nothing: no diagnosis applies"]
    return [f"{'look at  ' if i == 0 else '         '} {told['what']}" for i, told in enumerate(found)]


def excluded(counts: dict[str, Any]) -> str:
    """`256 excluded (256 warmup)`"""
    found = counts["excluded"]
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in found.items())
    return f"{sum(found.values()):,} excluded" + (f" ({reasons})" if reasons else "")


def between(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" ({span(ends)})"
