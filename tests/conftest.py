"""What every test shares: strict jax promotion, repeatable hypothesis, the embedded table."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from hypothesis import settings

from fpmjax.data import embedded_table

# In tests only: no silent widening of a dtype, no silent broadcast of ranks.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine, few enough for some minutes on two cores; a slow machine is no failure.
settings.register_profile("fpmjax", deadline=None, derandomize=True, print_blob=True, max_examples=15)
settings.load_profile("fpmjax")


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """The embedded table's Parquet file."""
    return embedded_table()


@pytest.fixture(scope="session")
def embedded_cells(embedded_path):
    """All cells of the embedded table."""
    from fpmjax.tables.load import load_cells

    return load_cells(embedded_path)


@pytest.fixture(scope="session")
def embedded_cell(embedded_cells):
    """The embedded table's TP1 cell."""
    return embedded_cells.select(tp=1)


@pytest.fixture(scope="session")
def tp1(embedded_cell):
    """The direct model of that cell."""
    import fpmjax

    return fpmjax.direct(embedded_cell)


@pytest.fixture(scope="session")
def tp4(embedded_cells):
    """The direct model of the TP4 cell."""
    import fpmjax

    return fpmjax.direct(embedded_cells.select(tp=4))


@pytest.fixture(scope="module")
def surface():
    """The facade over a made-up table whose decode takes B + K / 1024 ms."""
    from asking import SURFACE, facade

    return facade(SURFACE)


@pytest.fixture
def never_compiles(monkeypatch):
    """No query may reach compiled code."""
    from asking import forbid_compiling

    forbid_compiling(monkeypatch)


@pytest.fixture
def fpm(capsys, monkeypatch):
    """The command, run in this process."""
    from commands import Command

    return Command(capsys, monkeypatch)
