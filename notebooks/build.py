"""Executes notebooks and writes each .ipynb beside the .py that it is made of: `python notebooks/build.py [NAME ...]`.

The .py is what is edited.  A notebook runs in an empty folder, and what is kept of it names no machine and no time:
built twice, text and cells are the same.  Needs `pip install -e '.[notebooks]'`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted(HERE.glob("[0-9]*.py"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
SECONDS = 600  # of one cell, on whatever machine


def executed(script: Path) -> nbformat.NotebookNode:
    """The notebook of a script, with the outputs of its cells; nbclient's CellExecutionError where one fails."""
    notebook = jupytext.read(script)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *([before] if before else [])])
    try:
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False)
            client.execute(cwd=folder, env=dict(os.environ))
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return tidy(notebook)


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what differs from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(
        {"jupytext": {"formats": "ipynb,py:percent"}, "kernelspec": KERNEL, "language_info": LANGUAGE}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i:02d}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Text that was printed in pieces as one: where a kernel cuts it is chance."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            output.metadata = nbformat.from_dict({})
        elif found and found[-1].output_type == "stream" and found[-1].name == output.name:
            found[-1].text += output.text
            continue
        found.append(output)
    return found


def main(names: list[str]) -> int:
    chosen = [script for script in SCRIPTS if not names or any(name in script.name for name in names)]
    if not chosen:
        print(f"no notebook is called {', '.join(names)}", file=sys.stderr)
        return 2
    for script in chosen:
        target = script.with_suffix(".ipynb")
        nbformat.write(executed(script), target)
        print(f"{target.name}: {target.stat().st_size // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
