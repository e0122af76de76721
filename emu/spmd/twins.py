"""Differentiable collectives, each with its adjoint as backward.

The classic trap is the pairing: an all-reduce in forward has the identity as backward when what follows is computed
alike on every rank, and the identity in forward has an all-reduce as backward when what follows differs. Each twin
names its pair; the operators f and g of Megatron-LM (arXiv 1909.08053) are copy_to and reduce_from. Backward is
itself made of twins, so second derivatives work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from emu.spmd.arguments import at, readable, sizes_of
from emu.spmd.errors import CollectiveError
from emu.spmd.group import Group


def copy_to(x: Tensor, group: Group, *, name: str | None = None) -> Tensor:
    """Forward: identity. Backward: all_reduce. Enters a region where ranks compute different things from the same x."""
    return _CopyTo.apply(x, group, name)


def reduce_from(x: Tensor, group: Group, *, name: str | None = None, in_place: bool = False) -> Tensor:
    """Forward: all_reduce. Backward: identity. Leaves such a region: partial sums become one value on every rank.

    in_place: x itself becomes the sum, which takes no more memory. It must be no leaf that requires grad, and nobody's
    backward may need what it was; of the latter torch's autograd sees to it.
    """
    if in_place and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise CollectiveError(
            f"{at(group, 'reduce_from')}: in_place=True on a leaf of shape {tuple(x.shape)} that requires grad, whose "
            "value would be lost",
            "leave in_place out",
        )
    return _ReduceFrom.apply(x, group, name, in_place)


def scatter_to(
    x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, *, name: str | None = None
) -> Tensor:
    """Forward: this rank's own piece of x along dim. Backward: all_gather. x is the same on every rank."""
    return _ScatterTo.apply(x, group, dim, sizes, name)


def gather_from(
    x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, *, name: str | None = None
) -> Tensor:
    """Forward: all_gather along dim. Backward: own piece. What follows is computed alike on every rank."""
    return _GatherFrom.apply(x, group, dim, sizes, name)


def gather_shards(
    x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, *, name: str | None = None
) -> Tensor:
    """Forward: all_gather along dim. Backward: reduce_scatter. What follows differs between ranks."""
    return _GatherShards.apply(x, group, dim, sizes, name)


def reduce_to_shards(
    x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None, *, name: str | None = None
) -> Tensor:
    """Forward: reduce_scatter along dim. Backward: all_gather."""
    return _ReduceToShards.apply(x, group, dim, sizes, name)


def exchange_shards(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    dim: int = 0,
    *,
    name: str | None = None,
) -> Tensor:
    """Forward: all_to_all along dim. Backward: all_to_all back, with the sizes exchanged."""
    return _ExchangeShards.apply(x, group, send_sizes, recv_sizes, dim, name)


def shift(
    x: Tensor, group: Group, by: int = 1, *, dim: int = 0, sizes: Sequence[int] | None = None, name: str | None = None
) -> Tensor:
    """Forward: ring_shift by `by` places. Backward: ring_shift back."""
    return _Shift.apply(x, group, by, dim, sizes, name)


def _own(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
    dim = readable(group, "scatter", x.detach(), dim)
    cut = sizes_of(group, "scatter", sizes, x, dim) or (x.shape[dim] // group.size,) * group.size
    return x.narrow(dim, sum(cut[: group.rank]), cut[group.rank]).clone(memory_format=torch.contiguous_format)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str | None) -> Tensor:
        ctx.rest = group, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, name = ctx.rest
        return reduce_from(grad, group, name=name), None, None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str | None, in_place: bool = False) -> Tensor:
        ctx.rest = group, name
        if not in_place:
            return group.all_reduce(x.detach().clone(memory_format=torch.contiguous_format), name=name)
        group.all_reduce(x.detach(), name=name)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, name = ctx.rest
        return copy_to(grad, group, name=name), None, None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Any, name: str | None) -> Tensor:
        ctx.rest = group, dim, sizes, name
        return _own(x.detach(), group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, dim, sizes, name = ctx.rest
        return gather_from(grad, group, dim, sizes, name=name), None, None, None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Any, name: str | None) -> Tensor:
        ctx.rest = group, dim, sizes, name
        return group.all_gather(x.detach(), dim, sizes, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, dim, sizes, name = ctx.rest
        return scatter_to(grad, group, dim, sizes, name=name), None, None, None, None


class _GatherShards(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Any, name: str | None) -> Tensor:
        ctx.rest = group, dim, sizes, name
        return group.all_gather(x.detach(), dim, sizes, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, dim, sizes, name = ctx.rest
        return reduce_to_shards(grad, group, dim, sizes, name=name), None, None, None, None


class _ReduceToShards(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Any, name: str | None) -> Tensor:
        ctx.rest = group, dim, sizes, name
        return group.reduce_scatter(x.detach(), dim, sizes, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, dim, sizes, name = ctx.rest
        return gather_shards(grad, group, dim, sizes, name=name), None, None, None, None


class _ExchangeShards(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send: Any, recv: Any, dim: int, name: str | None) -> Tensor:
        ctx.rest = group, send, recv, dim, name
        return group.all_to_all(x.detach(), send, recv, dim, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, send, recv, dim, name = ctx.rest
        return exchange_shards(grad, group, recv, send, dim, name=name), None, None, None, None, None


class _Shift(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, by: int, dim: int, sizes: Any, name: str | None) -> Tensor:
        ctx.rest = group, by, dim, sizes, name
        return group.ring_shift(x.detach(), by, dim=dim, sizes=sizes, name=name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, by, dim, sizes, name = ctx.rest
        # What comes back has this rank's own length again; on its way it has the lengths of the ranks it was shifted to.
        back = [sizes[(i - by) % group.size] for i in range(group.size)] if sizes is not None else None
        return shift(grad, group, -by, dim=dim, sizes=back, name=name), None, None, None, None, None
