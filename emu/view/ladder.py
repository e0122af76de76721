"""The ladder of memories and links: how much each level of a cluster holds for a device, and how fast a device is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.hardware.summary import NAMES as LEVELS
from emu.spmd import EmuError
from emu.view.style import CURVE_COLOURS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import bytes_text, rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The words of the table, and where needed what a device finds there.
NAMES = LEVELS | {
    "scale_up": f"{LEVELS['scale_up']}: other devices of the node",
    "scale_out": f"{LEVELS['scale_out']}: other nodes",
}
ORDER = ("registers", "sm", "l2", "hbm", "scale_up", "host", "scale_out", "above_pods", "storage")


def ladder_figure(summary: Any, width: float = 9.5, title: str | None = None) -> Figure:
    """Draws each level of a cluster as a row, nearest first: left what it holds, right bytes/s, each for one device.

    A level that all devices share is divided among them, as if all used it at once. What no source was found for is left
    empty.

    Args:
        summary: what cluster.summary() gives.
        width: of the figure in inches.
        title: above the pictures; names the cluster where not given.

    Raises:
        EmuError: no level is known.
    """
    levels = sorted(summary.levels, key=lambda level: ORDER.index(level.name))
    if not levels:
        raise EmuError("there is no level to draw", "give what cluster.summary() gives")
    n = summary.n_devices
    with drawing():
        figure = new_figure(width, 0.36 * len(levels) + 1.3)
        left, right = figure.subplots(1, 2, sharey=True)
        names = [NAMES[level.name] for level in levels]
        held = [None if level.memory_bytes is None else level.memory_bytes / n for level in levels]
        speed = [None if level.bytes_per_s is None else level.bytes_per_s / n for level in levels]
        _bars(left, held, CURVE_COLOURS[2], bytes_text, "holds for each device")
        _bars(right, speed, CURVE_COLOURS[4], lambda value: rate_text(value, "B/s"), "bandwidth of each device")
        left.set_yticks(range(len(names)), names)
        left.invert_yaxis()
        shown = title or f"{summary.name}: {summary.n_devices:,} {summary.chip}, if all use a level at once"
        figure.suptitle(shown, x=0.008, ha="left", fontsize=11, fontweight="bold")
    return figure


def _bars(axes: Axes, values: list[float | None], colour: str, said: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    known = [value for value in values if value]
    axes.set_xscale("log")
    if known:
        low = min(known) / 8
        axes.set_xlim(low, max(known) * 60)
        for row, value in enumerate(values):
            if value:
                axes.barh(row, value - low, left=low, height=0.62, color=colour)
                axes.annotate(
                    said(value), (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
                    color=INK,
                )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=7.5, labelcolor=FAINT_INK)
    axes.set_title(title, loc="left")
