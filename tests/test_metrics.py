"""The wire schema: what is accepted, what is refused and with which words."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmjax.errors import MetricsError
from fpmjax.metrics import QUEUED, RANK, SCHEDULED, RankMetrics, parse_iteration

CASES = Path(__file__).parent / "cases"
# How a recorded message of the peer begins -> the codes that say the same here.
CODES = {
    "invalid FPM JSON": {"json"},
    "invalid FPM payload": {"payload", "u32"},
    "unsupported schema version": {"schema_version"},
    "invalid forward pass metrics: at least one": {"no_ranks"},
    "invalid forward pass metrics: prefill token sums": {"prefill_sums_without_requests"},
    "invalid forward pass metrics: decode KV token sum": {"decode_kv_without_requests"},
    "invalid forward pass metrics: extend_lengths": {"lists_together"},
    "invalid forward pass metrics: request feature lists": {"lists_length"},
}


def recorded() -> list[dict]:
    with gzip.open(CASES / "metrics_cases.jsonl.gz", "rt") as lines:
        return [case for case in map(json.loads, lines) if case["call"] == "estimate"]


def sched(**fields) -> dict:
    return {"scheduled_requests": fields}


def refusal(obj) -> tuple[str, str]:
    """(code, message without its hint) of the refusal of one iteration."""
    with pytest.raises(MetricsError) as caught:
        parse_iteration(obj)
    message = str(caught.value)
    assert message.count("\nhint: ") == 1 and not message.endswith(".")
    return caught.value.code, message.split("\nhint: ")[0]


@pytest.mark.parametrize("case", recorded(), ids=lambda case: case["case"])
def test_recorded_inputs_are_accepted_or_refused_for_the_recorded_reason(case):
    peer, text = case["peer"]["fpm_direct"], case["input_json"]
    if case.get("ours") == "refused":
        refusal(text)
    elif "error" in peer and peer["error"].endswith("ValueError"):
        (codes,) = (codes for start, codes in CODES.items() if peer["message"].startswith(start))
        assert refusal(text)[0] in codes
    else:
        ranks = parse_iteration(text)
        assert parse_iteration(text.encode()) == ranks
        assert parse_iteration(json.loads(text)) == ranks


def test_every_field_has_its_default():
    assert parse_iteration({}) == parse_iteration([{}]) == parse_iteration("{}") == [RankMetrics()]
    assert parse_iteration({"scheduled_requests": {}, "queued_requests": {}}) == [RankMetrics()]


def test_every_field_is_read_by_name():
    full = {
        "version": 1,
        "worker_id": "w",
        "dp_rank": 3,
        "counter_id": 2**64 - 1,
        "wall_time": 0.25,
        "scheduled_requests": {
            "num_prefill_requests": 1,
            "sum_prefill_tokens": 2,
            "var_prefill_length": 3,
            "sum_prefill_kv_tokens": 4,
            "num_decode_requests": 1,
            "sum_decode_kv_tokens": 2**32 - 1,
            "var_decode_kv_tokens": -0.5,
            "extend_lengths": (2, 1),
            "past_kv_lengths": [4, 2**64 - 1],
        },
        "queued_requests": {"num_prefill_requests": 9, "sum_prefill_kv_tokens": "ignored: no such field"},
    }
    wanted = RankMetrics(1, 2, 4, 1, 2**32 - 1, 3.0, -0.5, (2, 1), (4, 2**64 - 1), 0.25)
    assert parse_iteration(full) == [wanted]
    assert parse_iteration(MappingProxyType(full)) == [wanted]
    assert parse_iteration(json.dumps(full)) == [wanted]
    assert all(type(x) is int for x in parse_iteration(full)[0][:5])


@pytest.mark.parametrize("three", [np.int64(3), np.uint8(3), np.array(3), jnp.array(3), jnp.array(3, jnp.uint16)])
def test_numpy_and_jax_integers_count_as_integers(three):
    (rank,) = parse_iteration(sched(num_decode_requests=three, extend_lengths=[three] * 3, past_kv_lengths=[0] * 3))
    assert rank.decode_requests == 3 and type(rank.decode_requests) is int and rank.extend_lengths == (3, 3, 3)
    lists = sched(num_decode_requests=2, extend_lengths=np.array([1, 1]), past_kv_lengths=np.array([5, 6], np.uint64))
    assert parse_iteration(lists)[0].past_kv_lengths == (5, 6)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), jnp.array(0.5), 0.5])
def test_numpy_and_jax_numbers_count_as_numbers(number):
    assert parse_iteration(sched(var_decode_kv_tokens=number))[0].decode_kv_var == 0.5


NOT_A_COUNT = "but a count is an integer from 0 to 4294967295"


@pytest.mark.parametrize(
    ("obj", "code", "message"),
    [
        ([], "no_ranks", "the iteration lists no ranks"),
        (5, "payload", "ranks[0] is 5 (int), but it is an object of named fields"),
        (None, "payload", "ranks[0] is None (NoneType), but it is an object of named fields"),
        ([{}, [{}]], "payload", "ranks[1] is [{}] (list), but it is an object of named fields"),
        ({"version": 2}, "schema_version", "ranks[0].version is 2, but this reader knows version 1"),
        (
            {"version": True},
            "payload",
            "ranks[0].version is True (bool), but it is an integer from 0 to 4294967295",
        ),
        (
            [{}, {"counter_id": 2**64}],
            "payload",
            "ranks[1].counter_id is 18446744073709551616 (int), but it is an integer from 0 to 18446744073709551615",
        ),
        ({"worker_id": 7}, "payload", "ranks[0].worker_id is 7 (int), but it is text"),
        ({"wall_time": math.nan}, "payload", "ranks[0].wall_time is nan (float), but it is a finite number"),
        ({"wall_time": "1"}, "payload", "ranks[0].wall_time is '1' (str), but it is a finite number"),
        ({7: 1}, "payload", "ranks[0] has the key 7 (int), but keys are text"),
        (
            {"scheduled_requests": [1, 2]},
            "payload",
            "ranks[0].scheduled_requests is [1, 2] (list), but it is an object of named fields",
        ),
        (
            [{}, sched(num_decode_requests=True)],
            "u32",
            f"ranks[1].scheduled_requests.num_decode_requests is True (bool), {NOT_A_COUNT}",
        ),
        (
            sched(sum_prefill_tokens=4.0),
            "u32",
            f"ranks[0].scheduled_requests.sum_prefill_tokens is 4.0 (float), {NOT_A_COUNT}",
        ),
        (
            {"queued_requests": {"sum_decode_kv_tokens": -1}},
            "u32",
            f"ranks[0].queued_requests.sum_decode_kv_tokens is -1 (int), {NOT_A_COUNT}",
        ),
        (
            sched(num_decode_requests=1, extend_lengths=[1, -1]),
            "payload",
            "ranks[0].scheduled_requests.extend_lengths[1] is -1 (int), "
            "but it is an integer from 0 to 18446744073709551615",
        ),
        (
            sched(past_kv_lengths=3),
            "payload",
            "ranks[0].scheduled_requests.past_kv_lengths is 3 (int), but it is a list of token counts",
        ),
        (
            sched(sum_prefill_tokens=10),
            "prefill_sums_without_requests",
            "ranks[0].scheduled_requests.sum_prefill_tokens is 10 while num_prefill_requests is 0",
        ),
        (
            sched(sum_prefill_kv_tokens=10),
            "prefill_sums_without_requests",
            "ranks[0].scheduled_requests.sum_prefill_kv_tokens is 10 while num_prefill_requests is 0",
        ),
        (
            [{}, sched(sum_decode_kv_tokens=5)],
            "decode_kv_without_requests",
            "ranks[1].scheduled_requests.sum_decode_kv_tokens is 5 while num_decode_requests is 0",
        ),
        (
            sched(num_decode_requests=1, extend_lengths=[1]),
            "lists_together",
            "ranks[0].scheduled_requests has extend_lengths without past_kv_lengths",
        ),
        (
            sched(extend_lengths=None, past_kv_lengths=[]),
            "lists_together",
            "ranks[0].scheduled_requests has past_kv_lengths without extend_lengths",
        ),
        (
            sched(num_decode_requests=2, extend_lengths=[1, 1], past_kv_lengths=[1]),
            "lists_length",
            "ranks[0].scheduled_requests.past_kv_lengths has 1 entries for 2 scheduled requests",
        ),
    ],
)
def test_a_refusal_names_the_rank_the_field_and_the_value(obj, code, message):
    assert refusal(obj) == (code, message)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{} x", "Extra data: line 1 column 4 (char 3)"),
        ('{"wall_time": NaN}', "NaN is not JSON"),
        ('{"wall_time": -Infinity}', "-Infinity is not JSON"),
        ('{"wall_time": 1e400}', "number out of range: 1e400"),
        ('{"unknown": ' + "9" * 400 + "}", "number out of range: 99999999999999999999..."),
        ('{"dp_rank": 0, "dp_rank": 0}', "key 'dp_rank' occurs twice in one object"),
        ('{"unknown": {"a": 1, "b": 2, "b": 1}}', "key 'b' occurs twice in one object"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff{}", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_what_is_not_json_says_why(text, reason):
    assert refusal(text) == ("json", f"the metrics are not JSON text: {reason}")


def test_minus_zero_is_no_integer_on_the_wire():
    assert refusal('{"scheduled_requests": {"num_decode_requests": -0}}')[0] == "u32"
    assert math.copysign(1, parse_iteration('{"wall_time": -0}')[0].wall_time) == 1  # falsy, so the default stays
    assert math.copysign(1, parse_iteration(sched(var_decode_kv_tokens=-0.0))[0].decode_kv_var) == -1


def test_types_of_every_rank_come_before_the_meaning_of_any():
    bad_meaning, bad_type = {"version": 2}, {"dp_rank": "0"}
    assert refusal([bad_meaning, bad_type])[1].startswith("ranks[1].dp_rank")
    assert refusal([bad_meaning, sched(sum_decode_kv_tokens=1)])[0] == "schema_version"
    assert refusal([sched(sum_decode_kv_tokens=1), bad_meaning])[0] == "decode_kv_without_requests"


def test_a_tracer_has_no_value_to_check():
    for field in ("num_decode_requests", "var_decode_kv_tokens"):
        with pytest.raises(MetricsError):
            jax.jit(lambda x, field=field: len(parse_iteration(sched(**{field: x}))))(1)


def test_what_is_passed_in_is_never_changed():
    lists = {"extend_lengths": [1, 1], "past_kv_lengths": [3, 4]}
    obj = [sched(num_decode_requests=2, sum_decode_kv_tokens=7, **lists), {"wall_time": 0.5}]
    before = json.dumps(obj)
    parse_iteration(obj)
    assert json.dumps(obj) == before


class Hostile:
    """Breaks whoever looks at it."""

    def __repr__(self):
        raise RuntimeError("no")


FIELDS = sorted({*RANK, *SCHEDULED, *QUEUED})
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.integers(),
    st.sampled_from([2**32 - 1, 2**32, 2**64 - 1, 2**64]),
    st.builds(lambda: 1 << 20_000),  # Python refuses to print it
    st.builds(Hostile),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.float32(1), np.array([1, 2]), np.array(4), np.bool_(True)]),
)
GARBAGE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.integers(), st.text(max_size=2)), inner, max_size=6),
    ),
    max_leaves=20,
)
# Nearly right, so that the later stages are reached.
LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "version": st.sampled_from([1, 1, 2, "1"]),
        "wall_time": st.floats(),
        "scheduled_requests": st.dictionaries(
            st.sampled_from(sorted(SCHEDULED)), LEAVES | st.lists(LEAVES, max_size=3)
        ),
        "queued_requests": GARBAGE,
    },
)


@given(st.one_of(GARBAGE, LIKELY, st.lists(LIKELY, max_size=3)))
def test_garbage_is_read_or_refused_with_a_metrics_error(obj):
    try:
        ranks = parse_iteration(obj)
    except MetricsError as error:
        assert error.code and "\nhint: " in str(error)
    else:
        assert all(isinstance(rank, RankMetrics) for rank in ranks) and ranks


@given(st.text() | st.binary() | st.text(alphabet='{}[]",:0123456789.eE-+ntrufalsNI \\').map(lambda s: "[{" + s))
def test_garbage_text_is_read_or_refused_with_a_metrics_error(text):
    try:
        parse_iteration(text)
    except MetricsError as error:
        assert error.code


def test_lists_that_are_no_lists_and_masked_entries_are_refused():
    def scheduled(**fields):
        return {"scheduled_requests": {"num_decode_requests": 2, "past_kv_lengths": [2, 2]} | fields}

    for lengths, shown in (
        (np.array(1), "extend_lengths is array(1) (ndarray), but it is a list of token counts"),
        (np.ma.array([1, 1], mask=[0, 1]), "extend_lengths[1] is masked"),
    ):
        code, message = refusal(scheduled(extend_lengths=lengths))
        assert code == "payload" and shown in message
    assert refusal(scheduled(num_decode_requests=np.ma.array(2, mask=True)))[0] == "u32"
    assert refusal(scheduled(var_decode_kv_tokens=np.ma.array(2.0, mask=True)))[0] == "payload"
