"""How the cost per query changes with how many are asked, how large the table is, and how large the output.

    python benchmarks/sizes.py [--json] [--rounds N] [queries | decode-tables | prefill-tables | large] ...

All through `estimate`, NumPy arrays in and out, statuses checked.

- `queries`: decode queries of the TP1 cell of the embedded table, from one on.  Linear cost is a speed that stays.
- `decode-tables`, `prefill-tables`: 2**18 queries of invented tables of 100 points, and of 10 and 100 times as many
  between the same corners.  A cost that does not grow is a speed of 1; one in proportion, 0.1 and 0.01.
- `large`: 2**24 queries at once, beside what one writes first: `jax.jit` of the model, called with the same NumPy
  arrays, its latencies and statuses made NumPy arrays again.  Both gave the same bits.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax
import numpy as np
from lookup import cell, decode_queries, model
from runner import Case, main

import fpmjax
from fpmjax.tables.write import write_table
from fpmjax.work import Work

COUNTS = (1, 64, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
USUAL = 1 << 18
LARGE = 1 << 24
KNOTS = (10, 32, 100)  # on each axis of the invented tables, from 1 to:
MOST = {"batch": 512, "tokens": 1 << 13, "kv": 1 << 20}
KEPT = tempfile.TemporaryDirectory(prefix="fpmjax-sizes-")  # removed when the process ends


def decode(count: int) -> Work:
    """As many decode queries as wanted: those of `lookup.py`, over and over."""
    return Work.decode(*(np.resize(x, count) for x in decode_queries()))


def ask(name: str, model: fpmjax.Direct, work: Work) -> Case:
    return Case(name, lambda: fpmjax.estimate(model, work), work.shape[0])


def queries() -> tuple[list[Case], str]:
    """The same questions, more and more of them."""
    return [ask(f"{count:,}", model(), decode(count)) for count in COUNTS], f"{USUAL:,}"


@functools.cache
def invented(knots: int) -> fpmjax.Direct:
    """The model of a table of knots x knots decode points and as many of prefill; all tables have the same corners."""
    # Never two neighbours on an axis: measured batches b and b + 1 would mark the end of a captured graph.
    axes = {x: np.maximum(np.geomspace(1, most, knots).round(), 1 + 2 * np.arange(knots)) for x, most in MOST.items()}
    batch, tokens, kv = (axes[name].astype(np.int64) for name in MOST)
    one, none = np.ones(knots * knots, np.int64), np.zeros(knots * knots, np.int64)
    rows = {
        "workload_kind": ["decode"] * len(one) + ["prefill"] * len(one),
        "batch_size": np.concatenate([np.repeat(batch, knots), one]),
        "total_prefill_tokens": np.concatenate([none, np.repeat(tokens, knots)]),
        "total_kv_read_tokens": np.tile(kv, 2 * knots),
        "latency_ms": np.random.default_rng(knots).uniform(5, 50, 2 * len(one)),
    }
    made = fpmjax.direct(
        fpmjax.load_cells(write_table(Path(KEPT.name, str(knots)), rows, identity=cell().identity)).select()
    )
    back = fpmjax.estimate(made, Work.decode(rows["batch_size"][: len(one)], rows["total_kv_read_tokens"][: len(one)]))
    np.testing.assert_array_equal(back.latency_ms, rows["latency_ms"][: len(one)])
    return made


def tables(phase: str) -> tuple[list[Case], str]:
    """The same questions, of larger and larger tables."""
    rng = np.random.default_rng(40)
    batch, tokens, kv = (np.exp(rng.uniform(0, np.log(most), USUAL)).astype(np.uint32) for most in MOST.values())
    work = Work.decode(batch, kv) if phase == "decode" else Work.prefill(1, tokens, kv)
    cases = [ask(f"{knots**2:,} points", invented(knots), work) for knots in KNOTS]
    return cases, cases[0].name


def large() -> tuple[list[Case], str]:
    """Many answers at once, and what one writes first."""
    work = decode(LARGE)
    direct = jax.jit(fpmjax.Direct.__call__)

    def naive() -> tuple[np.ndarray, np.ndarray]:
        with fpmjax.x64():
            answers = direct(model(), work)
            return np.asarray(answers.latency_ms), np.asarray(answers.status)

    ours = ask("fpmjax estimate", model(), work)
    for one, other in zip(naive(), (lambda x: (x.latency_ms, x.status))(ours.run()), strict=True):
        np.testing.assert_array_equal(one, other)
    return [Case("jax.jit of the model", naive, LARGE), ours], "jax.jit of the model"


BENCHMARKS = {
    "queries": queries,
    "decode-tables": functools.partial(tables, "decode"),
    "prefill-tables": functools.partial(tables, "prefill"),
    "large": large,
}

if __name__ == "__main__":
    main(BENCHMARKS, rounds=7, mark="<!-- sizes -->")
