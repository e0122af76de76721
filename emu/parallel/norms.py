"""What all ranks must know of their gradients together before a step: whether one overflowed, and how long they are.

Both are found within a stage of a pipeline first, by reductions over the ranks that share it, and then along the chain of
stages, first to last: ((s0 + s1) + s2) + ... . Whoever adds in this order finds the same bits, whether all stages' numbers
are there at once, as here, or arrive one by one along the chain, as in optimistic.py. Stages' numbers are added in float64,
whatever dtypes the stages have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from emu.parallel.shards import Shards
from emu.spmd import Group

TINY = 1e-6  # torch's: clipping divides by norm + TINY


def any_overflow(
    given: Sequence[Tensor], group: Group, chain: Group | None = None, device: torch.device | None = None
) -> bool:
    """Whether any rank's gradients are not finite. All ranks learn the same, after everyone has looked.

    Args:
        given: this rank's gradients; they may be none, if the device is said.
        group: the ranks that share this stage.
        chain: the stages of the pipeline, one rank each.
    """
    bad = stage_overflow(given, group, device)
    if chain is not None:
        bad = along(chain, bad, torch.maximum, "overflow")
    return False if bad.is_meta else bool(bad.item())


def stage_overflow(given: Sequence[Tensor], group: Group, device: torch.device | None = None) -> Tensor:
    """1.0 if any gradient of this stage is not finite, else 0.0; on every rank of it."""
    bad = torch.zeros((), device=device if device is not None else given[0].device)
    for g in given:
        bad = torch.maximum(bad, (~torch.isfinite(g).all()).to(bad.dtype))
    return group.all_reduce(bad, op="max", name="overflow")


def global_norm(
    given: Sequence[Tensor],
    vectors: Sequence[Shards],
    norm: float,
    everyone: Group | None = None,
    chain: Group | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The norm of all gradients, every parameter counted once, on every rank.

    Args:
        everyone: the ranks that this stage is spread over, where not all of its vectors are spread over the same ones.
        chain: the stages of the pipeline, one rank each. A parameter of several stages is counted by one of them (see
            `Shards.counted`).
        device: where gradients would be if this rank had any.
    """
    size = stage_size(given, vectors, norm, everyone, device)
    if chain is not None:
        size = along(chain, size, joining(norm), "gradient norm")
    return as_norm(size, norm, size.dtype if chain is None else dtype_of(given))


def stage_size(
    given: Sequence[Tensor],
    vectors: Sequence[Shards],
    norm: float,
    everyone: Group | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The sum of squares of this stage's gradients, or their largest entry; on every rank of it."""
    parts: dict[bool, Tensor] = {}  # of those that are cut over ranks, and of those that every rank holds whole
    for g, vector in zip(given, vectors):
        part = _measure(_counted(g, vector), norm)
        cut = bool(vector.place.stage)
        if everyone is not None:
            cut, (_, group, replicas, stage) = True, vector.place
            if (replicas is not None and replicas.rank) or (not stage and group.rank):
                part = torch.zeros_like(part)  # another rank counts it
        parts[cut] = joining(norm)(parts[cut], part) if cut in parts else part
    if True in parts:
        group = everyone or next(s.place.group for s in vectors if s.place.stage)
        group.all_reduce(parts[True], op="sum" if norm == 2.0 else "max", name="gradient norm")
    both = list(parts.values()) or [torch.zeros((), device=device)]
    return joining(norm)(*both) if len(both) == 2 else both[0]


def along(chain: Group, own: Tensor, join: Callable[[Tensor, Tensor], Tensor], name: str) -> Tensor:
    """Every stage's number joined, first to last, in float64; on every rank of the chain."""
    return reduce(join, chain.all_gather(own.double().view(1), name=name).unbind())


def joining(norm: float) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes one of two sums of squares, or of two largest entries."""
    return torch.add if norm == 2.0 else torch.maximum


def as_norm(size: Tensor, norm: float, dtype: torch.dtype) -> Tensor:
    """The norm, from the sum of squares or the largest entry of everything."""
    return (size.sqrt() if norm == 2.0 else size).to(dtype)


def clipping(total: Tensor, clip: float) -> Tensor:
    """What gradients of this norm are multiplied by so that it is at most `clip`; 1.0 if it is."""
    return (clip / (total + TINY)).clamp(max=1.0)


def dtype_of(given: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the norm of these gradients."""
    return reduce(torch.promote_types, (g.dtype.to_real() for g in given), torch.float32)


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
