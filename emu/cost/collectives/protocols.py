"""What NCCL's protocols make of a link: shares of its bandwidth, and where its own model is corrected.

The shares are those of NCCL's model of itself, NVIDIA/nccl@5067397 src/graph/tuning.cc (facts, no code). A link without
protocols is none of NCCL's: it has latency and bandwidth alone, as in textbooks.
"""

from __future__ import annotations

from math import frexp

from emu.hardware import Cluster, Link, Protocol

# All of NVIDIA/nccl@5067397 src/graph/tuning.cc.
TREE_SHARE = 0.92  # of a ring's bandwidth
TREE_LL, TREE_LL128 = 1 / 3.8, 120 / 128  # of a tree's, across nodes: tuning.cc
PLATEAU = (
    1.4  # latency of a ring by Simple across nodes, times this (tuning.cc: "plateau effect of ring", from Ampere on)
)

# Share of its bandwidth that a tree reaches for 64 B, 128 B, ... 512 MiB (NVIDIA/nccl@5067397 src/graph/tuning.cc).
_TREE_BY_SIZE = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8),
        *(0.9, 0.9, 0.9, 1),
    ),
}


def protocols_of(placement_nodes: int, cluster: Cluster) -> list[tuple[Protocol, Protocol]]:
    """The protocols that a group can use: each as it is inside a node, and between nodes."""
    up, out = cluster.node.scale_up, cluster.scale_out
    inside = up.protocols or (up.simple,)
    if placement_nodes == 1:
        return [(p, p) for p in inside]
    between = {p.name: p for p in (out.protocols or (out.simple,))}
    both = [(p, between[p.name]) for p in inside if p.name in between]
    return both or [(up.simple, out.simple)]


def is_nccl(link: Link) -> bool:
    """Whether NCCL's protocols are known for a link."""
    return bool(link.protocols)


def ring_rate(protocol: Protocol, rate: float) -> float:
    """Bytes/s of a ring that reaches `rate` with large messages."""
    return min(protocol.fraction * rate, protocol.cap_bytes_per_s or float("inf"))


def tree_rate(protocol: Protocol, rate: float) -> float:
    """The same of a tree across nodes."""
    share = {"LL": TREE_LL, "LL128": TREE_LL128}.get(protocol.name, 1.0)
    return min(TREE_SHARE * share * rate, protocol.cap_bytes_per_s or float("inf"))


def tree_share(name: str, size_bytes: float) -> float:
    """Share of its bandwidth that a tree reaches with a message of this size; between powers of two, on a line."""
    table = _TREE_BY_SIZE.get(name, (1,))
    if size_bytes < 64:
        return float(table[0])
    half, exponent = frexp(size_bytes / 64)
    below, beyond = exponent - 1, 2 * half - 1  # the whole power of two, and how far it is to the next
    if below + 1 >= len(table):
        return float(table[-1])
    return table[below] + (table[below + 1] - table[below]) * beyond
