"""Long and varied sweeps: few functions are compiled whatever the sizes, and memory does not grow with the rows."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from fpmjax.estimate import SIZES, chunks

MOST = 4  # compiled functions of a sweep over 1,000 sizes

# Everything that jax compiles is counted, so each kind of sweep starts from nothing, in a process of its own.
COUNTING = """
import json, sys
import jax, numpy as np, pyarrow as pa
import fpmjax
from fpmjax.grid import grid
from fpmjax.reduce import Reduce, summarise
from fpmjax.sweep import sweep

compiled = []
def listen(event, seconds, **about):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(about.get("fun_name", "a function"))
jax.monitoring.register_event_duration_secs_listener(listen)

model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))

def table(n, **more):
    return pa.table({"decode_requests": np.full(n, 5), "decode_kv": np.arange(n) + 50, **more})

def rows(queries):
    sweep(model, queries, progress=False, form="numpy")

def reduced(requests, kv, **more):
    made = grid(decode_requests=range(1, 1 + requests), **{kv: range(1, 1 + more.pop("n"))}, **more)
    summarise(model, made, reduce=Reduce(limit_ms=20), progress=False)

kinds = {
    "estimate": lambda n: fpmjax.estimate(model, fpmjax.Work.decode(np.full(n, 5), np.full(n, 4000)), check=False),
    "table with draft lengths": lambda n: rows(table(n, draft_length=np.arange(n) % 3 + 1)),
    "rows of a grid": lambda n: rows(grid(decode_requests=range(1, 6), kv_per_request=range(1 + n // 5))),
    "requests x KV": lambda n: reduced(1 + n % 200, "decode_kv", n=1 + n // 20),
    "requests x KV per request": lambda n: reduced(1 + n % 90, "kv_per_request", n=1 + n // 20),
    "requests x KV per request x draft length": lambda n: reduced(
        1 + n % 30, "kv_per_request", n=1 + n // 20, draft_length=range(1, 2 + n % 4)
    ),
}
found = {}
for name, ask in kinds.items():
    jax.clear_caches()
    compiled.clear()
    for n in json.loads(sys.argv[1]):
        ask(n)
    found[name] = sorted(compiled)
print(json.dumps(found))
"""

# The first sweep warms everything up; the second one is ten times as long.
MEMORY = """
import resource
import fpmjax
from fpmjax.grid import grid
from fpmjax.reduce import summarise
from fpmjax.sweep import sweep

model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))

def rows(n):
    reader = sweep(model, grid(decode_requests=range(1, 101), decode_kv=range(n)), form="reader", chunk=2**15)
    return sum(batch.num_rows for batch in reader)

def cells(n):
    summarise(model, grid(decode_requests=range(1, 101), kv_per_request=range(n)), progress=False)

for ask, n in ((rows, 5_000), (cells, 20_000)):
    ask(n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ask(10 * n)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def run(script, *args):
    return subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=True).stdout


def sizes_of(n):
    return {size for _, size in chunks(n, 1)}


def test_a_thousand_sizes_compile_four_functions_at_most():
    edges = [1, 64, *(n + i for size in SIZES for n in (size // 2, size) for i in (0, 1))]
    # No other number of rows is computed in sizes that these are not, and that decides what is compiled.
    every = np.unique(np.round(np.exp(np.linspace(0, np.log(1e6), 1000))).astype(int)).tolist()
    assert set().union(*map(sizes_of, every)) == set().union(*map(sizes_of, edges)) == set(SIZES)
    found = json.loads(run(COUNTING, json.dumps(edges)))
    assert all(1 <= len(compiled) <= MOST for compiled in found.values()), found


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of the largest memory in use")
def test_ten_times_as_many_rows_take_the_same_memory():
    rows, cells = map(int, run(MEMORY).split())
    assert rows < 32 * 1024  # KiB, of more than 100 MB of rows
    assert cells < 32 * 1024
