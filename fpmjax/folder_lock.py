"""One writer at a time in a result folder: a file that holds the process id of the one who is there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fpmjax.errors import OptionError

LOCK = "_lock"  # readers of datasets skip names that begin so
_HELD: set[str] = set()  # by this process: one that ended may have had the same id, as the first of a container has


class FolderLock:
    """Held from the beginning until `release`; that of a process that is gone is taken over.

    Raises OptionError (`busy`) where another one writes; OSError where the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self.path = Path(os.path.realpath(folder)) / LOCK
        try:
            handle = self.open()
        except FileExistsError:
            owner = owner_of(self.path)
            if owner is None or (str(self.path) in _HELD if owner == os.getpid() else is_alive(owner)):
                who = "another process" if owner is None else f"process {owner}"
                raise OptionError(
                    f"{folder} is being written by {who}\n"
                    f"hint: wait for it, or name another folder; if nobody writes there, delete {self.path}",
                    code="busy",
                ) from None
            with suppress(FileNotFoundError):
                self.path.unlink()
            try:
                handle = self.open()
            except FileExistsError:  # a third one was faster
                raise OptionError(f"{folder} is being written\nhint: name another folder", code="busy") from None
        _HELD.add(str(self.path))
        try:
            with os.fdopen(handle, "w") as file:
                file.write(str(os.getpid()))
        except BaseException:  # such as a full disk
            self.release()
            raise

    def open(self) -> int:
        return os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)

    def release(self) -> None:
        if str(self.path) in _HELD:
            _HELD.discard(str(self.path))
            with suppress(OSError):
                self.path.unlink()


def owner_of(path: Path) -> int | None:
    """The process id in a lock; None where there is none (yet)."""
    try:
        owner = int(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if 0 < owner < 2**31 else None


def is_alive(process: int) -> bool:
    if os.name == "nt":  # signal 0 would end it there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
