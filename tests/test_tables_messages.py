"""What refusals of tables say, word for word where it counts: the subject, the value, the place and the way out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from table_pairs import AR, AR_ROWS, AR_SIDECAR, IDENTITY, PROFILE, ROUND, ROWS, refusal, seal, table
from table_pairs import with_row as row

from fpmjax.tables.identity import resembling
from fpmjax.tables.load import load_cells
from fpmjax.tables.policy import POLICIES
from fpmjax.tables.write import table_faults, write_table

MEDIAN = "vllm_native_fpm_prefix_seed_median_v1"
MEDIAN_SIDECAR = {"measurement_policy": MEDIAN, "warmup_repeats": 5, "measurement_repeats": 10}
MEDIAN_ROWS = {"measurement_policy": MEDIAN} | dict(POLICIES[MEDIAN].row_constants)
MINIMAL = {name: values for name, values in ROWS.items() if name != "kv_seed_regime"}


def outer(**changes: Any) -> str:
    """A selector with changed values, canonical otherwise; `...` leaves a field out."""
    profile = json.loads(PROFILE.partition(":")[2])
    profile["model_revision"] = changes.pop("model_revision", profile["model_revision"])
    inner = profile["execution_profile"] | changes
    profile["execution_profile"] = {name: value for name, value in inner.items() if value is not ...}
    return "speculative_round_v1:" + json.dumps(profile, ensure_ascii=False, separators=(",", ":"))


# ---- the sidecar


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        (
            {"schema_name": "other"},
            'unsupported FPM schema_name="other" (expected "aic_fpm_forward_perf")',
            "this file describes something else than a whole-forward FPM table",
        ),
        ({"schema_name": ...}, "unsupported FPM schema_name=absent", "this file describes"),
        (
            {"schema_version": "7"},
            'unsupported FPM schema_version="7" (expected 6 or 7, as a number)',
            "collect the table again with a producer of schema 7",
        ),
        (
            {"coordinate_system": None},
            'unsupported FPM coordinate_system=null (expected "iteration_totals_balanced_v1")',
            "rows must be totals over one iteration",
        ),
        ({"measurement_policy": "x"}, 'measurement_policy="x" for schema 7 backend "vllm"', "known policies: dynamo_"),
        (
            {"measurement_policy": MEDIAN, "schema_version": 6},
            f'measurement_policy="{MEDIAN}" for schema 6',
            "this policy exists for schema 7 on backend vllm",
        ),
        (
            MEDIAN_SIDECAR | {"warmup_repeats": 5.0},
            "FPM median sidecar warmup_repeats must be the integer 5, not 5.0",
            f"policy {MEDIAN} fixes this field",
        ),
        (
            {"measurement_policy": AR},
            "native CUDA FPM sidecar requires timing_scope=model_step_cuda, not absent",
            f"policy {AR} fixes this field",
        ),
        ({"system": ""}, 'FPM sidecar system="" must be a non-empty string', "load with the system that the table"),
        (
            {"parquet_sha256": "0"},
            'FPM parquet digest mismatch: sidecar="0" actual="',
            "the pair is inconsistent: an interrupted writer, a swapped file, or an edit after sealing",
        ),
        ({"row_count": 5}, "FPM row_count mismatch: sidecar=5 actual=6", "the sidecar describes another table"),
        (
            {"configuration_selector": 5},
            "FPM configuration_selector must be an object, not 5",
            'write it as {"dcp": 2}, or leave the field out',
        ),
        ({"configuration_selector": {"dcp": 0}}, "FPM selector dcp must be a positive integer, not 0", "write it as"),
    ],
    ids=str,
)
def test_what_is_said_about_a_sidecar(tmp_path, fields, said, hint):
    path = seal(tmp_path, table(), fields)
    message, _, way_out = refusal(load_cells, path)[1].partition("\nhint: ")
    assert message.startswith(said) or said in message
    assert message.endswith((f": {path}", f": {path.with_suffix('.metadata.json')}")) and hint in way_out


def test_another_database_than_asked_for_is_told_with_both_names(tmp_path):
    _, message = refusal(load_cells, seal(tmp_path, table()), system="b200")
    assert 'FPM sidecar system="h200_sxm" does not match the database system "b200"' in message
    assert message.endswith("the table was measured on, or without the argument to take it from the sidecar")


def test_a_sidecar_with_a_byte_order_mark_or_a_repeated_key_says_so(tmp_path):
    path = seal(tmp_path, table())
    for text, said in (("\ufeff{}", "it starts with a byte order mark (BOM)"), ('{"x":1,"x":1}', "key 'x' occurs")):
        path.with_suffix(".metadata.json").write_text(text)
        assert f"is not valid JSON ({said}" in refusal(load_cells, path)[1]


def test_no_rows_are_told(tmp_path):
    code, message = refusal(load_cells, seal(tmp_path, table().slice(0, 0)))
    assert code == "empty" and message.startswith("FPM database contains no rows: ")
    code, message = refusal(write_table, tmp_path, {name: [] for name in MINIMAL}, identity=IDENTITY)
    assert message == "no rows to write\nhint: a table needs at least one measured iteration"


# ---- rows


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        (row(3, workload_kind="Decode"), "FPM row 3 has unknown workload_kind='Decode'", "in lower case"),
        (row(3, partition_policy=None), "FPM row 3 has unsupported partition_policy=null", "evenly split"),
        (row(3, backend="sglang"), "FPM row 3 backend='sglang' does not match the database backend \"vllm\"", "one s"),
        (row(3, latency_ms=-1.0), "FPM row 3 has non-finite/non-positive latency_ms=-1.0", "leave failed measur"),
        (row(3, batch_size=0), "FPM row 3 has invalid workload coordinates: batch_size=0, total_pre", "at least one"),
        (row(0, total_prefill_tokens=0), "FPM row 0 is a prefill point with no prefill tokens (", "newly computed"),
        (row(3, total_prefill_tokens=1), "FPM row 3 is a decode point carrying prefill tokens (", "is 0; its one new"),
        (row(3, tp=-1), "FPM row 3 tp=-1 does not fit in u32", "counts are integers from 0 to 4294967295"),
        (row(3, enable_eplb=None), "FPM row 3 enable_eplb must be a boolean, but is null", "real Parquet booleans"),
        (row(3, moe_backend=""), "FPM row 3 moe_backend must be a non-empty string", 'write "auto"'),
        ({"latency_ms": [1] * 6}, "FPM row 0: column latency_ms must be float64, but is int64", "convert the column"),
        (
            row(3, execution_profile=PROFILE),
            "FPM row 3: speculative-round identity requires the native CUDA measurement policy, and vice versa",
            "relabelling one does not make it the other",
        ),
        ({"dcp": 3}, "FPM row 0 dcp must be positive and divide tp (dcp=3, tp=1)", "splits the tp ranks evenly"),
        (
            row(3, input_modality="image", kv_seed_regime="n/a"),
            "FPM row 3: config-bound cached prefill/decode requires real_kv provenance, but kv_seed_regime='n/a'",
            "mark them kv_seed_regime=real_kv",
        ),
    ],
    ids=str,
)
def test_what_is_said_about_a_row(tmp_path, changes, said, hint):
    path = seal(tmp_path, table(changes))
    message, _, way_out = refusal(load_cells, path)[1].partition("\nhint: ")
    assert message.startswith(said) and message.endswith(f": {path}") and hint in way_out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measurement_policy": "x"}, f"FPM row 0 measurement_policy must match sidecar \"{MEDIAN}\", but is 'x'"),
        ({"warmup_repeats": 4}, "FPM median row 0 warmup_repeats must be the integer 5, but is 4"),
        (
            {"state_protocol": "x"},
            'FPM median row 0 state_protocol must be "glm53flash_prefix_cache_real_seed_v1", but',
        ),
        (row(5, kv_seed_regime="fake_fallback"), "FPM median row 5 cannot use fake_fallback KV state"),
    ],
    ids=str,
)
def test_what_is_said_about_a_row_of_medians(tmp_path, changes, said):
    path = seal(tmp_path, table(MEDIAN_ROWS | changes), MEDIAN_SIDECAR)
    assert refusal(load_cells, path)[1].startswith(said)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("speculative_round_v2:{}", "unsupported speculative_round selector version"),
        ("speculative_round_v1:{", "speculative_round selector must be the JSON object of model_revision, "),
        (outer(draft_revision=...), "speculative_round selector must be the JSON object of model_revision, "),
        (outer(more=1), "speculative_round selector holds an unknown field; its fields are model_revision, "),
        (PROFILE + " ", "speculative_round selector must use canonical serialization"),
        (outer(kind="round"), "execution_profile kind must be speculative_round"),
        (outer(method="mtp"), "unknown variant 'mtp', expected `eagle3`"),
        (outer(num_draft_tokens=6), "num_draft_tokens must be in 1..=5"),
        (outer(num_draft_tokens=True), "num_draft_tokens must be in 1..=5"),
        (outer(draft_model=" x"), "draft_model must be nonblank, trimmed, and contain no control characters"),
        (outer(draft_revision="A" * 40), "draft_revision must be a lowercase 40-hex immutable checkpoint revision"),
        (outer(model_revision="main"), "model_revision must be a lowercase 40-hex immutable checkpoint revision"),
        (outer(timing_scope="execute_model_cuda"), "timing_scope must be model_step_cuda"),
    ],
)
def test_what_is_said_about_a_selector(tmp_path, profile, said):
    rows = AR_ROWS | {"measurement_policy": ROUND, "execution_profile": profile}
    path = seal(tmp_path, table(rows), AR_SIDECAR | {"measurement_policy": ROUND})
    assert refusal(load_cells, path)[1].startswith(f"FPM row 0: invalid FPM execution identity: {said}")


def test_native_rows_are_told_what_they_lack(tmp_path):
    _, message = refusal(load_cells, seal(tmp_path, table(AR_ROWS | {"source_sample_count": 2}), AR_SIDECAR))
    assert (
        "FPM row 0: native CUDA timing/reduction/count contract mismatch (timing_scope='model_step_cuda', m" in message
    )
    assert f"hint: policy {AR} wants timing_scope=model_step_cuda with measurement_reduction=single_sample" in message
    _, message = refusal(load_cells, seal(tmp_path, table(AR_ROWS | {"execution_profile": "x"}), AR_SIDECAR))
    assert 'hint: the identity is ("", "full", "none", "text"); a speculative round has its own policy' in message


def test_rows_that_may_differ_in_policy_have_to_say_which(tmp_path):
    fields = {"measurement_policy": "per_row_single_sample_or_median_of_3"}
    _, message = refusal(load_cells, seal(tmp_path, table(), fields))
    assert message.startswith("FPM per-row measurement policy requires measurement_policy and measurement_repeats col")
    pair = {"measurement_policy": "kvwarm_median_of_3", "measurement_repeats": 2}
    _, message = refusal(load_cells, seal(tmp_path, table(pair), fields))
    assert (
        "FPM row 0 measurement policy/repeats are inconsistent (measurement_policy='kvwarm_median_of_3', m" in message
    )
    assert "hint: legal pairs: dynamo_native_single_sample_v1 with 1, kvwarm_median_of_3 with 3" in message


# ---- files


def test_a_missing_file_is_named_in_full_with_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, message = refusal(load_cells, ".")
    assert message.startswith(f"File does not exist at {tmp_path}/fpm_forward_perf.parquet. No fpm_forward data")
    assert message.endswith(f"{tmp_path} has no Parquet file; a table's default name is fpm_forward_perf.parquet")
    assert refusal(load_cells, "no/where.parquet")[1].endswith(f"hint: there is no folder {tmp_path}/no")


def test_a_file_that_cannot_be_read_says_why(tmp_path, monkeypatch):
    path = seal(tmp_path, table())

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    code, message = refusal(load_cells, path)
    assert code == "unreadable" and message == f"cannot read {path}: Permission denied\nhint: check its permissions"


# ---- writing


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({5: [1] * 6}, "5 is no column name\nhint: column names are text"),
        ({"batch_size": np.ones((6, 1), int)}, 'column "batch_size" has shape (6, 1)\nhint: a column has one axis'),
        ({"batch_size": 1.5}, 'column "batch_size" must be int64, but is float64\nhint: values are stored as they are'),
        ({"batch_size": {}.keys}, 'column "batch_size" is <built-in method keys'),
        (
            {"batch_size": [1, 2]},
            'column "batch_size" has 2 values for 6 rows\nhint: every column has one value per row',
        ),
        (
            {"kv_seed_regimes": "x"},
            'rows hold a column "kv_seed_regimes", which no reader knows\nhint: did you mean kv_s',
        ),
        ({"latency_ms": -1.0}, "FPM row 0 has non-finite/non-positive latency_ms=-1.0: the rows to write\nhint: "),
        ({"total_kv_read_tokens": 0, "batch_size": 1}, "FPM database contains a duplicate physical row key: row 2 rep"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_what_is_said_about_rows_in_memory_names_no_file(tmp_path, changes, said):
    _, message = refusal(write_table, tmp_path, MINIMAL | changes, identity=IDENTITY)
    assert message.startswith(said) and str(tmp_path) not in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"policy": "x"},
            "unsupported FPM measurement_policy='x'\nhint: known policies: dynamo_native_single_sample_v1",
        ),
        ({"schema_version": 5}, "unsupported FPM schema_version=5\nhint: write schema 7, or 6 for older readers"),
        ({"policy": AR}, f'rows lack the column "measurement_reduction"\nhint: policy {AR} needs'),
        (
            {"identity": IDENTITY | {"tpp": 1}},
            "an identity has no field 'tpp'\nhint: did you mean tp? the fields are mo",
        ),
        ({"identity": IDENTITY | {"system": ""}}, 'FPM sidecar system="" must be a non-empty string: the sidecar to w'),
        (
            {"sidecar": {"row_count": 7}},
            "sidecar field row_count=7 contradicts 6, which follows from the rows\nhint: l",
        ),
        (
            {"sidecar": {"x": object()}},
            "sidecar fields are not JSON: Object of type object is not JSON serializable\nhi",
        ),
        (
            {"identity": IDENTITY | {"input_modality": "image"}, "schema_version": 6},
            "schema 6 has no column input_modality, and reads it as 'text'\nhint: write schema 7",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_what_is_said_about_options_of_writing(tmp_path, options, said):
    _, message = refusal(write_table, tmp_path, MINIMAL, **({"identity": IDENTITY} | options))
    assert message.startswith(said) and str(tmp_path) not in message


def test_a_table_in_which_a_name_occurs_twice_is_refused_by_that_name(tmp_path):
    twice = pa.table([pa.array([1]), pa.array([2])], names=["batch_size", "batch_size"])
    _, message = refusal(write_table, tmp_path, twice, identity=IDENTITY)
    assert message == 'rows hold "batch_size" more than once\nhint: keep one'


def test_what_is_said_where_a_table_cannot_be_put(tmp_path):
    (tmp_path / "file").write_text("x")
    _, message = refusal(write_table, tmp_path / "file", MINIMAL, identity=IDENTITY)
    assert message.startswith(f"cannot write {tmp_path}/file/") and message.endswith("hint: nothing was changed")


def test_a_missing_column_names_the_one_that_may_be_it(tmp_path):
    rows = {{"batch_size": "batch"}.get(name, name): values for name, values in MINIMAL.items()}
    _, message = refusal(write_table, tmp_path, rows, identity=IDENTITY)
    assert message == 'rows lack the column "batch_size"\nhint: did you mean batch to be it?'


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("batch", ["batch_size", "tp"], ["batch_size"]),
        ("KV", ["total_kv_read_tokens", "kv_seed_regime", "tp"], ["total_kv_read_tokens", "kv_seed_regime"]),
        ("latency_us", ["latency_ms", "tp"], ["latency_ms"]),
        ("colour", ["latency_ms", "tp"], []),
    ],
)
def test_names_resemble_by_their_words_or_their_spelling(name, known, found):
    assert resembling(name, known) == found


# ---- all bad rows


def test_a_bad_row_is_nobodys_duplicate():
    rows = {name: [*values, values[3], values[4], values[4]] for name, values in MINIMAL.items()}
    rows["latency_ms"] = [10.0, 20.0, 12.0, -6.0, 7.0, 7.5, 6.0, 7.1, -7.1]
    faults = table_faults(rows | {"remark": "x"}, identity=IDENTITY)
    assert [(number, code) for number, code, _ in faults] == [(3, "latency"), (7, "duplicate_row"), (8, "latency")]
    assert "row 7 repeats row 4" in faults[1][2]


def test_where_every_row_is_bad_none_is_a_duplicate():
    faults = table_faults(MINIMAL | {"latency_ms": -1.0, "batch_size": 1}, identity=IDENTITY)
    assert [code for _, code, _ in faults] == ["latency"] * 6


# ---- fabricated KV


def test_rows_that_could_not_be_healed_are_told(tmp_path):
    fake = row(5, kv_seed_regime="fake_fallback") | row(3, batch_size=8, total_kv_read_tokens=2048)
    fake["kv_seed_regime"][2] = "fake_fallback"
    (warning, *_) = load_cells(seal(tmp_path, table(fake)), fake_kv="heal").warnings
    told = "1 healed, 1 kept, which could not be healed"
    assert warning == f"2 of 6 rows were measured on fake_fallback KV: {told}"
