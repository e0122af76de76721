"""Which links communication takes, and how many bytes over each.

Links, each with what it carries in one direction:

* a device's own: to its node (scale_up), to the network (scale_out) and to its host;
* what leads up from a pod where the network is oversubscribed: above a fat tree's pod, above each leaf of rails. Other
  switches let all through that their devices can send, so nothing meets there;
* in a node without a switch, the wires on a transfer's way, and those that a collective's algorithm takes.

Not modelled: wires of groups of more than 128 inside a node without a switch, PCIe switches that devices share (no data).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence

from emu.cost.collectives.rows import Row, parted, rows_of
from emu.hardware import Cluster
from emu.trace.events import Collective, Transfer

UP, OUT, HOST = "node", "network", "host"  # a device's own links
ABOVE, WIRE = "above pod", "wire"
SWITCHED = ("switch", "fat tree", "rails")  # shapes of nodes in which devices meet on switches


class Traffic:
    """Bytes on links between devices, by link and direction.

    Attributes:
        sizes: link -> bytes. A device's own links are (device, UP or OUT, "out" or "in"), what leads up from a pod is (pod,
            ABOVE, rail, "up" or "down").
        arriving: device -> bytes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sizes: defaultdict[tuple, float] = defaultdict(float)
        self.arriving: defaultdict[int, float] = defaultdict(float)  # by device
        fabric = cluster.fabric
        self.thin = fabric if fabric is not None and fabric.oversubscription > 1 else None

    def add(self, source: int, target: int, size: float) -> None:
        """A message from one device to another."""
        cluster, sizes = self.cluster, self.sizes
        self.arriving[target] += size
        if cluster.node_of(source) == cluster.node_of(target):
            sizes[source, UP, "out"] += size
            sizes[target, UP, "in"] += size
            return
        sizes[source, OUT, "out"] += size
        sizes[target, OUT, "in"] += size
        if self.thin is None:
            return
        pods = source // self.thin.pod_devices, target // self.thin.pod_devices
        if pods[0] != pods[1]:
            rail = self._rail(target)
            sizes[pods[0], ABOVE, rail, "up"] += size
            sizes[pods[1], ABOVE, rail, "down"] += size

    def add_all_to_all(self, members: Sequence[int], size: float) -> None:
        """A message of one size from each member to each other; the same as so many single ones, but counted."""
        cluster, sizes, n = self.cluster, self.sizes, len(members)
        in_node = Counter(map(cluster.node_of, members))
        for member in members:
            near = in_node[cluster.node_of(member)] - 1
            self.arriving[member] += (n - 1) * size
            for way in ("out", "in"):
                sizes[member, UP, way] += near * size
                sizes[member, OUT, way] += (n - 1 - near) * size
        if self.thin is None:
            return
        in_pod = Counter(member // self.thin.pod_devices for member in members)
        on_rail = Counter((member // self.thin.pod_devices, self._rail(member)) for member in members)
        for (target, rail), count in on_rail.items():
            for source, senders in in_pod.items():
                if source != target:
                    sizes[source, ABOVE, rail, "up"] += senders * count * size
                    sizes[target, ABOVE, rail, "down"] += senders * count * size

    def add_row(self, members: Sequence[int], row: Row) -> None:
        """What some members of an all_to_all send to all; the same as so many single messages, but counted."""
        cluster, sizes, among = self.cluster, self.sizes, set(row.senders)
        nodes = [cluster.node_of(member) for member in members]
        by_node = parted(row, nodes.__getitem__)
        for i in row.senders:
            near = by_node.bytes[nodes[i]]
            sizes[members[i], UP, "out"] += near - row.pieces[i]
            sizes[members[i], OUT, "out"] += by_node.all_bytes - near
        for j, piece in enumerate(row.pieces):
            near = by_node.senders[nodes[j]] - (j in among)
            far = len(row.senders) - by_node.senders[nodes[j]]
            self.arriving[members[j]] += (near + far) * piece
            sizes[members[j], UP, "in"] += near * piece
            sizes[members[j], OUT, "in"] += far * piece
        if self.thin is None:
            return
        pods = [member // self.thin.pod_devices for member in members]
        by_pod = parted(row, lambda i: (pods[i], self._rail(members[i])))
        on_rail: defaultdict[int, float] = defaultdict(float)
        senders = Counter(pods[i] for i in row.senders)
        for (_, rail), size in by_pod.bytes.items():
            on_rail[rail] += size
        for (pod, rail), size in by_pod.bytes.items():
            sizes[pod, ABOVE, rail, "down"] += (len(row.senders) - senders[pod]) * size
        for pod, count in senders.items():
            for rail, size in on_rail.items():
                sizes[pod, ABOVE, rail, "up"] += count * (size - by_pod.bytes[pod, rail])

    def _rail(self, target: int) -> int:
        """Messages go to the rail of their target inside their own node first."""
        rails = self.thin is not None and self.thin.kind == "rails"
        return target % self.cluster.node.devices_per_node if rails else 0

    def shares(self, seconds: float, present: Container[int] | None = None) -> tuple[tuple[Hashable, float], ...]:
        """Of every link the share that is taken; of devices' own only those of ranks that are present."""
        rates = bytes_per_s(self.cluster)
        return tuple(
            (link, share_of(size, seconds, rates[link[1]]))
            for link, size in self.sizes.items()
            if size and (present is None or link[1] == ABOVE or link[0] in present)
        )


def bytes_per_s(cluster: Cluster) -> dict[str, float]:
    """What links between devices carry in one direction: UP, OUT and, where the network is oversubscribed, ABOVE."""
    rates, fabric = {UP: cluster.node.scale_up.bytes_per_s, OUT: cluster.scale_out.bytes_per_s}, cluster.fabric
    if fabric is not None and fabric.oversubscription > 1:
        parts = fabric.pod_devices
        if fabric.kind == "rails":
            parts //= cluster.node.devices_per_node
        rates[ABOVE] = cluster.scale_out.bytes_per_s * parts / fabric.oversubscription
    return rates


def collective_traffic(event: Collective, cluster: Cluster, others: Mapping[int, Collective] | None = None) -> Traffic:
    """What a collective moves over links between devices; arguments as of emu.cost.loads.collective_load."""
    traffic, parts = Traffic(cluster), others or {}
    if event.kind == "all_to_all" and not any(p.sizes or p.bytes != event.bytes for p in (event, *parts.values())):
        traffic.add_all_to_all(event.members, event.bytes / len(event.members))
    elif event.kind == "all_to_all":
        for row in rows_of(event, parts):
            traffic.add_row(event.members, row)
    else:
        for source, target, size in _messages(event, cluster):
            traffic.add(source, target, size)
    return traffic


def transfer_traffic(event: Transfer, cluster: Cluster) -> Traffic:
    """What a message between two devices moves over links between devices."""
    traffic = Traffic(cluster)
    traffic.add(event.src, event.dst, event.bytes)
    return traffic


def transfer_wires(event: Transfer, cluster: Cluster) -> dict[tuple, tuple[float, float]]:
    """(node, WIRE, from, to) -> bytes, and lanes of the wire; empty between nodes, and where a switch joins devices."""
    shape = cluster.node.shape
    if shape is None or shape.kind in SWITCHED or cluster.crosses_nodes((event.src, event.dst)):
        return {}
    where = cluster.node_of(event.src)
    path = cluster.path(event.src, event.dst)
    return {(where, WIRE, wire.source, wire.target): (event.bytes, wire.lanes) for _, wire in path}


def _messages(event: Collective, cluster: Cluster) -> Iterator[tuple[int, int, float]]:
    """From which member to which member a collective other than an all_to_all moves how many bytes; (source, target, bytes)."""
    members, kind, n = event.members, event.kind, len(event.members)
    if kind in ("gather", "scatter"):
        root, pieces = members[event.root], event.sizes or (event.bytes / n,) * n
        for member, size in zip(members, pieces):
            if member != root:
                yield (member, root, size) if kind == "gather" else (root, member, size)
    elif kind == "ring_shift":
        pieces = event.sizes or (event.bytes,) * n
        yield from ((member, members[(i + 1) % n], pieces[i]) for i, member in enumerate(members))
    else:
        yield from _ring(event, cluster)


def _ring(event: Collective, cluster: Cluster) -> Iterator[tuple[int, int, float]]:
    """A ring through all members, node by node; between nodes every member uses its own card, as NCCL's channels do.

    Trees and the other algorithms move as many bytes in all, and are counted as a ring.
    """
    members, n = event.members, len(event.members)
    if event.kind in ("broadcast", "reduce"):
        size = float(event.bytes)
    elif event.kind == "barrier":
        size = 0.0
    else:
        ways = 2 if event.kind == "all_reduce" else 1
        size = ways * (n - 1) * (max(event.sizes) if event.sizes else event.bytes / n)
    nodes: dict[int, list[int]] = {}
    for member in members:
        nodes.setdefault(cluster.node_of(member), []).append(member)
    rows = list(nodes.values())
    for here, there in zip(rows, [*rows[1:], rows[0]]):
        if len(rows) > 1:  # as many channels as both nodes have members
            channels = list(zip(here, there))
            yield from ((a, b, size / len(channels)) for a, b in channels)
        if len(here) > 1:
            inside = size if len(rows) == 1 else size * (len(here) - 1) / len(here)
            yield from ((a, b, inside) for a, b in zip(here, [*here[1:], here[0]]))


def lane_bytes_per_s(cluster: Cluster) -> float | None:
    """What one lane inside a node carries; None where its wires are not known."""
    node, lane = cluster.node, cluster.node.lane_bytes_per_s
    return lane and lane * node.scale_up.bytes_per_s / node.scale_up.bandwidth_bytes_per_s


def share_of(size: float, seconds: float, bytes_per_s: float) -> float:
    """Share of a link that so many bytes in so many seconds take, at most all of it."""
    return min(1.0, size / (seconds * bytes_per_s))
