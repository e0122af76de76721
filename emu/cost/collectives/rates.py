"""What a group has of a cluster: bytes/s of a ring through it, of one lane, of what leaves a node; what starting costs."""

from __future__ import annotations

from emu.cost.collectives.placement import Placement
from emu.hardware import Cluster


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


def card_bytes_per_s(placement: Placement, cluster: Cluster) -> float:
    """What a ring through one member of each node carries between nodes, beside as many as the nodes have members."""
    share = min((level.lanes / (level.crossings * placement.fewest) for level in placement.levels), default=1.0)
    return cluster.scale_out.bytes_per_s * min(1.0, share)


def launch_s(placement: Placement, cluster: Cluster) -> float:
    """What every collective costs beside its algorithm."""
    return (cluster.node.scale_up.launch_s or 0.0) + (
        (cluster.scale_out.launch_s or 0.0) if placement.nodes > 1 else 0.0
    )


def filling_s(bytes_: float, cluster: Cluster) -> float:
    """What a message loses while the pipes fill. See emu.hardware.Link; fitted to rings, and taken to be so of others."""
    up = cluster.node.scale_up
    return (up.fill_s or 0.0) * bytes_ / (bytes_ + (up.fill_bytes or 0.0)) if bytes_ else 0.0


def posted_s(placement: Placement, cluster: Cluster) -> float:
    """What messages between pairs cost beside their own latency. The base latency is that of rings, taken to be theirs."""
    return launch_s(placement, cluster) + cluster.node.scale_up.base_s
