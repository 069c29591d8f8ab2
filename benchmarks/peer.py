"""How fast the same questions are answered by the Rust peer, per core-second.

    python benchmarks/peer.py [--python PATH] [--json] [--rounds N] [NAME ...]

Names: plain, prefill, mixed, detailed (the evidence beside the latency), speculative (at a draft length of 3).

The peer lives in an environment of its own, for it pins an old jax: `--python`, or the variable FPMJAX_PEER_PYTHON,
names an interpreter that has it; otherwise one is made beside this file, of the extra `peer`.  Where that cannot be
done, the benchmark says why and is skipped, with exit code 0.

All on the TP1 cell of the embedded table, by the direct rule.  Before anything is timed every way gave the same bits:
latencies, and with details also how each was found, from which measured points, with which weights.  The fastest way of
the peer was asked all 2**18 rows, every other way the first of them.

Fairness.  The peer answers one question a call, in one thread; the unit is processor time of the process, so that our
threads count.  It is a process of its own (`peer_worker.py`), whose own clock is read, and takes turns with ours in
every round.  It is asked in its shortest way first, which is the reference: `integers`, the native method that takes
the totals of one phase, where it has one; `ready JSON`, the native method on texts that were written before; `dicts`,
what its documentation shows.  Its garbage collector is off, its answers are kept in a list and, detailed, not even
parsed but by `dicts`.  Ours are asked with NumPy arrays (`estimate`), from the same dicts (`from dicts`), and one by
one from them (`facade`), where nothing is gained by arrays: there the peer is ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from lookup import cell, decode_queries, drafted_counts, mixed_counts, model
from runner import Case, main

import fpmjax
from fpmjax.rule import PUBLISHED
from fpmjax.work import Work

HERE = Path(__file__).parent
HOME = HERE / ".venv-peer"
VARIABLE = "FPMJAX_PEER_PYTHON"
MARK = "<!-- peer -->"
JOBS = ("plain", "prefill", "mixed", "detailed", "speculative")
FEW = 1 << 13  # rows of whatever goes one by one, whose cost per row does not depend on their number
DRAFT_LENGTH = 3
# Our names of counts -> those of the metrics.
METRICS = {
    "prefill_requests": "num_prefill_requests",
    "prefill_tokens": "sum_prefill_tokens",
    "prefill_kv": "sum_prefill_kv_tokens",
    "decode_requests": "num_decode_requests",
    "decode_kv": "sum_decode_kv_tokens",
}


class Skipped(Exception):
    """The peer cannot be had here; the message says why."""


def interpreter(given: Path | None) -> Path:
    """A Python that has the peer."""
    if given:
        python = given
    else:
        python = HOME / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        print(f"an environment for the peer: {HOME.name}, beside this file", file=sys.stderr)
        extra = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]["peer"]
        tell([sys.executable, "-m", "venv", HOME], "no environment can be made")  # both leave alone what is there
        tell([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *extra], "it cannot be installed")
    tell([python, "-c", "import aisimulate_core.sdk.rust_engine_step"], "it cannot be imported")
    return python


def tell(command: list[Any], failure: str) -> None:
    """Run a step without which there is no peer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Skipped(f"{failure}: {error}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Skipped(": ".join([failure, *last]))


class Peer:
    """The peer in its process; `spent` are the processor seconds that its answers took so far."""

    def __init__(self, python: Path, folder: Path, jobs: dict[str, Any]):
        config = configuration(cell().identity)
        (folder / "setup.json").write_text(json.dumps({"config": config, "jobs": jobs}))
        stub = folder / config["model"] / "config.json"  # else the peer looks for the model's card elsewhere
        stub.parent.mkdir(parents=True)
        stub.write_text(json.dumps({"architectures": [config["fpm_profile"]["architecture"]]}))
        self.process = subprocess.Popen(
            [python, HERE / "peer_worker.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"AIC_ALLOW_UNLISTED_VERSIONS": "1"},  # of a backend whose measurements it does not keep
        )
        self.file, self.spent = folder / "answers.json", 0.0
        self.version = self.heard()["version"]

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the process of the peer has ended; what it said stands above")
        return json.loads(line)

    def ask(self, job: str, way: str, count: int, answers: Path | None = None) -> None:
        assert self.process.stdin is not None
        request = {"job": job, "way": way, "count": count, "answers": str(answers) if answers else None}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        self.spent += self.heard()["seconds"]

    def answers(self, job: str, way: str, count: int) -> list[Any]:
        self.ask(job, way, count, self.file)
        return json.loads(self.file.read_text())

    def case(self, job: str, way: str) -> Case:
        return Case(f"peer, {way}", functools.partial(self.ask, job, way, FEW), FEW, lambda: self.spent)

    def close(self) -> None:
        self.process.communicate()


def configuration(identity: fpmjax.Identity) -> dict[str, Any]:
    """Arguments of the peer's configuration that choose this cell of the embedded table and the direct rule."""
    shared = {name: getattr(identity, name) for name in ("system", "backend", "backend_version", "tp")}
    quantised = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
    deployment = {name: getattr(identity, name) for name in ("pp", "dp", "moe_tp", "moe_ep", "cp", *quantised)}
    # Memory is asked for, and plays no part in a lookup.
    sizes = ("weights", "activations", "runtime_overhead", "comm_overhead")
    resources = {f"{name}_bytes": 1 for name in sizes} | {"kv_bytes_per_token": 1, "cache_layout": "linear"}
    resources |= {"max_num_tokens": 8192, "max_batch_size": 512, "provenance": "none"}
    profile = {
        "schema_version": 1,
        "model": identity.model,
        "model_revision": "none",
        "architecture": "ForCausalLM",
        "context_length": 131072,
        "num_experts": 0,
        "provenance": "none",
        "deployments": [shared | deployment | {"resources": resources}],
    }
    return shared | {
        "model": identity.model,
        "worker_type": "aggregated",
        "moe_tp_size": identity.moe_tp,
        "moe_ep_size": identity.moe_ep,
        "fpm_profile": profile,
        "estimation_mode": "fpm_interpolation",
        "fallback_policy": "deny",
        "estimator_config": {
            "fpm_interpolation": {
                "method": "direct",
                "collect_coverage": False,
                "fpm_parquet_path": str(fpmjax.embedded_table()),
            }
        },
    }


def questions() -> dict[str, dict[str, np.ndarray]]:
    """Counts of every job, uint32 [N] each."""
    prefill, decode = mixed_counts()
    plain = dict(zip(("decode_requests", "decode_kv"), decode_queries(), strict=True))
    drafted = drafted_counts()
    return {"plain": plain, "prefill": prefill, "mixed": prefill | decode, "detailed": plain, "speculative": drafted}


def jobs() -> dict[str, Any]:
    """`questions` as the peer's process reads them, and how it shall answer."""
    told: dict[str, Any] = {
        job: {"detailed": job == "detailed", "rows": {METRICS[name]: x.tolist() for name, x in counts.items()}}
        for job, counts in questions().items()
    }
    factor = float(PUBLISHED.factor(DRAFT_LENGTH))
    told["speculative"] |= {"width": DRAFT_LENGTH + 1, "factor": factor}
    return told


def beside(peer: Peer, job: str) -> tuple[list[Case], str, str]:
    """All ways to do one job, once every one of them gave the same bits."""
    counts: dict[str, Any] = questions()[job]
    detailed = job == "detailed"
    options: dict[str, Any] = {"draft_length": DRAFT_LENGTH} if job == "speculative" else {}
    asking: dict[str, Any] = options | ({"evidence": True} if detailed else {})
    work = Work.of(**counts)
    columns = {METRICS[name]: x[:FEW].tolist() for name, x in counts.items()}
    dicts = [
        {"scheduled_requests": dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)
    ]
    facade = fpmjax.ForwardPassPerfModel(model())
    one = facade.estimate_forward_pass_detailed if detailed else facade.estimate_forward_pass_time_ms

    def whole() -> Any:
        return fpmjax.estimate(model(), work, **asking)

    def from_dicts() -> Any:
        return fpmjax.estimate(model(), Work.from_iterations(dicts), **asking)

    def one_by_one() -> list[Any]:
        return [one(metrics, **options) for metrics in dicts]

    ways = ("ready JSON", "dicts") if job in ("mixed", "detailed") else ("integers", "ready JSON", "dicts")
    most = len(dicts) if detailed else work.shape[0]  # a detail is a page of text
    read = of_details if detailed else of_latencies
    right = read(whole(), most)
    others = {f"peer, {way}": peer.answers(job, way, most if way == ways[0] else len(dicts)) for way in ways}
    others |= {"fpmjax from dicts": from_dicts(), "fpmjax facade": one_by_one()}
    for name, answers in others.items():
        count = most if name == f"peer, {ways[0]}" else len(dicts)
        if read(answers, count) != right[:count]:
            raise SystemExit(f"{job}: {name} and fpmjax estimate do not give the same bits; nothing was timed")
    cases = [
        *(peer.case(job, way) for way in ways),
        Case("fpmjax facade, one by one", one_by_one, len(dicts)),
        Case("fpmjax estimate, from dicts", from_dicts, len(dicts)),
        Case("fpmjax estimate", whole, work.shape[0]),
    ]
    more = "" if most == len(dicts) else f", by the reference in {most:,}"
    note = f"Seen before: the same bits by every way in {len(dicts):,} rows{more}; aisimulate {peer.version}."
    return cases, cases[0].name, note


def of_latencies(answers: Any, count: int) -> list[float]:
    """Milliseconds of the first answers, of whatever was asked."""
    return np.asarray(getattr(answers, "latency_ms", answers)).tolist()[:count]


def of_details(answers: Any, count: int) -> list[Any]:
    """(ms, how it was found, points with their weights) of the first answers."""
    if isinstance(answers, list):
        return [of_detail(json.loads(x) if isinstance(x, str) else x) for x in answers[:count]]
    found = answers.parts.decode
    points = cell().decode
    measured = zip(points.batch.astype(float), points.kv.astype(float), points.latency_ms, strict=True)
    point = dict(zip(points.row.tolist(), measured, strict=True))
    columns = (answers.latency_ms, *(x[:, 0] for x in (found.resolution, found.row, found.weight)))
    return [
        (ms, fpmjax.Resolution(how).word, [(*point[r], w) for r, w in zip(rows, weights, strict=True) if r >= 0])
        for ms, how, rows, weights in zip(*(x[:count].tolist() for x in columns), strict=True)
    ]


def of_detail(detail: dict[str, Any]) -> tuple[float, str, list[tuple]]:
    (query,) = detail["ranks"][0]["queries"]
    axes = "batch_size", "total_kv_read_tokens"
    support = [(*(x["coordinates"][a] for a in axes), x["latency_ms"], x["weight"]) for x in query["support"]]
    return detail["latency_ms"], query["resolution"], support


def run(argv: list[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named = os.environ.get(VARIABLE)
    own.add_argument("--python", type=Path, default=named and Path(named), help=f"has the peer; default: ${VARIABLE}")
    given, rest = own.parse_known_args(argv)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def peer() -> Peer:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fpmjax-peer-")))
            return stack.enter_context(contextlib.closing(Peer(interpreter(given.python), folder, jobs())))

        def benchmark(job: str) -> tuple[list[Case], str, str]:
            return beside(peer(), job)

        try:
            main({job: functools.partial(benchmark, job) for job in JOBS}, rest, rounds=7, mark=MARK, parents=[own])
        except Skipped as skipped:
            print(f"skipped, for the peer is not here: {skipped}", file=sys.stderr)


if __name__ == "__main__":
    run()
