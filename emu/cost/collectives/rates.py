"""What a group has of a cluster: bytes/s of a ring through it, of one lane, of what leaves a node; what starting costs."""

from __future__ import annotations

from emu.cost.collectives.placement import Placement
from emu.hardware import Cluster, Link


def lane_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """What one lane between two members of a node carries in each direction."""
    return cluster.node.scale_up.bytes_per_s * placement.lane


def inside_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """What a member exchanges with the others of its node in each direction, by all its wires to them."""
    return cluster.node.scale_up.bytes_per_s * placement.reach


def ring_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """A device's part in the rings through all members.

    Across nodes every member brings its own card and rings run side by side, as NCCL's channels do. So the node with the
    fewest members sets the bandwidth, up to that inside a node; and what leads up from a rack or a pod is shared by all
    rings that leave it.
    """
    inside = inside_bytes_per_s(placement, cluster)
    if placement.kind == "torus":
        inside = lane_bytes_per_s(placement, cluster) * placement.ring_lanes
    if placement.nodes == 1:
        return inside
    out = placement.fewest * card_bytes_per_s(placement, cluster)
    return out if placement.fewest == 1 else min(out, inside)


def tree_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """A device's part in a pair of trees over nodes. With two nodes each half of the message crosses once there and once
    back, in a ring everything twice either way: cards carry half as much."""
    ring = ring_bytes_per_s(placement, cluster)
    if placement.nodes != 2:
        return ring
    out = 2 * placement.fewest * card_bytes_per_s(placement, cluster)
    return out if placement.most == 1 else max(ring, min(out, inside_bytes_per_s(placement, cluster)))


def card_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """What a ring through one member of each node carries between nodes, beside as many as the nodes have members."""
    share = min((level.lanes / (level.crossings * placement.fewest) for level in placement.levels), default=1.0)
    return cluster.scale_out.bytes_per_s * min(1.0, share)


def launch_s(placement: Placement, cluster: Cluster) -> float:
    """What every collective costs beside its algorithm."""
    return (cluster.node.scale_up.launch_s or 0.0) + (
        (cluster.scale_out.launch_s or 0.0) if placement.nodes > 1 else 0.0
    )


def fill_of(link: Link) -> tuple[tuple[float, float], ...]:
    """What messages lose on a link while its pipes fill, as pairs of fill_s and fill_bytes; see emu.hardware.Link."""
    return ((link.fill_s, link.fill_bytes or 0.0),) if link.fill_s else ()


def filling_s(bytes_: float, placement: Placement, cluster: Cluster) -> float:
    """The same in seconds for one message. Fitted to all-reduces, and taken to be so of others."""
    fills = fill_of(cluster.node.scale_up) + (fill_of(cluster.scale_out) if placement.nodes > 1 else ())
    return sum(fill_s * bytes_ / (bytes_ + fill_bytes) for fill_s, fill_bytes in fills if bytes_)


def posted_s(placement: Placement, cluster: Cluster) -> float:
    """What messages between pairs cost beside their own latency. The base latency is that of rings, taken to be theirs."""
    return launch_s(placement, cluster) + cluster.node.scale_up.base_s
