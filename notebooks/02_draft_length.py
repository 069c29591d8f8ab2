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
# # 2. When does speculation pay, and how many tokens should be drafted?
#
# A draft model guesses the next d tokens, the large model checks them all in one pass. If most guesses are right, one
# pass yields several tokens. But that pass is wider, for every request brings d + 1 tokens, and drafting takes time.
#
# Whether it pays depends on three things: how many requests run at once, how long their contexts are, and how good the
# guesses are. The first two are the table's business, the third is yours. This notebook ends with a small file that
# tells an engine which d to use at which batch size.

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

import fpmjax
from fpmjax.plot import plot_grid

model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))

# %% [markdown]
# ## How good the guesses are
#
# Engines log at which share of the rounds the first, second, third guess was accepted. **These four rates are made
# up**; put in those of your own log. They count all rounds, so they only fall, and the constructor is `unconditional`.
#
# Beware of the shortcut "70 % of the guesses are right, so let me compute the rest": it promises more tokens than
# this drafter yields, because learned drafters get worse along the draft.

# %%
acceptance = fpmjax.Acceptance.unconditional([0.70, 0.47, 0.31, 0.20])
shortcut = fpmjax.Acceptance.iid(0.70)
for d in range(5):
    print(f"draft {d}: a round yields {acceptance.tokens_per_round(d):.2f} tokens", end="")
    print(f"  (the shortcut says {shortcut.tokens_per_round(d):.2f})" if d else "  (ordinary decoding)")

# %% [markdown]
# ## One place: 8 requests with 2,048 tokens each
#
# A round of draft length d takes `0.08 d + 1.25` times the ordinary step of (d + 1) x 8 requests at the same KV. The
# column *must yield* is what that costs, in ordinary steps: the tokens at which a round breaks even. The column
# *yields* has to be larger.

# %%
one = fpmjax.best_draft_length(model, requests=8, kv=8 * 2048, tokens_per_round=acceptance)
each = one.by_depth
print("draft  round ms  must yield  yields  ms a token  speedup")
for i, d in enumerate(each.draft_length):
    print(f"{d:5}  {each.round_ms[i]:8.2f}  {each.break_even[i]:10.2f}  {each.tokens_per_round[i]:6.2f}", end="")
    print(f"  {each.tpot_ms[i]:10.2f}  {each.speedup[i]:7.2f}" + ("  <- best" if d == one.best.draft_length else ""))

# %% [markdown]
# ## The whole map
#
# Left: the best draft length. Right: what it gains. Look how both fall off towards the right: a small batch leaves the
# GPU waiting for memory, so a wider pass is nearly free; from about 64 requests on the pass is busy computing, and
# every guess costs. Long contexts help, as reading KV costs the same however many tokens are checked.
#
# Small circles mark places where some draft length has no answer, because its wide batch was not measured. There the
# best one is only the best of those that could be asked.

# %%
batches = np.array([1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256])
asked = fpmjax.grid(decode_requests=batches, kv_per_request=[512, 1024, 2048, 4096, 8192], draft_length=range(1, 5))
plot_grid(model, asked, show="draft_length", tokens_per_round=acceptance)

# %% [markdown]
# ## What a round must yield, whatever your drafter
#
# The same map without any acceptance: how many tokens a round has to yield so that it is no slower than ordinary
# decoding. Take your own numbers, and look where they lie below. At 16 requests a draft length of 3 needs 1.6 tokens,
# which almost every drafter gives; at 128 requests with short contexts it needs about 2.5.

# %%
plot_grid(model, asked, show="draft_length")

# %% [markdown]
# ## How far the factor can be trusted
#
# `0.08 d + 1.25` is not measured on this engine. It comes from a published study with one GPU, bfloat16, up to 8
# requests of up to 4,096 tokens, and draft lengths 1 to 4. Answers carry a flag `calibrated` for the batch, context and
# draft length of that study. It says nothing of your model, GPU, engine or drafter, and whatever lies outside is
# answered all the same.
#
# So ask the other way round: how much longer may a round be than predicted before it stops paying? That is the speedup
# itself. 1.46 leaves 46 %; 1.10 leaves 10 %, and that is little for a factor from elsewhere.

# %%
context = 2048
found = fpmjax.best_draft_length(model, batches, batches * context, acceptance)
asked_all = found.candidate.all(-1)
print("batch  best d  speedup  in the study's range  every d could be asked")
for i, batch in enumerate(batches):
    best = found.best
    print(f"{batch:5}  {best.draft_length[i]:6}  {best.speedup[i]:7.2f}", end="")
    print(f"  {'yes' if best.calibrated[i] else 'no':20}  {'yes' if asked_all[i] else 'no'}")

# %% [markdown]
# ## The decision, as a file
#
# We draft only where it gains at least a quarter, so that the factor may be wrong by a quarter, and nowhere beyond the
# batches that could be asked. An engine reads: up to this batch size, this draft length.

# %%
chosen = np.where(found.best.speedup >= 1.25, found.best.draft_length, 0)
last = np.append(np.flatnonzero(np.diff(chosen)), len(chosen) - 1)
table = pa.table({"batch_up_to": batches[last], "draft_length": chosen[last]})
pa.csv.write_csv(table, "draft_lengths.csv")
print(Path("draft_lengths.csv").read_text().strip())

# %% [markdown]
# Up to 16 requests draft 4 tokens, up to 64 draft 3, up to 96 draft 2, beyond that none. Whether the factor holds for
# your engine can be measured with a few hundred rounds: [notebook 5](05_calibration.ipynb).
#
# Next: [what if there is no table, but an engine that runs?](03_fit_from_traces.ipynb)
