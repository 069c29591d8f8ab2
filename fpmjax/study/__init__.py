"""Calibration studies: is the rule for speculative rounds right for one's own engine?

A study is a table of measured rounds, ordinary (STP) and speculative (SD); `fpmjax.study.columns` says which columns it
has.  Public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"read_study": "read", "Study": "read", "run_study": "result", "StudyResult": "result"}
_HOME |= {"score": "scored", "Scored": "scored", "Config": "scored"}
__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
