"""The first argument of a module's call, however it is passed: it brings the activations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from emu.spmd import EmuError


def first_of(module: nn.Module) -> str:
    """The name of the first parameter of a module's forward."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def with_first(
    where: str, first: str, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with the first one changed.

    Args:
        where: the module, for an error.
        first: what its first parameter is called.

    Raises:
        EmuError: it was not passed.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if first not in kwargs:
        raise EmuError(f"{where} was called without its first argument {first!r}", "pass it: it brings the activations")
    return args, {**kwargs, first: change(kwargs[first])}
