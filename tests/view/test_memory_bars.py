"""Stacked bars of memory: as many bars as runs, as high as what each holds."""

import pytest

from emu.view import memory_bars_figure

HELD = {"dp": {"parameters": 3_000_000, "gradients": 1_000_000}, "zero1": {"parameters": 3_000_000, "other": 500_000}}


def heights(figure):
    axes = figure.axes[0]
    bars = [(round(p.get_x() + p.get_width() / 2), p.get_height()) for p in axes.patches]
    return [sum(h for at, h in bars if at == i) for i in range(len(HELD))]


def test_every_run_is_a_bar_as_high_as_what_it_holds():
    figure = memory_bars_figure(HELD, "title")
    assert heights(figure) == pytest.approx([4.0, 3.5])  # MB
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["dp", "zero1"]
    assert [t.get_text() for t in axes.texts] == ["4.00 MB", "3.50 MB"]
    assert axes.get_ylim()[1] > 4 and "MB" in axes.get_ylabel()
    more = {**HELD, "dp": {"parameters": 3_100_000, "gradients": 1_000_000}}
    assert heights(memory_bars_figure(more)) != heights(figure)  # it does draw what it is given


def test_only_what_somebody_holds_is_in_the_legend():
    figure = memory_bars_figure({"dp": {"parameters": 5, "optimizer": 0}})
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["parameters"]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        memory_bars_figure({})
