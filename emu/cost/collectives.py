"""How long a collective or a transfer moves data: alpha-beta forms for rings and trees.

With n ranks, a message of S bytes, a seconds of latency a step and b bytes/s per direction and device:

    ring      all_reduce 2(n-1)a + 2(n-1)/n S/b     all_gather, reduce_scatter (n-1)a + (n-1)/n S/b
    chain     broadcast, reduce (n-1)a + S/b
    tree      all_reduce 2 log2(n) a + 2 S/b        broadcast, reduce log2(n) a + S/b
    pairwise  all_to_all (n-1)a + what a rank sends or receives, over b
    direct    gather, scatter a + what the root receives or sends, over b; ring_shift a + a rank's largest message over b

The forms are textbook (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521). How they are laid on nodes
follows NCCL (src/graph/tuning.cc): a ring enters and leaves a node once, so 2(nodes-1) of its 2(n-1) steps have the
latency of the network; its bandwidth is `Cluster.ring_bytes_per_s`. Left out so far: which transfers share a link with
others, switches that reduce (NVLS), and NCCL's fixed costs and protocols for small messages (`Link.base_s`,
`Link.protocols`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from emu.cost.errors import PricingError
from emu.hardware import Cluster
from emu.trace.events import Collective, Transfer

ALGORITHMS = ("ring", "tree")
TWO_WAY = ("all_reduce", "barrier")  # a reduction and its way back: every step is made twice
PIPED = ("broadcast", "reduce")  # the whole message passes through every rank, in pieces
RING = ("all_gather", "reduce_scatter")
ROOTED = ("gather", "scatter")
KINDS = (*TWO_WAY, *PIPED, *RING, *ROOTED, "all_to_all", "ring_shift")


class Placement(NamedTuple):
    """How a group lies on a cluster."""

    n: int  # ranks
    nodes: int  # nodes they lie on
    ring_bytes_per_s: float  # what a device's part in rings through all of them reaches


def place(members: Sequence[int], cluster: Cluster) -> Placement:
    """How a group lies on a cluster; rank r runs on device r.

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
    nodes = len(set(map(cluster.node_of, members)))
    return Placement(len(members), nodes, cluster.ring_bytes_per_s(members))


def _latency_s(placement: Placement, cluster: Cluster, tree: bool) -> float:
    """Latency of one way through all members."""
    up, out = cluster.node.scale_up, cluster.scale_out
    if tree:
        widest = -(-placement.n // placement.nodes)  # ranks in a node
        return _log2(widest) * up.tree_latency_s + _log2(placement.nodes) * out.tree_latency_s
    return (placement.n - placement.nodes) * up.latency_s + (placement.nodes - 1) * out.latency_s


def _log2(n: int) -> int:
    return (n - 1).bit_length()


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
        PricingError: the kind or the algorithm is not known, or a member has no device.
    """
    n = len(event.members)
    if event.kind not in KINDS:
        raise PricingError(f"no cost is known for the collective {event.kind!r}", f"known are {', '.join(KINDS)}")
    if event.algorithm and event.algorithm not in ALGORITHMS:
        raise PricingError(
            f"no cost is known for {event.kind} by algorithm {event.algorithm!r}",
            f'known are {", ".join(ALGORITHMS)}; "" takes the ring',
        )
    if n == 1:
        return 0.0
    placement, tree = placement or place(event.members, cluster), event.algorithm == "tree"
    if event.kind == "all_to_all":
        time_s = _all_to_all_s(event, cluster, placement, tree, others or {})
    elif event.kind == "ring_shift":  # one message a rank, all at once; the slowest link of the ring decides
        link = cluster.node.scale_up if placement.nodes == 1 else cluster.scale_out
        time_s = link.latency_s + max(event.sizes or (event.bytes,)) / link.bytes_per_s
    elif event.kind in ROOTED:
        pieces = event.sizes or (event.bytes / n,) * n
        link = cluster.node.scale_up if placement.nodes == 1 else cluster.scale_out
        steps_s = _latency_s(placement, cluster, True) if tree else link.latency_s
        time_s = steps_s + (sum(pieces) - pieces[event.root]) / link.bytes_per_s
    else:
        ways = 2 if event.kind in TWO_WAY else 1
        time_s = ways * _latency_s(placement, cluster, tree)
        if event.kind in PIPED or (tree and event.kind == "all_reduce"):
            moved_bytes = ways * event.bytes
        elif event.kind == "barrier":
            moved_bytes = 0
        else:
            moved_bytes = ways * (n - 1) * (max(event.sizes) if event.sizes else event.bytes / n)
        time_s += moved_bytes / placement.ring_bytes_per_s
    return max(time_s, cluster.chip.kernel_s)


def _all_to_all_s(
    event: Collective, cluster: Cluster, placement: Placement, tree: bool, others: Mapping[int, Collective]
) -> float:
    """The device that sends or receives most decides; messages to other nodes leave by its own network card.

    Cards are not pooled (a maintainer in NVIDIA/nccl-tests#267: "Alltoall cannot aggregate the bandwidth of multiple
    NICs").
    """
    n, members = placement.n, event.members
    node = [cluster.node_of(m) for m in members]
    rates = cluster.node.scale_up.bytes_per_s, cluster.scale_out.bytes_per_s
    latency_s = _latency_s(placement, cluster, tree)
    if not event.sizes and all(not o.sizes and o.bytes == event.bytes for o in others.values()):
        piece_bytes, largest_s = event.bytes / n, 0.0
        for count in Counter(node).values():
            near = count - 1
            largest_s = max(largest_s, near * piece_bytes / rates[0], (n - 1 - near) * piece_bytes / rates[1])
        return latency_s + largest_s
    send = [[0.0, 0.0] for _ in members]  # bytes inside the node, out of it
    receive = [[0.0, 0.0] for _ in members]
    for i, member in enumerate(members):
        part = others.get(member, event)
        pieces = part.sizes or (part.bytes / n,) * n
        for j, piece_bytes in enumerate(pieces):
            if i != j:
                away = node[i] != node[j]
                send[i][away] += piece_bytes
                receive[j][away] += piece_bytes
    return latency_s + max(amount[away] / rates[away] for amount in (*send, *receive) for away in (0, 1))


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
    link = cluster.node.scale_up if placement.nodes == 1 else cluster.scale_out
    return max(link.latency_s + max(event.bytes, busiest_bytes) / link.bytes_per_s, cluster.chip.kernel_s)


def sent_bytes(event: Collective | Transfer, rank: int) -> int | Fraction:
    """Bytes that one rank puts on links for its part in a collective or transfer.

    Ring all_reduce 2(n-1)/n S, all_gather and reduce_scatter (n-1)/n S, all_to_all S less its own share, broadcast and
    reduce S for all but the last of the chain, gather its piece, scatter all pieces but the root's, ring_shift and send
    its own message.
    With `sizes` these are the exact pieces: in all_gather the rank passes on every piece but its successor's, in
    reduce_scatter every piece but its own. Without, pieces are S/n, a fraction where n does not divide S: nothing is
    rounded here. A double binary tree sends as many bytes in all as a ring, and is counted as one.

    Returns:
        An int where the value is whole, else a Fraction.
    """
    if isinstance(event, Transfer):
        return event.bytes if event.kind == "send" and event.src != event.dst else 0
    n, whole, kind, sizes = len(event.members), event.bytes, event.kind, event.sizes
    if n == 1 or kind == "barrier":
        return 0
    me, root = event.members.index(rank), event.root
    if kind in RING:
        if sizes:
            return sum(sizes) - sizes[(me + 1) % n if kind == "all_gather" else me]
        return _whole(whole * (n - 1), n)
    if kind == "all_reduce":
        return _whole(2 * whole * (n - 1), n)
    if kind == "ring_shift":
        return sizes[me] if sizes else whole
    if kind == "all_to_all":
        return sum(sizes) - sizes[me] if sizes else _whole(whole * (n - 1), n)
    if kind == "broadcast":
        return 0 if (me + 1) % n == root else whole  # the chain starts at the root
    if kind == "reduce":
        return 0 if me == root else whole  # the chain ends at it
    if kind == "gather":
        return 0 if me == root else (sizes[me] if sizes else _whole(whole, n))
    if kind == "scatter":
        return 0 if me != root else (sum(sizes) - sizes[me] if sizes else _whole(whole * (n - 1), n))
    raise PricingError(f"no volume is known for the collective {kind!r}", f"known are {', '.join(KINDS)}")


@lru_cache(maxsize=4096)
def _whole(numerator: int, denominator: int) -> int | Fraction:
    quotient, rest = divmod(numerator, denominator)
    return Fraction(numerator, denominator) if rest else quotient
