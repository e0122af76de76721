"""Work for weights alone, put off during a backward: what a pipeline does later, when it would otherwise wait.

A product's backward has two halves: the gradient of its input, for which other stages wait, and that of its weight, for
which nobody does (Zero Bubble, arXiv 2401.10241). Here a product is one node of autograd's graph. Inside it is a graph of
its own, of this product alone: backward walks that one to the input at once, and keeps its end, and the gradient that came,
for later. So of all that a forward keeps, what remains in between is what the second half reads: the input and the
gradient of every product's output.

When the second half runs, one backward walks all those graphs to the weights. Autograd then adds up the uses of a weight
in the order in which a whole backward would have, and calls its hooks once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from emu.spmd import EmuError

# What a product's node hangs on where none of its inputs has a gradient. It never gets one itself.
ANCHOR = torch.empty(0, requires_grad=True)
# Whose hooks on saved tensors keep nothing.
CHECKPOINTS = ("torch.utils.checkpoint", "emu.parallel.checkpointing.frames")
# Whose hooks keep them elsewhere.
OFFLOADS = ("emu.parallel.checkpointing.offload",)
_ANCHOR_NODE = get_gradient_edge(ANCHOR).node
# torch.autograd.backward and grad without what these make sure of, which takes as long. Asked for when it is called, since
# the exact tier replaces it: emu/equivalence/exact_backward.py.
_autograd: Any = torch.autograd


class Late(NamedTuple):
    """Weights' work that waits.

    Attributes:
        edge: where the product's own graph ends, at its output.
        grad: the gradient of that.
        task: autograd's number of the backward that came by: a reentrant checkpoint has one of its own.
        weights: whose gradients are wanted.
    """

    edge: GradientEdge
    grad: Tensor
    task: int
    weights: Iterable[Tensor]


class Deferred:
    """The weights' work of one forward, in the order in which its backward came by."""

    def __init__(self) -> None:
        self._late: list[Late] = []

    def held(self) -> list[Tensor]:
        """Gradients of products' outputs that are kept for later."""
        return [late.grad for late in self._late]

    def product(self, function: Callable[..., Tensor], data: Sequence[Tensor], weights: Iterable[Tensor]) -> Tensor:
        """function(*data), whose backward gives gradients to data at once, and to the weights in `run`.

        Args:
            function: reads weights by itself.
            data: distinct tensors with gradients.
            weights: all parameters that it may reach.
        """
        return _product(ANCHOR, self, function, weights, *data)

    def defer(self, function: Callable[[], Sequence[Tensor | None]], weights: Sequence[Tensor]) -> None:
        """Within the backward of an autograd.Function: puts off what gives weights their gradients.

        In its forward, the Function must have kept these weights from autograd: see `deferring`.

        Args:
            function: called in `run`; returns a gradient, or None, for each of the weights.
            weights: that have gradients; leaves, or made of leaves.
        """
        node = torch._C._current_autograd_node()
        assert node is not None, "defer is called outside of a backward"
        if not _adds():
            return
        with torch.enable_grad():
            edge = get_gradient_edge(_Function.apply(function, *weights))
        made: Any = edge.node
        made._set_sequence_nr(node._sequence_nr())  # its place among the weights' other uses
        with torch._C._DisableTorchDispatch():
            grad = ANCHOR.detach()
        self._late.append(Late(edge, grad, torch._C._current_graph_task_id(), weights))

    def run(self) -> None:
        """Gives every weight its gradient."""
        late, self._late = self._late, []
        if not late:
            return
        tasks = {one.task for one in late}
        if len(tasks) == 1:
            _backward(late, {id(w): w for one in late for w in one.weights}.values())
            return
        # Every reentrant checkpoint adds to .grad by itself, when it has seen the last use of a weight.
        last: dict[tuple[int, int], tuple[int, Tensor]] = {}
        for i, one in enumerate(late):
            last |= {(one.task, id(w)): (i, w) for w in one.weights}
        for (task, _), (_, weight) in sorted(last.items(), key=lambda item: item[1][0]):
            _backward([one for one in late if one.task == task], [weight], keep=True)


def deferring() -> Deferred | None:
    """What puts off weights' work in the forward under way, if anything does.

    Who applies an autograd.Function that computes weights' gradients may ask. If there is something, it passes detached
    weights, and beside them `ANCHOR`, so that there is a backward; and that calls `.defer`.
    """
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(found := getattr(mode, "deferred", None), Deferred):
            return found
    return None


def _backward(late: Sequence[Late], weights: Iterable[Tensor], keep: bool = False) -> None:
    roots, grads = tuple(one.edge for one in late), tuple(one.grad for one in late)
    _autograd._engine_run_backward(roots, grads, keep, False, tuple(weights), True, accumulate_grad=True)


def _renumber(node: Any, above: int, by: int) -> None:
    """Gives a product's graph that a checkpoint made anew its old place in autograd's order: by numbers, highest first."""
    number = node._sequence_nr()
    if node.next_functions and number > above:  # neither a weight's own node, nor of what the weight was made of
        node._set_sequence_nr(number + by)
        for below, _ in node.next_functions:
            if below is not None:
                _renumber(below, above, by)


class _Product(Function):
    """Forward: the product. Backward: its inputs' gradients; the weights' wait."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, deferred: Deferred, function: Any, weights: Any, *data: Tensor) -> Tensor:
        with torch.enable_grad():
            inlets = [_inlet(x.detach()) for x in data]
            if _checkpointed():
                # A checkpoint keeps nothing, so neither the graph: it keeps the ticket, and a new graph comes with it.
                with saved_tensors_hooks(_same, _same):
                    out = function(*inlets)
            else:
                out = function(*inlets)
        ctx.rest = deferred, weights
        ctx.set_materialize_grads(False)
        with torch._C._DisableTorchDispatch():  # no part of the program
            ticket: Any = anchor.detach()
        inward = tuple(x if x.is_leaf else get_gradient_edge(x) for x in inlets)
        ticket.inner = get_gradient_edge(out), inward, ctx._sequence_nr()
        ctx.save_for_backward(ticket)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            raise EmuError(
                "this forward takes gradients of gradients, which a backward in two parts does not",
                "choose a schedule whose backwards are whole, such as 1f1b",
            )
        edge, inlets, number = ctx.saved_tensors[0].inner
        deferred, weights = ctx.rest
        if not grad.is_contiguous():
            edge, grad = _flattened(edge, grad)
        if _adds():
            if number != (own := ctx._sequence_nr()):
                _renumber(edge.node, number, own - number)
            deferred._late.append(Late(edge, grad, torch._C._current_graph_task_id(), weights))
        if not inlets:
            return None, None, None, None
        grads = _autograd._engine_run_backward((edge,), (grad,), True, False, inlets, True, accumulate_grad=False)
        return None, None, None, None, *grads


def _flattened(edge: GradientEdge, grad: Tensor) -> tuple[GradientEdge, Tensor]:
    """One step down where that makes a copy of the gradient, which would be made in both halves."""
    node: Any = edge.node
    if node.name() not in ("ViewBackward0", "UnsafeViewBackward0"):
        return edge, grad
    below, number = node.next_functions[0]
    return GradientEdge(below, number), grad.reshape(node._saved_self_sym_sizes)


# Function.apply without what it does for torch.func, under which nothing is put off.
_base: Any = super(Function, _Product)
_product = _base.apply


def _inlet(x: Tensor) -> Any:
    """Where data enters a product's own graph. A leaf holds on to its data, as the product does, unless that takes a copy or
    the data waits elsewhere."""
    return x.requires_grad_() if x.is_contiguous() and not _hooks_of(OFFLOADS) else _Inlet.apply(ANCHOR, x)


class _Inlet(Function):
    """A node that does not hold on to the data."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("a product's gradients end before its inlets")


class _Function(Function):
    """Forward: nothing. Backward: the gradients of weights that a function returns."""

    @staticmethod
    def forward(ctx: Any, function: Any, *weights: Tensor) -> Tensor:
        ctx.function = function
        with torch._C._DisableTorchDispatch():
            return ANCHOR.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        function, ctx.function = ctx.function, None
        return None, *function()


def _adds() -> bool:
    """Whether the backward under way adds to .grad: torch.autograd.grad leaves it alone."""
    return torch._C._will_engine_execute_node(_ANCHOR_NODE)


def _checkpointed() -> bool:
    """Whether a checkpoint is what would keep the tensors that are saved now."""
    return _hooks_of(CHECKPOINTS)


def _hooks_of(modules: Sequence[str]) -> bool:
    """Whether what is saved now goes through hooks of one of these."""
    torchs: Any = torch._C  # whose types do not say all that it has
    hooks = torchs._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") in modules


def _same(x: Tensor) -> Tensor:
    return x
