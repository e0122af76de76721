"""Collectives with one form alone: all_to_all, gather, scatter, ring_shift.

An all-to-all ends with its busiest wire. On a switch that is the device's own link; between nodes each device's own
card, as cards are not pooled (a maintainer in NVIDIA/nccl-tests#267: "Alltoall cannot aggregate the bandwidth of multiple
NICs"), or what leads up from a rack or pod; on a full mesh one lane for each pair; on a torus the wires along one axis,
which carry what goes to devices further along: bytes S of each device on a ring of e devices need e/8 S of each wire, on
a line e/4 S of the middle one. So a fat tree's all-to-all takes (n-1)/n S/b however many devices there are, and a
torus's grows with its longest axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.cost.collectives.axes import Axis
from emu.cost.collectives.kinds import ROOTED, log2
from emu.cost.collectives.placement import Placement
from emu.cost.collectives.rates import filling_s, inside_bytes_per_s, lane_bytes_per_s, posted_s
from emu.cost.collectives.rows import Row, parted
from emu.hardware import Cluster, Link

AT_ONCE = 8  # messages that NCCL sends or receives at a time: NVIDIA/nccl@5067397, NCCL_MAX_DEV_WORK_P2P_PER_BATCH


def single_form_s(
    kind: str, bytes_: float, placement: Placement, cluster: Cluster, algorithm: str, sizes: Sequence[int] | None
) -> tuple[str, float]:
    """Algorithm and seconds of gather, scatter, ring_shift and an all_to_all that all ranks take part in alike."""
    n, link = placement.n, slowest(placement, cluster)
    fixed_s = posted_s(placement, cluster)
    if kind == "all_to_all":
        pieces = sizes or (bytes_ / n,)
        moving_s = even_s(max(pieces), placement, cluster) + filling_s(n * max(pieces), placement, cluster)
        return "direct", fixed_s + rounds_s(placement, cluster) + moving_s
    if kind in ROOTED:
        pieces = sizes or (bytes_ / n,) * n
        tree = algorithm == "tree"
        latency_s = tree_latency_s(placement, cluster) if tree else link.latency_s
        return ("tree" if tree else "direct"), fixed_s + latency_s + (sum(pieces) - min(pieces)) / rate(
            placement, cluster
        )
    # ring_shift: one message a rank, all at once; the slowest link of the ring decides
    wire = (
        lane_bytes_per_s(placement, cluster)
        if placement.kind != "switch" and placement.nodes == 1
        else link.bytes_per_s
    )
    return "ring", fixed_s + link.latency_s + max(sizes or (bytes_,)) / wire


def slowest(placement: Placement, cluster: Cluster) -> Link:
    """The slowest link that a message within the group takes."""
    return cluster.node.scale_up if placement.nodes == 1 else cluster.scale_out


def rate(placement: Placement, cluster: Cluster) -> float:
    """What one device sends to others of the group at once."""
    return inside_bytes_per_s(placement, cluster) if placement.nodes == 1 else cluster.scale_out.bytes_per_s


def tree_latency_s(placement: Placement, cluster: Cluster) -> float:
    """One way through a binary tree of all members."""
    return (
        log2(placement.most) * cluster.node.scale_up.tree_latency_s
        + log2(placement.nodes) * cluster.scale_out.tree_latency_s
    )


def rounds_s(placement: Placement, cluster: Cluster) -> float:
    """Latency of messages to all others, several at once; those to other nodes have the network's."""
    near, far = placement.most - 1, placement.n - placement.fewest
    up, out = cluster.node.scale_up, cluster.scale_out
    if not far:
        return -(-near // AT_ONCE) * up.latency_s
    return -(-(placement.n - 1) // AT_ONCE) * out.latency_s


def even_s(piece_bytes: float, placement: Placement, cluster: Cluster) -> float:
    """Seconds of the busiest wire if every rank sends each other one a piece."""
    n, up = placement.n, cluster.node.scale_up.bytes_per_s
    near, far = placement.most - 1, n - placement.fewest if placement.nodes > 1 else 0
    if placement.axes:
        return piece_bytes * n * torus_load(placement.axes) / lane_bytes_per_s(placement, cluster)
    if placement.kind == "full mesh":
        inside_s = piece_bytes / lane_bytes_per_s(placement, cluster) if near else 0.0
    else:
        inside_s = near * piece_bytes / (up * placement.reach)
    out = cluster.scale_out.bytes_per_s
    thin_s = max((level_bytes(level.members, n) / level.lanes for level in placement.levels), default=0.0)
    return max(inside_s, far * piece_bytes / out, thin_s * piece_bytes / out)


def level_bytes(members: int, n: int) -> int:
    """Pieces that leave a part of the network with so many of n members."""
    return members * (n - members)


def torus_load(axes: tuple[Axis, ...]) -> float:
    """Share of a device's message on the busiest wire, over its lanes, if all go the shortest way, axis by axis."""
    return max(axis_load(axis) for axis in axes)


def axis_load(axis: Axis) -> float:
    """The same along one axis. Where both ways round are as short, half goes each way."""
    e = axis.extent
    if not axis.wrapped:
        return (e // 2) * (e - e // 2) / e / axis.lanes
    return (e * e // 4) / (2 * e) / axis.lanes


def uneven_s(nodes: Sequence[int], rows: Sequence[Row], placement: Placement, cluster: Cluster) -> float:
    """The device that sends or receives most decides, where members send different amounts.

    Args:
        nodes: of each member.
        rows: what members send to each other.
    """
    if placement.kind == "full mesh" and placement.nodes == 1:
        most = max(piece for row in rows for j, piece in enumerate(row.pieces) if row.senders != [j])
        return most / lane_bytes_per_s(placement, cluster)
    rates = cluster.node.scale_up.bytes_per_s * placement.reach, cluster.scale_out.bytes_per_s
    send = [[0.0, 0.0] for _ in nodes]  # bytes inside the node, out of it
    receive = [[0.0, 0.0] for _ in nodes]
    all_bytes = 0.0
    for row in rows:
        by_node, among = parted(row, nodes.__getitem__), set(row.senders)
        all_bytes += by_node.all_bytes * len(row.senders)
        for i in row.senders:
            send[i][0] += by_node.bytes[nodes[i]] - row.pieces[i]
            send[i][1] += by_node.all_bytes - by_node.bytes[nodes[i]]
        for j, piece in enumerate(row.pieces):
            receive[j][0] += piece * (by_node.senders[nodes[j]] - (j in among))
            receive[j][1] += piece * (len(row.senders) - by_node.senders[nodes[j]])
    busiest_s = max(amount[away] / rates[away] for amount in (*send, *receive) for away in (0, 1))
    if placement.axes:  # a wire carries no more than if its share of the largest message went to all alike
        mean = all_bytes / len(nodes)
        busiest_s = max(busiest_s, mean * torus_load(placement.axes) / lane_bytes_per_s(placement, cluster))
    return busiest_s
