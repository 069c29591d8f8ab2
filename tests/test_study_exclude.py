"""Rounds that are left out: one reason each, never the size of an error."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from asking import refusal
from studies import six_rounds, table

from fpmjax.errors import OptionError
from fpmjax.study.exclude import exclude
from fpmjax.study.read import read_study


def test_each_row_is_left_out_for_its_first_reason():
    rows = [
        {"reason": None, "cuda_graph": True, "active_requests": 4, "round_index": 16},
        {"reason": "invalid", "cuda_graph": False, "active_requests": 3, "round_index": 1},
        {"reason": "non_graph", "cuda_graph": False, "active_requests": 3, "round_index": 2},
        {"reason": "prefill_or_mixed", "cuda_graph": False, "active_requests": 4, "round_index": 17},
        {"reason": None, "cuda_graph": False, "active_requests": 3, "round_index": 18},
        {"reason": "throttled", "cuda_graph": None, "active_requests": 3, "round_index": 19},
        {"reason": "throttled", "cuda_graph": None, "active_requests": None, "round_index": 20},
        {"reason": "", "cuda_graph": None, "active_requests": None, "round_index": 21},
    ]
    sd = {"gpu": "A", "model": "M", "method": "mtp", "kind": "sd", "draft_length": 1, "batch_size": 4}
    sd |= {"initial_context": 64, "repetition": 1, "total_kv_tokens": 256, "latency_ms": 1e9}
    study = read_study(table([sd | row for row in rows]))
    found = exclude(study)
    reasons = ["", *found.reasons]
    assert [reasons[code] for code in found.code] == [
        *("", "invalid", "warmup", "prefill_or_mixed", "non_graph", "short_batch", "throttled", ""),
    ]
    assert found.code.dtype == np.int8 and found.kept.sum() == 2
    assert found.counts() == dict.fromkeys(found.reasons, 1)
    assert exclude(study, warmup=0).counts()["non_graph"] == 2
    assert found.counts(study.columns["round_index"] > 18) == {"throttled": 1, "short_batch": 1}


@pytest.mark.parametrize("warmup", [-1, 1.0, True, "16"])
def test_a_warm_up_is_a_count(warmup):
    assert refusal(OptionError, exclude, read_study(six_rounds()), warmup=warmup)[0] == "study_warmup"


def test_sentences_as_reasons_are_refused():
    rounds = six_rounds().slice(0, 1).to_pylist()[0]
    rows = [rounds | {"round_index": i, "reason": f"failed at {i}"} for i in range(200)]
    assert refusal(OptionError, exclude, read_study(pa.Table.from_pylist(rows)))[0] == "study_reasons"
