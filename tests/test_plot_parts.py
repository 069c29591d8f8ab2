"""The parts that pictures of grids are made of: hatched cells, axes, scales, planes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import fpmjax
from fpmjax.plot.maps import rectangles
from fpmjax.plot.plane import plane_of
from fpmjax.plot.scale import log_levels, places_of, plain, shades_of


def test_rectangles_cover_exactly_the_cells():
    rng = np.random.default_rng(0)
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        where = rng.random((7, 11)) < share
        covered = np.zeros((7, 11), int)
        for row, first, end, top in rectangles(where):
            covered[row:top, first:end] += 1
        assert (covered == where).all()
    assert len(rectangles(np.ones((5, 5), bool))) == 1


def test_axes_have_room_for_zero_and_few_ticks():
    places = places_of(np.array([0, 512, 1024, 65_536]))
    assert places.log and places.at[0] == 256 and places.ticks()[1] == ["0", "512", "1,024", "65,536"]
    assert (np.diff(places.edges) > 0).all() and len(places.edges) == 5
    assert not places_of(np.array([5, 6, 7])).log and len(places_of(np.arange(1, 513)).ticks()[0]) == 10
    assert places_of(np.arange(100, 161)).ticks()[1][0] == "100" and places_of(np.array([3])).edges.tolist() == [
        2.5,
        3.5,
    ]


def test_scales_are_symmetrical_logarithmic_or_of_one_value():
    signed = shades_of(np.array([-1.0, 4.0]), signed=True)
    assert signed is not None and signed.norm.vmin == -signed.norm.vmax
    wide = shades_of(np.array([1.0, 5000.0]), signed=False)
    assert wide is not None and type(wide.norm).__name__ == "LogNorm" and 500 in wide.levels
    one = shades_of(np.array([2.0, np.nan]), signed=False)
    assert one is not None and not len(one.levels) and shades_of(np.array([np.nan]), signed=False) is None
    assert log_levels(1e-9, 1e9).tolist()[0] == 1e-8
    assert [plain(x) for x in (0.5, 13.756, 4096.0, 2.1e6, 0.0)] == ["0.5", "13.76", "4,096", "2.1M", "0"]


def test_a_plane_takes_batch_before_context_and_the_rest_as_panels(embedded_cells):
    models = [fpmjax.direct(embedded_cells.select(tp=tp)) for tp in (1, 4)]
    axes = {"draft_length": [2, 1], "kv_per_request": [512, 32, 512], "prefill_requests": 0}
    plane = plane_of(models, fpmjax.grid(**axes, decode_requests=range(1, 10)))
    assert (plane.x, plane.y, plane.series) == ("decode_requests", "kv_per_request", ("model", "draft_length"))
    assert plane.shape == (4, 2, 9) and plane.fixed == "prefill requests 0"
    assert [panel for panel, _ in plane.places()][1].endswith("draft length 2")
