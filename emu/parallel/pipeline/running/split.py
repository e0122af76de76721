"""The backward of a pipeline's stage in two parts: for its inputs (I), then for its weights (W); https://arxiv.org/abs/2401.10241.

Any plain module's forward: a mode watches torch's functions go by, and those that multiply by a weight, or look it up, are
put off (emu/parallel/deferred.py). What is cheap, such as norms' gradients, stays in I. Together the parts compute what
one backward would, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from emu.parallel.deferred import Deferred
from emu.spmd import EmuError

PRODUCTS: frozenset[Any] = frozenset(
    [F.linear, F.bilinear, F.embedding, F.embedding_bag]
    + [F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
    + [torch.conv1d, torch.conv2d, torch.conv3d, torch.einsum, torch.tensordot, torch.bilinear]
    + [getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "inner")]
    + [getattr(Tensor, name) for name in ("matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "inner")]
    + [Tensor.__matmul__, Tensor.__rmatmul__]
)
# Of their second tensor they read no more than its shape, dtype or device.
_LIKE: frozenset[Any] = frozenset([Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.expand_as, Tensor.reshape_as])

_SHAPE: Any = Tensor.shape
_PROPERTY: Any = type(_SHAPE.__get__)  # how a mode is told of one
# What starts autograd's engine, and what the gradients are called that it starts from.
_ENGINE: dict[Any, str] = {torch.autograd.backward: "grad_tensors", torch.autograd.grad: "grad_outputs"}


class Split:
    """One microbatch's way through one stage, forward and in two parts back.

        split = Split()
        with split:
            out = stage(x)
        (dx,) = split.input_gradients([out], [dout], [x])  # I
        split.weights()  # W

    Between I and W nothing lives but what W reads, if the caller lets go of `out`. A forward that runs again within I
    (a checkpoint) counts as I.
    """

    def __init__(self) -> None:
        self._deferred = Deferred()
        self._watch = _Watch(self._deferred)
        self._done = ""  # the last part that was begun

    def __enter__(self) -> Split:
        if self._done:
            raise EmuError(
                f"a forward within a Split whose {self._done} has run", "make a Split for every microbatch and stage"
            )
        self._watch.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._watch.__exit__(*exc)

    def input_gradients(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None] | None, inputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """I: the gradients of the stage's inputs. Parameters that no product reads get theirs, too.

        Args:
            outputs: of the forward; those that need no gradient are left out.
            grads: theirs. None is 1 for a scalar such as the loss, and no gradient for what is larger.
            inputs: leaves; what they have in .grad stays as it is.

        Returns:
            A gradient for every input; None where it needs none, or no output depends on it.

        Raises:
            EmuError: it has run before; an input that is no leaf.
        """
        learning = [x for x in inputs if x.requires_grad]
        if any(not x.is_leaf for x in learning):
            raise EmuError(
                "an input of the stage is no leaf: a backward would run on into what made it",
                "give the stage x.detach().requires_grad_()",
            )
        roots, given = [], []
        for out, grad in zip(outputs, [None] * len(outputs) if grads is None else grads, strict=True):
            if out.requires_grad and (grad is not None or out.numel() == 1):
                roots.append(self.edge(out))
                given.append(torch.ones_like(out) if grad is None else grad)
        before = [x.grad for x in learning]
        for x in learning:
            x.grad = None
        self.backward(roots, given)
        found = {id(x): x.grad for x in learning}
        for x, grad in zip(learning, before):
            x.grad = grad
        return tuple(found.get(id(x)) for x in inputs)

    def edge(self, output: Tensor) -> GradientEdge:
        """Where the gradient of an output enters the graph, so that the output itself may go before I."""
        return get_gradient_edge(self._watch.seen_out(output))

    def backward(self, roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """I: adds the gradients of all inputs, and of parameters that no product reads, to their .grad.

        Raises:
            EmuError: it has run before.
        """
        if self._done:
            raise EmuError(f"I was asked for, but {self._done} has run already", "run I once for every microbatch")
        self._done = "I"
        if roots:
            with self._watch:  # checkpoints run their forward again
                torch.autograd.backward(roots, grads)

    def weights(self) -> None:
        """W: gives the weights of all products their gradients.

        Raises:
            EmuError: I has not run, or W has.
        """
        if self._done != "I":
            why = "has run already" if self._done else "was asked for before I"
            raise EmuError(f"W {why}", "run I, then W, once for every microbatch")
        self._done = "W"
        self._deferred.run()

    def held(self) -> list[Tensor]:
        """Between I and W: the gradients of products' outputs that W will read."""
        return self._deferred.held()


class _Family:
    """Parameters that meet in one tensor before any data does: their gradients come together.

    Attributes:
        late: whether their gradients are W's. What meets them first decides it for all uses, so that these are added up in
            one order: a product, or something else, such as a norm. None: nothing has yet.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.late: bool | None = None
        self.members = [parameter]


class _Watch(TorchFunctionMode):
    """Watches the functions of a forward go by, and puts off products' work for weights."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred
        self._families: dict[int, _Family] = {}  # of every parameter, by its id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ENGINE:
            return self._differentiate(func, *args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if type(func) is _PROPERTY:
            return self._property(func, *args)
        weights: list[Tensor] = []  # made of parameters alone, whose gradients may wait
        data: list[Tensor] = []  # others with gradients
        rest = False  # whether there are tensors without
        for t in _tensors(args[:1] if func in _LIKE else (*args, *kwargs.values()) if kwargs else args):
            if not t.requires_grad:
                rest = rest or t.dim() > 0
            elif (family := self._family(t)) is not None and family.late is not False:
                weights.append(t)
            else:
                data.append(t)
        if not weights:
            return func(*args, **kwargs)
        if func in PRODUCTS and (data or rest) and self._suits(weights, data):
            return self._product(func, args, kwargs, weights, data)
        if not data and not rest:  # a view of weights, their sum, ...
            out = func(*args, **kwargs)
            self._mark(out, weights)
            return out
        families = ((w, self._family(w)) for w in weights)
        late = {id(w): self._alias(w) for w, family in families if family is not None and family.late}
        if late:
            args, kwargs = _replaced(args, late), _replaced(kwargs, late)
        out = func(*args, **kwargs)
        if out is None or any(t.requires_grad for t in _tensors((out,))):
            for w in weights:
                if (family := self._family(w)) is not None and family.late is None:
                    family.late = False
        return out

    def _differentiate(self, func: Any, roots: Any, inputs: Any = None, **options: Any) -> Any:
        """A backward within a forward, or within a backward, still watched: a checkpoint in it runs its forward again.

        torch would hand these functions to the mode, and take it off meanwhile, for tensors, but not for edges.
        """
        given = options.pop(_ENGINE[func])
        given = [given] * len(roots) if given is None or isinstance(given, Tensor) else given
        grads = [torch.ones_like(t) if g is None and isinstance(t, Tensor) else g for t, g in zip(roots, given)]
        options[_ENGINE[func]] = grads
        if inputs is not None:
            options["inputs"] = _edges(inputs)
        with self:
            return func(_edges(roots), **options)

    def _property(self, func: Any, t: Tensor, *value: Any) -> Any:
        """t.shape, t.T, t.grad = None, ... When torch sets one by itself, other properties of t may wait for that in vain."""
        out = func(t, *value)
        if isinstance(out, Tensor) and out.requires_grad and (family := self._family(t)) and family.late is not False:
            self._mark(out, [t])
        return out

    def _family(self, t: Tensor) -> _Family | None:
        """Of what is a parameter, or made of parameters alone."""
        if t.is_leaf:
            found = self._families.get(id(t))
            if found is None and isinstance(t, nn.Parameter):
                found = self._families[id(t)] = _Family(t)
            return found
        parameter, version = getattr(t, "_emu_weight", (None, 0))
        if parameter is None or version != t._version:  # something was written into it
            return None
        return self._families.get(id(parameter))

    def _mark(self, out: Any, weights: list[Tensor]) -> None:
        """What was made of weights alone is a weight, too."""
        first, *others = [self._family(w) for w in weights]
        assert first is not None
        for other in others:
            if other is not None and other is not first:
                first.late = first.late or other.late
                first.members += other.members
                self._families.update((id(p), first) for p in other.members)
        written = [w for w in weights if not w.is_leaf]
        for t in (*_tensors((out,)), *written):
            if t.requires_grad and not t.is_leaf:
                marked: Any = t
                marked._emu_weight = (first.members[0], t._version)

    def _suits(self, weights: list[Tensor], data: list[Tensor]) -> bool:
        """Whether a product's work for weights is worth putting off, and can be."""
        return (
            any(w.dim() > 1 for w in weights)
            and len({id(t) for t in data}) == len(data)  # else their gradients would be added up in another order
            and not torch._C._are_functorch_transforms_active()
        )

    def _product(self, func: Any, args: Any, kwargs: Any, weights: list[Tensor], data: list[Tensor]) -> Tensor:
        reached: dict[int, nn.Parameter] = {}
        for w in weights:
            family = self._family(w)
            assert family is not None
            family.late = True
            reached |= {id(p): p for p in family.members}

        def product(*inlets: Tensor) -> Tensor:
            put = {id(x): inlet for x, inlet in zip(data, inlets)}
            return func(*_replaced(args, put), **_replaced(kwargs, put))

        return self.deferred.product(product, data, reached.values())

    def _alias(self, weight: Tensor) -> Tensor:
        """The same weight, whose gradient waits, for something that is no product."""
        return self._product(Tensor.view_as, (weight, weight), {}, [weight], [])

    def seen_out(self, out: Tensor) -> Tensor:
        """A stage's output; one that is a weight, or a view of it, waits as all its uses do."""
        family = self._family(out)
        with torch.enable_grad():
            return self._alias(out) if family is not None and family.late else out


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _edges(tensors: Any) -> list[Any]:
    return [get_gradient_edge(t) if isinstance(t, Tensor) else t for t in tensors]


def _replaced(value: Any, put: dict[int, Tensor]) -> Any:
    """The same, nested, with some tensors replaced, by their ids."""
    if isinstance(value, Tensor):
        return put.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replaced(item, put) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, put) for item in value)
    return value
