"""The compiled lookup is the direct rule: every bit, refusal and support row equals the plain-Python oracle's."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import interp_ref
from small_tables import answers_of, cell_of, decode_rows, oracle_answer, queries_near, tables, work_of

from fpmjax import CoverageError, Resolution, Status, TableError, Work, direct, estimate
from fpmjax.lookup.axis import U32_MAX, cell_begins, compile_axis, locate
from fpmjax.lookup.compile import pad
from fpmjax.lookup.decode import LARGEST_BATCH, log2


def in_kernel(monkeypatch):
    """Small jobs take the kernel too."""
    monkeypatch.setitem(estimate.__globals__, "SMALL", 0)


def phases(rows):
    return {phase: any(r[0] == phase for r in rows) for phase in ("decode", "prefill")}


def compare(rows, queries, evidence=False):
    """Every answer of the model beside the oracle's; returns the estimate."""
    oracle = interp_ref.Direct(rows)
    result = estimate(direct(cell_of(rows)), work_of(queries), check=False, evidence=evidence)
    ranks = queries[:, None, :] if queries.ndim == 2 else queries
    for query, mine in zip(ranks, answers_of(result, phases(rows)), strict=True):
        assert mine == oracle_answer(oracle, query), query
    return result


@given(tables(), st.integers(0, 2**32))
def test_kernel_equals_the_oracle_on_random_tables(rows, seed):
    with pytest.MonkeyPatch.context() as patch:
        in_kernel(patch)
        compare(rows, queries_near(rows, 64, seed))


@given(tables(), st.integers(0, 2**32))
def test_host_path_equals_the_oracle_on_random_tables(rows, seed):
    compare(rows, queries_near(rows, 32, seed))


@given(tables(), st.integers(0, 2**32))
def test_rank_reduction_equals_the_oracle(rows, seed):
    with pytest.MonkeyPatch.context() as patch:
        in_kernel(patch)
        compare(rows, queries_near(rows, 60, seed).reshape(20, 3, 5))


@given(tables(), st.integers(0, 2**32))
def test_evidence_equals_the_oracle(rows, seed):
    oracle = interp_ref.Direct(rows)
    queries = queries_near(rows, 40, seed)
    with pytest.MonkeyPatch.context() as patch:
        in_kernel(patch)
        result = compare(rows, queries, evidence=True)
    for i, query in enumerate(queries):
        n_prefill, tokens, cached, batch, kv = map(int, query)
        asked = {
            "prefill": (oracle._prefill, (n_prefill, tokens, cached)) if tokens else None,
            "decode": (oracle._decode, (batch, kv)) if batch else None,
            "baseline": (oracle._baseline, (batch, kv)) if batch and tokens else None,
        }
        for name, ask in asked.items():
            found = getattr(result.parts, name)
            ms = getattr(result.parts, f"{name}_ms")[i, 0]
            try:
                expected = None if ask is None else ask[0](*ask[1])
            except interp_ref.Unsupported:
                expected = None
            used = found.row[i, 0] >= 0
            if expected is None:
                assert np.isnan(ms) and not used.any() and found.resolution[i, 0] == Resolution.NONE
                continue
            value, how, support = expected
            assert ms == value and Resolution(found.resolution[i, 0]).word == how
            measured = [rows[r] for r in found.row[i, 0][used]]
            assert [r[4] for r in measured] == [y for _, y, _ in support]
            assert [(r[1], r[2] or None, r[3]) for r in measured] == [tuple(c) for c, _, _ in support]
            np.testing.assert_array_max_ulp(found.weight[i, 0][used], np.array([w for *_, w in support]), 4)
            assert abs(found.weight[i, 0].sum() - 1) < 1e-12


def test_every_recorded_point_returns_its_bits(embedded_cells):
    for cell in embedded_cells.values():
        model = direct(cell)
        for points, work in (
            (cell.decode, Work.decode(cell.decode.batch, cell.decode.kv)),
            (cell.prefill, Work.prefill(cell.prefill.batch, cell.prefill.tokens, cell.prefill.kv)),
        ):
            result = estimate(model, work, evidence=True)
            assert (result.latency_ms == points.latency_ms).all()
            part = result.parts.decode if points is cell.decode else result.parts.prefill
            assert (part.resolution == Resolution.EXACT).all()
            assert (part.row[:, 0, 0] == points.row).all() and (part.row[:, 0, 1:] == -1).all()


def test_embedded_table_equals_the_oracle(embedded_cell, monkeypatch):
    in_kernel(monkeypatch)
    rows = [
        (phase, *map(int, c), float(ms))
        for phase, p in (("decode", embedded_cell.decode), ("prefill", embedded_cell.prefill))
        for *c, ms in zip(p.batch, p.tokens, p.kv, p.latency_ms, strict=True)
    ]
    compare(rows, queries_near(rows, 4000, 1))


GOLDEN_PREFILL = [(1, 100, 0, 10.0), (1, 100, 1000, 20.0), (1, 200, 100, 30.0), (1, 200, 900, 50.0)]
GOLDEN_DECODE = {1: [(1, 1.0), (1000, 5.0)], 4: [(10, 2.0), (1000, 6.0)]}


@pytest.mark.parametrize(
    ("tokens", "kv", "expected"),
    [(150, 500, 27.5), (150, 100, 20.5), (200, 500, 40.0), (100, 1000, 20.0), (150, 50, None), (150, 950, None)],
)
def test_golden_prefill(tokens, kv, expected):
    rows = [("prefill", *p) for p in GOLDEN_PREFILL]
    result = estimate(direct(cell_of(rows)), Work.prefill(1, tokens, kv), check=False)
    assert result.latency_ms == expected if expected else result.status == Status.NO_PREFILL_SUPPORT


@pytest.mark.parametrize(
    ("batch", "kv", "expected"),
    [
        (1, 500, 2.997997997997998),
        (2, 500, 3.325264658597992),
        (3, 500, 3.652531319197986),
        (5, 500, None),
        (1, 0, None),
    ],
)
def test_golden_decode(batch, kv, expected):
    result = estimate(direct(cell_of(decode_rows(GOLDEN_DECODE))), Work.decode(batch, kv), check=False)
    assert result.latency_ms == expected if expected else result.status == Status.NO_BATCH_BRACKET


def test_golden_mixed():
    rows = [*decode_rows(GOLDEN_DECODE), ("prefill", 1, 100, 0, 10.0), ("prefill", 1, 200, 0, 20.0)]
    work = Work.of(prefill_requests=1, prefill_tokens=150, decode_requests=1, decode_kv=500)
    assert estimate(direct(cell_of(rows)), work).latency_ms == 16.997997997998


@pytest.mark.parametrize(("row", "batch", "answered"), [(5, 20, False), (3, 12, True), (87, 348, False)])
def test_libm_log2_decides_at_a_ratio_of_exactly_four(row, batch, answered):
    rows = decode_rows({row: [(0, 1.0), (100, 1.0)], batch + 1: [(0, 2.0), (100, 2.0)]})
    result = estimate(direct(cell_of(rows)), Work.decode(batch, 50), check=False)
    assert (result.status == Status.OK) == answered
    assert (log2(np.array([batch])) - log2(np.array([row])) <= 2.0) == answered


def test_token_totals_keep_their_last_digit():
    rows = decode_rows({8: [(2**24, 1.0), (2**24 + 1, 2.0), (2**24 + 3, 4.0), (U32_MAX, 9.0)]})
    work = Work.decode(8, [2**24, 2**24 + 1, 2**24 + 2, U32_MAX, U32_MAX - 1])
    result = estimate(direct(cell_of(rows)), work)
    assert result.latency_ms.tolist()[:4] == [1.0, 2.0, 3.0, 9.0]
    assert 4.0 < result.latency_ms[4] < 9.0


def test_nothing_is_extrapolated_or_clamped():
    model = direct(cell_of(decode_rows({8: [(1024, 7.0), (8192, 9.0)]})))
    batch, kv = [8, 8, 8, 8, 9, 7, 0], [1024, 8192, 16384, 512, 4096, 4096, 0]
    result = estimate(model, Work.decode(batch, kv), check=False)
    assert [Status(s).name for s in result.status] == ["OK", "OK", *["NO_BATCH_BRACKET"] * 4, "IDLE"]
    assert result.latency_ms[:2].tolist() == [7.0, 9.0] and np.isnan(result.latency_ms[2:6]).all()
    assert result.latency_ms[6] == 0


@pytest.mark.parametrize("ms", [5e-324, 1e-310, 1e291, 1.7e308])
def test_latencies_that_no_arithmetic_keeps_are_refused_by_name(ms):
    for row in (("decode", 8, 0, 10, ms), ("prefill", 1, 5, 0, ms)):
        with pytest.raises(TableError, match=re.escape(f"{row[0]} row 1 has latency_ms={ms}, outside")) as caught:
            direct(cell_of([("decode", 1, 0, 0, 1.0), row]))
        assert caught.value.code == "latency_range"


def test_the_smallest_and_the_largest_latencies_keep_their_bits(monkeypatch):
    rows = decode_rows({8: [(0, 1e-300), (2**32 - 1, 1e290)], 9: [(0, 1e290), (5, 3e-300)]})
    compare(rows, queries_near(rows, 200, 3))
    in_kernel(monkeypatch)
    compare(rows, queries_near(rows, 200, 3))
    result = estimate(direct(cell_of(rows)), Work.decode([1, 2], [2**32 - 1, 5]), draft_length=[7, 2**30], check=False)
    assert result.status.tolist() == [Status.OK, Status.NO_BATCH_BRACKET]
    assert np.isfinite(result.latency_ms[0])


def test_tables_that_would_not_fit_in_memory_are_refused_before_it_is_asked_for():
    scattered = [("decode", b, 0, b * 7919 + k * 104729 % 1_000_003, 1.0) for b in range(1, 2048, 2) for k in range(64)]
    with pytest.raises(TableError, match=r"the decode rule of this cell takes [0-9,]+ entries, more than") as caught:
        direct(cell_of(scattered))
    assert caught.value.code == "table_too_large"
    scattered = [("prefill", 1, 1 + i * 7919 % 1_000_003, i * 104729 % 1_000_003, 1.0) for i in range(5000)]
    with pytest.raises(TableError, match=r"the prefill rule of this cell takes"):
        direct(cell_of(scattered))
    with pytest.raises(TableError, match=r"the prefill rule of this cell takes"):
        direct(cell_of([("prefill", b, b, b, 1.0) for b in range(1, 20_000)]))


def test_many_batches_at_common_totals_compile():
    rows = [("decode", b, 0, k * 64, b + k / 1024) for b in range(2, 1201, 2) for k in range(1, 65)]
    model = direct(cell_of(rows))
    oracle = interp_ref.Direct(rows)
    for batch, kv in ((3, 64), (601, 1000), (1199, 4096), (1200, 4096), (1201, 64)):
        mine = estimate(model, Work.decode(batch, kv), check=False)
        assert answers_of(mine, phases(rows))[0] == oracle_answer(oracle, [[0, 0, 0, batch, kv]])


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_table_with_larger_batches_is_refused_by_name(phase):
    row = (phase, LARGEST_BATCH + 1, 0 if phase == "decode" else 1, 0, 1.0)
    with pytest.raises(TableError, match=f"{phase} batch_size=65537 exceeds .* 65536\nhint: ") as caught:
        direct(cell_of([row]))
    assert caught.value.code == "batch_too_large"
    largest = cell_of([(row[0], LARGEST_BATCH, *row[2:])])
    asked = Work.decode(LARGEST_BATCH, 0) if phase == "decode" else Work.prefill(LARGEST_BATCH, 1)
    assert estimate(direct(largest), asked).latency_ms == 1.0


@given(st.lists(st.integers(0, U32_MAX), max_size=60), st.lists(st.integers(0, U32_MAX), min_size=1, max_size=30))
def test_an_axis_finds_the_cell_of_every_integer(begins, queries):
    axis = compile_axis(np.array(begins, np.int64))
    values = np.unique(np.clip(np.array([q + d for q in [*begins, *queries] for d in (-1, 0, 1)]), 0, U32_MAX))
    expected = np.searchsorted(cell_begins(axis), values, "right") - 1
    padded = np.resize(values, 512).astype(np.uint32)  # one size, so that nothing compiles twice
    assert (np.asarray(locate(pad(axis), padded)) == np.resize(expected, 512)).all()


def test_refusals_name_the_axis_the_value_and_what_is_measured_nearby():
    model = direct(cell_of(decode_rows({8: [(1024, 7.0), (8192, 9.0)], 32: [(4096, 9.0), (8192, 10.0)]})))
    with pytest.raises(CoverageError) as caught:
        estimate(model, Work.decode(8, 16384))
    assert str(caught.value) == (
        "decode batch_size=8, total_kv_read_tokens=16384: no measured batch sizes on both sides, in one capture "
        "regime and within two octaves, cover this KV total; total_kv_read_tokens=16384 lies above every measured "
        "curve (8192); batch_size=8 is measured for total_kv_read_tokens 1024..8192; batch 32 is measured for "
        "total_kv_read_tokens 4096..8192; no smaller batch is measured\n"
        "hint: batch_size=8 answers total_kv_read_tokens 1024..8192"
    )
    with pytest.raises(CoverageError, match=r"2 of 4 queries have no answer; the first, \[1\]: decode batch_size=64"):
        estimate(model, Work.decode([8, 64, 32, 128], 8192))
    with pytest.raises(CoverageError, match=r"batch 8 is measured for .* 1024..8192; batch 32 is measured for .* 4096"):
        estimate(model, Work.decode(16, 2048))
    with pytest.raises(CoverageError, match="the table holds no rows of this phase\nhint: measure prefill passes"):
        estimate(model, Work.prefill(1, 10))
    prefill = direct(cell_of([("prefill", 1, 100, 0, 1.0), ("prefill", 1, 200, 0, 2.0)]))
    with pytest.raises(CoverageError, match=r"batch_size=2 has no prefill rows \(measured: 1\)\nhint: prefill never"):
        estimate(prefill, Work.prefill(2, 100))
    with pytest.raises(CoverageError, match="measured point is total_prefill_tokens=200, total_kv_read_tokens=0"):
        estimate(prefill, Work.prefill(1, 201))
    with pytest.raises(CoverageError, match="no rows of this phase\nhint: measure decode passes"):
        estimate(prefill, Work.decode(1, 1))
