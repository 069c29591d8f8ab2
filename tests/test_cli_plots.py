"""`fpmjax sweep --plot` and `fpmjax compare --plot`, and what both commands say and refuse around them."""

from __future__ import annotations

import importlib

import pyarrow.parquet as pq
import pytest

pytest.importorskip("matplotlib")

import fpmjax
from fpmjax.cli.sweep import SHOWS

TP1 = ("embedded", "--select", "tp=1")
AXES = ("--batch", "1,8,16,999", "--kv-per-request", "512:2048:x2")
PAIR = ("compare", "embedded", *TP1, "--select-b", "tp=4")


@pytest.mark.parametrize(("show", "suffix"), [(None, "png"), *((show, "svg") for show in SHOWS if show != "latency")])
def test_a_picture_alone_prints_one_line(fpm, tmp_path, show, suffix):
    path = tmp_path / f"x.{suffix}"
    drafts = ("--draft-length", "1,2") if show == "draft-length" else ()
    ran = fpm("sweep", *TP1, *AXES, *drafts, "--plot", path, *(("--show", show) if show else ()))
    cells = 24 if drafts else 12
    assert ran.code == 0 and ran.out.startswith(f"{path}: {show or 'latency'} of {cells} cells, ")
    assert "queries have no answer" in ran.err
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_rows_and_reductions_stand_beside_a_picture(fpm, tmp_path):
    plot = ("--plot", tmp_path / "x.svg")
    assert fpm("sweep", *TP1, *AXES, *plot, "--out", tmp_path / "rows.parquet").out.endswith("12 rows, 9 answered\n")
    assert pq.read_metadata(tmp_path / "rows.parquet").num_rows == 12 and (tmp_path / "x.svg").stat().st_size
    (tmp_path / "x.svg").unlink()
    ran = fpm("sweep", *TP1, *AXES, *plot, "--keep", "decode_requests")
    assert len(ran.out.splitlines()) == 5 and (tmp_path / "x.svg").stat().st_size


def test_tokens_per_round_choose_a_draft_length(fpm, tmp_path):
    asked = ("sweep", *TP1, *AXES, "--draft-length", "0:2", "--plot", tmp_path / "x.svg", "--show", "draft-length")
    assert fpm(*asked, "--tokens-per-round", "1,1.6,2.1").code == 0
    fpm(*asked, "--tokens-per-round", "1,1.6").refused(
        "--tokens-per-round says nothing of draft length 2", "hint: --tokens-per-round takes a list"
    )
    fpm(*asked, "--tokens-per-round", "1,3,2").refused("--tokens-per-round: tokens at draft length 1 is 3.0")
    fpm(*asked, "--tokens-per-round", "1,x").refused("'x' is not a number")


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--show", "latency"), ("--show is about the picture, and needs --plot",)),
        (("--tokens-per-round", "1,2"), ("--tokens-per-round is about the picture",)),
        (("--plot", "x.png", "--tokens-per-round", "1,2"), ("needs --show draft-length",)),
        (("--plot", "x.pdf"), ("'x.pdf' is no picture by its name", "end it in .png or .svg")),
        (("--plot", "absent/x.png"), ("the folder absent does not exist",)),
        (("--plot", "x.png", "--columns", "latency_ms"), ("--plot alone prints none",)),
        (("--plot", "x.png", "--evidence"), ("--evidence needs --out",)),
        (("--plot", "x.png", "--json"), ("--json needs --out",)),
        (("--plot", "x.png", "--show", "draft-length"), ("none is asked", "hint: add --draft-length 1:4")),
        (("--plot", "x.png", "--draft-length", "1:40"), ("40 panels", "fewer models or draft lengths")),
        (("--plot", "x.png", "--show", "surface"), ("invalid choice",)),
        (("--keep", "none", "--out", "absent/r.parquet"), ("the folder absent does not exist",)),
        (("--keep", "none", "--out", "r.csv"), ("r.csv is no Parquet file by its name", "hint: name r.parquet")),
        (("--out", "absent/r.parquet"), ("the folder absent does not exist",)),
        (("--overwrite",), ("--overwrite needs --out",)),
    ],
)
def test_nonsense_is_refused_before_anything_is_computed(fpm, tmp_path, monkeypatch, flags, texts):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fpmjax.sweep_job.answers", None)
    fpm("sweep", *TP1, *AXES, *flags).refused(*texts)
    assert not list(tmp_path.iterdir())


def test_a_picture_needs_a_grid_with_axes(fpm, tmp_path):
    (tmp_path / "q.csv").write_text("batch,kv\n1,512\n")
    plot = ("--plot", tmp_path / "x.png")
    fpm("sweep", *TP1, "--spec", tmp_path / "q.csv", *plot).refused("--plot draws a grid, not a table of queries")
    fpm(*PAIR, "--spec", tmp_path / "q.csv", *plot).refused("--plot draws a grid")
    fpm("sweep", *TP1, "--batch", "1", "--kv", "9", *plot).refused("axis of several values", "--decode-requests 1:64")
    fpm(*PAIR, "--batch", "1", "--kv", "9", *plot).refused("axis of several values")
    fpm("sweep", *TP1, "--batch", "1:2000", "--kv", "1:2000", *plot).refused("at most 1,048,576 cells")
    fpm("sweep", *TP1, "--batch", "900,999", "--kv", "9", *plot).refused("no cell of this grid", code=3)


def test_every_cell_is_about_tables(fpm, tmp_path, embedded_cell):
    path = tmp_path / "m.npz"
    fpmjax.save_model(fpmjax.direct(embedded_cell), path)
    fpm("sweep", path, "--every-cell", *AXES).refused("--every-cell is about tables")
    assert fpm("sweep", path, "embedded", "--every-cell", *AXES).code == 0
    fpm("compare", "embedded", path, "--select", "tp=1", "--select-b", "tp=2", *AXES).refused(
        "--select-b is about tables"
    )
    ran = fpm("compare", *TP1, path, *AXES)
    assert "A embedded: direct rule over Qwen/Qwen3-32B" in ran.out and f"B {path}: direct rule" in ran.out


def test_a_comparison_says_which_cells_and_which_rows(fpm, tmp_path):
    ran = fpm(*PAIR, *AXES, "--plot", tmp_path / "d.svg")
    assert ran.out.startswith("A embedded tp=1: direct rule over Qwen/Qwen3-32B") and "\nB embedded tp=4: " in ran.out
    assert (tmp_path / "d.svg").read_bytes().startswith(b"<?xml")
    document = fpm(*PAIR, *AXES, "--json").document
    assert (document["a"], document["b"]) == ("embedded tp=1", "embedded tp=4")
    assert [document[f"{x}_model"]["cell"]["tp"] for x in "ab"] == [1, 4]
    (tmp_path / "q.csv").write_text("batch,kv\n1,512\nx,512\n8,4096\n")
    ran = fpm(*PAIR, "--spec", tmp_path / "q.csv")
    assert ran.code == 0 and "note: 1 rows cannot be asked" in ran.err and "line 3: batch is 'x'" in ran.err


def test_a_comparison_is_refused_before_it_is_computed(fpm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fpmjax.sweep_job.answers", None)
    for flags, texts in (
        (("--out", "absent/d.parquet"), ("the folder absent does not exist", "hint: make it first")),
        (("--out", "d.csv"), ("d.csv is no Parquet file by its name", "hint: name d.parquet")),
        (("--out", "d"), ("d is no Parquet file by its name", "hint: name d.parquet")),
        (("--out", tmp_path), ("is a folder", "x.parquet")),
        (("--overwrite",), ("--overwrite needs --out",)),
        (("--plot", "d.pdf"), ("is no picture by its name",)),
    ):
        fpm(*PAIR, *AXES, *flags).refused(*texts)


def test_columns_stand_in_the_order_of_all(fpm):
    ran = fpm("sweep", *TP1, *AXES, "--columns", "status,latency_ms")
    assert ran.out.splitlines()[0] == '"latency_ms","status"'
    assert "in the order of all of them" in " ".join(fpm("sweep", "--help").out.split())


def test_kept_models_are_told_by_their_names(fpm):
    ran = fpm("sweep", "embedded", "--every-cell", *AXES, "--keep", "model")
    assert [line.split(",")[0].strip('"') for line in ran.out.splitlines()[1:]] == [
        f"embedded tp={n}" for n in (1, 2, 4)
    ]


@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_help_shows_how_to_draw(fpm, command):
    text = fpm(command, "--help").out
    assert "--plot FILE" in text and "--plot " in text.partition("examples:")[2]
    if command == "sweep":
        assert all(
            f"\n  {show} " in text for show in ("latency", "throughput", "coverage", "draft-length", "sensitivity")
        )


def test_short_names_of_axes_are_taken_wherever_axes_are_named(fpm):
    asked = ("sweep", *TP1, "--batch", "1,8", "--kv", "8192,16384")
    kept = fpm(*asked, "--keep", "batch")
    assert kept.code == 0 and kept.out.splitlines()[0].startswith('"decode_requests",')
    assert fpm(*asked, "--keep", "decode-requests,kv").code == 0
    assert fpm(*asked, "--columns", "batch,latency_ms").out.splitlines()[0] == '"decode_requests","latency_ms"'
    fpm(*asked, "--keep", "batch,decode_requests").refused("--keep names an axis twice")


def test_a_picture_beside_rows_is_told(fpm, tmp_path):
    plot = ("--plot", tmp_path / "x.svg")
    ran = fpm("sweep", *TP1, *AXES, *plot, "--keep", "none")
    assert f"note: {tmp_path / 'x.svg'}: latency of 12 cells, 9 answered" in ran.err
    ran = fpm(*PAIR, *AXES, *plot, "--json")
    assert f"note: {tmp_path / 'x.svg'}: differences of 12 cells" in ran.err and ran.document["rows"] == 12


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--keep", "none", "--quantiles", "2"), ("--quantiles is (2.0,)", "such as --quantiles 0.5,0.99")),
        (("--keep", "none", "--limit-ms", "-1"), ("--limit-ms is -1.0", "such as --limit-ms 50")),
        (("--keep", "none", "--pareto", "--limit-ms", "9"), ("leave --pareto out",)),
        (
            ("--plot", "x.png", "--draft-length", "1,3", "--show", "draft-length", "--tokens-per-round", "1,2"),
            ("says nothing of draft length 3", "to the largest one that is asked"),
        ),
    ],
)
def test_hints_speak_in_flags(fpm, tmp_path, monkeypatch, flags, texts):
    monkeypatch.chdir(tmp_path)
    fpm("sweep", *TP1, *AXES, *flags).refused(*texts)


def test_what_is_there_is_replaced_with_a_flag(fpm, tmp_path):
    for out in (tmp_path / "x.parquet", f"{tmp_path}/folder/"):
        assert fpm("sweep", *TP1, *AXES, "--out", out).code == 0
        ran = fpm("sweep", *TP1, *AXES, "--out", out)
        ran.refused("add --overwrite")
        assert "say overwrite" not in ran.err
    (tmp_path / "a.json").write_text('{"decode_requests": [1.5], "decode_kv": 9}')
    ran = fpm("sweep", *TP1, "--spec", tmp_path / "a.json")
    ran.refused("a.json: decode_requests is", 'or a text such as "1:64"')
    nothing = ("--batch", "900,999", "--kv", "9", "--plot", tmp_path / "x.png")
    fpm("sweep", *TP1, *nothing).refused("--show coverage` tells why", code=3)


@pytest.mark.parametrize("kept", [0, 2])
def test_an_interrupt_tells_of_the_parts_that_there_are(fpm, tmp_path, monkeypatch, kept):
    folder = tmp_path / "out"

    def stopped(*_, **__):
        folder.mkdir()
        for i in range(kept):
            (folder / f"part-{i:05}.parquet").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("fpmjax.sweep"), "to_files", stopped)
    ran = fpm("sweep", *TP1, *AXES, "--out", f"{folder}/")
    assert ran.code == 130 and ("complete parts stay (2), and the same command goes on" in ran.err) == bool(kept)
    assert kept or "part" not in ran.err.replace(str(tmp_path), "")
