"""What each algorithm costs: a fixed time, and a time for each byte of the message.

With n ranks, a message of S bytes, a seconds of latency a step and b bytes/s per direction and device:

    ring              all_reduce 2(n-1)a + 2(n-1)/n S/b     all_gather, reduce_scatter (n-1)a + (n-1)/n S/b
                      broadcast, reduce (n-1)a + S/b: a chain, through which the message passes in pieces
    tree              all_reduce 2 log2(n) a + 2 S/b        broadcast, reduce log2(n) a + S/b
    halving_doubling  all_reduce 2 log2(n) a + 2(n-1)/n S/b; n is folded to a power of two first, for 2(a + S/b) more
    direct            all_reduce 2a + 2(n-1)/n S/b: each rank sums its own piece, all wires of a full mesh at once
    torus             as ring, all axes and both ways round each at once: see emu.cost.collectives.torus
    hierarchical      with m ranks in each of k nodes: reduce-scatter in the node, all-reduce of S/m between nodes,
                      all-gather in the node
    in_switch         all_reduce a + (n+1)/n S/b: the switch sums what n devices send it and sends it to all of them

The forms are textbook (Thakur, Rabenseifner, Gropp 2005, doi 10.1177/1094342005051521). How they are laid on nodes
follows NCCL (NVIDIA/nccl@5067397 src/graph/tuning.cc): a ring enters and leaves a node once, so 2(nodes-1) of its 2(n-1)
steps have the latency of the network; a tree is a chain inside nodes and a tree across them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from emu.cost.collectives.kinds import PIPED, TWO_WAY, log2
from emu.cost.collectives.placement import Placement
from emu.cost.collectives.protocols import PLATEAU, is_nccl, protocols_of, ring_rate, tree_rate, tree_share
from emu.cost.collectives.rates import card_bytes_per_s, inside_bytes_per_s, lane_bytes_per_s, ring_bytes_per_s
from emu.cost.collectives.torus import torus_terms
from emu.hardware import Cluster, Protocol

IN_SWITCH_MEASURED = 8  # devices with which Link.in_switch_fraction was measured


class Form(NamedTuple):
    """One way to carry out a collective: seconds = fixed_s + S * s_per_byte / share(S) + fill_s * S / (S + fill_bytes)."""

    algorithm: str
    protocol: str
    fixed_s: float
    s_per_byte: float
    fill_s: float = 0.0
    fill_bytes: float = 1.0
    by_size: bool = False  # whether a tree's share of its bandwidth depends on S

    def seconds(self, size_bytes: float) -> float:
        share = tree_share(self.protocol, size_bytes) if self.by_size else 1.0
        return (
            self.fixed_s
            + size_bytes * self.s_per_byte / share
            + self.fill_s * size_bytes / (size_bytes + self.fill_bytes)
        )


def forms(kind: str, algorithm: str, placement: Placement, cluster: Cluster) -> Iterator[Form]:
    """The forms of one algorithm, one for each protocol; none where the group does not lie for it."""
    up, out = cluster.node.scale_up, cluster.scale_out
    crosses = placement.nodes > 1
    launch_s = up.launch_s + (out.launch_s if crosses else 0.0)
    if algorithm == "in_switch":
        yield from _in_switch(placement, cluster, launch_s)
        return
    for inside, between in protocols_of(placement.nodes, cluster):
        terms = _TERMS[algorithm](kind, placement, cluster, inside, between)
        if terms is None:
            return
        latency_s, s_per_byte = terms
        fixed_s = inside.base_s + latency_s
        if algorithm == "ring" and kind == "all_reduce" and crosses and inside.name == "Simple" and is_nccl(out):
            fixed_s *= PLATEAU
        form = Form(algorithm, inside.name, launch_s + fixed_s, 0.0 if kind == "barrier" else s_per_byte)
        if inside.name == "Simple":
            form = form._replace(fill_s=up.fill_s, fill_bytes=up.fill_bytes)
        yield form._replace(by_size=algorithm == "tree" and kind == "all_reduce" and crosses and is_nccl(out))


def _ring(kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol) -> tuple[float, float]:
    ways = 2 if kind in TWO_WAY else 1
    out_s = between.tree_latency_s if at.most == 1 and is_nccl(cluster.scale_out) else between.latency_s
    latency_s = ways * ((at.n - at.nodes) * inside.latency_s + (at.nodes - 1) * out_s)
    rate = ring_rate(between if at.nodes > 1 else inside, ring_bytes_per_s(at, cluster))
    return latency_s, (1.0 if kind in PIPED else ways * (at.n - 1) / at.n) / rate


def _tree(kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol) -> tuple[float, float]:
    ways = 2 if kind in TWO_WAY else 1
    nccl = is_nccl(cluster.scale_out) and at.nodes > 1
    steps = at.most - 1 if nccl else log2(at.most)
    latency_s = ways * (steps * inside.tree_latency_s + log2(at.nodes) * between.tree_latency_s)
    rate = ring_bytes_per_s(at, cluster)
    rate = tree_rate(between, rate) if nccl else ring_rate(between if at.nodes > 1 else inside, rate)
    return latency_s, (ways * (at.n - 1) / at.n if kind in ("all_gather", "reduce_scatter") else ways) / rate


def _halving_doubling(
    kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol
) -> tuple[float, float] | None:
    """Near partners first, with the large halves; where the number of ranks is no power of two, some sit out."""
    if at.kind == "torus":
        return None
    ways = 2 if kind in TWO_WAY else 1
    power = 1 << (at.n.bit_length() - 1)
    near = 1 << (at.fewest.bit_length() - 1) if at.fewest == at.most else 1
    rate_in = lane_bytes_per_s(at, cluster) if at.kind != "switch" else inside_bytes_per_s(at, cluster)
    rates = ring_rate(inside, rate_in), ring_rate(between, card_bytes_per_s(at, cluster))
    latency_s = s_per_byte = 0.0
    distance, share = 1, 1.0
    while distance < power:
        out = at.nodes > 1 and distance >= near
        share /= 2
        latency_s += ways * (between if out else inside).latency_s
        s_per_byte += ways * share / rates[out]
        distance *= 2
    if power != at.n:
        out = at.nodes > 1
        folds = 2 if kind in TWO_WAY else 1
        latency_s += folds * (between if out else inside).latency_s
        s_per_byte += folds / rates[out]
    return latency_s, s_per_byte


def _hierarchical(
    kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol
) -> tuple[float, float] | None:
    if at.nodes == 1 or at.fewest != at.most or at.most == 1:
        return None
    ways = 2 if kind in TWO_WAY else 1
    m, k = at.most, at.nodes
    within = inside_bytes_per_s(at, cluster)
    if at.kind == "torus" and not at.axes:
        within = lane_bytes_per_s(at, cluster) * at.ring_lanes
    out_s = between.tree_latency_s if is_nccl(cluster.scale_out) else between.latency_s
    latency_s = ways * ((m - 1) * inside.latency_s + (k - 1) * out_s)
    s_per_byte = (m - 1) / m / ring_rate(inside, within)
    s_per_byte += (k - 1) / k / m / ring_rate(between, card_bytes_per_s(at, cluster))
    return latency_s, ways * s_per_byte


def _direct(
    kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol
) -> tuple[float, float] | None:
    if at.nodes > 1 or at.kind not in ("switch", "full mesh"):
        return None
    ways = 2 if kind in TWO_WAY else 1
    return ways * inside.latency_s, ways * (at.n - 1) / at.n / ring_rate(inside, inside_bytes_per_s(at, cluster))


def _torus(
    kind: str, at: Placement, cluster: Cluster, inside: Protocol, between: Protocol
) -> tuple[float, float] | None:
    if not at.axes:
        return None
    ways = 2 if kind in TWO_WAY else 1
    steps, lanes = torus_terms(at.axes)
    return ways * steps * inside.latency_s, ways * lanes / ring_rate(inside, lane_bytes_per_s(at, cluster))


def _in_switch(at: Placement, cluster: Cluster, launch_s: float) -> Iterator[Form]:
    up, out = cluster.node.scale_up, cluster.scale_out
    if up.in_switch_fraction is None or up.in_switch_latency_s is None or at.kind != "switch":
        return
    n, eight = at.n, IN_SWITCH_MEASURED
    fixed_s = launch_s + up.in_switch_latency_s
    bus = up.in_switch_fraction * up.bandwidth_bytes_per_s
    if at.nodes > 1:
        if out.in_switch_fraction is None or out.in_switch_latency_s is None:
            return
        fixed_s += 2 * log2(at.nodes) * out.in_switch_latency_s
        share = card_bytes_per_s(at, cluster) / out.bytes_per_s
        bus = min(bus, at.fewest * share * out.in_switch_fraction * out.bandwidth_bytes_per_s)
        s_per_byte = 2 * (n - 1) / n / bus
    else:
        s_per_byte = (n + 1) / n / (bus * (eight + 1) / (2 * (eight - 1)))
    yield Form("in_switch", "Simple", fixed_s, s_per_byte, up.fill_s, up.fill_bytes)


_TERMS = {
    "ring": _ring,
    "tree": _tree,
    "halving_doubling": _halving_doubling,
    "hierarchical": _hierarchical,
    "direct": _direct,
    "torus": _torus,
}
