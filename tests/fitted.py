"""Learned models for tests: a made-up engine, and few fits that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np

from fpmjax import Learned, Observations, Work, learned

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
COMPILED = "/jax/core/compile/backend_compile_duration"


def engine_ms(batch: Any, kv: Any) -> np.ndarray:
    """Overhead, weights until arithmetic takes over beyond 120 requests, KV reads: no form that is fitted exactly."""
    batch, kv = np.asarray(batch, np.float64), np.asarray(kv, np.float64)
    return 8.0 + 0.01 * batch + np.maximum(6.0, 0.05 * batch) + 3e-5 * kv * (1.0 + 0.2 / (1.0 + batch / 8.0))


def decoding(n: int = 60, seed: int = 0, noise: float = 0.01) -> Observations:
    """Decode of up to 64 requests with 100 to 8,000 tokens each."""
    rng = np.random.default_rng(seed)
    batch = rng.choice(BATCHES, n)
    kv = batch * rng.integers(100, 8000, n)
    return Observations.of(Work.decode(batch, kv), engine_ms(batch, kv) * np.exp(noise * rng.standard_normal(n)))


def serving(n: int = 60, seed: int = 0) -> Observations:
    """Decode, prefill, and both on one rank, n of each, of two ranks; and n across ranks."""
    rng = np.random.default_rng(seed)
    m = 4 * n
    kind = np.repeat(np.arange(4), n)
    decodes, prefills = np.ones((m, 2), bool), np.ones((m, 2), bool)
    decodes[kind == 1], prefills[kind == 0] = False, False
    decodes[kind == 3, 0], prefills[kind == 3, 1] = False, False
    batch = rng.choice(BATCHES, (m, 2)) * decodes
    kv = batch * rng.integers(100, 8000, (m, 2))
    requests = rng.integers(1, 4, (m, 2)) * prefills
    tokens, cached = requests * rng.integers(10, 1500, (m, 2)), requests * rng.integers(0, 2000, (m, 2))
    work = Work.of(
        prefill_requests=requests,
        prefill_tokens=tokens,
        prefill_kv=cached,
        decode_requests=batch,
        decode_kv=kv,
        ranks=True,
    )
    ms = engine_ms(batch.max(-1), kv.max(-1)) + 0.01 * tokens.sum(-1) + 1e-5 * cached.max(-1)
    return Observations.of(work, ms * np.exp(0.01 * rng.standard_normal(m)))


@cache
def decoder(seed: int = 0, **options: Any) -> Learned:
    return learned(decoding(seed=seed), role="decode", **options)


@cache
def server() -> Learned:
    return learned(serving(), role="aggregated")


def wide_queries(n: int = 200, seed: int = 1) -> Work:
    """Decode inside and far outside of what `decoding` holds."""
    rng = np.random.default_rng(seed)
    batch = np.exp(rng.uniform(0, np.log(512), n)).astype(int)
    return Work.decode(batch, (batch * np.exp(rng.uniform(0, np.log(40_000), n))).astype(int))


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).dtype == np.asarray(y).dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


def the(stack: Any, i: int) -> Any:
    """One model of a stack."""
    return jax.tree.map(lambda x: x[i], stack)


_counts: list[int] = []


@contextmanager
def counting_compiles() -> Iterator[list[int]]:
    """A list that grows by one whenever jax compiles anything, however small."""
    if not _counts:
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: _counts.append(1) if event == COMPILED else None
        )
        _counts.append(0)
    before = len(_counts)
    seen: list[int] = []
    yield seen
    seen.extend(_counts[before:])
