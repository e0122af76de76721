"""The steps of each algorithm: how many, and how long each takes, by link and protocol. The forms add them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from emu.cost.collectives.kinds import PIPED, SHARED, TWO_WAY, log2
from emu.cost.collectives.placement import Placement
from emu.cost.collectives.protocols import is_nccl, ring_rate, tree_rate
from emu.cost.collectives.rates import (
    card_bytes_per_s,
    inside_bytes_per_s,
    lane_bytes_per_s,
    ring_bytes_per_s,
    tree_bytes_per_s,
)
from emu.cost.collectives.torus import turns_of
from emu.hardware import Cluster, Protocol

IN_SWITCH_MEASURED = 8  # devices with which Link.in_switch_fraction was measured (emu/hardware/data/links.toml)


class Stage(NamedTuple):
    """Steps of one algorithm that are alike.

    Args:
        steps: how many, one after another.
        latency_s: of each.
        s_per_byte: of each, for every byte of the whole message; where streamed, of all of them together.
        streamed: whether the message passes through the steps in small pieces, so that all carry it at once.
    """

    steps: int
    latency_s: float
    s_per_byte: float
    streamed: bool = False

    @property
    def total_latency_s(self) -> float:
        return self.steps * self.latency_s

    @property
    def total_s_per_byte(self) -> float:
        return self.s_per_byte if self.streamed else self.steps * self.s_per_byte


@dataclass(frozen=True)
class Rates:
    """A group on a cluster under one protocol, which is `inside` a node what it is `between` nodes by another name."""

    at: Placement
    cluster: Cluster
    inside: Protocol
    between: Protocol

    @property
    def nccl(self) -> bool:
        """Whether the group crosses nodes as NCCL does."""
        return self.at.nodes > 1 and is_nccl(self.cluster.scale_out)

    @property
    def ring(self) -> float:
        """Bytes/s of a ring through all members."""
        return ring_rate(self.between if self.at.nodes > 1 else self.inside, ring_bytes_per_s(self.at, self.cluster))

    @property
    def within(self) -> float:
        """Bytes/s of a member to the others of its node by all its wires."""
        return ring_rate(self.inside, inside_bytes_per_s(self.at, self.cluster))

    @property
    def card(self) -> float:
        """Bytes/s of a member to its like in other nodes."""
        return ring_rate(self.between, card_bytes_per_s(self.at, self.cluster))

    @property
    def lane(self) -> float:
        """Bytes/s of one lane inside a node."""
        return ring_rate(self.inside, lane_bytes_per_s(self.at, self.cluster))

    @property
    def alone_s(self) -> float:
        """Latency between nodes where each holds one member; NCCL takes the tree's, as nothing hides it."""
        return self.between.tree_latency_s if is_nccl(self.cluster.scale_out) else self.between.latency_s


def ring(kind: str, r: Rates) -> tuple[Stage, ...]:
    """Steps are drawn alike, though a step between nodes takes longer than one inside; their sum is NCCL's."""
    at = r.at
    out_s = r.alone_s if at.most == 1 else r.between.latency_s
    latency_s = ((at.n - at.nodes) * r.inside.latency_s + (at.nodes - 1) * out_s) / (at.n - 1)
    if kind in PIPED:
        return (Stage(at.n - 1, latency_s, 1 / r.ring, streamed=True),)
    return (Stage(at.n - 1, latency_s, 1 / at.n / r.ring),) * (2 if kind in TWO_WAY else 1)


def tree(kind: str, r: Rates) -> tuple[Stage, ...]:
    """A binary tree inside a node; across nodes, as NCCL has it, a chain in each node and a tree over them."""
    at = r.at
    if kind in SHARED:
        return tuple(_doubling_by_any(r, r.inside.tree_latency_s, r.between.tree_latency_s, 1.0))
    inside = at.most - 1 if r.nccl else log2(at.most)
    steps = inside + log2(at.nodes)
    latency_s = (inside * r.inside.tree_latency_s + log2(at.nodes) * r.between.tree_latency_s) / steps
    rate = tree_rate(r.between, tree_bytes_per_s(at, r.cluster)) if r.nccl else r.ring
    return (Stage(steps, latency_s, 1 / rate, streamed=True),) * (2 if kind in TWO_WAY else 1)


def halving_doubling(kind: str, r: Rates) -> tuple[Stage, ...]:
    """Near partners first, with the large halves. Ranks beyond a power of two hand all they have to others and wait."""
    at = r.at
    if at.kind == "torus":
        return ()
    power = 1 << (at.n.bit_length() - 1)
    if kind in SHARED and power != at.n:
        return tuple(_doubling_by_any(r, r.inside.latency_s, r.between.latency_s, _partner_share(r)))
    near = 1 << (at.fewest.bit_length() - 1) if at.nodes > 1 and at.fewest == at.most else at.n if at.nodes == 1 else 1
    if at.nodes > 1 and at.most != near:  # partners inside a node by number alone
        near = 1
    inside = r.within * _partner_share(r)
    halving = []
    for j in range(power.bit_length() - 1):
        out = 1 << j >= near
        latency_s = (r.between if out else r.inside).latency_s
        halving.append(Stage(1, latency_s, 0.5 ** (j + 1) / (r.card if out else inside)))
    if kind == "all_gather":
        return tuple(reversed(halving))
    if kind == "reduce_scatter":
        return tuple(halving)
    fold = ()
    if power != at.n:
        out = at.nodes > 1
        fold = (Stage(1, (r.between if out else r.inside).latency_s, 1 / (r.card if out else inside)),)
    return (*fold, *halving, *reversed(halving), *fold)


def _partner_share(r: Rates) -> float:
    """Share of a device's wires inside its node that one partner is reached by."""
    return 1.0 if r.at.kind == "switch" else min(1.0, r.at.lane / r.at.reach)


def _doubling_by_any(r: Rates, inside_s: float, between_s: float, share: float) -> list[Stage]:
    """All-gather in log2(n) steps for any n: in step j, up to 2^j pieces from the rank 2^j further on (Bruck et al. 1997,
    doi 10.1109/71.642949)."""
    at, found, have = r.at, [], 1
    inside = (r.within if at.nodes == 1 else r.ring) * share
    near = log2(at.most)
    for j in range(log2(at.n)):
        pieces = min(have, at.n - have)
        found.append(Stage(1, inside_s if j < near else between_s, pieces / at.n / inside))
        have += pieces
    return found


def hierarchical(kind: str, r: Rates) -> tuple[Stage, ...]:
    """Rings inside each node, with all the bandwidth there, and rings between like places of the nodes."""
    at = r.at
    if at.nodes == 1 or at.fewest != at.most or at.most == 1:
        return ()
    m, k = at.most, at.nodes
    inside = Stage(m - 1, r.inside.latency_s, 1 / m / r.within)
    across = Stage(k - 1, r.alone_s, 1 / (m * k) / r.card)
    if kind == "all_gather":
        return across, inside
    if kind == "reduce_scatter":
        return inside, across
    return inside, across, across, inside


def direct(kind: str, r: Rates) -> tuple[Stage, ...]:
    """All pieces to their owners at once, and back."""
    at = r.at
    if at.nodes > 1 or at.kind not in ("switch", "full mesh"):
        return ()
    return (Stage(1, r.inside.latency_s, (at.n - 1) / at.n / r.within),) * (2 if kind in TWO_WAY else 1)


def torus(kind: str, r: Rates) -> tuple[Stage, ...]:
    """All axes at once, both ways round; see emu.cost.collectives.torus."""
    if not r.at.axes:
        return ()
    gathering = [Stage(steps, r.inside.latency_s, busy / r.lane / steps) for steps, busy in turns_of(r.at.axes)]
    scattering = gathering[::-1]
    if kind == "all_gather":
        return tuple(gathering)
    return tuple(scattering) if kind == "reduce_scatter" else (*scattering, *gathering)


def in_switch(at: Placement, cluster: Cluster) -> tuple[Stage, ...]:
    """A switch sums what n devices send it, S in pieces each of which one of them owns, and hands the sums out.

    Each device sends S and the sums of its own piece, and receives that and S. Between nodes, trees over the owners of a
    piece in each. NVLink SHARP; () without a switch that sums.
    """
    up, out = cluster.node.scale_up, cluster.scale_out
    if up.in_switch_fraction is None or up.in_switch_latency_s is None or at.kind != "switch":
        return ()
    bus = up.in_switch_fraction * up.bandwidth_bytes_per_s
    if at.nodes == 1:
        port = bus * (IN_SWITCH_MEASURED + 1) / (2 * (IN_SWITCH_MEASURED - 1))
        return (Stage(IN_SWITCH_STEPS, up.in_switch_latency_s / IN_SWITCH_STEPS, (at.n + 1) / at.n / port, True),)
    if out.in_switch_fraction is None or out.in_switch_latency_s is None:
        return ()
    steps = IN_SWITCH_STEPS + 2 * log2(at.nodes)
    latency_s = up.in_switch_latency_s + 2 * log2(at.nodes) * out.in_switch_latency_s
    shared = card_bytes_per_s(at, cluster) / out.bytes_per_s
    bus = min(bus, at.fewest * shared * out.in_switch_fraction * out.bandwidth_bytes_per_s)
    return (Stage(steps, latency_s / steps, 2 * (at.n - 1) / at.n / bus, True),)


IN_SWITCH_STEPS = 4  # derived: to the switch, to the owner of each piece, back to the switch, to all

STAGES: Mapping[str, Callable[[str, Rates], tuple[Stage, ...]]] = {
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "direct": direct,
    "torus": torus,
}
