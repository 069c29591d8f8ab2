"""Statistics of a study: the oracles of the protocol to the digits printed there, and what must not change them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from asking import CASES
from hypothesis import given
from hypothesis import strategies as st
from studies import MTP, scored, six_rounds, six_scored, synthetic, synthetic_scored

from fpmjax.rule import PUBLISHED
from fpmjax.study.read import read_study
from fpmjax.study.scored import Config, Scored, score
from fpmjax.study.statistics import cells, configurations, errors, medians, statistics

CONFIG = Config("A", 1, "M", "mtp", 1, 1, 64)


def of(rounds: Scored) -> dict[str, Any]:
    return statistics(rounds, rounds.predict(PUBLISHED))


def printed(document: dict[str, Any], expected: dict[str, float]) -> None:
    """Equal to as many decimals as are given, of which some are rounded and some cut off."""
    for name, value in expected.items():
        assert abs(document[name] - value) < 10.0 ** -len(str(value).partition(".")[2]), name


@pytest.mark.parametrize("rounds", [six_scored(), score(read_study(six_rounds()))], ids=["arrays", "file"])
def test_six_rounds(rounds):
    document = of(rounds)
    printed(
        document,
        {
            "round_weighted_mape": 14.015152,
            "equal_config_mape": 9.848485,
            "p90_round_ape": 25.0,
            "p90_config_mape": 20.909091,
            "wape": 17.507161,
            "round_weighted_bias": 10.984848,
            "max_round_ape": 25.0,
        },
    )
    assert round(document["worst_config"]["config_mape"], 9) == 25.0 and document["worst_config"]["gpu"] == "C"
    ape = np.abs(rounds.predict(PUBLISHED) / rounds.measured_ms - 1) * 100
    np.testing.assert_allclose(ape, [0, 9.090909, 0, 25, 25, 25], atol=5e-7)
    assert (document["rounds"], document["configurations"], document["thin_configurations"]) == (6, 3, 1)
    assert document["coverage"] == 1.0 and document["excluded"] == {} and document["unmatched"] == 0


@pytest.mark.parametrize("rounds", [synthetic_scored(), score(read_study(synthetic()))], ids=["arrays", "file"])
def test_the_noise_free_study(rounds):
    document = of(rounds)
    printed(
        document,
        {"round_weighted_mape": 2.00346393, "equal_config_mape": 1.86167346, "p90_round_ape": 6.4}
        | {"p90_config_mape": 6.4, "max_round_ape": 6.4},
    )
    assert (document["rounds"], document["configurations"]) == (14_400, 192)
    worst = document["worst_config"]  # of 48 that are equal up to rounding, the first
    assert round(worst.pop("config_mape"), 9) == 6.4
    assert list(worst.values()) == ["B200", 1, "Qwen3-8B", "eagle3", 1, 1, 1024]
    for cell in cells(rounds, rounds.predict(PUBLISHED)):
        expected = (
            0.0 if (cell["model"], cell["method"]) == MTP else (6.4, 4.444, 2.7586, 1.2903)[cell["draft_length"] - 1]
        )
        for name in ("cell_round_weighted_mape", "cell_equal_config_mape"):
            assert cell[name] == pytest.approx(expected, abs=1e-3)
        assert cell["configurations"] == cell["scored_configurations"] == 6
        assert cell["rounds"] == 6 * (100 - 10 * cell["draft_length"])


def test_predictions_of_the_peer_on_real_passes():
    with gzip.open(CASES / "gb200_holdout.csv.gz") as file:
        passes = pacsv.read_csv(file)
    phase = np.array(passes["phase"].to_pylist())
    predicted, measured = (passes[name].to_numpy() for name in ("peer_fpm_predicted_ms", "latency_ms"))
    whole = errors(predicted, measured)
    prefill, decode = (errors(predicted[phase == p], measured[phase == p]) for p in ("prefill", "decode"))
    printed(whole, {"round_weighted_mape": 4.894231, "p90_round_ape": 8.303928})
    printed(prefill, {"rounds": 28, "round_weighted_mape": 4.690749, "wape": 4.745166})
    printed(decode, {"rounds": 10, "round_weighted_mape": 5.463982, "round_weighted_bias": 5.084303})


def test_nothing_scored_has_no_number():
    nothing = six_scored().where(np.zeros(6, bool))
    document = of(nothing)
    assert document["rounds"] == 0 and document["thin_configurations"] == 3
    names = ("round_weighted_mape", "equal_config_mape", "p90_round_ape", "p90_config_mape", "worst_config", "wape")
    assert {document[name] for name in names} == {None}
    assert {row["config_mape"] for row in configurations(nothing, nothing.predict(PUBLISHED))} == {None}
    assert {row["cell_equal_config_mape"] for row in cells(nothing, nothing.predict(PUBLISHED))} == {None}


def test_a_configuration_without_rounds_enters_no_mean():
    configs = [CONFIG, CONFIG._replace(initial_context=128), CONFIG._replace(initial_context=256)]
    rounds = scored([1, 1, 1], [10.0, 10.0, 10.0], [13.3, 13.3, 26.6], [0, 0, 2], configs)
    document = of(rounds)
    assert document["equal_config_mape"] == pytest.approx(25.0)
    assert (document["scored_configurations"], document["thin_configurations"]) == (2, 2)
    rows = configurations(rounds, rounds.predict(PUBLISHED))
    assert [row["thin"] for row in rows] == [False, True, True] and rows[1]["config_mape"] is None
    assert [row["rounds"] for row in rows] == [2, 0, 1]


def test_partial_configurations_and_coverage_count_every_round():
    from dataclasses import replace

    configs = [CONFIG, CONFIG._replace(initial_context=128)]
    rounds = scored([1] * 190, [10.0] * 190, [13.3] * 190, [0] * 95 + [1] * 95, configs)
    excluded = {"warmup": np.array([16, 16]), "non_graph": np.array([0, 4])}
    rounds = replace(rounds, unmatched=np.array([5, 6]), excluded=excluded)  # 5 of 100 are not more than 5 %
    rows = configurations(rounds, rounds.predict(PUBLISHED))
    assert [row["partial"] for row in rows] == [False, True]
    assert rows[0]["coverage"] == 95 / 116 and rows[0]["excluded"] == {"warmup": 16}
    assert rows[1]["coverage"] == 95 / 121 and rows[1]["excluded"] == {"warmup": 16, "non_graph": 4}
    document = of(rounds)
    assert (document["partial_configurations"], document["unmatched"], document["coverage"]) == (1, 11, 190 / 237)


def test_equal_configurations_the_smallest_key_is_the_worst():
    configs = sorted(CONFIG._replace(gpu=gpu, batch_size=b) for gpu in "BA" for b in (10, 9))
    rounds = scored([1] * 4, [10.0] * 4, [10.0] * 4, [3, 2, 1, 0], configs)
    assert of(rounds)["worst_config"] == {"config_mape": pytest.approx(33.0), **configs[0]._asdict()}
    assert (configs[0].gpu, configs[0].batch_size) == ("A", 9)  # numbers are ordered as numbers


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), max_size=30))
def test_medians_of_groups(pairs):
    group, values = np.array([g for g, _ in pairs], np.int64), np.array([x for _, x in pairs])
    result = medians(values, group, np.bincount(group, minlength=5))
    for g in range(5):
        expected = np.median(values[group == g]) if (group == g).any() else np.nan
        np.testing.assert_equal(result[g], expected)


# --- what must not change a number -------------------------------------------------------------------------

SMALL: dict[str, Any] = {"gpus": ("A", "B"), "contexts": (1024,), "batches": (1, 4), "rounds": lambda d: 9 - d}
NOISY = synthetic(**SMALL, cluster_noise=0.05, round_noise=0.05)
NUMBERS = ("round_weighted_mape", "equal_config_mape", "p90_round_ape", "p90_config_mape", "wape", "max_round_ape")
NUMBERS += ("round_weighted_bias", "equal_config_bias")


def measured(rounds: pa.Table) -> dict[str, Any]:
    return of(score(read_study(rounds)))


def with_latency(rounds: pa.Table, ms: np.ndarray) -> pa.Table:
    return rounds.set_column(rounds.column_names.index("latency_ms"), "latency_ms", pa.array(ms))


@given(st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(scale):
    there = measured(with_latency(NOISY, NOISY["latency_ms"].to_numpy() * scale))
    here = measured(NOISY)
    for name in NUMBERS:
        assert there[name] == pytest.approx(here[name], rel=1e-9)
    assert there["worst_config"]["gpu"] == here["worst_config"]["gpu"]


@given(st.integers(0, 2**32), st.integers(0, NOISY.num_rows))
def test_order_and_a_file_split_in_two_do_not_matter_to_the_bit(seed, cut):
    mixed = NOISY.take(np.random.default_rng(seed).permutation(NOISY.num_rows))
    assert measured(pa.concat_tables([mixed.slice(cut), mixed.slice(0, cut)])) == measured(NOISY)


@given(st.integers(0, 31), st.integers(2, 5))
def test_more_rounds_of_one_configuration_weigh_by_rounds_only(which, times):
    rounds = score(read_study(NOISY))
    config = rounds.configs[which % len(rounds.configs)]
    rows = [row for row in NOISY.to_pylist() if all(row[name] == value for name, value in config._asdict().items())]
    more = [row | {"study_id": f"again {i}"} for i in range(times - 1) for row in rows]
    here, there = measured(NOISY), measured(pa.concat_tables([NOISY, pa.Table.from_pylist(more, NOISY.schema)]))
    assert there["equal_config_mape"] == pytest.approx(here["equal_config_mape"], rel=1e-12)
    assert there["p90_config_mape"] == pytest.approx(here["p90_config_mape"], rel=1e-12)
    assert there["rounds"] == here["rounds"] + (times - 1) * (9 - config.draft_length)
    assert there["round_weighted_mape"] != pytest.approx(here["round_weighted_mape"], rel=1e-12)


def test_the_size_of_an_error_excludes_nothing():
    ms = NOISY["latency_ms"].to_numpy().copy()
    sd = np.flatnonzero((np.array(NOISY["kind"].to_pylist()) == "sd") & (NOISY["round_index"].to_numpy() >= 16))
    ms[sd[0]] *= 1000
    assert measured(with_latency(NOISY, ms))["rounds"] == measured(NOISY)["rounds"]
    assert measured(with_latency(NOISY, ms))["coverage"] == measured(NOISY)["coverage"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("latency", [1e308, 1e290, 2.3e-308, 1e-320])
def test_what_is_no_finite_number_is_none_and_warns_nobody(latency):
    rounds = six_scored()
    measured = rounds.measured_ms.copy()
    measured[-2:] = latency
    rounds = replace(rounds, measured_ms=measured)
    predicted = rounds.predict(PUBLISHED)
    found = statistics(rounds, predicted), cells(rounds, predicted), configurations(rounds, predicted)
    json.dumps(found, allow_nan=False)
    if latency > 1:  # a prediction far too low is 100 % wrong
        assert found[0]["max_round_ape"] == pytest.approx(100) and found[0]["round_weighted_mape"] < 100
    if latency == 1e-320:
        assert found[0]["round_weighted_mape"] is found[0]["worst_config"]["config_mape"] is None
        assert found[0]["worst_config"]["gpu"] == "C" and found[1][0]["cell_round_weighted_mape"] is not None


def test_a_cell_says_which_tensor_parallel_sizes_it_pools():
    rounds = six_scored()
    configs = (rounds.configs[0], rounds.configs[0]._replace(tp=4), rounds.configs[2])
    found = cells(replace(rounds, configs=configs), rounds.predict(PUBLISHED))
    assert [cell["tensor_parallel_sizes"] for cell in found] == [[1, 4], [1]]
