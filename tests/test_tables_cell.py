"""Cells: grouping, selection, coverage, readiness, and the healing of fake-KV rows."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.interp_ref import Curve, _heal
from table_pairs import AR_ROWS, AR_SIDECAR, PROFILE, ROUND, identity, refusal, seal, table
from table_pairs import with_row as row

from fpmjax.errors import CellNotFoundError, CoverageError, MetricsError
from fpmjax.tables.cell import Cell, Points, check_width
from fpmjax.tables.heal import healed
from fpmjax.tables.identity import FIELDS
from fpmjax.tables.load import load_cells

NOTHING = Points.of([], [], [], [])


def cell(decode: Points = NOTHING, prefill: Points = NOTHING, **fields: Any) -> Cell:
    return Cell(identity(), decode, prefill, **fields)


def decode(*rows: tuple[int, int, float]) -> Points:
    batch, kv, latency = zip(*rows, strict=True)
    return Points.of(batch, 0, kv, latency)


# ---- points


def test_points_are_sorted_read_only_and_know_their_rows():
    points = Points.of([8, 1, 8], [0, 0, 0], [200, 5, 100], [3.0, 1.0, 2.0], row=[7, 8, 9])
    assert [a.tolist() for a in (points.batch, points.kv, points.row)] == [[1, 8, 8], [5, 100, 200], [8, 9, 7]]
    assert points.latency_ms.tolist() == [1.0, 2.0, 3.0] and len(points) == 3
    assert (points.batch.dtype, points.latency_ms.dtype, points.row.dtype) == (np.int64, np.float64, np.int32)
    with pytest.raises(ValueError, match="read-only"):
        points.kv[0] = 1


def test_a_loaded_cell_points_at_the_rows_of_the_file(tmp_path):
    shuffled = table().take(pa.array([5, 2, 0, 4, 1, 3]))
    loaded = load_cells(seal(tmp_path, shuffled)).select()
    for points in (loaded.decode, loaded.prefill):
        for i, number in enumerate(points.row.tolist()):
            assert shuffled["latency_ms"][number].as_py() == points.latency_ms[i]
            assert shuffled["total_kv_read_tokens"][number].as_py() == points.kv[i]


# ---- coverage


def test_coverage_of_a_cell_by_hand():
    measured = cell(
        decode((1, 10, 1.0), (2, 10, 2.0), (2, 90, 3.0), (4, 50, 4.0), (5, 70, 5.0)),
        Points.of([1, 1, 2], [64, 128, 128], [0, 32, 32], [1.0, 2.0, 3.0]),
    )
    assert measured.decode_batches == (1, 2, 4, 5)
    assert measured.capture_rungs == (1, 4), "b and b + 1 are both measured"
    assert measured.decode_kv_ceiling == 90
    assert measured.decode_curve_bounds == {1: (10, 10), 2: (10, 90), 4: (50, 50), 5: (70, 70)}
    assert measured.decode_domain == {"batch_size": (1, 5), "total_kv_read_tokens": (10, 90)}
    assert measured.prefill_domain == {
        "batch_size": (1, 2),
        "total_prefill_tokens": (64, 128),
        "total_kv_read_tokens": (0, 32),
    }


def test_an_empty_phase_has_no_domain():
    empty = cell()
    assert (empty.decode_domain, empty.prefill_domain, empty.decode_kv_ceiling) == (None, None, None)
    assert (empty.decode_batches, empty.capture_rungs, empty.decode_curve_bounds) == ((), (), {})
    assert empty.prefill_batch_clamp_max is None


def test_rungs_are_those_of_the_rows_that_are_used(tmp_path):
    rows = {"workload_kind": ["decode"] * 3, "batch_size": [4, 5, 9], "total_kv_read_tokens": [64] * 3}
    rows |= {"total_prefill_tokens": [0] * 3, "latency_ms": [1.0] * 3}
    path = seal(tmp_path, table(rows | {"kv_seed_regime": ["real_kv", "fake_fallback", "real_kv"]}))
    assert load_cells(path).select().capture_rungs == ()
    assert load_cells(path, fake_kv="keep").select().capture_rungs == (4,)


def clamp_by_hand(rows: list[tuple[int, int, int, float]]) -> int | None:
    curves: dict[int, dict[int, dict[int, float]]] = {}
    for batch, tokens, kv, latency in rows:
        curves.setdefault(batch, {}).setdefault(kv, {})[tokens] = latency
    batches, deviations = sorted(curves), []
    for low, high in pairwise(batches):
        for kv in curves[low].keys() & curves[high].keys():
            curve = Curve(curves[low][kv])
            for tokens, latency in curves[high][kv].items():
                if (found := curve.bracket(tokens)) is not None:
                    i, j = found
                    w = 0.0 if i == j else (tokens - curve.x[i]) / (curve.x[j] - curve.x[i])
                    deviations.append(abs(latency / (curve.y[i] + (curve.y[j] - curve.y[i]) * w) - 1.0))
    return batches[-1] if len(deviations) >= 3 and median(deviations) <= 0.05 else None


small = st.integers(1, 3)


@given(
    st.dictionaries(st.tuples(small, st.integers(1, 6), st.integers(0, 1)), st.floats(0.97, 1.08), max_size=24),
    st.floats(0.0, 1.0),
)
def test_the_prefill_batch_clamp_is_the_certificate_of_a_flat_batch_axis(points, slope):
    rows = [(b, t, kv, (1.0 + slope * t) * noise) for (b, t, kv), noise in points.items()]
    batch, tokens, kv, latency = zip(*rows, strict=True) if rows else ([], [], [], [])
    assert cell(prefill=Points.of(batch, tokens, kv, latency)).prefill_batch_clamp_max == clamp_by_hand(rows)


def test_a_flat_and_a_steep_batch_axis():
    tokens = np.array([100, 200, 300] * 2)
    batch = np.repeat([1, 2], 3)
    assert cell(prefill=Points.of(batch, tokens, 0, tokens / 10)).prefill_batch_clamp_max == 2
    assert cell(prefill=Points.of(batch, tokens, 0, tokens * batch / 10)).prefill_batch_clamp_max is None


# ---- readiness


def test_a_role_needs_rows_of_its_phases():
    only_decode = cell(decode((1, 10, 1.0)))
    only_decode.check_ready("decode")
    for role in ("prefill", "aggregated"):
        code, message = refusal(only_decode.check_ready, role, error=CoverageError)
        assert code == "no_rows"
        assert "direct FPM prefill interpolation has no genuine measurements" in message and "acme/small" in message


def test_dropped_rows_explain_an_empty_phase(tmp_path):
    fakes = table({"kv_seed_regime": "fake_fallback"})
    empty = load_cells(seal(tmp_path, fakes)).select()
    assert (empty.fake_dropped, len(empty.decode)) == (6, 0)
    assert "6 fake-KV rows were left out" in refusal(empty.check_ready, "decode")[1]


def test_an_unknown_role_is_named():
    assert refusal(cell().check_ready, "router", error=MetricsError)[0] == "role"


@pytest.mark.parametrize("width", [0, -1, True, 1.0, "2", None, np.bool_(True), np.float64(2)])
def test_a_verify_width_is_a_positive_integer(width):
    code, message = refusal(cell().check_ready, "decode", verify_width=width, error=MetricsError)
    assert code == "verify_width" and repr(width) in message


def test_a_verification_is_refused_by_native_autoregressive_rows_only(tmp_path):
    rows = table(AR_ROWS)
    native = load_cells(seal(tmp_path, rows, AR_SIDECAR)).select()
    native.check_ready("aggregated")
    code, message = refusal(native.check_ready, "decode", verify_width=2, error=CoverageError)
    assert code == "native_ar_only"
    assert "verify_width=2" in message and "speculative-round measurements" in message
    wall = load_cells(seal(tmp_path, rows)).select()
    wall.check_ready("aggregated", verify_width=np.int64(2))  # type: ignore[arg-type]
    assert wall.decode.latency_ms.tolist() == native.decode.latency_ms.tolist()


def test_a_measured_round_is_never_widened(tmp_path):
    rows = AR_ROWS | {"measurement_policy": ROUND, "execution_profile": PROFILE}
    rounds = load_cells(seal(tmp_path, table(rows), AR_SIDECAR | {"measurement_policy": ROUND})).select()
    assert rounds.execution == "speculative_round" and not rounds.native_ar_only
    rounds.check_ready("aggregated")
    assert refusal(rounds.check_ready, "decode", verify_width=4, error=CoverageError)[0] == "measured_round"


def test_a_width_is_checked_before_the_rows():
    assert refusal(check_width, 3, "autoregressive", True)[0] == "native_ar_only"
    assert check_width(3, "autoregressive", False) is None


# ---- the mapping and select


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Three cells: TP1, TP2 and TP2 in fp8, two rows each."""
    rows = {
        "tp": [1, 1, 2, 2, 2, 2],
        "moe_tp": [1, 1, 2, 2, 2, 2],
        "gemm_quant_mode": ["bfloat16"] * 4 + ["fp8"] * 2,
        "cell_id": ["b", "a", "c", "c", "d", "e"],
    }
    return load_cells(seal(tmp_path_factory.mktemp("cells"), table(rows)))


def test_cells_are_a_read_only_mapping_in_file_order(cells):
    assert [found.tp for found in cells] == [1, 2, 2] and len(cells) == 3
    assert [found.cell_ids for found in cells.values()] == [("b", "a"), ("c",), ("d", "e")]
    for key, found in cells.items():
        assert cells[key] is found is cells.select(**dict(key)) and key in cells
        assert found.digest == cells.digest and found.path == cells.path
    with pytest.raises(TypeError):
        cells.sidecar["row_count"] = 1
    assert "nothing" not in cells and cells.get("nothing") is None
    assert cells.get(identity(tp=8), 5) == 5
    assert "3 cells" in repr(cells) and "tp2" in repr(cells.select(gemm_quant_mode="fp8"))


def test_an_absent_key_names_the_nearest_cells(cells):
    wanted = identity(tp=4, moe_tp=4)
    code, message = refusal(lambda: cells[wanted], error=CellNotFoundError)
    assert code == "cell_not_found" and "tp=1 instead of 4, moe_tp=1 instead of 4" in message
    assert isinstance(CellNotFoundError("x"), LookupError)
    assert "is no Identity" in refusal(lambda: cells["tp1"])[1]


def test_fields_that_are_not_given_are_free(cells):
    assert cells.select(tp=1).identity.tp == 1
    assert cells.select(gemm_quant_mode="fp8", dcp=None).identity.tp == 2
    assert cells.select(tp=np.int32(1), enable_eplb=np.bool_(False)).identity.tp == 1


def test_no_match_lists_the_nearest_first_with_what_differs(cells):
    code, message = refusal(cells.select, tp=1, gemm_quant_mode="fp8", error=CellNotFoundError)
    assert code == "cell_not_found"
    lines = message.splitlines()
    assert lines[0].startswith("No FPM cell matches in") and "the nearest 3 of 3 cells" in lines[0]
    assert lines[1] == "  gemm_quant_mode='bfloat16' instead of 'fp8'"
    assert lines[2] == "  tp=2 instead of 1"
    assert lines[3] == "  tp=2 instead of 1, gemm_quant_mode='bfloat16' instead of 'fp8'"


def test_several_matches_list_the_fields_that_tell_them_apart(cells):
    code, message = refusal(cells.select, tp=2, error=CellNotFoundError)
    assert code == "cell_ambiguous" and "2 cells of" in message and "match tp=2" in message
    assert message.splitlines()[1:] == [
        "  gemm_quant_mode='bfloat16'",
        "  gemm_quant_mode='fp8'",
        "hint: give gemm_quant_mode as well",
    ]


@pytest.mark.parametrize(
    ("name", "meant"), [("model_path", "model"), ("tpp", "tp"), ("gemm_quant", "gemm_quant_mode"), ("zzz", None)]
)
def test_an_unknown_field_lists_the_fields(cells, name, meant):
    code, message = refusal(cells.select, **{name: 1}, error=CellNotFoundError)
    assert code == "unknown_field" and ", ".join(FIELDS) in message
    assert (f"did you mean {meant}?" in message) == (meant is not None)


@pytest.mark.parametrize("wanted", [{"tp": "1"}, {"tp": True}, {"tp": 1.0}, {"enable_eplb": 0}], ids=str)
def test_nothing_is_cast_to_match(cells, wanted):
    assert refusal(cells.select, gemm_quant_mode="bfloat16", **wanted)[0] == "cell_not_found"


# ---- healing

REAL = "real_kv"


def heal(tmp_path, rows: list[tuple], **options) -> dict[tuple[int, int], float]:
    """Decode latencies by (batch, kv) of a table with rows (batch, kv, ms, seed)."""
    batch, kv, latency, seed = (list(column) for column in zip(*rows, strict=True))
    columns = {"batch_size": batch, "total_kv_read_tokens": kv, "latency_ms": latency, "kv_seed_regime": seed}
    columns |= {"workload_kind": ["decode"] * len(rows), "total_prefill_tokens": [0] * len(rows)}
    points = load_cells(seal(tmp_path, table(columns | options)), fake_kv="heal").select().decode
    keys = zip(points.batch.tolist(), points.kv.tolist(), strict=True)
    return dict(zip(keys, points.latency_ms.tolist(), strict=True))


def test_the_top_of_a_poisoned_band_is_healed(tmp_path):
    """Two real rows below: 41.51 + (4M - 2M) * ((41.51 - 30) / (2M - 1M)) = 64.53."""
    mega = 1 << 20
    rows = [(128, mega, 30.0, REAL), (128, 2 * mega, 41.51, REAL), (128, 4 * mega, 33.24, "fake_fallback")]
    assert heal(tmp_path, rows)[128, 4 * mega] == 41.51 + 2.0 * mega * ((41.51 - 30.0) / mega) == pytest.approx(64.53)


@pytest.mark.parametrize(
    ("anchors", "value"),
    [
        ([(8, 1024, 1.0), (8, 2048, 2.0)], 4.0),
        ([(8, 512, 0.9), (8, 1024, 1.0), (8, 2048, 3.0)], 7.0),
        ([(8, 2048, 2.0)], 99.0),
        ([(8, 1024, 1.0), (8, 2048, 2.0), (8, 8192, 50.0)], 4.0),
        ([(8, 1024, 9.0), (8, 2048, 3.0)], 99.0),
        ([(4, 1024, 1.0), (4, 2048, 2.0)], 99.0),
        ([(7, 1024, 1.0), (8, 2048, 2.0), (9, 1, 5.0)], 99.0),
        ([(8, 8192, 1.0), (8, 9216, 2.0)], 99.0),
        ([(8, 1024, 1.0), (8, 2048, 1.5e308)], 99.0),
    ],
    ids=["two", "last two of three", "one", "never above", "not positive", "other batch", "split", "above", "overflow"],
)
@pytest.mark.parametrize("last", [True, False])
def test_anchors_are_the_two_real_rows_just_below(tmp_path, anchors, value, last):
    rows = [(*anchor, REAL) for anchor in anchors]
    rows.insert(len(rows) if last else 0, (8, 4096, 99.0, "fake_fallback"))
    assert heal(tmp_path, rows)[8, 4096] == value


@pytest.mark.parametrize("seed", ["n/a", "skip:x", "legacy", None, "fake_fallback"])
def test_only_real_rows_are_anchors(tmp_path, seed):
    rows = [(8, 1024, 1.0, seed), (8, 2048, 2.0, seed), (8, 4096, 99.0, "fake_fallback")]
    assert heal(tmp_path, rows)[8, 4096] == 99.0


def test_a_healed_row_helps_no_other(tmp_path):
    rows = [(8, 1024, 1.0, REAL), (8, 2048, 2.0, REAL)]
    rows += [(8, 4096, 99.0, "fake_fallback"), (8, 6144, 99.0, "fake_fallback")]
    assert heal(tmp_path, rows) == {(8, 1024): 1.0, (8, 2048): 2.0, (8, 4096): 4.0, (8, 6144): 6.0}


def test_anchors_cross_cell_ids_but_not_cells(tmp_path):
    rows = [(8, 1024, 1.0, REAL), (8, 2048, 2.0, REAL), (8, 4096, 99.0, "fake_fallback")]
    assert heal(tmp_path, rows, cell_id=["x", "y", "z"])[8, 4096] == 4.0
    columns = {"tp": [1, 1, 2], "batch_size": [8] * 3, "total_kv_read_tokens": [1024, 2048, 4096]}
    columns |= {"workload_kind": ["decode"] * 3, "total_prefill_tokens": [0] * 3, "latency_ms": [1.0, 2.0, 99.0]}
    columns |= {"kv_seed_regime": [REAL, REAL, "fake_fallback"]}
    other = load_cells(seal(tmp_path, table(columns)), fake_kv="heal").select(tp=2)
    assert other.decode.latency_ms.tolist() == [99.0] and (other.fake_healed, other.fake_kept) == (0, 1)


def test_a_fake_prefill_row_is_dropped_or_kept_but_never_healed(tmp_path):
    path = seal(tmp_path, table(row(1, kv_seed_regime="fake_fallback")))
    kept = load_cells(path, fake_kv="heal").select()
    assert kept.prefill.latency_ms.tolist() == [10.0, 12.0, 20.0] and kept.fake_kept == 1
    dropped = load_cells(path).select()
    assert dropped.prefill.latency_ms.tolist() == [10.0, 12.0] and dropped.fake_dropped == 1


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 3), st.integers(0, 12)),
        st.tuples(st.floats(1e-3, 1e3), st.sampled_from([REAL, REAL, "fake_fallback", "n/a"])),
        min_size=1,
    )
)
def test_healing_equals_the_oracle_to_the_last_bit(points):
    batch, kv = np.array(list(points), np.int64).T
    latency, seed = (list(column) for column in zip(*points.values(), strict=True))
    seeds = np.array(seed)
    found, replaced = healed(batch, kv, np.array(latency), seeds == "fake_fallback", seeds == REAL)
    rows = [("decode", b, 0, k, y, s) for (b, k), (y, s) in points.items()]
    assert found.tolist() == [row[4] for row, _ in _heal(rows)]
    assert all(math.isclose(a, b) or changed for a, b, changed in zip(found, latency, replaced, strict=True))
    assert not replaced[seeds != "fake_fallback"].any()
