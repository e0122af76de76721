"""What one rank can check alone of a collective's arguments: the same for virtual and real devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emu.spmd.calls import REDUCTIONS
from emu.spmd.errors import CollectiveError

if TYPE_CHECKING:
    from emu.spmd.group import Group

TWINS = {
    "all_reduce": "reduce_from(x, group) (or copy_to(x, group), whose backward reduces)",
    "all_gather": "gather_from(x, group, dim) or gather_shards(x, group, dim)",
    "reduce_scatter": "reduce_to_shards(x, group, dim)",
    "all_to_all": "exchange_shards(x, group, send_sizes, recv_sizes, dim)",
    "ring_shift": "shift(x, group, by)",
    "scatter": "scatter_to(x, group, dim)",
}


def at(group: Group, kind: str) -> str:
    """Where, for a message."""
    return f"{group.label}.{kind} on rank {group.members[group.rank]}"


def readable(group: Group, kind: str, x: Any, dim: int | None) -> int:
    """The dim, counted from the front. Raises CollectiveError for a tensor that no raw collective takes."""
    if not isinstance(x, Tensor):
        cure = "wrap it: torch.tensor(...)"
        if kind == "scatter" and x is None:
            cure = "off the root, too, pass a tensor of the whole's shape and dtype: its values are not read"
        raise CollectiveError(f"{at(group, kind)}: expected a tensor, got {type(x).__name__}", cure)
    if x.requires_grad:
        twin = TWINS.get(kind, "shift(x, group, by)" if kind in ("send", "recv") else "a differentiable twin")
        raise CollectiveError(
            f"{at(group, kind)}: the tensor of shape {tuple(x.shape)} requires grad, and a raw collective has no backward",
            f"for a gradient use emu.spmd.{twin}; for the value alone pass x.detach()",
        )
    if x.layout is not torch.strided:
        raise CollectiveError(f"{at(group, kind)}: the tensor is {x.layout}", "make it dense first: x.to_dense()")
    if dim is None or (kind == "ring_shift" and not x.dim()):
        return 0
    number = whole(dim)
    if number is None or not -x.dim() <= number < x.dim():
        raise CollectiveError(
            f"{at(group, kind)}: dim {dim!r} is not a dim of a tensor of shape {tuple(x.shape)}",
            "give it at least one dim (x.reshape(1)), and name one that exists",
        )
    return number % x.dim()


def writable(group: Group, kind: str, x: Any) -> None:
    """Raises CollectiveError for a tensor that cannot be worked on in place."""
    readable(group, kind, x, None)
    if any(stride == 0 and length > 1 for stride, length in zip(x.stride(), x.shape)):
        raise CollectiveError(
            f"{at(group, kind)}: works in place, but elements of the expanded tensor share memory",
            "pass x.contiguous()",
        )


def fits(group: Group, kind: str, out: Any, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises CollectiveError for an `out` that the result of a collective over x cannot be written into."""
    writable(group, kind, out)
    if tuple(out.shape) != shape or out.dtype != x.dtype:
        raise CollectiveError(
            f"{at(group, kind)}: the result is {x.dtype} of shape {shape}, but out is {out.dtype} of shape {tuple(out.shape)}",
            "give out the dtype of what is gathered, and room for every rank's piece",
        )


def reduction(group: Group, kind: str, x: Tensor, op: str) -> None:
    """Raises CollectiveError for a reduction that is not defined."""
    if op not in REDUCTIONS:
        raise CollectiveError(f"{at(group, kind)}: there is no op {op!r}", f"use one of {', '.join(REDUCTIONS)}")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise CollectiveError(f"{at(group, kind)}: an average of {x.dtype} is not whole", 'use op="sum" and divide')
    if x.dtype == torch.bool or (x.is_complex() and op in ("max", "min")):
        raise CollectiveError(f"{at(group, kind)}: {op} of {x.dtype} is not defined", "convert it first, e.g. x.int()")


def whole(value: Any) -> int | None:
    """A whole number, numpy's and tensors' included; None for anything else (True and 1.0 among it)."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def peer_of(group: Group, role: str, peer: Any) -> int:
    """A group rank, checked."""
    number = whole(peer)
    if number is None or not 0 <= number < group.size:
        raise CollectiveError(
            f"group {group.label!r} has {group.size} ranks; {role}={peer!r} is none of them",
            f"{role} is a group rank, 0 to {group.size - 1} (global ranks of this group: {list(group.members)})",
        )
    return number


def sizes_of(
    group: Group, kind: str, sizes: Sequence[int] | None, x: Tensor | None, dim: int, own: bool = False
) -> tuple[int, ...] | None:
    """Stated lengths along dim, checked against the tensor; None where they are even."""
    if sizes is None:
        if not own and x is not None and x.shape[dim] % group.size:
            raise CollectiveError(
                f"{at(group, kind)}: dim {dim} has length {x.shape[dim]}, which {group.size} ranks do not divide",
                "state the pieces with sizes=[...] (all_to_all: send_sizes and recv_sizes)",
            )
        return None
    numbers = [whole(n) for n in sizes] if isinstance(sizes, Iterable) and not isinstance(sizes, str) else [None]
    cut = tuple(n for n in numbers if n is not None)
    if len(numbers) != len(cut) or len(cut) != group.size or min(cut, default=0) < 0:
        given = list(sizes) if isinstance(sizes, Iterable) else sizes
        raise CollectiveError(
            f"{at(group, kind)}: sizes {given} are not {group.size} lengths of at least 0",
            "give one for every rank",
        )
    if x is not None:
        expected = cut[group.rank] if own else sum(cut)
        if x.shape[dim] != expected:
            what = f"this rank's size {expected}" if own else f"the sum {expected}"
            raise CollectiveError(
                f"{at(group, kind)}: dim {dim} has length {x.shape[dim]}, but sizes {list(cut)} say {what}",
                "make the tensor and the sizes agree",
            )
    return cut
