"""Models in files: every bit comes back, and no bad file gets past the checks."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from asking import Wrapped, decode
from small_tables import cell_of, surface
from streams import decode_stream, random_stream
from table_pairs import refusal

import fpmjax
from fpmjax.errors import ModelFileError
from fpmjax.estimate import estimate
from fpmjax.facade import ForwardPassPerfModel
from fpmjax.model_file import DIGEST, MANIFEST, array_of, npy, read_members, write_members
from fpmjax.models.corrected import corrected
from fpmjax.models.direct import direct
from fpmjax.models.regression import regression, stack
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.observe.observations import Observations
from fpmjax.store import digest_of, load_model, save_model
from fpmjax.work import Work

TABLE = direct(cell_of([*surface([1, 2, 4, 8], [0, 1024, 4096]), ("prefill", 1, 64, 0, 2.0)], cell_ids=("a", "b")))
OBSERVED = decode_stream(1, 60)
MIXED = Observations.from_metrics(random_stream(2, 50, "aggregated", 2, lists=True))
SEEN = Observations.of(Work.decode([1, 2, 4, 8, 2], [1024] * 5), [2.5, 4.0, 6.0, 11.0, 3.3])
WORK = Work.decode([[1], [3]], [[100, 1024, 4096]])
MODELS = {
    "table": TABLE,
    "table at verify_width 2": direct(TABLE.cell, verify_width=2),
    "table with other latencies": TABLE.with_latencies(np.arange(13.0)),
    "cold regression": regression(role="decode"),
    "regression": regression(OBSERVED, role="decode", max_observations=20),
    "aggregated catalogue": regression(
        MIXED,
        role="aggregated",
        feature_axes=("n", "maxP", "attention"),
        sampling_axes=("moe",),
        bins_per_axis=(3,),
        non_negative=False,
    ),
    "lazy": regression(OBSERVED, role="decode", lazy=ErrorThreshold(0.1, 0.2, 5, 2, 3)),
    "spline": regression(OBSERVED, role="decode", spline=Knots(3)),
    "fixed": corrected(TABLE, SEEN),
    "hybrid": corrected(TABLE, SEEN, policy="hybrid", bins=(2, 3)),
    "disabled": corrected(TABLE, SEEN, enabled=False),
    "corrected regression": corrected(regression(OBSERVED, role="decode"), SEEN, policy="dynamic_local"),
}


@pytest.fixture(params=["npz", "parquet"])
def path(request, tmp_path) -> Path:
    return tmp_path / f"model.{request.param}"


@pytest.fixture
def npz(tmp_path) -> Path:
    return tmp_path / "model.npz"


def same(a: Any, b: Any) -> None:
    """Equal structure, static options, dtypes, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (np.asarray(x).dtype, np.shape(x)) == (np.asarray(y).dtype, np.shape(y))
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_every_bit_comes_back(name, path):
    model = MODELS[name]
    save_model(model, path)
    again = load_model(path)
    assert type(again) is type(model)
    same(model, again)
    for evidence in (False, True):
        same(
            estimate(model, WORK, check=False, evidence=evidence),
            estimate(again, WORK, check=False, evidence=evidence),
        )
    if hasattr(model, "update"):
        more = MIXED if name == "aggregated catalogue" else SEEN
        same(model.update(more), again.update(more))


def test_a_stack_of_models_comes_back(path):
    models = stack([regression(decode_stream(seed, 20), role="decode") for seed in range(3)])
    save_model(models, path)
    same(models, load_model(path))
    tables = jax.tree.map(lambda x: np.stack([x, x]), TABLE)
    save_model(tables, path)
    same(tables, load_model(path))


def test_arrays_of_the_device_are_saved_as_they_are(path):
    with fpmjax.x64():
        save_model(jax.tree.map(jax.numpy.asarray, MODELS["regression"]), path)
    same(MODELS["regression"], load_model(path))


def test_extreme_numbers_come_back(path):
    ms = np.array(TABLE.decode.knots.ms)
    ms[:5] = [np.nan, np.inf, -0.0, 5e-324, np.pi]
    model = replace(TABLE, decode=replace(TABLE.decode, knots=replace(TABLE.decode.knots, ms=ms, checked=True)))
    save_model(model, path)
    assert load_model(path).decode.knots.ms.tobytes() == ms.tobytes()


def test_the_table_behind_a_model_comes_back(path):
    for model in (TABLE, MODELS["fixed"]):
        save_model(model, path)
        cell = load_model(path).cell
        assert (cell.identity, cell.cell_ids, cell.policy) == (TABLE.cell.identity, ("a", "b"), TABLE.cell.policy)
        assert cell.decode.latency_ms.tobytes() == TABLE.cell.decode.latency_ms.tobytes()
    facade = ForwardPassPerfModel(direct(cell), collect_coverage=True)
    assert facade.estimate_forward_pass_time_ms(decode(4, 1024)) == 5.0


def test_the_file_is_an_ordinary_npz_without_objects(npz):
    save_model(TABLE, npz)
    with np.load(npz, allow_pickle=False) as arrays:
        manifest = json.loads(arrays["manifest"].tobytes())
        assert len(arrays.files) == len(manifest["arrays"]) + 2
        assert [arrays[f"a{i}"].dtype.str for i in range(len(manifest["arrays"]))] == [
            a["dtype"] for a in manifest["arrays"]
        ]
    assert (manifest["format"], manifest["version"], manifest["kind"]) == ("fpmjax model", 1, "Direct")
    assert manifest["package"] == fpmjax.__version__


def test_equal_models_make_equal_files(tmp_path):
    for name in ("a", "b"):
        save_model(MODELS["hybrid"], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_is_replaced_whole_or_not_at_all(path, monkeypatch):
    save_model(TABLE, path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, message = refusal(save_model, MODELS["regression"], path, error=ModelFileError)
    assert code == "unwritable" and "No space left" in message
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_only_models_are_saved(path):
    for value in (Wrapped(TABLE), WORK, SEEN, {"a": 1}, None, TABLE.decode, corrected(Wrapped(TABLE)), 1.5, (TABLE,)):
        assert refusal(save_model, value, path, error=ModelFileError)[0] == "kind"
    halves = jax.tree.map(lambda x: np.asarray(x, np.float32), TABLE)
    assert refusal(save_model, halves, path, error=ModelFileError)[0] == "kind"
    assert not path.exists()
    assert refusal(save_model, TABLE, path.parent / "no" / "such", error=ModelFileError)[0] == "unwritable"


# Bad files


def archive(path: Path, parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in parts.items():
            file.writestr(name, data)


def forge(path: Path, change: Any) -> None:
    """Change the manifest and the arrays, and seal them again with a right digest."""
    parts = read_members(path)
    manifest = json.loads(array_of(parts[MANIFEST]).tobytes())
    arrays = {name: array_of(data) for name, data in parts.items() if name not in (MANIFEST, DIGEST)}
    manifest = change(manifest, arrays) or manifest
    manifest_text = np.frombuffer(json.dumps(manifest).encode(), np.uint8)
    parts = {MANIFEST: npy(manifest_text), **{name: npy(array) for name, array in arrays.items()}}
    write_members(path, parts | {DIGEST: npy(np.frombuffer(digest_of(parts.values()), np.uint8))})


def load_refused(path: Path) -> str:
    return refusal(load_model, path, error=ModelFileError)[0]


def test_a_file_that_is_not_there(path):
    assert load_refused(path) == "unreadable"
    assert load_refused(path.parent) == "unreadable"


def test_a_cut_file_is_refused_wherever_it_is_cut(path):
    save_model(MODELS["regression"], path)
    data = path.read_bytes()
    for length in {*range(0, len(data), 997), *range(len(data) - 40, len(data))}:
        path.write_bytes(data[:length])
        assert load_refused(path) == "not_a_model"


def test_no_flipped_byte_goes_unnoticed(path):
    save_model(MODELS["regression"], path)
    data = path.read_bytes()
    want = load_model(path)
    for i in range(7, len(data), 101):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :])
        try:
            again = load_model(path)  # a byte that no reader looks at, such as the time stamp of a member
        except ModelFileError:
            continue
        same(want, again)


def test_foreign_files_are_refused(npz):
    npz.write_bytes(b"not an archive at all")
    assert load_refused(npz) == "not_a_model"
    np.savez(npz, a=np.zeros(3))
    assert load_refused(npz) == "not_a_model"
    np.savez(npz, manifest=np.zeros(3, np.uint8), digest=np.zeros(32, np.uint8))
    assert load_refused(npz) == "not_a_model"
    npz.write_bytes(pickle.dumps({"model": 1}))
    assert load_refused(npz) == "not_a_model"
    save_model(TABLE, npz)
    archive(npz, {name.replace("a", "b"): data for name, data in read_members(npz).items()})
    assert load_refused(npz) == "not_a_model"


def test_pickled_objects_are_never_read(npz):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    save_model(TABLE, npz)
    parts = read_members(npz)
    data = io.BytesIO()
    np.save(data, np.array([Trap()], object), allow_pickle=True)
    for name in ("a0.npy", MANIFEST, DIGEST):
        archive(npz, parts | {name: data.getvalue()})
        assert load_refused(npz) in ("malformed", "not_a_model")


def test_nothing_unpacks_to_more_than_the_file_holds(npz):
    save_model(TABLE, npz)
    parts = read_members(npz)
    archive(npz, parts | {"a0.npy": npy(np.zeros(10**6))}, zipfile.ZIP_DEFLATED)
    assert load_refused(npz) == "not_a_model"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
    archive(npz, parts | {"a0.npy": header.getvalue()})
    assert load_refused(npz) == "malformed"


def test_another_digest_and_other_arrays_are_refused(path):
    save_model(TABLE, path)
    parts = read_members(path)
    write_members(path, parts | {DIGEST: npy(np.zeros(32, np.uint8))})
    assert load_refused(path) == "digest"
    write_members(path, parts | {"a9999.npy": npy(np.zeros(3))})
    assert load_refused(path) == "malformed"
    write_members(path, {name: data for name, data in parts.items() if name != "a0.npy"})
    assert load_refused(path) == "malformed"


def change_manifest(**changes: Any) -> Any:
    return lambda manifest, _: manifest | changes


def cut(path: str, axis: int = -1) -> Any:
    """One array becomes shorter along an axis, and is listed as it is."""

    def change(manifest: dict, arrays: dict) -> None:
        name = array_at(manifest, path)
        arrays[name] = np.take(arrays[name], [0], axis)
        manifest["arrays"][int(name[1:-4])]["shape"] = list(arrays[name].shape)

    return change


def array_at(manifest: dict, path: str) -> str:
    """Name of the array in a field such as "decode.knots.head"."""
    node = manifest["model"]
    for name in path.split("."):
        node = node["tuple"][int(name)] if "tuple" in node else node["fields"][name]
    return f"a{node['array']}.npy"


def rename_field(manifest: dict, _: dict) -> None:
    fields = manifest["model"]["fields"]
    fields["other"] = fields.pop(next(iter(fields)))


def foreign_kind(manifest: dict, _: dict) -> None:
    manifest["model"]["kind"] = "ZipFile"


def use_twice(manifest: dict, _: dict) -> None:
    manifest["model"] = {"tuple": [manifest["model"], {"array": 0}]}


def deep(manifest: dict, _: dict) -> None:
    for _i in range(400):
        manifest["model"] = {"tuple": [manifest["model"]]}


FORGED = {
    "another format": ("not_a_model", change_manifest(format="other")),
    "a newer version": ("version", change_manifest(version=2)),
    "a version of another type": ("version", change_manifest(version=[1])),
    "no list of arrays": ("malformed", change_manifest(arrays=None)),
    "arrays that are not listed": ("malformed", change_manifest(arrays=[])),
    "another dtype listed": ("shape", lambda m, _: m["arrays"][0].update(dtype="<f4")),
    "another shape listed": ("shape", lambda m, _: m["arrays"][0].update(shape=[7])),
    "fewer features": ("shape", cut("learners.x")),
    "fewer rows": ("shape", cut("learners.y")),
    "fewer slopes": ("shape", cut("learners.plane.slopes")),
    "other bins": ("shape", cut("learners.grid.bins")),
    "fewer weights": ("shape", cut("weights")),
    "another field": ("malformed", rename_field),
    "another kind in the tree": ("malformed", foreign_kind),
    "another kind in the manifest": ("malformed", change_manifest(kind="Corrected")),
    "no model": ("malformed", change_manifest(model=None)),
    "a list for a model": ("malformed", change_manifest(model=[1])),
    "a text for a model": ("malformed", change_manifest(model="kind")),
    "an array twice": ("malformed", use_twice),
    "a position without an array": ("malformed", change_manifest(model={"array": 10**6})),
    "a value of no form": ("malformed", change_manifest(model={"eval": "1"})),
    "a deep tree": ("malformed", deep),
    "a list for a manifest": ("not_a_model", lambda *_: [1]),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_refused(name, path):
    code, change = FORGED[name]
    save_model(MODELS["regression"], path)
    forge(path, change)
    assert load_refused(path) == code


def pointing(path: str, value: int) -> Any:
    def change(manifest: dict, arrays: dict) -> None:
        name = array_at(manifest, path)
        arrays[name] = np.where(np.arange(arrays[name].size).reshape(arrays[name].shape) == 0, value, arrays[name])
        arrays[name] = arrays[name].astype(manifest["arrays"][int(name[1:-4])]["dtype"])

    return change


POINTERS = ["decode.row", "decode.lo", "decode.hi", "decode.knots.head", "decode.kv.start", "prefill.site"]
POINTERS += ["prefill.row", "prefill.column", "prefill.lo", "prefill.hi", "prefill.tokens.start"]
VECTORS = ["decode.kv.last", "decode.lo", "decode.knots.x", "decode.knots.ms", "prefill.row", "prefill.knots.row"]


@pytest.mark.parametrize("field", POINTERS)
@pytest.mark.parametrize("value", [-7, 2**30])
def test_no_loaded_table_points_outside_itself(field, value, path):
    for model in (TABLE, jax.tree.map(lambda x: np.stack([x, x]), TABLE)):
        save_model(model, path)
        forge(path, pointing(field, value))
        assert load_refused(path) == "shape"


@pytest.mark.parametrize("field", VECTORS)
def test_no_loaded_table_is_shorter_than_it_looks(field, path):
    save_model(TABLE, path)
    forge(path, cut(field))
    assert load_refused(path) == "shape"


@pytest.mark.parametrize("field", ["boxes.factor", "fixed.0.ratio", "local.1.z", "local.2.recent", "model.decode.lo"])
def test_no_loaded_correction_is_shorter_than_it_looks(field, path):
    save_model(MODELS["hybrid"], path)
    forge(path, cut(field))
    assert load_refused(path) == "shape"


def test_arrays_that_do_not_fit_are_not_saved(path):
    model = MODELS["regression"]
    broken = replace(model, learners=replace(model.learners, y=model.learners.y[:, :3]))
    assert refusal(save_model, broken, path, error=ModelFileError)[0] == "shape"
    assert not path.exists()
