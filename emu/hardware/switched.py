"""Topologies with switches: one switch, fat tree and rails. See emu.hardware.topology.

A switch here is a logical one: in a real machine several switches (the planes of NVSwitch, the spines of a Clos network)
do its work together, and messages are spread over them so that no wire between them is busier than the ones drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from .wires import Wire

if TYPE_CHECKING:
    from .topology import Topology

KINDS = ("switch", "fat tree", "rails")


def n_switches(topology: Topology) -> int:
    return sum(count for count, _ in _levels(topology))


def wires(topology: Topology) -> Iterator[Wire]:
    for device in range(topology.n_devices):
        yield Wire(device, _above(topology, device)[0])
    first, levels = topology.n_devices, _levels(topology)
    for level, (count, lanes) in enumerate(levels[:-1]):
        for i in range(count):
            yield Wire(first + i, first + count + i * levels[level + 1][0] // count, lanes)
        first += count


def path(topology: Topology, source: int, target: int) -> Iterator[Wire]:
    up, down = _above(topology, source), _above(topology, target)
    meet = next(level for level, (a, b) in enumerate(zip(up, down)) if a == b)
    lanes = [1, *(lanes for _, lanes in _levels(topology))]
    yield from (Wire(a, b, lanes[i]) for i, (a, b) in enumerate(zip((source, *up), up[: meet + 1])))
    back = [Wire(b, a, lanes[i]) for i, (a, b) in enumerate(zip((target, *down), down[: meet + 1]))]
    yield from reversed(back)


def ports(topology: Topology) -> int:
    return 1


def diameter(topology: Topology) -> int:
    sizes = _tree(topology)
    # Levels that hold one part alone are passed by nobody.
    while len(sizes) > 1 and sizes[0] == 1:
        sizes = sizes[1:]
    return 2 * len(sizes)


def bisection_lanes(topology: Topology) -> float:
    """Whole parts on either side, and of an odd number of parts the last one halved; its switch stays with the rest."""
    sizes, lanes = _tree(topology), [1.0, *(lanes for _, lanes in _levels(topology))]
    cut = 0.0
    for depth, size in enumerate(sizes):
        cut += (size // 2) * lanes[len(sizes) - 1 - depth]
        if size % 2 == 0:
            break
    return cut


def _tree(topology: Topology) -> tuple[int, ...]:
    """How many parts each switch joins, outermost first. Rails are a tree as well, whose parts are not neighbours."""
    if topology.kind == "rails":
        units, nodes, per_node = topology.sizes
        return (units * per_node, nodes)
    return topology.sizes


def _levels(topology: Topology) -> list[tuple[int, float]]:
    """How many switches there are on each level, innermost first, and how many lanes lead up from each."""
    sizes = _tree(topology)
    thin = topology.oversubscription or (1.0,) * (len(sizes) - 1)
    levels = []
    for level in range(len(sizes)):
        outer = sizes[: len(sizes) - 1 - level]
        levels.append((prod(outer), prod(sizes[len(outer) :]) / prod(thin[: level + 1])))
    return levels


def _above(topology: Topology, device: int) -> tuple[int, ...]:
    """The switches above a device, innermost first."""
    found, first, sizes = [], topology.n_devices, _tree(topology)
    place = device
    if topology.kind == "rails":  # number the devices as the leaves hold them: unit, rail, node
        _, nodes, per_node = topology.sizes
        unit, node, rail = device // (nodes * per_node), device // per_node % nodes, device % per_node
        place = (unit * per_node + rail) * nodes + node
    for level, (count, _) in enumerate(_levels(topology)):
        found.append(first + place // prod(sizes[len(sizes) - 1 - level :]))
        first += count
    return tuple(found)
