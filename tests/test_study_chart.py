"""The chart of a study: the same bytes, readable without colour and without overlaps, whatever the names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import study_documents
from hypothesis import given
from hypothesis import strategies as st

from fpmjax.study import svg
from fpmjax.study.chart import chart

LONG = "NVIDIA RTX PRO 6000 Blackwell Server Edition (Max-Q, 300 W), liquid cooled, <engineering> & sample"
SPACE = "{http://www.w3.org/2000/svg}"


def drawn(document) -> ET.Element:
    return ET.fromstring(chart(document))


def words(root: ET.Element) -> list[ET.Element]:
    return list(root.iter(f"{SPACE}text"))


def boxes(root: ET.Element) -> list[tuple[float, float, float, float, str]]:
    """(left, top, right, bottom, text) of every level text, at a width that letters really have."""
    out = []
    for one in words(root):
        if "transform" in one.attrib:
            continue
        size, text = float(one.get("font-size", 0)), one.text or ""
        wide = 0.5 * size * len(text)
        x, y = float(one.get("x", 0)), float(one.get("y", 0))
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[one.get("text-anchor", "start")]
        out.append((left, y - 0.75 * size, left + wide, y + 0.2 * size, text))
    return out


DOCUMENTS = {
    "study": study_documents.document(("B200", "GB200", "H100", "H200")),
    "long": study_documents.document(
        (LONG, LONG + " 2"),
        [(f"some-organisation/A-very-long-model-name-{i}-Instruct-FP8-dynamic", "eagle3") for i in range(6)],
        range(1, 13),
    ),
    "deep": study_documents.document(("H100",), (("M", "mtp"),), range(1, 65)),
    "single": study_documents.document(("H100",), (("M", "mtp"),), (3,), interval=False, status="singular"),
    "empty": study_documents.empty(),
}


@pytest.fixture(params=DOCUMENTS)
def document(request):
    return DOCUMENTS[request.param]


def test_the_same_document_gives_the_same_bytes(document):
    assert chart(document) == chart(document)
    assert not re.search(r"\d\.\d{3}", re.sub(r"<(title|desc)[^>]*>.*?</\1>|<text.*?</text>", "", chart(document)))


def test_it_is_whole_and_told_in_words(document):
    root = drawn(document)
    title, told = (root.find(f"{SPACE}{name}") for name in ("title", "desc"))
    assert title is not None and told is not None and told.text
    assert (title.text or "").startswith("Error of the rule 0.08 d + 1.25 by draft length: ")
    assert (title.text or "").endswith("configurations; timing scope model_worker_forward_cuda; reference measured")
    for cell in document["cells"]:
        if cell["rounds"]:
            assert (
                f"d = {cell['draft_length']}: round-weighted MAPE {cell['cell_round_weighted_mape']:.2f} %" in told.text
            )


def test_everything_lies_inside_and_no_text_covers_another(document):
    root = drawn(document)
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    found = boxes(root)
    for left, top, right, bottom, text in found:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, text
    for i, (left, top, right, bottom, text) in enumerate(found):
        for left2, top2, right2, bottom2, text2 in found[i + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (text, text2)


def test_series_differ_without_colour():
    assert len({(one.hatch, one.mark) for one in map(svg.look, range(6))}) == 6
    text = chart(DOCUMENTS["long"])
    assert all(f'<pattern id="h{i}"' in text and f"url(#h{i})" in text for i in range(6))
    assert "stroke-dasharray" in text  # the refit, beside the whole line of the fixed rule


def test_names_are_escaped_and_shortened_in_their_middle():
    text = chart(DOCUMENTS["long"])
    assert "<engineering>" not in text
    shown = [one.text or "" for one in words(ET.fromstring(text))]
    assert any("…" in one and one.startswith("NVIDIA RTX") and one.endswith("sample 2") for one in shown)


def test_each_gpu_has_a_panel_with_its_bars_dots_and_lines():
    root = drawn(DOCUMENTS["study"])
    shown = [one.text for one in words(root)]
    assert [name for name in shown if name in ("B200", "GB200", "H100", "H200")] == ["B200", "GB200", "H100", "H200"]
    bars = [one for one in root.iter(f"{SPACE}rect") if one.find(f"{SPACE}title") is not None]
    assert len(bars) == 4 * 2 * 4
    marks = [one for one in root.iter(f"{SPACE}circle") if one.get("r") == "2.8"]
    assert len(marks) == 4 * 4 * 6  # one of the two series is drawn as circles


def test_without_a_refit_no_line_is_drawn_and_without_rounds_it_says_so():
    assert "pooled refit" not in chart(DOCUMENTS["single"]) and "whisker" not in chart(DOCUMENTS["single"])
    assert "no round was scored" in chart(DOCUMENTS["empty"])


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_span_what_they_mark(low, size):
    marks = svg.ticks(low, low + size)
    slack = 1e-6 * (abs(low) + size)
    assert marks[0] <= low + slack and marks[-1] >= low + size - slack and 2 <= len(marks) <= 9
    assert marks == sorted(set(marks))


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=200))
def test_any_printable_name_can_be_drawn(name):
    root = ET.fromstring(chart(study_documents.document((name,), ((name, "mtp"), ("M", "eagle")), (1, 2))))
    assert sum(one.text == "draft length d" for one in words(root)) == 1
