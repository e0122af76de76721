"""The gradients of one flat vector on one rank: a bucket that a backward fills, and its sum over ranks.

They are sums until `finish` divides them once. While a backward adds to them they are whole, in one buffer, of which
every parameter's `.grad` is a view; from stage 2 on only this rank's part of the sum stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emu.parallel.shards import Shards, first


class Gradients:
    """The gradients of the parameters of one flat vector.

    Attributes:
        arrived: parameters (by their place in the vector) that the backward under way has given a gradient.
        used: those that a backward of this step has.
        nowhere: those that no rank's backward has, once that is known; their gradient is None, as on a single device.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.arrived: set[int] = set()
        self.used: set[int] = set()
        self.nowhere: set[int] = set()
        self._whole: Tensor | None = None  # [numel]
        self._views: list[Tensor] = []
        self._filled: set[int] = set()  # of which the buffer holds a gradient
        self._part: Tensor | None = None  # stages 2 and 3: this rank's part of the sum, [slots]
        self._going: Any = None  # the reduction under way
        self._summed = False  # whether the buffer holds a sum over ranks
        self._late = shards.dtypes.grad != shards.dtypes.master
        self._divisor: float | None = None  # by which the sum is still to be divided

    @property
    def complete(self) -> bool:
        """Whether the backward under way has given every parameter its gradient."""
        return len(self.arrived) == len(self.shards.parameters)

    @property
    def takes_more(self) -> bool:
        """Whether a reduction under way holds memory beside the gradients: a copy to send, or a part that comes."""
        return self.shards.place.stage > 0 or self.shards.dtypes.reduce != self.shards.dtypes.grad

    def before(self) -> None:
        """A gradient is about to be added: a sum over ranks that is there already must count once, so one rank keeps it."""
        self.collect()
        for i in [i for i in self._filled if self._visible(i) is not None and self.shards.parameters[i].grad is None]:
            self._filled.discard(i)  # zero_grad() of the model's, or of an optimizer's of torch's own
            self.used.discard(i)
        if not self._summed or self._whole is None:
            return
        shards, (_, group, replicas, stage) = self.shards, self.shards.place
        keeps = (replicas is None or not replicas.rank) and (stage > 0 or not group.rank)
        self._whole[: shards.first].zero_()
        self._whole[shards.first + (shards.real if keeps else 0) :].zero_()
        self._summed = False

    def receive(self, index: int) -> None:
        """Autograd has given a parameter its gradient: it becomes part of the bucket, which later ones add to."""
        p = self.shards.parameters[index]
        self._make()
        view = self._views[index]
        if p.grad is not view:
            assert p.grad is not None
            added = index in self._filled and p.dtype != view.dtype  # else p.grad was None on purpose: a new step
            view.add_(p.grad) if added else view.copy_(p.grad)
            p.grad = self._visible(index)
        self._filled.add(index)
        self.used.add(index)
        self.arrived.add(index)

    def _visible(self, index: int) -> Tensor | None:
        view = self._views[index]
        return view if view.dtype == self.shards.parameters[index].dtype else None

    def _make(self) -> None:
        if self._whole is None:
            shards = self.shards
            where = shards.parameters[0].device
            self._whole = torch.empty(shards.flat.numel, dtype=shards.dtypes.grad, device=where)
            shards.place.rank.account(self._whole, "gradients", shards.name)
            self._views = shards.cut(self._whole)

    def reduce(self) -> None:
        """Starts to sum over ranks. A parameter that this rank has no gradient for adds zeros."""
        shards, (rank, group, replicas, stage) = self.shards, self.shards.place
        self.before()  # nothing may have come since the last sum
        self._make()
        assert self._whole is not None
        for i, view in enumerate(self._views):
            if i not in self._filled:
                view.zero_()
        sent = self._whole.to(shards.dtypes.reduce)  # itself where the dtype is the same
        if not stage:
            work = group.all_reduce(sent, async_op=True, name=shards.name)
        elif shards.flat.owner is not None:
            work = group.reduce(sent, shards.flat.owner, async_op=True, name=shards.name)
        else:
            work = group.reduce_scatter(sent, sizes=shards.sizes, async_op=True, name=shards.name)
        if replicas is not None:
            with rank.stream(f"{group.label} then {replicas.label}"):  # the compute stream need not wait in between
                work = replicas.all_reduce(work.wait()[: shards.real], async_op=True, name=shards.name)
        self._going = work, sent  # what is sent must stay until it has arrived
        self._hide()  # so that nothing is added to it

    def collect(self) -> None:
        """The current stream waits for the reduction, if one is under way, and keeps what it brought."""
        if self._going is None:
            return
        work, _ = self._going
        self._going = None
        result = work.wait()
        shards, stage = self.shards, self.shards.place.stage
        assert self._whole is not None
        if stage < 2:
            own = self._whole[shards.first : shards.first + shards.real]
            if result.untyped_storage()._cdata != own.untyped_storage()._cdata:  # addresses mean nothing in a shape run
                own.copy_(first(result, shards.real))
            self._summed = True
            self._filled.update(range(len(self._views)))
            for i, p in enumerate(shards.parameters):
                p.grad = self._visible(i)
            return
        if self._part is None:
            self._part = torch.zeros(shards.slots, dtype=shards.dtypes.grad, device=self._whole.device)
            shards.place.rank.account(self._part, "gradients", shards.name)
            first(self._part, shards.real).copy_(first(result, shards.real))
        else:
            first(self._part, shards.real).add_(first(result, shards.real))
        self._whole, self._views = None, []
        self._filled.clear()
        self._hide()

    def _hide(self) -> None:
        for p in self.shards.parameters:
            p.grad = None

    def own(self) -> Tensor:
        """This rank's part of the sum, without padding; at stage 0 all of it."""
        shards = self.shards
        if self._part is not None:
            return first(self._part, shards.real)
        assert self._whole is not None
        return self._whole[shards.first : shards.first + shards.real]

    def finish(self, divisor: float) -> None:
        """The step's gradients are complete: divides them, once.

        Where the optimizer's precision is another, they are divided in that one, when it gets them: a quotient may be too
        small for a dtype that its sum fits into.
        """
        self.collect()
        self._divisor = divisor if self._late else None
        if self._divisor is None:
            self.own().div_(divisor)
        if self.shards.place.stage or self._divisor is not None:
            self._hide()  # a whole gradient is nowhere: nobody should take a part, or a sum, for it
        for i in self.nowhere:
            self.shards.parameters[i].grad = None

    def forget(self) -> None:
        """Before a new step."""
        self.collect()
        self._part = None
        self._summed = False
        for kept in (self._filled, self.used, self.nowhere):
            kept.clear()
        self._hide()
        for _, parameter in self.shards.stepped():
            parameter.grad = None

    def hand_over(self) -> Tensor:
        """Gives the optimizer's parameters their gradients, in its precision. Returns them, without padding."""
        shards = self.shards
        stepped, own = shards.stepped(), self.own()
        parameter = stepped[0][1] if stepped else None
        if parameter is None:
            return own.to(shards.dtypes.master)  # nothing, in everyone's dtype
        if parameter is shards.parameters[stepped[0][0].index]:
            return own  # the parameters themselves: their .grad are views of it already
        given = self._divided(self._part if self._part is not None else own)
        length = max(span.at + span.length for span, _ in stepped)
        if length > len(given):
            given = torch.cat([given, given.new_zeros(length - len(given))])
        pieces = first(given, length).split([span.length for span, _ in stepped])  # end to end, from the first on
        for (span, p), piece in zip(stepped, pieces):
            if span.index not in self.nowhere:
                p.grad = piece
        return first(given, shards.real)

    def _divided(self, sums: Tensor) -> Tensor:
        """In the optimizer's precision; itself where it is that already."""
        if self._divisor is None:
            return sums.to(self.shards.dtypes.master)
        return sums.to(self.shards.dtypes.master, copy=True).div_(self._divisor)

    def release(self) -> None:
        """After the step: the optimizer's parameters hold on to gradients no longer."""
        if not self.shards.in_place:
            for _, p in self.shards.stepped():
                p.grad = None

    def whole(self) -> dict[str, Tensor]:
        """Whole gradients by name, as new tensors. Every rank of the group must call it."""
        shards = self.shards
        if shards.place.stage:
            values = shards.assembled(self._divided(self.own()))
        else:
            assert self._whole is not None
            values = {
                name: view.clone() for name, view in zip(shards.flat.names, shards.cut(self._divided(self._whole)))
            }
        return {name: value for i, (name, value) in enumerate(values.items()) if i not in self.nowhere}
