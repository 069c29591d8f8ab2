"""README.md of an evidence folder, from the document alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fpmjax.study.identity import model_in_words
from fpmjax.study.reading import (
    MAIN,
    POOLED,
    config_name,
    error_interval,
    formula,
    group_name,
    headline,
    line_of,
    number,
    refit_of,
    signed,
    sizes_pooled,
    span,
)
from fpmjax.study.summary import excluded, summary
from fpmjax.study.verdict import meaning, verdict

WORST, MANY = 10, 16  # configurations, and values of a column, that are listed
CODE = "```"


def report(document: dict[str, Any]) -> str:
    """The whole README."""
    parts = [
        f"# Calibration study: {', '.join(document['scope']['study_id'])}",
        f"Is the rule {formula(document['rule'])} for the factor of a speculative round right here? "
        f"{headline(document)}. Every number below comes from `result.json`.",
        f"**{capital(verdict(document))}.** {meaning(document)}",
        "\n".join([CODE, *summary(document), CODE]),
        "![Errors and ratios by draft length](chart.svg)",
        *setup(document),
        *left_out(document),
        *fixed_rule(document),
        *refits(document),
        *splits(document),
        *diagnoses(document),
        *limits(document),
        *rebuild(document),
    ]
    return "\n\n".join(parts) + "\n"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are text."""
    marks = ["---" if i < left else "---:" for i in range(len(headers))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (headers, marks, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def setup(document: dict[str, Any]) -> Iterator[str]:
    names = {
        "gpu": "GPU",
        "tp": "tensor-parallel size",
        "model": "model",
        "method": "drafting method",
        "dtype": "precision",
        "framework": "engine",
        "framework_version": "its version",
        "attention_backend": "attention kernels",
        "timing_scope": "timing scope of latency_ms",
        "topk": "branches of the draft tree",
        "draft_length": "draft lengths d",
        "batch_size": "requests B",
        "initial_context": "initial context",
    }
    scope, told = document["scope"], document["reference"]
    yield "## Setup"
    rows = [[words, listed(scope[name])] for name, words in names.items()]
    rows.append(["reference F((d+1)B, K)", REFERENCES[told["mode"]]])
    rows.append(["scored repetition", "all" if told["repetition"] is None else str(told["repetition"])])
    if told["model"]:
        rows.append(["estimator", model_in_words(told["model"])])
    yield table(["", "studied"], rows, 2)
    protocol = document["inputs"][0].get("sidecar", {}).get("protocol")
    if protocol:
        yield f"Protocol, as the sidecar of the data tells it: {' '.join(str(protocol).split())}"


def listed(values: Sequence[Any]) -> str:
    """The first of many; `result.json` has them all."""
    more = f", and {len(values) - MANY:,} more" if len(values) > MANY else ""
    return ", ".join(map(str, values[:MANY])) + more if values else "unknown"


REFERENCES = {
    "measured": "measured: ordinary rounds of repetition 0 at the same batch, linear in K between their medians, "
    "nothing beyond them",
    "interpolated_batch": "interpolated_batch: linear between measured batches; anchors only, never data for a fit",
    "estimator": "estimator: a model's answers, whose own error is in every number below",
}


def left_out(document: dict[str, Any]) -> Iterator[str]:
    overall = document["overall"]
    yield "## What was left out"
    rows = []
    for kind, words in (("sd", "speculative"), ("stp", "ordinary")):
        counts = document["rows"][kind]
        rows.append([words, f"{counts['rows']:,}", excluded(counts)])
    yield table(["rounds", "in the file", "left out"], rows)
    coverage = overall["coverage"]
    yield (
        f"Of the speculative rounds of {scored_repetition(document)}, {overall['rounds']:,} are "
        f"scored, {overall['unmatched']:,} are unmatched (no reference brackets them) and {excluded(overall)}: a "
        f"coverage of {number(None if coverage is None else 100 * coverage)} %. Configurations with at most one scored "
        f"round: {overall['thin_configurations']:,}; with more than 5 % unmatched: "
        f"{overall['partial_configurations']:,}. No round was left out for the size of its error."
    )
    if document["unmatched"]:
        yield table(
            ["without a reference", "rounds", "looked up at batch", "KV", "measured there"],
            [
                [
                    config_name(entry),
                    f"{entry['unmatched']:,}",
                    f"{entry['widened_batch']:,}",
                    kv_span(entry["kv"]),
                    kv_span(entry["measured_kv"]),
                ]
                for entry in document["unmatched"][:WORST]
            ],
        )
        if len(document["unmatched"]) > WORST:
            yield f"And {len(document['unmatched']) - WORST:,} more configurations, listed in `result.json`."


def scored_repetition(document: dict[str, Any]) -> str:
    asked = document["reference"]["repetition"]
    return "all repetitions" if asked is None else f"repetition {asked}"


def kv_span(ends: Sequence[int] | None) -> str:
    return "nothing" if ends is None else f"{ends[0]:,}..{ends[1]:,}"


STATISTICS = {
    "round_weighted_mape": "MAPE, every round one vote",
    "equal_config_mape": "MAPE, every configuration one vote",
    "round_weighted_bias": "bias, every round one vote",
    "equal_config_bias": "bias, every configuration one vote",
    "wape": "WAPE, every millisecond one vote",
    "p90_round_ape": "P90 of the rounds' errors",
    "p90_config_mape": "P90 of the configurations' MAPEs",
    "max_round_ape": "largest error of a round",
}


def fixed_rule(document: dict[str, Any]) -> Iterator[str]:
    overall, beside = document["overall"], document["beside"]
    if not overall["rounds"]:
        return
    yield f"## The fixed rule: {formula(document['rule'])}"
    bounds = document["intervals"] or {}
    headers = ["statistic", "%", "interval"] + (["% against measured F"] if beside else [])
    if beside:
        yield (
            f"The estimator answers {overall['rounds']:,} rounds; measured references have "
            f"{beside['measured']['rounds']:,} rounds in {beside['measured']['scored_configurations']:,} "
            f"configurations, which need not be the same ones. {common_rounds(beside['common'])}"
        )
    rows = []
    for name, words in STATISTICS.items():
        ends = bounds.get(f"{name}_interval")
        value = signed(overall[name]) if "bias" in name else number(overall[name])
        row = [f"{words} (`{name}`)", value, "-" if ends is None else span(ends)]
        rows.append(row + ([number(beside["measured"][name])] if beside else []))
    yield table(headers, rows)
    headers = [
        "GPU",
        "model + method",
        "d",
        "rounds",
        "round-weighted MAPE %",
        "interval",
        "equal-configuration MAPE %",
    ]
    rows = []
    for cell in document["cells"]:
        ends = error_interval(cell)
        rows.append(
            [
                cell["gpu"],
                group_name(cell),
                str(cell["draft_length"]),
                f"{cell['rounds']:,}",
                number(cell["cell_round_weighted_mape"]),
                "-" if ends is None else span(ends),
                number(cell["cell_equal_config_mape"]),
                signed(cell["cell_round_weighted_bias"]),
            ]
        )
    yield table([*headers, "round-weighted bias %"], rows, 2)
    some = [c for c in document["configurations"] if c["rounds"]]
    worst = sorted(some, key=lambda c: -math.inf if c["config_mape"] is None else -c["config_mape"])[:WORST]
    rows = [
        [
            config_name(c),
            f"{c['rounds']:,}",
            number(c["config_mape"]),
            signed(c["config_bias"]),
            number(c["config_ratio_median"], 4),
        ]
        for c in worst
    ]
    yield f"The {len(worst)} configurations with the largest MAPE, of {len(some):,}:"
    yield table(["configuration", "rounds", "MAPE %", "bias %", "median T / F"], rows)


def common_rounds(common: dict[str, Any]) -> str:
    """The two references on the rounds that have both."""
    if not common["rounds"]:
        return "No round has both, so the estimator's own error is unknown."
    one, other, error = common["measured"], common["estimator"], common["estimator_error"]
    return (
        f"On the {common['rounds']:,} rounds in {common['configurations']:,} configurations that have both, the rule "
        f"is off by {number(one['round_weighted_mape'])} % by the measured reference (bias "
        f"{signed(one['round_weighted_bias'])} %) and by {number(other['round_weighted_mape'])} % by the estimator "
        f"(bias {signed(other['round_weighted_bias'])} %), round-weighted. There the estimator itself is off by "
        f"{number(error['round_weighted_mape'])} % (bias {signed(error['round_weighted_bias'])} %, at most "
        f"{number(error['max_round_ape'])} %)."
    )


def refits(document: dict[str, Any]) -> Iterator[str]:
    found = document["refits"]
    if not found:
        return
    yield "## Refits"
    groups = {fit["group"] for fit in found}
    found = [fit for fit in found if fit["group"] == POOLED or len(groups) > 2]  # one group alone is all of it
    rows = []
    for fit in found:
        name = f"{fit['loss']}, {fit['weights']}"
        if not line_of(fit):
            rows.append([fit["group"], name, fit["status"], "-", "-", number(fit["ratio_mean"], 4), "-", "-"])
            continue
        rows.append(
            [
                fit["group"],
                name,
                fit["status"],
                coefficient(fit, "slope"),
                coefficient(fit, "intercept"),
                number(fit["ratio_mean"], 4),
                number(fit["round_weighted_mape"]),
                number(fit["equal_config_mape"]),
            ]
        )
    headers = ["group", "loss, weights", "status", "slope", "intercept", "mean T / F", "round-weighted MAPE %"]
    yield table([*headers, "equal-configuration MAPE %"], rows, 3)
    yield (
        f"Errors are on the rounds that were fitted. The line in the chart, and a rule file, are `{MAIN[0]}` with "
        f"`{MAIN[1]}` weights; intervals are given for that one. A group is a model with its method, for with one pair "
        "each the two cannot be told apart."
    )
    if any(fit["status"] == "clipped" for fit in found):
        yield "`clipped`: the best pair of all has a negative coefficient, which no round can have."
    bounded = [fit for fit in found if (fit["loss"], fit["weights"]) == MAIN]
    for fit in bounded:
        if why := fit.get("no_interval"):
            yield f"No interval of {fit['group']}: {why}."
        elif fit.get("singular_draws"):
            yield (
                f"Of the {document['intervals']['draws']:,} draws of {fit['group']}, {fit['singular_draws']:,} hold "
                "one draft length only and have no fit; the interval is of the others."
            )
    if any(fit["status"] == "implausible" for fit in found):
        yield "`implausible`: some T / F is no ratio of a round, see what to look at; nothing was fitted."
    if any(fit["status"] == "singular" for fit in found):
        yield "`singular`: one draft length says nothing about a slope; only the mean ratio is known."


def coefficient(fit: dict[str, Any], name: str) -> str:
    ends = fit.get(f"{name}_interval")
    return number(fit[name], 4) + ("" if ends is None else f" ({span(ends, 4)})")


def splits(document: dict[str, Any]) -> Iterator[str]:
    rows = [
        [row["split"], row["held_out"], f"{row['rounds']:,}"]
        + [
            number(row[name].get("round_weighted_mape")) if row[name] else "-"
            for name in ("fixed", "pooled", "per_group")
        ]
        for row in document["splits"]
    ]
    if rows:
        yield "## On rounds that were not fitted"
        yield table(["split", "held out", "rounds", "fixed rule", "pooled refit", "refit per group"], rows, 2)
        yield "Round-weighted MAPE in percent of what is held out; `-` where nothing could be fitted without it."


def diagnoses(document: dict[str, Any]) -> Iterator[str]:
    if not document["diagnoses"]:
        return
    yield "## What to look at"
    lines = []
    for told in document["diagnoses"]:
        lines.append(f"- **{told['code']}**: {told['what']}. {told['help']}.")
        lines += [f"  - {place}" for place in told["where"] if place not in told["what"]]
        if (more := told["places"] - len(told["where"])) > 0:
            lines.append(f"  - and {more:,} more")
    yield "\n".join(lines)


def limits(document: dict[str, Any]) -> Iterator[str]:
    yield "## Limits"
    lines = [
        "Configurations, not rounds, are resampled: rounds of one run are alike. The interval is descriptive: it is "
        "conditional on the frozen reference and the tested configurations, and says nothing of other engines.",
        "MAPE is asymmetric: over-prediction is unbounded, under-prediction ends at 100 %. Read it with the bias.",
        "A ratio T / F is of one timing scope. Another clock, or the same one around more of the engine, moves the "
        "intercept by as much as the errors above.",
        "The latency is of a whole round; how many tokens a round yields is not part of it.",
    ]
    if document["reference"]["mode"] == "estimator":
        lines.append("The reference is an estimator: its own error is in every number, and in the refit.")
    if document["reference"]["anchors_only"]:
        lines.append(
            "The reference is interpolated between batches: these are anchors, and nothing was fitted to them."
        )
    if document["intervals"] is None:
        lines.pop(0)
    elif document["intervals"]["strata_of_one"]:
        lines.append(
            f"{document['intervals']['strata_of_one']:,} of {document['intervals']['strata']:,} strata (GPU, model, "
            "method) hold one configuration: resampling changes nothing there, and the intervals leave it out."
        )
    if pools := sizes_pooled(document):
        lines.append(f"A cell is of a GPU, model, method and draft length: {pools}. The split by tp tells them apart.")
    yield "\n".join(f"- {line}" for line in lines)


def rebuild(document: dict[str, Any]) -> Iterator[str]:
    yield "## Rebuild"
    command, model = document["command"], document["reference"]["model"]
    in_python = command.startswith("fpmjax.run_study(")
    if in_python:
        yield (
            f"Made in Python, with a model of its own ({model_in_words(model)}), which no command names. In this "
            "folder, with that `model` and the same version of fpmjax, this writes the same bytes again:"
        )
    else:
        needed = "" if model is None or " --model embedded" in command else ", and with the estimator named above in it"
        yield f"In this folder, with the same version of fpmjax{needed}, this writes the same bytes again:"
    yield f"{CODE}{'python' if in_python else 'sh'}\n{command}\n{CODE}"
    rows = [[f"`{entry['file']}`", f"{entry['bytes']:,}", f"`{entry['sha256']}`"] for entry in document["inputs"]]
    yield table(["input", "bytes", "sha256"], rows)
    figures = "" if "--no-figures" in command else " With matplotlib installed, PNG figures are written beside it."
    yield f"Made by fpmjax {document['fpmjax']}.{figures}"
    fit = refit_of(document, POOLED)
    if fit and line_of(fit):
        how = "save it with `.save_rule('rule.json')`" if in_python else "add `--rule-out rule.json` to that command"
        yield (
            f"To estimate with the refit instead of the published rule, {how}, and add `--rule rule.json` to "
            "`fpmjax estimate`."
        )
