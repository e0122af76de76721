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

from emu.cost.collectives.placement import Placement
from emu.cost.collectives.protocols import PLATEAU, is_nccl, protocols_of, tree_share
from emu.cost.collectives.rates import fill_of, launch_s
from emu.cost.collectives.stages import STAGES, Rates, Stage, in_switch
from emu.hardware import Cluster


class Form(NamedTuple):
    """One way to carry out a collective.

    seconds = fixed_s + S * s_per_byte / share(S) + sum of fill_s * S / (S + fill_bytes)

    Args:
        fixed_s: with the latency of its stages.
        fills: pairs of fill_s and fill_bytes.
        by_size: whether a tree's share of its bandwidth depends on S.
        stages: what fixed_s and s_per_byte are made of, beside what is paid once.
    """

    algorithm: str
    protocol: str
    fixed_s: float
    s_per_byte: float
    fills: tuple[tuple[float, float], ...] = ()
    by_size: bool = False
    stages: tuple[Stage, ...] = ()

    def seconds(self, size_bytes: float) -> float:
        """Seconds that a message of so many bytes moves."""
        fill_s = sum(fill_s * size_bytes / (size_bytes + fill_bytes) for fill_s, fill_bytes in self.fills if size_bytes)
        return self.fixed_s + size_bytes * self.s_per_byte / self.share(size_bytes) + fill_s

    def share(self, size_bytes: float) -> float:
        """Share of its bandwidth that it reaches with so many bytes."""
        return tree_share(self.protocol, size_bytes) if self.by_size else 1.0


def forms(kind: str, algorithm: str, placement: Placement, cluster: Cluster) -> Iterator[Form]:
    """The forms of one algorithm, one for each protocol; none where the group does not lie for it."""
    out = cluster.scale_out
    crosses = placement.nodes > 1
    once_s = launch_s(placement, cluster)
    inner, outer = fill_of(cluster.node.scale_up), fill_of(out) if crosses else ()
    if algorithm == "in_switch":
        stages = in_switch(placement, cluster)
        if stages:
            yield _form(algorithm, "Simple", once_s, stages, kind)._replace(fills=inner + outer)
        return
    nccl = crosses and kind == "all_reduce" and is_nccl(out)
    for inside, between in protocols_of(placement.nodes, cluster):
        stages = STAGES[algorithm](kind, Rates(placement, cluster, inside, between))
        if not stages:
            return
        form = _form(algorithm, inside.name, once_s + inside.base_s, stages, kind)._replace(fills=outer)
        if inside.name == "Simple":
            form = form._replace(fills=inner + outer)
            if algorithm == "ring" and nccl:
                form = form._replace(fixed_s=once_s + PLATEAU * (form.fixed_s - once_s))
        yield form._replace(by_size=algorithm == "tree" and nccl)


def _form(algorithm: str, protocol: str, once_s: float, stages: tuple[Stage, ...], kind: str) -> Form:
    if kind == "barrier":
        stages = tuple(stage._replace(s_per_byte=0.0) for stage in stages)
    fixed_s = once_s + sum(stage.total_latency_s for stage in stages)
    return Form(algorithm, protocol, fixed_s, sum(stage.total_s_per_byte for stage in stages), stages=stages)
