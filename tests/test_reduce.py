"""Reductions equal a brute-force computation on every answer, whatever the blocks, the table and the axes."""

from __future__ import annotations

import os
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from native_models import Toy
from small_tables import cell_of, surface, tables

import fpmjax
from fpmjax import direct, estimate, lines
from fpmjax.errors import FpmError, OptionError, SpeculationError
from fpmjax.grid import grid
from fpmjax.lookup.outer import find_rows
from fpmjax.reduce import QUANTILE_ERROR, Reduce, summarise
from fpmjax.totals import Histogram

SMALL = {"CELLS": 64, "LENGTHS": (8, 16), "KV": 16, "ROWS": 4, "GROUP": 12, "PAYS": 0}


@pytest.fixture(params=["as they are", "small blocks"])
def block_sizes(request, monkeypatch):
    if request.param == "small blocks":
        for name, value in SMALL.items():
            monkeypatch.setattr(lines, name, value)


def toy(holes):
    return Toy(np.array(holes, float))


def ask(model, work, depth, rule=None):
    """float64 [n]; a draft length of 0 is ordinary decoding."""
    ms = estimate(model, work, check=False).latency_ms
    if depth is None:
        return ms
    drafted = estimate(model, work, draft_length=np.maximum(depth, 1), rule=rule, check=False).latency_ms
    return np.where(depth > 0, drafted, ms)


def answers(models, grid, keep, rule=None):
    """Every answer, [kept combinations, reduced cells], NaN where refused; and the axes that are reduced."""
    named = dict(zip(grid.names, grid.values, strict=True))
    columns = grid.columns()
    work, depth = grid.work()
    ms = np.full(grid.size, np.nan)
    for i, model in enumerate(models):
        here = columns["model"] == i if "model" in columns else np.ones(grid.size, bool)
        ms[here] = ask(model, work, depth, rule)[here]
    reduced = [name for name in grid.names if name not in keep]
    order = [grid.names.index(name) for name in (*keep, *reduced)]
    kept = int(np.prod([len(named[name]) for name in keep]))
    return ms.reshape(grid.shape).transpose(order).reshape(kept, -1), reduced


def assert_summary(table, models, grid, reduce, rule=None, names=()):
    """names: of the models, where positions on their axis are no names."""

    def told(name, places):
        return [f"model {i}" if not names else names[i] for i in places] if name == "model" else list(places)

    ms, reduced = answers(models, grid, reduce.keep, rule)
    found = ~np.isnan(ms)
    rows = table.to_pylist()
    assert len(rows) == len(ms)
    kept = np.meshgrid(*(grid[name] for name in reduce.keep), indexing="ij")
    for name, values in zip(reduce.keep, kept, strict=True):
        assert table[name].to_pylist() == told(name, values.ravel().tolist())
    shape = [len(grid[name]) for name in reduced]
    for row, mine, some in zip(rows, ms, found, strict=True):
        known = mine[some]
        assert (row["cells"], row["answered"], row["refused"]) == (mine.size, known.size, mine.size - known.size)
        if reduce.limit_ms is not None:
            assert row["share_of_cells_under_limit"] == (known <= reduce.limit_ms).sum() / mine.size
        if not known.size:
            assert row["min_ms"] is row["max_ms"] is row["mean_ms"] is None
            assert all(row[f"best_{name}"] is None for name in reduced)
            continue
        best = np.unravel_index(np.nanargmin(mine), shape)
        assert (row["min_ms"], row["max_ms"]) == (known.min(), known.max())
        for name, i in zip(reduced, best, strict=True):
            assert [row[f"best_{name}"]] == told(name, [grid[name][int(i)]])
        assert row["mean_ms"] == pytest.approx(known.mean(), rel=1e-12)
        if reduce.limit_ms is not None:
            assert row["share_under_limit"] == (known <= reduce.limit_ms).sum() / known.size
        for q in reduce.quantiles:
            exact = np.sort(known)[max(int(np.ceil(q * known.size)), 1) - 1]
            assert row[f"p{100 * q:.10g}_ms"] == pytest.approx(exact, rel=QUANTILE_ERROR)


REQUESTS, KV = st.integers(1, 30), st.one_of(st.integers(0, 40), st.just(2**31))


# Few combinations of axes, and the KV totals always the longest one: values change what is compiled less than these.
@pytest.mark.parametrize(
    ("names", "keep"),
    [
        (("decode_kv", "decode_requests"), ("decode_requests",)),
        (("decode_requests", "draft_length", "kv_per_request"), ("draft_length",)),
        (("draft_length", "decode_kv", "decode_requests"), ()),
    ],
)
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(tables(decode_only=True), st.data())
def test_every_column_equals_brute_force(names, keep, rows, data):
    sizes = {"decode_requests": (REQUESTS, 1, 6), "draft_length": (st.integers(0, 4), 1, 4)}
    drawn = {name: sizes.get(name, (KV, 7, 40)) for name in names}
    made = grid(**{n: data.draw(st.lists(x, min_size=low, max_size=high)) for n, (x, low, high) in drawn.items()})
    reduce = Reduce(keep=keep, limit_ms=data.draw(st.floats(0, 1e4)), quantiles=(0, 0.3, 1))
    model = direct(cell_of(rows))
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in SMALL.items():
            patch.setattr(lines, constant, value)
        assert_summary(summarise(model, made, reduce=reduce, progress=False), [model], made, reduce)


@pytest.mark.parametrize("keep", [("decode_requests",), (), ("decode_kv",), ("draft_length", "decode_requests")])
def test_the_embedded_table(embedded_cell, block_sizes, keep):
    made = grid(decode_requests=range(1, 90, 3), decode_kv=range(500, 300_000, 1999), draft_length=[3, 0, 1, 2])
    reduce = Reduce(keep=keep, limit_ms=25, quantiles=[0.5, 0.99])
    model = direct(embedded_cell)
    assert_summary(summarise(model, made, reduce=reduce, progress=False), [model], made, reduce)


def test_prefill_and_models_of_any_kind(embedded_cell, block_sizes):
    made = grid(prefill_requests=[1, 2], tokens_per_request=range(100, 900, 50), prefill_kv=[0, 512])
    model = direct(embedded_cell)
    reduce = Reduce(keep=["prefill_kv"], limit_ms=30)
    assert_summary(summarise(model, made, reduce=reduce, progress=False), [model], made, reduce)
    made = grid(decode_requests=[0, 1, 5], decode_kv=range(40), prefill_requests=[0, 1], prefill_tokens=[7])
    other, reduce = toy([3, 17]), Reduce(keep=["decode_requests"], quantiles=[0.5])
    assert_summary(summarise(other, made, reduce=reduce, progress=False), [other], made, reduce)


def test_several_models_are_an_axis(block_sizes):
    models = [toy([hole]) for hole in (0, 3, 40)]
    made = grid(decode_requests=[1, 5], model=models, decode_kv=range(32, -1, -1))
    for keep in ([], ["model"], ["decode_requests"], ["decode_requests", "model"]):
        reduce = Reduce(keep=keep)
        assert_summary(summarise(None, made, reduce=reduce, progress=False), models, made, reduce)
    plain = grid(decode_requests=[1, 5], decode_kv=range(33))
    table = summarise(models, plain, reduce=Reduce(keep=["model"]), progress=False)
    assert table["model"].to_pylist() == ["model 0", "model 1", "model 2"]
    assert table["best_decode_kv"].to_pylist() == [1, 0, 0]


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(tables(decode_only=True), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.data())
def test_models_of_every_kind_at_any_draft_length(rows, holes, data):
    models = {"table": direct(cell_of(rows)), "toy": toy(holes)}
    drafts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    plain = {"decode_requests": [1, 3, 8], "decode_kv": range(20), "draft_length": drafts}
    made = grid(model=list(models.values()), **plain)
    reduce = Reduce(keep=data.draw(st.sampled_from([(), ("model",), ("draft_length", "model")])), limit_ms=5)
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in SMALL.items():
            patch.setattr(lines, constant, value)
        table = summarise(models, grid(**plain), reduce=reduce, progress=False)
    assert_summary(table, list(models.values()), made, reduce, names=list(models))


def test_models_have_the_names_of_a_sweep(embedded_cells):
    both = {"small": direct(embedded_cells.select(tp=1)), "large": direct(embedded_cells.select(tp=4))}
    made = grid(decode_requests=[1, 8], kv_per_request=1024)
    for models in (both, list(both.values()), list(both.values())[:1], {"one": both["small"]}, both["small"]):
        rows = fpmjax.sweep(models, made, progress=False)
        kept = fpmjax.sweep(models, made, reduce=Reduce(), progress=False)
        assert ("model" in rows.column_names) == ("best_model" in kept.column_names)
        if "best_model" in kept.column_names:
            names = rows["model"].to_pylist()
            quickest = np.array(names)[rows["latency_ms"].to_numpy().reshape(-1, 2).argmin(0) * 2].tolist()
            assert kept["best_model"].to_pylist() == quickest
            assert kept.schema.field("best_model").type == rows.schema.field("model").type
            by_name = summarise(models, made, reduce=Reduce(keep=["model"]), progress=False)
            assert by_name["model"].to_pylist() == list(dict.fromkeys(names))
            front = summarise(models, made, reduce=Reduce(keep=["model"], pareto=True), progress=False)
            assert set(front["model"].to_pylist()) == set(names)
    nowhere = grid(decode_requests=10**6, kv_per_request=1)
    assert summarise(both, nowhere, reduce=Reduce(keep=()), progress=False)["best_model"].to_pylist() == [None]


def test_a_draft_length_of_nothing_has_the_bits_of_ordinary_decoding(embedded_cell, block_sizes):
    axes = {"decode_requests": range(1, 70), "decode_kv": range(999, 200_000, 1777)}
    for model in (direct(embedded_cell), toy([7])):
        for keep in ("decode_requests", "decode_kv"):
            plain = summarise(model, grid(**axes), reduce=Reduce(keep=keep), progress=False)
            zero = summarise(model, grid(**axes, draft_length=0), reduce=Reduce(keep=keep), progress=False)
            assert zero.drop(["best_draft_length"]).to_pylist() == plain.to_pylist()
            assert set(zero["best_draft_length"].to_pylist()) <= {0, None}


def test_prefill_goes_with_a_draft_length_of_nothing():
    axes = {"prefill_requests": [0, 1], "prefill_tokens": [0, 9], "decode_requests": [0, 2], "decode_kv": [3, 0]}
    plain, zero = (summarise(toy([-1]), grid(**axes, **more), progress=False) for more in ({}, {"draft_length": 0}))
    assert zero.drop(["best_draft_length"]).to_pylist() == plain.to_pylist()


def test_the_first_of_equal_minima_wins():
    made = grid(decode_requests=[4, 1, 1], decode_kv=[9, 0, 0])
    table = summarise(toy([0]), made, reduce=Reduce(keep=()), progress=False)
    assert table["best_decode_requests"].to_pylist() == [1] and table["best_decode_kv"].to_pylist() == [9]
    table = summarise(toy([0]), grid(decode_requests=[1], decode_kv=[0]), progress=False)
    assert table["best_decode_kv"].to_pylist() == [None]


def test_a_rule_scales_and_is_told(embedded_cell):
    made = grid(decode_requests=[1, 8], decode_kv=[4096, 8192], draft_length=[1, 2])
    rule = fpmjax.SpeculativeRule(Decimal("0.5"), Decimal("0.75"))
    model, reduce = direct(embedded_cell), Reduce()
    table = summarise(model, made, reduce=reduce, rule=rule, progress=False)
    assert_summary(table, [model], made, reduce, rule)
    assert table.schema.metadata[b"rule"].startswith(b"0.5 * d + 0.75")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 9)), min_size=12, max_size=12))
def test_a_front_is_what_nothing_else_beats(points):
    """Over requests and KV totals, for each draft length."""
    made = grid(decode_requests=sorted({b for b, _, _ in points}), decode_kv=sorted({k for _, _, k in points}))
    model = toy([k for _, k, _ in points])
    ms, _ = answers([model], made, ("decode_requests", "decode_kv"))
    columns = made.columns()
    alive = (ms[:, 0] > 0) & ~np.isnan(ms[:, 0])
    latency, requests = ms[alive, 0], columns["decode_requests"][alive]
    throughput = requests / latency * 1000.0
    beaten = [
        any((a <= x and b >= y and (a < x or b > y)) for a, b in zip(latency, throughput, strict=True))
        for x, y in zip(latency, throughput, strict=True)
    ]
    want = sorted({(x, y) for x, y, no in zip(latency, throughput, beaten, strict=True) if not no})
    front = summarise(model, made, reduce=Reduce(keep=(), pareto=True), progress=False)
    got = list(zip(front["latency_ms"].to_pylist(), front["throughput_per_s"].to_pylist(), strict=True))
    assert got == want


def test_a_front_for_each_kept_combination(embedded_cell):
    made = grid(decode_requests=range(1, 40), kv_per_request=[512, 2048], draft_length=[1, 2, 4])
    model = direct(embedded_cell)
    every = summarise(model, made, reduce=Reduce(keep=["draft_length"], pareto=True), progress=False).to_pylist()
    assert every
    for depth in (1, 2, 4):
        own = grid(decode_requests=range(1, 40), kv_per_request=[512, 2048], draft_length=depth)
        one = summarise(model, own, reduce=Reduce(keep=["draft_length"], pareto=True), progress=False)
        assert [row for row in every if row["draft_length"] == depth] == one.to_pylist()


def test_sums_do_not_depend_on_what_is_in_flight_or_how_much_is_laid_out(embedded_cell, monkeypatch):
    made = grid(decode_requests=range(1, 300), decode_kv=range(500, 300_000, 299))
    per = grid(decode_requests=range(1, 300), kv_per_request=range(100, 9000, 17))
    model = direct(embedded_cell)

    def bits():
        tables = [summarise(model, x, reduce=Reduce(keep=keep), progress=False) for x in (made, per) for keep in KEEP]
        return [table["mean_ms"].to_pylist() for table in tables]

    KEEP = [(), ("decode_requests",)]
    one = bits()
    monkeypatch.setattr(lines, "IN_FLIGHT", 0)
    assert bits() == one
    monkeypatch.setattr(lines, "ROWS", 64)
    monkeypatch.setattr(lines, "CELLS", 2**15)
    assert bits() == one


DEVICES = """
import jax, numpy as np, fpmjax
from fpmjax.grid import grid
from fpmjax.reduce import Reduce, summarise
model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))
for axes in ({"decode_kv": range(500, 300_000, 149)}, {"kv_per_request": range(100, 9000, 5)}):
    table = summarise(model, grid(decode_requests=range(1, 300), **axes), reduce=Reduce(keep=(), quantiles=[0.5]))
    print([repr(x) for x in table.to_pylist()])
"""


def test_neither_on_the_number_of_devices():
    said = []
    for devices in (1, 3):
        env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        said.append(
            subprocess.run([sys.executable, "-c", DEVICES], env=env, capture_output=True, text=True, check=True)
        )
    assert said[0].stdout == said[1].stdout != ""


def test_a_thousand_sizes_compile_four_functions():
    model = direct(cell_of(surface([1, 2, 4, 8, 16, 32], [64, 2**16])))
    compiled: Any = (lines.fold_cells, lines.fold_rows, find_rows)
    before = sum(f._cache_size() for f in compiled)
    rng = np.random.default_rng(0)
    for requests, kv in zip(rng.integers(1, 40, 60), rng.integers(1, 3000, 60), strict=True):
        made = grid(decode_requests=range(1, requests + 1), decode_kv=range(kv))
        summarise(model, made, progress=False)
    made = grid(decode_requests=range(1, 301), decode_kv=range(5000))  # read in whole lines
    assert lines.reads_lines(model, lines.Axes(made, ("decode_requests",)))
    summarise(model, made, progress=False)
    assert sum(f._cache_size() for f in compiled) - before <= 4


def test_quantiles_hold_their_bound_on_latencies_far_apart(monkeypatch):
    made = grid(decode_requests=1, decode_kv=np.round(np.exp(np.linspace(0, 22, 999))).astype(int))
    model, reduce = toy([-1]), Reduce(keep=(), quantiles=[0, 0.01, 0.5, 0.9, 1])
    assert Histogram.ERROR < 0.004
    assert_summary(summarise(model, made, reduce=reduce, progress=False), [model], made, reduce)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"keep": 3}, "keep"),
        ({"keep": ["decode_requests", 3]}, "keep"),
        ({"keep": ["decode_requests", "decode_requests"]}, "keep"),
        ({"limit_ms": "50"}, "limit_ms"),
        ({"limit_ms": True}, "limit_ms"),
        ({"limit_ms": float("nan")}, "limit_ms"),
        ({"limit_ms": -1}, "limit_ms"),
        ({"quantiles": [50]}, "quantiles"),
        ({"quantiles": "0.5"}, "quantiles"),
        ({"quantiles": [0.5, 0.5]}, "quantiles"),
        ({"limit_ms": 10**400}, "limit_ms"),
        ({"limit_ms": np.array([50.0])}, "limit_ms"),
        ({"quantiles": 10**400}, "quantiles"),
        ({"quantiles": np.array(3.0)}, "quantiles"),
        ({"quantiles": np.array([[0.5]])}, "quantiles"),
        ({"quantiles": None}, "quantiles"),
        ({"pareto": 1}, "pareto"),
        ({"pareto": np.array([True, False])}, "pareto"),
        ({"pareto": True, "limit_ms": 5}, "pareto"),
    ],
)
def test_a_reduction_that_makes_no_sense_is_refused(options, code):
    with pytest.raises(OptionError) as error:
        Reduce(**options)
    assert error.value.code == code and "\nhint: " in str(error.value)


def test_one_name_or_number_stands_for_a_list():
    one: Any = 0.5
    assert Reduce(keep="decode_kv", quantiles=one) == Reduce(keep=["decode_kv"], quantiles=(0.5,))
    assert Reduce(quantiles=np.array(0.5)) == Reduce(quantiles=np.array([0.5])) == Reduce(quantiles=one)
    assert Reduce(pareto=np.True_).pareto is True and Reduce(limit_ms=np.float32(2)).limit_ms == 2.0


TOY = toy([0])
DECODE = {"decode_requests": [1, 2], "decode_kv": [1, 2]}


@pytest.mark.parametrize(
    ("models", "axes", "options", "code"),
    [
        (TOY, DECODE, {"reduce": Reduce(keep=["decode_key"])}, "keep"),
        (TOY, DECODE, {"reduce": Reduce(keep=["draft_length"])}, "keep"),
        (TOY, DECODE, {"reduce": ["decode_requests"]}, "reduce"),
        (TOY, {"prefill_requests": 1, "prefill_tokens": 5}, {"reduce": Reduce(keep=(), pareto=True)}, "pareto"),
        (TOY, None, {}, "grid"),
        (TOY, DECODE, {"progress": "no"}, "progress"),
        ("toy", DECODE, {}, "models"),
        ([], DECODE, {}, "models"),
        (TOY, DECODE | {"model": [TOY]}, {}, "models"),
        ({1: TOY, "1": TOY}, DECODE, {}, "models"),
        (TOY, dict.fromkeys(DECODE, range(2**20)), {"reduce": Reduce(keep=list(DECODE))}, "keep"),
        (TOY, dict.fromkeys(DECODE, range(2**20)), {"reduce": Reduce(keep="decode_kv", pareto=True)}, "keep"),
    ],
)
def test_what_cannot_be_summarised_is_refused_by_name(models, axes, options, code):
    with pytest.raises(OptionError) as error:
        summarise(models, axes and grid(**axes), **{"progress": False, **options})
    assert error.value.code == code and "\nhint: " in str(error.value)


def test_speculation_is_checked_before_anything_runs(embedded_cell):
    made = grid(**DECODE, draft_length=2)
    wrong: Any = 3
    with pytest.raises(SpeculationError, match="verify_width"):
        summarise(direct(embedded_cell, verify_width=2), made)
    with pytest.raises(SpeculationError, match="draft_length"):
        summarise(TOY, grid(**DECODE), rule=fpmjax.SpeculativeRule())
    with pytest.raises(FpmError):
        summarise(TOY, made, rule=wrong)


def test_too_many_histograms_are_refused_with_what_would_fit(monkeypatch):
    from fpmjax import totals

    monkeypatch.setattr(totals, "LARGEST_HISTOGRAM", 64)
    with pytest.raises(OptionError, match="keep fewer axes") as error:
        summarise(TOY, grid(decode_requests=range(1, 99), decode_kv=0), reduce=Reduce(quantiles=[0.5]), progress=False)
    assert error.value.code == "quantiles"
