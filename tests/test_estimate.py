"""The edge: shapes, sizes, chunks, memory, and exceptions where they are asked for."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from small_tables import cell_of, decode_rows, surface

import fpmjax
from fpmjax import CoverageError, FpmError, MetricsError, SpeculationError, Status, Work, direct, estimate
from fpmjax.estimate import SIZES, answer, chunks, rows


@pytest.fixture(scope="module")
def model(embedded_cell):
    return direct(embedded_cell)


@pytest.mark.smoke
def test_shapes_follow_numpy_broadcasting(model):
    batch, per_request = np.array([1, 4, 8]), np.array([1024, 4096])
    work = Work.decode(batch[:, None], batch[:, None] * per_request)
    assert estimate(model, work).latency_ms.shape == (3, 2)
    assert estimate(model, work, draft_length=np.array([1, 2, 3, 4])[:, None, None]).latency_ms.shape == (4, 3, 2)
    single = estimate(model, Work.decode(8, 8192), draft_length=3)
    assert all(np.ndim(x) == 0 for x in (single.latency_ms, single.status, single.stp.rank, single.calibrated))
    assert estimate(model, Work.decode([], [])).latency_ms.shape == (0,)
    assert estimate(model, Work.decode(np.zeros((3, 0), int), 0), draft_length=1).latency_ms.shape == (3, 0)


@pytest.mark.smoke
def test_dtypes_are_the_contract_for_every_size(model):
    for n in (1, 65, 3000):
        result = estimate(model, Work.decode(np.full(n, 8), 8192), draft_length=2, evidence=True)
        found = [
            x.dtype.name for x in (result.latency_ms, result.draft_length, result.scaling_factor, result.calibrated)
        ]
        assert found == ["float64", "int64", "float64", "bool"]
        stp = result.stp
        dtypes = [x.dtype.name for x in (stp.latency_ms, stp.status, stp.rank, stp.native_ms, stp.factor)]
        assert dtypes == ["float64", "int8", "int32", "float64", "float64"]
        part = stp.parts.decode
        assert [x.dtype.name for x in (part.resolution, part.row, part.weight)] == ["int8", "int32", "float64"]
        assert part.row.shape == part.weight.shape == (n, 1, 4) and (stp.factor == 1).all()
        assert stp.parts.prefill.row.shape == (n, 1, 4) and np.isnan(stp.parts.prefill_ms).all()


def test_a_mixed_batch_answers_each_query_on_its_own(model):
    good, bad = estimate(model, Work.decode(8, 8192)), Work.decode(np.where(np.arange(1000) % 7, 8, 9999), 8192)
    result = estimate(model, bad, check=False)
    refused = np.arange(1000) % 7 == 0
    assert (result.latency_ms[~refused] == good.latency_ms).all() and np.isnan(result.latency_ms[refused]).all()
    assert (result.status == np.where(refused, Status.NO_BATCH_BRACKET, Status.OK)).all()
    with pytest.raises(
        CoverageError, match=r"^143 of 1,000 queries have no answer; the first, \[0\]: decode batch_size=9999"
    ):
        estimate(model, bad)


def test_a_few_compiled_sizes_serve_every_size():
    for queries in (0, 1, 65, 1024, 1025, 8193, 2**18, 2**18 + 1, 10**6):
        for ranks in (1, 2, 2**12):
            parts = list(chunks(queries, ranks))
            assert {size for _, size in parts} <= {max(1, s // ranks) for s in SIZES}
            assert sum(where.stop - where.start for where, _ in parts) == queries
            assert all(where.stop - where.start <= size for where, size in parts)


def test_many_sizes_compile_at_most_four_times(model):
    jax.clear_caches()
    for n in range(65, 40_000, 997):
        estimate(model, Work.decode(np.full(n, 8), 8192))
    assert answer._cache_size() <= 4


def test_another_table_of_the_same_padded_shape_does_not_compile():
    first, second = (direct(cell_of(surface(batches, (1024, 8192)))) for batches in ((1, 2, 8), (4, 16, 64)))
    work = Work.decode(np.full(100, 4), 4096)
    jax.clear_caches()
    assert (estimate(first, work).latency_ms == 8).all()
    compiled = answer._cache_size()
    assert (estimate(second, work).latency_ms == 8).all()
    assert answer._cache_size() == compiled == 1


def test_work_of_only_one_phase_is_not_charged_for_the_other(model):
    """Absent phases are dropped before the kernel is compiled; the bits stay."""
    batch, kv = np.arange(1, 200), np.arange(1, 200) * 1000
    plain = estimate(model, Work.decode(batch, kv))
    zeros = np.zeros(len(batch), np.uint32)
    explicit = Work(zeros[:, None], zeros[:, None], zeros[:, None], *(np.uint32(x)[:, None] for x in (batch, kv)))
    assert (plain.latency_ms == estimate(model, explicit).latency_ms).all()


def test_a_hundred_million_queries_stream_in_bounded_memory():
    """Inputs are a broadcast view; beyond the outputs (13 bytes a query) only a few chunks may stand in memory."""
    code = """
        import resource
        import numpy as np
        import fpmjax

        model = fpmjax.direct(fpmjax.load_cells(fpmjax.embedded_table()).select(tp=1))
        batch = np.arange(1, 101)[:, None, None]
        kv = batch * np.arange(1, 10_001)[:, None]
        small = fpmjax.estimate(model, fpmjax.Work.decode(batch, kv), check=False)  # 10**6: everything is compiled
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = fpmjax.estimate(model, fpmjax.Work.decode(batch, kv + np.zeros(100, int)), check=False)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
        assert result.latency_ms.size == 10**8
        assert np.array_equal(result.latency_ms[..., 0], small.latency_ms[..., 0], equal_nan=True)
        print(grown)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    inputs, outputs = 4 * 10**8, 13 * 10**8
    assert int(done.stdout) < inputs + outputs + 600e6


def test_check_raises_the_error_that_owns_the_status(model):
    mixed = Work.of(prefill_requests=1, prefill_tokens=5, decode_requests=1, decode_kv=1)
    orphan = Work(decode_requests=np.zeros(1, np.uint32), decode_kv=np.ones(1, np.uint32))
    cases = [
        (Work.decode(9999, 1), {}, CoverageError, "decode_no_two_sided_batch_bracket"),
        (Work.prefill(7, 100), {}, CoverageError, "prefill_no_two_sided_support"),
        (mixed, {"draft_length": 1}, SpeculationError, "not_pure_decode"),
        (Work.decode(2**31, 1), {"draft_length": 1}, SpeculationError, "count_overflow"),
        (Work.decode(8, 8192), {"draft_length": 0}, SpeculationError, "draft_length_not_positive"),
        (Work.decode(8, 8192), {"draft_length": -3}, SpeculationError, "draft_length_not_positive"),
        (Work.decode(8, 8192), {"draft_length": 2**32 - 1}, SpeculationError, "width_overflow"),
        (Work.decode([8, 8], 8192), {"draft_length": [1, 10**30]}, SpeculationError, "width_overflow"),
        (Work.decode([8, 8], 8192), {"draft_length": [1, 2, 3]}, SpeculationError, "draft_length_shape"),
        (Work.decode(8, 8192), {"rule": fpmjax.SpeculativeRule()}, SpeculationError, "rule"),
        (orphan, {}, MetricsError, "invalid_work"),
    ]
    for work, options, error, code in cases:
        with pytest.raises(error) as caught:
            estimate(model, work, **options)
        assert caught.value.code == code
        assert "\nhint: " in str(caught.value)


def test_arguments_of_another_kind_are_named(model, embedded_cell, embedded_cells):
    work = Work.decode(1, 1)
    cases = [
        (lambda: estimate(embedded_cell, work), "not_a_model", "asks a model, not a Cell\nhint: make one first"),
        (lambda: estimate(lambda w: w, work), "not_a_model", "asks a model, not a function"),
        (lambda: estimate(model, (4, 10)), "payload", "takes Work, not a tuple\nhint: Work.decode"),
        (lambda: estimate(model, work, draft_length=1, rule=(0.1, 1.2)), "rule", "rule is a tuple\nhint: fpmjax.Spec"),
        (lambda: direct(embedded_cells), "not_a_cell", "takes one cell, not Cells\nhint: direct"),
    ]
    for ask, code, says in cases:
        with pytest.raises(FpmError) as caught:
            ask()
        assert caught.value.code == code and says in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "kv", "code"),
    [
        (np.array([4.7]), np.array([5000]), "u32"),
        (np.array([True]), np.array([50]), "u32"),
        (4, np.array([5]), "u32"),
        (np.array([4, 8]), np.array([5]), "payload"),
        (np.array(4), np.array(5), "payload"),
        (None, None, "payload"),
    ],
)
def test_work_built_by_hand_is_checked_too(model, batch, kv, code):
    work = Work(decode_requests=batch, decode_kv=kv)
    with pytest.raises(MetricsError) as caught:
        estimate(model, work)
    assert caught.value.code == code and "hint: build it with `fpmjax.Work.decode`" in str(caught.value)
    with fpmjax.x64(), pytest.raises(MetricsError):
        model(work)


def test_replaced_latencies_are_float64_and_belong_to_the_file_s_rows(embedded_cells):
    cell = embedded_cells.select(tp=2)
    model, work = direct(cell), Work.decode(8, 8192)
    rows = 1 + max(cell.decode.row.max(), cell.prefill.row.max())
    latencies = np.zeros(rows)
    latencies[cell.decode.row] = cell.decode.latency_ms
    latencies[cell.prefill.row] = cell.prefill.latency_ms
    plain = estimate(model, work).latency_ms
    assert estimate(model.with_latencies(latencies), work).latency_ms == plain
    twice = model.with_latencies(latencies * 2)
    assert twice.cell is cell and twice.decode.knots.ms.dtype == np.float64
    assert estimate(twice, work).latency_ms == 2 * plain
    for wrong in (cell.decode.latency_ms, latencies[:-1], latencies[None], np.ones(rows, int), [1.0] * rows, 3.0):
        with fpmjax.x64(), pytest.raises(FpmError, match="one float per row of the Parquet file"):
            model.with_latencies(wrong)
    with pytest.raises(FpmError, match="32-bit mode"):
        model.with_latencies(jax.numpy.ones(rows))
    refused = estimate(model.with_latencies(-latencies), work, check=False)
    assert refused.status == Status.NO_BATCH_BRACKET and np.isnan(refused.latency_ms)


def test_constant_work_and_traced_latencies_keep_every_bit(embedded_cell):
    model = direct(embedded_cell)
    rng = np.random.default_rng(5)
    batch = rng.integers(1, 513, 300)
    work = Work.decode(batch, batch * rng.integers(1, 9000, 300))
    latencies = np.zeros(530)
    for points in (embedded_cell.decode, embedded_cell.prefill):
        latencies[points.row] = points.latency_ms
    expected = estimate(model, work, check=False).latency_ms
    with fpmjax.x64():
        constant = jax.jit(lambda ms: model.with_latencies(ms)(work).latency_ms)(latencies)
        many = jax.vmap(lambda ms: model.with_latencies(ms)(work).latency_ms)(np.stack([latencies] * 3))
    assert np.array_equal(constant, expected, equal_nan=True)
    assert all(np.array_equal(x, expected, equal_nan=True) for x in many)


def test_answers_are_read_only_whatever_the_size(model):
    for n in (3, 100, 3000, 20_000):
        result = estimate(model, Work.decode(np.full(n, 8), 8192), draft_length=1, evidence=True)
        for x in jax.tree.leaves(result):
            assert not x.flags.writeable


def test_models_survive_pickle_and_copies_after_use(model):
    estimate(model, Work.decode(8, 8192))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert estimate(other, Work.decode(8, 8192)).latency_ms == estimate(model, Work.decode(8, 8192)).latency_ms
    assert repr(model).startswith("<Direct: Qwen/Qwen3-32B on b300_sxm") and len(repr(model)) < 200


def test_the_slowest_rank_decides_and_an_idle_one_carries_nothing():
    """Eight ranks of 16 requests are not one of 128, nor their sum or mean."""
    curves = {8: [(8192, 30.0), (16384, 32.0)], 16: [(8192, 31.0), (16384, 33.0)], 128: [(131072, 89.0)]}
    model = direct(cell_of(decode_rows(curves)))
    even = estimate(model, Work.decode(np.full(8, 16), np.full(8, 16384), ranks=True))
    assert (even.latency_ms, even.rank) == (33.0, 0)
    uneven = estimate(model, Work.decode(np.arange(9, 17), np.full(8, 16384), ranks=True))
    assert (uneven.latency_ms, uneven.rank) == (33.0, 7)


def test_the_first_refusing_rank_decides():
    model = direct(cell_of([*surface((1, 8), (1024, 8192)), ("prefill", 1, 64, 0, 3.0)]))
    work = Work.of(
        prefill_requests=[[0, 1, 0], [0, 1, 0], [0, 1, 1]],
        prefill_tokens=[[0, 65, 0], [0, 64, 0], [0, 65, 65]],
        decode_requests=[[8, 0, 99], [8, 1, 99], [99, 0, 0]],
        decode_kv=[[1024, 0, 1024], [1024, 1024, 1024], [1024, 0, 0]],
        ranks=True,
    )
    expected = [Status.NO_PREFILL_SUPPORT, Status.NO_BATCH_BRACKET, Status.NO_BATCH_BRACKET]
    assert estimate(model, work, check=False).status.tolist() == expected
    says = r"2 of 2 .* \[0\]: prefill batch_size=1, total_prefill_tokens=65, .* on rank 1:"
    with pytest.raises(CoverageError, match=says):
        estimate(model, Work(**{n: getattr(work, n)[:2] for n in fpmjax.work.COUNTS}))


def test_traced_work_that_no_engine_could_mean_is_a_status(model):
    with fpmjax.x64():
        status = jax.jit(lambda b, k: model(Work.decode(b, k)).status)
        assert status(np.int32([8, -8, 0, 0]), np.int32([8192, 8192, 5, 0])).tolist() == [0, 10, 10, 1]
        assert status(np.int64([8, 2**32]), np.int64([8192, 8192])).tolist() == [0, 10]
        assert status(np.int64([2**32 + 8]), np.int64([2**32 + 8192])).tolist() == [10]


def test_models_lose_only_their_names_in_transformations(model):
    copied = jax.tree.map(lambda x: x, model)
    assert estimate(copied, Work.decode(8, 8192)).latency_ms == estimate(model, Work.decode(8, 8192)).latency_ms
    with pytest.raises(CoverageError, match="decode batch_size=9999, total_kv_read_tokens=1: no measured batch"):
        estimate(copied, Work.decode(9999, 1))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6, 1), (4, 1, 1, 3)])
def test_chunks_of_broadcast_views_are_the_queries_in_row_major_order(shape):
    axes = len(shape)
    full = np.arange(np.prod(shape) * 2).reshape(*shape, 2)
    views = [full, full[::-1], np.broadcast_to(full[:1], full.shape), np.broadcast_to(full[..., :1, :], full.shape)]
    for view in views:
        flat = view.reshape(-1, 2)
        for start in range(len(flat)):
            for stop in range(start + 1, len(flat) + 1):
                for size in (stop - start, len(flat) + 3):
                    part = rows(view, slice(start, stop), size, axes)
                    assert (part[: stop - start] == flat[start:stop]).all() and not part[stop - start :].any()
                    assert len(part) == size


def test_a_model_that_only_follows_the_protocol_is_asked_in_compiled_code(model):
    class Plain:
        composition, execution, ready = "whole_forward", "autoregressive", True

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, work, *, evidence=False):
            return self.inner(work, evidence=evidence)

    jax.tree_util.register_pytree_node(Plain, lambda p: ((p.inner,), None), lambda _, children: Plain(*children))
    for work in (Work.decode(8, 8192), Work.decode([8, 1], [8192, 1024]), Work.decode([], [])):
        plain, own = estimate(Plain(model), work, evidence=True), estimate(model, work, evidence=True)
        assert np.array_equal(plain.latency_ms, own.latency_ms) and np.shape(plain.rank) == np.shape(own.rank)
        assert np.array_equal(plain.parts.decode.row, own.parts.decode.row)


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_a_replaced_latency_that_is_not_positive_still_lies_on_its_curve(value):
    points = {4: [(10, 5.0), (100, 6.0)], 8: [(10, 7.0), (100, 8.0)]}
    model = direct(cell_of(decode_rows(points)))
    latencies = np.full(1 + model.cell.decode.row.max(), np.nan)
    latencies[model.cell.decode.row] = [value, 6.0, 7.0, 8.0]
    changed = model.with_latencies(latencies)
    few, many = (estimate(changed, Work.decode([7] * n, [10] * n), check=False) for n in (1, 100))
    assert few.latency_ms[0] == many.latency_ms[0] == value + (7.0 - value) * 0.75
    assert set(many.status.tolist()) == {0}
