"""Intervals of tables: residuals against tables built without the point, coverage, and that nothing else changes."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from asking import refusal
from small_tables import cell_of, queries_near, surface, work_of

from fpmjax import Work, corrected, direct, estimate, regression, speculative, x64
from fpmjax.answer import Resolution
from fpmjax.errors import CoverageError, FpmError, OptionError
from fpmjax.models.intervals import DECODE, PREFILL, WithIntervals, conformal, residuals_of, with_intervals
from fpmjax.observe.observations import Observations
from fpmjax.status import Status
from fpmjax.store import load_model, save_model
from fpmjax.tables.cell import Cell, Points


def some(points: Points, keep: np.ndarray) -> Points:
    return Points(*(getattr(points, f.name)[keep] for f in fields(points)))


def asked(points: Points, phase: str) -> Work:
    if phase == "decode":
        return Work.decode(points.batch, points.kv)
    return Work.prefill(points.batch, points.tokens, points.kv)


def bumpy(seed: int) -> list:
    """A table with noise, capture boundaries at 4 | 5 and 16 | 17, and every way of answering."""
    rng = np.random.default_rng(seed)
    rows = [
        r for r in surface([1, 2, 4, 5, 8, 11, 16, 17, 24, 32, 64, 512], [16, 64, 128, 512, 700]) if rng.random() < 0.9
    ]
    rows += [
        ("prefill", b, t, k, 2.0 + t / 8 + k / 64)
        for b in (1, 3)
        for t in (8, 16, 24, 64, 96)
        for k in (0, 32, 64, 80)
        if rng.random() < 0.85
    ]
    return [(*r[:4], r[4] * float(np.exp(rng.normal(0, 0.05)))) for r in rows]


ROWS = bumpy(1)
CELL = cell_of(ROWS)
TABLE = direct(CELL)
MODEL = with_intervals(TABLE)
FEW = with_intervals(direct(cell_of([*surface([2, 4, 8], [0, 64, 128]), ("prefill", 1, 64, 0, 2.0)])))
WORK = work_of(queries_near(ROWS, 60, 5))
RANKS = work_of(queries_near(ROWS, 90, 6).reshape(30, 3, 5))


def compiled(model, work, **options):
    """Through compiled code whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.__globals__, "SMALL", 0)
        return estimate(model, work, check=False, **options)


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (np.asarray(x).dtype, np.asarray(x).tobytes()) == (np.asarray(y).dtype, np.asarray(y).tobytes())


# What the widths are made of


def errors_without(cell: Cell, phase: str, groups: np.ndarray, way: Resolution) -> np.ndarray:
    """|log(answer / measured)|, sorted: the points of every group, asked of a table without the group."""
    points, errors = getattr(cell, phase), [np.zeros(0)]
    for group in np.unique(groups):
        out, rest = (some(points, mine) for mine in (groups == group, groups != group))
        answer = estimate(direct(replace(cell, **{phase: rest})), asked(out, phase), check=False, evidence=True)
        found = (answer.status == Status.OK) & (getattr(answer.parts, phase).resolution[:, 0] == way)
        errors.append(np.abs(np.log(answer.latency_ms / out.latency_ms))[found])
    return np.sort(np.concatenate(errors))


def errors_across_tokens(points: Points) -> np.ndarray:
    """The same of the KV-first way, in plain Python."""
    at = {(b, t, k): ms for b, t, k, ms in zip(points.batch, points.tokens, points.kv, points.latency_ms, strict=True)}
    errors = []
    for (b, t, k), ms in at.items():
        curves = {u: sorted((j, y) for (a, v, j), y in at.items() if (a, v) == (b, u)) for u in points.tokens}
        covering = {u: np.interp(k, *zip(*c, strict=True)) for u, c in curves.items() if c and c[0][0] <= k <= c[-1][0]}
        below, above = ([u for u in covering if u < t], [u for u in covering if u > t])
        if below and above:
            lo, hi = max(below), min(above)
            answer = covering[lo] + (covering[hi] - covering[lo]) * (t - lo) / (hi - lo)
            errors.append(abs(np.log(answer / ms)))
    return np.sort(errors)


@pytest.mark.parametrize("seed", [1, 2])
def test_residuals_are_errors_of_tables_without_the_point(seed):
    cell = cell_of(bumpy(seed))
    decode, prefill = cell.decode, cell.prefill
    found = {way: np.sort(errors) for way, errors in residuals_of(direct(cell)).items()}
    inside = Resolution.WITHIN
    expected = {
        (DECODE, inside): errors_without(cell, "decode", np.arange(len(decode)), inside),
        (PREFILL, inside): errors_without(cell, "prefill", np.arange(len(prefill)), inside),
        (PREFILL, Resolution.ACROSS_KV): errors_without(
            cell, "prefill", prefill.batch * 1000 + prefill.kv, Resolution.ACROSS_KV
        ),
        (PREFILL, Resolution.ACROSS_TOKENS): errors_across_tokens(prefill),
    }
    for way, errors in expected.items():
        assert len(errors) >= 9 and np.allclose(found[way], errors, rtol=1e-6, atol=1e-12), way


@pytest.mark.parametrize("seed", [1, 2])
def test_batches_beside_a_boundary_are_not_crossed(seed):
    """Without them the boundary would be gone; every other batch leaves the table's regimes as they are."""
    cell = cell_of(bumpy(seed))
    beside = np.isin(cell.decode.batch, [b + i for b in cell.capture_rungs for i in (0, 1)])
    errors = [np.zeros(0)]
    for batch in np.unique(cell.decode.batch[~beside]):
        groups = np.where(cell.decode.batch == batch, 1, 0)
        out, left = some(cell.decode, groups == 1), some(cell.decode, groups == 0)
        answer = estimate(direct(replace(cell, decode=left)), asked(out, "decode"), check=False)
        errors.append(np.abs(np.log(answer.latency_ms / out.latency_ms))[answer.status == Status.OK])
    expected = np.sort(np.concatenate(errors))
    assert beside.any() and len(expected) >= 9
    assert np.allclose(np.sort(residuals_of(direct(cell))[DECODE, Resolution.ACROSS_BATCH]), expected, rtol=1e-6)


def test_the_quantile_is_that_of_split_conformal():
    errors = np.arange(1.0, 20.0)  # 19
    assert conformal(errors, 0.9) == 18.0 and conformal(errors, 0.95) == 19.0 and np.isnan(conformal(errors, 0.96))
    assert conformal(errors[:9], 0.9) == 9.0 and np.isnan(conformal(errors[:8], 0.9))
    assert np.isnan(conformal(np.zeros(0), 0.5))


def test_other_latencies_are_calibrated_by_themselves():
    """Twice the milliseconds is the same relative error; the cell's own latencies play no part."""
    latency_ms = np.zeros(1 + max(CELL.decode.row.max(), CELL.prefill.row.max()))
    for points in (CELL.decode, CELL.prefill):
        latency_ms[points.row] = 2.0 * points.latency_ms
    twice = with_intervals(TABLE.with_latencies(latency_ms))
    assert np.allclose(twice.divisor, MODEL.divisor, rtol=1e-12, equal_nan=True)
    constant = with_intervals(TABLE.with_latencies(np.ones_like(latency_ms)))
    assert np.all(constant.divisor[:, 1, :2] == 1.0)


def test_coverage_on_the_embedded_tables(embedded_cells):
    """Points that neither the table nor its residuals have seen: 90 % asked, 85 to 97 % inside; batches likewise."""
    inside: dict[str, list[bool]] = {"decode": [], "prefill": [], "batches": []}

    def tally(kind: str, cell: Cell, phase: str, out: np.ndarray) -> None:
        points = getattr(cell, phase)
        model = with_intervals(direct(replace(cell, **{phase: some(points, ~out)})))
        left_out = some(points, out)
        answer = estimate(model, asked(left_out, phase), check=False)
        low, high, found = answer.interval.low_ms, answer.interval.high_ms, answer.status == Status.OK
        inside[kind] += ((low <= left_out.latency_ms) & (left_out.latency_ms <= high))[found].tolist()

    for cell in embedded_cells.values():
        for seed in range(8):
            rng = np.random.default_rng(seed)
            for phase in ("decode", "prefill"):
                tally(phase, cell, phase, rng.random(len(getattr(cell, phase))) < 0.15)
        for batch in cell.decode_batches[2:]:  # 1 | 2 is a boundary
            tally("batches", cell, "decode", cell.decode.batch == batch)
    for kind, found in inside.items():
        assert len(found) > 100 and 0.85 <= np.mean(found) <= 0.97, (kind, len(found), np.mean(found))


# What is answered


@pytest.mark.parametrize("work", [WORK, RANKS], ids=["one rank", "three ranks"])
def test_answers_keep_their_bits_and_refusals_stay(work):
    """On the host and compiled alike; with evidence too."""
    plain = estimate(TABLE, work, check=False, evidence=True)
    with_it = MODEL.on_host(work, evidence=True)
    same(replace(with_it, interval=None), plain)
    same(compiled(MODEL, work, evidence=True), with_it)
    same(MODEL.on_host(work), replace(with_it, parts=None))
    interval, refused, ok = with_it.interval, plain.status > Status.IDLE, plain.status == Status.OK
    assert refused.any() and np.isnan(interval.low_ms[refused]).all() and np.isnan(interval.high_ms[refused]).all()
    assert (interval.count[refused] == 0).all()
    assert ok.any() and (interval.count[ok] >= 9).all() and interval.count.dtype == np.int64
    assert (interval.low_ms[ok] < plain.latency_ms[ok]).all() and (plain.latency_ms[ok] < interval.high_ms[ok]).all()


def test_under_vmap_and_with_a_draft_length():
    work = Work.decode([[1], [2], [4]], [64, 128, 200, 300])
    want = estimate(MODEL, work, check=False)
    with x64():
        stack = jax.tree.map(lambda *x: np.stack(x), MODEL, MODEL)
        both = jax.vmap(lambda m, w: m(w), (0, None))(stack, work)
        same(jax.tree.map(lambda x: np.asarray(x[1]), both.interval), want.interval)
        traced = jax.tree.map(np.asarray, jax.jit(lambda m, w: speculative(m, w, 1))(MODEL, work).interval)
    rounds = estimate(MODEL, work, draft_length=1, check=False)
    wide = estimate(MODEL, Work.decode([[2], [4], [8]], [64, 128, 200, 300]), check=False)
    assert np.isfinite(rounds.interval.low_ms).sum() > 4
    assert np.array_equal(rounds.interval.high_ms, rounds.scaling_factor * wide.interval.high_ms, equal_nan=True)
    same(traced, rounds.interval)


def test_parts_are_composed_at_their_ends():
    work = Work.of(
        prefill_requests=1, prefill_tokens=20, prefill_kv=40, decode_requests=[2, 8, 3, 0], decode_kv=[600, 64, 700, 0]
    )
    answer = estimate(MODEL, work, evidence=True)
    parts, by = answer.parts, MODEL.divisor

    def ends(phase: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        way = getattr(parts, name).resolution[:, 0]
        ms = np.where(way >= 0, getattr(parts, f"{name}_ms")[:, 0], 0.0)
        return np.nan_to_num(ms / by[0, phase, way]), np.nan_to_num(ms / by[1, phase, way])

    (p, decode, base) = ends(PREFILL, "prefill"), ends(DECODE, "decode"), ends(DECODE, "baseline")
    assert np.allclose(answer.interval.low_ms, p[0] + np.maximum(decode[0] - base[1], 0.0), rtol=1e-15)
    assert np.allclose(answer.interval.high_ms, p[1] + np.maximum(decode[1] - base[0], 0.0), rtol=1e-15)
    ranks = Work.decode([[2, 8, 0]], [[90, 64, 0]], ranks=True)
    each = estimate(MODEL, Work.decode([2, 8], [90, 64])).interval
    both = estimate(MODEL, ranks).interval
    assert (both.low_ms[0], both.high_ms[0]) == (each.low_ms.max(), each.high_ms.max())
    assert both.count[0] == each.count.min()


def test_idle_passes_take_nothing_for_certain():
    interval = estimate(MODEL, Work.decode(0, 0)).interval
    assert (interval.low_ms, interval.high_ms, interval.count, interval.level) == (0.0, 0.0, 0, 0.9)


def test_too_few_points_give_their_count_and_no_interval():
    interval = estimate(FEW, Work.decode([2, 2, 3], [64, 70, 64])).interval
    assert np.isnan(interval.low_ms).all() and np.isnan(interval.high_ms).all()
    assert interval.count.tolist() == [3, 3, 3]
    assert FEW.diagnostics[0] == {
        "phase": "decode",
        "resolution": "exact_lookup",
        "residuals": 3,
        "half_width_pct": None,
    }
    half = with_intervals(FEW.model, level=0.5)
    assert np.isfinite(estimate(half, Work.decode([2, 2, 3], [64, 70, 64])).interval.low_ms).all()
    assert estimate(FEW, Work.prefill(1, 64, 0)).interval.count == 0


def test_an_exact_hit_takes_the_narrowest_range_of_its_phase():
    for phase in (DECODE, PREFILL):
        others = MODEL.divisor[0, phase, 1:]
        assert MODEL.divisor[0, phase, 0] == np.nanmin(others) > 1.0


# Around it


def test_it_is_a_table_everywhere_else(tmp_path):
    assert MODEL.cell is CELL and MODEL.ready and MODEL.execution == "autoregressive" and MODEL.verify_width == 1
    with pytest.raises(CoverageError) as with_it:
        estimate(MODEL, Work.decode(9999, 1))
    with pytest.raises(CoverageError) as plain:
        estimate(TABLE, Work.decode(9999, 1))
    assert str(with_it.value) == str(plain.value)
    for suffix in ("npz", "parquet"):
        save_model(MODEL, tmp_path / f"model.{suffix}")
        again = load_model(tmp_path / f"model.{suffix}")
        same(again, MODEL)
        assert isinstance(again, WithIntervals) and again.level == 0.9 and again.cell.identity == CELL.identity
        same(estimate(again, WORK, check=False), estimate(MODEL, WORK, check=False))


def test_a_wider_table_and_a_correction_carry_it():
    wide = with_intervals(direct(CELL, verify_width=2))
    assert wide.verify_width == 2
    same(estimate(wide, Work.decode(4, 100)).interval, estimate(MODEL, Work.decode(8, 100)).interval)
    work = Work.decode([2, 4, 8], [64, 100, 200])
    seen = Observations.of(work, 1.5 * estimate(TABLE, work).latency_ms)
    model = corrected(MODEL, Observations.concat([seen] * 3))
    answer, native = estimate(model, work), estimate(MODEL, work)
    assert (answer.factor == 1.5).any()
    assert np.array_equal(answer.interval.low_ms, answer.factor * native.interval.low_ms)
    assert np.array_equal(answer.interval.high_ms, answer.factor * native.interval.high_ms)


def test_what_it_cannot_take_is_refused_by_name():
    for wrong in (None, CELL, corrected(TABLE), MODEL, regression(role="decode")):
        code, message = refusal(FpmError, with_intervals, wrong)
        assert code == "not_a_table" and "takes a table" in message
    for level in (0, 1, -0.5, 1.5, float("nan"), "0.9", True, None):
        assert refusal(OptionError, with_intervals, TABLE, level=level)[0] == "level"
    assert refusal(FpmError, with_intervals, jax.tree.map(np.asarray, TABLE))[0] == "not_a_table"
    stack = jax.tree.map(lambda *x: np.stack(x), TABLE, TABLE)
    assert refusal(FpmError, with_intervals, stack)[0] == "stacked"
    with x64():
        assert refusal(FpmError, jax.jit(lambda t: with_intervals(t)), TABLE)[0] == "traced"


def test_a_table_of_one_phase_or_none():
    for rows in ([], surface([1, 2, 4], range(0, 640, 64)), [("prefill", 1, t, 0, 1.0 + t) for t in range(1, 20)]):
        model = with_intervals(direct(cell_of(rows)))
        answer = estimate(model, Work.decode([1, 9], [70, 1]), check=False)
        assert np.isfinite(answer.interval.low_ms[0]) == (len(rows) == 30)
        assert estimate(model, Work.prefill(1, 7, 0), check=False).interval.count == (17 if len(rows) == 19 else 0)
