"""`evaluate`: counts and errors against hand values and a plain recomputation."""

from __future__ import annotations

from collections import defaultdict

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from fpmjax import Estimate, Interval, MetricsError, Observations, Status, Support, Work, evaluate
from fpmjax._jax import pytree


@pytree()
class Plane:
    """B + K / 1024 ms; not ready for B = 7, out of coverage for B = 9."""

    slope: float

    composition = "whole_forward"
    execution = "autoregressive"
    verify_width = 1
    ready = True
    reads = frozenset()

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        requests = work.decode_requests[..., 0]
        status = jnp.where(requests == 7, Status.NOT_READY, Status.OK)
        status = jnp.where(requests == 9, Status.NO_BATCH_BRACKET, status).astype(jnp.int8)
        ms = requests.astype(float) * self.slope + work.decode_kv[..., 0].astype(float) / 1024.0
        return Estimate(jnp.where(status == 0, ms, jnp.nan), status, jnp.where(status == 0, 0, -1).astype(jnp.int32))


MODEL = Plane(1.0)


def rows_of(table: pa.Table) -> dict:
    return {(row["group"], row["block"]): row for row in table.to_pylist()}


def test_the_statistics_are_those_of_the_definitions():
    # predicted 8, 4, 16; observed 10, 4, 10: errors -20 %, 0 %, +60 %
    work = Work.decode([4, 2, 8, 7, 9], [4096, 2048, 8192, 1024, 1024])
    table = evaluate(MODEL, Observations.of(work, [10.0, 4.0, 10.0, 5.0, 5.0]), by=None, blocks=1)
    (row,) = table.to_pylist()
    assert (row["group"], row["block"], row["by"]) == ("all", None, "none")
    assert (row["n"], row["scored"], row["unready"], row["refused"], row["coverage"]) == (5, 3, 1, 1, 0.6)
    assert row["mape_pct"] == pytest.approx(80 / 3) and row["bias_pct"] == pytest.approx(40 / 3)
    assert row["wape_pct"] == pytest.approx(100 * 8 / 24)
    assert row["p50_ape_pct"] == pytest.approx(20.0) and row["p90_ape_pct"] == pytest.approx(20 + 0.8 * 40)
    assert row["worst_ape_pct"] == pytest.approx(60.0) and row["worst_row"] == 2
    assert row["observed_ms"] == pytest.approx(8.0)


def test_groups_and_blocks_partition_the_observations():
    generator = np.random.default_rng(3)
    batch = generator.integers(1, 33, 1000)
    work = Work.decode(batch, batch * 100)
    observed = batch * 1.1 + generator.uniform(0.1, 5, 1000)
    rows = rows_of(evaluate(MODEL, Observations.of(work, observed)))
    assert {block for _, block in rows} == {None, 0, 1, 2, 3}
    assert {group for group, _ in rows} == {"all", "1", "2", "3-4", "5-8", "9-16", "17-32"}
    for key in ("n", "scored", "unready", "refused"):
        by_block = defaultdict(int)
        for (group, block), row in rows.items():
            if group != "all":
                by_block[block] += row[key]
        assert all(by_block[block] == rows["all", block][key] for block in by_block)
        assert sum(rows["all", i][key] for i in range(4)) == rows["all", None][key]
    assert [(rows["all", i]["first"], rows["all", i]["last"]) for i in range(4)] == [
        (0, 250),
        (250, 500),
        (500, 750),
        (750, 1000),
    ]
    inside = (batch > 8) & (batch <= 16) & (batch != 9) & (np.arange(1000) < 250)
    predicted = batch + batch * 100 / 1024
    ape = 100 * np.abs(predicted - observed) / observed
    assert rows["9-16", 0]["mape_pct"] == pytest.approx(ape[inside].mean())
    assert rows["9-16", 0]["worst_row"] == np.flatnonzero(inside)[ape[inside].argmax()]


def test_drift_shows_in_the_blocks():
    work = Work.decode(np.full(100, 4), 4096)
    rows = rows_of(evaluate(MODEL, Observations.of(work, np.repeat([8.0, 10.0], 50)), by=None, blocks=2))
    assert rows["all", 0]["mape_pct"] == 0 and rows["all", 1]["bias_pct"] == pytest.approx(-20.0)


def test_columns_kinds_and_sizes_group():
    work = Work.of(
        decode_requests=[4, 4, 0], decode_kv=[10, 9000, 0], prefill_requests=[0, 1, 1], prefill_tokens=[0, 5, 5]
    )
    observations = Observations.of(work, [1.0, 2.0, 3.0])

    def sizes(by):
        return {group: row["n"] for (group, _), row in rows_of(evaluate(MODEL, observations, by=by, blocks=1)).items()}

    assert sizes("kind") == {"all": 3, "pure_decode": 1, "contains_locally_mixed": 1, "pure_prefill": 1}
    assert sizes("kv") == {"all": 3, "0": 1, "9-16": 1, "8193-16384": 1}
    assert sizes("tokens") == {"all": 3, "3-4": 1, "5-8": 1, "9-16": 1}
    assert sizes(["x", "y", "x"]) == sizes(pa.array(["x", "y", "x"])) == {"all": 3, "x": 2, "y": 1}
    assert sizes(["\ud800", "b", "b"]) == {"all": 3, "\\ud800": 1, "b": 2}
    assert sizes(np.array([2.5, 1.0, 1.0])) == {"all": 3, "1.0": 2, "2.5": 1}


@pytree()
class Stating(Plane):
    """The same, within 10 % in 8 of 10 cases; its box ends at B = 4, and of B = 3 it says nothing."""

    def __call__(self, work: Work, *, evidence: bool = False) -> Estimate:
        answer, requests = super().__call__(work), work.decode_requests[..., 0].astype(float)
        ms = jnp.where(requests == 3, jnp.nan, answer.latency_ms)
        distance = jnp.where(jnp.isnan(ms), jnp.nan, jnp.maximum(jnp.log(requests / 4.0), 0.0))
        interval = Interval(0.9 * ms, 1.1 * ms, jnp.full(ms.shape, 10), 0.8)
        return Estimate(
            answer.latency_ms, answer.status, answer.rank, None, None, interval, Support(distance, distance)
        )


def test_what_a_model_says_of_its_errors_is_counted():
    # predicted 2, 5, 9, 12, 33, none (not ready), 4; of the last there is no interval
    batch = [1, 4, 8, 11, 32, 7, 3]
    observed = [2.2, 5.6, 8.1, 12.0, 40.0, 5.0, 4.0]
    seen = Observations.of(Work.decode(batch, 1024), observed)
    rows = rows_of(evaluate(Stating(1.0), seen, by="support", blocks=1))
    assert list(rows) == [
        (group, None) for group in ("all", "supported", "extrapolated <=1", "extrapolated >1", "unknown")
    ]
    total = rows["all", None]
    assert (total["scored"], total["extrapolated"], total["interval_level"]) == (6, 3, 0.8)
    assert total["interval_coverage"] == 3 / 5  # the first, the third and the fourth of five
    counts = {group: (r["n"], r["extrapolated"], r["interval_coverage"]) for (group, _), r in rows.items()}
    assert counts["supported"] == (2, 0, 0.5) and counts["extrapolated >1"] == (2, 2, 0.5)
    assert counts["extrapolated <=1"] == (1, 1, 1.0) and counts["unknown"] == (2, None, None)
    assert rows["unknown", None]["interval_level"] is None


def test_a_model_that_says_nothing_has_nulls():
    table = evaluate(MODEL, Observations.of(Work.decode([1, 2], 5), [1.0, 2.0]), by="support", blocks=1)
    assert table["group"].to_pylist() == ["all", "unknown"]
    for name, kind in (("interval_coverage", "double"), ("interval_level", "double"), ("extrapolated", "int64")):
        assert table[name].null_count == 2 and str(table.schema.field(name).type) == kind


def test_nothing_to_score_is_null_not_zero():
    empty = evaluate(MODEL, Observations.of(Work.decode([1], 5), [1.0])[:0])
    assert empty["n"].to_pylist() == [0] * 5 and empty["mape_pct"].null_count == 5
    unready = evaluate(MODEL, Observations.of(Work.decode([7], 5), [1.0]), by=None, blocks=1).to_pylist()[0]
    assert (unready["n"], unready["unready"], unready["coverage"], unready["mape_pct"]) == (1, 1, 0.0, None)


def test_arguments_are_checked():
    observations = Observations.of(Work.decode([1, 2], 5), [1.0, 2.0])
    for by in ([None] * 2, [None, "a"], pa.array([None, "a"]), pa.array([None, 1]), [float("nan"), 1.0]):
        with pytest.raises(MetricsError, match=r"has no value for [12] of 2 observations, the first is 0\nhint: "):
            evaluate(MODEL, observations, by=by)
    with pytest.raises(MetricsError, match="has no value for 1 of 1"):
        evaluate(MODEL, observations[:1], by=[None])
    masked = np.ma.array([1, 2], mask=[True, False])
    for by in (
        "size",
        [1],
        [[1], [2]],
        [1, [2]],
        {"a": 1},
        5,
        object(),
        np.array([1, "a"], object),
        b"ab",
        True,
        masked,
    ):
        with pytest.raises(MetricsError, match="\nhint: "):
            evaluate(MODEL, observations, by=by)
    for blocks in (0, 1.5, True, None):
        with pytest.raises(MetricsError, match="\nhint: "):
            evaluate(MODEL, observations, blocks=blocks)
    with pytest.raises(MetricsError, match="\nhint: "):
        evaluate(MODEL, observations.work)
