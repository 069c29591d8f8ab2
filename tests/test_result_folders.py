"""Folders of parts: what is a sweep's own and what the user's, and what may go on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from small_tables import cell_of, surface

import fpmjax
from fpmjax import result_files
from fpmjax.errors import FpmError, OptionError
from fpmjax.folder_lock import LOCK
from fpmjax.grid import grid
from fpmjax.result_files import MANIFEST
from fpmjax.sweep import sweep

AXES = {"decode_requests": [1, 2, 8, 99], "kv_per_request": [16, 64, 500], "draft_length": [1, 3]}


@pytest.fixture(scope="module")
def model():
    return fpmjax.direct(cell_of(surface([1, 2, 4, 8, 16, 32], [0, 64, 256, 1024])))


def ask(model, **options):
    return sweep(model, grid(**AXES), **{"progress": False, "chunk": 3, **options})


def unfinished(model, folder, monkeypatch, **options):
    """A folder of the first parts of a sweep, 6 rows each; its manifest."""
    monkeypatch.setattr(result_files, "PART_ROWS", 6)
    write = result_files.Part.write

    def stopped(self, batch):
        if self.path.name == "part-00002.parquet":
            raise OSError(errno.ENOSPC, "no space")
        write(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(result_files.Part, "write", stopped)
        with pytest.raises(FpmError) as caught:
            ask(model, out=folder, **options)
    return json.loads((folder / MANIFEST).read_text()), str(caught.value)


@pytest.mark.parametrize("name", ["part-final.parquet", "part-1.parquet", ".mine.partial", "part-00009.parquet/"])
def test_files_with_names_like_parts_are_the_users(model, tmp_path, monkeypatch, name):
    folder = tmp_path / "new"
    unfinished(model, folder, monkeypatch)
    (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OptionError, match="other files"):
            ask(model, out=folder, overwrite=overwrite)
    assert (folder / name).exists()


def test_a_part_that_is_not_what_the_manifest_says_is_refused(model, tmp_path, monkeypatch):
    folder = tmp_path / "new"
    unfinished(model, folder, monkeypatch)
    part = folder / "part-00001.parquet"
    for harm, told in (
        (lambda: pq.write_table(pq.read_table(part).slice(1), part), "has 5 rows, but the manifest says 6"),
        (lambda: part.write_bytes(b"PAR1"), "not readable Parquet"),
        (lambda: part.write_bytes(b""), "not readable Parquet"),
    ):
        harm()
        with pytest.raises(OptionError, match=told) as caught:
            ask(model, out=folder)
        assert caught.value.code == "resume"
    part.unlink()  # one that is gone is made again
    assert ask(model, out=folder).rows == 24 and pq.read_table(folder).equals(ask(model))
    (folder / "part-00002.parquet").unlink()  # also of a result that was complete
    assert ask(model, out=folder).rows == 24 and pq.read_table(folder).equals(ask(model))


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../part-00000.parquet"},
        {"file": "part-00001.parquet"},
        {"file": 1},
        {"rows": "6"},
        {"rows": True},
        {"rows": -6},
        {"statuses": []},
        {"statuses": {"ok": 1.5}},
        {"faulty": None},
        {"faults": "no"},
        None,
    ],
)
def test_an_odd_manifest_is_refused_by_name(model, tmp_path, monkeypatch, change):
    folder = tmp_path / "new"
    manifest, _ = unfinished(model, folder, monkeypatch)
    manifest["parts"][0] = "part-00000.parquet" if change is None else manifest["parts"][0] | change
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(OptionError, match="damaged") as caught:
        ask(model, out=folder)
    assert caught.value.code == "resume"
    assert ask(model, out=folder, overwrite=True).rows == 24


def test_after_an_overwrite_one_goes_on_without_it(model, tmp_path, monkeypatch):
    ask(model, out=tmp_path / "new")
    _, told = unfinished(model, tmp_path / "new", monkeypatch, overwrite=True)
    assert "12 rows are complete, and the same call without overwrite goes on" in told
    assert ask(model, out=tmp_path / "new").rows == 24


def test_two_runs_never_write_one_folder(model, tmp_path, monkeypatch):
    folder, write = tmp_path / "new", result_files.Part.write
    refused = []

    def beside(self, batch):
        if not refused:
            with pytest.raises(OptionError, match=f"is being written by process {os.getpid()}") as caught:
                ask(model, out=folder, overwrite=True)
            refused.append(caught.value.code)
        write(self, batch)

    monkeypatch.setattr(result_files.Part, "write", beside)
    assert ask(model, out=folder).rows == 24 and refused == ["busy"]
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "part-00000.parquet"]
    assert pq.read_table(folder).equals(ask(model))


def test_the_lock_of_a_process_that_is_gone_is_taken_over(model, tmp_path, monkeypatch):
    folder = tmp_path / "new"
    unfinished(model, folder, monkeypatch)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for owner in (str(other.pid), "", "?"):
            (folder / LOCK).write_text(owner)
            with pytest.raises(OptionError, match="is being written by") as caught:
                ask(model, out=folder)
            assert caught.value.code == "busy" and (folder / LOCK).read_text() == owner
    (folder / LOCK).write_text(str(ended.pid))
    assert ask(model, out=folder).rows == 24 and not (folder / LOCK).exists()
    (folder / LOCK).write_text(str(os.getpid()))  # of an earlier process with the id of this one
    assert ask(model, out=folder, overwrite=True).rows == 24 and not (folder / LOCK).exists()
