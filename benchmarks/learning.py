"""How fast observations become models, and how fast a learned one answers.

    python benchmarks/learning.py [--json] [--rounds N] [stream | batch | million | fit | fleet | queries] ...

`stream`, `batch`, `million`: decode regressions with the default options, their 64 rows retained already; every
observation is one more, which refits its store.  `together` is one call of `update_many` over a stack of 1,000 models.
The facade is asked as an engine's host asks it, with metrics as dicts: `one by one` tunes one model by one iteration
per call, `a call per model` by all of its iterations at once.

Fairness.  All ways learn the same observations from the same state, and were seen to make the same models to 1e-9
before anything is timed.  The facade's loop is run over a few of the 1,000 models only, and counted by observation.
Turning arrays into dicts is not timed, reading the dicts is: it is what the facade is given.

`fit`, `fleet`, `queries`: a committee with a datasheet, `learned(..., hardware=...)`, of 300 rows; a case with
compilation forgets everything that jax has compiled before.  The trees are scikit-learn's HistGradientBoosting as the
peer trains it (600 trees, five features of requests), on one thread, where none waits for another, and as it comes;
`queries` gives them finished features, and ours the counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from accuracy_common import boosted_trees, qwen3_32b_on_b300, request_features
from runner import Case, main
from threadpoolctl import threadpool_limits

import fpmjax
from fpmjax import ForwardPassPerfModel, Observations, Regression, Work, estimate, learned, learned_fleet, regression
from fpmjax.models.regression import stack, update_many

MODELS, FEW = 1000, 8  # models of the stack, and those that the facade's loop goes through
MILLION = 1_000_000
FIT, OTHER_COUNTS, FLEET = 300, (257, 301, 400, 512), 64  # rows of a committee, other numbers of them, deployments
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


# --- committees --------------------------------------------------------------------------------------------


def with_datasheet(observations: Observations) -> Any:
    return learned(observations, role="decode", hardware=qwen3_32b_on_b300(1))


def compilations(run: Callable[[], Any]) -> int:
    """How many functions jax compiles while this runs."""
    found = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    run()
    done = len(found)  # the listener stays, it cannot be taken back everywhere
    return done


def fit() -> tuple[list[Case], str, str]:
    """A committee of 300 rows, beside the other fits of the same rows."""
    seen = observed(FIT)

    def forgotten() -> None:
        jax.clear_caches()
        with_datasheet(seen)

    with_datasheet(seen)
    more = compilations(lambda: [with_datasheet(observed(n)) for n in OTHER_COUNTS])
    counts = ", ".join(map(str, OTHER_COUNTS))
    return (
        [
            Case("committee", lambda: with_datasheet(seen), FIT),
            Case("committee, with compilation", forgotten, FIT),
            Case("boosted trees, one thread", lambda: boosted_trees(seen), FIT),
            Case("regression", lambda: regression(seen, role="decode"), FIT),
        ],
        "committee",
        f"Functions compiled by fits of {counts} rows after one of {FIT}: {more}.",
    )


def fleet() -> tuple[list[Case], str]:
    """64 deployments of 300 rows, as one call and one after another (counted by deployment, over a few of them)."""
    seen = [observed(FIT, SEED + i) for i in range(FLEET)]
    hardware = qwen3_32b_on_b300(1)
    together = learned_fleet(seen, role="decode", hardware=hardware)
    asked = observed(1000, SEED - 1).work
    for i in (0, FLEET - 1):  # both ways make the same models
        told = [estimate(m, asked) for m in (jax.tree.map(lambda x: x[i], together), with_datasheet(seen[i]))]  # noqa: B023
        np.testing.assert_allclose(*(x.latency_ms for x in told), rtol=1e-6)
    return [
        Case("one after another", lambda: [with_datasheet(x) for x in seen[:FEW]], FEW),
        Case(f"{FLEET} in one call", lambda: learned_fleet(seen, role="decode", hardware=hardware), FLEET),
    ], "one after another"


def queries() -> tuple[list[Case], str]:
    """A million decode queries of a committee, with its interval and support, and of trees fitted on the same rows."""
    seen, work = observed(FIT), observed(MILLION, SEED - 1).work
    model, trees, features = with_datasheet(seen), boosted_trees(seen), request_features(work)
    with fpmjax.x64():
        call = jax.jit(type(model).__call__)
        on_device = jax.device_put((model, Work(decode_requests=work.decode_requests, decode_kv=work.decode_kv)))

    def ask_model() -> Any:
        with fpmjax.x64():
            return call(*on_device)

    def one_thread() -> np.ndarray:
        with threadpool_limits(1):
            return np.exp(trees.predict(features))

    return [
        Case("boosted trees, one thread", one_thread, MILLION),
        Case("boosted trees", lambda: np.exp(trees.predict(features)), MILLION),
        Case("committee, model", ask_model, MILLION),
        Case("committee, estimate", lambda: estimate(model, work), MILLION),
    ], "boosted trees, one thread"


if __name__ == "__main__":
    every = {"stream": stream, "batch": batch, "million": million, "fit": fit, "fleet": fleet, "queries": queries}
    main(every, rounds=5, mark="<!-- learning -->")
