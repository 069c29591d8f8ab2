"""Inverse questions equal a brute-force look at every integer, on tables with gaps that are not monotone."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from fitted import decoder, decoding
from hypothesis import given
from hypothesis import strategies as st
from small_tables import cell_of, decode_rows, surface, tables

import fpmjax
import fpmjax.inverse as inverse
from fpmjax import DraftLengthTypeError, FpmError, SpeculationError, Work, direct, estimate
from fpmjax._jax import pytree
from fpmjax.errors import OptionError
from fpmjax.inverse import Ended, Largest, largest_batch, largest_context
from fpmjax.metrics import U32_MAX
from fpmjax.rule import PUBLISHED


@pytree()
class Plain:
    """A model that has to be asked: the table's answers behind another class."""

    model: Any

    composition: ClassVar[str] = "whole_forward"
    execution: ClassVar[str] = "autoregressive"
    ready: ClassVar[bool] = True

    def __call__(self, work, **options):
        return self.model(work, **options)

    def on_host(self, work, **options):
        return self.model.on_host(work, **options)


def brute(ms: np.ndarray, limit: float, x: np.ndarray, first_covered: bool, most: int | None):
    """(anywhere, throughout, ended, first) of one question by looking at every x; nothing lies beyond them."""
    covered = ~np.isnan(ms)
    within = covered & (ms <= limit)
    anywhere = int(x[within].max()) if within.any() else -1
    if first_covered and not covered.any():
        return anywhere, -1, Ended.TABLE_END, -1
    i = j = int(covered.argmax()) if first_covered else 0
    while j < len(x) and within[j]:
        j += 1
    if j == len(x):
        ended = Ended.TABLE_END if most is None else Ended.MOST
    elif covered[j]:
        ended = Ended.LIMIT
    else:
        ended = Ended.GAP if covered[j:].any() else Ended.TABLE_END
    return anywhere, int(x[j - 1]) if j > i else -1, ended, int(x[i])


def ask_all(model, requests, kv, draft=None):
    """ms of every (requests, KV total), int64 of one shape; NaN where it does not fit into 32 bits."""
    fits = kv <= U32_MAX
    work = Work.decode(requests, np.where(fits, kv, 0))
    return np.where(fits, estimate(model, work, draft_length=draft, check=False).latency_ms, np.nan)


def check(found: Largest, ms, limits, x, most, *, first_covered=False):
    """Every question beside `brute`; ms [questions, x]."""
    for i, (row, limit) in enumerate(zip(ms, limits, strict=True)):
        mine = tuple(int(a[i]) for a in (found.anywhere, found.throughout, found.ended, found.first))
        assert mine == brute(row, limit, x, first_covered, most), (i, limit)
        for value, latency in ((mine[0], found.anywhere_ms[i]), (mine[1], found.throughout_ms[i])):
            expected = row[value - x[0]] if value >= 0 else np.nan
            assert latency == expected or (np.isnan(latency) and np.isnan(expected))


def limits_near(rng, ms):
    """Limits that are answers themselves, and ones between and beyond them."""
    known = ms[~np.isnan(ms)]
    known = known if known.size else np.ones(1)
    return rng.choice(known, len(ms)) * rng.choice([1.0, 1.0, 1 - 1e-15, 1 + 1e-15, 0.7, 1.5], len(ms))


@pytest.fixture(params=[False, True], ids=["walk", "scan"])
def asked_as(request):
    """The table itself, which is walked, or a model that is asked everything."""
    return Plain if request.param else (lambda model: model)


@given(tables(decode_only=True), st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 1, 3]))
def test_largest_batch_equals_brute_force(rows, seed, total, draft):
    compare_batches(direct(cell_of(rows)), rows, seed, total, draft, None, lambda model: model)


@given(tables(decode_only=True), st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 2]))
def test_every_batch_may_also_be_asked(rows, seed, total, draft):
    compare_batches(direct(cell_of(rows)), rows, seed, total, draft, 40, Plain)
    compare_batches(direct(cell_of(rows)), rows, seed, total, draft, 40, lambda model: model)


def compare_batches(model, rows, seed, total, draft, most, wrap, n=8):
    rng = np.random.default_rng(seed)
    measured = np.array([(b, k) for _, b, _, k, _ in rows])
    pick = measured[rng.integers(len(measured), size=n)]
    kv = pick[:, 1] if total else pick[:, 1] // pick[:, 0] + rng.integers(0, 2, n)
    kv = np.minimum(kv, U32_MAX)
    x = np.arange(1, 1 + (most or 600))
    lines = np.broadcast_to(kv[:, None], (n, len(x))) if total else kv[:, None] * x
    ms = ask_all(model, np.broadcast_to(x, lines.shape), lines, draft)
    limits = limits_near(rng, ms)
    kv_is = {"kv_total" if total else "kv_per_request": kv}
    found = largest_batch(wrap(model), limit_ms=limits, draft_length=draft, most=most, **kv_is)
    check(found, ms, limits, x, most)


@given(tables(decode_only=True), st.integers(0, 2**32), st.sampled_from([None, 1, 3]))
def test_largest_context_equals_brute_force(rows, seed, draft):
    model = direct(cell_of(rows))
    rng = np.random.default_rng(seed)
    batches = np.array([b for _, b, *_ in rows])
    requests = np.maximum(rng.choice(batches, 8) // ((draft or 0) + 1) + rng.integers(-1, 2, 8), 1)
    x = np.arange(0, 61)
    ms = ask_all(model, np.broadcast_to(requests[:, None], (8, len(x))), requests[:, None] * x, draft)
    limits = limits_near(rng, ms)
    for wrap in (Plain, lambda model: model):
        found = largest_context(wrap(model), limit_ms=limits, decode_requests=requests, draft_length=draft, most=60)
        check(found, ms, limits, x, 60, first_covered=True)


def test_the_embedded_table_equals_brute_force_whatever_the_chunk(embedded_cell, monkeypatch):
    model = direct(embedded_cell)
    rng = np.random.default_rng(7)
    kv = np.exp(rng.uniform(np.log(1), np.log(40_000), 300)).astype(np.int64)
    x = np.arange(1, 600)
    ms = ask_all(model, np.broadcast_to(x, (300, len(x))), kv[:, None] * x)
    limits = limits_near(rng, ms)
    check(largest_batch(model, limit_ms=limits, kv_per_request=kv), ms, limits, x, None)
    monkeypatch.setattr(inverse, "SIZES", (8, 64))
    check(largest_batch(model, limit_ms=limits, kv_per_request=kv), ms, limits, x, None)
    monkeypatch.setattr(inverse, "SCANNED", 1 << 12)
    some = slice(0, 20)
    found = largest_batch(Plain(model), limit_ms=limits[some], kv_per_request=kv[some], most=len(x))
    check(found, ms[some], limits[some], x, len(x))


def test_contexts_of_the_embedded_table_are_exact_at_their_ends(embedded_cell):
    model = direct(embedded_cell)
    requests = np.arange(1, 520, 7)
    found = largest_context(model, limit_ms=21.7, decode_requests=requests)
    for x, within in ((found.throughout, True), (found.throughout + 1, False)):
        there = found.throughout >= 0
        ms = estimate(model, Work.decode(requests[there], (requests * x)[there]), check=False).latency_ms
        assert np.array_equal(ms <= 21.7, np.full(there.sum(), within))
    assert np.array_equal(
        found.first[found.first >= 0] * requests[found.first >= 0] >= 1, found.first[found.first >= 0] >= 1
    )
    assert set(found.ended.tolist()) >= {Ended.LIMIT, Ended.TABLE_END}


def test_one_question_gives_scalars_and_words():
    rows = surface([1, 2, 4, 8, 16], [0, 4096])
    found = largest_batch(direct(cell_of(rows)), limit_ms=9.0, kv_per_request=100)
    assert (found.anywhere, found.throughout, Ended(int(found.ended)).word) == (8, 8, "limit")
    assert found.anywhere_ms == 8 + 800 / 1024
    assert np.shape(found.ended) == ()
    assert all(e.word and e.sentence for e in Ended)


def test_what_ends_the_stretch_is_told_apart():
    """Batches 1..4 and 64 are measured; 17..63 lie beyond two octaves on one side."""
    model = direct(cell_of(surface([1, 2, 4, 64], [0, 4096])))
    assert Ended(int(largest_batch(model, limit_ms=1e3, kv_total=64).ended)) is Ended.GAP
    assert Ended(int(largest_batch(model, limit_ms=1e3, kv_total=64, most=4).ended)) is Ended.MOST
    assert Ended(int(largest_batch(model, limit_ms=1e3, kv_total=5000).ended)) is Ended.TABLE_END
    assert Ended(int(largest_batch(model, limit_ms=1e-3, kv_total=64).ended)) is Ended.LIMIT
    end = direct(cell_of(surface([1, 2, 4, 8], [0, 4096])))
    found = largest_batch(end, limit_ms=1e3, kv_total=64)
    assert (found.throughout, Ended(int(found.ended))) == (8, Ended.TABLE_END)


def test_a_fitted_model_ends_where_it_refuses():
    """It answers any batch, and drafts up to twice the largest one that it saw."""
    seen = decoding()
    model, line = decoder(), fpmjax.regression(seen, role="decode")
    for asked in (model, line):
        found = largest_batch(asked, limit_ms=1e6, kv_per_request=500)
        assert (found.throughout, Ended(int(found.ended))) == (inverse.MOST_BATCHES, Ended.MOST)
    most = int(np.max(seen.work.decode_requests))
    found = largest_batch(model, limit_ms=1e6, kv_per_request=500, draft_length=[1, 3])
    assert found.throughout.tolist() == found.anywhere.tolist() == [2 * most // 2, 2 * most // 4]
    assert [Ended(int(e)).word for e in found.ended] == ["end of coverage"] * 2
    near = np.stack([found.throughout, found.throughout + 1])
    answered = ask_all(model, near, near * 500, np.array([1, 3]))
    assert np.isfinite(answered[0]).all() and np.isnan(answered[1]).all()
    found = largest_context(model, limit_ms=1e6, decode_requests=most, draft_length=[1, 3], most=100)
    assert found.ended.tolist() == [Ended.MOST, Ended.TABLE_END] and found.first.tolist() == [0, -1]
    cold = fpmjax.regression(role="decode")
    found = largest_batch(cold, limit_ms=1e6, kv_per_request=500)
    assert (found.throughout, Ended(int(found.ended))) == (-1, Ended.TABLE_END)
    found = largest_batch(line, limit_ms=1e12, kv_per_request=2**31, most=5)
    assert (found.throughout, Ended(int(found.ended))) == (1, Ended.TABLE_END)


def test_a_table_may_reach_to_the_end_of_32_bits():
    rows = decode_rows({1: [(0, 1.0), (U32_MAX, 2.0)], 2: [(2**31, 1.0), (U32_MAX, 2.0)]})
    found = largest_context(direct(cell_of(rows)), limit_ms=[1.5, 9.0], decode_requests=[[1], [2]])
    assert found.throughout.tolist() == [[U32_MAX // 2, U32_MAX], [3 * 2**29 - 1, U32_MAX // 2]]
    assert found.ended.tolist() == [[Ended.LIMIT, Ended.TABLE_END]] * 2
    assert found.first.tolist() == [[0, 0], [2**30, 2**30]]


def test_the_two_answers_differ_where_the_surface_is_not_monotone():
    rows = decode_rows({b: [(0, ms), (1000, ms)] for b, ms in ((1, 1.0), (2, 9.0), (4, 2.0), (8, 3.0))})
    found = largest_batch(direct(cell_of(rows)), limit_ms=3.0, kv_total=10)
    assert (found.anywhere, found.throughout) == (8, 1)


def test_a_plateau_at_the_limit_is_read_to_its_end():
    rows = decode_rows({1: [(0, 1.0), (10**9, 2.0)], 3: [(0, 2.0), (10**9, 1.0)]})
    model = direct(cell_of(rows))
    found = largest_context(model, limit_ms=1.5, decode_requests=2, most=10**4)
    ms = estimate(model, Work.decode(2, 2 * np.arange(10**4 + 1))).latency_ms
    assert found.throughout == (10**4 if (ms <= 1.5).all() else int((ms > 1.5).argmax()) - 1)


def test_a_draft_length_asks_widened_work_and_scales_it(asked_as):
    model = asked_as(direct(cell_of(surface([1, 2, 4, 8, 16], [0, 4096]))))
    found = largest_batch(model, limit_ms=12.0, kv_per_request=10, draft_length=[[1], [3]], most=16)
    assert found.anywhere.shape == (2, 1)
    for d, b in zip((1, 3), found.throughout[:, 0].tolist(), strict=True):
        factor = PUBLISHED.factor(d)
        at = [factor * ((d + 1) * x + 10 * x / 1024) for x in (b, b + 1)]
        assert at[0] <= 12.0 < at[1]


def test_rows_per_request_of_the_model_count():
    cell = cell_of(surface([1, 2, 4, 8, 16], [0, 4096]))
    assert largest_batch(direct(cell, verify_width=2), limit_ms=1e3, kv_total=10).throughout == 8


def test_arguments_broadcast_and_may_be_empty():
    model = direct(cell_of(surface([1, 2, 4], [0, 4096])))
    found = largest_batch(model, limit_ms=np.array([[2.0], [3.0]]), kv_per_request=[1, 2, 3])
    assert found.throughout.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert largest_batch(model, limit_ms=[], kv_per_request=1).anywhere.shape == (0,)
    assert largest_batch(Plain(model), limit_ms=[], kv_per_request=1).anywhere.shape == (0,)


def test_latencies_that_are_no_latencies_are_asked_one_by_one():
    cell = cell_of(surface([1, 2, 4], [0, 4096]))
    changed = direct(cell).with_latencies(np.array([1.0, 1.0, -1.0, -1.0, 1.0, 1.0]))
    assert (largest_batch(changed, limit_ms=9.0, kv_total=5, most=4).throughout) == 1
    assert (largest_batch(changed, limit_ms=9.0, kv_total=5, most=4).anywhere) == 4


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"kv_per_request": 1, "kv_total": 1}, OptionError, "kv_per_request"),
        ({}, OptionError, "kv_per_request"),
        ({"kv_per_request": 1.5}, OptionError, "kv_per_request"),
        ({"kv_per_request": True}, OptionError, "kv_per_request"),
        ({"kv_per_request": [True]}, OptionError, "kv_per_request"),
        ({"kv_per_request": [1, 2.0]}, OptionError, "kv_per_request"),
        ({"kv_per_request": -1}, OptionError, "kv_per_request"),
        ({"kv_total": 2**32}, OptionError, "kv_total"),
        ({"kv_total": "8"}, OptionError, "kv_total"),
        ({"kv_total": 1, "limit_ms": 0}, OptionError, "limit_ms"),
        ({"kv_total": 1, "limit_ms": [1.0, np.nan]}, OptionError, "limit_ms"),
        ({"kv_total": 1, "limit_ms": "9"}, OptionError, "limit_ms"),
        ({"kv_total": 1, "limit_ms": True}, OptionError, "limit_ms"),
        ({"kv_total": [1, 2], "limit_ms": [1.0, 2.0, 3.0]}, OptionError, "shape"),
        ({"kv_total": 1, "most": 0}, OptionError, "most"),
        ({"kv_total": 1, "most": [3]}, OptionError, "most"),
        ({"kv_total": 1, "rule": PUBLISHED}, OptionError, "rule"),
        ({"kv_total": 1, "draft_length": 0}, SpeculationError, "draft_length_not_positive"),
        ({"kv_total": 1, "draft_length": [1, -1]}, SpeculationError, "draft_length_not_positive"),
        ({"kv_total": 1, "draft_length": 1.0}, DraftLengthTypeError, "draft_length_type"),
    ],
)
def test_mistakes_are_named(options, error, code):
    with pytest.raises(error) as found:
        largest_batch(direct(cell_of(surface([1, 2], [0, 9]))), **{"limit_ms": 1.0, **options})
    assert found.value.code == code
    assert "\nhint: " in str(found.value)


def test_only_models_are_asked():
    with pytest.raises(FpmError, match="largest_context asks a model") as found:
        largest_context("model", limit_ms=1.0, decode_requests=1)
    assert found.value.code == "not_a_model"
    with pytest.raises(OptionError, match="decode_requests holds 0"):
        largest_context(direct(cell_of(surface([1, 2], [0, 9]))), limit_ms=1.0, decode_requests=0)


@given(tables(decode_only=True), st.integers(0, 2**32))
def test_a_draft_length_of_nothing_among_others_is_ordinary_decoding(rows, seed):
    model, rng = direct(cell_of(rows)), np.random.default_rng(seed)
    measured = np.array([(b, k, ms) for _, b, _, k, ms in rows])[rng.integers(len(rows), size=8)]
    requests, kv, limits = measured[:, 0].astype(int), measured[:, 1].astype(int), measured[:, 2] * 1.2
    depth = np.array([0, 0, 1, 3, 0, 2, 0, 1])
    for who, ask, given_, most in (
        (model, largest_batch, {"kv_total": kv}, None),
        (model, largest_context, {"decode_requests": requests}, None),
        (Plain(model), largest_batch, {"kv_total": kv}, 20),
    ):
        found = ask(who, limit_ms=limits, draft_length=depth, most=most, **given_)
        for which, more in ((depth == 0, {}), (depth > 0, {"draft_length": depth[depth > 0]})):
            asked = {name: x[which] for name, x in given_.items()}
            alone = ask(who, limit_ms=limits[which], most=most, **asked, **more)
            for name in vars(found):
                assert np.array_equal(getattr(found, name)[which], getattr(alone, name), equal_nan=True), name


def test_no_draft_length_but_alone_is_refused(embedded_cell):
    model = direct(embedded_cell)
    asked = {"limit_ms": 20.0, "kv_per_request": 1024}
    plain = largest_batch(model, **asked)
    for depth in ([0], [[0, 0]], np.zeros(1, int)):
        found = largest_batch(model, **asked, draft_length=depth, rule=PUBLISHED)
        assert (found.anywhere == plain.anywhere).all() and (found.anywhere_ms == plain.anywhere_ms).all()
    assert largest_batch(model, **asked, draft_length=[]).anywhere.shape == (0,)
    for depth in (0, np.int64(0), [-1, 0], [0, 2**32]):
        with pytest.raises(SpeculationError):
            largest_batch(model, **asked, draft_length=depth)
