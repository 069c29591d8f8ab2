"""Several writers of one table, and arguments of the table functions that mean nothing."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from table_pairs import IDENTITY, NAME, ROWS, refusal

from fpmjax.errors import CellNotFoundError, MetricsError, TableError
from fpmjax.tables.load import load_cells
from fpmjax.tables.write import write_table

SEAL = NAME.replace(".parquet", ".metadata.json")
MINIMAL = {name: values for name, values in ROWS.items() if name != "kv_seed_regime"}


def write(folder: Path, **options) -> Path:
    return write_table(folder, **{"rows": MINIMAL, "identity": IDENTITY} | options)


def no_links(*_):
    raise OSError(95, "Operation not supported")


def together(tmp_path: Path, writers: int) -> list[float | str]:
    """What each writer that starts at the same moment gets: its latency, or the code of its refusal."""
    barrier, got = threading.Barrier(writers), []

    def run(latency: float) -> None:
        barrier.wait()
        try:
            write(tmp_path, rows=MINIMAL | {"latency_ms": latency})
            got.append(latency)
        except TableError as error:
            got.append(error.code)

    threads = [threading.Thread(target=run, args=(1.0 + i,)) for i in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("links", [True, False])
def test_of_racing_writers_one_succeeds_and_its_pair_stays(tmp_path, monkeypatch, links):
    real = Path.exists  # every writer finds the folder empty when it looks
    monkeypatch.setattr(Path, "exists", lambda path: path.suffix not in (".parquet", ".json") and real(path))
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    got = together(tmp_path, 6)
    (winner,) = [x for x in got if x != "exists"]
    assert len(got) == 6 and load_cells(tmp_path).select().decode.latency_ms[0] == winner
    assert sorted(os.listdir(tmp_path)) == [SEAL, NAME]


@pytest.mark.parametrize("taken", [NAME, SEAL])
def test_a_file_that_appears_at_the_last_moment_is_kept(tmp_path, monkeypatch, taken):
    real = os.link

    def late(source, target):
        if Path(target).name == taken:
            Path(target).write_text("theirs")
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    code, message = refusal(write, tmp_path, error=TableError)
    assert code == "exists" and message.startswith(f"{tmp_path / taken} exists already")
    assert os.listdir(tmp_path) == [taken] and (tmp_path / taken).read_text() == "theirs"


@pytest.mark.parametrize(("name", "nth"), [("link", 1), ("link", 2), *(("fsync", nth) for nth in range(1, 5))])
def test_a_failure_leaves_nothing_where_nothing_was(tmp_path, monkeypatch, name, nth):
    """Without hard links the third and fourth sync are those of the files under their own names."""
    monkeypatch.setattr(os, "link", no_links)
    real, calls = getattr(os, name), []

    def failing(*args):
        calls.append(args)
        if len(calls) == nth:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path)
    assert os.listdir(tmp_path) == []


# ---- arguments that mean nothing


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"policy": []}, "measurement_policy", "measurement_policy=[]"),
        ({"schema_version": np.array([6, 7])}, "schema_version", "schema_version=array([6, 7])"),
        ({"schema_version": 10**5000}, "schema_version", "schema_version=some int"),
        ({"sidecar": [1]}, "sidecar_json", "sidecar is [1]"),
        ({"sidecar": "abc"}, "sidecar_json", "sidecar is 'abc'"),
        ({"sidecar": {"row_count": np.array([6, 6])}}, "sidecar_conflict", "row_count=array([6, 6]) contradicts 6"),
        ({"rows": MINIMAL | {"batch_size": np.ma.array([1, 1, 1, 4, 8, 8], mask=[0, 0, 1, 0, 0, 1])}},
         "column_type", 'column "batch_size" is a masked array in which 2 values are masked'),
        ({"rows": MINIMAL | {"batch_size": {1, 2, 3, 4, 5, 6}}}, "column_type", 'column "batch_size" is a set, which'),
        ({"rows": MINIMAL | {"batch_size": dict.fromkeys(range(1, 7))}}, "column_type", "is a dict, which"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name(tmp_path, options, code, text):
    found, message = refusal(write, tmp_path / "new", error=TableError, **options)
    assert found == code and text in message
    assert not (tmp_path / "new").exists()


def test_a_masked_array_without_masked_entries_is_an_array(tmp_path):
    rows = MINIMAL | {"batch_size": np.ma.array(MINIMAL["batch_size"])}
    assert load_cells(write(tmp_path, rows=rows)).digest == load_cells(write(tmp_path / "plain")).digest


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_folder_that_is_no_path_is_refused(tmp_path, name):
    assert refusal(write, tmp_path / name, error=TableError)[0] == "unwritable"


def test_roles_widths_and_fields_of_any_type_are_refused(tmp_path):
    cells = load_cells(write(tmp_path))
    cell = cells.select()
    assert refusal(cell.check_ready, ["x"], error=MetricsError)[0] == "role"
    assert refusal(cell.check_ready, "decode", verify_width=-(10**5000), error=MetricsError)[0] == "verify_width"
    code, message = refusal(cells.select, tp=10**5000, error=CellNotFoundError)
    assert code == "cell_not_found" and "tp=1 instead of some int" in message


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda cells: pickle.loads(pickle.dumps(cells))])
def test_cells_can_be_copied(tmp_path, again):
    cells = load_cells(write(tmp_path))
    other = again(cells)
    assert list(other) == list(cells) and other.sidecar == cells.sidecar and other.digest == cells.digest
    assert other.select().decode.latency_ms.tolist() == cells.select().decode.latency_ms.tolist()
    with pytest.raises(TypeError):
        other.sidecar["row_count"] = 5


def test_what_is_no_file_is_said_to_be_none(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    for path in ("/dev/null", tmp_path / "pipe.parquet"):
        code, message = refusal(load_cells, path, error=TableError)
        assert code == "unreadable" and message.startswith(f"{path} is not a regular file")
