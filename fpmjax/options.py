"""Reading options: a schema is data, and every mistake is named by its full path.

A reader is a function of (value, path) that returns the value with its defaults filled in, or raises OptionError in
the peer's words: "invalid forward-pass config at PATH: ..." for shape, type and names, "invalid engine config: PATH
..." for meaning.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from fpmjax.errors import OptionError

U32, USIZE = ("u32", 2**32 - 1), ("usize", 2**64 - 1)  # the peer's names of its integer types
REQUIRED = object()  # default of an option that has to be given
ABSENT = object()  # default of an option that stays out of the resolved mapping

Reader = Callable[[Any, str], Any]


class Rule(NamedTuple):
    """A condition on a value of the right type, and the peer's words for it."""

    holds: Callable[[Any], bool]
    text: str


class Option(NamedTuple):
    """One field of a record: how it is read, its default, the rule that it obeys."""

    read: Reader
    default: Any = REQUIRED
    rule: Rule | None = None


POSITIVE = Rule(lambda x: x > 0, "must be positive")
POSITIVE_OR_NULL = Rule(lambda x: x is None or x > 0, "must be positive or null")
FINITE_NONNEGATIVE = Rule(lambda x: math.isfinite(x) and x >= 0, "must be finite and nonnegative")
FINITE_POSITIVE = Rule(lambda x: math.isfinite(x) and x > 0, "must be finite and positive")


def record(**options: Option) -> Reader:
    """A mapping of named fields; unknown ones are refused with the nearest known name."""

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            wrong_type(value, path, "a mapping of options")
        for name in value:
            if name not in options:
                unknown_field(name, path, options)
        resolved = {}
        for name, option in options.items():
            given = value.get(name, option.default)
            if given is REQUIRED:
                wrong_shape(path, f"missing field `{name}`", f"give {name}; it has no default", "missing_field")
            if given is not ABSENT:
                where = join(path, name)
                resolved[name] = option.read(given, where)
                if option.rule and not option.rule.holds(resolved[name]):
                    wrong_meaning(where, option.rule.text, usual(option.default))
        return resolved

    return read


def tagged(**kinds: Reader) -> Reader:
    """A mapping whose field `kind` says what its other fields are."""

    def read(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            wrong_type(value, path, "a mapping of options")
        if "kind" not in value:
            wrong_shape(path, "missing field `kind`", f"choose {among(kinds)}", "missing_field")
        kind = choice(*kinds)(value["kind"], join(path, "kind"))
        return {"kind": kind, **kinds[kind]({k: v for k, v in value.items() if k != "kind"}, path)}

    return read


def choice(*names: str, **aliases: str) -> Reader:
    """One of the names, spelled exactly; aliases map to the name that they stand for."""

    def read(value: Any, path: str) -> str:
        known = (*names, *aliases)
        if not isinstance(value, str):
            wrong_type(value, path, f"one of {among(known)}")
        if value not in known:
            what = f"unknown variant `{value}`, expected {among(known)}"
            wrong_shape(path, what, nearest(value, known) or f"choose {among(known)}", "unknown_variant")
        return aliases.get(value, value)

    return read


def each(read_one: Reader, length: int | None = None) -> Reader:
    """A list or tuple, every element read alike."""

    def read(value: Any, path: str) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            wrong_type(value, path, "a sequence")
        if length is not None and len(value) != length:
            wrong_shape(
                path, f"invalid length {len(value)}, expected an array of length {length}", f"give {length} values"
            )
        return [read_one(item, f"{path}[{i}]") for i, item in enumerate(value)]

    return read


def optional(read_one: Reader) -> Reader:
    """None, or what the reader takes."""
    return lambda value, path: None if value is None else read_one(value, path)


def count(kind: tuple[str, int] = USIZE) -> Reader:
    """A nonnegative integer of the kind; never a boolean, float or text."""
    name, largest = kind

    def read(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            wrong_type(value, path, name)
        number = operator.index(value)
        if not 0 <= number <= largest:
            wrong_shape(path, f"invalid value: {shown(number)}, expected {name}", f"the range is 0 to {largest}")
        return number

    return read


def number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        wrong_type(value, path, "f64")
    try:
        return float(value)
    except OverflowError:
        wrong_shape(path, "number out of range", "the largest float64 is about 1.8e308")


def flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(value, path, "a boolean")
    return value


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        wrong_type(value, path, "a string")
    return value


def anything(value: Any, path: str) -> Any:
    """Whatever it is, this package does not read it."""
    return value


def join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def shown(value: Any) -> str:
    """A value with its JSON type, as the peer names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, numbers.Integral):
        return f"integer `{value}`"
    if isinstance(value, numbers.Real):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{reprlib.repr(value)[1:-1]}"'
    if isinstance(value, Mapping):
        return "map"
    return "sequence" if isinstance(value, (list, tuple)) else type(value).__name__


def among(names: Any) -> str:
    quoted = [f"`{name}`" for name in names]
    return " or ".join(quoted) if len(quoted) < 3 else f"one of {', '.join(quoted)}"


def nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"did you mean `{close[0]}`?" if close else ""


def usual(default: Any) -> str:
    if default is REQUIRED or default is ABSENT:
        return "leave it out for the usual value" if default is ABSENT else "give a value in this range"
    return f"the default is {default}"


def unknown_field(name: Any, path: str, known: Mapping[str, Any]) -> NoReturn:
    expected = f"expected {among(known)}" if known else "there are no fields"
    hint = nearest(str(name), known) or (f"the fields here are {', '.join(known)}" if known else "leave it out")
    wrong_shape(join(path, name), f"unknown field `{name}`, {expected}", hint, "unknown_field")


def wrong_type(value: Any, path: str, expected: str) -> NoReturn:
    wrong_shape(path, f"invalid type: {shown(value)}, expected {expected}", f"give {expected}")


def wrong_shape(path: str, what: str, hint: str, code: str | None = None) -> NoReturn:
    where = f"at {path}: " if path else "at "
    raise OptionError(f"invalid forward-pass config {where}{what}\nhint: {hint}", code=code)


def wrong_meaning(path: str, what: str, hint: str, code: str | None = None) -> NoReturn:
    raise OptionError(f"invalid engine config: {path} {what}\nhint: {hint}", code=code)
