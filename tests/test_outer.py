"""Thin axes give the bits of the flat lookup, whatever the table; batches of one class behave alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tables import cell_of, queries_near, surface, tables

import fpmjax
from fpmjax import Work, direct, estimate
from fpmjax.lookup.outer import batch_classes, outer_decode
from fpmjax.metrics import U32_MAX


def outer(model, batch, kv):
    with fpmjax.x64():
        return np.asarray(outer_decode(model, np.array(batch), np.array(kv)))


def flat(model, batch, kv):
    work = Work.decode(np.array(batch)[:, None], np.array(kv)[None])
    return np.asarray(estimate(model, work, check=False).latency_ms)


def same_bits(a, b):
    assert a.shape == b.shape
    assert np.array_equal(a.view(np.int64)[~np.isnan(b)], b.view(np.int64)[~np.isnan(b)])
    assert np.array_equal(np.isnan(a), np.isnan(b))


@given(tables(), st.integers(0, 2**32))
def test_an_outer_product_has_the_bits_of_the_flat_lookup(rows, seed):
    model = direct(cell_of(rows))
    asked = queries_near(rows, 24, seed)
    batch = np.append(np.maximum(asked[:, 3], 1), [1, 65_537, U32_MAX])
    kv = np.append(asked[:, 4], [0, 1, U32_MAX])
    same_bits(outer(model, batch, kv), flat(model, batch, kv))


def test_the_embedded_table_too(embedded_cell):
    model = direct(embedded_cell)
    rng = np.random.default_rng(5)
    batch, kv = np.arange(1, 600), np.sort(rng.integers(0, 2**20, 400))
    same_bits(outer(model, batch, kv), flat(model, batch, kv))


def test_replaced_latencies_are_looked_at(embedded_cell):
    rng = np.random.default_rng(6)
    rows = 1 + max(embedded_cell.decode.row.max(), embedded_cell.prefill.row.max())
    model = direct(embedded_cell).with_latencies(rng.normal(1.0, 1.0, rows))  # some are negative
    batch, kv = np.arange(1, 300), rng.integers(0, 2**19, 200)
    found = outer(model, batch, kv)
    same_bits(found, flat(model, batch, kv))
    assert np.nanmin(found) > 0


def test_batches_of_one_class_read_the_same_cells():
    table = direct(cell_of(surface([1, 2, 4, 8, 16], [1024, 2048]))).decode
    classes = batch_classes(table)
    assert np.array_equal(classes.offset[classes.of], np.asarray(table.row))
    batch = np.array([1, 16, 17, 10**6, U32_MAX], np.uint32)
    assert classes(batch)[2:].tolist() == [classes.of[-1]] * 3  # beyond the table


@pytest.mark.parametrize("n", [1, 7])
def test_any_number_of_batches_and_totals_will_do(n):
    model = direct(cell_of(surface([1, 2, 4, 8], [1024, 4096])))
    batch, kv = np.arange(1, 1 + n), np.arange(1000, 1000 + 100 * n, 100)
    same_bits(outer(model, batch, kv), flat(model, batch, kv))
