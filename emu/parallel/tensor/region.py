"""Regions: parts of a model in which ranks compute different parts of the same, from an input that enters once.

Megatron-LM's f (arXiv 1909.08053) and, under sp, its g-bar's partner (arXiv 2205.05198, figure 5), for all column-parallel
maps of a region together:

    forward     nothing, or under sp an all-gather of the tokens; every map's product
    backward    under sp the tokens are gathered once more, while the products of the input's gradient run;
                that gradient's all-reduce (reduce-scatter) runs beside the products of the weights' gradients

Under sp only this rank's tokens are kept for backward. The maps hand their output's gradient over, and the entrance, whose
inputs the weights are, computes all gradients: so one communication serves all, and something always runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from emu.parallel.deferred import ANCHOR, deferring
from emu.parallel.tensor.tokens import TokenCut
from emu.spmd import EmuError, Group


class Map(Protocol):
    """What a region asks of its column-parallel maps."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    def complete(self, grad: Tensor) -> Tensor:
        """The gradient of its output, complete where several ranks hold a part of it."""
        ...

    def owned(self) -> Sequence[tuple[int, int]] | None:
        """The outputs whose share of the input's gradient is this rank's to add; None: all."""
        ...


class Region:
    """One module's region on one rank.

    Args:
        name: of the module, for its communications.
        group: the ranks that compute different parts.
        tokens: how the sequence is cut over them under sp; None: the input is whole on every rank.
    """

    def __init__(self, name: str, group: Group, tokens: TokenCut | None) -> None:
        self.name, self.group, self.tokens = name, group, tokens
        self.maps: list[Map] = []
        self.closed = False  # whether parts have become whole again in the forward under way
        self._entered: Tensor | None = None
        self._pass: _Pass | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x as every rank of the region sees it, whole: [batch, seq, width]."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise EmuError(
                f"{self.name}: {what} enters, but a Region's first argument brings its activations",
                "let the module take its activations first",
            )
        if self.tokens is not None:
            self.tokens.settle(x, self.name)
        self.closed = False
        under_way = self._pass = _Pass(self)
        trained = [t for m in self.maps for t in (m.weight, m.bias) if t is not None]
        anchor = None
        if under_way.deferred is not None:
            under_way.late = [t for t in trained if t.requires_grad]
        if under_way.late:
            anchor, trained = ANCHOR, [t.detach() for t in trained]
        entered, under_way.ticket = _Enter.apply(x, under_way, anchor, *trained)
        self._entered = entered
        return entered

    @property
    def places(self) -> list[tuple[int, bool]]:
        """Where every map's weight stands among all weights and biases, and whether a bias follows it."""
        places, at = [], 0
        for m in self.maps:
            places.append((at, m.bias is not None))
            at += 1 if m.bias is None else 2
        return places

    def leave(self) -> None:
        """The module's forward is over: nothing of it is held on to but for its backward."""
        if self._pass is not None:
            self._pass.ticket = self._pass.rows = None
        self._pass = self._entered = None

    def product(self, m: Map, x: Tensor) -> Tensor | None:
        """x through one of the maps; None where x is not what entered, and autograd must follow by itself."""
        if self._pass is None or x is not self._entered:
            return None
        under_way = self._pass
        if under_way.rows is None:
            under_way.rows = _rows(x.detach())
        return _Product.apply(under_way.ticket, under_way, self.maps.index(m), x.shape[:-1])

    def __deepcopy__(self, memo: Any) -> Any:
        raise EmuError(
            f"a copy of {self.name or 'the model'!r} would talk for the model it was copied from",
            "copy the plain model, and cut the copy",
        )


class _Pass:
    """One forward through a region, and its backward."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.ticket: Tensor | None = None  # holds the maps' outputs to the entrance in autograd's graph
        self.rows: Tensor | None = None  # what entered: [tokens, width]
        self.given: list[tuple[int, Tensor]] = []  # gradients of the maps' outputs: [tokens, out], one for every call
        self.deferred = deferring()  # what puts off the weights' gradients, if anything does
        self.late: list[Tensor] = []  # the weights and biases whose gradients it puts off


class _Product(Function):
    """Forward: the map. Backward: its output's gradient is left for the entrance."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, under_way: _Pass, index: int, shape: Sequence[int]) -> Tensor:
        ctx.rest = under_way, index
        m, rows = under_way.region.maps[index], under_way.rows
        assert rows is not None
        y = rows @ m.weight.t() if m.bias is None else torch.addmm(m.bias, rows, m.weight.t())
        return y.view(*shape, y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        under_way, index = ctx.rest
        grad = under_way.region.maps[index].complete(grad)
        under_way.given.append((index, _rows(grad)))
        return None, None, None, None


class _Enter(Function):
    """Forward: identity (all_gather). Backward: all_reduce (reduce_scatter) of the gradients of all maps together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: _Pass, anchor: Tensor | None, *trained: Tensor) -> Any:
        region, tokens = under_way.region, under_way.region.tokens
        ctx.under_way = under_way
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *trained)
        ticket = x.new_empty(0)
        if tokens is None:
            entered = x.view_as(x)
        else:
            ctx.sizes = sizes = tokens.sizes
            entered = region.group.all_gather(x.detach(), tokens.dim, _uneven(sizes), name=region.name)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(entered)
        return entered, ticket

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, other: Tensor | None, _: Tensor | None) -> Any:
        x, *trained = ctx.saved_tensors
        under_way, region = ctx.under_way, ctx.under_way.region
        group, tokens = region.group, region.tokens
        given, under_way.given = under_way.given, []
        wanted = ctx.needs_input_grad[3:]

        def gather(async_op: bool) -> Any:
            again = f"{region.name} again"
            return group.all_gather(x.detach(), tokens.dim, _uneven(ctx.sizes), async_op=async_op, name=again)

        gathering = gather(True) if tokens is not None and given and any(wanted) else None
        dx = _input_gradient(region.maps, given, trained, region.places) if ctx.needs_input_grad[0] else None
        if dx is not None:
            shape = list(x.shape)
            if tokens is not None:
                shape[tokens.dim] = sum(ctx.sizes)
            dx = dx.view(shape).to(x.dtype)
        if other is not None and ctx.needs_input_grad[0]:
            dx = dx.add_(other) if dx is not None else other.clone(memory_format=torch.contiguous_format)
        going = None
        if dx is not None and tokens is None:
            going = group.all_reduce(dx, async_op=True, name=region.name)
        elif dx is not None and tokens is not None:
            going = group.reduce_scatter(dx, tokens.dim, _uneven(ctx.sizes), async_op=True, name=region.name)
        if late := under_way.late:
            assert under_way.deferred is not None
            flags = [t.requires_grad for t in (p for m in region.maps for p in (m.weight, m.bias) if p is not None)]

            def gradients() -> list[Tensor | None]:
                read = gather(False) if tokens is not None and given else x.detach()
                out = _weight_gradients(region, given, trained, flags, read)
                return [grad for grad, flag in zip(out, flags) if flag]

            under_way.deferred.defer(gradients, late)
            return (going.wait() if going is not None else None), None, None, *[None] * len(trained)
        read = gathering.wait() if gathering is not None else x.detach()
        out = _weight_gradients(region, given, trained, wanted, read)
        return (going.wait() if going is not None else None), None, None, *out


def _weight_gradients(
    region: Region, given: Sequence[tuple[int, Tensor]], trained: Sequence[Tensor], wanted: Sequence[bool], read: Tensor
) -> list[Tensor | None]:
    """Of all weights and biases, where wanted: from the gradients of the maps' outputs, and what all maps read."""
    rows, places = _rows(read), region.places
    out: list[Tensor | None] = [None] * len(trained)
    for i, grad in given:
        at, bias = places[i]
        if wanted[at]:
            out[at] = _added(out[at], (grad.t() @ rows.to(grad.dtype)).to(trained[at].dtype))
        if bias and wanted[at + 1]:
            out[at + 1] = _added(out[at + 1], grad.sum(0).to(trained[at + 1].dtype))
    return out


def _input_gradient(
    maps: Sequence[Map],
    given: Sequence[tuple[int, Tensor]],
    trained: Sequence[Tensor],
    places: Sequence[tuple[int, bool]],
) -> Tensor | None:
    """[tokens, width]: this rank's part of the gradient of what entered, of all maps together."""
    total: Tensor | None = None
    for i, grad in given:
        weight = trained[places[i][0]].to(grad.dtype)
        owned = maps[i].owned()
        for start, stop in ((0, len(weight)),) if owned is None else owned:
            whole = start == 0 and stop == len(weight)
            g, w = (grad, weight) if whole else (grad[:, start:stop], weight[start:stop])
            total = g @ w if total is None else total.addmm_(g, w)
        if total is None:  # nothing of it is this rank's to add
            total = grad.new_zeros(len(grad), weight.shape[1])
    return total


def _uneven(sizes: list[int]) -> list[int] | None:
    """Sizes for a collective: none where they are even."""
    return None if len(set(sizes)) == 1 else sizes


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [tokens, width], also where there are no tokens, or no width."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
