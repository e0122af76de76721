"""The decade of FLOP/s: every chip stands at its year, every rate is drawn, formats are told apart without colour."""

from dataclasses import replace
from itertools import pairwise

import pytest

from emu.hardware import chip, chip_names
from emu.spmd import EmuError
from emu.view import flops_decade_figure, png_bytes
from emu.view.decade import FORMATS, growth, peak_of

CHIPS = {name: chip(name) for name in chip_names()}


@pytest.fixture(scope="module")
def axes():
    return flops_decade_figure().axes[0]


def points(axes):
    """(x, FLOP/s, marker, filled) of every marker drawn alone."""
    alone = [line for line in axes.lines if len(line.get_xdata()) == 1]
    return [
        (line.get_xdata()[0], line.get_ydata()[0], line.get_marker(), line.get_markerfacecolor() != "white")
        for line in alone
    ]


def labels(axes):
    return {text.get_text(): text.xy[0] for text in axes.texts}


def test_every_chip_stands_at_its_year_under_its_name(axes):
    places = labels(axes)
    for name, it in CHIPS.items():
        x = places.get(name, places.get(name + "*"))
        assert abs(x - it.year) < 0.5, name
    assert len({places.get(name, places.get(name + "*")) for name in CHIPS}) == len(CHIPS)


def test_every_rate_is_drawn_once_filled_where_the_matrix_unit_reaches_it(axes):
    drawn = sorted((rate, marker, filled) for _, rate, marker, filled in points(axes))
    wanted = []
    for it in CHIPS.values():
        for style in FORMATS:
            rates = [(it.peak_flops[d], d) for d in style.dtypes if d in it.peak_flops]
            if rates:
                rate, dtype = max(rates)
                wanted.append((rate, style.marker, dtype in it.flops_by_unit()["matrix"]))
    assert drawn == sorted(wanted)
    assert {filled for *_, filled in drawn} == {True, False}


def test_formats_differ_in_marker_and_dashes_not_only_in_colour(axes):
    assert len({style.marker for style in FORMATS}) == len({style.dashes for style in FORMATS}) == len(FORMATS)
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [style.name for style in FORMATS] == legend[: len(FORMATS)]
    assert any("matrix" in words for words in legend) and any("vector" in words for words in legend)


def test_the_lines_follow_the_best_so_far(axes):
    lines = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert len(lines) == len(FORMATS)
    for line, style in zip(lines, FORMATS, strict=True):
        assert all(a <= b for a, b in pairwise(line.get_ydata()))
        assert line.get_ydata()[-1] == max(peak.flops_per_s for it in CHIPS.values() if (peak := peak_of(it, style)))


def test_a_rate_without_a_good_source_is_starred_and_one_with_is_not(axes):
    places = labels(axes)
    assert "ascend-910b*" in places and "h100" in places
    doubted = replace(CHIPS["h100"], sources={**CHIPS["h100"].sources, "peak_flops.float8": "unverified: a blog"})
    assert "h100*" in labels(flops_decade_figure({"h100": doubted}).axes[0])


def test_the_title_says_how_much_and_how_much_of_it_is_the_format():
    assert growth(CHIPS) == "1,166 x in 11 years, from k40 (float32) to gb200 (float8); float32 alone 90 x"
    assert growth({"k40": CHIPS["k40"]}) == "1 x in 0 years, from k40 (float32) to k40 (float32)"


def test_one_chip_is_drawn_and_none_with_a_year_is_refused():
    png_bytes(flops_decade_figure({"mine": CHIPS["k40"]}))
    for none in ({}, {"mine": replace(CHIPS["k40"], year=None)}):
        with pytest.raises(EmuError, match="no chip with a year"):
            flops_decade_figure(none)
