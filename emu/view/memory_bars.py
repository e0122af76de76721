"""Memory of several runs side by side as a picture: a stacked bar each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from emu.view.memory import STACK, category_legend
from emu.view.style import CATEGORY_PAINTS, OTHER_CATEGORY, drawing, new_figure
from emu.view.units import byte_unit, bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_bars_figure(held: Mapping[str, Mapping[str, int]], title: str = "", width: float = 11.0) -> Figure:
    """Draws a stacked bar for every run.

    Args:
        held: run -> category -> bytes, e.g. `Memory.at_peak(rank)` of each.
        width: of the figure in inches.

    Raises:
        ValueError: no run.
    """
    if not held:
        raise ValueError("there is nothing to draw: give at least one run")
    order = [*STACK, *dict.fromkeys(name for sizes in held.values() for name in sizes if name not in STACK)]
    shown = [name for name in order if any(sizes.get(name) for sizes in held.values())]
    top = max(sum(sizes.values()) for sizes in held.values())
    unit, unit_bytes = byte_unit(top)
    with drawing():
        figure = new_figure(width, 4.2)
        axes = figure.subplots()
        for i, sizes in enumerate(held.values()):
            below = 0.0
            for name in shown:
                size = sizes.get(name, 0) / unit_bytes
                colour, hatch = CATEGORY_PAINTS.get(name, OTHER_CATEGORY)
                axes.bar(
                    i, size, 0.62, below, facecolor=colour, hatch=hatch or None, edgecolor="#ffffff", linewidth=0.0
                )
                below += size
            total = bytes_text(sum(sizes.values()))
            axes.annotate(total, (i, below), xytext=(0, 3), textcoords="offset points", ha="center", fontweight="bold")
        axes.set_xticks(range(len(held)), list(held))
        axes.set_ylim(0, 1.1 * top / unit_bytes or 1.0)
        axes.set_ylabel(f"memory ({unit})")
        axes.set_title(title, loc="left")
        category_legend(figure, shown)
    return figure
