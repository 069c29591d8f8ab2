# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Ten minutes: how long is one step, and why should I believe it?
#
# A chat service is to decode 24 requests at once on one NVIDIA B300, each with about 3,000 tokens of context behind
# it. Product wants every request to get a token at least every 20 ms. Can one GPU do that?
#
# Nobody has measured 24 requests with 3,000 tokens each. Somebody has measured their neighbours. This notebook goes
# from the table of measurements to an answer, to the rows behind it, and to two pictures that say where such answers
# end.

# %%
# %matplotlib inline
import pyarrow.parquet as pq

import fpmjax
from fpmjax.plot import plot_grid

# %% [markdown]
# ## The table
#
# fpmjax comes with a small table of real measurements: Qwen3-32B in bfloat16 under vLLM on B300, on one, two and four
# GPUs. Each of the three is a *cell*. A cell is one exact deployment: an answer is never borrowed from another one.

# %%
cells = fpmjax.load_cells(fpmjax.embedded_table())
for identity in cells:
    print(identity)

cell = cells.select(tp=1)
print()
print("decode batches that were measured:", *cell.decode_batches)

# %% [markdown]
# ## The question
#
# A model is made of one cell, work is counted in totals: 24 requests with 24 x 3,000 tokens of past KV together.

# %%
model = fpmjax.direct(cell)
work = fpmjax.Work.decode(requests=24, kv_tokens=24 * 3000)
answer = fpmjax.estimate(model, work, evidence=True)
print(f"one step takes {answer.latency_ms:.2f} ms, so each request gets {1000 / answer.latency_ms:.0f} tokens a second")

# %% [markdown]
# ## Where the number comes from
#
# Not from a formula. The answer is a weighted mean of at most four measured rows of one phase, and it names them.
# Look at the batches and totals: they lie on both sides of what we asked, 16 and 32 requests, 65,536 and 131,072
# tokens.

# %%
lookup = answer.parts.decode
rows, weights = lookup.row[0], lookup.weight[0]
names = ["batch_size", "total_kv_read_tokens", "latency_ms"]
measured = pq.read_table(cell.path, columns=names).take(rows).to_pylist()
for row, weight, found in zip(rows, weights, measured, strict=True):
    print(f"row {row}: {found['batch_size']:3} requests  {found['total_kv_read_tokens']:7,} KV tokens", end="")
    print(f"  {found['latency_ms']:7.3f} ms  x {weight:.3f}")
total = sum(weight * found["latency_ms"] for weight, found in zip(weights, measured, strict=True))
print(f"together {total:.2f} ms; the lookup was: {fpmjax.Resolution(lookup.resolution[0]).word}")

# %% [markdown]
# ## How far off may it be?
#
# The table can test itself: leave one measured point out, answer it from the others, compare. `with_intervals` does
# that once for every point. The answer stays the same to the last bit and gets a range in which 9 of 10 of the points
# that were left out lie.

# %%
ranged = fpmjax.estimate(fpmjax.with_intervals(model), work)
low, high = ranged.interval.low_ms, ranged.interval.high_ms
print(f"{ranged.latency_ms:.2f} ms, 9 of 10 within {low:.1f} to {high:.1f} ms", end="")
print(f"  (of {ranged.interval.count} points left out)")

# %% [markdown]
# ## What is refused, and why
#
# Now the same 24 requests, each with 30,000 tokens. That is more KV than any measured step has read. A formula would
# give a number here. fpmjax does not: it says what was asked, what is measured nearby, and what it could answer.

# %%
try:
    fpmjax.estimate(model, fpmjax.Work.decode(24, 24 * 30_000))
except fpmjax.CoverageError as refusal:
    print(str(refusal).replace(": ", ":\n", 1).replace("; ", ";\n"))

# %% [markdown]
# In bulk, where one refusal should not stop the others, ask with `check=False`: a refused query is NaN, and its status
# says why. (The third one is refused for its batch: 512 is the largest that was measured.)

# %%
several = fpmjax.estimate(model, fpmjax.Work.decode([24, 24, 600], [72_000, 720_000, 72_000]), check=False)
for ms, status in zip(several.latency_ms, several.status, strict=True):
    print(f"{ms:6.2f} ms  {fpmjax.Status(status).code}")

# %% [markdown]
# ## Where answers end
#
# Dark cells were measured just so, lighter ones lie between measurements, hatched ones are refused. Look at the
# staircase on the right: that is where the measurements stop. Our question, 24 requests with 3,000 tokens, is a light
# cell well inside of it; with 30,000 tokens it is a hatched one.

# %%
asked = fpmjax.grid(
    decode_requests=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512],
    kv_per_request=[256, 512, 1024, 2048, 3000, 4096, 8192, 16384, 32768],
)
plot_grid(model, asked, show="coverage")

# %% [markdown]
# ## And the milliseconds
#
# The same cells, as milliseconds. Below the line of 15 ms hardly anything changes: a step costs about 14 ms, and more
# requests are almost free. Above it the lines run diagonally: twice the requests cost about as much as twice the
# context, because it is all the KV together that has to be read.

# %%
plot_grid(model, asked)

# %% [markdown]
# ## The decision
#
# One B300 does it: 16.3 ms a step, 17.2 ms at the upper end of the range, against a limit of 20 ms.
#
# Two things to keep in mind. The table times a step *from the scheduler's decision to the update of its state*; another
# clock on the same machine differs by about a tenth. And if contexts may grow to 30,000 tokens, this table cannot tell:
# measure there, or use a cell that reaches further.
#
# Next: [does speculative decoding make it faster?](02_draft_length.ipynb)
