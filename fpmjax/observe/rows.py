"""One line of a trace: the envelope around one rank's ForwardPassMetrics, checked, or the reason why it is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fpmjax.errors import MetricsError
from fpmjax.metrics import parse_iteration, show
from fpmjax.observe.layout import Layout, learn
from fpmjax.observe.record import CLOCK_SECONDS, MIXED, MODES, SCHEMA, UNSPECIFIED, Rejected, Row, Stream, names_clock
from fpmjax.observe.speculation import beyond_ordinary, fields_of_speculation
from fpmjax.strict_json import constant_token as no_constant
from fpmjax.strict_json import integer_token, unique_keys

I64_MAX = 2**63 - 1
MOST_LAYOUTS = 16  # a writer has one or two

# The writer puts these into every row; without one the row is damaged.
FPM_FIELDS = ("worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests")
COUNT_FIELDS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)
VARIANCE_FIELDS = ("var_prefill_length", "var_decode_kv_tokens")
REASON = {"payload": "bad_field", "u32": "bad_field", "schema_version": "bad_version"}  # others: inconsistent


_JSON = json.JSONDecoder(object_pairs_hook=unique_keys, parse_int=integer_token, parse_constant=no_constant)


class RowReader:
    """Reads lines, each layout carefully once and quickly from then on.

    components: keep the records of these components only.
    """

    def __init__(self, components: frozenset[str] | None = None):
        self.components = components
        self.layouts: list[Layout] = []
        self.attempts = 0

    def read(self, line: bytes) -> Row:
        """The record of one line; raises Rejected."""
        for layout in self.layouts:
            if (row := layout.read(line)) is not None:
                if self.components is not None and row.stream.component not in self.components:
                    _other(row.stream.component)
                return row
        row = careful(decode(line), self.components)
        if self.attempts < MOST_LAYOUTS and not row.defaulted:
            self.attempts += 1  # learning takes as long as a hundred rows
            layout = learn(line)
            if layout is not None and layout.read(line) == row:
                self.layouts.append(layout)
        return row


def decode(line: bytes) -> Any:
    """The JSON of one line, keys unique; raises Rejected."""
    try:
        return _JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise Rejected("bad_json", f"not JSON: {reason}")


def careful(row: Any, components: frozenset[str] | None) -> Row:
    """The record of a decoded line; raises Rejected with the first reason, outside in."""
    if type(row) is not dict:
        raise Rejected("not_object", f"the line is {show(row)}, not an object")
    event = _struct(row, "event", "bad_envelope", "")
    if event.get("schema") != SCHEMA:
        raise Rejected("bad_schema", f"event.schema is {show(event.get('schema'))}, but this reader knows {SCHEMA!r}")
    source = _struct(event, "source", "bad_envelope", "event.")
    names: list[Any] = [source.get(key) for key in ("namespace", "component", "producer_id")]
    if any(type(name) is not str for name in names):
        raise Rejected(
            "bad_envelope", f"event.source is {show(source)}, but it names namespace, component, producer_id"
        )
    mode, observed = event.get("capture_mode"), event.get("observed_at_unix_ms")
    if mode not in MODES:
        raise Rejected("bad_envelope", f"event.capture_mode is {show(mode)}, but it is one of {', '.join(MODES)}")
    if type(observed) is not int or not 0 <= observed <= I64_MAX:
        raise Rejected("bad_envelope", f"event.observed_at_unix_ms is {show(observed)}, not whole milliseconds")
    if "fpm" not in event:
        raise Rejected("bad_envelope", "event.fpm is missing")
    if components is not None and names[1] not in components:
        _other(names[1])
    fpm = _struct(event, "fpm", "bad_field", "event.")
    version = fpm.get("version")
    if type(version) is not int or version != 1:
        raise Rejected("bad_version", f"event.fpm.version is {show(version)}, but this reader knows 1")
    for name in FPM_FIELDS:
        if name not in fpm:
            raise Rejected("bad_field", f"event.fpm.{name} is missing")
    scheduled = _struct(fpm, "scheduled_requests", "bad_field", "event.fpm.")
    for name in COUNT_FIELDS:
        if name not in scheduled:
            raise Rejected("bad_field", f"event.fpm.scheduled_requests.{name} is missing")
    try:
        (rank,) = parse_iteration(fpm)
    except MetricsError as error:
        message = str(error).partition("\n")[0].removeprefix("ranks[0].")
        raise Rejected(REASON.get(error.code, "inconsistent"), f"event.fpm.{message}") from None
    queued = fpm.get("queued_requests", {})
    for where, struct in (("scheduled_requests", scheduled), ("queued_requests", queued)):
        for name in VARIANCE_FIELDS:
            if struct.get(name, 0) < 0:
                raise Rejected("bad_field", f"event.fpm.{where}.{name} is {struct[name]}, below zero")
    if not 0 <= rank.wall_time < CLOCK_SECONDS:
        raise Rejected("bad_field", f"event.fpm.wall_time is {rank.wall_time}, not the seconds of one pass")
    scope = fpm.get("timing_scope")
    if scope is not None and (scope == MIXED or not names_clock(scope)):
        raise Rejected("bad_field", f"event.fpm.timing_scope is {show(scope)}, but it names one clock in plain words")
    extend = rank.extend_lengths
    if extend is not None and (
        why := beyond_ordinary(extend, rank.prefill_requests, rank.prefill_tokens + rank.decode_requests)
    ):
        raise Rejected(
            "not_stp",
            f"extend_lengths {show(list(extend))} with {rank.prefill_requests} prefill requests: {why}, "
            "so this is no ordinary decoding",
        )
    speculation = fields_of_speculation(row)
    if drafting := [key for key, shown in speculation.items() if shown]:
        raise Rejected("not_stp", f"{show(drafting[0])} shows speculation, so this is no ordinary decoding")
    return Row(
        Stream(names[0], names[1], names[2], fpm["worker_id"], fpm["dp_rank"]),
        fpm["counter_id"],
        observed,
        mode == "full",
        scope or UNSPECIFIED,
        rank.wall_time,
        rank[:5],
        rank[5:7],
        extend,
        rank.past_kv_lengths,
        "queued_requests" not in fpm,
        tuple(sorted(speculation)),
    )


def _struct(parent: dict[str, Any], key: str, reason: str, where: str) -> dict[str, Any]:
    value = parent.get(key)
    if type(value) is not dict:
        what = f"is {show(value)}, not an object" if key in parent else "is missing"
        raise Rejected(reason, f"{where}{key} {what}")
    return value


def _other(component: Any) -> NoReturn:
    raise Rejected("other_component", f"event.source.component is {show(component)}")
