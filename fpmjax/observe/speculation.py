"""What shows that an engine drafted: fields named after speculation, and request lists beyond ordinary decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fpmjax.work import Work

# Names in small letters without separators, and the largest value that each has without drafts.
_ZERO = """draftlength drafttokens numdrafttokens numdrafts accepteddrafttokens numaccepteddrafttokens acceptedtokens
numacceptedtokens speculative speculation isspeculative speculativedecoding specdecode specdecoding specdecodingstats
spectokens numspectokens speculativetokens numspeculativetokens nextn"""
_ONE = "verifywidth acceptlength acceptedlength acceptancelength meanacceptancelength specacceptlength"
LIMITS: dict[str, int] = {**dict.fromkeys(_ZERO.split(), 0), **dict.fromkeys(_ONE.split(), 1)}
NOTHING = ("", "none", "null", "off", "no", "false", "disabled", "nan")
MOST_TOKENS = 2**34  # above the tokens of any rank's totals, which are two counts of 32 bits


@lru_cache(1 << 10)
def limit_of(name: str) -> int | None:
    """The largest value that a field of this name has without drafts; None for any other field."""
    return LIMITS.get("".join(letter for letter in name.lower() if letter.isalnum()))


def shows_drafts(value: Any, limit: int = 0) -> bool:
    """Whether the value of a field of speculation says that there was some; in a struct anything but nothing does."""
    if isinstance(value, dict):
        return any(shows_drafts(x) for x in value.values())
    if isinstance(value, (list, tuple)):
        return any(shows_drafts(x, limit) for x in value)
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            return float(word) > limit
        except ValueError:
            return word not in NOTHING
    try:
        return value is not None and bool(value > limit)
    except TypeError:  # bytes, a date
        return True


def fields_of_speculation(document: Any) -> dict[str, bool]:
    """Every key of speculation anywhere in decoded JSON, and whether it shows drafts."""
    found: dict[str, bool] = {}
    waiting = [document]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict):
            for key, value in here.items():
                if (limit := limit_of(key)) is not None:
                    found[key] = found.get(key, False) or shows_drafts(value, limit)
        waiting += [x for x in (here.values() if isinstance(here, dict) else here) if isinstance(x, (dict, list))]
    return found


# --- request lists -----------------------------------------------------------------------------------------


def beyond_ordinary(extend: Sequence[int], prefill_requests: int, computed: int) -> str | None:
    """Why no ordinary decoding has this list next to these totals; None where it may.

    Lists do not say which rows are prefill, but at most `prefill_requests` of them may compute several tokens; and
    together they compute no more than the totals say, prefill tokens plus one per decode request.  Fewer they may:
    producers pad their totals.
    """
    if sum(tokens > 1 for tokens in extend) > prefill_requests:
        return "a decode request computes more than one token"
    if (listed := sum(extend)) > computed:
        return f"they add up to {listed} tokens where ordinary decoding computes {computed}"
    return None


def lists_beyond_ordinary(work: Work) -> np.ndarray:
    """Where `beyond_ordinary` has a reason: bool [n..., r]; False where requests are not listed."""
    lists = work.lists
    if lists is None:
        return np.zeros((*work.shape, work.ranks), bool)
    extend, count = np.asarray(lists.extend), np.asarray(lists.count)
    extend = np.where(np.arange(extend.shape[-1]) < count[..., None], extend, np.uint64(0))
    prefill, tokens, decode = (
        np.zeros((), np.int64) if x is None else np.asarray(x, np.int64)
        for x in (work.prefill_requests, work.prefill_tokens, work.decode_requests)
    )
    listed = np.minimum(extend, np.uint64(MOST_TOKENS)).sum(-1)
    return ((extend > 1).sum(-1) > prefill) | (listed > (tokens + decode).astype(np.uint64))


def computed_tokens(work: Work, i: int, rank: int) -> int:
    """Prefill tokens, and one per decode request, of one rank of work [n, r]."""
    return sum(int(x[i, rank]) for x in (work.prefill_tokens, work.decode_requests) if x is not None)
