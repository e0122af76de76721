"""The whole state that a rank leaves behind: parameters, gradients, optimizer states and results, as a digest of bits.

Two runs whose ranks leave the same bits are the same run to any check. This decides which mutants are equivalent, and
knows nothing of how results are compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules import module as nn_module

from emu.equivalence.compare import named

_here = threading.local()  # .keeper: the Keeper of the rank whose thread this is


class Keeper:
    """Holds on to what one rank's program makes, which would die with its last frame."""

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}  # by id, in the order they were met
        self.homes: dict[int, list[Any]] = {}  # by id: modules that registered it, where nothing else has used it yet
        self.optimizers: dict[int, Any] = {}
        self.random: str | None = None  # the first module called that draws random numbers

    def keep(self, parameter: Any) -> None:
        """A parameter that is used: a module that has it is called, a backward reaches it, an optimizer steps on it."""
        if isinstance(parameter, Tensor):
            self.parameters.setdefault(id(parameter), parameter)
            self.homes.pop(id(parameter), None)

    def register(self, module: Any, parameter: Any) -> None:
        """A parameter that a module is given, and may have replaced before it is ever used."""
        if isinstance(parameter, Tensor):
            if id(parameter) not in self.parameters:
                self.parameters[id(parameter)], self.homes[id(parameter)] = parameter, []
            if id(parameter) in self.homes:
                self.homes[id(parameter)].append(module)

    def _replaced(self, parameter: Tensor) -> bool:
        homes = self.homes.get(id(parameter))
        if homes is None or parameter.grad is not None:
            return False
        return not any(parameter is held for module in homes for held in module._parameters.values())

    def digest(self) -> bytes:
        bits = hashlib.blake2b(digest_size=16)
        for p in self.parameters.values():
            if self._replaced(p):  # a tied head's first weight: whatever bits its memory had
                continue
            _add(bits, p)
            _add(bits, p.grad)
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                for key in sorted(state):
                    _add(bits, state[key])
        return bits.digest()


@contextmanager
def kept() -> Iterator[Keeper]:
    """Makes a Keeper for this thread."""
    _here.keeper = keeper = Keeper()
    try:
        yield keeper
    finally:
        _here.keeper = None


@contextmanager
def keeping() -> Iterator[None]:
    """While it is on, torch announces parameters, optimizers and whatever else gets a gradient to the thread's Keeper."""
    import torch.optim.optimizer as optimizer

    handles = [
        nn_module.register_module_parameter_registration_hook(_registered),
        nn_module.register_module_forward_pre_hook(_called),  # a copied module registers nothing, but is called
        optimizer.register_optimizer_step_post_hook(_stepped),
    ]
    backward = torch.autograd.backward

    def announcing(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        keeper = getattr(_here, "keeper", None)
        if keeper is not None:
            for leaf in _leaves([tensors] if isinstance(tensors, Tensor) else tensors):
                keeper.keep(leaf)
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = announcing
    try:
        yield
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


def _leaves(roots: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that a backward from these roots gives gradients to, in an order that the program alone decides."""
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    nodes = [node for node in nodes if node is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(following)
        nodes += following


def drops_out(module: Any) -> bool:
    """Whether a call of this module itself, not of its children, zeroes numbers at random."""
    p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        p = module.dropout
    return module.training and 0 < p < 1


def name_of_dropout(module: Any) -> str:
    """A module that drops out, for messages: "Dropout(p=0.1)"."""
    return f"{type(module).__name__}({f'p={module.p}' if hasattr(module, 'p') else f'dropout={module.dropout}'})"


def digest_of(result: Any) -> bytes:
    """The bits of a program's result."""
    bits = hashlib.blake2b(digest_size=16)
    for name, (tensor, _) in named(result).items():
        bits.update(name.encode())
        _add(bits, tensor)
    return bits.digest()


def _add(bits: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        looking = torch._C.DisableTorchFunctionSubclass()  # a parameter that is away in shards has no bits, and says so
        with torch.no_grad(), torch._C._DisableTorchDispatch(), looking:
            plain = value.detach() if value.layout is torch.strided else value.detach().to_dense()
            flat = plain.contiguous().reshape(-1)
            bits.update(f"{value.dtype}{tuple(value.shape)}".encode())
            bits.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    else:
        bits.update(repr(value).encode())


def _registered(module: Any, name: str, parameter: Any) -> None:
    keeper = getattr(_here, "keeper", None)
    if keeper is not None:
        keeper.register(module, parameter)


def _called(module: Any, args: Any) -> None:
    keeper = getattr(_here, "keeper", None)
    if keeper is not None:
        for parameter in module._parameters.values():
            keeper.keep(parameter)
        if keeper.random is None and drops_out(module):
            keeper.random = name_of_dropout(module)


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    keeper = getattr(_here, "keeper", None)
    if keeper is not None:
        keeper.optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                keeper.keep(parameter)
