"""The execution profile of a speculative round: canonical JSON behind a version prefix.

A profile that starts with `speculative_round` has to be exactly the first version's form, byte for byte,
because identities are compared as text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

PREFIX = "speculative_round_v1:"
METHODS = ("eagle3",)
DRAFT_TOKENS = range(1, 6)
_REVISION = re.compile(r"[0-9a-f]{40}")
_OUTER = ("model_revision", "execution_profile")
_INNER = ("kind", "method", "num_draft_tokens", "draft_model", "draft_revision", "timing_scope")


def is_speculative(profile: str) -> bool:
    """Whether a profile claims to be a speculative round, well formed or not."""
    return profile.startswith("speculative_round")


def selector_fault(profile: str) -> str | None:
    """Why a speculative profile is not acceptable; None for a good one and for every other profile."""
    if not is_speculative(profile):
        return None
    if not profile.startswith(PREFIX):
        return "unsupported speculative_round selector version"
    text = profile[len(PREFIX) :]
    try:
        outer = json.loads(text)
        inner = outer["execution_profile"]
        known = outer.keys() <= set(_OUTER) and inner.keys() <= set(_INNER)
        ordered = {_OUTER[0]: outer[_OUTER[0]], _OUTER[1]: {name: inner[name] for name in _INNER}}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return f"speculative_round selector must be the JSON object of {', '.join((*_OUTER, *_INNER))}"
    if not known:
        return f"speculative_round selector holds an unknown field; its fields are {', '.join((*_OUTER, *_INNER))}"
    reason = _value_fault(outer["model_revision"], inner)
    if reason is None and json.dumps(ordered, ensure_ascii=False, separators=(",", ":")) != text:
        return "speculative_round selector must use canonical serialization"
    return reason


def _value_fault(model_revision: Any, inner: dict[str, Any]) -> str | None:
    model, tokens = inner["draft_model"], inner["num_draft_tokens"]
    if inner["kind"] != "speculative_round":
        return "execution_profile kind must be speculative_round"
    if inner["method"] not in METHODS:
        return f"unknown variant {inner['method']!r}, expected `eagle3`"
    if type(tokens) is not int or tokens not in DRAFT_TOKENS:
        return "num_draft_tokens must be in 1..=5"
    if not isinstance(model, str) or not model or model != model.strip() or any(map(_control, model)):
        return "draft_model must be nonblank, trimmed, and contain no control characters"
    for name, value in (("draft_revision", inner["draft_revision"]), ("model_revision", model_revision)):
        if not isinstance(value, str) or not _REVISION.fullmatch(value):
            return f"{name} must be a lowercase 40-hex immutable checkpoint revision"
    if inner["timing_scope"] != "model_step_cuda":
        return "timing_scope must be model_step_cuda"
    return None


def _control(character: str) -> bool:
    return unicodedata.category(character) == "Cc"
