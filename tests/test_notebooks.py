"""Notebooks: scripts and notebooks hold the same cells, were executed, and run as they are told to."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
LARGEST = 500_000  # bytes of a file that people open in a browser
SECONDS = 300  # on a machine that does other things; a quiet one takes a tenth of it
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")

Cell = tuple[str, str]


def cells_of_script(text: str) -> list[Cell]:
    """(kind, source) of every cell of a percent script."""
    found: list[Cell] = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        lines = body.strip("\n").split("\n")
        if "[markdown]" in head:
            found.append(("markdown", "\n".join(re.sub("^# ?", "", line) for line in lines)))
        else:
            found.append(("code", "\n".join(re.sub("^# %(?=[a-z])", "%", line) for line in lines)))
    return found


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    """What a cell printed."""
    return "".join("".join(output["text"]) for output in cell.get("outputs", ()) if output["output_type"] == "stream")


def same(text: str, other: str) -> bool:
    """Whether words are equal and numbers differ by no more than one in their last digit, as sums of floats may."""
    if NUMBER.sub("#", text).split() != NUMBER.sub("#", other).split():
        return False
    return all(near(a, b) for a, b in zip(NUMBER.findall(text), NUMBER.findall(other), strict=True))


def near(a: str, b: str) -> bool:
    if a == b:
        return True
    digits = len(a.partition(".")[2])
    if not digits or "e" in a + b:
        return False  # a count
    return abs(float(a.replace(",", "")) - float(b.replace(",", ""))) <= 1.01 * 10.0**-digits


def test_there_are_five():
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_script_and_notebook_hold_the_same_cells(name: str):
    """`python notebooks/build.py` makes the notebook of the script; nobody edits the one without the other."""
    script = cells_of_script((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    notebook = [(cell["cell_type"], source(cell)) for cell in read(name)["cells"]]
    assert script == notebook


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_was_executed_in_order_and_without_error(name: str):
    code = [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output["name"] == "stdout" for output in outputs if output["output_type"] == "stream")
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_names_no_machine_and_no_time(name: str):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < LARGEST
    notebook = read(name)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in notebook["metadata"]["language_info"]
    assert all(not cell["metadata"] for cell in notebook["cells"])
    for cell in notebook["cells"]:
        shown = [printed(cell), *(str(o["data"].get("text/plain")) for o in cell.get("outputs", ()) if "data" in o)]
        assert not re.search(r"(?<![\w.])/(home|usr|tmp|var|work|root|Users|opt)/|[A-Z]:\\|0x[0-9a-f]{6}", str(shown))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_of_a_notebook_lead_somewhere(name: str):
    texts = "\n".join(source(cell) for cell in read(name)["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", texts)
    assert links and all((FOLDER / link).exists() for link in links if "://" not in link)


def test_the_index_names_every_notebook():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in index for name in NOTEBOOKS)
    assert len(index.splitlines()) < 50  # one screen


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_script_runs_as_plain_python_and_prints_what_the_notebook_shows(name: str, tmp_path: Path):
    """In an empty folder, without a window and without Jupyter."""
    pytest.importorskip("matplotlib")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stored = "".join(printed(cell) for cell in read(name)["cells"])
    assert same(done.stdout, stored), f"build the notebook again; now it prints\n{done.stdout}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_executes_to_what_is_stored(name: str):
    """In a kernel, cell by cell, figures too; needs the extra `notebooks`."""
    for needed in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    again, stored = build.executed(FOLDER / f"{name}.py"), read(name)
    assert len(again.cells) == len(stored["cells"])
    for new, old in zip(again.cells, stored["cells"], strict=True):
        assert new.source == source(old)
        assert same(printed(new), printed(old)), f"build the notebook again; now it prints\n{printed(new)}"
        kinds = [[sorted(o.get("data", {})) for o in cell.get("outputs", ())] for cell in (new, old)]
        assert kinds[0] == kinds[1]
        if new.cell_type == "code":
            assert new.execution_count == old["execution_count"]
