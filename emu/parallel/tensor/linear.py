"""Linear maps cut over ranks: by outputs (column-parallel) or by inputs (row-parallel), in Megatron-LM's words.

The names are those of y = x A, whose A is the transpose of torch's weight [out, in] (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from emu.parallel.tensor.cuts import Ranges, shared_ranges
from emu.parallel.tensor.region import Region
from emu.parallel.tensor.tokens import TokenCut
from emu.spmd import EmuError, Group, gather_from, reduce_from, reduce_to_shards, scatter_to


class ColumnLinear(nn.Linear):
    """A linear map of which this rank has some outputs: weight [own out, in], bias [own out]."""

    name: str
    region: Region
    own_region: bool  # whether it is a region by itself
    shared: list[tuple[int, int, Group]]  # outputs that other ranks hold, too, with them
    owns: list[tuple[int, int]] | None  # outputs whose share of the input's gradient this rank adds; None: all
    repeats: (
        list[int] | None
    )  # for every query head of this rank, which of its heads it reads, where that is no even share
    head_dim: int
    gathers: list[int] | None  # outputs of every rank, where all are gathered

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., own out]; all outputs where they are gathered."""
        _check_width(self.name, input, self.in_features, "a Column reads all")
        if self.own_region:
            entered = self.region.enter(input)
            y = self.region.product(self, entered)
            self.region.leave()
            assert y is not None
        else:
            y = self.region.product(self, input)
            if y is None:
                y = self._by_itself(input)
        if self.repeats is not None:
            y = _Repeat.apply(y, self.repeats, self.head_dim)
        if self.gathers is not None:
            y = gather_from(y, self.region.group, -1, self.gathers, name=self.region.name)
            self.region.closed = True
        return y

    def _by_itself(self, input: Tensor) -> Tensor:
        """What came is not what entered the region, but was made of it: autograd follows."""
        if self.shared:
            raise EmuError(
                f"{self.name}: a Column with heads that several ranks hold must read what enters its region, unchanged",
                "leave the module's input as it is, or mark the module that changes it as the Region",
            )
        if self.region.closed:
            raise EmuError(
                f"{self.name} reads what a Row, or a gathered Column, of the same Region {self.region.name!r} made whole: the "
                "gradient that it gives back would be a part",
                "make a Region of each pair of Column and Row",
            )
        return F.linear(input, self.weight, self.bias)

    def complete(self, grad: Tensor) -> Tensor:
        """Gradients of heads that several ranks hold, added up before weights and inputs see them."""
        if self.shared:
            grad = grad.clone(memory_format=torch.contiguous_format)
            for start, stop, group in self.shared:
                part = grad[..., start:stop].contiguous()
                grad[..., start:stop] = group.all_reduce(part, name=f"{self.region.name} shared heads")
        return grad

    def owned(self) -> list[tuple[int, int]] | None:
        return self.owns

    def extra_repr(self) -> str:
        group = self.region.group
        return f"{self.in_features}, {len(self.weight)} of {self.out_features}, {group.label}={group.size}"


class RowLinear(nn.Linear):
    """A linear map of which this rank has some inputs: weight [out, own in]; the bias is whole, and added once."""

    name: str
    region: Region | None  # that it lies in
    group: Group
    tokens: TokenCut | None
    scatters: list[int] | None  # inputs of every rank, where this one takes its own from all

    def forward(self, input: Tensor) -> Tensor:
        """[..., own in] -> [..., out]: all tokens, or under sp this rank's."""
        if self.scatters is not None:
            _check_width(self.name, input, self.in_features, "Row(scatter=True) reads all")
            input = scatter_to(input, self.group, -1, self.scatters, name=self.name)
        _check_width(self.name, input, self.weight.shape[1], "a Row reads this rank's part of")
        y = F.linear(input, self.weight)
        if self.tokens is None:
            y = reduce_from(y, self.group, in_place=True, name=self.name)
        else:
            self.tokens.length = y.shape[self.tokens.dim]  # partial sums are of all tokens
            sizes = self.tokens.sizes
            y = reduce_to_shards(y, self.group, self.tokens.dim, sizes if len(set(sizes)) > 1 else None, name=self.name)
        if self.region is not None:
            self.region.closed = True
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[1]} of {self.in_features}, {self.out_features}, {self.group.label}={self.group.size}"
        )


def _check_width(name: str, input: Tensor, width: int, what: str) -> None:
    """Raises an EmuError where a linear map was given another number of inputs than it reads."""
    if input.shape[-1] != width:
        raise EmuError(
            f"{name}: {what} {width} inputs, but was given {input.shape[-1]}",
            "pair the map before it: Column() and then Row(), with the same cut; Column(gather=True) and Row(scatter=True) "
            "stand by themselves",
        )


def become_column(module: nn.Linear, name: str, region: Region, own_region: bool) -> ColumnLinear:
    """Makes a linear map, whose parameters are cut already, a column-parallel one of a region."""
    made: Any = module
    made.__class__ = ColumnLinear
    made.name, made.region, made.own_region = name, region, own_region
    made.shared, made.owns, made.repeats, made.head_dim, made.gathers = [], None, None, 0, None
    region.maps.append(made)
    return made


def share_heads(module: ColumnLinear, ranges: tuple[Ranges, ...], rank: Any, group: Group) -> None:
    """Tells a column-parallel map which of its outputs other ranks hold, too; the first holder answers for them."""
    own = group.rank
    lost: list[tuple[int, int]] = []
    for start, stop, holders in shared_ranges(ranges, own):
        members = [group.members[i] for i in holders]
        module.shared.append((start, stop, rank.group(members=members, label=f"{group.label}.kv")))
        if holders[0] != own:
            lost.append((start, stop))
    if lost:
        module.owns, at = [], 0
        for start, stop in [*lost, (len(module.weight), len(module.weight))]:
            if at < start:
                module.owns.append((at, start))
            at = stop


def become_row(module: nn.Linear, name: str, group: Group, tokens: TokenCut | None, region: Region | None) -> RowLinear:
    """Makes a linear map, whose weight is cut already, a row-parallel one."""
    made: Any = module
    made.__class__ = RowLinear
    made.name, made.group, made.tokens, made.region, made.scatters = name, group, tokens, region, None
    return made


class _Repeat(Function):
    """Forward: for every query head a copy of the head it reads. Backward: the copies' gradients added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, served: list[int], head_dim: int) -> Tensor:
        ctx.rest = served, head_dim, x.shape[-1] // head_dim
        heads = x.split(head_dim, -1)
        return torch.cat([heads[head] for head in served], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        served, head_dim, n = ctx.rest
        copies = grad.split(head_dim, -1)
        heads: list[Any] = [None] * n
        for copy, head in zip(copies, served):
            heads[head] = copy if heads[head] is None else heads[head] + copy
        return torch.cat(heads, -1), None, None
