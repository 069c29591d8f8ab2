"""`run_study`: a file of measured rounds becomes one document, and a folder that can be kept as evidence.

The document is plain JSON values.  Everything that is shown, the report and the charts, is made of it alone, and it is
the same to the last digit for the same rounds and seed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpmjax.errors import refuse_option
from fpmjax.metrics import as_index, show
from fpmjax.progress import Progress
from fpmjax.rule import LONGEST_PROVENANCE, PUBLISHED, RuleInterval, SpeculativeRule, inside
from fpmjax.rule_file import rule_text
from fpmjax.speculative import check_rule
from fpmjax.study.beside import beside
from fpmjax.study.bootstrap import DRAWS, bootstrap
from fpmjax.study.diagnose import diagnose
from fpmjax.study.exclude import WARMUP
from fpmjax.study.folder import RULE, write_folder
from fpmjax.study.identity import reference_in_words
from fpmjax.study.parts import (
    data_name,
    inputs_of,
    kept_files,
    models_of,
    refits_of,
    residuals,
    rounded,
    rows_of,
    scope_of,
)
from fpmjax.study.read import Study, read_study
from fpmjax.study.reading import MAIN, POOLED, headline, refit_of
from fpmjax.study.refit import LOSSES, WEIGHTS, refuse_unfitted
from fpmjax.study.scored import Scored, score
from fpmjax.study.splits import splits
from fpmjax.study.statistics import cells, configurations, statistics
from fpmjax.study.verdict import verdict

FORMAT, VERSION = "fpmjax calibration study", 1
SEED, MOST_DRAWS = 0, 1_000_000
KEYS = ("format", "version", "fpmjax", "command", "inputs", "scope", "reference", "rows", "rule", "overall", "beside")
KEYS += ("refits", "intervals", "splits", "diagnoses", "cells", "configurations", "residuals", "unmatched")
"""Of the document, in the order in which they are written: what is asked first comes first."""
MOST_TOLD = 100  # values of each column that a rule file repeats
AS_GIVEN = ("inputs",)  # whose numbers are counts, and those of the sidecar, which are not ours to round


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult:
    """What a study found.

    document: all of it, plain JSON values, numbers to nine digits; its keys are `KEYS`.
    files: name in the folder -> bytes of every input that is kept there.
    """

    document: dict[str, Any]
    files: Mapping[str, bytes]

    def __repr__(self) -> str:
        return f"StudyResult({headline(self.document)}; is the rule right: {verdict(self.document).partition(':')[0]})"

    def summary(self) -> str:
        """What the command prints: the verdict, errors, refit and diagnoses in about ten lines."""
        from fpmjax.study.summary import summary

        return "\n".join(summary(self.document))

    @property
    def refit(self) -> dict[str, Any] | None:
        """The pooled refit as the document has it; None for anchors, and without scored rounds."""
        return refit_of(self.document)

    def rule(self, group: str = POOLED) -> SpeculativeRule:
        """A refit as a rule, with its provenance and its interval.

        group: `pooled`, or the `model + method` of one group.

        Raises OptionError: `group` for one that is not there, `singular` or `implausible` where nothing was fitted.
        """
        return rule_of(self.document, group)

    def save_rule(self, path: str | os.PathLike[str], group: str = POOLED) -> None:
        """Write that rule as a file for `--rule`; SpeculationError `rule_file` where it cannot be written."""
        from fpmjax.rule_file import save_rule

        save_rule(self.rule(group), path, study=origin_of(self.document, group))

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False, figures: bool | None = None) -> Path:
        """Write the evidence folder; see `fpmjax.study.folder.write_folder`."""
        return write_folder(self, folder, overwrite=overwrite, figures=figures)

    def json(self) -> str:
        """The document as `result.json` holds it."""
        return json.dumps(self.document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def run_study(
    study: Any,
    *,
    rule: SpeculativeRule | None = None,
    reference: str = "measured",
    model: Any = None,
    repetition: int | None = 1,
    warmup: int = WARMUP,
    draws: int = DRAWS,
    seed: int = SEED,
    progress: bool = True,
    options: Sequence[tuple[str, str]] = (),
) -> StudyResult:
    """Score a rule against measured rounds, refit it, and say how sure that is.

    study: what `read_study` takes, or what it returned.
    rule: the fixed rule that is judged; None is the published one.
    reference: where F comes from: `measured`, `estimator` (then `model` is a model, or {(gpu, tp, model): one}), or
        `interpolated_batch` for public anchors, which are scored and never fitted.
    repetition: of the speculative rounds that are scored, None for all; warmup: rounds left out at the start of every
        run.
    draws, seed: of the cluster bootstrap.
    options: more (flag, value) of `fpmjax calibrate`, which the recorded command repeats; "" for a flag without one.

    Raises OptionError as `read_study`, `score` and `bootstrap` do, and SpeculationError (`rule`).
    """
    check_rule(rule)
    if (as_index(draws) or 0) > MOST_DRAWS:
        refuse_option("draws", f"draws is {show(draws)}", f"2,000 do; at most {MOST_DRAWS:,}")
    fixed = rule or PUBLISHED
    study = study if isinstance(study, Study) else read_study(study, anchors=reference == "interpolated_batch")
    check_anchors(study, reference)
    scored = score(study, reference=reference, model=model, repetition=repetition, warmup=warmup)
    predicted, files, data = scored.predict(fixed), kept_files(study), data_name(study)
    asked = {"reference": reference, "repetition": repetition, "warmup": warmup, "draws": draws, "seed": seed}
    if rule is not None:
        files[RULE] = rule_text(rule).encode()
        asked["rule"] = RULE
    from fpmjax import __version__

    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "fpmjax": __version__,
        "command": command_of(data, asked, options),
        "inputs": inputs_of(study, files),
        "scope": scope_of(study),
        "reference": {"mode": reference, "anchors_only": scored.anchors_only, "repetition": repetition}
        | {"warmup": warmup, "model": None if model is None else models_of(model)},
        "rows": rows_of(study, warmup),
        "rule": fixed.document(),
        "overall": statistics(scored, predicted),
        "beside": beside(study, scored, fixed, repetition, warmup),
        "cells": cells(scored, predicted),
        "configurations": configurations(scored, predicted),
        "residuals": residuals(scored, predicted),
        "unmatched": scored.missing,
    }
    document |= judged(document, study, scored, fixed, asked, model, progress)
    return StudyResult({name: document[name] if name in AS_GIVEN else rounded(document[name]) for name in KEYS}, files)


def check_anchors(study: Study, reference: str) -> None:
    """OptionError `study_reference` for rows without a context that are no anchors here: no command would read them."""
    unsaid = study.columns["initial_context"] < 0
    if reference != "interpolated_batch" and unsaid.any():
        refuse_option(
            "study_reference",
            f"{study.label}, {study.place(int(unsaid.argmax()))} has no initial_context",
            "anchors without a context have the reference interpolated_batch only",
        )


def judged(
    document: dict[str, Any],
    study: Study,
    scored: Scored,
    fixed: SpeculativeRule,
    asked: Mapping[str, Any],
    model: Any,
    progress: bool,
) -> dict[str, Any]:
    """Refits, intervals and splits, which anchors do not have; and what looks wrong with the measurements."""
    seen = diagnose(study, scored, document["reference"]["model"])
    if scored.anchors_only or not len(scored):
        return {"refits": [], "intervals": None, "splits": [], "diagnoses": seen}
    with Progress("resampling", asked["draws"], unit="draws") if progress else NO_BAR as bar:
        loss, weights = MAIN
        found = bootstrap(
            scored, fixed, loss=loss, weights=weights, draws=asked["draws"], seed=asked["seed"], progress=bar
        )
    bounds = {place(cell): cell for cell in found.pop("cells")}
    for cell in document["cells"]:
        more = bounds.get(place(cell), {})
        cell |= {name: more.get(name) for name in CELL_INTERVALS}
    refits, total = [], len(LOSSES) * len(WEIGHTS) * len(found["fits"])
    with Progress("fitting", total, unit="fits") if progress else NO_BAR as bar:
        for fit in refits_of(scored):
            refits.append(fit)
            if bar is not None:
                bar(len(refits))
    for fit in found.pop("fits"):
        main = refit_of({"refits": refits}, fit["group"])
        main |= {name: x for name, x in fit.items() if name != "group"}
    held_out = splits(scored, fixed, earlier=earlier_of(study, asked, model), loss=loss, weights=weights)
    return {"refits": refits, "intervals": found, "splits": held_out, "diagnoses": seen}


def earlier_of(study: Study, asked: Mapping[str, Any], model: Any) -> Scored | None:
    """The speculative rounds of the first repetition, where that is not the one that is scored, or one of all."""
    if asked["repetition"] is None:
        return None
    first = int(study.columns["repetition"][study.sd].min())
    if first >= asked["repetition"]:
        return None
    return score(study, reference=asked["reference"], model=model, repetition=first, warmup=asked["warmup"])


NO_BAR = nullcontext()
CELL_INTERVALS = ("cell_round_weighted_mape_interval", "cell_equal_config_mape_interval", "no_interval")


def place(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("gpu", "model", "method", "draft_length"))


def command_of(data: str, asked: Mapping[str, Any], options: Sequence[tuple[str, str]]) -> str:
    """What makes the folder again, from inside of it: a command, or a line of Python where no command names the model.

    Only what differs from the defaults is said.
    """
    usual = {"reference": "measured", "repetition": 1, "warmup": WARMUP, "draws": DRAWS, "seed": SEED}
    said = [(name, value) for name, value in asked.items() if usual.get(name) != value]
    if asked["reference"] == "estimator" and "model" not in dict(options):
        words = [f"{name}={value!r}" for name, value in said if name != "rule"]
        words += [f"rule=fpmjax.load_rule({value!r})" for name, value in said if name == "rule"]
        return f"fpmjax.run_study({', '.join([repr(data), 'model=model', *words])}).save('.', overwrite=True)"
    words = ["fpmjax", "calibrate", data, "-o", ".", "--overwrite"]
    for name, value in (*said, *options):
        words += [f"--{name}"] if value == "" else [f"--{name}", "all" if value is None else str(value)]
    return shlex.join(words)


def rule_of(document: dict[str, Any], group: str = POOLED) -> SpeculativeRule:
    """The main refit of a group in a study's document, as a rule."""
    fit = refit_of(document, group)
    if fit is None:
        groups = list(dict.fromkeys(row["group"] for row in document["refits"]))
        hint = f"one of {', '.join(groups)}" if groups else "anchors, and studies without scored rounds, have no refit"
        refuse_option("group", f"there is no refit of {group!r}", hint)
    if fit["slope"] is None:
        refuse_unfitted(fit["status"], fit["draft_lengths"])
    scope = document["scope"]
    told = [few(scope[name]) for name in ("study_id", "gpu", "framework", "framework_version")]
    who = few(scope["model"]) if group == POOLED else group
    provenance = (
        f"study {told[0]}: {who} on {told[1]}, {told[2]} {told[3]}, {fit['rounds']:,} rounds in "
        f"{fit['configurations']:,} configurations, timing scope {', '.join(scope['timing_scope'])}"
    )
    if document["reference"]["model"]:
        provenance += f"; reference {reference_in_words(document)}"
    if len(provenance) > LONGEST_PROVENANCE:
        provenance = f"{provenance[: LONGEST_PROVENANCE - 3]}..."
    interval, slope, intercept = None, fit.get("slope_interval"), fit.get("intercept_interval")
    if slope and intercept and inside(fit["slope"], slope) and inside(fit["intercept"], intercept):
        interval = RuleInterval(slope, intercept, document["intervals"]["level"], fit["clusters"])
    from decimal import Decimal

    return SpeculativeRule(Decimal(repr(fit["slope"])), Decimal(repr(fit["intercept"])), provenance, interval)


def few(values: Sequence[Any], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(map(str, values[:most])) + (f" and {len(values) - most:,} more" if len(values) > most else "")


def origin_of(document: dict[str, Any], group: str) -> dict[str, Any]:
    """What a rule file says of the study behind it."""
    fit = refit_of(document, group)
    names = ("loss", "weights", "status", "rounds", "configurations", "draft_lengths", "round_weighted_mape")
    return {
        "group": group,
        **{name: fit[name] for name in (*names, "equal_config_mape", "round_weighted_bias")},
        "reference": document["reference"]["mode"],
        "reference_model": document["reference"]["model"],
        "verdict": verdict(document),
        "scope": {name: values[:MOST_TOLD] for name, values in document["scope"].items()},
        "inputs": [{name: entry[name] for name in ("file", "sha256")} for entry in document["inputs"]],
        "fpmjax": document["fpmjax"],
    }
