"""Splits: what was held out is not fitted, and every row is of the same rounds throughout."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from studies import EAGLE, MTP, six_scored, synthetic_scored

from fpmjax import OptionError
from fpmjax.rule import PUBLISHED
from fpmjax.study.refit import refit
from fpmjax.study.scored import Scored
from fpmjax.study.splits import splits
from fpmjax.study.statistics import statistics

EAGLE_NAME, MTP_NAME = (" + ".join(pair) for pair in (EAGLE, MTP))


@pytest.fixture(scope="module")
def clean() -> Scored:
    return synthetic_scored()


@pytest.fixture(scope="module")
def rows(clean):
    return splits(clean, PUBLISHED)


def test_every_leave_one_out_is_there_in_order(clean, rows):
    assert [(r["split"], r["held_out"]) for r in rows] == [
        *(("gpu", gpu) for gpu in ("B200", "GB200", "H100", "H200")),
        *(("model + method", name) for name in (EAGLE_NAME, MTP_NAME)),
        *(("draft_length", f"d = {d}") for d in (1, 2, 3, 4)),
        ("initial_context", "1,024 tokens"),
        ("initial_context", "4,096 tokens"),
    ]
    for name in ("gpu", "model + method", "draft_length", "initial_context"):
        assert sum(r["rounds"] for r in rows if r["split"] == name) == len(clean)
        assert sum(r["configurations"] for r in rows if r["split"] == name) == 192
    json.dumps(rows, allow_nan=False)


def test_two_clean_lines_are_found_again_by_group_and_not_by_one_pooled_line(clean, rows):
    for row in rows:
        if row["split"] == "model + method":
            assert row["per_group"] is None
            continue
        assert row["per_group"]["round_weighted_mape"] < 1e-9
        assert [f["group"] for f in row["per_group"]["fits"]] == [EAGLE_NAME, MTP_NAME]
        assert row["pooled"]["round_weighted_mape"] > 0.5
    everything = statistics(clean, refit(clean).predict(clean))
    assert rows[0]["pooled"]["round_weighted_mape"] == pytest.approx(everything["round_weighted_mape"], rel=1e-6)


def test_one_method_says_nothing_of_another(clean, rows):
    """Without EAGLE the pooled refit is MTP's line, the published one, whose errors on EAGLE are known."""
    row = next(r for r in rows if r["held_out"] == EAGLE_NAME)
    assert (row["pooled"]["slope"], row["pooled"]["intercept"]) == pytest.approx((0.08, 1.25), rel=1e-9)
    for name in ("round_weighted_mape", "equal_config_mape", "round_weighted_bias", "equal_config_bias"):
        assert row["pooled"][name] == pytest.approx(row["fixed"][name], rel=1e-9)
    assert row["fixed"]["round_weighted_mape"] == pytest.approx(2 * 2.00346393, abs=1e-7)
    assert row["fixed"]["equal_config_mape"] == pytest.approx(2 * 1.86167346, abs=1e-7)


def test_what_is_held_out_is_not_seen(clean):
    """Nonsense in the part held out moves its errors and no pair."""
    spoilt = clean.measured_ms * np.where(clean.depth == 4, 3.0, 1.0)
    row = next(r for r in splits(replace(clean, measured_ms=spoilt), PUBLISHED) if r["held_out"] == "d = 4")
    same = next(r for r in splits(clean, PUBLISHED) if r["held_out"] == "d = 4")
    assert row["pooled"]["slope"] == same["pooled"]["slope"] and row["per_group"]["fits"] == same["per_group"]["fits"]
    assert row["fixed"]["round_weighted_mape"] > 60


def test_repetitions_within_and_beside():
    both = synthetic_scored(gpus=("H100",), repetitions=(0, 1), cluster_noise=0.02, seed=2)
    later, earlier = both.where(both.repetition == 1), both.where(both.repetition == 0)
    within, beside = splits(both, PUBLISHED)[0], splits(later, PUBLISHED, earlier=earlier)[0]
    assert within == beside and within["split"] == "repetition" and within["held_out"] == "repetition 1"
    fit = refit(earlier)
    assert (within["pooled"]["slope"], within["pooled"]["intercept"]) == (fit.slope, fit.intercept)
    expected = statistics(later, fit.predict(later))
    for name in ("round_weighted_mape", "equal_config_mape", "round_weighted_bias", "equal_config_bias"):
        assert within["pooled"][name] == pytest.approx(expected[name])
    assert all(r["split"] != "repetition" for r in splits(later, PUBLISHED))
    # Scored by themselves, earlier rounds number their configurations their own way.
    own = replace(earlier, configs=earlier.configs[24:] + earlier.configs[:24], config=(earlier.config - 24) % 48)
    again = splits(later, PUBLISHED, earlier=own)[0]
    for a, b in zip(again["per_group"]["fits"], within["per_group"]["fits"], strict=True):
        assert a["slope"] == pytest.approx(b["slope"], rel=1e-9)


def test_a_split_that_leaves_one_depth_has_no_refit(clean):
    two = clean.where((clean.depth == 1) | (clean.depth == 3))
    found = [r for r in splits(two, PUBLISHED) if r["split"] == "draft_length"]
    assert [r["held_out"] for r in found] == ["d = 1", "d = 3"]
    assert all(r["pooled"] is None and r["per_group"] is None and r["fixed"]["round_weighted_mape"] > 0 for r in found)


def test_nothing_to_hold_out_is_no_split(clean):
    one = clean.where(clean.config == 0)
    assert splits(one, PUBLISHED) == [] and splits(clean.where(clean.depth > 9), PUBLISHED) == []


def test_a_clipped_pair_says_so():
    found = {r["held_out"]: r["pooled"] for r in splits(six_scored(), PUBLISHED) if r["split"] == "gpu"}
    assert found["A"]["status"] == "clipped" and found["A"]["slope"] == 0
    assert found["C"]["status"] == "ok" and found["C"]["slope"] > 0


def test_anchors_are_split_only_when_asked(clean):
    anchors = replace(clean, reference="interpolated_batch")
    with pytest.raises(OptionError, match="anchors"):
        splits(anchors, PUBLISHED)
    assert splits(anchors, PUBLISHED, anchors=True)


def test_several_tensor_parallel_sizes_are_left_out_in_turn():
    rounds = synthetic_scored(gpus=("H100",))
    wide = tuple(c._replace(tp=4) if c.batch_size == 8 else c for c in rounds.configs)
    found = [row for row in splits(replace(rounds, configs=wide), PUBLISHED) if row["split"] == "tp"]
    assert [row["held_out"] for row in found] == ["TP1", "TP4"] and all(row["pooled"] for row in found)
    assert not [row for row in splits(rounds, PUBLISHED) if row["split"] == "tp"]
