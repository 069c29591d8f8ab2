"""How fast whole grids are answered and reduced, beside asking every cell of them.

    python benchmarks/grids.py [--json] [--rounds N] [outer | reduced | swept | billion] ...

All on the TP1 cell of the embedded table.  The reference, `flat`, is the jitted model on 2**18 queries that lie on the
device, latency and status out: what a grid costs where every cell is a query of its own.

- `outer`: every cell of a grid of decode requests x KV totals written, 512 x 4,096; the same bits (checked).
- `reduced`: grids of 2**24 cells or so, through `summarise`, to minimum, where it is, maximum, mean and the share under
  a limit for every number of requests.  What no curve covers is refused unasked where lines are cut (KV per request);
  the case "all answered" has next to nothing of that, and says its draft lengths over and over to be long enough.
- `swept`: every cell as a row, to NumPy columns or a Parquet file.  `estimate` is the entry, asked the same flat.
- `billion`: 10**9 cells with draft lengths, likewise; `--memory` says instead how much memory that takes.
"""

from __future__ import annotations

import functools
import resource
import sys
import tempfile

import jax
import numpy as np
from lookup import N, ask_model, model, on_device
from runner import Case, main

import fpmjax
from fpmjax.grid import grid
from fpmjax.lookup.outer import outer_decode
from fpmjax.reduce import Reduce, summarise
from fpmjax.sweep import sweep
from fpmjax.work import Work

REQUESTS, KV = 512, 2**18
BILLION = {"decode_requests": range(1, 501), "decode_kv": range(1, 500_001), "draft_length": range(1, 5)}


def flat() -> Case:
    """Queries of the grid, in no order."""
    rng = np.random.default_rng(30)
    batch, kv = (rng.integers(1, top, N).astype(np.uint32) for top in (REQUESTS + 1, KV))
    return Case("flat", ask_model(on_device(decode_requests=batch, decode_kv=kv)), N)


def outer() -> tuple[list[Case], str]:
    batch, kv = np.arange(1, 513, dtype=np.uint32), np.arange(1, KV, KV // 4096, dtype=np.uint32)
    whole = fpmjax.estimate(model(), Work.decode(batch[:, None], kv[None]), check=False).latency_ms

    def run():
        with fpmjax.x64():
            return outer_decode(on_the_device(), batch, kv)

    np.testing.assert_array_equal(np.asarray(run()), whole)
    return [flat(), Case("outer", run, whole.size)], "flat"


@functools.cache
def on_the_device() -> fpmjax.Direct:
    with fpmjax.x64():
        return jax.device_put(model())


def reduced() -> tuple[list[Case], str]:
    requests, short = range(1, REQUESTS + 1), range(1, REQUESTS // 4 + 1)
    grids = {
        "requests x KV": grid(decode_requests=requests, decode_kv=range(1, KV, 8)),
        "requests x KV x draft length": grid(
            decode_requests=short, decode_kv=range(1, KV, 8), draft_length=range(1, 5)
        ),
        "requests x KV per request": grid(decode_requests=requests, kv_per_request=range(1, 2**15)),
        "requests x KV per request x draft length": grid(
            decode_requests=short, kv_per_request=range(1, 2**15), draft_length=range(1, 5)
        ),
        "requests x KV per request x draft length, all answered": grid(
            decode_requests=range(1, 101), kv_per_request=range(1, 4097), draft_length=[1, 2, 3, 4] * 10
        ),
    }
    return [flat(), *(Case(name, functools.partial(folded, made), made.size) for name, made in grids.items())], "flat"


def swept() -> tuple[list[Case], str]:
    wide = grid(decode_requests=range(1, 257), decode_kv=range(1, KV, 32))
    drafted = grid(decode_requests=range(1, 65), decode_kv=range(1, KV, 32), draft_length=range(1, 5))
    work, _ = wide.work(0, N)
    part = jax.tree.map(lambda x: x.astype(np.uint32), work)
    few = ["latency_ms", "status"]

    def rows(made, **options):
        return functools.partial(sweep, model(), made, progress=False, **options)

    def written():
        with tempfile.TemporaryDirectory() as folder:
            sweep(model(), wide, out=f"{folder}/x.parquet", progress=False)

    return [
        flat(),
        Case("estimate", lambda: fpmjax.estimate(model(), part, check=False), N),
        Case("latency and status to NumPy", rows(wide, form="numpy", columns=few), wide.size),
        Case("all columns to NumPy", rows(wide, form="numpy"), wide.size),
        Case("latency and status to NumPy, with draft lengths", rows(drafted, form="numpy", columns=few), drafted.size),
        Case("all columns to NumPy, with draft lengths", rows(drafted, form="numpy"), drafted.size),
        Case("all columns to Parquet", written, wide.size),
    ], "flat"


def billion() -> tuple[list[Case], str]:
    made = grid(**BILLION)
    return [flat(), Case(f"{made.size:,} cells", functools.partial(folded, made), made.size)], "flat"


def folded(made):
    return summarise(model(), made, reduce=Reduce(limit_ms=25), progress=False)


def memory() -> None:
    """Peak memory of the process before and after a billion cells."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    folded(grid(**BILLION))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"peak memory {after:.0f} MiB; after the imports {before:.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:] == ["--memory"]:
        memory()
    else:
        main({"outer": outer, "reduced": reduced, "swept": swept, "billion": billion}, rounds=7, mark="<!-- grids -->")
