"""Figures without a window: how matplotlib is found, the style of every picture, and files with the same bytes."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fpmjax.atomic import replacing
from fpmjax.errors import FpmError
from fpmjax.metrics import show
from fpmjax.plot.text import FONT
from fpmjax.result_files import named_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 150
STYLE: dict[str, Any] = {
    "font.family": FONT,
    "text.parse_math": False,  # a dollar in the name of a model or file is a dollar
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.fontsize": 8,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "0.8",
    "svg.hashsalt": "fpmjax",  # ids that do not change from run to run
    "svg.fonttype": "path",
}


def matplotlib() -> Any:
    """The package; FpmError `matplotlib` where it is not installed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise FpmError(
            f"a picture needs matplotlib, which cannot be imported: {error}\nhint: pip install 'fpmjax[plot]'",
            code="matplotlib",
        ) from None
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """matplotlib draws in the style of this package."""
    package = matplotlib()
    with package.rc_context(STYLE):
        yield


def blank(size: tuple[float, float]) -> Figure:
    """A figure of so many inches, which notebooks show; matplotlib's own has no picture outside pyplot."""
    figure = matplotlib().figure.Figure(figsize=size, layout="constrained")
    figure._repr_png_ = partial(as_bytes, figure, "png")  # what Jupyter asks for
    return figure


def as_bytes(figure: Figure, kind: str) -> bytes:
    """The same bytes for the same figure however often it is asked: "png" or "svg", without a date.

    Its layout is settled by the first call and stays: matplotlib's would go on from the last one at every drawing.
    """
    nameless = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    out = io.BytesIO()
    with style():
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
            figure.set_layout_engine("none")
        figure.savefig(out, format=kind, dpi=DPI, metadata=nameless[kind])
    return out.getvalue()


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Raise FpmError, code `figure`, for a name that no picture can be written under, `matplotlib` without that."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        refuse(f"path is {show(path)}", "name a file, such as 'grid.png'")
    if not name.lower().endswith(SUFFIXES):
        refuse(f"{name!r} is no picture by its name", f"end it in {' or '.join(SUFFIXES)}")
    try:
        os.lstat(name)
    except ValueError as error:  # an embedded NUL, or half a surrogate pair
        refuse(f"path is {show(name)}: {error}", "name a file, such as 'grid.png'")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            refuse(f"the name {show(name)} is too long", "name a file, such as 'grid.png'")
    if os.path.isdir(name):
        refuse(f"{name} is a folder", "name a file")
    if not os.path.isdir(os.path.dirname(name) or "."):
        refuse(f"the folder {os.path.dirname(name)} does not exist", "make it first")
    matplotlib()


def refuse(what: str, hint: str) -> NoReturn:
    raise FpmError(f"{what}\nhint: {hint}", code="figure")


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """The figure as PNG or SVG, by the suffix; the same figure gives the same bytes, without a date.

    Raises FpmError: `figure` for what is no figure, another suffix or a missing folder, `unwritable` or `disk_full`
    where it cannot be written.
    """
    check_figure_path(path)
    if not isinstance(figure, matplotlib().figure.Figure):
        refuse(f"figure is {show(figure)}", "write_figure(plot_grid(...), 'grid.png')")
    found = as_bytes(figure, os.fspath(path).lower().rpartition(".")[2])
    with named_errors(Path(path)), replacing(path) as new:
        new.write_bytes(found)


def log_axis(axis: Any, low: float, high: float, *, base: int = 10) -> None:
    """Plain numbers at few places of a logarithmic axis, whatever it spans.

    axis: `axes.xaxis` or `axes.yaxis`, already logarithmic; base: 2 for counts that engines double.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if base == 2 and high >= 4 * low:
        axis.set_major_locator(LogLocator(2, numticks=14))
    elif high >= 30 * low:
        axis.set_major_locator(LogLocator(10, subs=(1.0,) if high > 3000 * low else (1.0, 3.0), numticks=12))
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """2048 as it is, 15000 as 15k, 2000000 as 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def nothing(axes: Axes, text: str) -> None:
    """A panel without data says why."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.4")
