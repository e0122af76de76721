"""Algorithms of a collective against the size of its message: how long each takes, and which the library takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emu.cost.collectives import Placement, choose
from emu.cost.errors import PricingError
from emu.spmd import EmuError
from emu.view.labels import legend_below
from emu.view.style import CURVE_COLOURS, CURVE_LOOKS, drawing, new_figure
from emu.view.units import bytes_text, rate_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.hardware import Cluster

SIZES = tuple(2**power for power in range(10, 33))
NAMES = ("ring", "tree", "halving_doubling", "hierarchical", "in_switch", "torus", "direct")


def algorithms_figure(
    kind: str,
    placement: Placement,
    cluster: Cluster,
    algorithms: Sequence[str] = NAMES,
    sizes: Sequence[int] = SIZES,
    width: float = 10.0,
    title: str | None = None,
) -> Figure:
    """Draws each algorithm's time on the left and its bytes of message a second on the right, both logarithmic.

    What the library takes is the thick pale line. Algorithms that the group does not lie for are left out.

    Args:
        kind: e.g. "all_reduce".
        placement: how the group lies; see emu.cost.collectives.place_evenly.
        cluster: what it runs on.
        algorithms: which to draw.
        sizes: of the whole message in bytes.
        width: of the figure in inches.
        title: above the pictures; says how the group lies where not given.

    Raises:
        EmuError: no sizes; PricingError: no such kind, or none of the algorithms is possible.
    """
    if not sizes or min(sizes) < 1:
        raise EmuError(f"sizes {list(sizes)} are no messages", "give numbers of bytes, from 1 on")
    curves = {name: times for name in algorithms if (times := _times(kind, placement, cluster, name, sizes))}
    taken = [choose(kind, size, placement, cluster) for size in sizes]
    with drawing():
        figure = new_figure(width, 0.42 * width)
        left, right = figure.subplots(1, 2)
        every = min(len(curves), 4)  # each curve's markers begin elsewhere: those of equal curves are all seen
        for axes, of in ((left, lambda t, size: t), (right, lambda t, size: size / t)):
            values = [of(choice.seconds, size) for choice, size in zip(taken, sizes)]
            axes.plot(sizes, values, color=CURVE_COLOURS[0], linewidth=6, solid_capstyle="round", label="the library's")
            for i, (name, times) in enumerate(curves.items()):
                colour, marker = CURVE_LOOKS[i % len(CURVE_LOOKS)]
                values = [of(t, size) for t, size in zip(times, sizes)]
                axes.plot(
                    sizes, values, color=colour, marker=marker, markersize=3.2, linewidth=1.2, label=name.replace("_", " "),
                    linestyle="-" if i < len(CURVE_COLOURS) - 1 else ":", markevery=(i % every, every),
                )  # fmt: skip
            _log(axes, time_text if axes is left else lambda value: rate_text(value, "B/s"))
        left.set_title("time", loc="left")
        right.set_title("bytes of the message over time", loc="left")
        handles, labels = left.get_legend_handles_labels()
        legend_below(figure, handles, labels, side="center")
        nodes = f"{placement.nodes} nodes" if placement.nodes > 1 else "one node"
        shown = title or f"{kind.replace('_', ' ')} of {placement.n} devices in {nodes}, {cluster.chip.name}"
        figure.suptitle(shown, x=0.008, ha="left", fontsize=11, fontweight="bold")
    return figure


def _times(kind: str, placement: Placement, cluster: Cluster, name: str, sizes: Sequence[int]) -> list[float]:
    """Seconds by size; [] where the group does not lie for the algorithm."""
    try:
        return [choose(kind, size, placement, cluster, name).seconds for size in sizes]
    except PricingError:
        return []


def _log(axes: Axes, said: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1e3, 1e6, 1e9]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.yaxis.set_major_locator(LogLocator(numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#e9e9e9", linewidth=0.6, zorder=0)
    axes.set_xlabel("bytes of the message")
