"""Who sends how many tokens to whom in a mixture of experts, and which rank gets most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from emu.view.labels import text_width
from emu.view.mesh import COORDINATES
from emu.view.style import FAINT_INK, INK, drawing, ink_on, new_figure
from emu.view.units import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from emu.parallel.expert import Routing

MOST_NUMBERS = 16  # ranks up to which every cell says its number
MOST_TICKS = 16
LOAD = "#35456c"


def routing_figure(
    routing: Routing | Sequence[Sequence[int]],
    width: float = 6.0,
    title: str = "copies of tokens sent to the experts of every rank",
) -> Figure:
    """Draws who sends how many copies of tokens to whom, and below what every rank receives, against the mean.

    What stays on its rank lies on the diagonal. The slowest rank sets the pace: the highest bar over the mean (dashed) is
    what imbalance costs.

    Args:
        routing: what `emu.parallel.expert.routing_of` gives for a layer; or a matrix, matrix[i][j] copies from rank i to j.
        width: of the figure in inches.
        title: above the picture.

    Raises:
        ValueError: no matrix, or one with negative counts.
    """
    sent = np.asarray(getattr(routing, "sent", routing), dtype=float)
    if sent.ndim != 2 or not sent.size or not np.isfinite(sent).all() or (sent < 0).any():
        raise ValueError(
            f"there is no traffic to draw in an array of shape {sent.shape}: give a layer's routing, as of "
            "routing_of(model, group), or one row of counts for each sender"
        )
    senders, receivers = sent.shape
    with drawing():
        tall = min(max(senders / receivers, 0.3), 2.0)  # cells are square but in very long matrices
        figure = new_figure(width, width * (0.42 + 0.75 * tall))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3 * tall, 1])
        _draw_matrix(above, sent, (72 * width - 70) / receivers, 72 * width * 0.75 * tall / senders)
        _draw_loads(below, sent.sum(0))
        figure.suptitle(title, x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _colours() -> Colormap:
    """From light (few) to dark (many), told apart without colour, too."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("routing", ["#ffffff", *reversed(COORDINATES)])


def _draw_matrix(axes: Axes, sent: np.ndarray, across: float, down: float) -> None:
    """Each cell has so many points across and down; where numbers have no room, the darkest is told."""
    from matplotlib.colors import to_hex

    senders, receivers = sent.shape
    colours, most = _colours(), max(float(sent.max()), 1.0)
    axes.imshow(sent, cmap=colours, vmin=0, vmax=most, aspect="auto", interpolation="nearest")
    numbers = max(senders, receivers) <= MOST_NUMBERS and down >= 9
    numbers = numbers and max(text_width(f"{n:,.0f}", 8.0) for n in sent.flat) <= across - 3
    if numbers:
        for i, j in np.ndindex(sent.shape):
            red, green, blue, _ = colours(float(sent[i, j]) / most)
            ink = ink_on(to_hex((red, green, blue)))
            inside = axes.text(j, i, f"{sent[i, j]:,.0f}", ha="center", va="center", color=ink, fontsize=8)
            inside.set_in_layout(False)  # else hundreds are measured
    axes.set_yticks(_ticks(senders))
    axes.set_ylabel("from rank")
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    axes.tick_params(bottom=False)
    stays = float(np.trace(sent)) / max(float(sent.sum()), 1.0) if senders == receivers else 0.0
    said = f", {100 * stays:.0f} % of them stay on their rank" if senders == receivers else ""
    said += "" if numbers else f"; darkest: {number_text(sent.max())}"
    axes.set_title(f"{number_text(sent.sum())} copies of tokens{said}", loc="left", fontsize=9)


def _draw_loads(axes: Axes, loads: np.ndarray) -> None:
    mean = float(loads.mean())
    axes.bar(range(len(loads)), loads, color=LOAD, width=0.8)
    axes.axhline(mean, color=INK, linewidth=1.0, linestyle="--")
    axes.set_ylim(0, max(float(loads.max()), 1.0) * 1.12)
    axes.set_xticks(_ticks(len(loads)))
    axes.set_xlim(-0.5, len(loads) - 0.5)
    axes.yaxis.set_major_formatter(lambda value, _: number_text(value))
    axes.set_xlabel("to rank")
    axes.set_ylabel("received")
    axes.tick_params(axis="y", colors=FAINT_INK)
    worst = float(loads.max()) / mean if mean else 1.0
    axes.set_title(f"the busiest rank gets {worst:.2f} times the mean (dashed)", loc="left", fontsize=9)


def _ticks(n: int) -> range:
    return range(0, n, -(-n // MOST_TICKS))
