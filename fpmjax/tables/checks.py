"""What a row must be: the rules in the peer's order, each as a mask over all rows.

A `Fault` is one rule with the rows that break it.  The row that is reported is the first bad one of the
file, and in it the first rule that it breaks, exactly as if rows had been checked one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fpmjax.errors import TableError
from fpmjax.tables.columns import Column, absent
from fpmjax.tables.faults import Fault, seen
from fpmjax.tables.identity import EXECUTION, FLAGS, FULL_TEXT, SIZES, TEXTS, column
from fpmjax.tables.policy import CUDA_SCOPE, FAKE_KV, PARTITION_POLICY, REAL_KV, REDUCTIONS, SPECULATIVE_ROUND, Policy
from fpmjax.tables.repeats import collisions, duplicates
from fpmjax.tables.rows import COORDINATES, Rows
from fpmjax.tables.selector import is_speculative, selector_fault
from fpmjax.tables.sidecar import Declared

U32 = 2**32 - 1


def check_rows(rows: Rows, declared: Declared, label: str) -> None:
    """Raise for the first bad row, then for the first duplicate, then for the first collision."""
    for stage in (row_faults(rows, declared), duplicates(rows), collisions(rows)):
        broken = [(int(fault.bad.argmax()), fault) for fault in stage if fault.bad.any()]
        if broken:
            row, fault = min(broken, key=lambda pair: pair[0])  # the earlier rule where several break one row
            raise TableError(f"{fault.message(row)}: {label}\nhint: {fault.hint}", code=fault.code)


def every_fault(rows: Rows, declared: Declared) -> list[tuple[int, str, str]]:
    """(row, code, message) of every bad row, in file order: the first rule that it breaks.

    A row that is bad by itself is nobody's duplicate: where a failed measurement was repeated, the good row stands.
    """
    found: dict[int, tuple[int, str, str]] = {}

    def collect(stage: Iterator[Fault]) -> None:
        for fault in stage:
            for row in np.flatnonzero(fault.bad).tolist():
                found.setdefault(row, (row, fault.code, f"{fault.message(row)} ({fault.hint})"))

    collect(row_faults(rows, declared))
    good = np.ones(len(rows["latency_ms"].values), bool)
    good[list(found)] = False
    collect(duplicates(rows, good))
    collect(collisions(rows, good))
    return [found[row] for row in sorted(found)]


def row_faults(rows: Rows, declared: Declared) -> Iterator[Fault]:
    """Every rule on single rows, in the order in which one row is checked."""
    yield from _measurement(rows, declared.policy)
    yield from _database(rows, declared.database)
    yield from _coordinates(rows)
    yield from _types(rows)
    yield from _execution(rows, declared)
    yield from _dcp(rows, declared.dcp)
    yield from _provenance(rows, declared.policy)


def _measurement(rows: Rows, policy: Policy) -> Iterator[Fault]:
    if policy.self_named:
        stated = _optional(rows, "measurement_policy")
        yield Fault(
            "row_policy",
            ~stated.equals(policy.name),
            lambda i: f'FPM row {i} measurement_policy must match sidecar "{policy.name}", but is {seen(stated, i)}',
            "rows timed by different clocks cannot share a table",
        )
    if policy.sample_contract:
        yield _sample_contract(rows, policy)
    for name, value in policy.row_constants:
        constant, wanted = rows[name], f"the integer {value}" if isinstance(value, int) else f'"{value}"'
        yield Fault(
            "median_row",
            ~constant.equals(value),
            lambda i, s=constant, w=wanted: f"FPM median row {i} {s.name} must be {w}, but is {seen(s, i)}",
            f"policy {policy.name} fixes this column",
        )
    if not policy.fake_kv:
        yield Fault(
            "median_fake_kv",
            _optional(rows, "kv_seed_regime").equals(FAKE_KV),
            lambda i: f"FPM median row {i} cannot use fake_fallback KV state",
            f"policy {policy.name} is measured on really seeded KV; leave the row out",
        )


def _sample_contract(rows: Rows, policy: Policy) -> Fault:
    scope, reduction, count = (rows[n] for n in ("timing_scope", "measurement_reduction", "source_sample_count"))
    good = np.zeros(len(scope.values), bool)
    for word, (least, most) in REDUCTIONS.items():
        good |= reduction.equals(word) & (count.values >= least) & (count.values <= most) & ~count.null
    good &= scope.equals(CUDA_SCOPE)
    return Fault(
        "native_cuda_contract",
        ~good,
        lambda i: (
            f"FPM row {i}: native CUDA timing/reduction/count contract mismatch ("
            + ", ".join(f"{c.name}={seen(c, i)}" for c in (scope, reduction, count))
            + ")"
        ),
        f"policy {policy.name} wants timing_scope=model_step_cuda with measurement_reduction=single_sample and "
        "source_sample_count=1, or actual_upper_median and a count from 2 on",
    )


def _database(rows: Rows, database: dict[str, str]) -> Iterator[Fault]:
    kind = rows["workload_kind"]
    yield from _usable(kind)
    yield Fault(
        "workload_kind",
        ~(kind.equals("prefill") | kind.equals("decode")),
        lambda i: f"FPM row {i} has unknown workload_kind={seen(kind, i)}",
        "a row is one iteration of `prefill` or of `decode`, in lower case",
    )
    partition = rows["partition_policy"]
    yield from _usable(partition)
    yield Fault(
        "partition_policy",
        ~partition.equals(PARTITION_POLICY),
        lambda i: f'FPM row {i} has unsupported partition_policy={seen(partition, i)} (expected "{PARTITION_POLICY}")',
        "rows are totals that are evenly split over their requests",
    )
    for name in ("backend_version", "system", "backend"):
        stated, wanted = rows[name], f'the database {name} "{database[name]}"'
        yield from _usable(stated)
        yield Fault(
            f"row_{name}",
            ~stated.equals(database[name]),
            lambda i, s=stated, w=wanted: f"FPM row {i} {s.name}={seen(s, i)} does not match {w}",
            "a table holds the rows of one system, backend and version",
        )
    latency = rows["latency_ms"]
    yield from _usable(latency)
    yield Fault(
        "latency",
        ~(np.isfinite(latency.values) & (latency.values > 0)),
        lambda i: f"FPM row {i} has non-finite/non-positive latency_ms={seen(latency, i)}",
        "a latency is a positive number of milliseconds; leave failed measurements out",
    )


def _coordinates(rows: Rows) -> Iterator[Fault]:
    batch, tokens, kv = (rows[name] for name in COORDINATES)
    for coordinate in (batch, tokens, kv):
        yield from _u32(coordinate, "coordinates", "has invalid workload coordinates: ")

    def where(i: int) -> str:
        return ", ".join(f"{c.name}={c.at(i)}" for c in (batch, tokens, kv))

    yield Fault(
        "coordinates",
        batch.values < 1,
        lambda i: f"FPM row {i} has invalid workload coordinates: {where(i)}",
        "an iteration has at least one request",
    )
    prefill = rows["workload_kind"].equals("prefill")
    yield Fault(
        "prefill_without_tokens",
        prefill & (tokens.values == 0),
        lambda i: f"FPM row {i} is a prefill point with no prefill tokens ({where(i)})",
        "total_prefill_tokens counts the newly computed tokens of the whole iteration",
    )
    yield Fault(
        "decode_with_tokens",
        rows["workload_kind"].equals("decode") & (tokens.values != 0),
        lambda i: f"FPM row {i} is a decode point carrying prefill tokens ({where(i)})",
        "total_prefill_tokens of a decode row is 0; its one new token per request is implied",
    )


def _types(rows: Rows) -> Iterator[Fault]:
    for name in ("cell_id", "weight_quantization", *map(column, TEXTS), *EXECUTION, "kv_seed_regime"):
        yield from _usable(_optional(rows, name))
    for name in SIZES:
        yield from _u32(rows[name], "identity", "", null=True)
    for name in FLAGS:
        flag = rows[name]
        yield Fault(
            "boolean",
            flag.null,
            lambda i, f=flag: f"FPM row {i} {f.name} must be a boolean, but is {seen(f, i)}",
            "store real Parquet booleans, without nulls",
        )


def _execution(rows: Rows, declared: Declared) -> Iterator[Fault]:
    policy, profile = declared.policy, rows["execution_profile"]
    faults = [selector_fault(word) for word in profile.words or []]
    yield Fault(
        "selector_profile",
        np.array([fault is not None for fault in faults], bool)[profile.values],
        lambda i: f"FPM row {i}: invalid FPM execution identity: {faults[profile.values[i]]}",
        "an execution_profile that starts with speculative_round is canonical JSON after `speculative_round_v1:`",
    )
    speculative = profile.where(is_speculative)
    if policy.full_text_only:
        yield Fault(
            "execution_identity",
            ~_full_text(rows),
            lambda i: (
                f"FPM row {i}: native AR CUDA data requires the full text autoregressive execution identity, not ("
                + ", ".join(f"{name}={seen(rows[name], i)}" for name in EXECUTION)
                + ")"
            ),
            'the identity is ("", "full", "none", "text"); a speculative round has its own policy',
        )
    else:
        yield Fault(
            "execution_identity",
            speculative != (policy.execution == SPECULATIVE_ROUND),
            lambda i: (
                f"FPM row {i}: speculative-round identity requires the native CUDA measurement policy, and vice versa"
                f" (execution_profile={seen(profile, i)} under {policy.name})"
            ),
            "a whole round and a plain step are different measurements; relabelling one does not make it the other",
        )
    ones = [rows[name].equals(1) for name in ("pp", "dp", "cp", "moe_ep")]
    moe_tp, tp = rows["moe_tp"], rows["tp"]
    pure = np.logical_and.reduce(ones) & (moe_tp.equals(1) | (moe_tp.keys() == tp.keys())) & (tp.values >= 1)
    pure &= rows["enable_wideep"].equals(False) & rows["enable_eplb"].equals(False)
    text = rows["engram_residency"].equals("none") & rows["input_modality"].equals("text")
    vllm = declared.database["backend"] == "vllm"
    yield Fault(
        "speculative_topology",
        speculative & ~(pure & text & vllm),
        lambda i: f"FPM row {i}: speculative-round data requires vLLM pure TP, DP1/PP1/CP1 and text execution",
        "tp is at least 1, pp, dp, cp and moe_ep are 1, moe_tp is 1 or tp, wide EP and EPLB are off, "
        "residency is none and modality is text",
    )
    if "dcp" in rows:
        yield from _u32(rows["dcp"], "dcp", "")
        yield Fault(
            "speculative_dcp",
            speculative & ~rows["dcp"].equals(1),
            lambda i: f"FPM row {i}: speculative-round data requires DCP1, but dcp={seen(rows['dcp'], i)}",
            "rounds are measured without decode context parallelism",
        )


def _dcp(rows: Rows, selected: int | None) -> Iterator[Fault]:
    dcp, tp = _optional(rows, "dcp"), rows["tp"]
    if "dcp" in rows:
        divides = (dcp.values >= 1) & (tp.values % np.maximum(dcp.values, 1) == 0) & (tp.values >= 1) & ~tp.null
        yield Fault(
            "dcp",
            ~divides,
            lambda i: f"FPM row {i} dcp must be positive and divide tp (dcp={seen(dcp, i)}, tp={seen(tp, i)})",
            "decode context parallelism splits the tp ranks evenly",
        )
    if selected is not None:
        yield Fault(
            "dcp_selector",
            ~dcp.equals(selected),
            lambda i: f"FPM row {i} dcp disagrees with the sidecar selector (dcp={seen(dcp, i)}, selector {selected})",
            "every row carries the dcp that configuration_selector names; a missing column disagrees",
        )


def _provenance(rows: Rows, policy: Policy) -> Iterator[Fault]:
    if policy.row_pairs:
        stated, repeats = rows["measurement_policy"], rows["measurement_repeats"]
        legal = [stated.equals(name) & repeats.equals(count) for name, count in policy.row_pairs]
        yield Fault(
            "row_repeats",
            ~np.logical_or.reduce(legal),
            lambda i: (
                f"FPM row {i} measurement policy/repeats are inconsistent "
                f"(measurement_policy={seen(stated, i)}, measurement_repeats={seen(repeats, i)})"
            ),
            "legal pairs: " + ", ".join(f"{name} with {count}" for name, count in policy.row_pairs),
        )
    for name in ("moe_backend", "attention_backend"):
        yield Fault(
            "kernel_backend",
            rows[name].equals(""),
            lambda i, n=name: f'FPM row {i} {n} must be a non-empty string ("auto" or a pinned name)',
            'write "auto" where nothing was pinned',
        )
    bound = np.ones(len(rows["tp"].values), bool) if policy.full_text_only else ~_full_text(rows)
    reads_kv = rows["workload_kind"].equals("decode") | (rows["total_kv_read_tokens"].values > 0)
    seed = _optional(rows, "kv_seed_regime")
    yield Fault(
        "real_kv",
        bound & reads_kv & ~seed.equals(REAL_KV),
        lambda i: (
            f"FPM row {i}: config-bound cached prefill/decode requires real_kv provenance, "
            f"but kv_seed_regime={seen(seed, i)}"
        ),
        "measure decode and cached-prefill rows on really computed KV and mark them kv_seed_regime=real_kv",
    )


def _full_text(rows: Rows) -> np.ndarray:
    equal = [rows[name].equals(value) for name, value in zip(EXECUTION, FULL_TEXT, strict=True)]
    return np.logical_and.reduce(equal)


def _optional(rows: Rows, name: str) -> Column:
    """A column, or one that is null everywhere where the table has none."""
    return rows.get(name) or absent(name, len(rows["latency_ms"].values))


def _usable(stated: Column) -> Iterator[Fault]:
    if stated.fault:
        yield Fault(
            "column_type",
            np.ones(len(stated.values), bool),
            lambda i: f"FPM row {i}: column {stated.name} must be {stated.wanted}, but is {stated.fault}",
            "convert the column before the pair is sealed; nothing is cast while loading",
        )


def _u32(stated: Column, code: str, prefix: str, null: bool = False) -> Iterator[Fault]:
    yield from _usable(stated)
    outside = (stated.values < 0) | (stated.values > U32)
    yield Fault(
        code,
        outside if null else outside | stated.null,
        lambda i: f"FPM row {i} {prefix}{stated.name}={seen(stated, i)} does not fit in u32",
        "counts are integers from 0 to 4294967295",
    )
