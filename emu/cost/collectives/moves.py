"""Who sends which chunk to whom in each step of an algorithm: the algorithm itself, without time.

A message is cut into chunks. A move copies a chunk from one member to another, or adds it to what the other has of it.
Moves of one step happen at once. A reduce-scatter is an all-gather played backwards, with sums in place of copies; an
all-reduce is the one and then the other. Members are places in the group, 0 to n - 1; switches are -1, -2, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from emu.cost.collectives.axes import Axis
from emu.cost.collectives.kinds import log2
from emu.cost.collectives.torus import parts, turns


class Move(NamedTuple):
    """One chunk that goes from one member to another."""

    step: int
    src: int
    dst: int
    chunk: int
    adds: bool = False


class Schedule(NamedTuple):
    """The moves of a collective.

    Args:
        moves: in order of steps.
        chunks: share of the whole message that each chunk is. The piece of member r is the r-th part of equal length of
            this list, where members have pieces.
    """

    moves: list[Move]
    chunks: list[Fraction]


Gather = tuple[list[Move], list[Fraction]]


def reversed_sums(moves: Sequence[Move]) -> list[Move]:
    """The reduce-scatter that is an all-gather backwards."""
    last = max((move.step for move in moves), default=0)
    return [Move(last - m.step, m.dst, m.src, m.chunk, True) for m in reversed(moves)]


def after(first: Sequence[Move], second: Sequence[Move]) -> list[Move]:
    """One schedule behind another."""
    shift = max((move.step for move in first), default=-1) + 1
    return [*first, *(move._replace(step=move.step + shift) for move in second)]


def even(n: int) -> list[Fraction]:
    """Chunks of one size."""
    return [Fraction(1, n)] * n


def ring_gather(n: int, by: int = 1) -> list[Move]:
    """Every piece goes once around; `by` -1 goes the other way, which sums forwards if it is played backwards."""
    return [Move(step, r, (r + by) % n, (r - by * step) % n) for step in range(n - 1) for r in range(n)]


def any_doubling_gather(n: int) -> list[Move]:
    """In step j each member hands on up to 2^j pieces, its own and those after it, to the member 2^j before it (Bruck)."""
    moves, have = [], 1
    for step in range(log2(n)):
        for r in range(n):
            moves += [Move(step, r, (r - have) % n, (r + i) % n) for i in range(min(have, n - have))]
        have += min(have, n - have)
    return moves


def doubling_gather(n: int) -> list[Move]:
    """All-gather by recursive doubling of a power of two: the farthest partners first, with one piece each."""
    moves = []
    bits = log2(n)
    for step, bit in enumerate(reversed(range(bits))):
        for r in range(n):
            held = [c for c in range(n) if (c ^ r) & ((1 << (bit + 1)) - 1) == 0]
            moves += [Move(step, r, r ^ (1 << bit), c) for c in held]
    return moves


def folded(n: int) -> list[Move]:
    """All-reduce by recursive halving and doubling: members beyond a power of two add theirs to others', and wait."""
    power = 1 << (n.bit_length() - 1)
    gather = doubling_gather(power)
    core = after(reversed_sums(gather), gather)
    if power == n:
        return core
    chunks = range(power)
    before = [Move(0, r, r - power, c, True) for r in range(power, n) for c in chunks]
    back = [Move(0, r - power, r, c) for r in range(power, n) for c in chunks]
    return after(after(before, core), back)


def direct_gather(n: int) -> list[Move]:
    """Every piece to everyone at once."""
    return [Move(0, r, q, r) for r in range(n) for q in range(n) if q != r]


def chain(order: Sequence[int]) -> list[Move]:
    """The whole message through all members in turn."""
    return [Move(step, a, b, 0) for step, (a, b) in enumerate(pairwise(order))]


def double_tree(order: Sequence[int]) -> list[Move]:
    """A broadcast from the first: each half of the message down a tree of its own, in which those who pass on the one
    half only receive the other (Sanders, Speck and Traeff 2009, doi 10.1016/j.parco.2009.09.001)."""
    root, others = order[0], list(order[1:])
    moves = []
    for half, members in enumerate((others, others[::-1])):
        for i, member in enumerate(members):
            above = root if i == 0 else members[(i - 1) // 2]
            moves.append(Move((i + 1).bit_length() - 1, above, member, half))
    return sorted(moves)


def node_tree(nodes: Sequence[Sequence[int]], root: int) -> list[Move]:
    """The same over the first members of nodes, from which it goes on through each node in a chain."""
    order = sorted(range(len(nodes)), key=lambda i: root not in nodes[i])
    members = [sorted(nodes[i], key=lambda m: m != root) for i in order]
    moves = double_tree([node[0] for node in members])
    steps = log2(len(nodes))
    for node in members:
        moves += [m._replace(step=m.step + steps, chunk=half) for m in chain(node) for half in (0, 1)]
    return sorted(moves)


def hierarchical_gather(nodes: Sequence[Sequence[int]]) -> list[Move]:
    """Around the rings of like places in the nodes, then around each node."""
    k, m = len(nodes), len(nodes[0])
    moves = []
    for place in range(m):
        ring = [node[place] for node in nodes]
        moves += [Move(g.step, ring[g.src], ring[g.dst], ring[g.chunk]) for g in ring_gather(k, -1)]
    for node in nodes:
        for g in ring_gather(m, -1):
            moves += [Move(k - 1 + g.step, node[g.src], node[g.dst], other[g.chunk]) for other in nodes]
    return sorted(moves)


def torus_gather(order: Sequence[int], axes: tuple[Axis, ...]) -> Gather:
    """See emu.cost.collectives.torus. `order` names the members by coordinates, the last axis changing fastest.

    Each member's piece has two chunks a part, one for each way round.
    """
    n, d = len(order), len(axes)
    sizes = [axis.extent for axis in axes]
    strides = [prod(sizes[i + 1 :]) for i in range(d)]
    shares = [Fraction(share).limit_denominator(10**6) for share in parts(axes)]
    chunks = [share / (2 * n) for share in shares for _ in (0, 1)] * n
    moves: list[Move] = []
    first = 0
    gathered: list[list[list[int]]] = [[[i] for i in range(n)] for _ in range(d)]  # by part: whose pieces each has
    for turn in range(d):
        for part, along in enumerate(turns(axes)):
            axis, stride = axes[along[turn]], strides[along[turn]]
            new = [list(held) for held in gathered[part]]
            for here in range(n):
                place = here // stride % axis.extent
                for way, step in product((0, 1), range(axis.hops)):
                    found = _next(axis, place, way, step)
                    if found is None:
                        continue
                    target, origin = (here + (p - place) * stride for p in found)
                    meets = axis.wrapped and 2 * (step + 1) == axis.extent  # what is as far either way comes in halves
                    for owner, half in product(gathered[part][origin], (way,) if meets else (0, 1)):
                        chunk = (order[owner] * d + part) * 2 + half
                        moves.append(Move(first + step, order[here], order[target], chunk))
                    if not (meets and way):
                        new[target] += gathered[part][origin]
            gathered[part] = new
        first += max(axis.hops for axis in axes)
    return sorted(moves), chunks


def _next(axis: Axis, place: int, way: int, step: int) -> tuple[int, int] | None:
    """Where a member sends in a step, and whose piece; None at the end of a line."""
    sign = 1 - 2 * way
    target, origin = place + sign, place - sign * step
    if axis.wrapped:
        return target % axis.extent, origin % axis.extent
    return (target, origin) if 0 <= target < axis.extent and 0 <= origin < axis.extent else None


def in_switch(nodes: Sequence[Sequence[int]]) -> list[Move]:
    """Sums in the switch of each node, one chunk for each place in the node; trees over the owners between nodes."""
    m, k = len(nodes[0]), len(nodes)
    moves = []
    trees = 2 * log2(k)
    for i, node in enumerate(nodes):
        switch = -1 - i
        moves += [Move(0, r, switch, 2 * c + half, True) for r in node for c in range(m) for half in (0, 1)]
        moves += [Move(1, switch, node[c], 2 * c + half) for c in range(m) for half in (0, 1)]
        moves += [Move(2 + trees, node[c], switch, 2 * c + half) for c in range(m) for half in (0, 1)]
        moves += [Move(3 + trees, switch, r, 2 * c + half) for r in node for c in range(m) for half in (0, 1)]
    if k > 1:
        for c in range(m):
            down = double_tree([node[c] for node in nodes])
            both = after(reversed_sums(down), down)
            moves += [move._replace(step=move.step + 2, chunk=2 * c + move.chunk) for move in both]
    return sorted(moves)


def all_to_all(n: int) -> list[Move]:
    """Every member's piece for every other, all at once; chunk i * n + j is what i has for j."""
    return [Move(0, i, j, i * n + j) for i in range(n) for j in range(n) if i != j]


def gather_to(n: int, root: int) -> list[Move]:
    """All pieces to the root at once."""
    return [Move(0, r, root, r) for r in range(n) if r != root]


def binomial_gather_to(n: int, root: int) -> list[Move]:
    """Pieces meet on the way: in step j every other member that is left hands its 2^j pieces on."""
    moves = []
    for step in range(log2(n)):
        for r in range(1 << step, n, 2 << step):
            pieces = range(r, min(r + (1 << step), n))
            moves += [Move(step, (r + root) % n, (r - (1 << step) + root) % n, (c + root) % n) for c in pieces]
    return moves


GATHERS: dict[str, Callable[[int], list[Move]]] = {
    "ring": ring_gather,
    "tree": any_doubling_gather,
    "direct": direct_gather,
}
