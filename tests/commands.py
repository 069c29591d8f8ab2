"""The command under test: run in this process, or as a user runs it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import table_pairs

from fpmjax.cli import main

IDENTITY = table_pairs.IDENTITY | {"model": "acme/möbius"}


@dataclass
class Ran:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out, parse_constant=lambda token: AssertionError(f"{token} is not JSON"))

    def refused(self, *texts: str, code: int = 2, out: str = "") -> Ran:
        """Assert an error in the command's own style that contains these texts."""
        assert self.code == code, self
        assert self.out == out
        assert "error: " in self.err and "Traceback" not in self.err
        for text in texts:
            assert text in self.err
        return self


class Command:
    """`fpmjax` in this process; `stdin` is what it reads."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *argv: Any, stdin: bytes = b"") -> Ran:
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self.capsys.readouterr()
        code = main([str(a) for a in argv])
        return Ran(code, *self.capsys.readouterr())


def shell(*argv: Any, **settings: Any) -> subprocess.CompletedProcess:
    """`python -m fpmjax` in a process of its own."""
    command = [sys.executable, "-m", "fpmjax", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)
