"""Memory of several runs side by side as a picture: a stacked bar each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from emu.view.labels import cut, fold, text_width
from emu.view.memory import STACK, category_legend
from emu.view.style import category_paints, drawing, hatch_ink, new_figure
from emu.view.units import byte_unit, bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_SLOTS = 4  # one bar alone is no wider than one of four
NARROW = 40.0  # points: names of narrower slots are turned
NAME_ROOM = 110.0  # points of a name that is turned


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
        paints = category_paints(shown)
        slot = (72 * width - 60) / max(len(held), LEAST_SLOTS)  # points for each bar
        totals = [bytes_text(sum(sizes.values())) for sizes in held.values()]
        upright = any(text_width(total, 9.0, True) > slot - 4 for total in totals)
        for i, (sizes, total) in enumerate(zip(held.values(), totals)):
            below = 0.0
            for name in shown:
                size = sizes.get(name, 0) / unit_bytes
                colour, hatch = paints[name]
                ink = hatch_ink(colour)
                axes.bar(i, size, 0.62, below, facecolor=colour, hatch=hatch or None, edgecolor=ink, linewidth=0.0)
                below += size
            axes.annotate(
                total,
                (i, below),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontweight="bold",
                rotation=90 if upright else 0,
            )
        turned = slot < NARROW or any("…" in fold(name, slot - 6, 8.5) for name in held)
        names = [cut(name, NAME_ROOM, 8.5) if turned else fold(name, slot - 6, 8.5) for name in held]
        looks: Any = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if turned else {}
        axes.set_xticks(range(len(held)), names, **looks)
        middle, half = (len(held) - 1) / 2, max(len(held), LEAST_SLOTS) / 2
        axes.set_xlim(middle - half, middle + half)
        axes.set_ylim(0, (1.35 if upright else 1.1) * top / unit_bytes or 1.0)
        axes.set_ylabel(f"memory ({unit})")
        axes.set_title(title, loc="left")
        category_legend(figure, shown)
    return figure
