"""Prices of events: what a trace records of a collective or a transfer, to numbers that the forms take."""

from __future__ import annotations

from collections.abc import Mapping

from emu.cost.collectives.all_to_all import rounds_s, uneven_s
from emu.cost.collectives.choice import moving_s
from emu.cost.collectives.kinds import ROOTED, check_known
from emu.cost.collectives.placement import Placement, place
from emu.cost.collectives.rates import filling_s, lane_bytes_per_s, posted_s
from emu.cost.collectives.rows import rows_of
from emu.hardware import Cluster
from emu.trace.events import Collective, Transfer


def collective_s(
    event: Collective,
    cluster: Cluster,
    others: Mapping[int, Collective] | None = None,
    placement: Placement | None = None,
) -> float:
    """Seconds that a collective moves data, once all members are there.

    Args:
        event: the part of one member. With uneven `sizes` the largest piece paces a ring: every step moves one.
        cluster: what it runs on.
        others: for all_to_all, the parts of the members by global rank; members that are absent (symbolic) are taken
            to send as `event` does.
        placement: how the group lies on the cluster, where that is known already.

    Returns:
        0 for a group of one; else at least the chip's shortest kernel.

    Raises:
        PricingError: the kind or the algorithm is not known, the group does not lie for the algorithm, or a member has no
            device.
    """
    check_known(event.kind, event.algorithm)
    if len(event.members) == 1:
        return 0.0
    placement = placement or place(event.members, cluster)
    if event.kind == "all_to_all":
        return max(_all_to_all_s(event, cluster, placement, others or {}), cluster.chip.kernel_s)
    sizes = event.sizes
    if event.kind in ROOTED and sizes:  # what the root keeps does not move
        sizes = (*sizes[: event.root], 0, *sizes[event.root + 1 :])
    return moving_s(event.kind, event.bytes, placement, cluster, event.algorithm, sizes or None)


def _all_to_all_s(event: Collective, cluster: Cluster, placement: Placement, others: Mapping[int, Collective]) -> float:
    members = event.members
    if not event.sizes and all(not o.sizes and o.bytes == event.bytes for o in others.values()):
        return moving_s("all_to_all", event.bytes, placement, cluster)
    rows = rows_of(event, others)
    fixed_s = posted_s(placement, cluster) + rounds_s(placement, cluster)
    busiest_s = uneven_s([cluster.node_of(m) for m in members], rows, placement, cluster)
    return fixed_s + busiest_s + filling_s(max(sum(row.pieces) for row in rows), placement, cluster)


def transfer_s(event: Transfer, cluster: Cluster, busiest_bytes: int = 0) -> float:
    """Seconds that a point-to-point message takes, once both ranks are there.

    Args:
        event: either half.
        cluster: what it runs on.
        busiest_bytes: all that the sender sends, or the receiver receives, at once, this message included: messages
            posted together share the device's link and are taken to end together.
    """
    if event.src == event.dst:
        return max(2 * event.bytes / cluster.chip.memory_bytes_per_s, cluster.chip.kernel_s)
    placement = place((event.src, event.dst), cluster)
    if placement.nodes == 1:
        link, rate = cluster.node.scale_up, cluster.node.scale_up.bytes_per_s
        if placement.kind != "switch":
            rate = lane_bytes_per_s(placement, cluster) * placement.ring_lanes
    else:
        link, rate = cluster.scale_out, cluster.scale_out.bytes_per_s
    seconds = posted_s(placement, cluster) + link.latency_s + max(event.bytes, busiest_bytes) / rate
    return max(seconds, cluster.chip.kernel_s)
