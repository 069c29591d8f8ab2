"""Options of the Python API as flags of the command line: how they are read, spelled, and found to be given."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from fpmjax.cli.arguments import UsageError, one_count, shorten


class Flag(NamedTuple):
    """One option of the Python API on the command line; without `read` it is a switch."""

    name: str
    help: str
    read: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None


def add_rule(group: Any) -> None:
    """--rule: the factor of a speculative round from a file."""
    group.add_argument(
        "--rule",
        metavar="FILE",
        help="factor of a speculative round, from a file that `fpmjax calibrate --rule-out` wrote (default: the "
        "published 0.08 d + 1.25)",
    )


def rule_of(args: argparse.Namespace, *, drafted: bool) -> Any:
    """The rule of --rule, None without it; drafted: whether a draft length is given, which a rule is about."""
    if args.rule is None:
        return None
    if not drafted:
        raise UsageError("--rule scales speculative rounds, and no draft length is given\nhint: add --draft-length 1:4")
    from fpmjax.rule_file import load_rule

    return load_rule(args.rule)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def sizes(text: str) -> tuple[int, ...]:
    return tuple(one_count(size.strip()) for size in text.split(","))


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shorten(text)} is not a number\nhint: write it without a unit, such as 0.5 or 65.5e9"
        ) from None


def bounds(text: str) -> tuple[float | None, ...]:
    """`LOW,HIGH`, either of them `none`."""
    parts = [part.strip().lower() for part in text.split(",")]
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{shorten(text)} is not LOW,HIGH\nhint: for example 0.5,2 or 0.8,none")
    return tuple(None if part == "none" else real(part) for part in parts)


def add_flags(group: Any, flags: tuple[Flag, ...]) -> None:
    for flag in flags:
        if flag.read or flag.choices:
            more = {"type": flag.read or str, "metavar": flag.metavar, "choices": flag.choices}
        else:
            more = {"action": "store_true"}
        group.add_argument(spelled(flag.name), help=flag.help, **more)


def spelled(name: str) -> str:
    """The flag of an attribute."""
    return {"table": "--correct", "continued": "--continue"}.get(name, "--" + name.replace("_", "-"))


def is_given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return value is not None and value is not False and value != []


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the Python API."""
    return {name: getattr(args, name) for name in names if is_given(args, name)}


def refuse_any(args: argparse.Namespace, names: tuple[str, ...], what: str, hint: str) -> None:
    """Raise for the first of these that is given."""
    for name in given(args, *names):
        raise UsageError(f"{spelled(name)} {what}\nhint: {hint}")
