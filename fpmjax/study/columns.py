"""The columns of a calibration file, one row per round, as data: `COLUMNS` says what each holds and must obey.

Calibration files name units in their columns and mean them: nothing is guessed from a value's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INT32 = 2**31 - 1
WARMUP = 16  # first rounds of a run that the protocol drops
EXACT = 2**53  # integers up to here are exact in float64, which KV is interpolated in

METHODS = ("none", "mtp", "eagle", "eagle3", "ngram", "draft_model", "other")
SCOPES = ("model_step_cuda", "model_worker_forward_cuda", "scheduler_wall_time", "client_itl")
KINDS = ("sd", "stp")


@dataclass(frozen=True)
class Column:
    """One column; `low` and `high` bound counts, `words` lists what a text may be (anything where empty)."""

    name: str
    kind: Literal["text", "count", "number", "flag"]
    what: str
    required: bool = True
    low: int = 0
    high: int = INT32
    words: tuple[str, ...] = ()


COLUMNS = (
    Column("study_id", "text", "name of the run that measured the round"),
    Column("gpu", "text", "name of the GPU"),
    Column("tp", "count", "tensor-parallel size", low=1),
    Column("dtype", "text", "precision of the weights"),
    Column("framework", "text", "serving engine"),
    Column("framework_version", "text", "its version"),
    Column("model", "text", "target model"),
    Column("method", "text", "how drafts are made; none on stp rows", words=METHODS),
    Column("attention_backend", "text", "attention kernels"),
    Column("timing_scope", "text", "what latency_ms spans", words=SCOPES),
    Column("kind", "text", "ordinary round (stp) or speculative round (sd)", words=KINDS),
    Column("draft_length", "count", "draft tokens per round without the bonus token; 0 on stp rows"),
    Column("topk", "count", "branches of the draft tree", low=1, high=1),
    Column("batch_size", "count", "physical requests", low=1),
    Column("initial_context", "count", "tokens per request at the first round", low=1),
    Column("repetition", "count", "stp rows of repetition 0 make the reference"),
    Column("round_index", "count", "round within the run, from 0"),
    Column("total_kv_tokens", "count", "past KV of the batch, without the tokens computed in this round", high=EXACT),
    Column("latency_ms", "number", "milliseconds of the round"),
    Column("cuda_graph", "flag", "whether the round replayed a CUDA graph", required=False),
    Column("active_requests", "count", "requests still running", required=False),
    Column("emitted_tokens", "count", "accepted and bonus tokens of the batch", required=False, high=EXACT),
    Column("proposed_tokens", "count", "draft tokens of the batch", required=False, high=EXACT),
    Column("var_kv", "number", "variance of the past KV over the requests", required=False),
    Column("reason", "text", "why the round is left out, where it is", required=False),
)
BY_NAME = {column.name: column for column in COLUMNS}

# What no two rows share.
PRIMARY_KEY = ("study_id", "gpu", "tp", "dtype", "framework", "framework_version", "model", "method", "kind")
PRIMARY_KEY += ("draft_length", "batch_size", "initial_context", "repetition", "round_index")
# One configuration, the unit of statistics: the fields of `fpmjax.study.scored.Config`.
CONFIGURATION = ("gpu", "tp", "model", "method", "draft_length", "batch_size", "initial_context")
# What all rows of one deployment share; attention kernels may differ by method.
DEPLOYMENT = ("gpu", "tp", "model")
SHARED = {"dtype": DEPLOYMENT, "framework": DEPLOYMENT, "framework_version": DEPLOYMENT}
SHARED |= {"attention_backend": (*DEPLOYMENT, "method")}
# Rows that are equal in these have one reference.
REFERENCE = ("gpu", "model", "dtype", "tp", "framework", "framework_version")

ANCHORS = ("total_kv_tokens", "initial_context")  # what public anchors may leave out: they are means over contexts
INVALID = "invalid"  # the one pre-marked reason that excuses a row from having a latency
