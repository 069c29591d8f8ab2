"""The recorded answers of the peer, kind by kind, beside ours.

Each function yields one record per recorded answer: `Bits` where its numbers have to be equal in every bit, `Words`
where the peer gives no number (a refusal, a verdict, a state), `Within` where sums in another order may round
otherwise.  The records, and the ways to read them, are those of the tests (`tests/cases`, `tests/*.py`).
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fpmjax
from fpmjax import CoverageError, MetricsError, Observations, Work
from fpmjax.errors import CellNotFoundError, FpmError, TableError
from fpmjax.observe.forest_features import features_of

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))
TABLES = ("dense7b", "dense70b", "scatter", "fakekv")
KINDS = {
    "decode": "plain decode",
    "prefill": "prefill",
    "mixed": "mixed",
    "cached_prefill_only_plus_decode": "decode beside fully cached prompts",
    "multi_rank": "several ranks",
    "idle": "idle",
}
IN_BULK = "the same iterations at once, compiled"
CALLS = {
    "predict_decode_latency_total": "decode by totals",
    "predict_prefill_latency_total": "prefill by totals",
    "static_phase_latency": "whole phases",
}
SURFACES = {
    "fpm_direct_surface_B_plus_K_over_1024": "speculation_tables/surf.parquet",
    "fpm_direct_B8_K64_is_8ms": "speculation_tables/ex1.parquet",
}
FORESTS = ("aggregated_all_log", "decode_atomic5_log")
NO_PEER = "autoregressive CUDA policy"  # tables whose verdicts follow the specification: the peer predates them
STRICTER = {"features slot01", "features +1"}  # artifacts of hand cases that the peer loads and we refuse

asking: Any = importlib.import_module("asking")
streams: Any = importlib.import_module("streams")


class Bits(NamedTuple):
    """An answer of so many numbers: whether all of ours have the same bits, and whether we differ as we mean to."""

    kind: str
    same: bool
    meant: bool = False
    numbers: int = 1


class Words(NamedTuple):
    """A refusal, verdict or state: whether ours is the same word, and whether we differ as we mean to."""

    kind: str
    same: bool
    meant: bool = False


class Within(NamedTuple):
    """A number that sums in another order give: how far ours is from the recorded one, relatively."""

    kind: str
    difference: float


Found = Bits | Words | Within


def code_of(call: Any, *args: Any, **options: Any) -> str:
    """The code of the refusal, "" of an answer."""
    try:
        call(*args, **options)
    except FpmError as error:
        return str(error.code)
    return ""


def iterations() -> Iterator[Found]:
    """Every recorded query of the four tables through the peer's method names, and refusals by their code."""
    models = {table: asking.facade(f"interpolation/tables/{table}") for table in TABLES}
    for case in asking.records("interpolation/cases.jsonl.gz"):
        ask = getattr(models[case["table"]], case["call"])
        args = case["args"] if "args" in case else [case["metrics"]]
        if "error" in case:
            code = case["error"]["class"]
            yield Words(f"refused: {code}", code_of(ask, *args) == code)
        elif "value" in case:
            yield Bits(CALLS[case["call"]], ask(*args) == case["value"])
        else:
            yield Bits(KINDS[case["kind"]], alike(ask(*args), case["result"]), numbers=numbers_in(case["result"]))


def alike(got: Any, want: Any) -> bool:
    """Equal in every key, type, word and bit; the peer's own path is not kept."""
    if isinstance(want, dict):
        keys = [key for key in got if key != "model_path"]
        return keys == list(want) and all(alike(got[key], want[key]) for key in keys)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(alike, got, want))
    return type(got) is type(want) and got == want


def numbers_in(want: Any) -> int:
    """How many numbers a recorded answer holds: milliseconds, weights, and the coordinates and rows they are of."""
    if isinstance(want, dict):
        want = list(want.values())
    if isinstance(want, list):
        return sum(map(numbers_in, want))
    return int(isinstance(want, (int, float)) and not isinstance(want, bool))


def in_bulk() -> Iterator[Found]:
    """The answered iterations of each table again, all at once through compiled code."""
    records = asking.records("interpolation/cases.jsonl.gz")
    for table in TABLES:
        own = [case for case in records if case["table"] == table and "result" in case]
        model = asking.facade(f"interpolation/tables/{table}").model
        work = Work.from_iterations([as_ranks(case["metrics"]) for case in own])
        told: Any = fpmjax.estimate(model, work)
        for ms, case in zip(told.latency_ms.tolist(), own, strict=True):
            yield Bits(IN_BULK, ms == case["result"]["latency_ms"])


def as_ranks(metrics: Any) -> list[Any]:
    return metrics if isinstance(metrics, list) else [metrics]


def inputs() -> Iterator[Found]:
    """What the parser of metrics takes and refuses, and the answer to it."""
    model = asking.facade(asking.SURFACE)
    for case in asking.records("metrics_cases.jsonl.gz"):
        if case["call"] != "estimate":
            continue
        peer = case["peer"]["fpm_direct"]
        try:
            found: Any = model.estimate_forward_pass_time_ms(case["input_json"])
        except CoverageError:
            found = "coverage"
        except MetricsError:
            found = "metrics"
        want = peer.get("value") if "error" not in peer else "coverage" if "PerfData" in peer["error"] else "metrics"
        meant = case.get("ours") == "refused" and found == "metrics"
        if "error" in peer:
            yield Words("odd inputs refused", found == want, meant)
        else:
            yield Bits("odd inputs answered", found == want, meant)


def tables() -> Iterator[Found]:
    """Recorded tables with one fault or variation each: the verdict, and the values of those that load."""
    recorded: Any = importlib.import_module("test_tables_recorded")
    for case in recorded.VERDICTS:
        if case["group"] == NO_PEER:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found, values = verdict(recorded, case, Path(folder))
        meant = case.get("ours") == found
        yield Words(f"tables: {case['verdict'].replace('_', ' ')}", found == case["verdict"], meant)
        for same in values:
            yield Bits("values of accepted tables", same)


def verdict(recorded: Any, case: dict[str, Any], folder: Path) -> tuple[str, list[bool]]:
    """What becomes of one table, and whether each value that the peer gave for it is the same."""
    try:
        cell = recorded.load(case, folder).select(**recorded.asked_for(case))
    except CellNotFoundError:
        return "no_cell", []
    except TableError:
        return "rejected", []
    values = recorded.recorded_values(case) if case["verdict"] == "accepted" else []
    return "accepted", [recorded.answer(cell, *at) == value for at, value in values]


def without_peer() -> dict[str, int]:
    """Records that are not compared here, as they hold no answer of the peer."""
    recorded: Any = importlib.import_module("test_tables_recorded")
    worked = [case.get("expected", {}) for case in asking.records("speculative_cases.jsonl.gz")]
    analytic = sum("op_level" in case["peer"] for case in asking.records("metrics_cases.jsonl.gz"))
    return {
        "tables of a policy that the peer does not know, with verdicts from the specification": sum(
            case["group"] == NO_PEER for case in recorded.VERDICTS
        ),
        "draft lengths, refusals and split request lengths, worked out from the specification": sum(
            not want.keys() & SURFACES.keys() for want in worked
        ),
        "inputs to the peer's analytic model, which this package does not have": analytic,
    }


def speculative() -> Iterator[Found]:
    """Rounds over a table: the peer asked at the widened point, its answer multiplied once."""
    models = {name: asking.facade(path) for name, path in SURFACES.items()}
    for case in asking.records("speculative_cases.jsonl.gz"):
        for name in [name for name in models if name in case.get("expected", {})]:
            yield speculative_round(models[name], case, case["expected"][name])


def speculative_round(model: Any, case: dict[str, Any], want: dict[str, Any]) -> Found:
    ask, depth = model.estimate_forward_pass_detailed, case["draft_length"]
    if "error" in want:
        try:
            ask(case["metrics"], draft_length=depth)
        except CoverageError:
            return Words("speculative rounds refused", True)
        return Words("speculative rounds refused", False)
    answer = ask(case["metrics"], draft_length=depth)
    stp = answer["stp_reference"]
    found = (answer["latency_ms"], stp["latency_ms"], stp["max_rank"])
    recorded = (want["sd_latency_ms"], want["peer_stp_latency_ms"], want["max_rank"])
    same = found == recorded and answer["scaling_factor"] == case["scaling_factor"]
    return Bits("speculative rounds", same, numbers=len(recorded))


def features() -> Iterator[Found]:
    for case in asking.records("learned/features.oracle.jsonl.gz"):
        expected = [math.nan if x is None else x for x in case["features"]]
        found = features_of(Work.from_metrics(case["q"]))
        same = bool(np.array_equal(found, expected, equal_nan=True))
        yield Bits("features of learned artifacts", same, numbers=len(expected))


def regressions() -> Iterator[Found]:
    """Streams that are fitted one after another: what is retained, and the answers."""
    for stream in streams.recorded(*streams.GROUPS):
        seen = Observations.from_metrics(stream["observations"])
        options = streams.options_of(stream["estimator_config"])
        model = fpmjax.regression(seen, role=stream["worker_type"], **options)
        shown = [[s["workload_kind"], s["ready"], s["retained_observations"]] for s in model.stores]
        yield Words("regression: readiness and retained rows", shown == stream["stores"])
        for query, want in zip(stream["queries"], stream["answers_ms"], strict=True):
            found = float(model.on_host(Work.from_metrics(query)).latency_ms)
            yield from near("regression", found, want)


def regressions_on_odd_inputs() -> Iterator[Found]:
    """Four fitted models under the inputs of the parser, and what a tuning call retains of them."""
    sizes = [(b, kv) for b in (1, 2, 3, 4, 6, 8, 12, 16) for kv in (64, 512, 1024, 4096, 8192)]
    plane = Observations.from_metrics(
        [[{**asking.decode(b, b * kv), "wall_time": (b + b * kv / 1024) / 1000}] for b, kv in sizes]
    )
    models = {
        "reg_decode_cold": fpmjax.regression(role="decode"),
        "reg_decode_ready": fpmjax.regression(plane, role="decode"),
        "reg_agg_ready": fpmjax.regression(plane, role="aggregated"),
        "reg_prefill_cold": fpmjax.regression(role="prefill"),
    }
    for case in asking.records("metrics_cases.jsonl.gz"):
        for name, model in models.items() if case["call"] == "estimate" else ():
            want = case["peer"][name]
            found = model_answer(model, case["input_json"])
            stricter = case.get("ours") == "refused"
            yield from near("regression", found, "error" if "error" in want else want["value"], stricter)


def corrections() -> Iterator[Found]:
    recorded: Any = importlib.import_module("test_corrected_streams")
    for case in recorded.RECORDED:
        seen = Observations.from_metrics(recorded.iterations_of(case["observations"]))
        model = fpmjax.corrected(recorded.recorded_model(case), **recorded.options_of(case["estimator_config"]))
        model = model.update(seen)
        state = (model.retained, model.ready_buckets) == (case["retained"], case["ready_buckets"])
        yield Words("correction: retained rows and ready buckets", state)
        queries = Work.from_iterations([[recorded.metrics_of(r[:5]) for r in ranks] for ranks in case["queries"]])
        told: Any = fpmjax.estimate(model, queries)
        for found, want in zip(told.latency_ms.tolist(), case["answers_ms"], strict=True):
            yield from near("correction", found, want)


def forests() -> Iterator[Found]:
    """Learned artifacts: what is answered, refused or not ready, and the answers."""
    helpers: Any = importlib.import_module("forests")
    for name in FORESTS:
        model = helpers.loaded(helpers.recorded_artifact(name))
        for case in asking.records(f"learned/{name}.oracle.jsonl.gz"):
            want = "error" if case["error"] else case["ms"]
            yield from near("learned artifacts", model_answer(model, case["q"]), want)
    for case in asking.records("learned/hand.jsonl.gz"):
        meant = case["name"] in STRICTER
        try:
            found = model_answer(helpers.loaded(case["artifact"]), case["q"]) if "load_error" not in case else None
            loads = "load_error" not in case or not code_of(helpers.loaded, case["artifact"])
        except fpmjax.ModelFileError:
            found, loads = None, False
        if "load_error" in case or meant or not loads:
            same = loads == ("load_error" not in case)
            yield Words("learned artifacts: loaded or refused", same, meant and not loads)
        else:
            yield from near("learned artifacts", found, "error" if "estimate_error" in case else case["ms"])


def model_answer(model: Any, query: Any) -> float | str | None:
    try:
        told: Any = fpmjax.estimate(model, Work.from_metrics(query))
        return float(told.latency_ms)
    except CoverageError:
        return None
    except MetricsError:
        return "error"


def near(kind: str, found: Any, want: Any, stricter: bool = False) -> Iterator[Found]:
    """How far two numbers are apart; where one side gives none, whether both say why in the same word.

    stricter: we mean to refuse what the peer does not, and differ as meant only where we do.
    """
    found = None if isinstance(found, float) and math.isnan(found) else found
    if isinstance(found, float) and isinstance(want, float):
        yield Within(kind, abs(found - want) / abs(want)) if want else Bits("fitted models, idle", found == want)
    else:
        yield Words(f"{kind}: refused or not ready", found == want, stricter and found == "error")
