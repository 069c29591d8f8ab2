"""What a study found in about ten lines, for a terminal and for the head of its README; from the document alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fpmjax.study.reading import config_name, formula, line_of, number, pooled


def summary(document: dict[str, Any]) -> list[str]:
    """What a study found, in about ten lines."""
    overall, rule = document["overall"], document["rule"]
    lines = [
        f"scored    {overall['rounds']:,} rounds in {overall['scored_configurations']:,} of "
        f"{overall['configurations']:,} configurations; {overall['unmatched']:,} unmatched; {excluded(overall)}",
        f"          timing scope {', '.join(document['scope']['timing_scope'])}; reference {reference(document)}",
    ]
    if not overall["rounds"]:
        return [*lines, "rule      no round has a reference, so nothing is judged", *diagnosis_lines(document)]
    bounds = document["intervals"] or {}
    lines += [
        f"rule      {formula(rule)}: MAPE {number(overall['round_weighted_mape'])} % round-weighted"
        f"{between(bounds.get('round_weighted_mape_interval'))}, {number(overall['equal_config_mape'])} % "
        f"equal-configuration{between(bounds.get('equal_config_mape_interval'))}",
        f"          bias {signed(overall['round_weighted_bias'])} % round-weighted, "
        f"{signed(overall['equal_config_bias'])} % equal-configuration; P90 {number(overall['p90_round_ape'])} % of "
        f"rounds, {number(overall['p90_config_mape'])} % of configurations",
        f"          worst {number(overall['worst_config']['config_mape'])} %: {config_name(overall['worst_config'])}",
        *refit_lines(document),
    ]
    if document["beside"]:
        measured = document["beside"]["measured"]
        lines.append(
            f"measured  against the measured reference instead: {number(measured['round_weighted_mape'])} % "
            f"round-weighted, {number(measured['equal_config_mape'])} % equal-configuration"
        )
    return lines + diagnosis_lines(document)


def refit_lines(document: dict[str, Any]) -> list[str]:
    fit = pooled(document)
    if fit is None:
        return ["refit     none: anchors are no data for a fit"]
    if not line_of(fit):
        return [
            f"refit     none: one draft length fixes no slope; mean ratio T / F {number(fit['ratio_mean'], 4)}",
        ]
    ends = "no interval: too few configurations"
    if fit.get("slope_interval") and fit.get("intercept_interval"):
        (a, b), (c, d), level = fit["slope_interval"], fit["intercept_interval"], document["intervals"]["level"]
        ends = f"{100 * level:g} % interval: slope {a:.4f}..{b:.4f}, intercept {c:.4f}..{d:.4f}"
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


def reference(document: dict[str, Any]) -> str:
    told = document["reference"]
    return told["mode"] + (" (anchors only)" if told["anchors_only"] else "")


def excluded(counts: dict[str, Any]) -> str:
    """`256 excluded (256 warmup)`"""
    found = counts["excluded"]
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in found.items())
    return f"{sum(found.values()):,} excluded" + (f" ({reasons})" if reasons else "")


def between(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f" ({number(ends[0])}..{number(ends[1])})"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
