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
# # 4. A hundred million questions: one, two or four GPUs?
#
# You have sixteen B300 and one model to serve. Sixteen servers of one GPU, eight of two, or four of four? The answer
# hangs on batch, context, draft length and on how long a step may take, so it is not one question but all of them at
# once. This notebook asks them in bulk, five ways, and ends with a choice.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

import fpmjax
from fpmjax.plot import plot_difference

cells = fpmjax.load_cells(fpmjax.embedded_table())
models = {f"{n} GPUs" if n > 1 else "1 GPU": fpmjax.direct(cells.select(tp=n)) for n in (1, 2, 4)}
gpus = dict(zip(models, (1, 2, 4), strict=True))

# %% [markdown]
# ## A hundred million cells, reduced
#
# Every batch up to 512, every context up to 16,384, draft lengths 0 to 3, three deployments. A grid is never built
# whole, and `Reduce` folds the answers as they come: what is kept is one row per deployment and draft length.
#
# Look at *answered* first. The table ends where its measurements do, so most of this grid is refused, and a share "of
# all cells" would be a share of refusals. *Under 20 ms* is a share of those answered, and therefore flatters a
# deployment whose table ends early. It is a map of the table, not yet a comparison.

# %%
everything = fpmjax.grid(decode_requests=range(1, 513), kv_per_request=range(1, 16_385), draft_length=range(4))
print(f"{len(models) * everything.size:,} cells")
folded = fpmjax.sweep(models, everything, reduce=fpmjax.Reduce(keep=("model", "draft_length"), limit_ms=20.0))
for row in folded.to_pylist():
    answered = row["answered"] / row["cells"]
    print(f"{row['model']:6}  draft {row['draft_length']}  answered {answered:4.0%}", end="")
    print(f"  fastest {row['min_ms']:5.2f} ms  slowest {row['max_ms']:5.2f} ms", end="")
    print(f"  under 20 ms {row['share_under_limit']:4.0%}")

# %% [markdown]
# ## The other way round: how much fits?
#
# Nobody wants a hundred million answers. The question behind them is: under a limit, how many requests fit?
# `largest_batch` walks the table and answers that exactly. *limit* says that one more request would take too long, *end
# of coverage* that one more was never measured; that number is a lower bound.

# %%
contexts = [1024, 4096, 16_384]
print("requests that fit into 20 ms, by context:", *contexts)
for name, model in models.items():
    fits = fpmjax.largest_batch(model, limit_ms=20.0, kv_per_request=contexts)
    told = [f"{batch} ({fpmjax.Ended(end).word})" for batch, end in zip(fits.throughout, fits.ended, strict=True)]
    print(f"{name:6}", *told, sep="   ")

# %% [markdown]
# ## The picture that decides
#
# Tokens a second **per GPU**, against the time that a step may take, with contexts of 4,096 tokens. Look how the lead
# of four GPUs melts from left to right. With a strict limit a single GPU spends its step reading weights, and larger
# servers share that. With a loose limit there are enough requests to share it among, and two GPUs come as far as four.
# Where a line stops, its measurements do, not the engine.

# %%
limits = np.arange(6.0, 32.5, 0.5)
figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
for (name, model), mark in zip(models.items(), ("o", "s", "^"), strict=True):
    fits = fpmjax.largest_batch(model, limit_ms=limits, kv_per_request=4096)
    known = (fits.throughout > 0) & (fits.ended == fpmjax.Ended.LIMIT)
    rate = 1000 * fits.throughout[known] / fits.throughout_ms[known] / gpus[name]
    axes.plot(limits[known], rate, marker=mark, markersize=4, label=name)
axes.set(xlabel="a step may take, ms", ylabel="tokens a second per GPU", xlim=(5, 33), ylim=(0, None))
axes.set_title("context 4,096, ordinary decoding", loc="left")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# ## Two against four, cell by cell
#
# Twice the GPUs would halve a step, 50 % less, if everything scaled. Look at the two ends: on the left, few requests,
# they save a quarter; at the upper right, with much KV to read, more than 40 %. Where cells are hatched, only
# the four have measurements, or neither has. `compare` gives the same as a table.

# %%
some = fpmjax.grid(
    decode_requests=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512], kv_per_request=[512, 1024, 2048, 4096, 8192]
)
two, four = models["2 GPUs"], models["4 GPUs"]
summary = fpmjax.difference_summary(fpmjax.compare(two, four, some))
print(f"both answer {summary['both']} of {summary['rows']} cells, only four GPUs {summary['only_b']}", end="; ")
print(f"median difference {summary['median_pct']:.0f} %")
plot_difference(two, four, some, names=("2 GPUs", "4 GPUs"))

# %% [markdown]
# ## What the choice hangs on
#
# Suppose traffic of 60 to 140 requests, each with 3,000 to 5,000 tokens. Which measurements carry its mean latency on
# two GPUs? `row_sensitivity` tells how much the mean moves with each measured row. A handful of rows carry nearly all
# of it: these are the ones to measure again before sixteen GPUs are bought.

# %%
batch, context = (axis.ravel() for axis in np.meshgrid(np.arange(60, 141), np.arange(3000, 5001, 100)))
share = fpmjax.row_sensitivity(two, fpmjax.Work.decode(batch, batch * context))
largest = np.argsort(-share, kind="stable")[:5]
columns = ["batch_size", "total_kv_read_tokens", "latency_ms"]
for row, found in zip(largest, pq.read_table(two.cell.path, columns=columns).take(largest).to_pylist(), strict=True):
    print(f"row {row}: {found['batch_size']:4} requests {found['total_kv_read_tokens']:8,} KV tokens", end="")
    print(f" {found['latency_ms']:7.2f} ms  carries {share[row]:.0%}")
print(f"these five carry {share[largest].sum():.0%} of {np.count_nonzero(share)} rows that count at all")

# %% [markdown]
# ## Keep it
#
# For everything else, every row of a sweep goes to a file that other tools read. Refused rows stay, with the word that
# says why.

# %%
rows = fpmjax.grid(decode_requests=range(1, 257), kv_per_request=[1024, 4096], draft_length=[0, 3])
written = fpmjax.sweep(models, rows, out="sweep.parquet", overwrite=True)
print(f"{written.rows:,} rows, {dict(written.statuses)}")

table = pq.read_table("sweep.parquet")
print(table.column_names)
plain = table.filter((pc.field("draft_length") == 0) & (pc.field("kv_per_request") == 4096))
grouped = plain.group_by("model", use_threads=False).aggregate([("latency_ms", "max"), ("latency_ms", "count")])
for row in grouped.to_pylist():
    print(f"{row['model']:6}  {row['latency_ms_count']} batches answered, at most {row['latency_ms_max']:.1f} ms")

# %% [markdown]
# ## The decision
#
# Four servers of four GPUs, if a step may take 20 ms at 4,096 tokens of context: about 4,000 tokens a second per GPU,
# against 3,500 in pairs and 2,000 alone. If 30 ms are allowed, pairs do as well, and a failing server takes only two
# GPUs with it.
#
# Steps only: a server also prefills, queues and schedules, and what the network between GPUs does under load is in the
# milliseconds only as far as it was when they were measured.
#
# Next: [is the factor of a draft right for my engine?](05_calibration.ipynb)
