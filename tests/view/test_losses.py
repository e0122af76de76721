"""Curves that coincide are seen to coincide, and how far they do not is said."""

import numpy as np
import pytest

from emu.view import loss_figure, png_bytes


def said(figure):
    return figure.axes[-1].get_title(loc="left")


def test_every_curve_is_in_the_legend_and_holds_its_losses():
    losses = {"1 device": [3.0, 2.0, 1.0], "8 devices": [3.0, 2.0, 1.0]}
    figure = loss_figure(losses)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(losses)
    for line, values in zip(figure.axes[0].lines, losses.values(), strict=True):
        assert list(line.get_ydata()) == values
    line, markers = figure.axes[0].lines
    assert line.get_linestyle() == "-" and markers.get_linestyle() == "None" and markers.get_marker() == "o"


def test_equal_curves_are_exactly_zero_apart():
    assert "exactly zero at every step" in said(loss_figure({"a": [3.0, 2.0], "b": [3.0, 2.0]}))


def test_a_last_bit_is_not_called_zero():
    figure = loss_figure({"a": [1.0, 1.0], "b": [np.nextafter(1.0, 2.0), 1.0]})
    assert "at most 2.2e-16" in said(figure) and "1 time exactly zero" in said(figure)
    png_bytes(figure)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_called_equal(bad):
    assert "not a number" in said(loss_figure({"a": [3.0, 2.0], "b": [3.0, bad]}))


def test_a_shorter_curve_is_compared_as_far_as_it_goes():
    assert "exactly zero in the first 2 steps" in said(loss_figure({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0]}))


@pytest.mark.parametrize("losses", [{"a": []}, {"a": [], "b": []}, {"a": [1.0]}, {"a": [1.0], "b": []}])
def test_few_or_no_steps_are_drawn(losses):
    png_bytes(loss_figure(losses))


def test_no_curve_is_refused():
    with pytest.raises(ValueError, match="no loss to draw"):
        loss_figure({})


def test_three_equal_curves_are_all_seen():
    figure = loss_figure({name: np.linspace(3, 2, 90) for name in "abc"})
    _, second, third = figure.axes[0].lines
    assert not set(second.get_xdata()) & set(third.get_xdata())
