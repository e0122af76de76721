"""The mesh as a picture and as HTML: which rank lies on which device of which node, and who talks to whom."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from emu.view.bars import sample_ranks
from emu.view.labels import text_width
from emu.view.style import FAINT_INK, drawing, ink_on, new_figure
from emu.view.units import rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from emu.spmd import Mesh

MOST_NODES = 6
MOST_COLUMNS = 16  # a node with more devices takes several lines
UNUSED = "#f4f4f4"
# Coordinates from dark to light: one colour map for the eye with and without colour (cividis, sampled).
COORDINATES = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")


class Place(NamedTuple):
    """One device: where it is, and which rank lies on it (None if no rank does)."""

    node: int
    slot: int
    rank: int | None


def mesh_places(mesh: Mesh, cluster: Any = None) -> list[Place]:
    """Every device of the nodes that hold ranks, node by node. Ranks fill devices in order.

    Args:
        mesh: axes and sizes.
        cluster: the devices; None takes the mesh's own, and without one a single node that just fits.
    """
    cluster = cluster if cluster is not None else mesh.on
    per_node = cluster.node.devices_per_node if cluster is not None else mesh.size
    nodes = -(-mesh.size // per_node)
    return [
        Place(node, slot, rank if (rank := node * per_node + slot) < mesh.size else None)
        for node in range(nodes)
        for slot in range(per_node)
    ]


def _colour(index: int, size: int) -> str:
    """Between the colours of COORDINATES, so that no two of eight coordinates look alike."""
    if size < 2:
        return COORDINATES[2]
    position = index * (len(COORDINATES) - 1) / (size - 1)
    low = min(int(position), len(COORDINATES) - 2)
    mixed = []
    for i in (1, 3, 5):
        dark, light = (int(colour[i : i + 2], 16) for colour in COORDINATES[low : low + 2])
        mixed.append(round(dark + (light - dark) * (position - low)))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _axes(mesh: Mesh) -> list[str]:
    """The axes worth a panel: those along which there is more than one rank."""
    return [axis for axis, size in mesh.axes.items() if size > 1] or list(mesh.axes)[:1]


def _who_talks(mesh: Mesh, cluster: Any, axis: str) -> str:
    """One sentence about the groups along an axis: one of them, and its link; one that crosses nodes if any does."""
    groups = [mesh.members(rank, axis) for rank in sample_ranks(range(mesh.size), 512)]
    crossing = [group for group in groups if cluster is not None and cluster.crosses_nodes(group)]
    members = (crossing or groups)[0]
    some = ", ".join(map(str, members[:8])) + (", …" if len(members) > 8 else "")
    if len(members) < 2:
        return f"{axis}=1: rank {some} is alone along {axis}"
    said = f"{axis}={mesh.axes[axis]}: ranks {some} are one {axis} group"
    if cluster is None or len(members) < 2:
        return said
    link = cluster.link(members)
    where = "across nodes" if crossing else "inside a node"
    return f"{said}, {where} ({link.name}, {rate_text(link.bandwidth_bytes_per_s, 'B/s')})"


def _said_of(mesh: Mesh, cluster: Any, axis: str) -> str:
    """What stands above the devices coloured by one axis."""
    if not axis:
        return "one device"
    said, size = _who_talks(mesh, cluster, axis), mesh.axes[axis]
    return said + (f"; colour: place along {axis}, from 0 (dark) to {size - 1} (light)" if size > 1 else "")


def mesh_figure(mesh: Mesh, cluster: Any = None, width: float = 11.0) -> Figure:
    """Draws nodes and devices once per axis: a rank's colour is its coordinate along that axis, dark to light.

    Ranks of one group along the axis differ in that coordinate alone. More than 6 nodes are sampled.

    Args:
        mesh: axes and sizes.
        cluster: what it lies on; None takes the mesh's own, and without one draws a single node.
        width: of the figure in inches.
    """
    cluster = cluster if cluster is not None else mesh.on
    places, axes_shown = mesh_places(mesh, cluster), _axes(mesh)
    nodes = sorted({place.node for place in places})
    shown = sample_ranks(nodes, MOST_NODES)
    per_node = len(places) // max(len(nodes), 1)
    columns = min(per_node, MOST_COLUMNS)
    lines = -(-per_node // columns)
    panels = max(len(axes_shown), 1)
    with drawing():
        room = (72 * width - 80) / max(columns, 8) * 0.94 - 2
        height = panels * (len(shown) * (lines + 0.35) * 0.45 + 0.45) + 0.5
        figure = new_figure(width, height)
        for axes, axis in zip(figure.subplots(panels, 1, squeeze=False)[:, 0], axes_shown or [""], strict=True):
            for line, node in enumerate(shown):
                own = [place for place in places if place.node == node]
                _draw_node(axes, mesh, own, axis, line * (lines + 0.35), columns, len(nodes) > 1, room)
            axes.set_xlim(-0.1, max(columns, 8) + 0.1)  # one device is no wider than one of eight
            axes.set_ylim(len(shown) * (lines + 0.35), -0.2)
            axes.axis("off")
            axes.set_title(_said_of(mesh, cluster, axis), loc="left", fontsize=9)
        heading = f"{mesh} on {cluster.name}" if cluster is not None else str(mesh)
        if len(shown) < len(nodes):
            heading += f": {len(shown)} of {len(nodes)} nodes shown"
        figure.suptitle(heading, x=0.01, ha="left", fontweight="bold")
    return figure


def _draw_node(
    axes: Axes, mesh: Mesh, places: Sequence[Place], axis: str, top: float, columns: int, named: bool, room: float
) -> None:
    """One node's devices. `room` is what a device has for words, in points."""
    from matplotlib.patches import Rectangle

    if named:
        axes.text(-0.15, top + 0.5, f"node {places[0].node}", ha="right", va="center", fontweight="bold")
    for place in places:
        line, column = divmod(place.slot, columns)
        colour, text = UNUSED, "free" if room > 24 else ""
        if place.rank is not None:
            coords = mesh.coords(place.rank)
            colour = _colour(coords[axis], mesh.axes[axis]) if axis else COORDINATES[2]
            text = f"{place.rank}"
            # A dozen devices a line leave room for the coordinates too.
            if columns <= 8 and coords:
                where = " ".join(f"{name}{i}" for name, i in coords.items())
                text += "\n" + where if text_width(where, 8.0) <= room else ""
        box = Rectangle(
            (column + 0.03, top + line + 0.04), 0.94, 0.92, facecolor=colour, edgecolor=FAINT_INK, linewidth=0.6
        )
        box.set_in_layout(False)  # else hundreds are measured
        axes.add_patch(box)
        ink = ink_on(colour) if place.rank is not None else FAINT_INK
        inside = axes.text(column + 0.5, top + line + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
        inside.set_in_layout(False)


def mesh_html(mesh: Mesh, cluster: Any = None) -> str:
    """The mesh as an HTML table for notebooks: a row a node, ranks with their coordinates, a sentence per axis.

    Colours are the coordinate along the innermost axis. More than 6 nodes are sampled.

    Args:
        mesh: axes and sizes.
        cluster: what it lies on; None takes the mesh's own.
    """
    cluster = cluster if cluster is not None else mesh.on
    places, axes = mesh_places(mesh, cluster), _axes(mesh)
    nodes = sorted({place.node for place in places})
    shown = sample_ranks(nodes, MOST_NODES)
    rows = []
    for node in shown:
        cells = "".join(_cell(mesh, place, axes[-1] if axes else "") for place in places if place.node == node)
        rows.append(f'<tr><th style="text-align:left">node {node}</th>{cells}</tr>')
    heading = f"{mesh} on {cluster.name}" if cluster is not None else str(mesh)
    if len(shown) < len(nodes):
        heading += f": {len(shown)} of {len(nodes)} nodes shown"
    said = "".join(f"<li>{escape(_who_talks(mesh, cluster, axis))}</li>" for axis in axes)
    return f"<div><b>{escape(heading)}</b><table>{''.join(rows)}</table><ul>{said}</ul></div>"


def _cell(mesh: Mesh, place: Place, axis: str) -> str:
    if place.rank is None:
        return f'<td style="background:{UNUSED};color:{FAINT_INK};text-align:center">free</td>'
    coords = mesh.coords(place.rank)
    colour = _colour(coords[axis], mesh.axes[axis]) if axis else COORDINATES[2]
    text = escape(" ".join(f"{name}{i}" for name, i in coords.items()))
    return f'<td style="background:{colour};color:{ink_on(colour)};text-align:center">{place.rank}<br><small>{text}</small></td>'
