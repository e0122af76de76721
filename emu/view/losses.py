"""Loss curves that should coincide, and by how much they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.view.labels import legend_below
from emu.view.style import CURVE_COLOURS, CURVE_LOOKS, FAINT_INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_MARKERS = 30
MOST_POINTS = 120  # of a curve that are marked one by one


def loss_figure(losses: Mapping[str, Sequence[float]], width: float = 8.0, title: str = "loss by step") -> Figure:
    """Draws the first curve as a thick line, the others as markers on it, and below how far they lie apart.

    Args:
        losses: name -> loss after each step. The first is what the others are compared with.
        width: of the figure in inches.
        title: above the curves.

    Raises:
        ValueError: no curve at all.
    """
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    if not losses:
        raise ValueError('there is no loss to draw; give {"1 device": [...], "8 devices": [...]}')
    curves = {name: np.asarray(values, dtype=float).reshape(-1) for name, values in losses.items()}
    (first, reference), *others = curves.items()
    with drawing():
        figure = new_figure(width, 4.4 if others else 3.0)
        panels = figure.subplots(
            2 if others else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + bool(others)]
        )
        above, below = panels[0, 0], panels[-1, 0]
        few = len(reference) <= MOST_POINTS  # among them one alone, or between two that are no numbers
        look: Any = {"linewidth": 5, "marker": "o" if few else "", "markersize": 5, "markeredgewidth": 0}
        above.plot(range(len(reference)), reference, color=CURVE_COLOURS[0], label=first, zorder=1, **look)
        for i, (name, curve) in enumerate(others):
            colour, marker = _look(i)
            every = max(1, len(curve) // MOST_MARKERS)
            # Each curve starts its markers elsewhere, so that three equal curves are all seen.
            spread = slice(i * every // max(len(others), 1), None, every)
            above.plot(
                np.arange(len(curve))[spread],
                curve[spread],
                marker,
                color=colour,
                markersize=5,
                fillstyle="none",
                label=name,
            )
        above.set_ylabel("loss")
        above.set_title(title, loc="left")
        legend_below(figure, *above.get_legend_handles_labels())
        if others:
            _draw_differences(below, first, reference, others)
        below.set_xlabel("step")
        longest = max(map(len, curves.values()))
        below.set_xlim(-0.5, max(longest - 0.5, 0.5))
        below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        below.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def _look(i: int) -> tuple[str, str]:
    return CURVE_LOOKS[i % len(CURVE_LOOKS)]


def _draw_differences(axes: Axes, first: str, reference: np.ndarray, others: Sequence[tuple[str, np.ndarray]]) -> None:
    """|difference| on a log axis; where all are zero there is nothing to draw, and that is said."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    largest, smallest, broken, compared, zeros = 0.0, np.inf, False, len(reference), 0
    for i, (_, curve) in enumerate(others):
        compared = min(compared, len(curve))
        one, other = reference[: len(curve)], curve[: len(reference)]
        with np.errstate(invalid="ignore"):
            apart = np.where(one == other, 0.0, np.abs(other - one))  # equal infinities are equal
        broken = broken or not bool(np.isfinite(apart).all())
        largest = max(largest, float(np.max(apart, initial=0.0, where=np.isfinite(apart))))
        zeros += int((apart == 0).sum())
        smallest = min(smallest, float(np.min(apart, initial=np.inf, where=apart > 0)))
        colour, marker = _look(i)
        drawn = np.where((apart == 0) | ~np.isfinite(apart), np.nan, apart)  # a log axis has no zero
        every = max(1, len(drawn) // MOST_POINTS)
        points: Any = {"marker": marker, "markersize": 3, "fillstyle": "none", "markevery": (i % every, every)}
        axes.plot(range(len(drawn)), drawn, color=colour, linewidth=0.8, **points)
    axes.set_ylabel("difference")
    longest = max(len(reference), *(len(curve) for _, curve in others))
    steps = "at every step" if compared == longest else f"in the first {compared} steps"
    if largest > 0:
        axes.set_yscale("log")
        axes.set_ylim(10 ** np.floor(np.log10(smallest) - 0.01), 10 ** np.ceil(np.log10(largest) + 0.01))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0e}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_yticks([0])
        axes.axhline(0, color=FAINT_INK, linewidth=0.8)
        axes.set_ylim(-1, 1)
    if broken:
        said = "not a number at some step"
    else:
        said = f"at most {largest:.2g} {steps}" if largest > 0 else f"exactly zero {steps}"
        if largest > 0 and zeros:
            said += f"; {zeros} time{'s' * (zeros > 1)} exactly zero, which is not drawn"
    axes.set_title(f"difference from {first}: {said}", loc="left", fontsize=9)
