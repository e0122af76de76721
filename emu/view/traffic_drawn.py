"""The devices that a run uses with their links, drawn: to the switch of their node or to each other, and to the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emu.cost.routes import OUT, SWITCHED, UP, WIRE
from emu.cost.traffic import Carried
from emu.view.labels import cut
from emu.view.style import CURVE_COLOURS, FAINT_INK, INK, ink_on
from emu.view.units import bytes_text, percent_text
from emu.view.wiring import MOST_DEVICES, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from emu.cost.timeline import Timeline

    Looks = Callable[[Carried | None], tuple[str, float]]

MOST_DRAWN = 32  # devices
MOST_LABELS, MOST_BUSIEST = 32, 8  # of wires, both directions: more labels than that would hide them
# From pale to dark, so that busy links stand out without colour, too.
SHADES = ("#c6d4e4", "#f2c572", "#d1603d", "#6b0f1a")
KEYS = (0.001, 0.01, 0.1, 0.5, 1.0)  # shares of the step that the legend shows
UNUSED, DEVICE, SWITCH = "#e3e3e3", CURVE_COLOURS[0], "#c9ced4"
DEVICE_Y, NETWORK_Y, NODE_Y = 0.0, 1.9, -1.9


def mixed(share: float) -> str:
    """The colour of a share of the step, 0-1: only what is busy all the time is as dark as can be.

    Along the square root, so that a hundredth and a tenth differ as well.
    """
    position = min(max(share, 0.0), 1.0) ** 0.5 * (len(SHADES) - 1)
    low = min(int(position), len(SHADES) - 2)
    parts = []
    for i in (1, 3, 5):
        a, b = (int(colour[i : i + 2], 16) for colour in SHADES[low : low + 2])
        parts.append(round(a + (b - a) * (position - low)))
    return "#{:02x}{:02x}{:02x}".format(*parts)


def is_busiest(link: Carried, links: Sequence[Carried]) -> bool:
    """Whether no link would be busy longer, but for rounding."""
    return link.utilisation(1.0) >= max(other.utilisation(1.0) for other in links) * (1 - 1e-9)


def can_be_drawn(timeline: Timeline, links: Sequence[Carried]) -> float:
    """Height over width of the picture of the wiring; 0 where there is too much, or nothing, to be drawn."""
    used = _devices(timeline)
    cluster = timeline.cluster
    if not used or not links or len(used) > MOST_DRAWN:
        return 0.0
    if _wired(cluster):
        fits = cluster.node.devices_per_node <= MOST_DEVICES and any(link.level == WIRE for link in links)
        return 0.34 if fits else 0.0
    across = any(link.level == OUT for link in links)
    return 0.34 if across else 0.2


def draw_cluster(axes: Axes, timeline: Timeline, links: Sequence[Carried], width: float) -> None:
    """Draws the devices that ran, in their nodes.

    Args:
        width: of the picture in points.
    """
    if _wired(timeline.cluster):
        _draw_wires(axes, timeline, links)
    else:
        _draw_switches(axes, timeline, links, width)
    axes.set_axis_off()


def draw_key(figure: Any, timeline: Timeline, links: Sequence[Carried]) -> None:
    """Below the devices, what colours and thickness mean."""
    from matplotlib.lines import Line2D

    most = percent_text(max(link.utilisation(timeline.step_time_s) for link in links))
    keys = [Line2D([], [], color=mixed(share), linewidth=4, label=f"{100 * share:g} %") for share in KEYS]
    heads = [Line2D([], [], linestyle="", label="colour: busy so much of the step")]
    tail = [Line2D([], [], linestyle="", label=f"thickness: beside the busiest link's {most}")]
    figure.legend(
        handles=[*heads, *keys, *tail], loc="outside lower left", ncols=2 + len(keys), fontsize=8, handlelength=1.2,
        columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def _devices(timeline: Timeline) -> list[int]:
    return sorted(timeline.trace.events)


def _wired(cluster: Any) -> bool:
    """Whether devices of a node are wired to each other, and the wires are known."""
    return cluster.node.shape is not None and cluster.node.shape.kind not in SWITCHED


def _draw_switches(axes: Axes, timeline: Timeline, links: Sequence[Carried], width: float) -> None:
    """Devices in a row, the switches of their nodes below them, and the network above."""
    from matplotlib.patches import FancyBboxPatch

    cluster, devices = timeline.cluster, _devices(timeline)
    look = _look(timeline, links)
    nodes = {node: i for i, node in enumerate(dict.fromkeys(map(cluster.node_of, devices)))}
    at = {device: i + 0.7 * nodes[cluster.node_of(device)] for i, device in enumerate(devices)}
    left, right = -0.4, max(max(at.values()) + 0.6, 7.0)
    span = right - left + 0.2
    sizes = {(link.level, link.place, link.way): link for link in links if link.level in (UP, OUT)}
    across = any(link.level == OUT for link in links)
    for level, end in ((UP, NODE_Y), *(((OUT, NETWORK_Y),) if across else ())):
        for device, x in at.items():
            both = [sizes.get((level, device, way)) for way in ("out", "in")]
            _draw_pair(axes, x, end, both, look, len(devices))
    for node in nodes:
        own = [at[device] for device in devices if cluster.node_of(device) == node]
        name = f"node {node}: {cluster.node.topology or 'switch'}"
        _bar(axes, min(own) - 0.4, max(own) + 0.4, NODE_Y, name, width / span)
    if across:
        _bar(axes, left, max(at.values()) + 0.4, NETWORK_Y, f"network: {cluster.scale_out.name}", width / span)
    for device, x in at.items():
        box = FancyBboxPatch(
            (x - 0.27, DEVICE_Y - 0.2), 0.54, 0.4, boxstyle="round,pad=0.02", facecolor=DEVICE, edgecolor=FAINT_INK,
            linewidth=0.6, zorder=3,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, DEVICE_Y, str(device), ha="center", va="center", fontsize=8, color=ink_on(DEVICE), zorder=4)
    axes.set_xlim(left - 0.2, right)
    axes.set_ylim(NODE_Y - 0.45, (NETWORK_Y if across else DEVICE_Y) + 0.45)


def _bar(axes: Axes, left: float, right: float, y: float, name: str, points: float) -> None:
    """A switch, with as much of its name as there is room for at so many points a unit."""
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((left, y - 0.2), right - left, 0.4, facecolor=SWITCH, edgecolor=FAINT_INK, linewidth=0.6, zorder=3)
    )
    shown = cut(name, (right - left) * points - 8, 8)
    axes.text((left + right) / 2, y, shown, ha="center", va="center", fontsize=8, zorder=4, clip_on=True)


def _draw_pair(axes: Axes, x: float, end: float, both: Sequence[Carried | None], look: Looks, crowd: int) -> None:
    """A link's two directions side by side: away from the device on the left, towards it on the right."""
    room = min(1.0, 14 / crowd)
    for side, link in zip((-0.09, 0.09), both):
        colour, share = look(link)
        start, stop = (DEVICE_Y, end) if side < 0 else (end, DEVICE_Y)
        axes.annotate(
            "", (x + side, start + 0.87 * (stop - start)), (x + side, start + 0.13 * (stop - start)), zorder=2,
            arrowprops={
                "arrowstyle": "-|>", "color": colour,
                "linewidth": (1.0 + 3.5 * share) * room, "mutation_scale": (7 + 4 * share) * room,
                "shrinkA": 0, "shrinkB": 0,
            },
        )  # fmt: skip
    for side, link in (("right", both[0]), ("left", both[1])):
        if link is not None:
            axes.text(
                x + (-0.2 if side == "right" else 0.2), (DEVICE_Y + end) / 2, bytes_text(link.bytes), ha=side,
                va="center", rotation=90, color=INK, fontsize=7 if crowd <= 16 else 5.5, fontweight=_weight(look, link),
            )  # fmt: skip


def _look(timeline: Timeline, links: Sequence[Carried]) -> Looks:
    """Tells how a link, or none, is drawn: its colour, by what it has of the step, and its share of the busiest's, 0-1."""
    top = max(link.utilisation(1.0) for link in links)

    def look(link: Carried | None) -> tuple[str, float]:
        if link is None:
            return UNUSED, 0.0
        return mixed(link.utilisation(timeline.step_time_s)), link.utilisation(1.0) / top

    return look


def _weight(look: Looks, link: Carried) -> str:
    return "bold" if look(link)[1] >= 1 - 1e-9 else "normal"


def _draw_wires(axes: Axes, timeline: Timeline, links: Sequence[Carried]) -> None:
    """The wires of each node that is used, side by side; the busier direction of each counts."""
    cluster, look = timeline.cluster, _look(timeline, links)
    shape: Any = cluster.node.shape
    at = places(shape)
    left, wide = 0.0, max(x for x, _ in at) - min(x for x, _ in at)
    used = set(_devices(timeline))
    for node in dict.fromkeys(map(cluster.node_of, sorted(used))):
        found = {link.place[1:]: link for link in links if link.level == WIRE and link.place[0] == node}
        for wire in shape.wires:
            both = [found.get(ends) for ends in ((wire.source, wire.target), (wire.target, wire.source))]
            carrying = [link for link in both if link is not None]
            colour, share = look(max(carrying, key=lambda link: link.utilisation(1.0), default=None))
            (x0, y0), (x1, y1) = at[wire.source], at[wire.target]
            axes.plot(
                [left + x0, left + x1], [y0, y1], color=colour, linewidth=0.8 + 4.0 * share, zorder=1 + share,
                solid_capstyle="round",
            )  # fmt: skip
            most = max(carrying, key=lambda link: link.bytes, default=None)
            alone = most is not None and sum(_weight(look, link) == "bold" for link in found.values()) <= MOST_BUSIEST
            if most is not None and (len(found) <= MOST_LABELS or (alone and _weight(look, most) == "bold")):
                axes.text(
                    left + 0.62 * x0 + 0.38 * x1, 0.62 * y0 + 0.38 * y1, bytes_text(most.bytes), ha="center", va="center",
                    fontsize=6.5, zorder=3, fontweight=_weight(look, most),
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
                )  # fmt: skip
        first = node * cluster.node.devices_per_node
        for place, (x, y) in enumerate(at[: shape.n_devices]):
            here = first + place in used
            axes.scatter([left + x], [y], s=150, color=DEVICE if here else UNUSED, edgecolor=FAINT_INK, zorder=3)
            if here:
                axes.text(left + x, y, str(first + place), ha="center", va="center", fontsize=7, zorder=4)
        low = min(y for _, y in at)
        axes.text(
            left + (min(x for x, _ in at) + wide / 2), low - 0.35, f"node {node}: {shape}", ha="center", fontsize=8
        )
        left += wide + 1.2
    axes.set_aspect("equal")
    axes.margins(0.06)
