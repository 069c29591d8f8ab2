"""JSON as the wire and the sidecar mean it: strictly the standard's, and nothing that two readers read differently.

Refused, where Python's own reader is lenient: NaN and Infinity, numbers beyond float64, a key that occurs twice in
one object, a byte order mark.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, NoReturn


def integer_token(token: str) -> int | float:
    if token == "-0":
        return -0.0  # the integers of every schema here are unsigned tokens, so this one is a float
    if len(token) > 300 and math.isinf(float(token)):
        raise ValueError(f"number out of range: {token[:20]}...")
    return int(token)


def float_token(token: str) -> float:
    number = float(token)
    if math.isinf(number):
        raise ValueError(f"number out of range: {token[:20]}")
    return number


def constant_token(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {reprlib.repr(twice)} occurs twice in one object")
    return keys


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_int=integer_token, parse_float=float_token, parse_constant=constant_token
)


def decode(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text; bytes are UTF-8.  ValueError, with the reason, for anything else."""
    try:
        text = text if isinstance(text, str) else text.decode()
        if text.startswith("\ufeff"):
            raise ValueError("it starts with a byte order mark (BOM)")
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
