"""Writing a table artifact: what goes in comes out, bad rows never reach the disk, and no half pair is left."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_pairs import AR, AR_ROWS, IDENTITY, NAME, PROFILE, ROUND, ROWS, identity, refusal

from fpmjax.errors import TableError
from fpmjax.tables.load import load_cells
from fpmjax.tables.policy import POLICIES, SINGLE_SAMPLE
from fpmjax.tables.write import table_faults, write_table


class Odd:
    """What no column holds; its name is the same in every process."""

    def __repr__(self) -> str:
        return "ODD"


ODD = Odd()
SEAL = NAME.replace(".parquet", ".metadata.json")
MINIMAL = {name: values for name, values in ROWS.items() if name != "kv_seed_regime"}


def write(folder: Path, rows: Any = None, **options: Any) -> Path:
    options = {"identity": IDENTITY} | options
    return write_table(folder, MINIMAL if rows is None else rows, **options)


def code_of(folder: Path, rows: Any = None, **options: Any) -> str:
    """The code of the refusal, after which the folder is as it was."""
    before = contents(folder)
    code, _ = refusal(write, folder, rows, error=TableError, **options)
    assert contents(folder) == before
    return code


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


# ---- what goes in comes out


def test_minimal_rows_and_an_identity_make_a_table(tmp_path):
    path = write(tmp_path / "new" / "folder", sidecar={"timing_boundary": "schedule_to_update"})
    assert path == tmp_path / "new" / "folder" / NAME
    assert sorted(contents(path.parent)) == [SEAL, NAME]
    cells = load_cells(path)
    assert cells.sidecar["timing_boundary"] == "schedule_to_update" and cells.warnings == ()
    cell = cells[identity()]
    assert cell.decode.latency_ms.tolist() == [6.0, 7.0, 7.5] and cell.cell_ids == ("cell-0",)
    assert next(iter(json.loads((path.parent / SEAL).read_text()))) == "schema_name"


def test_the_file_holds_zstd_int64_and_float64(tmp_path):
    path = write(tmp_path, MINIMAL | {"batch_size": np.array([1, 1, 1, 4, 8, 8], np.uint8), "latency_ms": 5})
    file = pq.ParquetFile(path)
    assert {file.metadata.row_group(0).column(i).compression for i in range(file.metadata.num_columns)} == {"ZSTD"}
    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert types["batch_size"] == types["tp"] == "int64" and types["latency_ms"] == "double"
    assert types["enable_wideep"] == "bool" and types["model_path"] == "string"


def test_rows_may_be_an_arrow_table_an_identity_or_mixed_arrays(tmp_path):
    rows: dict[str, Any] = dict(MINIMAL)
    kind = pa.array(rows["workload_kind"]).dictionary_encode()
    forms = [
        pa.table(rows),
        pa.table(rows | {"workload_kind": kind, "batch_size": pa.array(rows["batch_size"], pa.uint16())}),
        {name: np.array(values) for name, values in rows.items()},
        {name: tuple(values) for name, values in rows.items()},
        {name: np.array(values, object) for name, values in rows.items()},
        rows | {"workload_kind": pa.chunked_array([kind])},
    ]
    digests = {load_cells(write(tmp_path / str(i), form)).digest for i, form in enumerate(forms)}
    assert len(digests) == 1, "the same rows are the same bytes"
    same = write(tmp_path / "identity", rows, identity=identity())
    assert load_cells(same).digest in digests


def test_identity_columns_of_the_rows_make_several_cells(tmp_path):
    tp = [1, 2, 1, 2, 1, 2]
    partial = {name: value for name, value in IDENTITY.items() if name not in ("tp", "moe_tp")}
    cells = load_cells(write(tmp_path, MINIMAL | {"tp": tp, "moe_tp": tp, "cell_id": list("abcdef")}, identity=partial))
    assert [found.tp for found in cells] == [1, 2]
    assert cells.select(tp=2).cell_ids == ("b", "d", "f")


def test_identities_may_use_column_names_and_carry_a_dcp(tmp_path):
    named = {"model_path" if name == "model" else name: value for name, value in IDENTITY.items()}
    path = write(tmp_path, identity=named | {"dcp": 1}, sidecar={"configuration_selector": {"dcp": 1}})
    assert load_cells(path).select().identity == identity(dcp=1)


def test_other_columns_are_kept(tmp_path):
    path = write(tmp_path, MINIMAL | {"source_plan_sha256": "0" * 64, "run": np.arange(6.0)})
    assert pq.read_table(path)["run"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_schema_6_has_no_execution_columns(tmp_path):
    path = write(tmp_path, schema_version=6)
    assert "execution_profile" not in pq.read_schema(path).names
    assert load_cells(path).select().identity == identity()
    other = identity(model_config_sha256="c" * 64)
    assert code_of(tmp_path / "x", identity=other, schema_version=6) == "schema_version"
    assert code_of(tmp_path / "x", MINIMAL | {"input_modality": ["text"] * 5 + ["image"]}, schema_version=6)
    again = write(tmp_path / "y", MINIMAL | {"input_modality": "text"}, schema_version=6)
    assert load_cells(again).digest == load_cells(path).digest


POLICY_ROWS = {
    "per_row_single_sample_or_median_of_3": {
        "measurement_policy": [SINGLE_SAMPLE] * 3 + ["kvwarm_median_of_3"] * 3,
        "measurement_repeats": [1, 1, 1, 3, 3, 3],
    },
    "per_row_single_sample_or_full_grid_median_v1": {
        "measurement_policy": "independent_full_grid_median_of_3",
        "measurement_repeats": 3,
    },
    AR: {"measurement_reduction": "actual_upper_median", "source_sample_count": 3, **ROWS},
    ROUND: {"measurement_reduction": "single_sample", "source_sample_count": 1, "execution_profile": PROFILE, **ROWS},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_written_with_its_constants_filled_in(tmp_path, policy):
    backend = POLICIES[policy].backend or "vllm"
    path = write(
        tmp_path, MINIMAL | POLICY_ROWS.get(policy, {}), identity=IDENTITY | {"backend": backend}, policy=policy
    )
    cells = load_cells(path)
    assert cells.policy == policy and cells.select().decode.latency_ms.tolist() == [6.0, 7.0, 7.5]


@pytest.mark.parametrize(
    ("policy", "missing", "hint"),
    [
        ("per_row_single_sample_or_median_of_3", "measurement_policy", "kvwarm_median_of_3 with 3"),
        (AR, "source_sample_count", "actual_upper_median"),
        (ROUND, "measurement_reduction", "single_sample"),
    ],
)
def test_what_a_policy_leaves_open_has_to_be_said(tmp_path, policy, missing, hint):
    rows = {name: values for name, values in (MINIMAL | POLICY_ROWS[policy]).items() if name != missing}
    code, message = refusal(write, tmp_path, rows, policy=policy)
    assert code == "column_missing" and f'"{missing}"' in message and hint in message.split("hint: ")[1]


def test_provenance_of_native_timings_is_never_assumed(tmp_path):
    rows = MINIMAL | {"measurement_reduction": "single_sample", "source_sample_count": 1}
    code, message = refusal(write, tmp_path, rows, policy=AR)
    assert code == "real_kv" and "kv_seed_regime=real_kv" in message.split("hint: ")[1]
    uncached = {name: values[:2] for name, values in MINIMAL.items()}
    write(tmp_path, uncached | {"measurement_reduction": "single_sample", "source_sample_count": 1}, policy=AR)


latencies = st.floats(min_value=5e-324, max_value=1.7e308, allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**32 - 1)
points = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 2**32 - 1), st.just(0), counts),
    st.tuples(st.just("prefill"), st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), counts),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=40)
@given(st.dictionaries(st.tuples(points, st.sampled_from([1, 2])), latencies, min_size=1, max_size=12))
def test_every_table_comes_back_with_its_bits(scratch, measured):
    rows = [(*point, tp, latency) for (point, tp), latency in measured.items()]
    names = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "tp", "latency_ms")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    cells = load_cells(write(scratch, columns, overwrite=True))
    found = {
        ((phase, batch, tokens, kv), key.tp): latency
        for key, cell in cells.items()
        for phase, p in (("decode", cell.decode), ("prefill", cell.prefill))
        for batch, tokens, kv, latency in zip(*(a.tolist() for a in vars(p).values() if a is not p.row), strict=True)
    }
    assert found == measured
    for cell in cells.values():
        for p in (cell.decode, cell.prefill):
            assert [rows[i][-1] for i in p.row] == p.latency_ms.tolist()


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"latency_ms": [1.0, math.nan, 1.0, 1.0, 1.0, 1.0]}, "latency"),
        ({"latency_ms": [1.0, -1.0, 1.0, 1.0, 1.0, 1.0]}, "latency"),
        ({"latency_ms": [1.0, None, 1.0, 1.0, 1.0, 1.0]}, "latency"),
        ({"latency_ms": ["1.0"] * 6}, "column_type"),
        ({"latency_ms": 2**60 + 1}, "column_type"),
        ({"batch_size": [1.0] * 6}, "column_type"),
        ({"batch_size": [True] * 6}, "column_type"),
        ({"batch_size": np.array([True] * 6)}, "column_type"),
        ({"batch_size": np.ones(6)}, "column_type"),
        ({"batch_size": [1, True, 1, 4, 8, 8]}, "column_type"),
        ({"batch_size": [2**70] * 6}, "column_type"),
        ({"batch_size": np.full(6, 2**64 - 1, np.uint64)}, "column_type"),
        ({"batch_size": "1"}, "column_type"),
        ({"batch_size": [None, 1, 1, 4, 8, 8]}, "coordinates"),
        ({"batch_size": -1}, "coordinates"),
        ({"batch_size": 0}, "coordinates"),
        ({"batch_size": 2**32}, "coordinates"),
        ({"batch_size": [1, 2]}, "row_lengths"),
        ({"batch_size": []}, "row_lengths"),
        ({"batch_size": np.ones((6, 1), int)}, "row_lengths"),
        ({"batch_size": ODD}, "column_type"),
        ({"enable_wideep": 0}, "column_type"),
        ({"enable_wideep": [True, None, True, True, True, True]}, "boolean"),
        ({"workload_kind": [1] * 6}, "column_type"),
        ({"workload_kind": [b"decode"] * 6}, "column_type"),
        ({"workload_kind": "Decode"}, "workload_kind"),
        ({"total_prefill_tokens": 7}, "decode_with_tokens"),
        ({"total_kv_read_tokens": 0, "batch_size": [1, 1, 2, 8, 8, 9]}, "duplicate_row"),
        ({"partition_policy": "uneven"}, "partition_policy"),
        ({"system": ["h200_sxm"] * 5 + ["b200"]}, "row_system"),
        ({"model": "acme/other"}, "column_unknown"),
        ({"kv_seed_regimes": "real_kv"}, "column_unknown"),
        ({5: [1] * 6}, "column_unknown"),
        ({"notes": [ODD] * 6}, "column_type"),
    ],
    ids=str,
)
def test_bad_rows_never_reach_the_disk(tmp_path, changes, code):
    assert code_of(tmp_path, MINIMAL | changes) == code


@pytest.mark.parametrize("name", MINIMAL)
def test_a_row_needs_its_five_columns(tmp_path, name):
    rows = {column: values for column, values in MINIMAL.items() if column != name}
    assert code_of(tmp_path, rows) == "column_missing"
    code, message = refusal(write, tmp_path, rows | {name[:-1]: MINIMAL[name]})
    assert code == "column_unknown" and message.endswith(f"did you mean {name}?")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"policy": "wall"}, "measurement_policy"),
        ({"policy": AR, "schema_version": 6}, "column_missing"),
        ({"policy": "vllm_native_fpm_prefix_seed_median_v1", "schema_version": 6}, "measurement_policy"),
        ({"policy": "sglang_native_fpm_radix_seed_median_v1"}, "measurement_policy"),
        ({"schema_version": 5}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"identity": {"model": "acme/small"}}, "column_missing"),
        ({"identity": IDENTITY | {"gpu": "h200"}}, "identity"),
        ({"identity": IDENTITY | {"tp": "1"}}, "column_type"),
        ({"identity": IDENTITY | {"tp": True}}, "column_type"),
        ({"identity": IDENTITY | {"system": None}}, "system"),
        ({"identity": IDENTITY | {"moe_backend": ""}}, "kernel_backend"),
        ({"identity": IDENTITY | {"execution_profile": PROFILE}}, "execution_identity"),
        ({"sidecar": {"row_count": 7}}, "sidecar_conflict"),
        ({"sidecar": {"backend": "sglang"}}, "sidecar_conflict"),
        ({"sidecar": {"configuration_selector": {"dcp": 2}}}, "dcp_selector"),
        ({"sidecar": {"when": ODD}}, "sidecar_json"),
        ({"sidecar": {"ratio": math.nan}}, "sidecar_json"),
    ],
    ids=str,
)
def test_bad_options_never_reach_the_disk(tmp_path, options, code):
    assert code_of(tmp_path / "new", **options) == code
    assert not (tmp_path / "new").exists()


def test_no_rows_are_no_table(tmp_path):
    assert code_of(tmp_path, {name: [] for name in MINIMAL}) == "empty"
    assert code_of(tmp_path, pa.table(MINIMAL).slice(0, 0)) == "empty"
    for rows in ([1, 2], "rows", 5):
        with pytest.raises(TypeError):
            write(tmp_path, rows)
    with pytest.raises(TypeError):
        write(tmp_path, identity="acme/small")
    twice = pa.table([pa.array([1]), pa.array([2])], names=["batch_size", "batch_size"])
    assert code_of(tmp_path, twice) == "column_duplicate"


def test_a_native_row_is_never_healed_into_a_table(tmp_path):
    rows = AR_ROWS | ROWS | {"kv_seed_regime": ["n/a", "n/a", "real_kv", "real_kv", "real_kv", "fake_fallback"]}
    assert code_of(tmp_path, rows, policy=AR) == "real_kv"


def test_every_bad_row_can_be_listed(tmp_path):
    rows = {name: list(values) for name, values in MINIMAL.items()}
    rows["latency_ms"][1], rows["workload_kind"][4], rows["batch_size"][4] = -1.0, "x", 0
    rows = {name: [*values, values[0]] for name, values in rows.items()}
    faults = table_faults(rows, identity=IDENTITY)
    assert [(row, code) for row, code, _ in faults] == [(1, "latency"), (4, "workload_kind"), (6, "duplicate_row")]
    assert refusal(write, tmp_path, rows)[0] == faults[0][1]
    assert table_faults(MINIMAL, identity=IDENTITY) == []
    assert table_faults({name: [] for name in MINIMAL}, identity=IDENTITY) == []


# ---- both files or neither


def test_an_existing_pair_is_kept_unless_asked(tmp_path):
    write(tmp_path)
    assert code_of(tmp_path) == "exists"
    (tmp_path / NAME).unlink()
    assert code_of(tmp_path) == "exists", "half a pair is somebody's too"
    write(tmp_path, MINIMAL | {"latency_ms": 3.0}, overwrite=True)
    assert load_cells(tmp_path).select().decode.latency_ms.tolist() == [3.0, 3.0, 3.0]
    assert sorted(contents(tmp_path)) == [SEAL, NAME]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("step", range(5))
def test_a_failure_at_any_step_leaves_what_was_there(tmp_path, monkeypatch, existing, step):
    """Steps: sync of either file, rename of either file, and an interrupt in place of an error."""
    if existing:
        write(tmp_path)
    name, nth, error = [
        ("fsync", 1, OSError(28, "No space left on device")),
        ("fsync", 2, OSError(5, "Input/output error")),
        ("replace", 1, OSError(13, "Permission denied")),
        ("replace", 2, OSError(13, "Permission denied")),
        ("replace", 2, KeyboardInterrupt()),
    ][step]
    real, calls = getattr(os, name), []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == nth:
            raise error
        return real(*args, **options)

    before = contents(tmp_path)
    monkeypatch.setattr(os, name, failing)
    if isinstance(error, OSError):
        code, message = refusal(write, tmp_path, MINIMAL | {"latency_ms": 3.0}, overwrite=True)
        assert code == "unwritable" and str(error.strerror) in message
    else:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, MINIMAL | {"latency_ms": 3.0}, overwrite=True)
    assert contents(tmp_path) == before


def test_between_the_two_renames_the_pair_is_refused(tmp_path, monkeypatch):
    write(tmp_path)
    seen, real, links = [], os.replace, os.link

    def spying(source, target):
        real(source, target)
        seen.append((Path(target).name, refusal_or_latency(tmp_path)))

    monkeypatch.setattr(os, "replace", spying)
    write(tmp_path, MINIMAL | {"latency_ms": 3.0}, overwrite=True)
    assert seen == [(NAME, "digest"), (SEAL, 3.0)]
    seen.clear()
    monkeypatch.setattr(os, "link", lambda *pair: links(*pair) or seen.append((Path(pair[1]).name, None)))
    write(tmp_path / "fresh", MINIMAL)
    assert [name for name, _ in seen] == [NAME, SEAL]


def refusal_or_latency(folder: Path) -> str | float:
    try:
        return float(load_cells(folder).select().decode.latency_ms[0])
    except TableError as error:
        return error.code


def test_a_file_system_without_hard_links_is_served(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(95, "Operation not supported")

    write(tmp_path)
    monkeypatch.setattr(os, "link", no_links)
    write(tmp_path, MINIMAL | {"latency_ms": 3.0}, overwrite=True)
    assert refusal_or_latency(tmp_path) == 3.0 and sorted(contents(tmp_path)) == [SEAL, NAME]


def test_a_place_that_cannot_hold_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    assert refusal(write, tmp_path / "file", error=TableError)[0] == "unwritable"
    assert refusal(write, tmp_path / "file" / "deeper", error=TableError)[0] == "unwritable"


def test_a_folder_that_cannot_be_synced_still_holds_a_whole_pair(tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def third_fails(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(22, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", third_fails)
    assert load_cells(write(tmp_path)).select().identity == identity() and len(calls) == 3
