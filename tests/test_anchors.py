"""Recommended points: after measuring them, widened queries lie in what was observed.  No fit is needed to see that."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fitted import decoding, engine_ms
from hypothesis import given
from hypothesis import strategies as st
from table_pairs import refusal

from fpmjax import Anchor, Observations, Work, recommend_anchors
from fpmjax.errors import OptionError
from fpmjax.iteration import askable
from fpmjax.models.anchors import BATCHES, NEAR, wide_batches
from fpmjax.models.committee import box_of, outside
from fpmjax.models.learned import ANCHOR
from fpmjax.observe.sizes import coordinates, sizes_of


def observed(batch, kv) -> Observations:
    return Observations.of(Work.decode(batch, kv), engine_ms(batch, kv))


def lattice(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, wide, long = rng.integers(1, 40), rng.uniform(0.1, 9), rng.uniform(0.1, 10)
    batch = np.exp(rng.uniform(0, wide, n)).astype(np.int64)
    context = np.exp(rng.uniform(0, long, n)).astype(np.int64) * (rng.integers(0, 2, n) if seed % 5 == 0 else 1)
    return batch, np.minimum(batch * context, 2**32 - 1)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_widened_queries_are_answered_and_supported(seed, depths):
    batch, kv = lattice(seed)
    found = recommend_anchors(observed(batch, kv), draft_lengths=depths)
    assert len(found) <= 2 * BATCHES and len(set(found)) == len(found)
    measured = np.array(found, np.int64).reshape(-1, 2)
    seen = Work.decode(np.concatenate([batch, measured[:, 0]]), np.concatenate([kv, measured[:, 1]]))
    wide = Work.decode((batch[:, None] * (np.array(depths) + 1)).ravel(), np.repeat(kv, len(depths)))
    seen, wide = (sizes_of(np, askable(np, work)[0]) for work in (seen, wide))
    assert (wide.decode <= ANCHOR * seen.decode.max()).all()
    far = outside(np, box_of(coordinates(np, seen)), coordinates(np, wide))
    assert far.max() <= 2 * NEAR  # of a point that was observed nearly so; mostly 0


def test_two_contexts_at_each_of_few_batches():
    batch, context = (x.ravel() for x in np.meshgrid([1, 4, 16, 64], [100, 1000, 4000]))
    found = recommend_anchors(observed(batch, batch * context), draft_lengths=[1, 2, 3])
    assert sorted({a.decode_requests for a in found}) == [128, 256] and len(found) == 4
    assert all(isinstance(a, Anchor) and type(a.decode_requests) is type(a.decode_kv) is int for a in found)
    assert min(a.decode_kv / a.decode_requests for a in found) <= 100 / 4
    assert wide_batches(64, 100_000)[-1] == 100_000 and len(wide_batches(64, 100_000)) == BATCHES
    assert wide_batches(64, 64) == []


def test_where_nothing_is_needed():
    prefill = Observations.of(Work.prefill([1, 2], [10, 20]), [1.0, 2.0])
    assert recommend_anchors(prefill, draft_lengths=3) == ()
    assert recommend_anchors(decoding()[:0], draft_lengths=3) == ()
    assert recommend_anchors(decoding(), draft_lengths=[]) == ()
    assert recommend_anchors(observed([2**32 - 1], [2**32 - 1]), draft_lengths=1) == ()  # no wider batch can be counted
    assert recommend_anchors(observed([96, 128], [9000, 9000]), draft_lengths=1)[0].decode_requests == 256


def test_arguments():
    for value in (None, 5, "text", [], decoding().work, Observations):
        assert refusal(recommend_anchors, value, draft_lengths=1)[0] == "payload"
    assert refusal(recommend_anchors, Observations(decoding().work, np.ones(3)), draft_lengths=1)[0] == "payload"
    for value in (None, 1.5, True, "3", range(3), {1}, [1, "a"]):
        assert refusal(recommend_anchors, decoding(), draft_lengths=value)[0] == "draft_length_type"
    for value in (0, -1, [1, 0]):
        assert refusal(recommend_anchors, decoding(), draft_lengths=value)[0] == "draft_length_not_positive"
    for traced in (
        lambda: jax.jit(lambda seen: recommend_anchors(seen, draft_lengths=1))(decoding()),
        lambda: jax.jit(lambda d: recommend_anchors(decoding(), draft_lengths=d))(2),
    ):
        assert refusal(traced)[0] == "traced"
    with pytest.raises(TypeError):
        recommend_anchors(decoding())  # pyright: ignore[reportCallIssue]


def test_measured_anchors_are_done_once_the_asked_batch_is_named():
    batch, past = (x.ravel() for x in np.meshgrid([1, 4, 16, 64], [64, 512, 4096, 32768]))
    seen = Observations.of(Work.decode(batch, batch * past), np.ones(batch.size))
    anchors = recommend_anchors(seen, draft_lengths=[1, 3], largest_batch=64)
    assert anchors == recommend_anchors(seen, draft_lengths=[1, 3])
    more = Observations.of(Work.decode(*zip(*anchors, strict=True)), np.ones(len(anchors)))
    both = Observations.concat([seen, more])
    assert recommend_anchors(both, draft_lengths=[1, 3], largest_batch=64) == ()
    assert recommend_anchors(both, draft_lengths=[1, 3])


@pytest.mark.parametrize("largest", [0, -1, 1.5, True, "8", 2**32])
def test_the_asked_batch_is_a_count(largest):
    seen = Observations.of(Work.decode([1], [8]), [1.0])
    with pytest.raises(OptionError) as error:
        recommend_anchors(seen, draft_lengths=1, largest_batch=largest)
    assert error.value.code == "largest_batch"
