"""What a program calls its tensors: parameters by their paths from the outermost module, the rest by its variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emu.spmd import Group, Rank

DEEP = 3  # how far lists, dicts and objects are looked into


class Names:
    """Names for tensors; the first name that one gets is its name.

    Attributes:
        found: name -> tensor.

    Args:
        scopes: functions of the program with their variables, the innermost first.
        paths: modules that have a name, and that name.
    """

    def __init__(self, scopes: Sequence[tuple[str, Mapping[str, Any]]], paths: Mapping[nn.Module, str]) -> None:
        self.found: dict[str, Tensor] = {}
        self._known: dict[int, str] = {}  # id of a tensor -> its name
        modules = dict(paths)
        for _, variables in scopes:
            for value in variables.values():
                for root in _modules_in(value):
                    modules.update((part, paths.get(part, "")) for part in root.modules())
        inner = {id(child) for module in modules for child in module.children()}
        for module, path in sorted(modules.items(), key=lambda item: item[1]):
            if id(module) not in inner:  # a block by itself would have a shorter name than within its model
                self._module(path, module)
        for function, variables in scopes:
            for name, value in variables.items():
                self._value(name, value, function)

    def _add(self, name: str, t: Tensor, owner: str = "") -> None:
        if id(t) in self._known:
            return
        if name in self.found and owner:
            name = f"{owner}.{name}"
        unique, n = name, 2
        while unique in self.found:
            unique, n = f"{name} ({n})", n + 1
        self.found[unique], self._known[id(t)] = t, unique
        with torch._C.DisableTorchFunctionSubclass():
            grad = t.grad if t.is_leaf and t.requires_grad else None
        if grad is not None:
            self._add(f"{unique}.grad", grad)

    def _module(self, path: str, module: nn.Module) -> None:
        for below, part in module.named_modules(prefix=path):
            for name, t in (*part._parameters.items(), *part._buffers.items()):
                if t is not None:
                    self._add(".".join(filter(None, (below, name))), t)

    def _value(self, name: str, value: Any, owner: str, depth: int = 0) -> None:
        if isinstance(value, Tensor):
            self._add(name, value, owner)
        elif isinstance(value, torch.optim.Optimizer):
            for p, state in list(value.state.items()):
                of = self._known.get(id(p), "a parameter")
                for key, t in state.items():
                    self._value(f"{of}.{key}", t, owner, depth + 1)
        elif depth < DEEP:
            for key, part in _parts(value):
                self._value(f"{name}{key}", part, owner, depth + 1)


def _modules_in(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    """Modules, and those in lists, dicts and objects."""
    if isinstance(value, nn.Module):
        yield value
    elif depth < DEEP and not isinstance(value, (Tensor, torch.optim.Optimizer)):
        for _, part in _parts(value):
            yield from _modules_in(part, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a list, a dict, or an object: as Python writes it."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield f"[{'a tensor' if isinstance(key, Tensor) else repr(key)}]", part
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(list(value)))
    elif not isinstance(value, (Rank, Group, type, nn.Module)):
        made = getattr(value, "__dict__", None)
        if isinstance(made, dict) and not callable(value):
            yield from ((f".{key}", part) for key, part in list(made.items()) if not key.startswith("_"))
