"""From a collective, its algorithm and its group to the moves that carry it out."""

from __future__ import annotations

from collections.abc import Sequence

from emu.cost.collectives import moves as m
from emu.cost.collectives.moves import Move, Schedule, after, even, reversed_sums
from emu.cost.collectives.placement import Placement
from emu.cost.errors import PricingError
from emu.hardware import Cluster


def schedule(
    kind: str, algorithm: str, members: Sequence[int], placement: Placement, cluster: Cluster, root: int = 0
) -> Schedule:
    """Who sends what to whom. `root` is a place in the group."""
    n = placement.n
    if kind == "all_to_all":
        return Schedule(m.all_to_all(n), even(n) * n)  # of what one member has
    if kind == "ring_shift":
        return Schedule([Move(0, r, (r + 1) % n, r) for r in range(n)], [n * one for one in even(n)])
    if kind in ("gather", "scatter"):
        moves = (m.binomial_gather_to if algorithm == "tree" else m.gather_to)(n, root)
        return Schedule(moves if kind == "gather" else _turned(moves), even(n))
    if kind in ("broadcast", "reduce"):
        return _rooted(kind, algorithm, members, placement, cluster, root)
    gather, chunks = _gather(kind, algorithm, members, placement, cluster)
    if kind == "all_gather":
        return Schedule(gather, chunks)
    if kind == "reduce_scatter":
        return Schedule(reversed_sums(gather), chunks)
    return _all_reduce(algorithm, members, placement, cluster, Schedule(gather, chunks))


def nodes_of(members: Sequence[int], cluster: Cluster) -> list[list[int]]:
    """Places in the group, node by node in the order in which a ring meets them."""
    nodes: dict[int, list[int]] = {}
    for i, member in enumerate(members):
        nodes.setdefault(cluster.node_of(member), []).append(i)
    return list(nodes.values())


def _turned(moves: Sequence[Move]) -> list[Move]:
    """The same backwards, without sums: a gather becomes a scatter."""
    return [move._replace(adds=False) for move in reversed_sums(moves)]


def _rooted(
    kind: str, algorithm: str, members: Sequence[int], placement: Placement, cluster: Cluster, root: int
) -> Schedule:
    n = placement.n
    if algorithm == "tree":
        nodes = nodes_of(members, cluster)
        moves = m.node_tree(nodes, root) if placement.nodes > 1 else m.double_tree([(root + i) % n for i in range(n)])
        chunks = even(2)
    else:
        by = 1 if kind == "broadcast" else -1  # a reduction starts next to its root and ends there
        moves, chunks = m.chain([(root + by * i) % n for i in range(n)]), even(1)
    return Schedule(moves if kind == "broadcast" else reversed_sums(moves), chunks)


def _gather(kind: str, algorithm: str, members: Sequence[int], placement: Placement, cluster: Cluster) -> m.Gather:
    """The all-gather that a collective consists of, or is played backwards from."""
    n = placement.n
    if algorithm == "torus":
        order = sorted(range(n), key=lambda i: members[i])
        return m.torus_gather(order, placement.axes)
    if algorithm == "hierarchical":
        return m.hierarchical_gather(nodes_of(members, cluster)), even(n)
    if algorithm == "ring":
        order = [i for node in nodes_of(members, cluster) for i in node]
        way = 1 if kind == "all_gather" else -1
        return [
            Move(move.step, order[move.src], order[move.dst], order[move.chunk]) for move in m.ring_gather(n, way)
        ], even(n)
    if algorithm == "halving_doubling":
        return (m.any_doubling_gather if n & (n - 1) else m.doubling_gather)(n), even(n)
    return m.GATHERS.get(algorithm, m.direct_gather)(n), even(n)


def _all_reduce(
    algorithm: str, members: Sequence[int], placement: Placement, cluster: Cluster, shared: Schedule
) -> Schedule:
    n = placement.n
    if algorithm == "tree":
        down = _rooted("broadcast", "tree", members, placement, cluster, 0)
        return Schedule(after(reversed_sums(down.moves), down.moves), down.chunks)
    if algorithm == "in_switch":
        nodes = nodes_of(members, cluster)
        if len(set(map(len, nodes))) > 1:
            raise PricingError(
                "sums in the switches of nodes with unequal numbers of members are priced, but not drawn step by step",
                "take as many members in each node",
            )
        return Schedule(m.in_switch(nodes), even(2 * len(nodes[0])))
    if algorithm == "halving_doubling":
        return Schedule(m.folded(n), even(1 << (n.bit_length() - 1)))
    forward = shared.moves
    if algorithm == "ring":  # sums go forwards, and copies as well
        forward = _gather("all_gather", "ring", members, placement, cluster)[0]
    return Schedule(after(reversed_sums(shared.moves), forward), shared.chunks)
