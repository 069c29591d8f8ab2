"""Self-benchmark artifacts: one JSON document whose groups hold the ranks of each measured iteration, exactly joined.

Only what the benchmark itself calls usable is taken, as a whole: by `iteration_groups`, never by `results` beside
them, and never the raw samples behind a reduced one.  Older artifacts without groups give one iteration per result,
for one rank only.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from fpmjax.errors import MetricsError, TraceError
from fpmjax.metrics import show
from fpmjax.observe.observations import Observations
from fpmjax.observe.record import CLOCK_SECONDS, MIXED, UNSPECIFIED, Rejected
from fpmjax.observe.rows import decode
from fpmjax.observe.segments import BOM, refuse
from fpmjax.observe.speculation import fields_of_speculation

SCHEMA_VERSION = 2


def read_artifact(path: Path) -> tuple[Observations, str]:
    """The iterations of one artifact, in its order; and a digest of them, equal in every rank's copy of a run.

    Raises TraceError: `file`, `bad_json`, `artifact` (not usable, or not of the known form), `speculative`.
    """
    try:
        whole = decode(path.read_bytes().removeprefix(BOM))
    except OSError as error:
        refuse("file", f"{path} cannot be read: {error}", "check the file and its permissions")
    except Rejected as error:
        refuse("bad_json", f"{path}: {error}", "an artifact is one JSON document")
    if not isinstance(whole, dict):
        _refuse(path, f"the document is {show(whole)}, not an object")
    engine = whole.get("engine")
    if isinstance(engine, dict) and engine.get("speculative") is not None:
        refuse(
            "speculative",
            f"{path}: engine.speculative is {show(engine['speculative'])}, so these are speculative rounds",
            "observations are ordinary decoding; benchmark the engine with speculation off",
        )
    grouped = "iteration_groups" in whole
    if whole.get("schema_version") != SCHEMA_VERSION and (grouped or "schema_version" in whole):
        _refuse(path, f"schema_version is {show(whole.get('schema_version'))}, but this reader knows {SCHEMA_VERSION}")
    for key, wanted in (("usable", True), ("error", None)) if grouped else ():
        if whole.get(key) is not wanted:
            _refuse(path, f"{key} is {show(whole.get(key))}")
    for key in ("usable", "valid", "timing_valid"):
        if whole.get(key, True) is not True:
            _refuse(path, f"{key} is {show(whole[key])}")
    iterations = _groups(path, whole) if grouped else _results(path, whole)
    if (timing := _timing(whole)) == MIXED:
        _refuse(path, f"measurement_protocol.timing_metric is {timing!r}, which is no clock")
    for i, ranks in enumerate(iterations):
        for fpm in ranks:
            if drafting := [key for key, shown in fields_of_speculation(fpm).items() if shown]:
                refuse(
                    "speculative",
                    f"{path}: iteration {i}: {show(drafting[0])} shows speculation",
                    "observations are ordinary decoding; benchmark the engine with speculation off",
                )
            wall = fpm.get("wall_time", 0)
            if isinstance(wall, (int, float)) and not 0 <= wall < CLOCK_SECONDS:
                _refuse(path, f"iteration {i}: wall_time is {show(wall)}, not the seconds of one pass")
    try:
        observations = Observations.from_metrics(iterations, timing=timing)
    except MetricsError as error:
        _refuse(path, str(error).partition("\n")[0])
    except TraceError as error:
        raise TraceError(f"{path}: {error}", code=error.code) from None
    text = json.dumps([whole.get("run_id"), iterations], sort_keys=True)
    return observations, sha256(text.encode()).hexdigest()


def _groups(path: Path, whole: dict[str, Any]) -> list[list[dict[str, Any]]]:
    iterations = []
    for i, group in enumerate(_list(path, whole["iteration_groups"], "iteration_groups")):
        where = f"iteration_groups[{i}]"
        if not isinstance(group, dict) or group.get("complete") is not True:
            _refuse(path, f"{where} is not complete")
        expected = _list(path, group.get("expected_dp_ranks"), f"{where}.expected_dp_ranks")
        results = _list(path, group.get("rank_results"), f"{where}.rank_results")
        ranks = [result.get("dp_rank") if isinstance(result, dict) else None for result in results]
        if not ranks or ranks != expected:
            _refuse(path, f"{where} has the ranks {show(ranks)}, but expects {show(expected)}")
        iterations.append([_only(path, result, f"{where}.rank_results[{r}]") for r, result in enumerate(results)])
        for rank, fpm in zip(ranks, iterations[-1], strict=True):
            if fpm.get("dp_rank", rank) != rank:
                _refuse(path, f"{where} files metrics of dp_rank {show(fpm['dp_rank'])} under rank {show(rank)}")
    return iterations


def _results(path: Path, whole: dict[str, Any]) -> list[list[dict[str, Any]]]:
    dp = whole.get("dp")
    if isinstance(dp, dict) and dp.get("size", 1) != 1:
        _refuse(path, f"there are no iteration_groups, and dp.size is {show(dp['size'])}")
    results = _list(path, whole.get("results"), "results")
    return [[_only(path, result, f"results[{i}]")] for i, result in enumerate(results)]


def _only(path: Path, result: Any, where: str) -> dict[str, Any]:
    """The one reduced sample of a rank."""
    fpms = _list(path, result.get("fpms") if isinstance(result, dict) else None, f"{where}.fpms")
    if len(fpms) != 1 or not isinstance(fpms[0], dict):
        _refuse(path, f"{where}.fpms has {len(fpms)} entries, but holds the metrics of one iteration")
    return fpms[0]


def _timing(whole: dict[str, Any]) -> str:
    protocol = whole.get("measurement_protocol")
    metric = protocol.get("timing_metric") if isinstance(protocol, dict) else None
    return metric if isinstance(metric, str) and metric else UNSPECIFIED


def _list(path: Path, value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        _refuse(path, f"{where} is {show(value)}, not a list")
    return value


def _refuse(path: Path, message: str) -> NoReturn:
    refuse(
        "artifact",
        f"{path}: {message}",
        f"an artifact is taken whole, with schema_version {SCHEMA_VERSION}, usable, without error, all groups complete",
    )
