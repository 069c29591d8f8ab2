"""Cluster intervals: what they contain, how wide they are, and what must not change them."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from studies import scored, six_scored, synthetic_scored

from fpmjax import OptionError
from fpmjax.rule import PUBLISHED, SpeculativeRule
from fpmjax.study.bootstrap import BLOCK, Clusters, bootstrap
from fpmjax.study.refit import refit
from fpmjax.study.scored import Config, Scored
from fpmjax.study.statistics import cells, statistics


@pytest.fixture(scope="module")
def noisy() -> Scored:
    """192 configurations, 2 % noise of each, 1 % of every round."""
    return synthetic_scored(cluster_noise=0.02, round_noise=0.01, seed=3)


@pytest.fixture(scope="module")
def found(noisy):
    return bootstrap(noisy, PUBLISHED)


def width(pair):
    return pair[1] - pair[0]


def numbers(document):
    """Every number of every interval, in order."""
    rows = [document, *document["cells"], *document["fits"]]
    pairs = [pair for row in rows for name, pair in row.items() if name.endswith("_interval") and name != "no_interval"]
    return np.array([x for pair in pairs for x in pair or ()])


def test_the_synthetic_study_has_the_width_of_its_clusters(noisy, found):
    """About nine times the width of an interval that takes every round for itself."""
    fit = found["fits"][0]
    assert fit["group"] == "pooled" and fit["clusters"] == found["clusters"] == 192
    assert width(fit["slope_interval"]) == pytest.approx(0.0100, rel=0.2)
    assert width(fit["intercept_interval"]) == pytest.approx(0.030, rel=0.2)
    alone = [noisy.configs[c]._replace(initial_context=i) for i, c in enumerate(noisy.config.tolist())]
    rounds = replace(noisy, config=np.arange(len(noisy), dtype=np.int32), configs=tuple(alone))
    rounds = replace(rounds, unmatched=np.zeros(len(noisy), np.int64))
    naive = bootstrap(rounds, PUBLISHED, draws=300)["fits"][0]
    assert 7 < width(fit["slope_interval"]) / width(naive["slope_interval"]) < 12
    assert 7 < width(fit["intercept_interval"]) / width(naive["intercept_interval"]) < 12


def test_the_estimate_lies_inside_and_everything_is_told(noisy, found):
    overall = statistics(noisy, noisy.predict(PUBLISHED))
    for name in ("round_weighted_mape", "equal_config_mape"):
        low, high = found[f"{name}_interval"]
        assert low < overall[name] < high
    for told, cell in zip(found["cells"], cells(noisy, noisy.predict(PUBLISHED)), strict=True):
        assert [told[k] for k in ("gpu", "model", "method", "draft_length")] == [
            cell[k] for k in ("gpu", "model", "method", "draft_length")
        ]
        low, high = told["cell_round_weighted_mape_interval"]
        assert low <= cell["cell_round_weighted_mape"] <= high and told["clusters"] == 6
    fit = refit(noisy)
    assert found["fits"][0]["slope_interval"][0] < fit.slope < found["fits"][0]["slope_interval"][1]
    assert [f["group"] for f in found["fits"]] == ["pooled", "Qwen3-8B + eagle3", "Qwen3.5-4B + mtp"]
    assert (found["seed"], found["draws"], found["level"], found["strata"]) == (0, 2000, 0.95, 8)
    assert "conditional on the frozen reference" in found["what"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("weights", ["round", "configuration"])
@pytest.mark.parametrize("loss", ["rel_l2", "abs_l2"])
def test_repeating_every_round_changes_nothing(noisy, loss, weights):
    options = {"loss": loss, "weights": weights, "draws": 200, "seed": 7}
    one = bootstrap(noisy, PUBLISHED, **options)
    ten = bootstrap(noisy.where(np.repeat(np.arange(len(noisy)), 10)), PUBLISHED, **options)
    np.testing.assert_allclose(numbers(ten), numbers(one), rtol=1e-9, atol=0)


def test_units_change_nothing(noisy):
    scaled = replace(noisy, reference_ms=noisy.reference_ms * 1e-3, measured_ms=noisy.measured_ms * 1e-3)
    one, other = (bootstrap(s, PUBLISHED, draws=100) for s in (noisy, scaled))
    np.testing.assert_allclose(numbers(other), numbers(one), rtol=1e-9)


def test_draws_are_a_sequence_of_the_seed_however_many_are_asked(noisy):
    """The extremes of more draws only widen, whether or not a block of draws is full."""
    wide = [numbers(bootstrap(noisy, PUBLISHED, draws=n, level=1 - 1e-12)) for n in (1, 10, BLOCK, BLOCK + 1, 300)]
    for few, many in itertools.pairwise(wide):
        assert (many[::2] <= few[::2] + 1e-9).all() and (many[1::2] >= few[1::2] - 1e-9).all()
    again, other = (numbers(bootstrap(noisy, PUBLISHED, draws=100, seed=s)) for s in (0, 1))
    assert (again == numbers(bootstrap(noisy, PUBLISHED, draws=100))).all() and (again != other).any()


def three() -> Scored:
    """One stratum of three configurations with 2, 1 and 3 rounds."""
    configs = [Config("H100", 1, "M", "mtp", d, b, 64) for d, b in ((1, 1), (1, 4), (3, 1))]
    return scored([1, 1, 1, 3, 3, 3], [10.0, 10, 9, 8, 8, 7], [13, 14, 11, 12, 12.5, 11], [0, 0, 1, 2, 2, 2], configs)


@pytest.mark.parametrize("weights", ["round", "configuration"])
@pytest.mark.parametrize("loss", ["rel_l2", "abs_l2"])
def test_every_draw_is_the_refit_of_the_configurations_drawn(loss, weights):
    """All ten ways to draw three of three, each refitted from its rounds; the draws hold these pairs and no others."""
    rounds = three()
    expected = set()
    for drawn in itertools.combinations_with_replacement(range(3), 3):
        at = np.concatenate([np.flatnonzero(rounds.config == c) for c in drawn])
        owner = np.repeat(np.arange(3), rounds.count[list(drawn)])
        configs = [rounds.configs[c]._replace(initial_context=i) for i, c in enumerate(drawn)]
        one = scored(rounds.depth[at], rounds.reference_ms[at], rounds.measured_ms[at], owner, configs)
        fit = refit(one, loss=loss, weights=weights)
        error = statistics(one, one.predict(PUBLISHED))
        pair = (fit.slope, fit.intercept) if fit.fitted else (-1, -1)
        expected.add(tuple(np.round([*pair, error["round_weighted_mape"], error["equal_config_mape"]], 7)))
    clusters = Clusters(rounds, rounds.predict(PUBLISHED), loss, weights)
    draws = [clusters.draw(np.random.default_rng(i), False) for i in range(8)]
    pairs = np.concatenate([np.concatenate([d["fit", "pooled"][:, :2], d["overall"]], axis=1) for d in draws])
    assert {tuple(np.round(np.where(np.isnan(p), -1, p), 7)) for p in pairs} == expected


def test_where_nothing_can_be_exchanged_there_is_no_interval():
    found = bootstrap(six_scored(), PUBLISHED, draws=10)  # every configuration is alone in its stratum
    assert found["strata"] == found["strata_of_one"] == 3
    assert found["round_weighted_mape_interval"] is None and found["fits"][0]["slope_interval"] is None
    assert all(cell["cell_equal_config_mape_interval"] is None for cell in found["cells"])


def test_one_draft_length_and_no_rounds_have_no_slope_interval(noisy):
    found = bootstrap(noisy.where(noisy.depth == 2), PUBLISHED, draws=10)
    assert found["fits"][0]["slope_interval"] is None and found["fits"][0]["singular_draws"] == 10
    assert found["round_weighted_mape_interval"] is not None
    nothing = bootstrap(noisy.where(noisy.depth > 9), PUBLISHED, draws=10)
    assert nothing["clusters"] == 0 and nothing["equal_config_mape_interval"] is None


def test_clipped_draws_are_counted():
    rounds = synthetic_scored(true={("M", "mtp"): (-0.002, 1.3)}, cluster_noise=0.02, seed=1)
    fit = bootstrap(rounds, PUBLISHED, draws=300)["fits"][0]
    assert 0 < fit["clipped_draws"] < 300 and fit["slope_interval"][0] == 0


def test_moving_blocks_widen_what_rounds_alone_can_widen(noisy):
    """One configuration less its neighbours: its mean moves only where its rounds are resampled."""
    plain, blocks = (bootstrap(noisy, PUBLISHED, draws=200, moving_blocks=m) for m in (False, True))
    assert blocks["moving_blocks"] == 16 and plain["moving_blocks"] is None
    ratio = width(blocks["fits"][0]["slope_interval"]) / width(plain["fits"][0]["slope_interval"])
    assert 0.8 < ratio < 1.3
    rounds = three()
    same = Clusters(rounds, rounds.predict(PUBLISHED), "rel_l2", "round")
    one, other = (same.draw(np.random.default_rng(0), m) for m in (False, True))
    for key in one:  # configurations of fewer than 16 rounds are one run, and stay as they are
        np.testing.assert_allclose(other[key], one[key], rtol=1e-12)


def test_moving_blocks_keep_means_and_lengths():
    n = 100
    ratio = 1.3 + 0.1 * np.sin(np.arange(n) / 9)
    rounds = scored(np.ones(n), np.ones(n), ratio, np.zeros(n), [Config("H", 1, "M", "mtp", 1, 1, 1)])
    clusters = Clusters(rounds, rounds.predict(PUBLISHED), "rel_l2", "round")
    times = np.full((2000, 1), 2)
    sums = clusters.resampled(np.random.default_rng(0), times)[:, 0]
    assert sums.mean(0) == pytest.approx(2 * clusters.sums[0], rel=0.02) and sums[:, 2].std() > 0


def test_progress_is_told_to_the_end(noisy):
    told = []
    bootstrap(noisy, PUBLISHED, draws=150, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (150, 150) and len(told) == 3 and all(a < b for a, b in itertools.pairwise(told))


@pytest.mark.parametrize(
    "wrong", [{"loss": "rel_l1"}, {"weights": "x"}, {"draws": 0}, {"seed": -1}, {"seed": None}, {"level": 95}]
)
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(OptionError) as refusal:
        bootstrap(six_scored(), PUBLISHED, **wrong)
    assert refusal.value.code == next(iter(wrong))


def test_anchors_are_drawn_only_when_asked():
    anchors = replace(six_scored(), reference="interpolated_batch")
    with pytest.raises(OptionError, match="anchors"):
        bootstrap(anchors, PUBLISHED)
    assert bootstrap(anchors, PUBLISHED, anchors=True, draws=5)["draws"] == 5


def test_a_million_rounds_cost_little_more_than_their_sums(noisy):
    """Rounds are summed once: 70 times as many give the same 2,000 draws."""
    many = noisy.where(np.repeat(np.arange(len(noisy)), 70))
    assert len(many) > 1_000_000
    begin = time.process_time()
    big = bootstrap(many, PUBLISHED, seed=4)
    assert time.process_time() - begin < 20  # 0.3 s of one core
    np.testing.assert_allclose(numbers(big), numbers(bootstrap(noisy, PUBLISHED, seed=4)), rtol=1e-9)


def grid(*sizes: int, depths: tuple[int, ...] = (1, 2)) -> Scored:
    """Strata of so many configurations of eight rounds, their draft lengths in turn, with regular noise."""
    configs = [
        Config(f"G{g}", 1, "M", "mtp", depths[i % len(depths)], i + 1, 64)
        for g, n in enumerate(sizes)
        for i in range(n)
    ]
    config = np.repeat(np.arange(len(configs)), 8)
    depth = np.array([configs[c].draft_length for c in config])
    measured = (0.1 * depth + 1.15) * (1 + 0.03 * np.sin(12.9898 * config) + 0.005 * np.cos(np.arange(len(config))))
    return scored(depth, np.ones(len(config)), measured, config, configs)


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (1, 1, 3)])
def test_an_interval_whose_end_would_be_one_configuration_is_none(sizes):
    """All draws of two configurations are the two, and their mean: a width would be of nothing."""
    found = bootstrap(grid(*sizes), PUBLISHED, draws=300)
    assert found["round_weighted_mape_interval"] is None and "too few to resample" in found["no_interval"]
    fit = found["fits"][0]
    assert fit["slope_interval"] is fit["fixed_rule"] is None and "too few" in fit["no_interval"]
    assert all(cell["cell_round_weighted_mape_interval"] is None for cell in found["cells"])


@pytest.mark.parametrize("sizes", [(4,), (2, 2, 2), (1, 4)])
def test_enough_configurations_have_one(sizes):
    found = bootstrap(grid(*sizes), PUBLISHED, draws=300)
    low, high = found["round_weighted_mape_interval"]
    assert low < high and found["no_interval"] is None


def test_draws_without_a_fit_are_no_evidence():
    """Of two draft lengths in four configurations, one draw in eight holds one of them alone."""
    four, eight = (bootstrap(grid(n), PUBLISHED, draws=2000)["fits"][0] for n in (4, 8))
    assert four["singular_draws"] == pytest.approx(250, rel=0.2) and four["slope_interval"] is None
    assert re.fullmatch(r"1[0-5] % of the draws hold one draft length only, which fixes no slope", four["no_interval"])
    assert 0 < eight["singular_draws"] < 40 and eight["slope_interval"][0] < eight["slope_interval"][1]
    alone = bootstrap(six_scored(), PUBLISHED, draws=10)
    assert "alone in its GPU, model and method" in alone["no_interval"]


def test_where_the_fixed_rule_lies_among_the_draws(noisy):
    """A pair can lie in both intervals and still fit no draw: a larger slope goes with a smaller intercept."""
    fit = refit(noisy)
    there = bootstrap(noisy, SpeculativeRule(f"{fit.slope:.9g}", f"{fit.intercept:.9g}"))["fits"][0]
    assert there["fixed_rule"]["inside"] and there["fixed_rule"]["distance"] < 0.2
    assert there["fixed_rule"]["limit"] == pytest.approx(2.45, rel=0.1)
    (a, b), (c, d) = there["slope_interval"], there["intercept_interval"]
    corner = bootstrap(noisy, SpeculativeRule(f"{b - (b - a) / 20:.9g}", f"{d - (d - c) / 20:.9g}"))["fits"][0][
        "fixed_rule"
    ]
    assert corner["inside_slope"] and corner["inside_intercept"] and not corner["inside"]
    far = bootstrap(noisy, SpeculativeRule("0.08", "1.4"))["fits"][0]["fixed_rule"]
    assert not far["inside"] and not far["inside_intercept"]


def test_rounds_without_noise_allow_their_own_rule_alone():
    exact = synthetic_scored(gpus=("H100",), true={("M", "mtp"): (0.08, 1.25)})
    same, other = (
        bootstrap(exact, SpeculativeRule("0.08", b), draws=99)["fits"][0]["fixed_rule"] for b in ("1.25", "1.26")
    )
    assert same["inside"] and same["inside_slope"] and same["inside_intercept"] and not other["inside"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("latency", [1e308, 1e-320, 1e290])
def test_a_latency_that_none_can_be_leaves_no_fit_and_no_warning(noisy, latency):
    measured = noisy.measured_ms.copy()
    measured[0] = latency
    found = bootstrap(replace(noisy, measured_ms=measured), PUBLISHED, draws=100)
    pooled, group, other = found["fits"]
    assert pooled["slope_interval"] is group["slope_interval"] is None and "implausible" in pooled["no_interval"]
    assert other["slope_interval"] and noisy.configs[0].method == "eagle3"
