"""How fast observations become models, beside one call after another through the facade.

    python benchmarks/learning.py [--json] [--rounds N] [stream | batch | million] ...

Decode regressions with the default options, their 64 rows retained already; every observation is one more, which
refits its store.  `together` is one call of `update_many` over a stack of 1,000 models.  The facade is asked as an
engine's host asks it, with metrics as dicts: `one by one` tunes one model by one iteration per call, `a call per
model` by all of its iterations at once.

Fairness.  All ways learn the same observations from the same state, and were seen to make the same models to 1e-9
before anything is timed.  The facade's loop is run over a few of the 1,000 models only, and counted by observation.
Turning arrays into dicts is not timed, reading the dicts is: it is what the facade is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from runner import Case, main

from fpmjax import ForwardPassPerfModel, Observations, Regression, Work, regression
from fpmjax.models.regression import stack, update_many

MODELS, FEW = 1000, 8  # models of the stack, and those that the facade's loop goes through
MILLION = 1_000_000
SEED = 30


def observed(n: int, seed: int = SEED) -> Observations:
    """Decode of one rank, rising in requests and KV, with 3 % of noise; milliseconds as the facade makes them."""
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 257, n)
    kv = batch * rng.integers(16, 8192, n)
    seconds = (4.0 + 0.02 * batch + kv / 6e4) * rng.lognormal(0.0, 0.03, n) / 1000.0
    return Observations.of(Work.decode(batch, kv), seconds * 1000.0)


def for_each(each: int) -> np.ndarray:
    """The model of each observation: one for every model, then the next for every model."""
    return np.tile(np.arange(MODELS), each)


@functools.cache
def filled() -> Regression:
    """The stack, its stores full."""
    empty = stack([regression(role="decode")] * MODELS)
    return update_many(empty, observed(MODELS * 64, SEED + 1), for_each(64))


def as_metrics(observations: Observations) -> list[list[dict[str, Any]]]:
    """Every iteration as the facade takes it: a list of rank dicts."""
    columns = (observations.work.decode_requests, observations.work.decode_kv, observations.wall_ms)
    rows = zip(*(np.asarray(c).ravel().tolist() for c in columns), strict=True)
    counts = ("num_decode_requests", "sum_decode_kv_tokens")
    return [[{"scheduled_requests": dict(zip(counts, r[:2], strict=True)), "wall_time": r[2] / 1000.0}] for r in rows]


def facades() -> list[ForwardPassPerfModel]:
    """The first few models of the stack, each behind a facade of its own."""
    return [ForwardPassPerfModel(jax.tree.map(lambda x: x[i], filled())) for i in range(FEW)]  # noqa: B023


def together(each: int) -> tuple[Case, Callable[[str, bool], Case]]:
    """`update_many` over the whole stack; and a maker of the facade's case over a few models, once both agree."""
    observations, which = observed(MODELS * each), for_each(each)
    metrics = as_metrics(observations)
    mine = [[metrics[k] for k in range(i, MODELS * each, MODELS)] for i in range(FEW)]

    def run_facades(models: list[ForwardPassPerfModel], *, calls: bool) -> None:
        for model, iterations in zip(models, mine, strict=True):
            for part in [[x] for x in iterations] if calls else [iterations]:
                model.tune_with_fpms(part)

    def facade(name: str, calls: bool) -> Case:
        models = facades()
        run_facades(models, calls=calls)
        learned = update_many(filled(), observations, which)
        for i, model in enumerate(models):
            own = jax.tree.map(lambda x: x[i], learned)  # noqa: B023
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9), own, model.model)
        return Case(name, lambda: run_facades(models, calls=calls), FEW * each)

    return Case("1,000 models together", lambda: update_many(filled(), observations, which), MODELS * each), facade


def stream() -> tuple[list[Case], str]:
    """One observation for each of 1,000 models, as they come."""
    case, facade = together(1)
    return [facade("facade, one by one", True), case], "facade, one by one"


def batch() -> tuple[list[Case], str]:
    """64 observations for each of 1,000 models."""
    case, facade = together(64)
    one = facade("facade, one by one", True)
    return [one, facade("facade, a call per model", False), case], one.name


def million() -> tuple[list[Case], str]:
    """A million observations into one store in one call, beside the facade's loop."""
    observations = observed(MILLION)
    metrics, model = as_metrics(observations[:64]), facades()[0]

    def loop() -> None:
        for iteration in metrics:
            model.tune_with_fpms([iteration])

    empty = regression(role="decode")
    return [
        Case("facade, one by one", loop, len(metrics)),
        Case("a million in one call", lambda: empty.update(observations).learners.y, MILLION),
    ], "facade, one by one"


if __name__ == "__main__":
    main({"stream": stream, "batch": batch, "million": million}, rounds=5, mark="<!-- learning -->")
