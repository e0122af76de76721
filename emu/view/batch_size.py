"""How far a larger batch helps: the steps and the examples that it takes to reach a goal, by batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from emu.parallel.noise import Tradeoff, fit_tradeoff
from emu.view.labels import legend_below, text_width
from emu.view.style import CURVE_COLOURS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FITTED, MEASURED, NOISE = CURVE_COLOURS[:3]
BEYOND = "#f3f3f3"
MOST_TICKS = 8


def batch_size_figure(
    steps: Mapping[int, float],
    noise_scale: float | None = None,
    width: float = 8.0,
    title: str = "how far a larger batch helps",
) -> Figure:
    """Draws steps to the goal on the left and examples to the goal on the right, against the batch size.

    Up to the critical batch size twice the batch needs little more than half the steps, and hardly more examples; beyond
    it (shaded) steps hardly fall any more, and examples grow as the batch does. Thin lines are the two limits.

    Args:
        steps: batch size in examples -> optimizer steps to the goal, for two sizes or more.
        noise_scale: of the gradient, in examples, where it was measured: it predicts the critical batch size.
        width: of the figure in inches.
        title: above the pictures.

    Raises:
        EmuError: measurements to which no trade-off can be fitted.
    """
    batches = np.array(sorted(steps), dtype=float)
    taken = np.array([steps[b] for b in sorted(steps)], dtype=float)
    curve = fit_tradeoff(batches.tolist(), taken.tolist())
    with drawing():
        figure = new_figure(width, 4.3)
        left, right = figure.subplots(1, 2)
        for axes, values, fitted, about in (
            (left, taken, curve.steps, "time: optimizer steps to the goal"),
            (right, taken * batches, curve.examples, "cost: examples to the goal"),
        ):
            _axes(axes, batches, values, 36 * width - 70)
            low, high = axes.get_xlim()
            line = np.geomspace(low, high, 200)
            axes.plot(line, [fitted(b) for b in line], color=FITTED, linewidth=5, label="fitted", zorder=1)
            axes.plot(batches, values, "o", color=MEASURED, markersize=5, label="measured", zorder=3)
            axes.set_title(about, loc="left")
            _limits(axes, line, curve, in_examples=axes is right)
            _mark(axes, curve, noise_scale)
        named = {label: handle for axes in (left, right) for handle, label in zip(*axes.get_legend_handles_labels())}
        legend_below(figure, [*named.values()], [*named], side="center")
        figure.suptitle(title, x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _axes(axes: Axes, batches: np.ndarray, values: np.ndarray, points: float) -> None:
    """Both logarithmic; as many batch sizes are named as there is room for in so many points."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    axes.set_ylim(values.min() / 2, values.max() * 2)
    between = points / math.log(2.25 * batches[-1] / batches[0])  # points to a factor of e
    widest = max(text_width(number_text(batch), 8.5) for batch in batches) + 6
    apart = min(math.log(b / a) for a, b in pairwise(batches)) * between
    every = max(math.ceil(len(batches) / MOST_TICKS), math.ceil(widest / apart))
    axes.set_xticks(batches[::every])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if values.max() < 50 * values.min() else (1,)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.set_xlabel("batch size in examples")


def _limits(axes: Axes, line: np.ndarray, curve: Tradeoff, in_examples: bool) -> None:
    """What very large and very small batches come to."""
    large, small = np.full(len(line), curve.min_steps), curve.min_examples / line
    floor, slope = (small * line, large * line) if in_examples else (large, small)
    look = {"color": FAINT_INK, "linewidth": 1.1, "zorder": 2}
    if floor.min() > 0:
        least = [
            f"{number_text(n)} {what}"
            for n, what in ((curve.min_steps, "steps"), (curve.min_examples, "examples"))
            if n > 0
        ]
        axes.plot(line, floor, ":", label=f"at least {' and '.join(least)}", **look)
    if slope.min() > 0:
        axes.plot(line, slope, "-.", label="half the steps, or twice the examples, for twice the batch", **look)


def _mark(axes: Axes, curve: Tradeoff, noise_scale: float | None) -> None:
    """The critical batch size and the measured noise scale, where they lie within the picture."""
    low, high = axes.get_xlim()
    if low < curve.critical < high:
        label = f"critical batch size {number_text(curve.critical)}"
        axes.axvspan(curve.critical, high, color=BEYOND, zorder=0, linewidth=0)
        axes.axvline(curve.critical, color=INK, linewidth=0.9, zorder=1, label=label)
    if noise_scale is not None and low < noise_scale < high:
        label = f"measured noise scale {number_text(noise_scale)}"
        axes.axvline(noise_scale, color=NOISE, linewidth=1.2, linestyle="--", zorder=1, label=label)
