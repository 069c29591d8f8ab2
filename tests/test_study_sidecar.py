"""The JSON beside a calibration file."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
from asking import refusal
from studies import six_rounds

from fpmjax.errors import OptionError
from fpmjax.study.read import read_study


def test_a_sidecar_describes_its_file(tmp_path):
    path = tmp_path / "rounds.parquet"
    pq.write_table(six_rounds(), path)
    note = {"schema_version": 1, "protocol": "by hand", "rows": {"sd": 6, "stp": 3}, "sha256": read_study(path).digest}
    (tmp_path / "rounds.json").write_text(json.dumps(note))
    assert read_study(path).sidecar == note and read_study(six_rounds()).sidecar == {}
    (tmp_path / "other.json").write_text("{}")
    assert read_study(path, sidecar=tmp_path / "other.json").sidecar == {}
    for wrong in ({"schema_version": 2}, {"sha256": "0" * 64}, {"rows": {"sd": 5, "stp": 3}}, {"rows": 9}):
        (tmp_path / "rounds.json").write_text(json.dumps(note | wrong))
        assert refusal(OptionError, read_study, path)[0] == "study_sidecar"
    for text in ("[]", "{", '{"a": NaN}'):
        (tmp_path / "rounds.json").write_text(text)
        assert refusal(OptionError, read_study, path)[0] == "study_sidecar"
    assert refusal(OptionError, read_study, path, sidecar=tmp_path / "absent.json")[0] == "study_sidecar"
