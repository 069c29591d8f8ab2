"""The side of the Rust peer in `peer.py`: run by a Python that has it, which need not have this package.

    python peer_worker.py       (in a folder with `setup.json`; one JSON request a line in, one JSON line out)

`setup.json`: the `config` of the peer's model; `jobs`, the name of each with its `rows` (columns of metrics), whether
it is `detailed`, and where it speculates the `width` and `factor` of a round.  A request names the job, the way to ask,
how many of its first rows, and a file that the answers go to, or null; what comes back is the processor time that the
answers took, in seconds.

What is fast is prepared: integers, JSON text and dicts exist before the clock starts, `map` calls the peer without a
line of Python in between, and no garbage is collected (the answers hold no cycles).
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main() -> None:
    channel, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the answers
    setup = json.loads(Path("setup.json").read_text())
    engine = import_module("aisimulate_core.sdk.rust_engine_step")
    config = engine.ForwardPassPerfModelConfig(**setup["config"])
    documented = engine.RustForwardPassPerfModel.best_available(config)
    native = import_module("aisimulate_core").RustForwardPassPerfModel.best_available(json.dumps(config.to_dict()))

    @functools.cache
    def way(job: str, name: str, count: int) -> Callable[[], list]:
        about = setup["jobs"][job]
        rows = {column: values[:count] for column, values in about["rows"].items()}
        model = documented if name == "dicts" else native
        return WAYS[name](model, rows, about)

    gc.disable()
    print(json.dumps({"version": version("aisimulate")}), file=channel, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        run = way(request["job"], request["way"], request["count"])
        start = time.process_time()
        answers = run()
        seconds = time.process_time() - start
        if request["answers"]:
            Path(request["answers"]).write_text(json.dumps(answers))
        del answers
        print(json.dumps({"seconds": seconds}), file=channel, flush=True)


def integers(native: Any, rows: dict[str, list[int]], about: dict[str, Any]) -> Callable[[], list]:
    """The phase by its totals: the peer's shortest way."""
    ask = native.predict_prefill_latency_total if len(rows) == 3 else native.predict_decode_latency_total
    if "width" not in about:
        return lambda: list(map(ask, *rows.values()))
    wide, kv = widened(rows, about["width"]).values()
    factor = about["factor"]
    return lambda: [ms * factor for ms in map(ask, wide, kv)]


def ready(native: Any, rows: dict[str, list[int]], about: dict[str, Any]) -> Callable[[], list]:
    """Whole iterations as JSON text, widened before they are written; what is detailed comes back as text."""
    texts = [json.dumps(iteration) for iteration in iterations(widened(rows, about.get("width", 1)))]
    ask = native.estimate_forward_pass_detailed if about["detailed"] else native.estimate_forward_pass_time_ms
    if "width" not in about:
        return lambda: list(map(ask, texts))
    factor = about["factor"]
    return lambda: [ms * factor for ms in map(ask, texts)]


def dicts(documented: Any, rows: dict[str, list[int]], about: dict[str, Any]) -> Callable[[], list]:
    """As its documentation asks it: a dict of metrics in; the rule is applied to each by hand."""
    asked = list(iterations(rows))
    ask = documented.estimate_forward_pass_detailed if about["detailed"] else documented.estimate_forward_pass_time_ms
    if "width" not in about:
        return lambda: list(map(ask, asked))
    width, factor = about["width"], about["factor"]

    def by_hand(metrics: dict[str, Any]) -> float:
        scheduled = metrics["scheduled_requests"]
        wide = {**scheduled, "num_decode_requests": scheduled["num_decode_requests"] * width}
        return ask({**metrics, "scheduled_requests": wide}) * factor

    return lambda: list(map(by_hand, asked))


WAYS = {"integers": integers, "ready JSON": ready, "dicts": dicts}


def widened(rows: dict[str, list[int]], width: int) -> dict[str, list[int]]:
    """`width` rows for each decode request, the KV total as it was."""
    return {k: [n * width for n in v] if k == "num_decode_requests" else v for k, v in rows.items()}


def iterations(rows: dict[str, list[int]]):
    """One rank's metrics per row, with nothing in them that is not asked."""
    return ({"scheduled_requests": dict(zip(rows, row, strict=True))} for row in zip(*rows.values(), strict=True))


if __name__ == "__main__":
    main()
