"""Observations that tests make by hand, and how they compare them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fpmjax import FpmError, Observations


def rank(decode: int = 0, kv: int = 0, wall: float | int | None = None, **scheduled) -> dict:
    metrics: dict = {"scheduled_requests": {"num_decode_requests": decode, "sum_decode_kv_tokens": kv, **scheduled}}
    return metrics if wall is None else metrics | {"wall_time": wall}


def code_of(call, *args, **options) -> str:
    with pytest.raises(FpmError) as caught:
        call(*args, **options)
    assert "\nhint: " in str(caught.value)
    return caught.value.code


def assert_same(a: Observations, b: Observations) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def lists_and_ranks() -> Observations:
    listed = {"extend_lengths": [1, 1, 1], "past_kv_lengths": [2**40, 0, 7]}
    return Observations.from_metrics(
        [
            [rank(1, 10, 0.1)],
            [rank(2, 20, 0.2), rank(3, 30, 0.1, **listed)],
            [rank(0, 0, 0.3, extend_lengths=[], past_kv_lengths=[]), rank(4, 40)],
            [rank(5, 50, 0.4, var_decode_kv_tokens=2.5), rank(0, 0), rank(6, 60)],
        ],
        timing="wall",
    )
