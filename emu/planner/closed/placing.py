"""Where the ranks of a group lie: how many of them share a node. Innermost to outermost: tp, cp, dp, pp, as Megatron."""

from __future__ import annotations

from typing import NamedTuple

from .workload import Workload


class Cut(NamedTuple):
    """How states are cut.

    ranks: over how many; stride: devices from one of these to the next; copies: groups of such ranks with the same states.
    """

    ranks: int
    stride: int
    copies: int


def in_node(w: Workload, n: int, stride: int = 1) -> int:
    """How many of a group's n ranks, `stride` devices apart, lie in one node."""
    return max(1, min(n, w.cluster.node.devices_per_node // max(1, stride)))


def cut(w: Workload, experts: bool = False) -> Cut:
    """What ZeRO or FSDP cuts a rank's states over: data parallelism, cp included; under HSDP one copy's part of it.

    Experts are cut over those of the same devices that have the same experts, which tp and cp may tell apart or not.
    """
    ranks = w.dp * w.cp
    of_copy = min(w.hsdp or w.dp, w.dp) * w.cp if w.gathered else ranks
    stride = w.tp
    if experts:
        stride = w.ep * w.expert_tp
        ranks, of_copy = (max(1, n * w.tp // stride) for n in (ranks, of_copy))
    return Cut(of_copy, stride, ranks // of_copy)


def crosses_nodes(w: Workload) -> bool:
    """Whether some neighbouring stages lie in different nodes."""
    return w.devices > w.cluster.node.devices_per_node
