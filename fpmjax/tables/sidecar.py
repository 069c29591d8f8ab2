"""The sidecar: one JSON object beside the Parquet file that says what the file is.

`read_sidecar` parses it as strictly as the peer does, `check_sidecar` applies its rules in the peer's order.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fpmjax import strict_json
from fpmjax.errors import TableError
from fpmjax.tables.identity import DATABASE, shorten
from fpmjax.tables.policy import COORDINATE_SYSTEM, POLICIES, SCHEMA_NAME, SCHEMA_VERSIONS, Policy

MAX_DEPTH = 127  # the peer's JSON reader gives up at 128 levels
_ABSENT = object()


@dataclass(frozen=True)
class Declared:
    """What a checked sidecar declares about its table."""

    schema_version: int
    policy: Policy
    database: dict[str, Any]
    """`system`, `backend` and `backend_version`, which every row repeats."""
    dcp: int | None
    """The decode context parallelism that every row must carry; None where the sidecar does not say."""
    digest: str
    row_count: Any


def read_sidecar(data: bytes, label: str) -> dict[str, Any]:
    """The JSON object in `data`; `TableError` for anything else.  `label` names the file in messages.

    Refused as in the peer: byte order marks, NaN and Infinity, numbers beyond float64, lone surrogates, 128
    levels of nesting.  Refused although the peer reads the last one: a key that occurs twice.
    """
    try:
        value = strict_json.decode(data)
        _check_depth_and_text(value)
    except ValueError as error:
        raise TableError(
            f"FPM metadata sidecar is not valid JSON ({shorten(str(error))[1:-1]}): {label}\n"
            "hint: the sidecar is one UTF-8 JSON object; fetch the pair again, or rewrite it with `fpmjax.write_table`",
            code="sidecar_json",
        ) from None
    if not isinstance(value, dict):
        raise TableError(
            f"FPM metadata sidecar is not a JSON object but {shorten(value)}: {label}\n"
            "hint: the sidecar is one JSON object with fields such as schema_name and parquet_sha256",
            code="sidecar_json",
        )
    return value


def check_sidecar(sidecar: dict[str, Any], parquet: bytes, label: str, asked: dict[str, str | None]) -> Declared:
    """Apply the sidecar's rules, first failure first; `asked` holds the identity arguments of the caller."""

    def refuse(code: str, message: str, hint: str) -> TableError:
        return TableError(f"{message}: {label}\nhint: {hint}", code=code)

    def field(name: str) -> Any:
        return sidecar.get(name, _ABSENT)

    if field("schema_name") != SCHEMA_NAME:
        raise refuse(
            "schema_name",
            f'unsupported FPM schema_name={_show(field("schema_name"))} (expected "{SCHEMA_NAME}")',
            "this file describes something else than a whole-forward FPM table",
        )
    schema = field("schema_version")
    if type(schema) not in (int, float) or schema not in SCHEMA_VERSIONS:
        raise refuse(
            "schema_version",
            f"unsupported FPM schema_version={_show(schema)} (expected 6 or 7, as a number)",
            "collect the table again with a producer of schema 7",
        )
    if field("coordinate_system") != COORDINATE_SYSTEM:
        raise refuse(
            "coordinate_system",
            f'unsupported FPM coordinate_system={_show(field("coordinate_system"))} (expected "{COORDINATE_SYSTEM}")',
            "rows must be totals over one iteration, evenly split over its requests",
        )
    database = {name: field(name) if asked[name] is None else asked[name] for name in DATABASE}
    policy = _policy(field("measurement_policy"), schema, database["backend"], refuse)
    for name, value in policy.sidecar:
        if not _exactly(field(name), value):
            raise refuse(f"sidecar_{name}", *_constant_fault(policy, name, value, field(name)))
    for name in DATABASE:
        if not isinstance(database[name], str) or not database[name]:
            raise refuse(name, f"FPM sidecar {name}={_show(database[name])} must be a non-empty string", _whose(name))
        if field(name) != database[name]:
            raise refuse(
                name,
                f"FPM sidecar {name}={_show(field(name))} does not match the database {name} {_show(database[name])}",
                _whose(name),
            )
    digest = hashlib.sha256(parquet).hexdigest()
    if field("parquet_sha256") != digest:
        raise refuse(
            "digest",
            f'FPM parquet digest mismatch: sidecar={_show(field("parquet_sha256"))} actual="{digest}"',
            "the pair is inconsistent: an interrupted writer, a swapped file, or an edit after sealing",
        )
    return Declared(int(schema), policy, database, _selector_dcp(field, refuse), digest, field("row_count"))


def check_row_count(declared: Declared, actual: int, label: str) -> None:
    """The sidecar's `row_count` is the number of rows, and there is at least one."""
    stated = declared.row_count
    if type(stated) not in (int, float) or stated != actual:
        raise TableError(
            f"FPM row_count mismatch: sidecar={_show(stated)} actual={actual}: {label}\n"
            "hint: the sidecar describes another table; fetch the pair again",
            code="row_count",
        )
    if actual == 0:
        raise TableError(
            f"FPM database contains no rows: {label}\nhint: a table needs at least one measured iteration", code="empty"
        )


def _policy(name: Any, schema: float, backend: Any, refuse: Any) -> Policy:
    policy = POLICIES.get(name) if isinstance(name, str) else None
    if policy and schema in policy.schemas and policy.backend in (None, backend):
        return policy
    if policy:
        where = f"schema {' or '.join(map(str, policy.schemas))}"
        hint = f"this policy exists for {where}" + (f" on backend {policy.backend}" if policy.backend else "")
    else:
        hint = f"known policies: {', '.join(POLICIES)}"
    message = f"unsupported FPM measurement_policy={_show(name)} for schema {schema} backend {_show(backend)}"
    raise refuse("measurement_policy", message, hint)


def _constant_fault(policy: Policy, name: str, value: int | str, stated: Any) -> tuple[str, str]:
    if isinstance(value, int):
        message = f"FPM median sidecar {name} must be the integer {value}, not {_show(stated)}"
    else:
        message = f"native CUDA FPM sidecar requires {name}={value}, not {_show(stated)}"
    return message, f"policy {policy.name} fixes this field"


def _selector_dcp(field: Any, refuse: Any) -> int | None:
    selector = field("configuration_selector")
    if selector is _ABSENT:
        return None
    hint = 'write it as {"dcp": 2}, or leave the field out'
    if not isinstance(selector, dict):
        raise refuse("selector", f"FPM configuration_selector must be an object, not {_show(selector)}", hint)
    dcp = selector.get("dcp", _ABSENT)
    if dcp is _ABSENT:
        return None
    if type(dcp) is not int or dcp < 1:
        raise refuse("selector", f"FPM selector dcp must be a positive integer, not {_show(dcp)}", hint)
    return dcp


def _whose(name: str) -> str:
    return f"load with the {name} that the table was measured on, or without the argument to take it from the sidecar"


def _exactly(stated: Any, value: int | str) -> bool:
    return type(stated) is type(value) and stated == value


def _show(value: Any) -> str:
    """A JSON value as JSON, shortened; a field that is not there as `absent`."""
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_depth_and_text(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")  # UnicodeEncodeError, a ValueError, for a lone surrogate
            elif isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                inner += item
        level, depth = inner, depth + 1
