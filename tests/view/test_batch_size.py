"""Steps and examples by batch size: what was measured, what it amounts to, and where a larger batch stops helping."""

import numpy as np
import pytest

import emu
from emu.parallel.noise import Tradeoff
from emu.view.batch_size import batch_size_figure
from emu.view.style import png_bytes

TRUTH = Tradeoff(min_steps=20.0, min_examples=800.0)
STEPS = {batch: TRUTH.steps(batch) for batch in (4, 16, 64, 256, 1024)}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def curve(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)


def test_what_was_measured_is_drawn_as_steps_and_as_examples_whatever_order_it_comes_in():
    for steps in (STEPS, dict(reversed(STEPS.items()))):
        left, right = batch_size_figure(steps).axes
        batches, taken = curve(left, "measured")
        assert list(batches) == sorted(STEPS) and list(taken) == [STEPS[b] for b in sorted(STEPS)]
        assert list(curve(right, "measured")[1]) == [b * STEPS[b] for b in sorted(STEPS)]
        assert left.get_xscale() == left.get_yscale() == right.get_yscale() == "log"


def test_the_fitted_curves_are_the_tradeoff():
    left, right = batch_size_figure(STEPS).axes
    x, y = curve(left, "fitted")
    assert y == pytest.approx([TRUTH.steps(b) for b in x], rel=1e-6)
    x, y = curve(right, "fitted")
    assert y == pytest.approx([TRUTH.examples(b) for b in x], rel=1e-6)


def test_the_critical_batch_size_is_where_the_limits_meet_and_what_lies_beyond_is_shaded():
    figure = batch_size_figure(STEPS, noise_scale=50.0)
    assert "critical batch size 40" in legend(figure) and "measured noise scale 50" in legend(figure)
    assert "at least 20 steps and 800 examples" in legend(figure)
    for axes in figure.axes:
        x, floor = curve(axes, "at least 20 steps and 800 examples")
        _, slope = curve(axes, "half the steps, or twice the examples, for twice the batch")
        meet = x[np.argmin(np.abs(np.log(slope / floor)))]
        assert meet == pytest.approx(40, rel=0.05)  # to the next of 200 points
        assert axes.patches[0].get_x() == pytest.approx(40)


def test_a_critical_batch_size_outside_of_the_picture_is_not_marked():
    """The control: what marks it is not always there."""
    figure = batch_size_figure({1000: 21.0, 2000: 20.5, 4000: 20.2}, noise_scale=3.0)
    assert not any("critical" in text or "noise" in text for text in legend(figure))
    assert not any(axes.patches for axes in figure.axes)


@pytest.mark.parametrize("steps", [{1: 100, 2: 50, 4: 25}, {1: 7, 2: 7, 4: 7}, {8: 100, 16: 99}])
def test_one_limit_alone_and_few_points_are_drawn(steps):
    png_bytes(batch_size_figure(steps))


def test_many_batch_sizes_do_not_crowd_the_axis():
    left, _ = batch_size_figure({2**i: TRUTH.steps(2**i) for i in range(20)}).axes
    assert len(left.get_xticks()) <= 8 and left.get_xticks()[0] == 1


@pytest.mark.parametrize("steps", [{}, {4: 10}, {4: 10, 8: 0}])
def test_what_fits_no_tradeoff_is_refused(steps):
    with pytest.raises(emu.EmuError) as error:
        batch_size_figure(steps)
    assert error.value.hint
