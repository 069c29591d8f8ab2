"""What a calibration study of a million rounds costs, beside reading its file, and beside a bootstrap that gathers.

    python benchmarks/study.py [--json] [--rounds N] [study | draws] ...

192 configurations of a made-up engine, 5,200 speculative rounds each, and their ordinary rounds.

- `study`, in rounds: pyarrow reading the Parquet file is the reference; then reading it with every check and scoring
  it; then the whole of `run_study`, with 2,000 draws, refits, splits, diagnoses and residuals.
- `draws`: the cluster bootstrap, 2,000 draws at once.  The reference does what a notebook would: it gathers the rounds
  of the configurations drawn and calls `numpy.linalg.lstsq`, a draw at a time.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from runner import Case, main

from fpmjax.rule import PUBLISHED
from fpmjax.study import read_study, run_study, score
from fpmjax.study.bootstrap import bootstrap

GPUS, METHODS = ("A", "B", "C", "D"), {"mtp": (0.08, 1.25), "eagle3": (0.10, 1.15)}
DEPTHS, BATCHES, CONTEXTS = (1, 2, 3, 4), (1, 4, 8), (1024, 4096)
ROUNDS, WARMUP, DRAWS, GATHERED = 5200, 16, 2000, 4
KEPT = tempfile.TemporaryDirectory(prefix="fpmjax-study-")  # removed when the process ends
SHARED: dict[str, Any] = {
    "study_id": "made-up",
    "tp": 1,
    "dtype": "bf16",
    "framework": "none",
    "framework_version": "1",
    "attention_backend": "none",
    "timing_scope": "scheduler_wall_time",
    "topk": 1,
}


def forward_ms(batch: Any, kv: Any) -> Any:
    return 5 + 0.02 * batch + 4e-5 * kv


def parts() -> Any:
    """The columns of every run: {name: array or value}."""
    rng, index = np.random.default_rng(5), np.arange(WARMUP + ROUNDS)
    for gpu, method in itertools.product(GPUS, METHODS):
        own = {"gpu": gpu, "model": f"model of {method}"}
        wide = sorted({(d + 1) * b for d in DEPTHS for b in BATCHES})
        for b in wide:
            kv = np.append(np.zeros(WARMUP), np.linspace(0, 65_536, 40)).astype(np.int64)
            plain = {"kind": "stp", "method": "none", "draft_length": 0, "batch_size": b, "repetition": 0}
            here = {"initial_context": 1, "round_index": np.arange(len(kv)), "total_kv_tokens": kv}
            yield own | plain | here | {"latency_ms": forward_ms(b, kv)}
        slope, intercept = METHODS[method]
        for d, b, context in itertools.product(DEPTHS, BATCHES, CONTEXTS):
            kv = b * (context + index % 256)
            noise = rng.normal(1, 0.02) * rng.normal(1, 0.01, len(kv))
            drafted = {"kind": "sd", "method": method, "draft_length": d, "batch_size": b, "repetition": 1}
            here = {"initial_context": context, "round_index": index, "total_kv_tokens": kv}
            ms = (slope * d + intercept) * forward_ms((d + 1) * b, kv) * noise
            yield own | drafted | here | {"latency_ms": ms}


@functools.cache
def file() -> Path:
    """The study on disk."""
    path = Path(KEPT.name) / "study.parquet"
    found = [SHARED | part for part in parts()]
    sizes = [len(part["latency_ms"]) for part in found]
    columns = {}
    for name in found[0]:
        values = [np.broadcast_to(part[name], size) for part, size in zip(found, sizes, strict=True)]
        columns[name] = np.concatenate(values)
    pq.write_table(pa.table(columns), path, compression="zstd")
    return path


def study() -> tuple[list[Case], str]:
    path = file()
    rounds = score(read_study(path)).depth.size
    read = Case("pyarrow reads the file", lambda: pq.read_table(path), rounds)
    scored = Case("read_study and score", lambda: score(read_study(path)), rounds)
    whole = Case("run_study", lambda: run_study(path, draws=DRAWS, progress=False), rounds)
    return [read, scored, whole], read.name


def draws() -> tuple[list[Case], str]:
    scored = score(read_study(file()))
    ratio = scored.reference_ms / scored.measured_ms
    order = np.argsort(scored.config, kind="stable")
    clusters = np.split(order, np.cumsum(np.bincount(scored.config))[:-1])
    groups = np.asarray(scored.groups)
    rng = np.random.default_rng(0)

    def gathered() -> list[Any]:
        """Stratified by group, as `bootstrap` draws."""
        found = []
        for _ in range(GATHERED):
            strata = [np.flatnonzero(groups == g) for g in np.unique(groups)]
            drawn = np.concatenate([rng.choice(stratum, len(stratum)) for stratum in strata])
            rows = np.concatenate([clusters[i] for i in drawn])
            design = np.stack([scored.depth[rows] * ratio[rows], ratio[rows]], 1)
            found.append(np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0])
        return found

    def ours() -> dict[str, Any]:
        return bootstrap(scored, PUBLISHED, draws=DRAWS)

    low, high = ours()["fits"][0]["slope_interval"]
    assert all(low - 0.01 < slope < high + 0.01 for slope, _ in gathered())
    theirs = Case("gather and lstsq", gathered, GATHERED)
    return [theirs, Case("bootstrap", ours, DRAWS)], theirs.name


if __name__ == "__main__":
    main({"study": study, "draws": draws}, rounds=3, mark="<!-- study -->")
