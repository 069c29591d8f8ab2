"""What may name a file, asked before anything is opened, so that a slip is told and never a traceback."""

from __future__ import annotations

import os
from typing import Any


def file_name(value: Any) -> str | None:
    """The path as text; None for what is none: another type, an empty name, a NUL, or characters that are no UTF-8."""
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    try:
        name.encode()
    except UnicodeEncodeError:  # it would go into documents, which are UTF-8
        return None
    return name


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two names lead to one file, through links too; also to one that is not there yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
