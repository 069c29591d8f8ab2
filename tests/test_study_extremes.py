"""Studies whose numbers are extreme or few, from table to folder: what is said of them, and that the rest is drawn."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import studies
import study_documents

import fpmjax
from fpmjax.study.chart import chart
from fpmjax.study.folder import contents
from fpmjax.study.reading import number, signed, span
from fpmjax.study.result import run_study
from fpmjax.study.summary import summary
from fpmjax.study.verdict import meaning, verdict

ONE: dict[str, Any] = {"gpus": ("H100",), "true": {studies.MTP: (0.1, 1.15)}, "rounds": lambda d: 20}
NOISE: dict[str, Any] = {"cluster_noise": 0.01, "round_noise": 0.005}


def changed(table: pa.Table, name: str, change) -> pa.Table:
    """A column through a function of its values and of `kind == sd`."""
    sd = np.array(table.column("kind").to_pylist()) == "sd"
    values = change(table.column(name).to_numpy().copy(), sd)
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def run(table: pa.Table, **options):
    return run_study(table, draws=200, progress=False, **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("latency", [1e290, 2.3e-308])
@pytest.mark.parametrize("kind", ["sd", "stp"])
def test_a_latency_that_none_can_be_is_told_and_the_rest_is_drawn(latency, kind):
    def odd(ms, sd):
        rows = np.flatnonzero(sd == (kind == "sd"))
        ms[rows[18] if kind == "sd" else rows[26:29]] = latency  # ordinary rounds around those of a round
        return ms

    found = run(changed(studies.synthetic(**ONE, **NOISE), "latency_ms", odd))
    files = dict(contents(found))
    assert json.loads(files["result.json"]) == found.document
    assert found.document["diagnoses"][0]["code"] == "implausible_latencies"
    assert found.refit and found.refit["status"] == "implausible" and found.refit["slope"] is None
    assert "refit     none: some T / F is implausible, see below" in found.summary()
    assert verdict(found.document).startswith("no answer") and b"implausible" in files["README.md"]
    assert not re.search(rb"\b(nan|inf)\b", files["chart.svg"]) and max(map(len, summary(found.document))) < 400
    with pytest.raises(fpmjax.OptionError, match="nothing was fitted") as refusal:
        found.rule()
    assert refusal.value.code == "implausible"


@pytest.mark.filterwarnings("error")
def test_figures_of_implausible_latencies():
    pytest.importorskip("matplotlib")
    from fpmjax.plot.study import study_figures

    for latency in (1e290, 2.3e-308):
        table = changed(studies.synthetic(**ONE), "latency_ms", lambda ms, sd: np.where(sd, latency, ms))  # noqa: B023
        found = run(table)
        assert len(study_figures(found.document)) == 3
        if latency < 1:
            assert "no error has a place on a scale" in chart(found.document)


def test_the_fixed_rule_is_judged_in_one_sentence():
    no = run(studies.synthetic(**ONE, **NOISE))
    bias = no.document["overall"]["round_weighted_bias"]
    sentence = (
        f"the fixed rule 0.08 d + 1.25 is outside of what your rounds allow; on average it is {bias:.2f} % too high"
    )
    assert verdict(no.document) == f"no: {sentence}" and f"right?    no: {sentence}" in no.summary()
    assert "take the refit" in meaning(no.document) and "its slope outside of" in meaning(no.document)
    assert f"**No: {sentence}.** {meaning(no.document)}" in dict(contents(no))["README.md"].decode()
    assert repr(no).startswith("StudyResult(480 rounds in 24 configurations") and repr(no).endswith("right: no)")
    yes = run(studies.synthetic(**(ONE | {"true": {studies.MTP: (0.08, 1.25)}}), **NOISE, seed=1))
    assert verdict(yes.document).startswith("yes: ") and "keep it" in meaning(yes.document)


def test_two_configurations_give_neither_an_answer_nor_an_interval():
    small = run(studies.synthetic(**(ONE | {"batches": (1,), "contexts": (1024,), "depths": (1, 2)})))
    assert verdict(small.document).startswith("no answer") and small.rule().interval is None
    assert "2 configurations are too few to resample" in small.summary()
    assert "Measure more configurations" in meaning(small.document)


def test_ratios_a_thousand_times_too_high_are_doubted_first():
    found = run(changed(studies.synthetic(**ONE), "latency_ms", lambda ms, sd: np.where(sd, ms, ms / 1000)))
    assert [entry["code"] for entry in found.document["diagnoses"]] == ["ratios_too_high"]
    assert verdict(found.document).endswith("but first see what to look at")


def test_both_references_are_compared_on_the_same_rounds(embedded_cell):
    """Half of the ordinary batches were not measured; those of the model are 3 % above its table."""
    model = fpmjax.direct(embedded_cell)
    table = studies.synthetic(gpus=("B300",), true={studies.MTP: (0.08, 1.25)}, batches=(1, 4), rounds=lambda d: 12)
    batch = np.array(table.column("batch_size"))
    table = table.filter(pa.array((np.array(table.column("kind").to_pylist()) == "sd") | (batch < 8)))
    found = run(table, reference="estimator", model=model)
    beside, overall = found.document["beside"], found.document["overall"]
    common, rounds = beside["common"], beside["measured"]["rounds"]
    assert 0 < rounds < overall["rounds"] and common["rounds"] == rounds
    assert common["measured"]["round_weighted_mape"] < 1e-6  # the study's own F makes its rule exact
    assert common["estimator"]["rounds"] == common["estimator_error"]["rounds"] == rounds
    # T = f F exactly, so the rule errs by what the estimator does.
    assert common["estimator"]["round_weighted_mape"] == pytest.approx(common["estimator_error"]["round_weighted_mape"])
    assert f"on the {rounds} rounds that have both" in found.summary()
    text = dict(contents(found))["README.md"].decode()
    cell = "Direct of Qwen/Qwen3-32B on b300_sxm, TP1, bfloat16, vllm 0.20.1; clock: scheduler wall time"
    assert f"On the {rounds} rounds in {common['configurations']} configurations that have both" in text
    assert cell in text and cell in found.summary() and cell in found.rule().provenance
    other = next(entry for entry in found.document["diagnoses"] if entry["code"] == "other_reference")
    assert other["where"][0] == "model: Qwen3.5-4B in the study, Qwen/Qwen3-32B in the model"


def test_several_tensor_parallel_sizes_are_said_to_be_pooled():
    table = studies.synthetic(**ONE, **NOISE)
    found = run(pa.concat_tables([table, changed(table, "tp", lambda tp, _: 4 * tp)]))
    assert found.document["cells"][0]["tensor_parallel_sizes"] == [1, 4]
    assert {row["held_out"] for row in found.document["splits"] if row["split"] == "tp"} == {"TP1", "TP4"}
    assert "TP1, TP4 pooled in a cell" in found.summary() and ">H100: TP1, TP4 pooled<" in chart(found.document)
    assert "The split by tp tells them apart" in dict(contents(found))["README.md"].decode()
    assert "pooled in a cell" not in run(table).summary()


def test_the_header_of_a_figure_fits_its_width():
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from fpmjax.plot.study import error_figure, ratio_figure, residual_figure

    for draw in (error_figure, ratio_figure, residual_figure):
        figure: Any = draw(study_documents.document(("H100",)))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1, draw


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((4.8, 7.09), "4.80..7.09"),
        ((0.00011, 0.00014), "0.00011..0.00014"),
        ((1.23401, 1.23404), "1.234010..1.234040"),
        ((6.39999999, 6.4), "6.40..6.40"),
        ((0.0, 0.0), "0.00..0.00"),
    ],
)
def test_intervals_have_the_digits_that_they_need(ends, text):
    assert span(ends) == text


def test_numbers_for_people():
    assert [number(x) for x in (None, 0.0, 1e-14, 0.0003, 2.345, 1e303)] == [
        "-",
        "0.00",
        "0.00",
        "0.0003",
        "2.35",
        "1e+303",
    ]
    assert [signed(x) for x in (None, 0.0, -0.0003, 2.0)] == ["-", "+0.00", "-0.0003", "+2.00"]
