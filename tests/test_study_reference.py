"""F(b, K): curves against a slow rule, what has no reference, and scored rounds."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
from asking import refusal
from hypothesis import given
from hypothesis import strategies as st
from studies import WARMUP, forward_ms, six_rounds, synthetic, table

import fpmjax
from fpmjax.errors import OptionError
from fpmjax.rule import PUBLISHED
from fpmjax.study.exclude import exclude
from fpmjax.study.read import read_study
from fpmjax.study.reference import Curves, reference_of
from fpmjax.study.scored import score
from fpmjax.study.statistics import configurations

WHERE = {"gpu": "A", "model": "M", "initial_context": 64}


def stp(batch: int, kv: int | None, ms: float, index: int = WARMUP, **more) -> dict:
    row = {"method": "none", "kind": "stp", "draft_length": 0, "batch_size": batch, "repetition": 0}
    return WHERE | row | {"round_index": index, "total_kv_tokens": kv, "latency_ms": ms} | more


def sd(d: int, size: int, kv: int | None, ms: float = 1.0, index: int = WARMUP, **more) -> dict:
    row = {"method": "mtp", "kind": "sd", "draft_length": d, "batch_size": size, "repetition": 1}
    return WHERE | row | {"round_index": index, "total_kv_tokens": kv, "latency_ms": ms} | more


def found(rows: list[dict], mode: str = "measured", **options) -> list[float | None]:
    """F of the speculative rows."""
    study = read_study(table(rows), anchors=any(row["total_kv_tokens"] is None for row in rows))
    ms = reference_of(study, exclude(study).kept, mode=mode, **options)[study.sd]
    return [None if np.isnan(x) else float(x) for x in ms]


CELLS = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 6).map(lambda k: k * 1000))
MEASURED = st.lists(st.tuples(CELLS, st.floats(0.5, 99)), min_size=1, max_size=30)
ASKED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 6500)), min_size=1, max_size=20)


@given(MEASURED, ASKED)
def test_curves_are_the_medians_joined_by_lines(measured, asked):
    knots: dict = defaultdict(lambda: defaultdict(list))
    for (engine, batch, kv), ms in measured:
        knots[engine, batch][kv].append(ms)
    columns = [np.array(column, np.int64) for column in zip(*(cell for cell, _ in measured), strict=True)]
    curves = Curves(*columns, np.array([ms for _, ms in measured]))
    engine, batch, kv = (np.array(column, np.int64) for column in zip(*asked, strict=True))
    low, high = curves.find(engine, batch)
    ms = curves.along(np.where(low == high, low, -1), kv)
    for i, (e, b, k) in enumerate(asked):
        curve = {x: np.median(y) for x, y in sorted(knots[e, b].items())} if (e, b) in knots else {}
        if curve and min(curve) <= k <= max(curve):
            np.testing.assert_allclose(ms[i], np.interp(k, list(curve), list(curve.values())), rtol=1e-14)
            if k in curve:
                assert ms[i] == curve[k]
        else:
            assert np.isnan(ms[i])
        batches = sorted(b for other, b in knots if other == e)
        below, above = [x for x in batches if x <= b], [x for x in batches if x >= b]
        assert (low[i] >= 0) == bool(below) and (high[i] >= 0) == bool(above)
        if below:
            assert curves.key[low[i]] == (e << 32) + below[-1]
            assert curves.bounds(low[i]) == (min(knots[e, below[-1]]), max(knots[e, below[-1]]))


@given(st.lists(st.floats(0.5, 99), min_size=1, max_size=9))
def test_equal_kv_become_their_median(ms):
    rows = [stp(2, 100, x, WARMUP + i) for i, x in enumerate(ms)]
    assert found([*rows, sd(1, 1, 100)]) == [np.median(ms)]


def test_nothing_is_extrapolated_in_kv_and_nothing_interpolated_in_batch():
    rows = [stp(4, 1000, 10.0), stp(4, 3000, 20.0, 17), stp(8, 1000, 12.0), stp(8, 3000, 26.0, 17)]
    asked = [sd(1, 2, 2000), sd(1, 2, 3001, index=17), sd(1, 2, 999, index=18), sd(1, 3, 2000, index=19)]
    assert found(rows + asked) == [15.0, None, None, None]
    assert found(rows + asked, "interpolated_batch") == [15.0, None, None, (15 + 19) / 2]


def test_a_neighbouring_batch_that_does_not_reach_the_kv_leaves_no_reference():
    rows = [stp(4, 1000, 10.0), stp(8, 2000, 12.0), stp(8, 3000, 14.0, 17)]
    assert found([*rows, sd(1, 3, 1000), sd(1, 3, 2500, index=17)], "interpolated_batch") == [None, None]


def test_only_kept_ordinary_rounds_of_repetition_0_make_the_reference():
    rows = [
        stp(2, 100, 5.0, WARMUP - 1),
        stp(2, 100, 6.0, repetition=1),
        stp(2, 100, 7.0, 18, cuda_graph=False),
        stp(2, 100, 8.0, 17),
    ]
    assert found([*rows, sd(1, 1, 100)]) == [8.0]


def test_each_deployment_has_its_own_reference():
    other = {"gpu": "B", "framework_version": "2"}
    rows = [stp(2, 100, 5.0), stp(2, 100, 7.0, **other), stp(2, 100, 9.0, tp=2), stp(2, 100, 11.0, model="N")]
    asked = [sd(1, 1, 100), sd(1, 1, 100, **other), sd(1, 1, 100, tp=2), sd(1, 1, 100, model="N"), sd(1, 1, 100, tp=4)]
    assert found(rows + asked) == [5.0, 7.0, 9.0, 11.0, None]


def test_anchors_without_kv_have_one_point_per_batch():
    rows = [stp(1, None, 6.0), stp(4, None, 7.0), stp(4, None, 9.0, 17), stp(16, None, 20.0)]
    asked = [sd(3, 1, None), sd(1, 4, None), sd(1, 16, None), sd(1, 1, None)]
    f2 = 6 + (8 - 6) * 1 / 3
    assert found(rows + asked, "interpolated_batch") == [8.0, 8 + 12 * 4 / 12, None, pytest.approx(f2)]


def test_public_step_times_against_the_rule():
    """Medians of a public engine (vLLM PR 32374), by batch at draft lengths 0, 1, 3 and 5; no KV, no context."""
    times = {1: (6.520590, 7.367628, 8.840665, 10.326491), 4: (6.601515, 7.472813, 8.981170, 10.400272)}
    times |= {16: (6.898819, 7.852344, 9.518282, 11.196403), 64: (7.774091, 9.656430, 13.497877, 16.831180)}
    unknown = {"initial_context": None, "timing_scope": "client_itl"}
    rows = [stp(size, None, ms[0], **unknown) for size, ms in times.items()]
    rows += [sd(d, b, None, x, **unknown) for b, ms in times.items() for d, x in zip((1, 3, 5), ms[1:], strict=True)]
    scored = score(read_study(table(rows), anchors=True), reference="interpolated_batch")
    found = configurations(scored, scored.predict(PUBLISHED))
    ratio = {(row["batch_size"], row["draft_length"]): row["config_ratio_median"] for row in found}
    bias = {(row["batch_size"], row["draft_length"]): row["config_bias"] for row in found}
    assert [round(ratio[1, d], 3) for d in (1, 3, 5)] == [1.125, 1.339, 1.553]
    assert [round(bias[1, d]) for d in (1, 3, 5)] == [18, 11, 6]
    assert round(ratio[16, 3], 3) == 1.224 and round(bias[16, 3]) == 22
    assert ratio[64, 1] is None and scored.unmatched.sum() == 4  # wider than anything measured: 128 rows, 96 at B = 16
    assert {config.initial_context for config in scored.configs} == {-1}


def test_anchors_with_and_without_kv_do_not_meet():
    rows = [stp(2, None, 6.0), stp(2, 0, 7.0, 17), stp(2, 100, 9.0, 18)]
    asked = [sd(1, 1, None), sd(1, 1, 50, index=17), sd(1, 1, 500, index=18)]
    assert found(rows + asked, "interpolated_batch") == [6.0, 8.0, None]
    study = read_study(table(rows + asked), anchors=True)
    for options in ({"reference": "measured"}, {"reference": "estimator", "model": object()}):
        assert refusal(OptionError, score, study, **options)[0] == "study_reference"
    scored = score(study, reference="interpolated_batch")
    assert scored.anchors_only and scored.kv.tolist() == [-1, 50] and scored.missing[0]["kv"] == [500, 500]
    assert not score(read_study(six_rounds())).anchors_only


# --- a model as the reference ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(embedded_cell):
    return fpmjax.direct(embedded_cell)


def test_a_model_answers_at_the_widened_batch(model, embedded_cell):
    at = [(1, 4, 9000), (3, 2, 9000), (1, 4, 9000), (2, 10**6, 5)]
    asked = [sd(d, size, kv, index=WARMUP + i) for i, (d, size, kv) in enumerate(at)]
    (expected,) = np.unique(fpmjax.estimate(model, fpmjax.Work.decode([8], [9000])).latency_ms)
    assert found(asked, "estimator", model=model) == [expected] * 3 + [None]
    assert found(asked, "estimator", model={("A", 1, "M"): model}) == [expected] * 3 + [None]
    scored = score(read_study(table(asked)), reference="estimator", model=model)
    assert len(scored) == 3 and scored.unmatched.sum() == 1 and scored.missing[0]["measured_kv"] is None


def test_a_model_of_each_deployment(model, embedded_cells):
    other = fpmjax.direct(embedded_cells.select(tp=4))
    asked = [sd(1, 4, 9000), sd(1, 4, 9000, tp=4)]
    ms = [float(fpmjax.estimate(m, fpmjax.Work.decode(8, 9000)).latency_ms) for m in (model, other)]
    assert found(asked, "estimator", model={("A", 1, "M"): model, ("A", 4, "M"): other}) == ms
    study = read_study(table(asked))
    for given_model in (model, {("A", 1, "M"): model}, None):
        refused = refusal(OptionError, score, study, reference="estimator", model=given_model)
        assert refused[0] == "study_reference"
    assert refusal(OptionError, score, study, model=model)[0] == "study_reference"
    assert refusal(OptionError, score, study, reference="guess")[0] == "study_reference"


# --- scored rounds -----------------------------------------------------------------------------------------


def test_scored_rounds_are_the_kept_ones_with_a_reference():
    scored = score(read_study(synthetic()))
    assert len(scored) == 14_400 and len(scored.configs) == 192 and not scored.unmatched.any()
    assert list(scored.configs) == sorted(scored.configs) and (np.diff(scored.config) >= 0).all()
    assert {reason: int(n.sum()) for reason, n in scored.excluded.items()} == {"warmup": 192 * WARMUP}
    np.testing.assert_allclose(scored.reference_ms, forward_ms(scored.widened, scored.kv), rtol=1e-14)
    assert set(scored.repetition.tolist()) == {1} and scored.round_index.min() == WARMUP
    assert len(scored.group_keys) == 8 and len(scored.cell_keys) == 32
    for i, config in enumerate(scored.configs):
        assert scored.group_keys[scored.groups[i]] == config.group and scored.cell_keys[scored.cells[i]] == config.cell


def test_the_published_identities():
    configuration = score(read_study(six_rounds()))
    (second,) = np.flatnonzero(configuration.config == 1)  # B = 2, d = 3, F(8) = 8
    assert configuration.reference_ms[second] == 8.0 and configuration.widened[second] == 8
    assert configuration.predict(PUBLISHED)[second] == 11.92
    assert PUBLISHED.factor(np.arange(1, 5)).tolist() == [1.33, 1.41, 1.49, 1.57]


def test_repetitions_are_scored_apart():
    study = read_study(synthetic(gpus=("A",), contexts=(1024,), repetitions=(0, 1), round_noise=0.01))
    zero, one, both = (score(study, repetition=which) for which in (0, 1, None))
    assert len(zero) == len(one) == len(both) / 2 == 900 * 2
    np.testing.assert_array_equal(both.measured_ms[both.repetition == 1], one.measured_ms)
    assert refusal(OptionError, score, study, repetition=2) == (
        "study_empty",
        "the table has no speculative rounds of repetition 2",
    )
    only = read_study(table([stp(2, 100, 5.0)]))
    assert refusal(OptionError, score, only)[0] == "study_empty"


def test_unmatched_rounds_are_counted_and_listed():
    rows = [stp(2, 100, 5.0), stp(2, 300, 6.0, 17)]
    asked = [sd(1, 1, kv, index=WARMUP + i) for i, kv in enumerate((50, 100, 200, 301, 400))]
    scored = score(read_study(table([*rows, *asked, sd(2, 1, 200), sd(3, 1, 200, index=0)])))
    assert scored.count.tolist() == [2, 0, 0] and scored.unmatched.tolist() == [3, 1, 0]
    assert scored.excluded["warmup"].tolist() == [0, 0, 1]
    (first, second) = scored.missing
    assert (first["unmatched"], first["widened_batch"]) == (3, 2)
    assert (first["kv"], first["measured_kv"]) == ([50, 400], [100, 300])
    assert (second["widened_batch"], second["measured_kv"]) == (3, None)


def test_a_part_of_the_rounds_keeps_every_configuration():
    scored = score(read_study(six_rounds()))
    part = scored.where(scored.depth == 1)
    assert part.configs == scored.configs and part.count.tolist() == [2, 0, 0]
    assert part.reference_ms.tolist() == [10.0, 10.0]


@given(st.permutations(range(9)), st.integers(0, 9))
def test_neither_the_order_of_rows_nor_a_split_file_is_seen(order, cut):
    rounds = six_rounds()
    whole = score(read_study(rounds))
    mixed = rounds.take(order)
    again = score(read_study(pa.concat_tables([mixed.slice(cut), mixed.slice(0, cut)])))
    for name in ("depth", "reference_ms", "measured_ms", "config", "kv", "round_index"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(again, name), strict=True)
    assert whole.configs == again.configs
