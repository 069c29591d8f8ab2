"""The README is true: its Python runs, its commands run and print what it shows, its lines are those that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fpmjax import cli
from fpmjax.cli import arguments
from fpmjax.tables.policy import POLICIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# (language, text) of every fenced block, in order
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [
    (text, after) for (language, text), after in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True) if language == "sh"
]
COMMANDS = [(text, after[1] if after[0] == "text" else "") for text, after in SHELL if "venv" not in text]


@pytest.mark.smoke
@pytest.mark.parametrize("code", PYTHON)
def test_python_examples_run(code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of them save a model
    exec(compile(code, "README.md", "exec"), {})
    assert "nan" not in capsys.readouterr().out


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "shown"), COMMANDS)
def test_shell_examples_run_and_print_what_is_shown(script, shown, tmp_path):
    bin_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # this environment's command
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": bin_path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}  # columns may move, words may not
    assert not {" ".join(line.split()) for line in shown.splitlines()} - printed


def test_the_policies_and_exit_codes_are_those_of_the_code():
    rows = {name: clock for name, clock in re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE)}
    assert {name: policy.clock for name, policy in POLICIES.items()} == {name: rows[name] for name in POLICIES}
    codes = (arguments.UNEQUAL, arguments.BAD_INPUT, arguments.NOT_COVERED, cli.INTERRUPTED, cli.BROKEN_PIPE)
    told = README.partition("Exit codes: ")[2].partition("\n\n")[0]
    assert [int(code) for code in re.findall(r"\b\d+\b", told)] == [0, *codes]


def test_both_setup_lines_are_one_line_and_are_what_ci_runs():
    lines = [line for text, _ in SHELL for line in text.splitlines() if "venv" in line]
    assert len(lines) == 2
    demo, tests = lines
    assert demo.startswith("python3 -m venv ") and demo.endswith("fpmjax demo")
    assert tests.startswith("python3 -m venv ") and tests.endswith("pytest -n auto")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'readme "pytest -n auto"' in ci and 'readme "fpmjax demo"' in ci
