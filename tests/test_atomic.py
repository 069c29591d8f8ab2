"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from fpmjax.atomic import replacing


def put(path: Path, data: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(data)


def test_a_file_appears_and_is_replaced(tmp_path):
    path = tmp_path / "file"
    put(path, b"a")
    os.chmod(path, 0o640)
    put(path, b"b")
    assert path.read_bytes() == b"b" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_usual_permissions(tmp_path):
    put(tmp_path / "file", b"")
    (tmp_path / "other").touch()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_fails_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    put(path, b"a")
    with pytest.raises(ZeroDivisionError), replacing(path) as partial:
        partial.write_bytes(b"b")
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_bytes() == b"a" and os.listdir(tmp_path) == ["file"]


def test_links_stay_and_their_target_is_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder / "file")
    for data in (b"new", b"newer"):
        put(tmp_path / "link", data)
        assert (folder / "file").read_bytes() == data
    assert (tmp_path / "link").is_symlink() and os.listdir(folder) == ["file"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="link"):
        put(tmp_path / "loop", b"")


def test_pipes_sockets_and_folders_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    here = os.open(tmp_path, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/socket" if len(str(tmp_path)) > 80 else str(tmp_path / "socket"))
    os.close(here)
    before = sorted(os.listdir(tmp_path))
    for name in before:
        with pytest.raises(OSError):
            put(tmp_path / name, b"x")
    assert sorted(os.listdir(tmp_path)) == before == ["folder", "link", "pipe", "socket"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_many_writers_of_one_name_publish_whole_files(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([i]) * 200_000 for i in range(4)]
    torn: list[int] = []

    def work(data: bytes) -> None:
        for _ in range(10):
            put(path, data)
            if path.read_bytes() not in contents:
                torn.append(data[0])

    threads = [threading.Thread(target=work, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn and os.listdir(tmp_path) == ["file"]


def test_the_longest_names_and_none_longer(tmp_path):
    put(tmp_path / ("x" * 255), b"a")
    for name in ("x" * 256, "x" * 5000):
        with pytest.raises(OSError, match="too long"):
            put(tmp_path / name, b"a")
    assert os.listdir(tmp_path) == ["x" * 255]
