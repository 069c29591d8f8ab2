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
# # 3. No table, but an engine that runs: which fit should I trust?
#
# Your deployment was never measured point by point. But it has been running since this morning, and it logs what each
# step held and how long it took. Three things can be made of such a log:
#
# - a **regression**: a line per kind of work, updated as steps come in;
# - a **learned** model: a committee of physical forms, fitted once, which says how sure it is and where it ends;
# - a **correction**: the table of a *similar* deployment, times factors from the log.
#
# This notebook fits all three to one log and scores them on what the engine did next.
#
# **What is made up.** The log is not from a live engine. The traffic is drawn at random. The milliseconds are those of
# the embedded table for *two* GPUs, which were measured, with 2 % of noise, which is made up. We then pretend to own
# only the table for *one* GPU. So the truth is known, and it is a real surface that none of the three was built to fit.
# The noise is kinder than a live engine: no stragglers, no drift.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

import fpmjax
from fpmjax.plot import plot_fit

cells = fpmjax.load_cells(fpmjax.embedded_table())
one_gpu, truth = fpmjax.direct(cells.select(tp=1)), fpmjax.direct(cells.select(tp=2))
random = np.random.default_rng(7)


def log_of(steps, smallest, largest):
    """Steps of a made-up engine: batches between two sizes, contexts of about 1,500 tokens, times with noise."""
    batch = np.exp(random.uniform(np.log(smallest), np.log(largest), steps)).round().astype(int)
    context = np.exp(random.normal(np.log(1500), 0.6, steps)).clip(200, 4000)
    work = fpmjax.Work.decode(batch, (batch * context).astype(int))
    ms = fpmjax.estimate(truth, work).latency_ms * random.lognormal(0, 0.02, steps)
    return fpmjax.Observations.of(work, ms)


seen, later = log_of(300, 2, 48), log_of(300, 2, 48)
print(seen)

# %% [markdown]
# ## Three fits, one line each
#
# `dynamic_local` lets the correction grow with what is seen. The default policy corrects only inside a box whose size
# you state, and leaves the table alone outside of it.

# %%
models = {
    "regression": fpmjax.regression(seen, role="decode"),
    "learned": fpmjax.learned(seen, role="decode"),
    "correction": fpmjax.corrected(one_gpu, seen, policy="dynamic_local"),
}

# %% [markdown]
# ## Later traffic of the same kind
#
# MAPE is the mean size of the error, bias its mean with the sign. The first row is the table of one GPU as it is: wrong
# by two thirds, for it is another deployment. The last row is the truth itself: it misses only the noise, and nothing
# can do better.


# %%
def score(models, observations):
    for name, model in models.items():
        row = fpmjax.evaluate(model, observations, by=None, blocks=1).to_pylist()[0]
        print(f"{name:10}  MAPE {row['mape_pct']:5.1f} %  bias {row['bias_pct']:+5.1f} %", end="")
        print(f"  answered {row['scored']:3} of {row['n']}")


everyone = {"one GPU": one_gpu, **models, "truth": truth}
score(everyone, later)

# %% [markdown]
# All three come close to the noise, and the differences between them are too small to choose by. So far, take the
# simplest.
#
# ## A picture of a fit
#
# Four things to look at. Top left: the points lie in the band, on both sides of the line. Top right: errors show no
# slope over batch. Bottom left: the shaded *training box* is where steps were seen, and the marks show where a draft
# length would ask instead, mostly to its right. Bottom right: no drift.

# %%
both = fpmjax.Observations.concat([seen, later])
plot_fit(models["learned"], both, draft_lengths=[1, 3], learned=len(seen))

# %% [markdown]
# ## Wider than anything seen
#
# Tomorrow traffic grows to 64 to 200 requests at once, and the log ends at 48. This is where the three differ. Only the
# learned model says that it is extrapolating; the others answer without a word. The correction can answer only where
# the table of one GPU does.

# %%
wide = log_of(300, 64, 200)
score(everyone, wide)
answer = fpmjax.estimate(models["learned"], fpmjax.Work.decode([24, 150], [24 * 1500, 150 * 1500]))
for batch, ms, low, high, outside in zip(
    [24, 150],
    answer.latency_ms,
    answer.interval.low_ms,
    answer.interval.high_ms,
    answer.support.extrapolated,
    strict=True,
):
    print(f"learned, {batch:3} requests: {ms:.1f} ms, {low:.1f} to {high:.1f}" + (", extrapolated" * bool(outside)))

# %% [markdown]
# ## Drafts
#
# A draft length of 3 makes 48 requests a pass of 192, far beyond what was seen. Beyond twice the largest batch of the
# log the learned model does not answer. Instead of trusting a guess, it can be told a few *anchors*: ordinary steps
# that somebody measures once. `recommend_anchors` names them.

# %%
anchors = fpmjax.recommend_anchors(seen, draft_lengths=[1, 3])
print("measure these:", *(f"{batch} requests with {kv:,} KV tokens" for batch, kv in anchors), sep="\n  ")

work = fpmjax.Work.decode([anchor.decode_requests for anchor in anchors], [anchor.decode_kv for anchor in anchors])
measured = fpmjax.estimate(truth, work).latency_ms * random.lognormal(0, 0.02, len(anchors))
with_anchors = fpmjax.Observations.concat([seen, fpmjax.Observations.of(work, measured)])
anchored = fpmjax.learned(with_anchors, role="decode")

# %% [markdown]
# Scored on rounds of draft length 3 for the first sixty later steps. What is compared is the ordinary pass inside of
# the round, against the table of two GPUs; whether the factor around it fits an engine is a question for [notebook
# 5](05_calibration.ipynb).

# %%
asked = later[:60].work
real = fpmjax.estimate(truth, asked, draft_length=3).latency_ms
for name, model in {**models, "anchored": anchored}.items():
    found = fpmjax.estimate(model, asked, draft_length=3, check=False).latency_ms
    error = 100 * np.abs(found / real - 1)
    print(f"{name:10}  MAPE {np.nanmean(error):4.1f} %  worst {np.nanmax(error):5.1f} %", end="")
    print(f"  answered {np.isfinite(found).sum():3} of {len(found)}")

# %% [markdown]
# ## How many steps does each need?
#
# Suppose the engine was started a minute ago. One would think that the correction wins then, because a table tells it
# the shape that the others have yet to learn. Look at the left end: it does not. All three are near 2 % from the start,
# and the order among them is mostly chance. Over this traffic a step is nearly a line in batch and KV, and six steps
# are enough for a line. (The learned model answers from 16 steps on.)

# %%
sizes = [6, 10, 16, 25, 40, 80, 160, 300]
fits = {
    "regression": {n: fpmjax.regression(seen[:n], role="decode") for n in sizes},
    "learned": {16: fpmjax.learned(seen[:16], role="decode"), 40: fpmjax.learned(seen[:40], role="decode")},
    "correction": {n: fpmjax.corrected(one_gpu, seen[:n], policy="dynamic_local") for n in sizes},
}
fits["learned"][300] = models["learned"]

figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
for (name, fitted), mark in zip(fits.items(), ("o-", "s--", "^:"), strict=True):
    errors = [fpmjax.evaluate(model, later, by=None, blocks=1)["mape_pct"][0].as_py() for model in fitted.values()]
    axes.plot(list(fitted), errors, mark, label=name)
axes.set(xscale="log", xlabel="steps in the log", ylabel="MAPE on later steps, %", ylim=(0, None))
axes.set_xticks(sizes, [str(n) for n in sizes])
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# ## The decision
#
# - **Traffic like yesterday's:** all three are as good as the noise. Take the regression: it needs the fewest steps and
#   goes on learning (`model.update`).
# - **Wider batches, or drafts:** take the learned model, and measure the anchors. Of the three it is the most accurate
#   outside of the log, and the only one that says when it is outside.
# - **No anchors to be had:** the correction did better than the regression beyond the log, as the table knows how steps
#   bend where they become wide, and it answered every draft. It needs a table of a near deployment, answers no more
#   than that covers, and does not say when it leaves the log.
#
# All of this holds for this log, which is a clean one. With yours it takes three lines to find out: hold the last hours
# back and call `evaluate`.
#
# Next: [how do I ask a hundred million questions at once?](04_bulk.ipynb)
