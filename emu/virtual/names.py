"""Which module an op belongs to, in forward and in backward, and what parameters are called.

Forward: a stack of module names, kept by torch's global module hooks. Backward: the autograd node under way carries
the sequence number it was given in forward, and the scopes in force at every number are remembered.
"""

from __future__ import annotations

import bisect
import weakref
from typing import Any

import torch
from torch import nn

_current_node = torch._C._current_autograd_node
_torch: Any = torch._C
_autograd = _torch._autograd


class Names:
    """The module scopes of one rank.

    Attributes:
        scope: of the module being called; "" outside of all.
        again: whether that module is called from within a backward: then it computes again what was not kept.
    """

    def __init__(self) -> None:
        self.scope = ""
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[str] = []
        self._again: list[bool] = []  # of the same modules: whether they are called within a backward
        self.again = False
        self._numbers: list[int] = [-1]  # sequence numbers at which the scope changed ...
        self._scopes: list[str] = [""]  # ... and to what
        self._node: Any = None
        self._node_scope = ""

    def watch(self, module: nn.Module, name: str = "") -> None:
        """Names a module's parts by their paths below it."""
        for path, part in module.named_modules():
            self._paths[part] = ".".join(filter(None, (name, path)))

    def enter(self, module: nn.Module) -> bool:
        """A module's forward begins. Returns whether nobody had named it yet; its parts are named below it then."""
        if unknown := module not in self._paths:
            self.watch(module)
        self._stack.append(self.scope)
        self._again.append(self.again)
        self.again = _current_node() is not None
        self._change(self._paths[module])
        return unknown

    def leave(self) -> None:
        if self._stack:
            self._change(self._stack.pop())
            self.again = self._again.pop()

    def _change(self, scope: str) -> None:
        self.scope = scope
        number = _autograd._get_sequence_nr()
        if self._numbers[-1] == number:
            self._scopes[-1] = scope
        elif self._numbers[-1] > number:  # a thread's numbers only grow; another graph's do not matter here
            return
        else:
            self._numbers.append(number)
            self._scopes.append(scope)

    def of_node(self, node: Any) -> str:
        """The scope in which a backward node was made."""
        if node is not self._node:
            self._node = node
            number = node._sequence_nr()
            # The scope changed *at* a number applies to nodes made with that number or later.
            self._node_scope = self._scopes[bisect.bisect_right(self._numbers, number) - 1]
        return self._node_scope

    def forget(self) -> None:
        """Backward is over: scopes of its graph are needed no more."""
        self._node = None
        if len(self._numbers) > 100_000:
            del self._numbers[1:-10_000], self._scopes[1:-10_000]
