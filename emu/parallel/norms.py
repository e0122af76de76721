"""What all ranks must know of their gradients together before a step: whether one overflowed, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emu.parallel.shards import Shards
from emu.spmd import Group


def any_overflow(given: Sequence[Tensor], group: Group) -> bool:
    """Whether any rank's gradients are not finite. All ranks learn the same, after everyone has looked."""
    bad = torch.zeros((), device=given[0].device)
    for g in given:
        bad = torch.maximum(bad, (~torch.isfinite(g).all()).to(bad.dtype))
    group.all_reduce(bad, op="max", name="overflow")
    return False if bad.is_meta else bool(bad.item())


def global_norm(
    given: Sequence[Tensor], vectors: Sequence[Shards], norm: float, everyone: Group | None = None
) -> Tensor:
    """The norm of all gradients, every parameter counted once, on every rank.

    Args:
        everyone: the ranks that the model is spread over, where not all of its vectors are spread over the same ones.
    """
    parts: dict[bool, Tensor] = {}  # of those that are cut over ranks, and of those that every rank holds whole
    for g, vector in zip(given, vectors):
        part = _measure(_counted(g, vector), norm)
        cut = bool(vector.place.stage)
        if everyone is not None:
            cut, (_, group, replicas, stage) = True, vector.place
            if (replicas is not None and replicas.rank) or (not stage and group.rank):
                part = torch.zeros_like(part)  # another rank counts it
        if cut in parts:
            part = parts[cut] + part if norm == 2.0 else torch.maximum(parts[cut], part)
        parts[cut] = part
    if True in parts:
        group = everyone or next(s.place.group for s in vectors if s.place.stage)
        group.all_reduce(parts[True], op="sum" if norm == 2.0 else "max", name="gradient norm")
    both = list(parts.values())
    if norm == 2.0:
        return (both[0] + both[1] if len(both) == 2 else both[0]).sqrt()
    return torch.maximum(*both) if len(both) == 2 else both[0]


def _measure(g: Tensor, norm: float) -> Tensor:
    """The sum of squares, or the largest entry."""
    g = g.abs() if g.is_complex() else g
    g = g.to(torch.promote_types(g.dtype, torch.float32))  # squares of half numbers overflow at 256
    if norm == 2.0:
        return (g * g).sum()
    return g.abs().amax() if g.numel() else g.new_zeros(())


def _counted(g: Tensor, vector: Shards) -> Tensor:
    """What this rank counts of its part of a vector."""
    if vector.counted is None:
        return g
    low, high = vector.first, vector.first + len(g)
    runs = [(max(start, low), min(stop, high)) for start, stop in vector.counted]
    pieces = [g[start - low : stop - low] for start, stop in runs if start < stop]
    return torch.cat(pieces) if pieces else g[:0]
