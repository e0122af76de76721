"""Which wires of a node without a switch a collective takes, and how many bytes each of their lanes carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from emu.cost.collectives.choice import choose
from emu.cost.collectives.placement import Placement, place
from emu.cost.collectives.schedules import schedule
from emu.hardware import Cluster
from emu.trace.events import Collective

MOST_MEMBERS = 128  # the moves of a larger group take long to list, and its wires are all of those along its axes

WireBytes = Mapping[tuple[int, int, int], float]  # by node, and the places in it that a wire leads from and to


def wire_bytes(event: Collective, cluster: Cluster, placement: Placement | None = None) -> WireBytes:
    """Bytes on each lane of each wire inside nodes, in its direction, by the algorithm that the collective takes.

    Empty where a switch joins the devices, which lets all through that they can send; where the wires are not known; and
    for groups of more than 128 members. Uneven pieces are counted as even ones.
    """
    shape, n = cluster.node.shape, len(event.members)
    if shape is None or shape.kind in ("switch", "fat tree", "rails") or not 1 < n <= MOST_MEMBERS:
        return {}
    if event.kind == "barrier" or not event.bytes:
        return {}
    placement = placement or place(event.members, cluster)
    found: defaultdict[tuple[int, int, int], float] = defaultdict(float)
    size = cluster.node.devices_per_node
    algorithm = choose(event.kind, event.bytes, placement, cluster, event.algorithm).algorithm
    for (source, target), share in _flows(event, algorithm, event.members, placement, cluster).items():
        node = cluster.node_of(source)
        if node == cluster.node_of(target):
            here, there = source % size, target % size
            # Half of it the way that the answer would come, so that both ways round are used where they are as short.
            ways = (*shape.path(here, there), *(wire.back for wire in shape.path(there, here)))
            for wire in ways:
                found[node, wire.source, wire.target] += share * event.bytes / 2 / wire.lanes
    return dict(found)


def _flows(
    event: Collective, algorithm: str, members: Sequence[int], placement: Placement, cluster: Cluster
) -> dict[tuple[int, int], float]:
    """From which device to which, what share of the message goes."""
    plan = schedule(event.kind, algorithm, members, placement, cluster, max(event.root, 0))
    shares = [float(share) for share in plan.chunks]
    flows: defaultdict[tuple[int, int], float] = defaultdict(float)
    for move in plan.moves:
        if move.src >= 0 and move.dst >= 0:
            flows[members[move.src], members[move.dst]] += shares[move.chunk]
    return flows
