"""How much every rank attends to in each step of attention across ranks, as a heat map: of cuts, and of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.parallel.context.cut import Cut
from emu.view.context_work import check_cuts, imbalance, measured, name_of, percent, planned
from emu.view.mesh import COORDINATES
from emu.view.style import INK, drawing, ink_on, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERS = 16
MOST_TICKS = 16
COLUMN_INCHES, BARS_INCHES = 0.55, 1.1
MATRIX_INCHES, MOST_INCHES = 8.0, 15.0  # of a heat map without numbers, and of all that stand beside each other
BUSY = "#35456c"
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind numbers that lines cross


def attended_work_figure(
    cuts: Cut | Sequence[Cut], run: Any = None, width: float | None = None, title: str | None = None
) -> Figure:
    """Draws how much every rank attends to in every step of the ring, a heat map for each cut, and beside it each rank's sum.

    Numbers are percent of all attended pairs. The slowest rank sets the pace: what the longest bar is above the mean
    (dashed) is what an uneven cut costs.

    Args:
        cuts: one, or several of the same sequence, to compare.
        run: a run or a window of one, its timeline or its trace: what its attention kernels of a forward did, as shares of
            their FLOPs, is drawn last.
        width: of the figure in inches; None: as many panels need.
        title: above the picture.

    Raises:
        ValueError: no cuts, or nothing in the run is attention across ranks.
    """
    some: list[Any] = list(cuts) if isinstance(cuts, (list, tuple)) else [cuts]
    check_cuts(some)
    panels = [(name_of(cut), percent(planned(cut))) for cut in some]
    if run is not None:
        flops = measured(run)
        panels.append(("the run's kernels", percent(flops)))
    steps = max(shares.shape[1] for _, shares in panels)
    inches = COLUMN_INCHES if steps <= MOST_NUMBERS else MATRIX_INCHES / steps
    columns = [max(shares.shape[1] * inches, 2 * COLUMN_INCHES) for _, shares in panels]
    most = max(float(shares.max(initial=0.0)) for _, shares in panels)
    longest = max(float(shares.sum(1).max(initial=0.0)) for _, shares in panels)
    many = max(len(shares) for _, shares in panels)
    beside = max(1, min(3, int(MOST_INCHES / (max(columns) + BARS_INCHES + 1.2))))
    lines = _in_lines(len(panels), beside)
    need = [sum(columns[i] + BARS_INCHES + 1.2 for i in line) for line in lines]
    with drawing():
        figure = new_figure(width or max(*need, 5.0), len(lines) * (0.3 * min(max(many, 3), 16) + 1.25) + 0.5)
        subs = figure.subfigures(len(lines), 1, squeeze=False)[:, 0]
        for line, sub, inches in zip(lines, subs, need):
            rest = max(max(need) - inches, 1e-3)  # so that a panel is as wide in a short line as in a long one
            ratios = [*(ratio for i in line for ratio in (columns[i], BARS_INCHES)), rest]
            grid = sub.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
            grid[-1].axis("off")
            for i, heat, bars in zip(line, grid[::2], grid[1::2]):
                name, shares = panels[i]
                _draw_heat(heat, shares, most)
                _draw_bars(bars, shares.sum(1), longest)
                said = f"{name}\nbusiest rank: {imbalance(shares):.2f} x mean"
                if max(shares.shape) > MOST_NUMBERS:  # no numbers in it
                    said += f"; darkest: {most:.2g} %"
                heat.set_title(said, loc="left", fontsize=9)
        said = "attended pairs by rank and step, percent of all" if title is None else title
        figure.suptitle(said, x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _in_lines(n: int, most: int) -> list[list[int]]:
    """Panels in lines of about equal length, at most so many each."""
    count = -(-n // most)
    return [[int(i) for i in line] for line in np.array_split(np.arange(n), count)]


def _draw_heat(axes: Axes, shares: np.ndarray, most: float) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ranks, steps = shares.shape
    colours = LinearSegmentedColormap.from_list("work", ["#ffffff", *reversed(COORDINATES)])
    axes.imshow(shares, cmap=colours, vmin=0, vmax=most or 1.0, aspect="auto", interpolation="nearest")
    if max(ranks, steps) <= MOST_NUMBERS:
        for i, j in np.ndindex(shares.shape):
            red, green, blue, _ = colours(float(shares[i, j]) / (most or 1.0))
            said = f"{shares[i, j]:.1f}" if shares[i, j] else "–"
            ink = ink_on(to_hex((red, green, blue)))
            inside = axes.text(j, i, said, ha="center", va="center", fontsize=8, color=ink)
            inside.set_in_layout(False)  # else hundreds are measured
    axes.set_xticks(range(0, steps, -(-steps // MOST_TICKS)))
    axes.set_yticks(range(0, ranks, -(-ranks // MOST_TICKS)))
    axes.set_xlabel("step")
    axes.set_ylabel("rank")
    axes.tick_params(length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)


def _draw_bars(axes: Axes, loads: np.ndarray, longest: float) -> None:
    """Each rank's sum, in the heat map's rows."""
    places = range(len(loads))
    axes.barh(places, loads, height=0.7, color=BUSY)
    mean = float(loads.mean()) if len(loads) else 0.0
    axes.axvline(mean, color=INK, linewidth=1.0, linestyle="--")
    axes.set_ylim(len(loads) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.5 or 1.0)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("sum (%)")
    if len(loads) <= MOST_NUMBERS:
        for place, load in zip(places, loads):
            at = mean if load < mean < load + 0.55 * longest else load  # beyond the line that would cross the number
            axes.text(at + longest * 0.05, place, f"{load:.1f}", va="center", fontsize=8, bbox=_PAPER)
