"""Comparisons: differences where both answer, and who answers where only one does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from small_tables import cell_of, surface

import fpmjax
from fpmjax.compare import compare, compare_names, difference_summary, worst_rows
from fpmjax.errors import OptionError
from fpmjax.grid import grid

KV = [0, 64, 256, 1024]
ASKED = grid(decode_requests=[0, 1, 3, 8, 12, 40], decode_kv=[0, 64, 512], draft_length=[1, 2])


@pytest.fixture(scope="module")
def both():
    a = fpmjax.direct(cell_of(surface([1, 2, 4, 8, 16], KV)))
    b = fpmjax.direct(cell_of([(*r[:4], r[4] + r[1]) for r in surface([2, 4, 8, 16, 32, 64, 128], KV)]))
    return a, b


def test_every_number_is_that_of_the_two_models(both):
    table = compare(*both, ASKED, progress=False)
    work, depth = ASKED.work()
    a, b = (fpmjax.estimate(m, work, draft_length=depth, check=False) for m in both)
    for name, x in (("a", a.latency_ms), ("b", b.latency_ms), (None, b.latency_ms - a.latency_ms)):
        column = table[f"{name}_latency_ms" if name else "difference_ms"]
        assert np.array_equal(column.to_numpy(), x, equal_nan=True)
    with np.errstate(invalid="ignore"):
        percent = 100.0 * (b.latency_ms - a.latency_ms) / a.latency_ms
    assert np.array_equal(table["difference_pct"].to_numpy(), percent, equal_nan=True)
    assert table.column_names == [
        *ASKED.names,
        *("a_latency_ms", "b_latency_ms", "a_status", "b_status", "difference_ms", "difference_pct"),
    ]


def test_the_summary_is_that_of_the_rows(both):
    table = compare(*both, ASKED, progress=False)
    found = difference_summary(table)
    has_a, has_b = (~np.isnan(table[f"{x}_latency_ms"].to_numpy()) for x in "ab")
    assert found["rows"] == 36 == found["both"] + found["only_a"] + found["only_b"] + found["neither"]
    assert found["only_a"] == (has_a & ~has_b).sum() and found["only_b"] == (has_b & ~has_a).sum() > 0
    for unit in ("ms", "pct"):
        x = table[f"difference_{unit}"].to_numpy()
        x = x[~np.isnan(x)]
        assert found[f"median_{unit}"] == np.median(x) and found[f"p90_{unit}"] == np.percentile(np.abs(x), 90)
        assert abs(found[f"worst_{unit}"]) == np.abs(x).max()
    assert table["difference_pct"][found["worst_row"]].as_py() == found["worst_pct"]
    order = worst_rows(table, 99)
    sizes = np.abs(table["difference_pct"].to_numpy()[order])
    assert order[0] == found["worst_row"] and (np.diff(sizes) <= 0).all() and (sizes > 0).all()


def test_a_model_differs_from_itself_nowhere(both):
    table = compare(both[0], both[0], ASKED, progress=False)
    found = difference_summary(table)
    assert found["worst_ms"] == 0 and found["only_a"] == found["only_b"] == 0 and not len(worst_rows(table, 9))


def test_without_common_answers_the_summary_says_none(both):
    found = difference_summary(compare(*both, grid(decode_requests=500, decode_kv=1), progress=False))
    assert found["neither"] == 1 and found["median_ms"] is None is found["worst_pct"] and found["worst_row"] is None


def test_tables_of_queries_are_compared_too(both):
    asked = pa.table({"batch": [2, None], "kv": [64, 64], "who": ["x", "y"]})
    table = compare(*both, asked, progress=False)
    assert table["who"].to_pylist() == ["x", "y"] and table["difference_ms"].to_pylist() == [2.0, None]
    assert table["a_status"].to_pylist() == ["ok", "invalid_work"] and table["fault"].null_count == 1
    with pytest.raises(OptionError, match="a_status"):
        compare(*both, pa.table({"batch": [2], "kv": [0], "a_status": [1]}), progress=False)


def test_the_schema_names_both_models(both):
    note = json.loads(compare(*both, ASKED, progress=False).schema.metadata[b"fpmjax"])
    assert [m["name"] for m in note["models"]] == ["a", "b"] and note["units"]["difference_pct"] == "%"
    assert note["models"][0]["digest"] != note["models"][1]["digest"]


def test_names_tell_the_two_cells_apart(both, embedded_cells):
    small, large = (fpmjax.direct(embedded_cells.select(tp=tp)) for tp in (1, 4))
    assert compare_names(*both) == ("A", "B") == compare_names(small, small)
    names = compare_names(small, large)
    assert [name.split()[0] for name in names] == ["tp=1", "tp=4"]
    table = compare(small, large, grid(decode_requests=1, decode_kv=1024), progress=False)
    models = json.loads(table.schema.metadata[b"fpmjax"])["models"]
    assert [m["called"] for m in models] == list(names) and [m["cell"]["tp"] for m in models] == [1, 4]


def test_what_is_no_comparison_is_refused(both):
    rows: Any = fpmjax.sweep(both[0], ASKED, progress=False)
    for table in (rows, rows.to_pydict(), None, compare(*both, ASKED, progress=False).drop(["difference_pct"])):
        for ask in (difference_summary, lambda table: worst_rows(table, 3)):
            with pytest.raises(OptionError, match="is no comparison\nhint: ") as caught:
                ask(table)
            assert caught.value.code == "table"


def test_a_draft_length_of_nothing_is_compared_as_ordinary_decoding(both):
    axes = {"decode_requests": [1, 2, 8], "decode_kv": [0, 64]}
    plain, zero = (compare(*both, grid(**axes, **more), progress=False) for more in ({}, {"draft_length": 0}))
    assert zero.drop(["draft_length"]).to_pylist() == plain.to_pylist()


def test_a_grid_of_models_is_no_comparison(both):
    with pytest.raises(OptionError) as caught:
        compare(*both, grid(decode_requests=1, decode_kv=0, model=list(both)), progress=False)
    assert caught.value.code == "models"


def test_each_side_is_one_model(both):
    for a, b in ((list(both), both[1]), (both[0], {"x": both[1]}), (None, both[1]), ([both[0]], both[1])):
        with pytest.raises(OptionError, match="one model is compared with one other") as caught:
            compare(a, b, ASKED, progress=False)
        assert caught.value.code == "models"
