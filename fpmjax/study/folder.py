"""The evidence folder of a study: written whole or, over an older one, file by file with `result.json` last."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpmjax import strict_json
from fpmjax.atomic import replacing
from fpmjax.errors import FpmError, refuse_option
from fpmjax.file_name import file_name
from fpmjax.metrics import show

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

    Raises OptionError `exists`, `folder`; FpmError `matplotlib` where they are asked for and it is not, `unwritable`.
    """
    path = check_folder(folder, overwrite)
    files = dict(contents(result))
    if figures is not False:
        files |= pictures(result, must=figures is True)
    try:
        if path.exists():
            check_places(path, files)
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


def check_folder(folder: Any, overwrite: bool) -> Path:
    """The folder's path; OptionError `exists` where something stands that is not to be replaced, `folder` for no name.

    To be asked before a long computation.
    """
    if (name := file_name(folder)) is None:
        refuse_option("folder", f"the folder is {show(folder)}", "name a folder, e.g. my-study")
    path = Path(name)
    try:
        if path.is_dir() and not any(path.iterdir()):
            return path
    except OSError as error:
        refuse_option("exists", f"{path} cannot be read: {error.strerror}", "name a folder of your own")
    if path.is_dir():
        if inputs_in(path) is None:
            hint = "name a folder that is not there yet"
            refuse_option("exists", f"{path} holds files that are no study, or a broken {RESULT}", hint)
        if not overwrite:
            refuse_option("exists", f"{path} holds a study already", "name another folder, or add --overwrite")
    elif path.exists() or path.is_symlink():
        refuse_option("exists", f"{path} is a file", "name a folder")
    elif not path.parent.is_dir():
        refuse_option("exists", f"the folder {path.parent} does not exist", "make it first")
    return path


def inputs_in(path: Path) -> list[str] | None:
    """The names of the inputs that the study in a folder keeps; None where its result is not one of a study."""
    from fpmjax.study.result import FORMAT

    try:
        found = strict_json.decode((path / RESULT).read_bytes())
    except (OSError, ValueError):
        return None
    inputs = found.get("inputs") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if not isinstance(inputs, list) or not all(isinstance(x, dict) and isinstance(x.get("file"), str) for x in inputs):
        return None
    return [entry["file"] for entry in inputs]


def check_places(path: Path, names: Iterable[str]) -> None:
    """Before any is written: OptionError `exists` where one of ours would take the place of what is no file."""
    for target in (path / name for name in names):
        if target.exists() and not target.is_file():
            refuse_option("exists", f"{target} is no file", "name a folder that is not there yet")
        if os.path.lexists(target.parent) and not target.parent.is_dir():
            refuse_option("exists", f"{target.parent} is no folder", "name a folder that is not there yet")


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
    before = inputs_in(path) or []
    last = files.pop(RESULT)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path / name) as partial:
            partial.write_bytes(data)
    with replacing(path / RESULT) as partial:
        partial.write_bytes(last)
    for name in sorted({*before, *FIGURES} - {*files, RESULT}):
        if is_ours(name) and (path / name).is_file():
            (path / name).unlink()


def is_ours(name: str) -> bool:
    """Whether a name, from inside the folder, is of a file that a study writes there, and not one somewhere else."""
    return name in (RESULT, REPORT, CHART, RULE, *FIGURES) or os.path.dirname(name) == "data"
