"""What communication takes of what it shares with others: links, and the compute and memory of the devices at its ends.

Which links those are, and how many bytes go over each, say emu.cost.routes. A message's share of a link is its bytes over
what the link could carry in the time that the message takes alone, at most all of it. So collectives bound by latency share
well, and those along one axis of a torus take that axis' part of the device's wires.

Not modelled: messages of ranks without a record (symbolic ones).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from typing import NamedTuple

from emu.cost.collectives import transfer_s, wire_bytes
from emu.cost.host_copies import host_copy_s
from emu.cost.routes import HOST, WIRE, collective_traffic, lane_bytes_per_s, share_of, transfer_traffic, transfer_wires
from emu.hardware import Chip, Cluster
from emu.trace.events import Collective, HostCopy, Transfer

# Cores (SMs) that a communication's kernel holds from its start to its end, while it waits for others, too. NCCL starts
# 24 blocks for a collective on an H100 (forums.developer.nvidia.com/t/339078; DeepSeek-V3, arXiv 2412.19437, section
# 3.5, sets 20 of 132 aside), and two for a message to another node (NCHANNELS_PER_NET_PEER in NVIDIA/nccl,
# src/graph/paths.cc).
CORES, CORES_BETWEEN_NODES = 24, 2

# Bytes read and written in device memory for each byte that arrives: the sender writes it to a buffer, from where it is
# read; and what it is added to is read, or the result written. Derived from NCCL's primitives (src/device/all_reduce.h:
# recvReduceSend, recvCopySend), not measured.
MEMORY_BYTES = 3
MOST_MEMORY = 0.5  # of a device's bandwidth: a memory serves all alike. Assumed


class Load(NamedTuple):
    """What a communication takes while it moves data, alone.

    Fields:
        seconds: how long it moves.
        shares: of each link, 0-1.
        memory: share of the memory bandwidth of each device that it is on.
        compute, held: share of such a device's compute that is lost while it moves, and while it waits for others.
    """

    seconds: float
    shares: tuple[tuple[Hashable, float], ...] = ()
    memory: float = 0.0
    compute: float = 0.0
    held: float = 0.0


def held_share(chip: Chip, cores: int) -> float:
    """Share of compute that so many cores are, where kernels run on cores that communication takes, too (GPUs).

    Waiting costs no more than moving does: `Chip.overlap_loss`.
    """
    if not chip.tiled or not chip.sm_count:
        return 0.0
    return min(cores / chip.sm_count, chip.overlap_loss)


def collective_load(
    event: Collective,
    cluster: Cluster,
    seconds: float,
    others: Mapping[int, Collective] | None = None,
    present: Container[int] | None = None,
) -> Load:
    """What a collective takes that moves for so many seconds alone.

    Args:
        event: the part of one member.
        cluster: what it runs on.
        seconds: its price (collective_s).
        others: of an all_to_all, the parts of the members by global rank.
        present: the ranks that have a record; only their links can be shared. None: all.
    """
    if seconds <= 0:
        return Load(seconds)
    traffic, chip = collective_traffic(event, cluster, others), cluster.chip
    arriving = max((traffic.arriving[m] for m in event.members), default=0.0)
    return Load(
        seconds,
        (*traffic.shares(seconds, present), *_wires_of_group(event, cluster, seconds)),
        min(MEMORY_BYTES * arriving / seconds / chip.memory_bytes_per_s, MOST_MEMORY),
        chip.overlap_loss,
        held_share(chip, CORES),
    )


def transfer_load(event: Transfer, cluster: Cluster, busiest_bytes: int) -> Load:
    """What a point-to-point message takes; arguments as of transfer_s."""
    seconds = transfer_s(event, cluster, busiest_bytes)
    chip, moved = cluster.chip, event.bytes / seconds if seconds else 0.0
    if event.src == event.dst:  # a copy: read and written
        return Load(seconds, memory=min(2 * moved / chip.memory_bytes_per_s, MOST_MEMORY))
    traffic = transfer_traffic(event, cluster)
    memory = min(MEMORY_BYTES * moved / chip.memory_bytes_per_s, MOST_MEMORY)
    shares = traffic.shares(seconds)
    if cluster.crosses_nodes((event.src, event.dst)):
        held = held_share(chip, CORES_BETWEEN_NODES)
        return Load(seconds, shares, memory, held, held)
    return Load(
        seconds, (*shares, *_wires(event, cluster, seconds)), memory, chip.overlap_loss, held_share(chip, CORES)
    )


def host_copy_load(event: HostCopy, rank: int, cluster: Cluster) -> Load:
    """What a copy between a device and its host takes: copy engines move it, so no compute."""
    seconds = host_copy_s(event, cluster)
    link = cluster.node.host_link
    if not seconds or link is None:
        return Load(seconds)
    share = share_of(event.bytes, seconds, link.bytes_per_s)
    shares = (((rank, HOST, event.kind), share),) if share else ()
    return Load(seconds, shares, min(event.bytes / seconds / cluster.chip.memory_bytes_per_s, MOST_MEMORY))


def _wires(event: Transfer, cluster: Cluster, seconds: float) -> Iterator[tuple[Hashable, float]]:
    """The wires that a transfer takes inside a node without a switch."""
    lane = lane_bytes_per_s(cluster)
    if lane is None:
        return
    for link, (size, lanes) in transfer_wires(event, cluster).items():
        share = share_of(size, seconds, lane * lanes)
        if share:
            yield link, share


def _wires_of_group(event: Collective, cluster: Cluster, seconds: float) -> Iterator[tuple[Hashable, float]]:
    """The wires that a collective takes there."""
    lane = lane_bytes_per_s(cluster)
    if lane is not None:
        for (where, source, target), size in wire_bytes(event, cluster).items():
            if size:
                yield (where, WIRE, source, target), share_of(size, seconds, lane)
