"""What each collective computes, as plain functions of everyone's tensors.

Reductions run in group order: ((x0 + x1) + x2) + ... . `algorithm="ring"`, "tree" and "halving_doubling" reproduce the
order in which those algorithms add, chunk by chunk, so that their rounding can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emu.spmd.calls import Call
from emu.spmd.layout import split_sizes

PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "prod": Tensor.mul_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
}


def reduced(
    parts: Sequence[Tensor],
    op: str,
    algorithm: str = "",
    cuts: Sequence[int] = (),
    dim: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """The reduction of equal-shaped tensors, as a new contiguous tensor.

    Args:
        into: the first of them, if the result may take its place: no memory for another, where the order allows.
        cuts: lengths along dim of the chunks that a ring passes on; by default the flattened tensor in equal chunks.
    """
    if algorithm == "ring" and len(parts) > 1:
        total = _ring(parts, op, cuts, dim)
    elif algorithm == "halving_doubling" and len(parts) > 1:
        total = _halving(parts, op, cuts, dim)
    elif algorithm == "tree" and len(parts) > 1:
        total = _tree([p.clone(memory_format=torch.contiguous_format) for p in parts], op)
    else:
        total = parts[0].clone(memory_format=torch.contiguous_format) if into is None else into
        combine = PAIRWISE[op]
        for part in parts[1:]:
            combine(total, part)
    return total.div_(len(parts)) if op == "avg" else total


def _ring(parts: Sequence[Tensor], op: str, cuts: Sequence[int], dim: int) -> Tensor:
    """Chunk c starts at rank c + 1 and collects around the ring until rank c holds its total."""
    n, combine = len(parts), PAIRWISE[op]
    out = torch.empty(parts[0].shape, dtype=parts[0].dtype)
    whole, given = out, parts
    if not cuts:
        whole, given, dim = out.view(-1), [p.reshape(-1) for p in parts], 0
        cuts = split_sizes(out.numel(), n)
    pieces = [p.split(list(cuts), dim) for p in given]
    for c, target in enumerate(whole.split(list(cuts), dim)):
        target.copy_(pieces[(c + 1) % n][c])
        for step in range(2, n + 1):
            combine(target, pieces[(c + step) % n][c])
    return out


def _tree(parts: list[Tensor], op: str) -> Tensor:
    """Neighbours in pairs, then pairs of pairs: a binary tree over group ranks."""
    combine = PAIRWISE[op]
    while len(parts) > 1:
        parts = [combine(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def _halving(parts: Sequence[Tensor], op: str, cuts: Sequence[int], dim: int) -> Tensor:
    """Recursive halving: partners at distance 1, then 2, then 4; so every chunk is summed by the same pairs of pairs.

    Ranks beyond a power of two first add theirs to the ranks that are so much lower. Where each rank keeps a piece of its
    own (cuts), these take part instead: each piece collects from the rank half as far down as the largest power of two,
    and ever nearer ones, as Bruck's all-gather sends it, played backwards.
    """
    n, combine = len(parts), PAIRWISE[op]
    power = 1 << (n.bit_length() - 1)
    if power == n or not cuts:
        low = [part.clone(memory_format=torch.contiguous_format) for part in parts[:power]]
        for part, beyond in zip(low, parts[power:]):
            combine(part, beyond)
        return _tree(low, op)
    whole = torch.empty(parts[0].shape, dtype=parts[0].dtype)
    pieces = [p.split(list(cuts), dim) for p in parts]
    for c, target in enumerate(whole.split(list(cuts), dim)):
        down = [pieces[(c - i) % n][c].clone() for i in range(n)]  # by distance from the owner
        distance = power
        while distance:
            for i in range(min(distance, n - distance)):
                combine(down[i], down[i + distance])
            distance //= 2
        target.copy_(down[0])
    return whole


def cuts_of(call: Call, length: int, n: int) -> list[int]:
    """Lengths of the pieces of a whole of the given length, stated or even."""
    return list(call.sizes) if call.sizes is not None else [length // n] * n


def carry_out(calls: Sequence[Call]) -> None:
    """Carries out a collective whose members have all arrived. Calls are in group order; targets are written."""
    first, n = calls[0], len(calls)
    sources = [c.source for c in calls]
    match first.kind:
        case "barrier":
            return
        case "all_reduce" | "reduce":
            everywhere = first.kind == "all_reduce"
            total = reduced(_all(sources), first.op, first.algorithm, into=first.target if everywhere else None)
            for i, c in enumerate(calls):
                if (everywhere or i == first.root) and c.target is not total:
                    _put(c.target, total)
        case "broadcast":
            for i, c in enumerate(calls):
                if i != first.root:
                    _put(c.target, sources[first.root])
        case "all_gather" | "gather":
            for c in calls:
                if c.target is not None:
                    _join(c.target, _all(sources), first.dim)
        case "reduce_scatter":
            parts = _all(sources)
            cuts = cuts_of(first, parts[0].shape[first.dim], n)
            if first.algorithm and n > 1:
                total = reduced(parts, first.op, first.algorithm, cuts, first.dim)
                for c, piece in zip(calls, total.split(cuts, first.dim)):
                    _put(c.target, piece)
                return
            for c, *pieces in zip(calls, *(part.split(cuts, first.dim) for part in parts)):  # the same sums, in place
                assert c.target is not None
                c.target.copy_(pieces[0])
                reduced([c.target, *pieces[1:]], first.op, into=c.target)
        case "scatter":
            whole = _all(sources)[first.root]
            for c, piece in zip(calls, whole.split(cuts_of(first, whole.shape[first.dim], n), first.dim)):
                _put(c.target, piece)
        case "all_to_all":
            sent = [s.split(cuts_of(c, s.shape[c.dim], n), c.dim) for c, s in zip(calls, _all(sources))]
            for i, c in enumerate(calls):
                _put(c.target, torch.cat([sent[j][i] for j in range(n)], c.dim))
        case "ring_shift":
            for i, c in enumerate(calls):
                _put(c.target, sources[(i - c.by) % n])
        case kind:
            raise AssertionError(f"no definition of {kind}")


def _join(target: Tensor, parts: list[Tensor], dim: int) -> None:
    """Writes parts side by side; one of them may already stand where it belongs."""
    storage = target.untyped_storage().data_ptr()
    if all(part.untyped_storage().data_ptr() != storage for part in parts):
        torch.cat(parts, dim, out=target)
        return
    for place, part in zip(target.split([part.shape[dim] for part in parts], dim), parts):
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _put(target: Tensor | None, value: Tensor | None) -> None:
    if target is not None and value is not None:
        target.copy_(value)
