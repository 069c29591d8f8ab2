"""The embedded table is its sources: every row, to the last bit, and nothing else."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from fpmjax.data import build, embedded_table


def source_rows(phase):
    """(tp, requests, new tokens in all, past KV in all, ms) of a source file, read without the build's own code."""
    with gzip.open(build.SOURCES[phase], "rt", newline="") as file:
        for row in csv.DictReader(file):
            requests = int(row["batch_size"])
            new = requests * int(row["new_tokens_per_request"]) if phase == "prefill" else 0
            yield int(row["tp"]), requests, new, requests * int(row["past_kv_per_request"]), float(row["latency_ms"])


def table_rows(cells, phase):
    for identity, cell in cells.items():
        points = getattr(cell, phase)
        for b, t, k, ms in zip(points.batch, points.tokens, points.kv, points.latency_ms, strict=True):
            yield identity.tp, int(b), int(t), int(k), float(ms)


@pytest.mark.smoke
def test_every_decode_row_of_the_sources_is_there_exactly(embedded_cells):
    assert Counter(table_rows(embedded_cells, "decode")) == Counter(source_rows("decode"))


@pytest.mark.smoke
def test_prefill_rows_are_those_of_at_most_one_step_exactly(embedded_cells):
    one_step = [row for row in source_rows("prefill") if row[2] <= 2048]
    assert Counter(table_rows(embedded_cells, "prefill")) == Counter(one_step)


def test_the_counts_of_rows_read_and_left_out_are_told(embedded_path):
    sidecar = json.loads(embedded_path.with_suffix(".metadata.json").read_text())
    counts = {entry["file"].split("_")[3]: (entry["rows"], entry["rows_left_out"]) for entry in sidecar["sources"]}
    assert counts == {"decode": (299, 0), "prefill": (294, 63)}
    assert sidecar["row_count"] == 299 + 294 - 63


def test_identity_and_clock_are_stated(embedded_cells, embedded_path):
    assert sorted(identity.tp for identity in embedded_cells) == [1, 2, 4]
    for identity in embedded_cells:
        assert (identity.model, identity.system, identity.backend) == ("Qwen/Qwen3-32B", "b300_sxm", "vllm")
        assert (identity.backend_version, identity.moe_tp, identity.comm_quant_mode) == ("0.20.1", identity.tp, "half")
    assert embedded_cells.policy == "dynamo_native_single_sample_v1"
    sidecar = json.loads(embedded_path.with_suffix(".metadata.json").read_text())
    assert sidecar["timing_boundary"] == "schedule_to_update"


def test_the_build_is_reproducible(tmp_path):
    """Same bytes under the Parquet writer that made the shipped file, the same rows under any other."""
    fresh, shipped = build.build(tmp_path)[0], embedded_table()
    assert pq.read_table(fresh).equals(pq.read_table(shipped), check_metadata=True)
    sidecars = [path.with_suffix(".metadata.json").read_bytes() for path in (fresh, shipped)]
    digests = [json.loads(sidecar)["parquet_sha256"].encode() for sidecar in sidecars]
    assert sidecars[0].replace(*digests) == sidecars[1], "to the byte, the order of the fields included"
    if pq.read_metadata(fresh).created_by == pq.read_metadata(shipped).created_by:
        assert fresh.read_bytes() == shipped.read_bytes() and digests[0] == digests[1]


def test_a_source_row_of_another_deployment_stops_the_build(tmp_path, monkeypatch):
    text = gzip.decompress(build.SOURCES["decode"].read_bytes()).decode().replace("schedule_to_update", "other", 1)
    changed = tmp_path / "changed.csv.gz"
    changed.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setitem(build.SOURCES, "decode", changed)
    with pytest.raises(SystemExit, match=r"changed.csv.gz, line 2: .*latency_source"):
        build.build(tmp_path)


@pytest.mark.smoke
def test_recorded_points_come_back_to_the_last_bit(embedded_cell):
    import fpmjax

    model = fpmjax.direct(embedded_cell)
    decode, prefill = embedded_cell.decode, embedded_cell.prefill
    answers = fpmjax.estimate(model, fpmjax.Work.decode(decode.batch, decode.kv))
    np.testing.assert_array_equal(answers.latency_ms, decode.latency_ms)
    answers = fpmjax.estimate(model, fpmjax.Work.prefill(prefill.batch, prefill.tokens, prefill.kv))
    np.testing.assert_array_equal(answers.latency_ms, prefill.latency_ms)


@pytest.mark.smoke
def test_a_draft_length_scales_the_widened_pass_once(embedded_cell):
    import fpmjax

    model = fpmjax.direct(embedded_cell)
    rounds = fpmjax.estimate(model, fpmjax.Work.decode(8, 8192), draft_length=[1, 2, 3, 4])
    plain = fpmjax.estimate(model, fpmjax.Work.decode([16, 24, 32, 40], 8192))
    np.testing.assert_array_equal(rounds.scaling_factor, [1.33, 1.41, 1.49, 1.57])
    np.testing.assert_array_equal(rounds.latency_ms, rounds.scaling_factor * plain.latency_ms)
