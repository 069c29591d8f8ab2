"""The evidence folder of a study: written whole or, over an older one, file by file with `result.json` last."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fpmjax.atomic import replacing
from fpmjax.errors import FpmError, refuse_option

if TYPE_CHECKING:
    from fpmjax.study.result import StudyResult

RESULT, REPORT, CHART = "result.json", "README.md", "chart.svg"
RULE = "fixed_rule.json"  # the judged rule, unless it is the published one
FIGURES = ("errors.png", "ratios.png", "residuals.png")


def write_folder(
    result: StudyResult, folder: str | os.PathLike[str], *, overwrite: bool = False, figures: bool | None = None
) -> Path:
    """Write README.md, result.json, chart.svg, the data, and PNGs where matplotlib is installed; the same bytes always.

    A new folder appears when it is complete.  Over an older study (`overwrite`) its files are replaced one by one, and
    what else lies there stays.
    figures: True asks for the PNGs, False leaves them out, None writes them where matplotlib is there.

    Raises OptionError `exists`; FpmError `matplotlib` where they are asked for and it is not, `unwritable`.
    """
    path = Path(folder)
    check_folder(path, overwrite)
    files = dict(contents(result))
    if figures is not False:
        files |= pictures(result, must=figures is True)
    try:
        if path.exists():
            one_by_one(path, files)
        else:
            at_once(path, files)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise FpmError(f"{path}: the disk is full\nhint: free some space", code="disk_full") from None
        raise FpmError(
            f"{path} cannot be written: {error.strerror or error}\nhint: name another folder", code="unwritable"
        ) from None
    return path


def check_folder(path: Path, overwrite: bool) -> None:
    """OptionError `exists` where something stands that is not to be replaced; to be asked before a long computation."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.is_dir():
        if not is_study(path):
            refuse_option("exists", f"{path} holds files that are no study", "name a folder that is not there yet")
        if not overwrite:
            refuse_option("exists", f"{path} holds a study already", "name another folder, or add --overwrite")
    elif path.exists() or path.is_symlink():
        refuse_option("exists", f"{path} is a file", "name a folder")
    elif not path.parent.is_dir():
        refuse_option("exists", f"the folder {path.parent} does not exist", "make it first")


def is_study(path: Path) -> bool:
    """Whether a folder's result is one of a study."""
    from fpmjax.study.result import FORMAT

    try:
        found = json.loads((path / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def contents(result: StudyResult) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of what every folder has, `result.json` last."""
    from fpmjax.study.chart import chart
    from fpmjax.study.report import report

    yield from result.files.items()
    yield CHART, chart(result.document).encode()
    yield REPORT, report(result.document).encode()
    yield RESULT, result.json().encode()


def pictures(result: StudyResult, *, must: bool) -> dict[str, bytes]:
    """The matplotlib figures; none where it is missing, unless they must be."""
    from fpmjax.plot.study import study_figures

    try:
        return study_figures(result.document)
    except FpmError as error:
        if must or error.code != "matplotlib":
            raise
        return {}


def at_once(path: Path, files: dict[str, bytes]) -> None:
    path = Path(os.path.abspath(path))
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        for name, data in files.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def one_by_one(path: Path, files: dict[str, bytes]) -> None:
    """Files of an older study take new contents; those of ours that are not made any more go."""
    older = json.loads((path / RESULT).read_text(encoding="utf-8")) if (path / RESULT).exists() else {}
    before = {str(entry["file"]) for entry in older.get("inputs", ())}
    last = files.pop(RESULT)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path / name) as partial:
            partial.write_bytes(data)
    with replacing(path / RESULT) as partial:
        partial.write_bytes(last)
    for name in sorted({*before, *FIGURES} - files.keys()):
        if is_inside(name):
            (path / name).unlink(missing_ok=True)


def is_inside(name: str) -> bool:
    """Whether a name in an older result is a file that such a result keeps, and not one somewhere else."""
    return name in (*FIGURES, RULE) or (name.startswith("data/") and name.count("/") == 1 and name != "data/..")
