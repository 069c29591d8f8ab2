"""A file that appears whole or not at all, whoever else writes it at the same time."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new, empty name in the same folder; what the block writes there takes the place of `path` when it ends.

        with replacing(path) as partial:
            partial.write_bytes(data)

    A link stays, and the file that it leads to is replaced, with the permissions that it had.  When the block or the
    rename fails, nothing is left behind.

    Raises OSError, also where `path` is a folder, device, pipe or socket, before the block; ValueError for a name
    that no file can have.
    """
    mode = mode_of(Path(path))  # through links, also those that only the system can follow, such as /dev/stdout
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        yield partial
        sync(partial, os.O_RDWR)
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    with contextlib.suppress(OSError):  # makes the rename itself durable, where the file system can
        sync(path.parent, os.O_RDONLY)


def mode_of(path: Path) -> int | None:
    """Permissions of a regular file, None where there is nothing; OSError for everything else."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a device, pipe or socket stands there, which is never replaced", str(path))
    return stat.S_IMODE(mode)


def sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
