"""The algorithms of collectives, hop by hop, on everyone's working buffer.

Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. Tree: a binary
tree over neighbours, as in Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations", 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emu.spmd.calls import Call
from emu.spmd.layout import split_sizes
from emu.virtual.maths import PAIRWISE, cuts_of

ORDER = "group order"


class Move(NamedTuple):
    """One chunk on its way."""

    src: int  # global ranks
    dst: int
    chunk: int  # which; 0 where the whole is one
    does: str  # what the receiver does with it: "add" (by the collective's op) or "copy"
    values: Tensor  # what is sent


class Hop(NamedTuple):
    """What happens at once."""

    number: int  # from 1 on
    says: str  # in words
    moves: tuple[Move, ...]
    held: dict[int, Tensor]  # by global rank: its buffer afterwards
    times_s: tuple[float, float] | None = None  # start and end, from when all members are there; None where not known


Hops = tuple[
    list[Hop], Sequence[int], int | None
]  # hops, lengths of chunks, the dimension that is cut (None: flattened)


class _Buffers:
    """Everyone's working buffer, of which chunks are sent."""

    def __init__(self, members: Sequence[int], buffers: Sequence[Tensor], cuts: Sequence[int], dim: int | None) -> None:
        self.members, self.buffers, self.hops = members, list(buffers), list[Hop]()
        self.chunks = [(b.view(-1) if dim is None else b).split(list(cuts), dim or 0) for b in self.buffers]

    def hop(
        self, says: str, moves: Sequence[tuple[int, int, int]], combine: Callable[[Tensor, Tensor], Any] | None
    ) -> None:
        """Moves (from, to, chunk), by group rank, all at once: what is sent is read before anything is written.

        Args:
            combine: of what arrives and what is there, in this order; None writes what arrives over it.
        """
        sent = [self.chunks[src][c].clone() for src, _, c in moves]
        for (_, dst, c), values in zip(moves, sent):
            mine = self.chunks[dst][c]
            if combine is None:
                mine.copy_(values)
            else:
                total = values.clone()
                combine(total, mine)
                mine.copy_(total)
        does = "copy" if combine is None else "add"
        shown = tuple(
            Move(self.members[src], self.members[dst], c, does, values) for (src, dst, c), values in zip(moves, sent)
        )
        self._add(says, shown)

    def divide(self, says: str, n: int, chunks: Sequence[tuple[int, int]]) -> None:
        """An average: whoever holds a total (group rank, chunk) divides it."""
        for i, c in chunks:
            self.chunks[i][c].div_(n)
        self._add(says, ())

    def _add(self, says: str, moves: tuple[Move, ...]) -> None:
        held = {m: b.clone() for m, b in zip(self.members, self.buffers)}
        self.hops.append(Hop(len(self.hops) + 1, says, moves, held))


def _sources(calls: Sequence[Call]) -> list[Tensor]:
    return [c.source.clone(memory_format=torch.contiguous_format) for c in calls if c.source is not None]


def _reduced_around(at: _Buffers, n: int, op: str) -> None:
    """The first half of a ring: chunk c starts at rank c + 1 and collects around the ring until rank c holds its total."""
    for step in range(1, n):
        says = f"reduce-scatter, step {step} of {n - 1}: everyone sends a chunk on, and the next adds its own to it"
        at.hop(says, [(r, (r + 1) % n, (r - step) % n) for r in range(n)], PAIRWISE[op])
    if op == "avg":
        at.divide(f"every total is divided by {n}", n, [(c, c) for c in range(n)])


def _passed_around(at: _Buffers, n: int) -> None:
    """The second half: rank c has chunk c, and all are passed on until everyone has all."""
    for step in range(1, n):
        says = f"all-gather, step {step} of {n - 1}: everyone passes on the chunk that it got last"
        at.hop(says, [(r, (r + 1) % n, (r - step + 1) % n) for r in range(n)], None)


def _ring_all_reduce(members: Sequence[int], calls: Sequence[Call]) -> Hops:
    n, buffers = len(calls), _sources(calls)
    cuts = split_sizes(buffers[0].numel(), n)
    at = _Buffers(members, buffers, cuts, None)
    _reduced_around(at, n, calls[0].op)
    _passed_around(at, n)
    return at.hops, cuts, None


def _ring_reduce_scatter(members: Sequence[int], calls: Sequence[Call]) -> Hops:
    n, buffers, dim = len(calls), _sources(calls), calls[0].dim
    cuts = cuts_of(calls[0], buffers[0].shape[dim], n)
    at = _Buffers(members, buffers, cuts, dim)
    _reduced_around(at, n, calls[0].op)
    return at.hops, cuts, dim % buffers[0].ndim


def _ring_all_gather(members: Sequence[int], calls: Sequence[Call]) -> Hops:
    n, sources, dim = len(calls), _sources(calls), calls[0].dim
    cuts = [s.shape[dim] for s in sources]
    buffers = []
    for i in range(n):  # everyone begins with its own part of the whole, and zeros
        parts = [s if i == j else torch.zeros_like(s) for j, s in enumerate(sources)]
        buffers.append(torch.cat(parts, dim))
    at = _Buffers(members, buffers, cuts, dim)
    _passed_around(at, n)
    return at.hops, cuts, dim % buffers[0].ndim


def _tree(members: Sequence[int], calls: Sequence[Call]) -> Hops:
    """Neighbours in pairs, then pairs of pairs, up to rank 0; an all-reduce's total then goes back the same way."""
    n, first, buffers = len(calls), calls[0], _sources(calls)
    at, whole = _Buffers(members, buffers, [buffers[0].numel()], None), buffers[0].numel()
    spans, span = [], 1
    while span < n:
        spans.append(span)
        span *= 2
    for i, span in enumerate(spans, 1):
        pairs = [(r + span, r, 0) for r in range(0, n, 2 * span) if r + span < n]
        at.hop(
            f"up, step {i} of {len(spans)}: the upper of every pair sends, the lower adds", pairs, PAIRWISE[first.op]
        )
    if first.op == "avg":
        at.divide(f"the total is divided by {n}", n, [(0, 0)])
    _handed_down(at, n, first, list(reversed(spans)))
    return at.hops, [whole], None


def _handed_down(at: _Buffers, n: int, call: Call, spans: Sequence[int]) -> None:
    if call.kind == "reduce":
        if call.root:
            at.hop("the total goes to the root", [(0, call.root, 0)], None)
        return
    for i, span in enumerate(spans, 1):
        pairs = [(r, r + span, 0) for r in range(0, n, 2 * span) if r + span < n]
        at.hop(f"down, step {i} of {len(spans)}: the lower of every pair sends the total back", pairs, None)


def _in_order(members: Sequence[int], calls: Sequence[Call]) -> Hops:
    """((x0 + x1) + x2) + ...: what the maths does where nobody asks for an algorithm."""
    n, first, buffers = len(calls), calls[0], _sources(calls)
    scatters = first.kind == "reduce_scatter"
    cuts = cuts_of(first, buffers[0].shape[first.dim], n) if scatters else [buffers[0].numel()]
    at = _Buffers(members, buffers, cuts, first.dim if scatters else None)
    for r in range(1, n):
        says = f"step {r} of {n - 1}: the sum so far goes to the next, which adds its own"
        at.hop(says, [(r - 1, r, c) for c in range(len(cuts))], PAIRWISE[first.op])
    last = n - 1
    if first.op == "avg":
        at.divide(f"the total is divided by {n}", n, [(last, c) for c in range(len(cuts))])
    if scatters:
        at.hop("every piece of the total goes to its rank", [(last, r, r) for r in range(last)], None)
    elif first.kind == "all_reduce":
        at.hop("the total goes to everyone", [(last, r, 0) for r in range(last)], None)
    elif first.root != last:
        at.hop("the total goes to the root", [(last, first.root, 0)], None)
    return at.hops, cuts, first.dim % buffers[0].ndim if scatters else None


WAYS: dict[str, dict[str, Callable[[Sequence[int], Sequence[Call]], Hops]]] = {
    "all_reduce": {"ring": _ring_all_reduce, "tree": _tree, ORDER: _in_order},
    "reduce": {"tree": _tree, ORDER: _in_order},
    "reduce_scatter": {"ring": _ring_reduce_scatter, ORDER: _in_order},
    "all_gather": {"ring": _ring_all_gather, ORDER: _ring_all_gather},
}
