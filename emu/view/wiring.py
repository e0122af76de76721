"""Topologies drawn: devices, switches and the wires between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any

from emu.hardware import Topology
from emu.spmd import EmuError
from emu.view.labels import legend_below, text_width
from emu.view.style import CURVE_COLOURS, FAINT_INK, INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.hardware.topology import Wire

MOST_DEVICES = 64
DEVICE, SWITCH, WIRE, WRAP = CURVE_COLOURS[0], CURVE_COLOURS[4], "#8a8a8a", CURVE_COLOURS[2]
# A DGX-1's two boards side by side, one a little higher, so that no wire passes behind a device.
_BOARDS = ((0, 1), (1, 1.12), (0, 0), (1, 0.12), (2.3, 1.5), (3.3, 1.62), (2.3, 0.5), (3.3, 0.62))

MOST_POINTS, LEAST_POINTS = 14.0, 4.0  # of a device, across

Place = tuple[float, float]


def wiring_figure(topologies: Mapping[str, Topology], columns: int = 3, width: float = 10.0) -> Figure:
    """Draws each topology with its wires (thicker ones carry more lanes), and says its ports, diameter and bisection.

    Args:
        topologies: title -> topology, each of at most 64 devices.
        columns: pictures side by side.
        width: of the figure in inches.

    Raises:
        EmuError: no topology, or one too large to be drawn.
    """
    large = [name for name, topology in topologies.items() if topology.n_devices > MOST_DEVICES]
    if large or not topologies:
        raise EmuError(
            f"{large[0]} has more than {MOST_DEVICES} devices" if large else "there is no topology to draw",
            "draw a smaller one of the same kind, e.g. Topology('torus', (4, 4))",
        )
    rows = ceil(len(topologies) / columns)
    with drawing():
        figure = new_figure(width, width / columns * 0.95 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for axes, (name, topology) in zip(panels, topologies.items()):
            _draw(axes, topology, 72 * width / columns - 20)
            axes.set_title(f"{name}: {topology}\n{figures_of(topology)}", loc="left", fontsize=8.5)
        for axes in figure.axes:
            axes.set_axis_off()
            axes.set_aspect("equal", adjustable="datalim")  # titles of a line stand at one height
        _legend(figure, list(topologies.values()))
    return figure


def _legend(figure: Figure, topologies: Sequence[Topology]) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, marker: str, colour: str) -> Line2D:
        looks: Any = {"markersize": 8, "markeredgecolor": FAINT_INK, "markeredgewidth": 0.5}
        return Line2D([], [], linestyle="", marker=marker, markerfacecolor=colour, label=label, **looks)

    handles = [mark("device", "o", DEVICE)]
    if any(topology.n_vertices > topology.n_devices for topology in topologies):
        handles.append(mark("switch", "s", SWITCH))
    lanes = {wire.lanes for topology in topologies for wire in topology.wires}
    handles.append(Line2D([], [], color=WIRE, label="wire" + "; thicker: more lanes" * (len(lanes) > 1)))
    if any(_wraps(topology, wire) for topology in topologies for wire in topology.wires):
        handles.append(Line2D([], [], color=WRAP, label="wire that closes a ring"))
    legend_below(figure, handles)


def figures_of(topology: Topology) -> str:
    """What a topology is measured by, in two lines."""
    lanes = topology.bisection_lanes
    return f"lanes: {topology.ports} a device, {lanes:g} between halves;\nwires on the way: {topology.diameter} at most"


def places(topology: Topology) -> list[Place]:
    """Where each device, and then each switch, is drawn."""
    n, sizes = topology.n_devices, topology.sizes
    if topology.kind == "hybrid cube mesh":
        return list(_BOARDS[:n])
    if topology.kind in ("torus", "grid", "hypercube") and not _is_ring(topology):
        sizes = (2,) * sizes[0] if topology.kind == "hypercube" else sizes
        return [_projected(topology.coordinates(device)) for device in range(n)]
    if topology.kind in ("full mesh", "switch") or _is_ring(topology):
        ring = [(sin(2 * pi * i / n), cos(2 * pi * i / n)) for i in range(n)]
        return ring + [(0.0, 0.0)] * (topology.n_vertices - n)
    return _tree(topology)


def _projected(at: tuple[int, ...]) -> Place:
    """Columns, rows, and further axes to the back."""
    x, y = float(at[-1]), -float(at[-2]) if len(at) > 1 else 0.0
    for depth, step in enumerate(reversed(at[:-2])):
        x, y = x + 0.36 * step * (1 + depth), y + 0.3 * step * (1 + 0.6 * depth)
    return x, y


def _tree(topology: Topology) -> list[Place]:
    """Devices below, each switch above the middle of what hangs on it; leaves of rails side by side."""
    n = topology.n_devices
    found: dict[int, Place] = {device: (float(device + device // _group(topology)), 0.0) for device in range(n)}
    below: dict[int, list[int]] = {}
    for wire in topology.wires:
        below.setdefault(wire.target, []).append(wire.source)
    step = 0.3 * (found[n - 1][0] + 1)
    for switch in range(n, topology.n_vertices):
        under = [found[v] for v in below[switch]]
        found[switch] = (sum(x for x, _ in under) / len(under), max(y for _, y in under) + step)
    if topology.kind == "rails":
        leaves = [v for v in range(n, topology.n_vertices) if found[v][1] == step]
        for i, leaf in enumerate(leaves):
            found[leaf] = ((i + 0.5) / len(leaves) * found[n - 1][0], step)
    return [found[v] for v in range(topology.n_vertices)]


def _group(topology: Topology) -> int:
    """Devices that stand close together: a node's of rails, a rack's of a fat tree."""
    return topology.sizes[-1]


def _is_ring(topology: Topology) -> bool:
    return topology.kind == "torus" and len(topology.sizes) == 1 and topology.n_devices > 2


def _wraps(topology: Topology, wire: Wire) -> bool:
    """Whether a wire goes back around a ring that is drawn as a line."""
    if topology.kind != "torus" or _is_ring(topology):
        return False
    return not _neighbours(topology, wire.source, wire.target)


def _draw(axes: Axes, topology: Topology, room: float) -> None:
    """Into a square of so many points."""
    from matplotlib.patches import FancyArrowPatch

    at, n = places(topology), topology.n_devices
    for wire in topology.wires:
        (x0, y0), (x1, y1) = at[wire.source], at[wire.target]
        thick = (0.4 + 0.8 * min(wire.lanes, 8) ** 0.75) * (0.3 if len(topology.wires) > 300 else 1.0)
        if _wraps(topology, wire):
            arc = FancyArrowPatch(
                (x0, y0), (x1, y1), connectionstyle="arc3,rad=0.22", arrowstyle="-", color=WRAP, linewidth=0.8 * thick, zorder=1
            )  # fmt: skip
            axes.add_patch(arc)
        else:
            axes.plot([x0, x1], [y0, y1], color=WIRE, linewidth=thick, zorder=1, solid_capstyle="round")
    extent = max(1.0, *(max(one) - min(one) for one in zip(*at)))
    apart = min((hypot(a[0] - b[0], a[1] - b[1]) for i, a in enumerate(at) for b in at[:i]), default=1.0)
    across = min(MOST_POINTS, max(0.9 * apart / extent * room / 1.28, LEAST_POINTS))
    looks: Any = {"edgecolor": FAINT_INK, "linewidth": 0.5, "zorder": 3, "clip_on": False}
    axes.scatter(*zip(*at[:n]), s=across**2, color=DEVICE, **looks)
    if at[n:]:
        axes.scatter(*zip(*at[n:]), s=across**2, marker="s", color=SWITCH, **looks)
    size = min(7.0, 0.75 * across)
    if n <= 16 and text_width(str(n - 1), size) <= across:
        for device, place in enumerate(at[:n]):
            axes.annotate(str(device), place, ha="center", va="center", fontsize=size, color=INK, zorder=4)
    axes.margins(0.14)


def _neighbours(topology: Topology, a: int, b: int) -> bool:
    """Whether two devices of a torus lie side by side, so that the wire between them is no way round."""
    return sum(abs(p - q) for p, q in zip(topology.coordinates(a), topology.coordinates(b))) == 1
