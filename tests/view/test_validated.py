"""Predicted against measured: every run is drawn where it belongs, every source looks different."""

from __future__ import annotations

from itertools import pairwise

import pytest

from emu.view import png_bytes, validated_figure
from emu.view.style import CURVE_LOOKS as LOOKS
from emu.view.style import luminance
from emu.view.validated import BAND, EDGE, Point

POINTS = [Point("many", 0.1 * i, 0.1 * i * (1 + 0.02 * (i % 5 - 2))) for i in range(1, 21)]
POINTS += [Point("few", 10.0, 30.0), Point("few", 12.0, 1.0), Point("one: with a subtitle", 5.0, 5.0)]


@pytest.fixture(scope="module")
def figure():
    return validated_figure(POINTS)


def drawn(axes):
    """(x, y) of all markers, by look."""
    return {
        (line.get_markerfacecolor(), line.get_marker()): list(zip(line.get_xdata(), line.get_ydata()))
        for line in axes.lines
        if line.get_linestyle() == "None"
    }


def test_every_run_stands_at_its_times(figure):
    found = drawn(figure.axes[0])
    assert sorted(p for group in found.values() for p in group) == sorted((p.measured_s, p.predicted_s) for p in POINTS)
    assert [len(group) for group in found.values()] == [20, 2, 1]


def test_sources_with_few_runs_lie_on_top(figure):
    heights = [line.get_zorder() for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert heights == sorted(set(heights))


def test_errors_are_drawn_by_time_and_none_is_lost(figure):
    found = sorted(p for group in drawn(figure.axes[1]).values() for p in group)
    seen = sorted((p.measured_s, min(max(p.error, -EDGE), EDGE)) for p in POINTS)
    assert found == seen
    bars = figure.axes[2].patches
    assert sum(bar.get_height() for bar in bars if bar.get_width() < 0.1) == len(POINTS)


def test_the_line_and_the_band_are_those_of_no_error_and_of_8_percent(figure):
    axes = figure.axes[0]
    (low, high) = axes.get_xlim()
    assert axes.get_xlim() == axes.get_ylim()
    band = axes.collections[0].get_paths()[0].vertices
    assert {round(y / x - 1, 6) for x, y in band} <= {-BAND, BAND}
    assert low < min(p.measured_s for p in POINTS) and high > max(p.predicted_s for p in POINTS)


def test_every_source_is_named_with_its_runs_and_without_its_subtitle(figure):
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["many (20)", "few (2)", "one (1)"]
    assert "23 runs" in figure.get_suptitle()


def test_sources_look_different_and_neighbours_differ_in_colour_and_marker():
    assert len(set(LOOKS)) == len(LOOKS) == 25
    for (colour, marker), (next_colour, next_marker) in pairwise(LOOKS):
        assert colour != next_colour and marker != next_marker
    assert all(luminance(colour) < 75 for colour, _ in LOOKS)  # seen on white


def test_more_sources_than_looks_are_drawn_all_the_same():
    many = validated_figure(Point(f"source {i}", 1.0 + i, 1.0 + i) for i in range(40))
    assert len(many.legends[0].get_texts()) == 40
    assert png_bytes(many).startswith(b"\x89PNG")


def test_odd_names_are_text():
    assert png_bytes(validated_figure([Point("$x$ \\frac{", 1.0, 1.1)])).startswith(b"\x89PNG")


def test_nothing_is_no_picture():
    with pytest.raises(ValueError, match="no run"):
        validated_figure([])
