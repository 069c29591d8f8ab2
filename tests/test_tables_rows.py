"""What a row must be: every rule with the row and column it names, and which fault of several is reported."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest
from table_pairs import AR, AR_ROWS, AR_SIDECAR, PROFILE, ROUND, SIDECAR, refusal, seal, table
from table_pairs import with_row as row

from fpmjax.errors import TableError
from fpmjax.tables.load import load_cells

SHA = "c" * 64


def code_of(path: Path, **options) -> str:
    return refusal(load_cells, path, error=TableError, **options)[0]


ROW_FAULTS = [  # (columns of row 0, code) in the order of the checks
    ({"workload_kind": "Prefill"}, "workload_kind"),
    ({"partition_policy": None}, "partition_policy"),
    ({"backend_version": "0.24.1"}, "row_backend_version"),
    ({"system": None}, "row_system"),
    ({"backend": "sglang"}, "row_backend"),
    ({"latency_ms": math.nan}, "latency"),
    ({"total_kv_read_tokens": 2**32}, "coordinates"),
    ({"total_prefill_tokens": 0}, "prefill_without_tokens"),
    ({"tp": -1}, "identity"),
    ({"enable_eplb": None}, "boolean"),
    ({"execution_profile": "speculative_round_v2:x"}, "selector_profile"),
    ({"moe_backend": ""}, "kernel_backend"),
]


@pytest.mark.parametrize("first", range(len(ROW_FAULTS)))
def test_the_first_failing_check_of_a_row_is_the_one_reported(tmp_path, first):
    values = {name: value for faults, _ in ROW_FAULTS[first:] for name, value in faults.items()}
    path = seal(tmp_path, table(row(0, **values)))
    asked = {name: SIDECAR[name] for name in ("system", "backend", "backend_version")}
    assert code_of(path, **asked) == ROW_FAULTS[first][1]


def test_the_first_bad_row_wins_over_an_earlier_check(tmp_path):
    """The last check fails in row 2, an early one in row 4: row 2 is reported, with its column and value."""
    changes = row(2, moe_backend="") | row(4, workload_kind="x")
    code, message = refusal(load_cells, seal(tmp_path, table(changes)))
    assert code == "kernel_backend" and "FPM row 2 moe_backend" in message


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"batch_size": 0}, "coordinates"),
        ({"batch_size": -1}, "coordinates"),
        ({"batch_size": None}, "coordinates"),
        ({"total_kv_read_tokens": None}, "coordinates"),
        ({"total_prefill_tokens": 1}, "decode_with_tokens"),
        ({"latency_ms": 0.0}, "latency"),
        ({"latency_ms": -1.0}, "latency"),
        ({"latency_ms": math.inf}, "latency"),
        ({"latency_ms": None}, "latency"),
        ({"attention_backend": None}, "kernel_backend"),
        ({"tp": 2**32}, "identity"),
        ({"workload_kind": None}, "workload_kind"),
        ({"execution_profile": PROFILE}, "execution_identity"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_its_row_and_column(tmp_path, values, code):
    found, message = refusal(load_cells, seal(tmp_path, table(row(3, **values))))
    assert found == code and "FPM row 3" in message and next(iter(values)) in message


@pytest.mark.parametrize(
    ("phase", "values"),
    [
        (3, {"total_kv_read_tokens": 0}),
        (3, {"total_kv_read_tokens": 2**32 - 1}),
        (3, {"batch_size": 2**32 - 1}),
        (3, {"latency_ms": 1e-300}),
        (0, {"total_prefill_tokens": 1}),
        (3, {"kv_seed_regime": "made up"}),
        (3, {"model_path": None}),
        (3, {"tp": 0}),
        (3, {"tp": None}),
    ],
    ids=str,
)
def test_an_odd_but_legal_value_is_accepted(tmp_path, phase, values):
    assert sum(len(cell.decode) for cell in load_cells(seal(tmp_path, table(row(phase, **values)))).values()) == 3


def doubled(**changes) -> pa.Table:
    """The good table with a copy of row 0 at its end."""
    data = {name: [*column, column[0]] for name, column in table().to_pydict().items()}
    return table(data | {name: [*data[name][:-1], value] for name, value in changes.items()})


@pytest.mark.parametrize("changes", [{}, {"latency_ms": 99.0}, {"kv_seed_regime": None}], ids=str)
def test_the_same_physical_key_twice_is_a_duplicate(tmp_path, changes):
    code, message = refusal(load_cells, seal(tmp_path, doubled(**changes)))
    assert code == "duplicate_row" and "row 6 repeats row 0" in message


@pytest.mark.parametrize("changes", [{"cell_id": "cell-1"}, {"weight_quantization": "fp8"}], ids=str)
def test_the_same_slot_under_another_name_is_a_collision(tmp_path, changes):
    code, message = refusal(load_cells, seal(tmp_path, doubled(**changes)))
    assert code == "coordinate_collision"
    assert (
        'FPM row 6 collides with an earlier row at the same cell coordinates (phase="prefill", batch_size=1' in message
    )


def test_a_later_duplicate_is_reported_before_an_earlier_collision(tmp_path):
    data = {name: [*column, column[0], column[1]] for name, column in table().to_pydict().items()}
    data["cell_id"][6] = "cell-1"
    code, message = refusal(load_cells, seal(tmp_path, table(data)))
    assert code == "duplicate_row" and "row 7 repeats row 1" in message


def test_a_bad_row_is_reported_before_a_duplicate(tmp_path):
    assert code_of(seal(tmp_path, doubled(latency_ms=-1.0))) == "latency"


# ---- schema 6 and config-bound identities

EXECUTION = ("model_config_sha256", "execution_profile", "engram_residency", "input_modality")


def test_schema_6_ignores_execution_columns(tmp_path):
    old = {"schema_version": 6}
    for changes in (dict.fromkeys(EXECUTION, ...), {"execution_profile": "other", "input_modality": 5}):
        cell = load_cells(seal(tmp_path, table(changes), old)).select(execution_profile="full")
        assert cell.schema_version == 6
    assert code_of(seal(tmp_path, table({"execution_profile": ...}))) == "column_missing"


@pytest.mark.parametrize(
    ("name", "value"),
    [*zip(EXECUTION, (SHA, "decoder_replay", "hbm_tp_sharded", "image"), strict=True), ("input_modality", "")],
)
def test_config_bound_rows_that_read_kv_must_be_real(tmp_path, name, value):
    bound = {name: value}
    load_cells(seal(tmp_path, table(bound)))
    for number, seed in ((2, "n/a"), (3, "fake_fallback"), (5, None)):
        code, message = refusal(load_cells, seal(tmp_path, table(bound | row(number, kv_seed_regime=seed))))
        assert code == "real_kv" and f"FPM row {number}: config-bound cached prefill/decode" in message
    assert code_of(seal(tmp_path, table(bound | {"kv_seed_regime": ...}))) == "real_kv"
    load_cells(seal(tmp_path, table(bound | row(0, kv_seed_regime="fake_fallback"))))


# ---- decode context parallelism


def test_a_missing_dcp_column_is_another_identity_than_one(tmp_path):
    assert load_cells(seal(tmp_path, table())).select().identity.dcp is None
    assert load_cells(seal(tmp_path, table({"dcp": 1}))).select(dcp=1).identity.dcp == 1


@pytest.mark.parametrize(
    ("changes", "selector", "code"),
    [
        ({"dcp": 0, "tp": 2}, None, "dcp"),
        ({"dcp": 3, "tp": 2}, {"dcp": 2}, "dcp"),
        ({"dcp": 1, "tp": None}, None, "dcp"),
        ({"dcp": 1, "tp": 0}, None, "dcp"),
        ({"dcp": [1, 1, None, 1, 1, 1]}, None, "dcp"),
        ({"dcp": -1}, None, "dcp"),
        ({"dcp": 1}, {"dcp": 2}, "dcp_selector"),
        ({}, {"dcp": 1}, "dcp_selector"),
        ({"dcp": 1}, [], "selector"),
        ({"dcp": 1}, {"dcp": 2.0}, "selector"),
    ],
    ids=str,
)
def test_dcp_divides_tp_and_agrees_with_the_selector(tmp_path, changes, selector, code):
    fields = {} if selector is None else {"configuration_selector": selector}
    assert code_of(seal(tmp_path, table(changes, types={"tp": pa.int64()}), fields)) == code


def test_a_selector_that_agrees_is_accepted(tmp_path):
    path = seal(tmp_path, table({"dcp": 2, "tp": 4, "moe_tp": 4}), {"configuration_selector": {"dcp": 2, "x": 1}})
    assert load_cells(path).select().identity.dcp == 2


# ---- native CUDA timings


def ar(**changes) -> pa.Table:
    return table(AR_ROWS | changes)


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({}, True),
        ({"measurement_reduction": "actual_upper_median", "source_sample_count": 2}, True),
        ({"measurement_reduction": "actual_upper_median", "source_sample_count": 1_000_000}, True),
        ({"source_sample_count": 2}, False),
        ({"source_sample_count": 0}, False),
        ({"source_sample_count": None}, False),
        ({"source_sample_count": 1.0}, False),
        ({"measurement_reduction": "actual_upper_median", "source_sample_count": 1}, False),
        ({"measurement_reduction": "actual_upper_median", "source_sample_count": 2**32}, False),
        ({"measurement_reduction": "mean"}, False),
        ({"timing_scope": "scheduler_wall_time"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [AR, ROUND])
def test_the_native_cuda_contract_is_the_same_for_both_policies(tmp_path, policy, changes, accepted):
    rows = {"measurement_policy": policy, "execution_profile": "full" if policy == AR else PROFILE} | changes
    path = seal(tmp_path, ar(**rows), AR_SIDECAR | {"measurement_policy": policy})
    if accepted:
        assert load_cells(path).select().decode.latency_ms.tolist() == [6.0, 7.0, 7.5]
    else:
        assert code_of(path) == "native_cuda_contract"


@pytest.mark.parametrize(
    ("changes", "fields", "code"),
    [
        ({}, {"timing_scope": "scheduler_wall_time"}, "sidecar_timing_scope"),
        ({}, {"timing_scope": ...}, "sidecar_timing_scope"),
        ({}, {"schema_version": 6}, "measurement_policy"),
        ({"backend": "sglang"}, {"backend": "sglang"}, "measurement_policy"),
        ({"measurement_policy": ROUND}, {}, "row_policy"),
        ({"measurement_policy": ...}, {}, "row_policy"),
        ({"measurement_reduction": ...}, {}, "column_missing"),
        ({"model_config_sha256": SHA}, {}, "execution_identity"),
        ({"execution_profile": "decoder_replay"}, {}, "execution_identity"),
        ({"engram_residency": "hbm_tp_sharded"}, {}, "execution_identity"),
        ({"input_modality": "image"}, {}, "execution_identity"),
        ({"execution_profile": PROFILE}, {}, "execution_identity"),
        ({"execution_profile": None}, {}, "execution_identity"),
        ({"kv_seed_regime": ...}, {}, "real_kv"),
        (row(3, kv_seed_regime="fake_fallback"), {}, "real_kv"),
        (row(2, kv_seed_regime="n/a"), {}, "real_kv"),
        (row(2, kv_seed_regime=None), {}, "real_kv"),
    ],
    ids=str,
)
def test_what_the_autoregressive_policy_refuses(tmp_path, changes, fields, code):
    assert code_of(seal(tmp_path, ar(**changes), AR_SIDECAR | fields)) == code


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_autoregressive_policy_has_no_limit_on_tensor_parallelism(tmp_path, tp):
    cell = load_cells(seal(tmp_path, ar(tp=tp, moe_tp=tp, **row(0, kv_seed_regime="n/a")), AR_SIDECAR)).select(tp=tp)
    assert cell.native_ar_only and cell.execution == "autoregressive"


def test_relabelling_is_refused_where_rows_show_it_and_said_where_they_do_not(tmp_path):
    rounds = {"measurement_policy": ROUND, "execution_profile": PROFILE}
    load_cells(seal(tmp_path, ar(**rounds), AR_SIDECAR | {"measurement_policy": ROUND}))
    assert code_of(seal(tmp_path, ar(**rounds | {"measurement_policy": AR}), AR_SIDECAR)) == "execution_identity"
    plain = ar(measurement_policy=ROUND)
    assert code_of(seal(tmp_path, plain, AR_SIDECAR | {"measurement_policy": ROUND})) == "execution_identity"
    wall = load_cells(seal(tmp_path, ar()))
    assert not wall.select().native_ar_only
    assert any("measurement_policy=" + AR in warning for warning in wall.warnings)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"moe_tp": 2, "tp": 4}, "speculative_topology"),
        ({"pp": 2}, "speculative_topology"),
        ({"dp": 2}, "speculative_topology"),
        ({"cp": None}, "speculative_topology"),
        ({"moe_ep": 2}, "speculative_topology"),
        ({"tp": None}, "speculative_topology"),
        ({"tp": 0}, "speculative_topology"),
        ({"enable_wideep": True}, "speculative_topology"),
        ({"enable_eplb": True}, "speculative_topology"),
        ({"engram_residency": "hbm_tp_sharded"}, "speculative_topology"),
        ({"input_modality": None}, "speculative_topology"),
        ({"pp": 2, "dcp": [None, 1, 1, 1, 1, 1]}, "speculative_topology"),
        ({"dcp": [None, 1, 1, 1, 1, 1]}, "dcp"),
        ({"dcp": 3, "tp": 4, "moe_tp": 4}, "speculative_dcp"),
    ],
    ids=str,
)
def test_rounds_are_pure_tensor_parallel_text(tmp_path, changes, code):
    rounds = {"measurement_policy": ROUND, "execution_profile": PROFILE} | changes
    path = seal(
        tmp_path,
        table(AR_ROWS | rounds, {"cp": pa.int64(), "tp": pa.int64()}),
        AR_SIDECAR | {"measurement_policy": ROUND},
    )
    assert code_of(path) == code
