"""`fpmjax selfcheck`: its recorded answers are the oracle's, and it counts what differs."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import build_selfcheck

from fpmjax.cli import selfcheck
from fpmjax.data import embedded_table


def test_the_recorded_answers_are_the_oracle_s(embedded_cells):
    with np.load(embedded_table().with_name("selfcheck.npz"), allow_pickle=False) as shipped:
        fresh = build_selfcheck.golden()
        assert set(shipped) == set(fresh)
        for name, value in fresh.items():
            np.testing.assert_array_equal(shipped[name], value, err_msg=name)
    assert str(fresh["digest"]) == embedded_cells.digest


def test_the_recorded_answers_take_every_way_a_lookup_can_go():
    golden = build_selfcheck.golden()
    ways = {int(r) for table in ("embedded", "awkward") for r in np.unique(golden[f"{table}.mixed.resolution"])}
    assert ways == {-1, 0, 1, 2, 3, 4}
    assert embedded_table().with_name("selfcheck.npz").stat().st_size < 200_000


@pytest.mark.smoke
def test_selfcheck_finds_every_bit_equal_on_a_cpu(fpm):
    ran = fpm("selfcheck", "--json")
    assert ran.code == 0 and ran.document["equal"] == ran.document["answers"] > 10_000
    assert all(kind["worst_ulp"] == 0 for kind in ran.document["kinds"])


def test_another_table_than_the_recorded_one_is_no_comparison(fpm, monkeypatch, tmp_path):
    import shutil

    shipped = embedded_table()
    for name in (shipped.name, shipped.with_suffix(".metadata.json").name):
        shutil.copy(shipped.with_name(name), tmp_path)
    with np.load(shipped.with_name("selfcheck.npz"), allow_pickle=False) as golden:
        np.savez(tmp_path / "selfcheck.npz", **(dict(golden) | {"digest": np.array("0" * 64)}))
    monkeypatch.setattr("fpmjax.data.embedded_table", lambda: tmp_path / shipped.name)
    fpm("selfcheck").refused("the recorded answers belong to another embedded table\nhint: install fpmjax again")


def test_selfcheck_counts_what_differs_and_says_so(fpm, monkeypatch):
    line = selfcheck.Line("decode ms")
    line.compare(np.array([1.0, 2.0, np.nan, 4.0]), np.array([1.0, np.nextafter(np.nextafter(2.0, 3), 3), np.nan, 4.0]))
    assert (line.answers, line.equal, line.worst_ulp) == (4, 3, 2)
    other = selfcheck.Line("statuses")
    other.compare(np.array([1, 2], np.int8), np.array([1, 3]))
    assert (other.answers, other.equal, other.worst_ulp) == (2, 1, None)
    gone = selfcheck.Line("prefill ms")
    gone.compare(np.array([1.0]), np.array([np.nan]))
    assert (gone.equal, gone.worst_ulp) == (0, None)
    monkeypatch.setattr("fpmjax.cli.selfcheck.check", lambda: [line, other])
    ran = fpm("selfcheck")
    assert ran.code == 1 and ran.out.endswith("4 of 6 values are equal to the last bit\n")
