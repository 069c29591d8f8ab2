"""From the peer's configuration to a model of this package.

    fpm_interpolation with method "direct"   a table of measurements, corrected by what is observed unless disabled
    fpm_regression                           a fit of what is observed
    fpm_learned with adaptation "frozen"     a learned artifact, corrected like a table

Everything else is refused by name: an answer from another kind of model than the one that was asked for would look
the same and mean something else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fpmjax import strict_json
from fpmjax.errors import CellNotFoundError, CoverageError, FpmError, OptionError, TableError
from fpmjax.metrics import show
from fpmjax.models.corrected import corrected
from fpmjax.models.direct import direct
from fpmjax.models.forest import load_forest
from fpmjax.models.regression import regression
from fpmjax.models.settings import ErrorThreshold, Knots
from fpmjax.options import wrong_meaning
from fpmjax.schema import ROUND_FIELDS, check_weights, resolve
from fpmjax.tables.cell import Cell
from fpmjax.tables.load import DEFAULT_NAME, load_cells
from fpmjax.tables.selector import PREFIX

# Modes of the peer that this package does not model, and why.
REFUSED_MODES = {
    "op_level": (
        "op_level",
        "adds up single operations, which fpmjax does not model",
        "give a measured table (fpm_interpolation, method direct) or observations (fpm_regression)",
    ),
    "auto": (
        "auto",
        "would try op_level first, which fpmjax does not model, so it could only answer from something else",
        "name the mode: fpm_interpolation or fpm_regression",
    ),
}
# Ways in which a learned model of the peer adapts and that this package does not model, and what is near to them.
ADAPTATIONS = {
    "online": "adaptation='frozen' learns a correction of the artifact; fpmjax.learned fits observations anew",
    "causal_selector": "adaptation='frozen'; fpmjax.chosen(stable, challenger) selects by the same rule",
}
# Fields that change what a table would have to answer; every other value than this one is refused.
UNMODELLED = {"decoder_replay": False, "wideep_num_slots": None, "moe_kernel_source": None, "encoder_parallel": None}
# Quantisation modes of the configuration and their columns; a mode that is not given is free.
QUANTISATION = {
    "gemm_quant_mode": "gemm_quant_mode",
    "moe_quant_mode": "moe_quant_mode",
    "fmha_quant_mode": "fmha_quant_mode",
    "comm_quant_mode": "comm_quant_mode",
    "kv_cache_dtype": "kvcache_quant_mode",
}
PARALLEL = {"tp": "tp", "pp": "pp", "dp": "attention_dp", "cp": "cp_size"}
MOE = {"moe_tp": "moe_tp_size", "moe_ep": "moe_ep_size"}
MISSING = ("not_collected", "sidecar_missing", "unreadable")  # codes of a table that is not there at all


class Origin(NamedTuple):
    """Where a model comes from, for `diagnostics`.

    speculation: what the configuration itself says about speculation, or None; such a model takes no draft length.
    """

    config: Mapping[str, Any]
    role: str
    requested: str
    selected: str
    root: str | None = None
    failures: tuple[str, ...] = ()
    speculation: str | None = None
    collect_coverage: bool = False


def best_available(config: Any) -> tuple[Any, Origin]:
    """(model, where it comes from) of a configuration: a mapping or the peer's frozen dataclass.

    Raises OptionError, also with the codes `op_level`, `auto`, `interpolation_method`, `adaptation`, `identity`,
    `speculative_config`, `unknown_field`; for a table TableError, CellNotFoundError and CoverageError; for a learned
    artifact ModelFileError.
    """
    resolved = resolve(config)
    mode = resolved["estimation_mode"]
    if mode in REFUSED_MODES:
        code, why, hint = REFUSED_MODES[mode]
        refuse(f"estimation_mode='{mode}' {why}", hint, code)
    origin = Origin(resolved, resolved["worker_type"], mode, mode, speculation=speculation_of(resolved))
    if resolved["estimator_config"]["fpm_interpolation"]["collect_coverage"]:
        origin = origin._replace(collect_coverage=check_coverage(resolved))
    if mode == "fpm_regression":
        return new_regression(resolved), origin
    if mode == "fpm_learned":
        options = resolved["estimator_config"]["correction"]
        return with_correction(learned_artifact(resolved), options, auto="hybrid"), origin
    check_interpolation(resolved)
    try:
        cell = find_cell(resolved)
        cell.check_ready(resolved["worker_type"])
    except (TableError, CellNotFoundError, CoverageError) as error:
        broken = isinstance(error, TableError) and error.code not in MISSING
        if broken or error.code == "cell_ambiguous" or resolved["fallback_policy"] == "deny":
            raise
        failures: tuple[str, ...] = (f"FpmInterpolation: {sentence(error)}", f"OpLevel: {REFUSED_MODES['op_level'][1]}")
        return new_regression(resolved), origin._replace(selected="fpm_regression", failures=failures)
    options = resolved["estimator_config"]["correction"]
    return with_correction(direct(cell), options), origin._replace(root=str(Path(cell.path).parent))


def check_interpolation(config: dict[str, Any]) -> None:
    """What a table can be asked for by this configuration."""
    options = config["estimator_config"]["fpm_interpolation"]
    if options["method"] != "direct":
        refuse(
            f"estimator_config.fpm_interpolation.method='{options['method']}' is not modelled: "
            "the peer may answer from a speed-of-light estimate, fpmjax from measurements only",
            "give method='direct' explicitly",
            "interpolation_method",
        )
    if config["database_mode"] != "SILICON":
        refuse(
            f"database_mode='{config['database_mode']}' does not go with method='direct', which takes measurements",
            "leave database_mode out",
        )
    if options.get("unrecorded_quant_modes"):
        refuse(
            "estimator_config.fpm_interpolation.unrecorded_quant_modes is not modelled",
            "leave it out; a quantisation mode that is not given may be any that the table holds",
        )
    for name, value in UNMODELLED.items():
        if config[name] != value:
            refuse(f"{name}={config[name]!r} is not modelled: no table says what it changes", f"leave {name} out")


def check_coverage(config: dict[str, Any]) -> bool:
    method = config["estimator_config"]["fpm_interpolation"]["method"]
    if (config["estimation_mode"], method, config["fallback_policy"]) != ("fpm_interpolation", "direct", "deny"):
        wrong_meaning(
            "invalid forward pass perf model config: collect_coverage",
            "requires estimation_mode='fpm_interpolation', method='direct', and fallback_policy='deny'",
            "leave collect_coverage out, or name all three",
        )
    return True


def speculation_of(config: dict[str, Any]) -> str | None:
    """What a configuration says about speculation; a mode that cannot hold it is refused."""
    kind = config["speculation"] and config["speculation"]["kind"]
    said = f"speculation.kind={kind!r}" if kind else f"nextn={config['nextn']}" if config["nextn"] else None
    from_table = config["estimation_mode"] == "fpm_interpolation"
    if kind == "ngram" or (said and from_table and not (config["nextn"] and measures_rounds(config))):
        refuse(
            f"estimation_mode='{config['estimation_mode']}' does not support speculative decoding by {said}",
            "leave it out, and ask with draft_length",
            "speculative_config",
        )
    return said


def measures_rounds(config: dict[str, Any]) -> bool:
    """Whether the profile states measured rounds of `nextn` drafted tokens."""
    rounds = deployment_of(config)["execution_profile"] if config["fpm_profile"] else None
    return rounds is not None and rounds["num_draft_tokens"] == config["nextn"]


def new_regression(config: dict[str, Any]) -> Any:
    """A regression without observations; OptionError for what `fpmjax.regression` refuses."""
    estimators = config["estimator_config"]
    options, weights = estimators["fpm_regression"], estimators["features"]
    check_weights(weights)
    fit, sampling = options["fit"], options["sampling"]
    linear, spline = fit["linear"], fit["spline"]
    more: dict[str, Any] = {}
    if linear is not None:
        more = {"feature_axes": tuple(linear["feature_axes"]), "non_negative": linear["non_negative"]}
        more["lazy"] = lazy_of(linear["update_policy"])
    elif spline is not None:
        more["spline"] = Knots(**without_kind(spline["search"]), per_axis=spline["knots_per_axis"])
    return regression(
        role=config["worker_type"],
        sampling_axes=tuple(sampling["axes"]),
        bins_per_axis=tuple(sampling["bins_per_axis"]),
        max_observations=sampling["max_observations"],
        min_observations=options["min_observations"],
        singular_ridge_scale=fit["singular_ridge_scale"],
        rebuild_interval=fit["rebuild_interval"],
        **more,
        **weights,
    )


def lazy_of(policy: dict[str, Any]) -> ErrorThreshold | None:
    return ErrorThreshold(**without_kind(policy)) if policy["kind"] == "error_threshold" else None


def with_correction(model: Any, options: dict[str, Any], *, auto: str = "fixed") -> Any:
    """A native model, corrected by what will be observed; auto: the policy of mode `auto`."""
    bounds = options["factor_bounds"]
    return corrected(
        model,
        policy=auto if options["mode"] == "auto" else options["mode"],
        min_observations=options["min_observations"],
        bins=tuple(options["sampling"]["bins_per_axis"]),
        max_observations=options["sampling"]["max_observations"],
        factor_bounds=(bounds["min"], bounds["max"]),
        enabled=options["enabled"],
        **{name: options[name] for name in ("max_num_tokens", "max_batch_size", "max_kv_tokens")},
    )


def without_kind(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "kind"}


# Learned artifacts


def learned_artifact(config: dict[str, Any]) -> Any:
    """The forest of a frozen artifact, once its digest, its role and its identity are those of the configuration."""
    path, options = "estimator_config.fpm_learned", config["estimator_config"]["fpm_learned"]
    if options["artifact_path"] is options["checkpoint_path"] is None:
        refuse(
            f"{path} names no artifact", "give artifact_path, a learned model of this worker, and adaptation='frozen'"
        )
    if options["adaptation"] in ADAPTATIONS:
        what = (
            f"{path}.adaptation='{options['adaptation']}' is not modelled: no artifact is changed by what it observes"
        )
        refuse(what, ADAPTATIONS[options["adaptation"]], "adaptation")
    if options["checkpoint_path"] is not None:
        what = f"{path}.checkpoint_path holds the state of online updates, which are not modelled"
        refuse(what, "give artifact_path alone", "adaptation")
    source = Path(options["artifact_path"])
    model = load_forest(source)
    data = source.read_bytes()
    digest, wanted = hashlib.sha256(data).hexdigest(), options["source_sha256"]
    if wanted is not None and wanted.lower() != digest:
        refuse(f"{path}.source_sha256 is {wanted}, but {source} has {digest}", "give the artifact that is meant")
    if model.role != config["worker_type"]:
        what = f"{source} is a learned model of a {model.role} worker, but worker_type is {config['worker_type']!r}"
        refuse(what, "give the artifact of this worker", "identity")
    check_identity(config, strict_json.decode(data), source)
    return model


def check_identity(config: dict[str, Any], artifact: dict[str, Any], source: Path) -> None:
    """What an artifact says about its deployment, if anything, has to be what the configuration says."""
    metadata = artifact.get("metadata")
    identity = metadata.get("identity") if isinstance(metadata, Mapping) else None
    if identity is None:
        return
    stated = identity if isinstance(identity, Mapping) else {"identity": identity}
    for name, value in stated.items():
        if name not in config or config[name] != value:
            here = repr(config[name]) if name in config else "no field of a configuration"
            refuse(
                f"metadata.identity does not match resolved deployment identity: {name} is {show(value)} in {source}, "
                f"here {here}",
                "give the artifact that was trained on this deployment",
                "identity",
            )


# Tables


def find_cell(config: dict[str, Any]) -> Cell:
    """The one measured deployment that the configuration names."""
    wanted = wanted_identity(config)
    cells = load_cells(
        table_path(config),
        system=config["system"],
        backend=config["backend"],
        backend_version=config["backend_version"],
    )
    if config["dcp"] is None:  # a table either has no such column, or says 1 where the axis is not split
        wanted["dcp"] = next((i.dcp for i in cells if i.dcp in (None, 1)), None)
    return cells.select(**wanted)


def table_path(config: dict[str, Any]) -> str:
    """The Parquet file: named, or under the systems root that has one for this system, backend and version."""
    path = config["estimator_config"]["fpm_interpolation"]["fpm_parquet_path"]
    if path is not None:
        if not path:
            refuse("fpm_parquet_path cannot be empty", "give the Parquet file, or leave it out and give systems_paths")
        return path
    if not config["systems_paths"]:
        refuse(
            "fpm_interpolation has no table",
            "give estimator_config.fpm_interpolation.fpm_parquet_path, or systems_paths",
        )
    if not config["backend_version"]:
        refuse("systems_paths hold a table per backend_version", "give the backend_version that was measured")
    tail = Path("data", config["system"], config["backend"], config["backend_version"], DEFAULT_NAME)
    found = [Path(os.path.expanduser(root)) / tail for root in config["systems_paths"]]
    for root in config["systems_paths"]:
        if not os.path.isdir(os.path.expanduser(root)):
            refuse(f"forward-pass systems path is not a directory: {root}", "a root holds data/ and a file per system")
    return str(next((path for path in found if path.is_file()), found[0]))


def wanted_identity(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of the identity that the configuration fixes."""
    if config["fpm_profile"] is not None:
        profile, deployment = config["fpm_profile"], deployment_of(config)
        named = {name: deployment[name] for name in (*QUANTISATION, "moe_backend", "attention_backend")}
        sizes = {name: deployment[name] for name in (*PARALLEL, *MOE, "enable_wideep", "enable_eplb")}
        rounds = deployment["execution_profile"]
        execution = "full" if rounds is None else round_selector(profile["model_revision"], rounds)
    else:
        named = {column: config[name] for column, name in QUANTISATION.items() if config[name] is not None}
        if config["attention_backend"] is not None:
            named["attention_backend"] = config["attention_backend"]
        if config["moe_backend"] not in (None, "default"):
            named["moe_backend"] = config["moe_backend"]
        sizes = {column: config[name] or 1 for column, name in PARALLEL.items()}
        sizes |= {column: config[name] for column, name in MOE.items() if config[name] is not None}
        sizes["enable_eplb"] = config["enable_eplb"]
        execution = "full"
    of_text = {"model_config_sha256": "", "engram_residency": "none", "input_modality": "text"}
    return {
        "model": config["model"],
        **named,
        **sizes,
        **of_text,
        "execution_profile": execution,
        "dcp": config["dcp"],
    }


def deployment_of(config: dict[str, Any]) -> dict[str, Any]:
    """The one deployment of the profile that is this system, backend, version and parallel layout."""
    profile = config["fpm_profile"]
    if profile["model"] != config["model"]:
        refuse(
            f"FPM profile model identity mismatch: requested {config['model']!r}, profile={profile['model']!r}",
            "give the profile of this model",
        )
    wanted = {name: config[name] for name in ("system", "backend", "backend_version")}
    wanted |= {column: config[name] or 1 for column, name in (*PARALLEL.items(), *MOE.items())}
    for deployment in profile["deployments"]:
        role = deployment["worker_type"]
        if role in (None, config["worker_type"]) and all(deployment[name] == value for name, value in wanted.items()):
            for column, name in QUANTISATION.items():
                if config[name] not in (None, deployment[column]):
                    refuse(
                        f"FPM profile identity conflict: {name}={config[name]!r}, profile={deployment[column]!r}",
                        "use matching measured precision and backend settings",
                    )
            return deployment
    asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
    refuse(
        f"no matching FPM deployment profile for {config['model']!r}: {asked}, worker_type={config['worker_type']}",
        "every field has to be equal; sizes that are not given are 1",
    )


def round_selector(revision: str, rounds: dict[str, Any]) -> str:
    """The execution profile of a measured speculative round, as a table spells it."""
    outer = {"model_revision": revision, "execution_profile": {name: rounds[name] for name in ROUND_FIELDS}}
    return PREFIX + json.dumps(outer, ensure_ascii=False, separators=(",", ":"))


def sentence(error: FpmError) -> str:
    return str(error).split("\nhint: ")[0]


def refuse(what: str, hint: str, code: str | None = None) -> NoReturn:
    raise OptionError(f"{what}\nhint: {hint}", code=code)
