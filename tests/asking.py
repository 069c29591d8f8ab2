"""Ways of asking the facade that several test files share."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fpmjax.errors import FpmError
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.models.direct import direct
from fpmjax.status import Status
from fpmjax.tables.load import load_cells

CASES = Path(__file__).parent / "cases"
SURFACE = "speculation_tables/surf.parquet"  # decode takes B + K / 1024 ms
DETAIL = ["latency_ms", "native_latency_ms", "correction_factor", "max_rank", "ranks"]
SPECULATIVE = ["latency_ms", "draft_length", "scaling_factor", "stp_reference"]


def records(path: str) -> list[dict]:
    with gzip.open(CASES / path, "rt") as lines:
        return [json.loads(line) for line in lines]


def facade(path: str, **options) -> ForwardPassPerfModel:
    (cell,) = load_cells(CASES / path).values()
    return ForwardPassPerfModel(direct(cell), **options)


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test fail where a query goes to compiled code."""
    edge = import_module("fpmjax.estimate")  # the module: the package's attribute of this name is the function
    monkeypatch.setattr(edge, "answer", lambda *_, **__: pytest.fail("a query reached compiled code"))


def decode(requests: int, kv: int, **more) -> dict:
    return {"scheduled_requests": {"num_decode_requests": requests, "sum_decode_kv_tokens": kv, **more}}


def prefill(requests: int, tokens: int, kv: int = 0, **more) -> dict:
    names = ("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens")
    return {"scheduled_requests": {**dict(zip(names, (requests, tokens, kv), strict=True)), **more}}


def refusal(error: type[FpmError], call, *args, **kwargs) -> tuple[str, str]:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.count("\nhint: ") == 1 and not message.endswith(".")
    return caught.value.code, message.split("\nhint: ")[0]


class Wrapped:
    """A model that only follows the protocol; `status` replaces the one it would give."""

    composition, execution, ready = "whole_forward", "autoregressive", False

    def __init__(self, model, status: Status | None = None):
        self.model, self.status = model, status

    def on_host(self, work, *, evidence=False):
        answer = self.model.on_host(work)
        if self.status is not None:
            nan = np.full_like(answer.latency_ms, np.nan)
            answer = replace(answer, latency_ms=nan, rank=answer.rank * 0 - 1)
            answer = replace(answer, status=np.full_like(answer.status, self.status))
        return answer
