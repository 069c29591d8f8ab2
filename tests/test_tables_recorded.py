"""259 recorded tables, one fault or variation each: the verdict, the reason, the cell and its values."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from oracles.interp_ref import Direct, Unsupported
from table_pairs import refusal

from fpmjax.errors import CellNotFoundError, TableError
from fpmjax.tables.cell import Cell
from fpmjax.tables.load import load_cells


def _unpack() -> dict[str, bytes]:
    with tarfile.open(Path(__file__).parent / "cases" / "tables.tar.xz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr]


FILES = _unpack()
VERDICTS: list[dict[str, Any]] = json.loads(FILES["verdicts.json"])
WORDS = {  # what the reason has to name, where it is not the core of the peer's own sentence
    "sidecar is not JSON": "not valid JSON",
    "parquet replaced by text, digest updated": "Parquet error",
    "Cannot access Null as Long": "does not fit in u32",
    "Cannot access Null as Double": "latency_ms=null",
}


def verdict_of(case: dict[str, Any]) -> str:
    return case.get("ours", case["verdict"])


def of(*verdicts: str) -> list:
    cases = [case for case in VERDICTS if verdict_of(case) in verdicts]
    return [pytest.param(case, id=case["id"]) for case in cases]


def load(case: dict[str, Any], folder: Path):
    for name, data in FILES.items():
        if name.startswith(case["id"] + "/"):
            (folder / name.split("/")[1]).write_bytes(data)
    asked = {name: case["identity"][name] for name in ("system", "backend", "backend_version")}
    return load_cells(folder, **asked, fake_kv="heal" if case["group"] == "fake-KV healing" else "drop")


def asked_for(case: dict[str, Any]) -> dict[str, Any]:
    """The request always says its dcp; a request without one is not the request of a dcp of 1."""
    return {"dcp": None} | case["identity"]


def test_every_recorded_table_is_here():
    assert len(VERDICTS) == 259
    assert {verdict_of(case) for case in VERDICTS} == {"accepted", "rejected", "no_cell"}


@pytest.mark.parametrize("case", of("accepted"))
def test_an_accepted_table_answers_its_recorded_values(case, tmp_path):
    cell = load(case, tmp_path).select(**asked_for(case))
    for (phase, batch, tokens, kv), value in recorded_values(case):
        assert answer(cell, phase, batch, tokens, kv) == value, case["mutation"]


@pytest.mark.parametrize("case", of("no_cell"))
def test_a_request_without_a_cell_is_told_what_differs(case, tmp_path):
    cells = load(case, tmp_path)
    code, message = refusal(cells.select, error=CellNotFoundError, **asked_for(case))
    assert code == "cell_not_found" and "No FPM cell matches" in message and "instead of" in message


@pytest.mark.parametrize("case", of("rejected"))
def test_a_rejected_table_is_refused_for_the_recorded_reason(case, tmp_path):
    _, message = refusal(load, case, tmp_path, error=TableError)
    assert tmp_path.name in message, "the file is named"
    if "ours" in case:
        assert re.search(r"column \w+ must be (int64|a string column)", message)
        return
    for core in reasons(case):
        assert core in message, case["mutation"]


def recorded_values(case: dict[str, Any]) -> list[tuple[list, float | None]]:
    if "probe" in case:
        return [(case["probe"], case["values"])]
    points = {"decode_8_4096": ["decode", 8, 0, 4096], "prefill_1_2048_2048": ["prefill", 1, 2048, 2048]}
    return [(points[name], value) for name, value in case.get("values", {}).items()]


def answer(cell: Cell, phase: str, batch: int, tokens: int, kv: int) -> float | None:
    """A recorded point itself, else what the direct rule makes of the cell's points, None where it refuses."""
    points = getattr(cell, phase)
    at = (points.batch == batch) & (points.tokens == tokens) & (points.kv == kv)
    if at.any():
        return points.latency_ms[at].item()
    rows = [
        (name, *row)
        for name in ("prefill", "decode")
        for p in [getattr(cell, name)]
        for row in zip(p.batch.tolist(), p.tokens.tolist(), p.kv.tolist(), p.latency_ms.tolist(), strict=True)
    ]
    try:
        oracle = Direct(rows)
        return oracle._prefill(batch, tokens, kv)[0] if phase == "prefill" else oracle._decode(batch, kv)[0]
    except Unsupported:
        return None


def reasons(case: dict[str, Any]) -> list[str]:
    """Parts of the peer's sentence that ours has as well: its words, and the row or column it names."""
    peer = case.get("peer_message")
    if peer is None:  # the autoregressive policy: the peer has no sentence
        return AR_REASONS[next(key for key in AR_REASONS if re.search(key, case["mutation"]))]
    for key, words in WORDS.items():
        if key in (case["mutation"], peer) or key in peer:
            return [words]
    if found := re.search(r"Cannot access (\w+) as (\w+)", peer):
        return [f"must be {'float64' if found[2] == 'Double' else 'int64'}"]
    if found := re.search(r"parquet column\[\d+\] = (-?\d+) does not fit in u32", peer):
        return [f"={found[1]} does not fit in u32", "FPM row 0"]
    peer = re.sub(r"^FPM row \d+: invalid engine config: ", "", peer)
    core = re.split(r"=|: <dir>| at <dir>| \(expected| \(phase|: \[|, but|; ", peer)[0]
    return [core.removesuffix(" version directory")]


AR_REASONS = {
    r"^reduction|^row timing_scope": ["native CUDA timing/reduction/count contract mismatch"],
    r"^sidecar timing_scope": ["native CUDA FPM sidecar requires timing_scope=model_step_cuda"],
    r"^schema 6": ["unsupported FPM measurement_policy", "for schema 6"],
    r"^backend sglang": ["unsupported FPM measurement_policy", "sglang"],
    r"^row policy|column measurement_policy missing": ["measurement_policy must match sidecar"],
    r"column (measurement_reduction|source_sample_count) missing": ['parquet column "', "missing"],
    r"^speculative selector|^row (model_config|execution|engram|input)": [
        "native AR CUDA data requires the full text autoregressive execution identity"
    ],
    r"kv_seed_regime": ["requires real_kv provenance"],
}
