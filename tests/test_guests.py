"""Results in other people's tools: pandas, Polars and DuckDB read them and join their evidence to the measured rows.

Each is an example to be copied.  Evidence names rows of the table's Parquet file, counted from 0; the sum of weight
times measured milliseconds is the looked-up time again.
"""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

import fpmjax
from fpmjax.grid import grid
from fpmjax.sweep import sweep

GRID = grid(decode_requests=[1, 3, 8, 999], kv_per_request=[512, 700, 4096], draft_length=[1, 2])
COLUMNS = ["latency_ms", "system", "batch_size", "total_kv_read_tokens"]


@pytest.fixture(scope="module")
def result(tmp_path_factory, embedded_cell):
    """(one file, a folder of parts) of the same sweep, with evidence."""
    folder = tmp_path_factory.mktemp("guests")
    for out in (folder / "rows.parquet", folder / "rows"):
        sweep(fpmjax.direct(embedded_cell), GRID, out=out, evidence=True, progress=False)
    return folder / "rows.parquet", folder / "rows"


@pytest.fixture(scope="module")
def answered(result):
    """(work, looked-up milliseconds) of every answered row, in order."""
    table = pq.read_table(result[0])
    rows = [row for row in table.to_pylist() if row["latency_ms"] is not None]
    assert 0 < len(rows) < table.num_rows
    return [tuple(row[name] for name in (*GRID.names, "stp_latency_ms")) for row in rows]


def equal(found, answered):
    assert [tuple(row[:3]) for row in found] == [row[:3] for row in answered]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in answered], rel=1e-12)


def test_pandas(result, embedded_path, answered):
    pd = pytest.importorskip("pandas", reason="pandas is not installed; it is in the extra `guests`")
    rows = pd.read_parquet(result[0])
    assert rows["status"].dtype == "category" and rows["latency_ms"].isna().sum() == len(rows) - len(answered)
    measured = pd.read_parquet(embedded_path, columns=COLUMNS).rename(columns={"latency_ms": "measured_ms"})
    used = rows.explode(["decode_rows", "decode_weights"]).dropna(subset=["decode_rows"])
    joined = used.merge(measured, left_on="decode_rows", right_index=True)
    joined["part_ms"] = joined["decode_weights"].astype(float) * joined["measured_ms"]
    again = joined.groupby(list(GRID.names))["part_ms"].sum()
    equal([(*key, value) for key, value in again.items()], answered)


def test_polars(result, embedded_path, answered):
    pl = pytest.importorskip("polars", reason="polars is not installed; it is in the extra `guests`")
    measured = (
        pl.read_parquet(embedded_path, columns=COLUMNS).with_row_index("row").rename({"latency_ms": "measured_ms"})
    )
    for source in (result[0], result[1] / "*.parquet"):
        again = (
            pl.scan_parquet(source)
            .explode("decode_rows", "decode_weights")
            .with_columns(pl.col("decode_rows").cast(pl.UInt32))
            .join(measured.lazy(), left_on="decode_rows", right_on="row")
            .group_by(GRID.names)
            .agg((pl.col("decode_weights") * pl.col("measured_ms")).sum())
            .sort(GRID.names)
            .collect()
        )
        equal(again.rows(), answered)


def test_duckdb(result, embedded_path, answered):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed; it is in the extra `guests`")
    for source in (result[0], result[1] / "*.parquet"):
        found = duckdb.sql(f"""
            with used as (
                select {", ".join(GRID.names)}, unnest(decode_rows) as row, unnest(decode_weights) as weight
                from '{source}'
            )
            select {", ".join(GRID.names)}, sum(weight * measured.latency_ms)
            from used join read_parquet('{embedded_path}', file_row_number = true) as measured
                on measured.file_row_number = used.row
            group by all order by all
        """)
        equal(found.fetchall(), answered)


def test_duckdb_reads_an_arrow_result_where_it_lies(embedded_cell):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed; it is in the extra `guests`")
    rows = sweep(fpmjax.direct(embedded_cell), GRID, form="reader", progress=False)  # noqa: F841 (named in the SQL)
    found = duckdb.sql("select status, count(*) from rows group by status order by 2").fetchall()
    assert dict(found)["decode_no_two_sided_batch_bracket"] == 6


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_data_frames_are_asked_as_they_are(embedded_cell, tmp_path, name):
    guest = pytest.importorskip(name, reason=f"{name} is not installed; it is in the extra `guests`")
    frame = guest.DataFrame({"batch": [8, 3], "kv": [8192, -1], "who": ["x", "y"]})
    model = fpmjax.direct(embedded_cell)
    table = sweep(model, frame, progress=False)
    assert table["status"].to_pylist() == ["ok", "invalid_work"] and table["who"].to_pylist() == ["x", "y"]
    missing = guest.DataFrame({"batch": [8, 8, 8], "kv": [8192.0, 8192.0, None], "draft_length": [None, 1, None]})
    typed = {"draft_length": "Int64"} if name == "pandas" else {"draft_length": guest.Int64}
    for one in (missing, missing.astype(typed) if name == "pandas" else missing.cast(typed)):
        found = sweep(model, one, progress=False)
        assert found["status"].to_pylist() == ["ok", "ok", "invalid_work"]
        assert found["scaling_factor"].to_pylist() == [1.0, 1.33, None]
        assert found["fault"].to_pylist()[2].startswith("row 2: kv is empty")
    sweep(model, frame, out=tmp_path / "x.parquet", progress=False)
    assert pq.read_table(tmp_path / "x.parquet")["who"].to_pylist() == ["x", "y"]
