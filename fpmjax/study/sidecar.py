"""The JSON beside a study, which says how the rounds were measured and has to describe this file and no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmjax import strict_json
from fpmjax.errors import first_line, refuse_option
from fpmjax.file_name import file_name
from fpmjax.metrics import show
from fpmjax.study.source import FILES

if TYPE_CHECKING:
    from fpmjax.study.read import Study

VERSION = 1
DEEPEST = 64  # levels of a sidecar; documents that hold it are written and read by recursion
HINT = "the sidecar is a JSON object"


def sidecar_name(study: str) -> str:
    """The name under which a study's sidecar is found beside it: `.json` in place of its ending."""
    end = max((end for end in FILES if study.lower().endswith(end)), key=len)
    return study[: -len(end)] + ".json"


def read_sidecar(study: Study, given: Any) -> tuple[dict[str, Any], bytes | None]:
    """(what it says, its bytes) of the sidecar that is named, or of the one beside the file; ({}, None) without one.

    Raises OptionError `study_sidecar`.
    """
    if given is None and (study.path is None or not os.path.exists(sidecar_name(study.path))):
        return {}, None
    name = file_name(sidecar_name(study.path or "") if given is None else given)
    if name is None:
        refuse_option("study_sidecar", f"the sidecar is {show(given)}", "name a JSON file, or leave it out")
    label = os.path.basename(name)
    try:
        content = Path(name).read_bytes()
        note = strict_json.decode(content)
        check_plain(note)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        refuse_option("study_sidecar", f"{label} cannot be read: {reason}", HINT)
    if not isinstance(note, dict):
        refuse_option("study_sidecar", f"{label} holds {type(note).__name__}", HINT)
    if note.get("schema_version", VERSION) != VERSION:
        version = show(note["schema_version"])
        refuse_option("study_sidecar", f"{label} has schema_version {version}", f"this package reads {VERSION}")
    said = note.get("sha256", study.digest)
    if said != study.digest and said != study.content():  # a table in memory has the digest of its content
        refuse_option(
            "study_sidecar",
            f"{label} describes a file of sha256 {show(said)}, but {study.label} has {study.digest}",
            "the table was changed after its sidecar was written: write the sidecar again",
        )
    counts = {"sd": int(study.sd.sum()), "stp": int((~study.sd).sum())}
    rows = note.get("rows", {})
    if not isinstance(rows, dict) or any(rows.get(kind, n) != n for kind, n in counts.items()):
        refuse_option(
            "study_sidecar", f"{label} counts rows {show(rows)}, but {study.label} has {counts}", "count again"
        )
    return note, content


def check_plain(value: Any) -> None:
    """ValueError for JSON that could not be written again: text that no UTF-8 has, or more than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST):
        if not level:
            return
        for text in (x for one in level for x in (one if isinstance(one, dict) else [one]) if isinstance(x, str)):
            text.encode()  # a lone surrogate, which \ud800 in JSON makes
        level = [x for one in level if isinstance(one, (dict, list)) for x in values_of(one)]
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def values_of(one: dict[str, Any] | list[Any]) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else one
