"""How fast the direct rule answers, beside what one would write instead.

    python benchmarks/lookup.py [--json] [--rounds N] [scipy | searchsorted | iteration | entry] ...

All on the TP1 cell of the embedded table, 2**18 queries.  Two ways to ask are timed: `model`, the jitted pure call on
arrays that lie on the device, and `estimate`, the whole entry with NumPy arrays in and out.

Fairness.  The decode queries are drawn from the rectangle of batch and KV that every measured curve covers.  There a
full grid exists, so SciPy needs no NaN handling, and all ways give the same numbers: this is checked before anything is
timed.  SciPy gets its points as the float64 array it wants and does not return a status; ours starts from integers and
does.  The vmapped form reads every curve at every query and picks the two neighbours: what one writes first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from runner import Case, main
from scipy.interpolate import RegularGridInterpolator

import fpmjax
from fpmjax.speculative import speculative
from fpmjax.work import Work

N = 2**18
SEED = 20


@functools.cache
def cell() -> fpmjax.Cell:
    """What was measured."""
    return fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1)


@functools.cache
def model() -> fpmjax.Direct:
    """The model under test."""
    return fpmjax.direct(cell())


def curves() -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(batch, KV totals int64 [m], ms [m]) of every decode curve."""
    points = cell().decode
    return [
        (int(b), points.kv[points.batch == b], points.latency_ms[points.batch == b]) for b in np.unique(points.batch)
    ]


def decode_queries() -> tuple[np.ndarray, np.ndarray]:
    """Requests and KV totals, uint32 [N], log-uniform over the rectangle that every curve covers."""
    batch, kv, _ = zip(*curves(), strict=True)
    low, high = max(k[0] for k in kv), min(k[-1] for k in kv)
    rng = np.random.default_rng(SEED)
    return log_uniform(rng, batch[0], batch[-1]), log_uniform(rng, low, high)


def prefill_queries() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests, new tokens and KV totals, uint32 [N]: single-request prefill over the measured domain."""
    points = cell().prefill
    rng = np.random.default_rng(SEED + 1)
    tokens = log_uniform(rng, points.tokens.min(), points.tokens.max())
    return np.full(N, points.batch[0], np.uint32), tokens, log_uniform(rng, 1, points.kv.max())


def log_uniform(rng: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Integers of low..high, uint32 [N]."""
    return np.clip(np.exp(rng.uniform(np.log(low), np.log(high + 1), N)), low, high).astype(np.uint32)


def on_device(**counts: np.ndarray) -> Work:
    """One-rank work on the device; a field that is not given is statically absent, and costs nothing."""
    return Work(**{name: jax.device_put(value[:, None]) for name, value in counts.items()})


def ask_model(work: Work, **options):
    """A call of the jitted model on this work."""
    call = jax.jit(functools.partial(type(model()).__call__, **options))

    def run():
        with fpmjax.x64():
            return call(model(), work)

    return run


def decode_work() -> Work:
    batch, kv = decode_queries()
    return on_device(decode_requests=batch, decode_kv=kv)


def our_decode() -> list[Case]:
    """Latency and status of every decode query, both ways to ask."""
    work = Work.decode(*decode_queries())
    return [
        Case("fpmjax model", ask_model(decode_work()), N),
        Case("fpmjax estimate", lambda: fpmjax.estimate(model(), work), N),
    ]


def against(name: str, run) -> tuple[list[Case], str]:
    """Our decode beside another way, once both were seen to give the same numbers."""
    ours = our_decode()
    for case in ours:
        np.testing.assert_allclose(np.asarray(run()), np.asarray(case.run().latency_ms), rtol=1e-12)
    return [Case(name, run, N), *ours], name


def scipy() -> tuple[list[Case], str]:
    """Decode beside SciPy's `RegularGridInterpolator` on the same table made rectangular.

    The grid is the union of all KV knots in the rectangle; what a curve did not measure there is filled with our own
    answers, which lie on its straight segments, so the grid stands for the same function.
    """
    batch, kv, _ = zip(*curves(), strict=True)
    union = np.unique(np.concatenate(kv))
    union = union[(union >= max(k[0] for k in kv)) & (union <= min(k[-1] for k in kv))]
    b, k = np.meshgrid(np.array(batch), union, indexing="ij")
    values = fpmjax.estimate(model(), Work.decode(b, k)).latency_ms
    grid = RegularGridInterpolator((np.array(batch, float), union.astype(float)), values)
    points = np.stack(decode_queries(), axis=-1).astype(float)
    return against("SciPy RegularGridInterpolator", lambda: grid(points))


def searchsorted() -> tuple[list[Case], str]:
    """Decode beside a vmapped `jnp.searchsorted(method="compare_all")` over every curve, int32 keys."""
    measured = curves()
    width = max(len(kv) for _, kv, _ in measured)
    batch = np.array([b for b, _, _ in measured], np.int32)
    x = np.stack([np.pad(kv, (0, width - len(kv)), constant_values=2**31 - 1) for _, kv, _ in measured]).astype(
        np.int32
    )
    y = np.stack([np.pad(ms, (0, width - len(ms))) for _, _, ms in measured])
    last = np.array([len(kv) - 1 for _, kv, _ in measured], np.int32)

    def curve(x, y, last, q):
        i = jnp.clip(jnp.searchsorted(x, q, side="right", method="compare_all") - 1, 0, last - 1)
        ms = y[i] + (y[i + 1] - y[i]) * (q - x[i]).astype(float) / (x[i + 1] - x[i]).astype(float)
        return jnp.where((q >= x[0]) & (q <= x[last]), ms, jnp.nan)

    def query(batches, x, y, last, b, k):
        ms = jax.vmap(curve, in_axes=(0, 0, 0, None))(x, y, last, k)
        covered, index = ~jnp.isnan(ms), jnp.arange(len(ms))
        lo = jnp.max(jnp.where(covered & (batches <= b), index, -1))
        hi = jnp.min(jnp.where(covered & (batches >= b), index, len(ms)))
        gap = jnp.maximum(batches[hi] - batches[lo], 1).astype(float)
        value = ms[lo] + (ms[hi] - ms[lo]) * ((b - batches[lo]).astype(float) / gap)
        return jnp.where((lo >= 0) & (hi < len(ms)), value, jnp.nan)

    call = jax.jit(jax.vmap(query, in_axes=(None, None, None, None, 0, 0)))
    with fpmjax.x64():
        arguments = jax.device_put((batch, x, y, last, *(q.astype(np.int32) for q in decode_queries())))

    def run():
        with fpmjax.x64():
            return call(*arguments)

    return against("vmapped searchsorted", run)


def mixed_counts() -> tuple[dict, dict]:
    """Fields of the prefill and of the decode half of a mixed iteration."""
    requests, tokens, cached = prefill_queries()
    batch, kv = decode_queries()
    prefill = {"prefill_requests": requests, "prefill_tokens": tokens, "prefill_kv": cached}
    return prefill, {"decode_requests": batch, "decode_kv": kv}


def drafted_counts() -> dict:
    """Decode fields that still lie in the rectangle when they are widened four times."""
    batch, kv = decode_queries()
    return {"decode_requests": np.maximum(batch // 4, 1).astype(np.uint32), "decode_kv": kv}


def iteration() -> tuple[list[Case], str]:
    """Beside a decode latency, the model alone: a draft length, prefill, a whole mixed iteration, the evidence."""
    prefill, decode = mixed_counts()
    drafted = on_device(**drafted_counts())
    draft = jax.jit(lambda model, work: speculative(model, work, 3))

    def run_drafted():
        with fpmjax.x64():
            return draft(model(), drafted)

    return [
        Case("decode", ask_model(on_device(**decode)), N),
        Case("decode, draft length 3", run_drafted, N),
        Case("decode with evidence", ask_model(on_device(**decode), evidence=True), N),
        Case("prefill", ask_model(on_device(**prefill)), N),
        Case("mixed iteration", ask_model(on_device(**prefill, **decode)), N),
    ], "decode"


def entry() -> tuple[list[Case], str]:
    """The same jobs through `estimate`, NumPy arrays in and out, errors checked."""
    prefill, decode = mixed_counts()
    works = {
        "decode": Work.of(**decode),
        "prefill": Work.of(**prefill),
        "mixed iteration": Work.of(**prefill, **decode),
    }
    drafted = Work.of(**drafted_counts())
    ask = functools.partial(fpmjax.estimate, model())
    return [
        *(Case(name, functools.partial(ask, work), N) for name, work in works.items()),
        Case("decode, draft length 3", functools.partial(ask, drafted, draft_length=3), N),
        Case("decode with evidence", functools.partial(ask, works["decode"], evidence=True), N),
    ], "decode"


if __name__ == "__main__":
    main({"scipy": scipy, "searchsorted": searchsorted, "iteration": iteration, "entry": entry})
