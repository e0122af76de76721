"""Tensors that forward keeps so that layers can be computed again from them.

The one point through which they pass is a `Keep`: called with a tensor when it is kept, it returns a function without
arguments, called in backward, that gives the same values back. It may be called again where a graph is kept, and is dropped
when nothing needs the tensor any more. `in_place` is the plain one; whoever lets tensors travel in between (to the host's
memory) passes another: `checkpointed(model, "full", keep=...)`.

What a Keep gives back needs the shape, dtype, device and values of what it was given, and no gradient: that it had one is
remembered here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from emu.spmd import EmuError

Keep = Callable[[Tensor], Callable[[], Tensor]]


def in_place(x: Tensor) -> Callable[[], Tensor]:
    """Keeps x where it is. Within another checkpoint, or other hooks on saved tensors, x is kept as these will have it."""
    return _under(_hooks(), x)


def from_here(keep: Keep) -> Keep:
    """What a Keep does where this is called, for use within hooks that are yet to come."""
    return partial(_under, _hooks()) if keep is in_place else keep


class _InPlace:
    """Gives back what is still there."""

    def __init__(self, x: Tensor) -> None:
        self.alias = alias(x)

    def __call__(self) -> Tensor:
        return self.alias


class _Packed:
    """Gives back what other hooks made of it. Asked once in a backward: torch's own checkpoint answers no second time."""

    def __init__(self, hooks: Any, x: Tensor) -> None:
        pack, self._unpack = hooks
        with torch.no_grad():
            self._packed = pack(x)
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._unpack(self._packed)
            after_backward(self._forget)
        value = self._value
        assert value is not None
        return value

    def _forget(self) -> None:
        self._value = None


def after_backward(method: Callable[[], None]) -> None:
    """Calls a method when the backward under way is over, if there is one, and its object is still there."""
    if torch._C._current_graph_task_id() >= 0:
        alive = WeakMethod(method)

        def call() -> None:
            if (there := alive()) is not None:
                there()

        torch.autograd.Variable._execution_engine.queue_callback(call)


def _under(hooks: Any, x: Tensor) -> Callable[[], Tensor]:
    if hooks is None:
        return _InPlace(x)
    return _Packed(hooks, x)


def _hooks() -> Any:
    torchs: Any = torch._C  # whose types do not say all that it has
    return torchs._autograd._top_saved_tensors_default_hooks(True)


class Kept:
    """One tensor, kept.

    Args:
        x: the tensor.
        keep: how.
        where: what it is, for an error.
    """

    def __init__(self, x: Tensor, keep: Keep, where: str) -> None:
        self.where = where
        self.learns = x.requires_grad
        self._version = x._version
        self._handle = keep(x)
        # An alias counts writes with x; of what travels there is a copy, which no write can reach.
        self._stays = isinstance(self._handle, _InPlace)

    def again(self) -> Tensor:
        """The same values; a leaf, with a gradient if x had one.

        Raises:
            EmuError: they were overwritten since.
        """
        value = self._handle()
        if self._stays and value._version != self._version:
            raise overwritten(self.where)
        return alias(value).requires_grad_(self.learns)


def overwritten(where: str) -> EmuError:
    return EmuError(
        f"{where} was overwritten in place after it was kept to compute again from",
        "write elsewhere (x = x + y, not x += y; inplace=False), or leave that layer out of checkpointing",
    )


def alias(x: Tensor) -> Tensor:
    """The same values; writes into it are counted together with those into x."""
    with torch._C._DisableTorchDispatch(), counting():  # no part of the program
        return x.detach()


def counting() -> Any:
    """Within it views count writes with what they are views of, below autograd, too, where torch would count them apart."""
    torchs: Any = torch._C
    return torchs._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


class Arguments:
    """A call's arguments, kept: those that gradients flow into as a Keep has it, others as they are.

    Args:
        args, kwargs: of the call.
        keep: how.
        where: the module, for errors.
        but: the activations, whose place is filled in when it is called again.

    Raises:
        EmuError: an argument into which a layer could write unseen.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: Keep, where: str, but: Tensor) -> None:
        self.where = where
        self._memo: dict[int, Any] = {}
        self._but = id(but)
        self._keep = keep
        self._args = tuple(self._stowed(a) for a in args)
        self._kwargs = {name: self._stowed(a) for name, a in kwargs.items()}
        del self._memo, self._keep

    def _stowed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) == self._but:
                return _FIRST
            if id(value) not in self._memo:
                if value.requires_grad and not value.is_leaf:
                    self._memo[id(value)] = Kept(value, self._keep, f"an argument of {self.where}")
                else:
                    self._memo[id(value)] = _AsIs(value, f"an argument of {self.where}")
            return self._memo[id(value)]
        if type(value) in (list, dict, set, bytearray) or "Cache" in type(value).__name__:
            raise EmuError(
                f"{self.where} is given a {type(value).__name__}, into which it may write: computed again, it would write twice",
                "pass tensors or tuples; of a Hugging Face model, say use_cache=False",
            )
        if isinstance(value, tuple):
            parts = [self._stowed(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def again(self, first: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for another call; first stands where the activations stood."""
        memo: dict[int, Tensor] = {}
        return tuple(_fetched(a, first, memo) for a in self._args), {
            name: _fetched(a, first, memo) for name, a in self._kwargs.items()
        }


class _AsIs:
    """A tensor that is there anyway: a mask, a table, a parameter."""

    def __init__(self, value: Tensor, where: str) -> None:
        self.value, self.where, self.version = value, where, value._version

    def again(self) -> Tensor:
        if self.value._version != self.version:
            raise overwritten(self.where)
        return self.value


_FIRST: Any = object()


def _fetched(value: Any, first: Tensor, memo: dict[int, Tensor]) -> Any:
    if value is _FIRST:
        return first
    if isinstance(value, (Kept, _AsIs)):
        if id(value) not in memo:
            memo[id(value)] = value.again()
        return memo[id(value)]
    if isinstance(value, tuple):
        parts = [_fetched(v, first, memo) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
