"""`import fpmjax` is cheap, and its public names are what they are said to be."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fpmjax

HEAVY = ("jax", "jaxlib", "pyarrow", "optax", "scipy", "matplotlib")


def test_import_brings_in_neither_jax_nor_files_nor_fits():
    script = "import sys, fpmjax; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "fpmjax" in loaded
    assert not set(HEAVY) & set(loaded)


def test_tables_are_read_without_jax():
    script = (
        "import sys, fpmjax; from fpmjax.data import embedded_table; fpmjax.load_cells(embedded_table()); "
        "print('jax' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


@pytest.mark.parametrize("name", fpmjax.__all__)
def test_every_public_name_resolves(name):
    assert getattr(fpmjax, name) is not None


def test_names_are_listed_for_completion_and_unknown_ones_are_refused():
    assert set(fpmjax.__all__) <= set(dir(fpmjax))
    with pytest.raises(AttributeError, match="no_such_name"):
        fpmjax.no_such_name  # noqa: B018


def test_a_submodule_never_stands_in_for_the_function_of_its_name():
    script = (
        "import fpmjax, fpmjax.estimate, fpmjax.speculative, fpmjax.data, fpmjax.facade; "
        "print(*(name for name in fpmjax.__all__ if type(getattr(fpmjax, name)).__name__ == 'module'))"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        == "plot study\n"
    )
