"""Sweeps: every row in order and equal to `estimate`, in every form; files that appear whole, folders that go on."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tables import cell_of, surface

import fpmjax
from fpmjax import result_files, sweep_job
from fpmjax.answer import Interval, Support
from fpmjax.errors import FpmError, OptionError
from fpmjax.grid import grid
from fpmjax.result_files import MANIFEST
from fpmjax.status import Status
from fpmjax.sweep import sweep

AXES = {"decode_requests": [1, 2, 8, 99], "kv_per_request": [16, 64, 500], "draft_length": [1, 3]}
ROWS = [*surface([1, 2, 4, 8, 16, 32], [0, 64, 256, 1024]), ("prefill", 1, 8, 0, 3.0), ("prefill", 1, 16, 0, 5.0)]


@pytest.fixture(scope="module")
def model():
    return fpmjax.direct(cell_of(ROWS))


@pytest.fixture(scope="module")
def slower():
    return fpmjax.direct(cell_of([(*row[:4], 2 * row[4]) for row in ROWS]))


def ask(model, **options):
    return sweep(model, grid(**AXES), progress=False, **options)


def note_of(table):
    return json.loads(table.schema.metadata[b"fpmjax"])


# What comes back


def test_rows_are_those_of_estimate_in_the_order_of_the_grid(model):
    asked = grid(**AXES)
    work, depth = asked.work()
    expected = fpmjax.estimate(model, work, draft_length=depth, check=False)
    table = ask(model)
    for name, x in asked.columns().items():
        assert np.array_equal(table[name].to_numpy(), x)
    for name, x in (("latency_ms", expected.latency_ms), ("stp_latency_ms", expected.stp.latency_ms)):
        assert np.array_equal(table[name].to_numpy(), x, equal_nan=True)
    assert table["status"].to_pylist() == [Status(s).code for s in expected.status]
    assert table["calibrated"].to_pylist() == expected.calibrated.tolist()
    assert {"ok", "decode_no_two_sided_batch_bracket"} == set(table["status"].to_pylist())
    assert table["latency_ms"].null_count == (expected.status > 1).sum() > 0


def test_no_answer_depends_on_the_chunk(model):
    whole = ask(model, evidence=True)
    for chunk in (1, 5, 24):
        assert ask(model, evidence=True, chunk=chunk).combine_chunks() == whole.combine_chunks()


def test_a_reader_computes_as_it_is_read_and_numpy_holds_codes(model):
    reader = ask(model, form="reader", chunk=7)
    assert reader.read_next_batch().num_rows == 7
    assert reader.read_all().num_rows == 17
    arrays = ask(model, form="numpy")
    assert arrays["status"].dtype == np.int8 and set(arrays["status"]) == {0, Status.NO_BATCH_BRACKET}
    assert np.isnan(arrays["latency_ms"]).sum() == (arrays["status"] > 1).sum()
    assert arrays["decode_requests"].dtype == np.int64


def test_the_schema_says_what_was_asked_of_whom(model):
    note = note_of(ask(model, rule=fpmjax.SpeculativeRule("0.1", "1.5", "ours")))
    assert note["rule"] == {"slope": "0.1", "intercept": "1.5", "provenance": "ours"}
    assert note["units"]["latency_ms"] == "ms" and note["versions"]["fpmjax"] == fpmjax.__version__
    assert note["queries"]["axes"]["kv_per_request"] == {"values": 3, "least": 16, "most": 500}
    assert note["models"][0]["cell"]["system"] == "h200_sxm"
    assert note_of(sweep(model, grid(decode_requests=1, decode_kv=1), progress=False))["rule"] is None


def test_columns_are_chosen_by_name(model):
    assert ask(model, columns=["latency_ms", "decode_requests"]).column_names == ["decode_requests", "latency_ms"]
    with pytest.raises(OptionError, match="did you mean latency_ms"):
        ask(model, columns=["latency"])
    with pytest.raises(OptionError, match="columns is empty"):
        ask(model, columns=[])


def test_evidence_is_of_the_table_rows_and_explains_every_number(model):
    asked = grid(decode_requests=[0, 3, 8], decode_kv=[0, 100], prefill_requests=1, prefill_tokens=[8, 12])
    table = sweep(model, asked, evidence=True, progress=False)
    measured = np.array([row[4] for row in ROWS])
    for row in table.to_pylist():
        assert row["status"] == ("invalid_work" if not row["decode_requests"] and row["decode_kv"] else "ok")
        for phase in ("prefill", "decode", "baseline"):
            rows, weights = row[f"{phase}_rows"], row[f"{phase}_weights"]
            assert len(rows) == len(weights)
            if row[f"{phase}_ms"] is None:
                assert rows == [] and row[f"{phase}_resolution"] is None
            else:
                assert np.dot(measured[rows], weights) == pytest.approx(row[f"{phase}_ms"], rel=1e-12)
    assert "prefill_rows" not in ask(model, evidence=True).column_names


def test_what_a_model_says_of_itself_has_columns(model):
    class Stating:
        composition, execution = "whole_forward", "autoregressive"

        def on_host(self, work, *, evidence=False):
            found = model.on_host(work)
            nothing = np.isnan(found.latency_ms)
            low = Interval(0.9 * found.latency_ms, 1.1 * found.latency_ms, np.full(found.status.shape, 7), 0.9)
            return replace(found, interval=low, support=Support(np.where(nothing, np.nan, 0.5), found.latency_ms * 0))

    stating = Stating()
    table = sweep([stating, model], grid(decode_requests=[1, 99], decode_kv=64), progress=False)
    assert table["interval_low_ms"].to_pylist() == [pytest.approx(0.9 * 1.0625), None, None, None]
    assert table["interval_count"].to_pylist() == [7, 7, None, None]
    assert table["support_distance"].to_pylist() == [0.5, None, None, None]
    assert table["latency_ms"].to_pylist() == [1.0625, None] * 2


def test_a_total_beyond_32_bits_is_a_refused_row(model):
    table = sweep(model, grid(decode_requests=[1, 2**31], kv_per_request=[64, 2**32 - 1]), progress=False)
    words = table["status"].to_pylist()
    assert words[0] == "ok" and words[3] == "invalid_work" and table["latency_ms"][3].as_py() is None


# Many models


def test_several_models_are_asked_in_turn_or_where_the_grid_says(model, slower):
    asked = grid(**AXES)
    both = sweep({"fast": model, "slow": slower}, asked, progress=False)
    assert both["model"].to_pylist() == ["fast"] * 24 + ["slow"] * 24
    one, two = (sweep(m, asked, progress=False) for m in (model, slower))
    assert both.drop(["model"]).to_pylist() == one.to_pylist() + two.to_pylist()
    inner = sweep(None, grid(decode_requests=[1, 8], model=[model, slower], decode_kv=64), progress=False, chunk=3)
    assert inner["model"].to_pylist() == ["model 0", "model 1"] * 2
    assert inner["latency_ms"].to_pylist() == [1.0625, 2.125, 8.0625, 16.125]
    assert [m["name"] for m in note_of(inner)["models"]] == ["model 0", "model 1"]


def test_a_draft_length_of_nothing_is_an_ordinary_row(model):
    axes = {"decode_requests": [1, 2, 8, 99], "kv_per_request": [16, 64, 500]}
    found = sweep(model, grid(**axes, draft_length=[0, 3, 1]), progress=False, chunk=5)
    plain, drafted = (sweep(model, grid(**axes, **more), progress=False) for more in ({}, {"draft_length": [3, 1]}))
    rows = found.to_pylist()
    for name in ("latency_ms", "status"):
        assert [row[name] for row in rows if not row["draft_length"]] == plain[name].to_pylist()
    assert [row for row in rows if row["draft_length"]] == drafted.to_pylist()
    zero = [row for row in rows if not row["draft_length"]]
    assert all(row["scaling_factor"] == 1.0 and row["calibrated"] is None for row in zero)
    assert [row["stp_latency_ms"] for row in zero] == plain["latency_ms"].to_pylist()
    mixed = {"decode_requests": [0, 1], "decode_kv": 0, "prefill_requests": 1, "prefill_tokens": [8, 12]}
    with_prefill, without = (sweep(model, grid(**mixed, **more), progress=False) for more in ({"draft_length": 0}, {}))
    assert with_prefill.select(without.column_names).equals(without, check_metadata=False)


def test_a_number_of_rows_may_be_of_numpy(model):
    assert ask(model, chunk=np.int64(7)).equals(ask(model, chunk=7))


def test_a_name_may_be_anything(model):
    names = sweep({"\ud800": model, 7: model}, grid(decode_requests=1, decode_kv=64), progress=False)["model"]
    assert names.to_pylist() == ["\\ud800", "7"]


def test_cells_are_named_by_what_tells_them_apart():
    cells = [cell_of(ROWS), replace(cell_of(ROWS), identity=replace(cell_of(ROWS).identity, tp=4, moe_tp=4))]
    table = sweep([fpmjax.direct(c) for c in cells], grid(decode_requests=1, decode_kv=64), progress=False)
    assert table["model"].to_pylist() == ["tp=1 moe_tp=1", "tp=4 moe_tp=4"]


def test_a_thousand_sizes_compile_four_times_at_most(model):
    from fpmjax.estimate import answer

    before = answer._cache_size()
    for n in (1, 63, 65, 900, 5000, 20_000):
        sweep(model, grid(decode_requests=[1, 2], kv_per_request=range(n)), progress=False)
    assert answer._cache_size() - before <= 4


# Files


def test_a_file_appears_when_it_is_complete_and_an_existing_one_stays(model, tmp_path):
    path = tmp_path / "x.parquet"
    done = ask(model, out=path, evidence=True, chunk=10)
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]
    assert (done.rows, done.answered) == (24, done.statuses["ok"]) and sum(done.statuses.values()) == 24
    table = pq.read_table(path)
    assert table.equals(ask(model, evidence=True)) and note_of(table) == note_of(ask(model, evidence=True))
    file = pq.ParquetFile(path)
    assert file.num_row_groups == 3 and file.metadata.row_group(0).column(0).compression == "ZSTD"
    with pytest.raises(OptionError, match="exists") as caught:
        ask(model, out=path)
    assert caught.value.code == "exists"
    ask(model, out=path, overwrite=True)
    assert pq.read_table(path).column_names == ask(model).column_names


def test_a_folder_holds_numbered_parts_and_a_manifest(model, tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "PART_ROWS", 10)
    done = ask(model, out=f"{tmp_path}/new/", chunk=5)
    names = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert names == [MANIFEST, "part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    assert pq.read_table(tmp_path / "new").equals(ask(model)) and done.rows == 24
    manifest = json.loads((tmp_path / "new" / MANIFEST).read_text())
    assert manifest["complete"] and [p["rows"] for p in manifest["parts"]] == [10, 10, 4]
    with pytest.raises(OptionError, match="complete"):
        ask(model, out=tmp_path / "new")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space"), OSError(errno.EIO, "gone")])
def test_an_interrupted_folder_goes_on_where_it_was(model, tmp_path, monkeypatch, error):
    monkeypatch.setattr(result_files, "PART_ROWS", 6)
    asked, real = [], sweep_job.estimate

    def failing(*args, **options):
        asked.append(len(args[1].decode_requests))
        return real(*args, **options)

    monkeypatch.setattr(sweep_job, "estimate", failing)
    write, written = result_files.Part.write, []

    def full(self, batch):
        if len(written) == 3:
            raise error
        written.append(batch)
        write(self, batch)

    monkeypatch.setattr(result_files.Part, "write", full)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FpmError) as caught:
        ask(model, out=tmp_path / "new", chunk=3)
    if isinstance(error, OSError):
        assert caught.value.code == ("disk_full" if error.errno == errno.ENOSPC else "unwritable")
        assert "6 rows are complete" in str(caught.value) and "hint: " in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [MANIFEST, "part-00000.parquet"]
    monkeypatch.setattr(result_files.Part, "write", write)
    for other in ({"evidence": True}, {"columns": ["latency_ms"]}, {"rule": fpmjax.SpeculativeRule("0.1", "1")}):
        with pytest.raises(OptionError, match="another question") as refused:
            ask(model, out=tmp_path / "new", chunk=3, **other)
        assert refused.value.code == "resume"
    asked.clear()
    done = ask(model, out=tmp_path / "new", chunk=4)
    assert sum(asked[1:]) == 18  # the first one asks which columns there are
    assert done.rows == 24 and sum(done.statuses.values()) == 24
    assert pq.read_table(tmp_path / "new").equals(ask(model))


def test_a_full_disk_leaves_no_half_file(model, tmp_path, monkeypatch):
    def full(self, batch, **_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", full)
    with pytest.raises(FpmError, match="the disk is full") as caught:
        ask(model, out=tmp_path / "x.parquet")
    assert caught.value.code == "disk_full" and list(tmp_path.iterdir()) == []


def test_a_cancelled_run_loses_nothing_that_was_complete(model, tmp_path, monkeypatch):
    monkeypatch.setattr(result_files, "PART_ROWS", 6)
    real, asked = sweep_job.estimate, []

    def cancelled(*args, **options):
        asked.append(1)
        if len(asked) > 4:
            raise KeyboardInterrupt
        return real(*args, **options)

    (tmp_path / "old.parquet").write_text("old")
    for out in ("new.parquet", "old.parquet", "folder"):
        asked.clear()
        monkeypatch.setattr(sweep_job, "estimate", cancelled)
        with pytest.raises(KeyboardInterrupt):
            ask(model, out=tmp_path / out, chunk=3, overwrite=out != "folder")
        monkeypatch.setattr(sweep_job, "estimate", real)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "old.parquet"]
    assert (tmp_path / "old.parquet").read_text() == "old"
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == [MANIFEST, "part-00000.parquet"]
    assert ask(model, out=tmp_path / "folder").rows == 24


def test_another_grid_or_model_never_goes_on(model, slower, tmp_path, monkeypatch):
    monkeypatch.setattr(result_files.FolderOut, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(model, out=tmp_path / "new")
    monkeypatch.undo()
    other = grid(**AXES | {"kv_per_request": [16, 65, 500]})
    for models, queries in ((model, other), (slower, grid(**AXES))):
        with pytest.raises(OptionError, match="another question"):
            sweep(models, queries, out=tmp_path / "new", progress=False)
    done = sweep(model, other, out=tmp_path / "new", progress=False, overwrite=True)
    assert pq.read_table(tmp_path / "new").equals(sweep(model, other, progress=False)) and done.rows == 24


def test_what_was_there_before_is_left_alone(model, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OptionError, match=r"other files \(mine.txt\)"):
            ask(model, out=tmp_path, overwrite=overwrite)
    with pytest.raises(OptionError, match="no Parquet file"):
        ask(model, out=tmp_path / "x.csv")
    with pytest.raises(FpmError) as caught:
        ask(model, out=tmp_path / "absent" / "x.parquet")
    assert caught.value.code == "unwritable"
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_progress_is_silent_in_pipes(model, capsys):
    sweep(model, grid(**AXES))
    assert capsys.readouterr() == ("", "")


def test_a_grid_without_answers_keeps_its_columns(model, tmp_path):
    empty = sweep(
        model, pa.table(dict.fromkeys(("batch", "kv"), pa.array([], pa.int64()))), out=f"{tmp_path}/e/", progress=False
    )
    assert empty.rows == 0 and pq.read_table(tmp_path / "e").num_rows == 0
