"""Sweeps that are refused, by the name of the argument."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from small_tables import cell_of, surface

import fpmjax
from fpmjax.errors import OptionError, SpeculationError
from fpmjax.grid import grid
from fpmjax.sweep import sweep

ROWS = surface([1, 2, 4, 8, 16, 32], [0, 64, 256, 1024])
ONE = grid(decode_requests=1, decode_kv=0)


@pytest.fixture(scope="module")
def model():
    return fpmjax.direct(cell_of(ROWS))


@pytest.mark.parametrize(
    ("models", "queries", "options", "code"),
    [
        (None, ONE, {}, "models"),
        ([], ONE, {}, "models"),
        ("direct", ONE, {}, "models"),
        ("MODEL", {"decode_requests": 1}, {}, "queries"),
        ("MODEL", ONE, {"chunk": 0}, "chunk"),
        ("MODEL", ONE, {"chunk": 2**64}, "chunk"),
        ("MODEL", pa.table({"batch": [1], "kv": [1]}), {"chunk": 2**63}, "chunk"),
        ("MODEL", ONE, {"chunk": True}, "chunk"),
        ("MODEL", ONE, {"out": "a\0b"}, "out"),
        ("MODEL", ONE, {"out": "a\0b", "reduce": fpmjax.Reduce()}, "out"),
        ("MODEL", ONE, {"out": 300 * "x"}, "out"),
        (
            "MODEL",
            ONE,
            {"out": 300 * "x" + ".parquet", "reduce": fpmjax.Reduce()},
            "out",
        ),
        ("MODEL", ONE, {"out": "\ud800.parquet"}, "out"),
        ("MODEL", ONE, {"out": b"x.parquet"}, "out"),
        ("MODEL", ONE, {"out": "x.parquet", "form": "numpy"}, "form"),
        ("MODEL", ONE, {"reduce": fpmjax.Reduce(), "form": "reader"}, "form"),
        ("MODEL", ONE, {"reduce": fpmjax.Reduce(), "chunk": 8}, "chunk"),
        ("MODEL", ONE, {"reduce": fpmjax.Reduce(), "columns": ["min_ms"]}, "columns"),
        ("MODEL", ONE, {"reduce": fpmjax.Reduce(), "evidence": True}, "evidence"),
        ("MODEL", ONE, {"columns": 5}, "columns"),
        ("MODEL", ONE, {"columns": [["latency_ms"]]}, "columns"),
        ("MODEL", ONE, {"columns": [np.zeros(2)]}, "columns"),  # equal to a name, or not: it does not say
        ("TWICE", ONE, {}, "models"),
        ("TWICE", ONE, {"reduce": fpmjax.Reduce()}, "models"),
        ("MODEL", ONE, {"form": "pandas"}, "form"),
        ("MODEL", ONE, {"form": np.array(["table", "numpy"])}, "form"),
        ("MODEL", ONE, {"form": None}, "form"),
        ("MODEL", ONE, {"evidence": "no"}, "evidence"),
        ("MODEL", ONE, {"evidence": np.array([True, False])}, "evidence"),
        ("MODEL", ONE, {"progress": 0}, "progress"),
        ("MODEL", ONE, {"progress": None}, "progress"),
        ("MODEL", ONE, {"overwrite": "no", "out": "x.parquet"}, "overwrite"),
        ("MODEL", ONE, {"overwrite": "no", "out": "x.parquet", "reduce": fpmjax.Reduce()}, "overwrite"),
        ("MODEL", ONE, {"out": ""}, "out"),
        ("MODEL", grid(decode_requests=range(2**15), decode_kv=range(2**14)), {}, "rows"),
    ],
)
def test_mistakes_are_named(model, models, queries, options, code):
    with pytest.raises(OptionError) as caught:
        asked = {"MODEL": model, "TWICE": {1: model, "1": model}}
        sweep(asked[models] if models in ("MODEL", "TWICE") else models, queries, **{"progress": False, **options})
    assert caught.value.code == code and "\nhint: " in str(caught.value)


class Frame:
    """What offers Arrow's stream and cannot make one, as a series or a frame with a mixed column."""

    def __arrow_c_stream__(self, requested_schema=None):
        raise pa.ArrowInvalid("Could not convert 'a' with type str: tried to convert to int64")


def test_frames_that_are_no_table_are_refused(model):
    frames = [Frame()]
    try:
        import pandas as pd
    except ImportError:
        pass
    else:
        frames += [pd.Series([1, 2]), pd.DataFrame({"batch": [1, "a"], "kv": [1, 1]}, dtype=object)]
    for frame in frames:
        for ask in (partial(sweep, model), partial(fpmjax.compare, model, model)):
            with pytest.raises(OptionError, match="hint: give a frame") as caught:
                ask(frame, progress=False)
            assert caught.value.code == "queries"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_devices_are_no_folders(model):
    with pytest.raises(OptionError, match="/dev/full is neither a file nor a folder") as caught:
        sweep(model, ONE, out="/dev/full", progress=False)
    assert caught.value.code == "out"


def test_a_rule_needs_a_draft_length(model):
    with pytest.raises(OptionError, match="no draft_length"):
        sweep(model, ONE, rule=fpmjax.SpeculativeRule("0.1", "1"), progress=False)
    rounds = fpmjax.direct(cell_of(ROWS), verify_width=2)
    with pytest.raises(SpeculationError):
        sweep(rounds, grid(decode_requests=[1, 2], decode_kv=64, draft_length=1), progress=False)
