"""Rules with an interval, rule files, and `--rule` in every command that takes a draft length."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpmjax.errors import SpeculationError
from fpmjax.rule import PUBLISHED, RuleInterval, SpeculativeRule
from fpmjax.rule_file import load_rule, save_rule

TP1 = ("--select", "tp=1")
INTERVAL = RuleInterval((0.0868, 0.0968), (1.179, 1.209), 0.95, 192)
MINE = SpeculativeRule("0.0908211948", "1.19684088", "study of H100, qwen3-8b+eagle3", INTERVAL)


@pytest.fixture
def rule_path(tmp_path):
    save_rule(MINE, tmp_path / "rule.json", study={"rounds": 14400, "data_sha256": "ab" * 32})
    return tmp_path / "rule.json"


def test_a_rule_file_holds_the_rule_exactly(rule_path):
    assert load_rule(rule_path) == MINE
    assert load_rule(rule_path).interval == INTERVAL
    save_rule(load_rule(rule_path), rule_path)
    assert load_rule(rule_path) == MINE


PROVENANCE = st.text(min_size=1).filter(lambda text: text.isprintable() and bool(text.strip()))


@given(st.decimals(0, 1000, places=12), st.decimals("1e-9", 1000, places=12), PROVENANCE)
def test_any_rule_survives_its_file(tmp_path_factory, slope, intercept, provenance):
    path = tmp_path_factory.mktemp("rule") / "rule.json"
    rule = SpeculativeRule(slope, intercept, provenance)
    save_rule(rule, path)
    assert load_rule(path) == rule


def test_the_file_says_what_it_is_and_where_it_comes_from(rule_path):
    found = json.loads(rule_path.read_text())
    assert list(found) == ["format", "version", "slope", "intercept", "provenance", "interval", "study"]
    assert found["format"] == "fpmjax speculative rule" and found["version"] == 1
    assert found["slope"] == "0.0908211948" and found["study"]["rounds"] == 14400
    assert found["interval"]["clusters"] == 192


def test_the_published_rule_has_no_interval_and_its_text_stays():
    assert PUBLISHED.interval is None and "interval" not in PUBLISHED.document()
    assert str(PUBLISHED) == "0.08 * d + 1.25 (published calibration study, TP1, BF16)"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "is no rule file"),
        ({"version": 2}, "version 2"),
        ({"version": True}, "version True"),
        ({"slope": 0.08}, "slope is 0.08"),
        ({"slope": "fast"}, "slope='fast' is not a decimal number"),
        ({"intercept": "-1"}, "cannot scale a latency"),
        ({"provenance": ""}, "provenance is ''"),
        ({"scale": 1}, "unknown key 'scale'"),
        ({"interval": [1, 2]}, "interval is [1, 2]"),
        ({"interval": {"slope": [0.1, 0.2]}}, "it has the keys"),
        ({"slope": "0.0_8"}, "slope='0.0_8' is not a decimal number"),
        ({"slope": "\u0660.\u0668"}, "is not a decimal number"),
        ({"slope": " 0.08"}, "slope=' 0.08' is not a decimal number"),
        ({"slope": "0." + "1" * 101}, "slope has 101 digits"),
        ({"provenance": "\x1b[31mred"}, "provenance is '\\x1b[31mred'"),
        ({"provenance": "two\nlines"}, "provenance is 'two\\nlines'"),
        ({"provenance": "\ud800"}, "provenance is '\\ud800'"),
        ({"provenance": "x" * 2001}, "provenance is 'xxx"),
        ({"study": 5}, "study is 5"),
        ({"interval": MINE.document()["interval"] | {"slope": [0.2, 0.3]}}, "slope=0.2..0.3, which 0.09"),
    ],
)
def test_a_file_that_holds_no_rule_is_refused(rule_path, change, text):
    rule_path.write_text(json.dumps(json.loads(rule_path.read_text()) | change))
    with pytest.raises(SpeculationError) as caught:
        load_rule(rule_path)
    assert text in str(caught.value) and str(rule_path) in str(caught.value) and "\nhint: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": NaN}', "\ufeff{}", "batch,kv\n1,2\n"])
def test_other_files_are_no_rule_files(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(SpeculationError) as caught:
        load_rule(tmp_path / "x")
    assert caught.value.code == "rule_file"


def test_a_missing_file_or_folder_is_told(tmp_path):
    with pytest.raises(SpeculationError, match="cannot be read"):
        load_rule(tmp_path / "none.json")
    with pytest.raises(SpeculationError, match="cannot be written"):
        save_rule(MINE, tmp_path / "none" / "rule.json")
    with pytest.raises(SpeculationError, match="rule is a"):
        save_rule({"slope": 1}, tmp_path / "rule.json")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "interval",
    [
        (1, 2),
        ((2, 1), (1, 1), 0.95, 3),
        ((0, float("nan")), (1, 1), 0.95, 3),
        (("0", "1"), (1, 1), 0.95, 3),
        ((0, 1), (1, 1), 95, 3),
        ((0, 1), (1, 1), 0.95, 0),
        ((0, 1), (1, 1), 0.95, 2.5),
        ((0, 10**400), (1, 1), 0.95, 3),
        ((0.2, 0.3), (1, 1), 0.95, 3),
        ((0, 1), (1.1, 1.2), 0.95, 3),
    ],
)
def test_an_interval_that_is_none_is_refused(interval):
    with pytest.raises(SpeculationError) as caught:
        SpeculativeRule("0.1", "1", "mine", interval)
    assert caught.value.code == "rule"


@pytest.mark.parametrize("provenance", ["", " ", 5, None, "two\nlines", "\x1b[31m", "\ud800", "x" * 2001])
def test_no_rule_has_a_provenance_that_its_file_could_not_carry(provenance):
    with pytest.raises(SpeculationError) as caught:
        SpeculativeRule("0.1", "1", provenance)
    assert caught.value.code == "rule" and "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    "study", [{"a": float("nan")}, {"a": object()}, {1: 0, "1": 0}, {"a": "\ud800"}, {"a": "x" * 2**20}, 5, [("a", 1)]]
)
def test_nothing_is_written_that_would_not_be_read(tmp_path, study):
    with pytest.raises(SpeculationError) as caught:
        save_rule(MINE, tmp_path / "rule.json", study=study)
    assert caught.value.code == "rule_file" and "\nhint: " in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [None, 5, b"rule.json", "", "a\0", "a\ud800"])
def test_what_names_no_file_is_refused(name):
    for call in (load_rule, lambda name: save_rule(MINE, name)):
        with pytest.raises(SpeculationError, match="the rule file is") as caught:
            call(name)
        assert caught.value.code == "rule_file"


def test_a_rule_takes_the_place_of_a_rule_only(rule_path, tmp_path, monkeypatch):
    save_rule(SpeculativeRule("0.1", "1", "another"), rule_path)
    (tmp_path / "empty").touch()
    save_rule(MINE, tmp_path / "empty")
    for text in ("batch,kv\n", "{}", "x" * 2**21):
        (tmp_path / "mine").write_text(text)
        with pytest.raises(SpeculationError, match="is there already and holds no rule"):
            save_rule(MINE, tmp_path / "mine")
        assert (tmp_path / "mine").read_text() == text
    with pytest.raises(SpeculationError, match="is a folder"):
        save_rule(MINE, tmp_path)
    with pytest.raises(SpeculationError, match="it is a device"):
        save_rule(MINE, "/dev/null")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SpeculationError, match="is not yours to write in"):
        save_rule(MINE, tmp_path / "new")


# Commands


def test_estimate_scales_with_the_rule_of_a_file_and_names_it(fpm, rule_path):
    asked = ("estimate", "embedded", *TP1, "--batch", "4", "--kv", "4096", "--draft-length", "0:2", "--rule", rule_path)
    text = fpm(*asked)
    assert text.code == 0 and "in study range" not in text.out
    last = text.out.splitlines()[-1]
    assert last.startswith("factor: 0.0908211948 * draft + 1.19684088, study of H100, qwen3-8b+eagle3")
    assert last.endswith("95 % interval: slope 0.0868..0.0968, intercept 1.179..1.209")
    document = fpm(*asked, "--json").document
    assert "study" not in document
    assert document["rule"] == {"file": str(rule_path), **MINE.document()}
    plain, one, two = document["queries"]
    assert plain["scaling_factor"] == 1 and one["in_study_range"] is None
    assert two["scaling_factor"] == MINE.factor(2) == float(Decimal("1.19684088") + 2 * Decimal("0.0908211948"))
    assert two["latency_ms"] == two["scaling_factor"] * two["stp_latency_ms"]


def test_without_a_rule_file_nothing_changes(fpm):
    asked = ("estimate", "embedded", *TP1, "--batch", "4", "--kv", "4096", "--draft-length", "1", "--json")
    document = fpm(*asked).document
    assert "rule" not in document and document["study"]["deployment"] == "TP1, BF16"


def test_sweep_and_compare_take_a_rule(fpm, rule_path):
    axes = (*TP1, "--batch", "4", "--kv", "4096", "--draft-length", "2")
    swept = fpm("sweep", "embedded", *axes, "--rule", rule_path)
    assert swept.code == 0 and str(MINE.factor(2)) in swept.out
    assert swept.err.startswith("note: factor: 0.0908211948 * draft + 1.19684088")
    least = fpm("sweep", "embedded", *axes, "--rule", rule_path, "--keep", "none").out.splitlines()[1]
    latency = next(line for line in swept.out.splitlines() if '"ok"' in line).split(",")[3]
    assert latency in least
    both = fpm("compare", "embedded", "embedded", *axes, "--rule", rule_path, "--json")
    assert both.document["rule"]["slope"] == "0.0908211948"
    assert str(both.document["largest"]) == "[]"


def test_coverage_says_whose_factor_it_would_be(fpm, rule_path, tmp_path):
    (tmp_path / "traffic.csv").write_text("batch,kv\n1,4096\n")
    asked = ("coverage", "embedded", *TP1, "--traffic", tmp_path / "traffic.csv", "--rule", rule_path)
    assert "factor: 0.0908211948 * draft" in fpm(*asked).out
    assert fpm(*asked, "--json").document["rule"]["interval"]["clusters"] == 192


def test_a_rule_needs_a_draft_length_and_a_rule_file(fpm, rule_path, tmp_path):
    work = ("embedded", *TP1, "--batch", "4", "--kv", "4096")
    for command in ("estimate", "sweep"):
        fpm(command, *work, "--rule", rule_path).refused("no draft length is given", "hint: add --draft-length 1:4")
        fpm(command, *work, "--draft-length", "1", "--rule", tmp_path / "none").refused("cannot be read")
    fpm("estimate", *work, "--draft-length", "0", "--rule", rule_path).refused("no draft length is given")
