"""How a group lies on a cluster: all that the price of a collective depends on, without the list of its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from emu.cost.collectives.axes import Axis, axes_of, busiest_wire
from emu.cost.errors import PricingError
from emu.hardware import Cluster, Fabric, Node, Topology


class Level(NamedTuple):
    """A level of the network above the node whose parts (racks, pods) the group spans.

    Args:
        members: of the part that holds most of them. It sends most messages to others, too, if all send to all.
        lanes: what leads up from such a part, in devices' network cards.
        crossings: how often a ring through the group leaves the part that it leaves most often.
    """

    name: str
    members: int
    lanes: float
    crossings: int


@dataclass(frozen=True)
class Placement:
    """How a group lies on a cluster.

    Args:
        n, nodes: ranks, and the nodes they lie on.
        fewest, most: ranks in the node that holds fewest, and most.
        kind: of the wires inside a node, as in emu.hardware.Topology; "switch" where they are not known. Hypercubes are
            tori of two devices an axis.
        reach: share of a device's scale-up bandwidth that wires to other members of its node have.
        lane: share of it that one lane has.
        axes: of a torus or grid inside one node, the axes along which the group extends, outermost first; () if the group
            is no regular part of one.
        ring_lanes: of such wires, lanes that a ring through the group has to itself.
        levels: of the network that the group spans, innermost first.
    """

    n: int
    nodes: int
    fewest: int
    most: int
    kind: str = "switch"
    reach: float = 1.0
    lane: float = 1.0
    axes: tuple[Axis, ...] = ()
    ring_lanes: float = 1.0
    levels: tuple[Level, ...] = ()


def place(members: Sequence[int], cluster: Cluster) -> Placement:
    """How a group lies on a cluster; rank r runs on device r. Goes through the members once.

    Raises:
        PricingError: a member has no device.
    """
    top = max(members)
    if top >= cluster.n_devices:
        raise PricingError(
            f"rank {top} has no device: {cluster.name} has {cluster.n_devices}",
            f"price the trace on a cluster of at least {top + 1} devices",
            rank=top,
        )
    return _placed(members, cluster.node, cluster.fabric)


def place_evenly(n: int, per_node: int, cluster: Cluster) -> Placement:
    """How a group of n ranks lies on a cluster if the first `per_node` devices of each node, from the first, hold it.

    Raises:
        PricingError: the cluster or its nodes have too few devices.
    """
    if n < 1 or not 1 <= per_node <= cluster.node.devices_per_node or -(-n // per_node) > cluster.nodes:
        raise PricingError(
            f"{n} ranks, {per_node} in a node, have no place on {cluster.name}: "
            f"{cluster.nodes} nodes of {cluster.node.devices_per_node}",
            "take a larger cluster, or more ranks in each node",
            n=n,
            per_node=per_node,
        )
    node = cluster.node
    return _evenly(n, per_node, _Shape(node.devices_per_node, node.shape, node.ports), cluster.fabric)


class _Shape(NamedTuple):
    """What of a node decides where a group lies; it is cheaper to look up than the node."""

    devices_per_node: int
    shape: Topology | None
    ports: int | None


@lru_cache(maxsize=4096)
def _evenly(n: int, per_node: int, node: _Shape, fabric: Fabric | None) -> Placement:
    members = [i // per_node * node.devices_per_node + i % per_node for i in range(n)]
    return _placed(members, node, fabric)


def _placed(members: Sequence[int], node: Node | _Shape, fabric: Fabric | None) -> Placement:
    size = node.devices_per_node
    in_node = Counter(member // size for member in members)  # in the order in which a ring meets them
    n, nodes = len(members), len(in_node)
    flat = Placement(n, nodes, min(in_node.values()), max(in_node.values()))
    if nodes > 1 and fabric is not None:
        flat = replace(flat, levels=tuple(_levels(in_node, members, size, fabric)))
    if flat.most == 1:
        return flat
    first = next(iter(in_node))
    return _inside(flat, [member % size for member in members if member // size == first or nodes == 1], node)


def _inside(flat: Placement, places: Sequence[int], node: Node | _Shape) -> Placement:
    """The placement with what the wires inside a node say; `places` are those of one node."""
    shape = node.shape
    if shape is None or shape.kind in ("switch", "fat tree", "rails") or len(places) == 1:
        return flat
    ports = node.ports or shape.ports
    flat = replace(flat, kind=shape.kind, lane=1 / ports)
    if shape.kind == "full mesh":
        lanes = flat.fewest - 1 if flat.fewest > 1 else 1
        return replace(flat, reach=min(1.0, lanes / ports), ring_lanes=lanes)
    if shape.kind == "hybrid cube mesh":
        lanes = _meshed_lanes(shape, places)
        return replace(flat, reach=min(1.0, lanes / ports), ring_lanes=lanes)
    axes = axes_of(shape, places)
    if axes:
        lanes = sum(axis.ports for axis in axes)
        even = any(axis.extent % 2 == 0 for axis in axes)
        closed = (len(axes) > 1 and even) or all(axis.wrapped for axis in axes)
        ring = min(axis.lanes for axis in axes) * (2 if closed and flat.n > 2 else 1)
    else:
        axes, lanes = (), 0.0
        ring = lanes = 1 / busiest_wire(shape, places)
    return replace(
        flat, kind="torus", reach=min(1.0, lanes / ports), axes=axes if flat.nodes == 1 else (), ring_lanes=ring
    )


def _meshed_lanes(shape: Topology, places: Sequence[int]) -> float:
    """Lanes from the member that has fewest to other members: what rings through all of them share."""
    among = set(places)
    lanes = dict.fromkeys(places, 0.0)
    for wire in shape.wires:
        if wire.source in among and wire.target in among:
            lanes[wire.source] += wire.lanes
            lanes[wire.target] += wire.lanes
    return max(1.0, min(lanes.values()))  # two without a wire meet by way of a third


def _levels(in_node: Counter[int], members: Sequence[int], size: int, fabric: Fabric) -> Iterator[Level]:
    """The levels whose parts the group spans. On rails a part is a unit, with as many leaf switches as the group has
    rails; what leads up from a part is thin by the oversubscription, but for racks, which pods join in full."""
    pod, thin = fabric.pod_devices, fabric.oversubscription
    heights = [("rack", fabric.rack_devices, float(fabric.rack_devices)), ("pod", pod, pod / thin)]
    if fabric.kind == "rails":
        rails = len({member % size for member in members})
        heights = [("unit", pod, rails * (pod // size) / thin)]
    for name, devices, lanes in heights:
        order = [node * size // devices for node in in_node]
        held, left = Counter[int](), Counter[int]()
        for part, following, count in zip(order, [*order[1:], order[0]], in_node.values()):
            held[part] += count
            left[part] += part != following
        if len(held) > 1:
            yield Level(name, max(held.values()), lanes, max(left.values()))
