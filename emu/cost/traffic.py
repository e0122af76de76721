"""How many bytes each link of a cluster carries in a priced trace, by the routes that contention is worked out from.

Every collective counts once, however many of its members have a record, and as the ring that emu.cost.routes takes it for.
Links of ranks without a record are left out: what else they carry is not known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from emu.cost.collectives import wire_bytes
from emu.cost.routes import (
    ABOVE,
    HOST,
    OUT,
    UP,
    WIRE,
    bytes_per_s,
    collective_traffic,
    lane_bytes_per_s,
    transfer_traffic,
    transfer_wires,
)
from emu.hardware import Cluster, Topology
from emu.trace.events import Collective, HostCopy, Transfer
from emu.trace.trace import Trace

if TYPE_CHECKING:
    from emu.cost.timeline import Timeline

LEVELS = (UP, WIRE, OUT, ABOVE, HOST)
WAYS = ("", "out", "in", "up", "down", "to_host", "from_host")


class Carried(NamedTuple):
    """What one link carries in one direction.

    Fields:
        level: UP, the link of a device to its node; WIRE, one between two devices (or a switch) of a node; OUT, a device's
            to the network; ABOVE, what leads up from a pod; HOST, a device's to its host.
        place: the device; (node, from, to) of a wire; (pod, rail) of what leads up from one.
        way: "out" or "in", "up" or "down", "to_host" or "from_host"; "" of a wire, whose place says it.
        bytes: that it carries.
        bytes_per_s: that it can carry.
    """

    level: str
    place: Any
    way: str
    bytes: float
    bytes_per_s: float

    def utilisation(self, step_s: float) -> float:
        """Share of what it could have carried in so many seconds, 0-1; 0 of no time."""
        return self.bytes / (self.bytes_per_s * step_s) if step_s else 0.0


def carried(timeline: Timeline) -> list[Carried]:
    """Every link that carries anything in a priced trace: of devices that have a record, by level and place.

    Of wires inside nodes, and of what leads up from pods, only where every rank has a record.
    """
    trace, cluster = timeline.trace, timeline.cluster
    sizes: defaultdict[Hashable, float] = defaultdict(float)
    lanes: dict[Hashable, float] = {}
    for (event, others), count in calls(trace):
        for link, size in _of_links(event, cluster, others).items():
            sizes[link] += count * size
        for link, (size, wide) in _of_wires(event, cluster).items():
            sizes[link] += count * size
            lanes[link] = wide
    for rank, event in trace.of(HostCopy):
        if isinstance(event, HostCopy):
            sizes[rank, HOST, event.kind] += event.bytes
    whole = len(trace.events) >= prod(trace.axes.values())
    found = []
    for link, size in sizes.items():
        one = _named(link, size, cluster, lanes)
        if size and (whole or (one.level not in (WIRE, ABOVE) and one.place in trace.events)):
            found.append(one)
    return sorted(found, key=lambda one: (LEVELS.index(one.level), one.place, WAYS.index(one.way)))


Call = tuple[Collective | Transfer, "tuple[tuple[int, Collective], ...]"]


def calls(trace: Trace) -> Iterator[tuple[Call, int]]:
    """Every collective and message of a trace once, equal ones together: (one part, of an all_to_all all parts), how many."""
    numbers: dict[tuple[int, ...], int] = {}  # of groups, by members
    known: dict[int, int] = {}  # the same by identity, as hashing many members for every event is slow
    meetings: dict[tuple, dict[int, Collective]] = {}
    messages: dict[tuple, Transfer] = {}
    for rank, events in trace.events.items():
        for event in events:
            if type(event) is Collective:
                members = event.members
                if (number := known.get(id(members))) is None:
                    number = known[id(members)] = numbers.setdefault(members, len(numbers))
                meetings.setdefault((event.group, number, event.seq), {})[rank] = event
            elif type(event) is Transfer and event.src != event.dst:
                messages[event.group, event.src, event.dst, event.seq] = event
    counts: Counter[tuple] = Counter()
    first: dict[tuple, Call] = {}
    for (_, number, _), parts in meetings.items():
        event = max(parts.values(), key=lambda part: part.bytes)  # off the root, a rank may know its own piece only
        others = tuple(sorted(parts.items())) if event.kind == "all_to_all" else ()
        key: tuple = (number, event.kind, event.bytes, event.sizes, event.algorithm, event.root)
        key += tuple((r, part.bytes, part.sizes) for r, part in others)
        counts[key] += 1
        first.setdefault(key, (event, others))
    for message in messages.values():
        key = ("message", message.src, message.dst, message.bytes)
        counts[key] += 1
        first.setdefault(key, (message, ()))
    for key, count in counts.items():
        yield first[key], count


def _of_links(event: Collective | Transfer, cluster: Cluster, others: tuple) -> Mapping[tuple, float]:
    if isinstance(event, Transfer):
        return transfer_traffic(event, cluster).sizes
    return collective_traffic(event, cluster, dict(others)).sizes if len(event.members) > 1 else {}


def _of_wires(event: Collective | Transfer, cluster: Cluster) -> dict[tuple, tuple[float, float]]:
    """Wire -> bytes, lanes."""
    if lane_bytes_per_s(cluster) is None:
        return {}
    if isinstance(event, Transfer):
        return transfer_wires(event, cluster)
    found = wire_bytes(event, cluster)  # on each lane
    if not found or cluster.node.shape is None:
        return {}
    wide = _lanes(cluster.node.shape)
    return {(n, WIRE, a, b): (size * wide[a, b], wide[a, b]) for (n, a, b), size in found.items()}


@lru_cache(maxsize=8)
def _lanes(shape: Topology) -> dict[tuple[int, int], float]:
    """Lanes of every wire, both ways."""
    wide = {(wire.source, wire.target): wire.lanes for wire in shape.wires}
    return wide | {(target, source): lanes for (source, target), lanes in wide.items()}


def _named(link: Any, size: float, cluster: Cluster, lanes: Mapping[Hashable, float]) -> Carried:
    place, level, *rest = link
    if level == WIRE:
        lane = lane_bytes_per_s(cluster) or 0.0
        return Carried(WIRE, (place, *rest), "", size, lane * lanes[link])
    if level == HOST:
        host: Any = cluster.node.host_link
        return Carried(HOST, place, rest[0], size, host.bytes_per_s if host is not None else float("inf"))
    if level == ABOVE:
        return Carried(ABOVE, (place, rest[0]), rest[1], size, bytes_per_s(cluster)[ABOVE])
    return Carried(level, place, rest[0], size, bytes_per_s(cluster)[level])
