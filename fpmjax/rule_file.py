"""A speculative rule in a file: JSON that people can read, with where the rule comes from.

    {"format": "fpmjax speculative rule", "version": 1,
     "slope": "0.0908211948", "intercept": "1.19684088", "provenance": "...",
     "interval": {"slope": [0.0868, 0.0968], "intercept": [1.179, 1.209], "level": 0.95, "clusters": 192},
     "study": {...}}

Coefficients are decimal text, which is kept exactly.  `interval` and `study` may be absent; `study` is what a
calibration study says of itself (digests of its data, counts, scope), is for people, and is not read back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from fpmjax import strict_json
from fpmjax.atomic import replacing
from fpmjax.errors import SpeculationError
from fpmjax.metrics import show
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import check_rule

FORMAT, VERSION = "fpmjax speculative rule", 1
KEYS = ("format", "version", "slope", "intercept", "provenance", "interval", "study")
INTERVAL = ("slope", "intercept", "level", "clusters")
LONGEST = 1 << 20  # bytes; a rule is a few hundred


def save_rule(rule: SpeculativeRule, path: str | os.PathLike[str], *, study: Mapping[str, Any] | None = None) -> None:
    """Write a rule; the file appears whole, and takes the place of one of that name.

    study: what the calibration study says of itself, plain JSON values.

    Raises SpeculationError (`rule`) for what is no rule, (`rule_file`) where the file cannot be written.
    """
    if rule is None:
        check_rule("nothing")
    check_rule(rule)
    text = rule_text(rule, study)
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(f"{os.fspath(path)} cannot be written: {reason}", "name a file in a folder that exists")


def rule_text(rule: SpeculativeRule, study: Mapping[str, Any] | None = None) -> str:
    """What the file holds."""
    document = {"format": FORMAT, "version": VERSION, **rule.document()}
    if study is not None:
        document["study"] = dict(study)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def load_rule(path: str | os.PathLike[str]) -> SpeculativeRule:
    """The rule in a file that `save_rule` or `fpmjax calibrate --rule-out` wrote.

    Raises SpeculationError: `rule_file` for what cannot be read or is no such file, `rule` for coefficients or an
    interval that no rule can have.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(LONGEST + 1)
        found = strict_json.decode(data) if len(data) <= LONGEST else None
    except OSError as error:
        refuse(f"{name} cannot be read: {error.strerror or error}", "name a file that `fpmjax calibrate` wrote")
    except ValueError as error:
        refuse(f"{name} is no rule file: {error}", "rule files are JSON that `fpmjax calibrate --rule-out` writes")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        refuse(f"{name} is no rule file", f'rule files are JSON with "format": "{FORMAT}"')
    if type(found.get("version")) is not int or found["version"] != VERSION:
        refuse(
            f"{name} is a rule file of version {show(found.get('version'))}", f"this package reads version {VERSION}"
        )
    if unknown := [key for key in found if key not in KEYS]:
        refuse(f"{name} has an unknown key {unknown[0]!r}", f"keys are {', '.join(KEYS)}")
    for key in ("slope", "intercept", "provenance"):
        if not isinstance(found.get(key), str) or not found[key]:
            refuse(f"{name}: {key} is {show(found.get(key))}", 'write it as text, e.g. "slope": "0.08"')
    try:
        interval = interval_of(name, found.get("interval"))
        return SpeculativeRule(found["slope"], found["intercept"], found["provenance"], interval)
    except SpeculationError as error:
        if error.code == "rule_file":
            raise
        raise SpeculationError(f"{name}: {error}", code=error.code) from None


def interval_of(name: str, found: Any) -> Any:
    """The bounds as a tuple that `SpeculativeRule` checks; None where there are none."""
    if found is None:
        return None
    if not isinstance(found, dict) or sorted(found) != sorted(INTERVAL):
        refuse(f"{name}: interval is {show(found)}", f"it has the keys {', '.join(INTERVAL)}, or is left out")
    return tuple(tuple(x) if isinstance(x := found[key], list) else x for key in INTERVAL)


def refuse(what: str, hint: str) -> NoReturn:
    raise SpeculationError(f"{what}\nhint: {hint}", code="rule_file")
