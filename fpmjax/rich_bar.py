"""The line of a long job as the package rich draws it, where that is installed; `fpmjax.progress` decides when."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


class RichBar:
    """One line on a terminal; `told` are the amounts, the rate and the time left, as `fpmjax.progress` words them."""

    def __init__(self, progress: Progress, what: str):
        self.progress = progress
        self.task = progress.add_task(what, total=None, told="")
        progress.start()

    def draw(self, done: float, total: float | None, told: str) -> None:
        self.progress.update(self.task, completed=done, total=total, told=told)
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()


def rich_bar(what: str, file: TextIO) -> RichBar | None:
    """A bar that is gone when it is closed; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
    except ImportError:
        return None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[told]}", markup=False),
    )
    console = Console(file=file, force_terminal=True)
    return RichBar(Progress(*columns, console=console, transient=True, auto_refresh=False), what)
