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
from fpmjax.file_name import file_name
from fpmjax.metrics import show
from fpmjax.rule import SpeculativeRule
from fpmjax.speculative import check_rule

FORMAT, VERSION = "fpmjax speculative rule", 1
KEYS = ("format", "version", "slope", "intercept", "provenance", "interval", "study")
INTERVAL = ("slope", "intercept", "level", "clusters")
LONGEST = 1 << 20  # bytes; a rule is a few hundred


def save_rule(rule: SpeculativeRule, path: str | os.PathLike[str], *, study: Mapping[str, Any] | None = None) -> None:
    """Write a rule; the file appears whole, and takes the place of a rule file of that name, but of no other file.

    study: what the calibration study says of itself, plain JSON values.

    Raises SpeculationError (`rule`) for what is no rule, (`rule_file`) where the file cannot be written or would not
    be read back.
    """
    if rule is None:
        check_rule("nothing")
    check_rule(rule)
    text = rule_text(rule, study)
    name = check_place(path)
    try:
        with replacing(name) as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(f"{name} cannot be written: {reason}", "name a file in a folder that exists")


def check_place(path: Any) -> str:
    """The name of a rule file that is to be written; SpeculationError (`rule_file`) where none may stand.

    A file that holds something else, measurements or a document, is never replaced.
    """
    name = file_name(path)
    if name is None:
        refuse(f"the rule file is {show(path)}", "name a file, e.g. my-rule.json")
    folder = os.path.dirname(name) or "."
    if not os.path.isdir(folder):
        refuse(f"{name} cannot be written: the folder {folder} does not exist", "make it first")
    if os.path.isdir(name):
        refuse(f"{name} is a folder", "name a file in it")
    if os.path.exists(name) and not os.path.isfile(name):
        refuse(f"{name} cannot be written: it is a device, pipe or socket", "name a file")
    if not os.access(folder, os.W_OK):
        refuse(f"{name} cannot be written: the folder {folder} is not yours to write in", "name a file in another one")
    if os.path.isfile(name) and not is_rule_file(name):
        refuse(f"{name} is there already and holds no rule", "name a file that is not there yet")
    return name


def is_rule_file(name: str) -> bool:
    """Whether a file is one of ours, of whatever version, or empty."""
    try:
        with open(name, "rb") as file:
            data = file.read(LONGEST + 1)
        found = strict_json.decode(data) if 0 < len(data) <= LONGEST else None
    except (OSError, ValueError):
        return False
    return not data or (isinstance(found, dict) and found.get("format") == FORMAT)


def rule_text(rule: SpeculativeRule, study: Mapping[str, Any] | None = None) -> str:
    """What the file holds; SpeculationError (`rule_file`) where `load_rule` would refuse it or read another rule."""
    document = {"format": FORMAT, "version": VERSION, **rule.document()}
    if study is not None:
        document["study"] = dict(study) if isinstance(study, Mapping) else study
    try:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        found = rule_in("the rule file", text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SpeculationError):
            raise
        refuse(f"the rule file would hold what JSON does not: {error}", "study is a mapping of plain JSON values")
    if found != rule:
        refuse("the rule would not be read back as it is", "SpeculativeRule and RuleInterval of plain numbers and text")
    return text


def load_rule(path: str | os.PathLike[str]) -> SpeculativeRule:
    """The rule in a file that `save_rule` or `fpmjax calibrate --rule-out` wrote.

    Raises SpeculationError: `rule_file` for what cannot be read or is no such file, `rule` for coefficients, an
    interval or a provenance that no rule can have.
    """
    name = file_name(path)
    if name is None:
        refuse(f"the rule file is {show(path)}", "name a file that `fpmjax calibrate --rule-out` wrote")
    try:
        with open(name, "rb") as file:
            data = file.read(LONGEST + 1)
    except OSError as error:
        refuse(f"{name} cannot be read: {error.strerror or error}", "name a file that `fpmjax calibrate` wrote")
    return rule_in(name, data)


def rule_in(name: str, data: bytes) -> SpeculativeRule:
    """The rule in the bytes of a file of that name, which save and load agree on."""
    if len(data) > LONGEST:
        refuse(f"{name} is no rule file: it is larger than {LONGEST:,} bytes", "a rule file is a few hundred")
    try:
        found = strict_json.decode(data)
    except ValueError as error:
        refuse(f"{name} is no rule file: {error}", "rule files are JSON that `fpmjax calibrate --rule-out` writes")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        refuse(f"{name} is no rule file", f'rule files are JSON with "format": "{FORMAT}"')
    if type(found.get("version")) is not int or found["version"] != VERSION:
        refuse(
            f"{name} is a rule file of version {show(found.get('version'))}", f"this package reads version {VERSION}"
        )
    if unknown := [key for key in found if key not in KEYS]:
        refuse(f"{name} has an unknown key {show(unknown[0])}", f"keys are {', '.join(KEYS)}")
    for key in ("slope", "intercept", "provenance"):
        if not isinstance(found.get(key), str) or not found[key]:
            refuse(f"{name}: {key} is {show(found.get(key))}", 'write it as text, e.g. "slope": "0.08"')
    if not isinstance(found.get("study", {}), dict):
        refuse(f"{name}: study is {show(found['study'])}", "it is an object, or left out")
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
