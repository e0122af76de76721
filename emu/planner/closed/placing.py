"""Where the ranks of a group lie: how many of them share a node. Innermost to outermost: tp, cp, dp, pp, as Megatron."""

from __future__ import annotations

from .workload import Workload


def in_node(w: Workload, n: int, stride: int = 1) -> int:
    """How many of a group's n ranks, `stride` devices apart, lie in one node."""
    return max(1, min(n, w.cluster.node.devices_per_node // max(1, stride)))


def data_parallel(w: Workload) -> tuple[int, int]:
    """The group that shares parameters (dp and cp together): its size, and how many of it in a node."""
    return w.dp * w.cp, in_node(w, w.dp * w.cp, w.tp)


def crosses_nodes(w: Workload) -> bool:
    """Whether some neighbouring stages lie in different nodes."""
    return w.devices > w.cluster.node.devices_per_node
