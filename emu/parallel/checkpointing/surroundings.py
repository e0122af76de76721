"""What surrounds a forward: random numbers and autocast. A second forward must find the same of both, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The states of the generators that a rank draws from: the CPU's, and the current GPU's where one is in use."""

    states: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        with torch._C._DisableTorchDispatch():
            return cls(tuple(generator.get_state() for generator in _generators()))

    def set(self) -> None:
        with torch._C._DisableTorchDispatch():
            for generator, state in zip(_generators(), self.states):
                generator.set_state(state)

    def same(self, other: RandomState) -> bool:
        with torch._C._DisableTorchDispatch():
            return len(self.states) == len(other.states) and all(map(torch.equal, self.states, other.states))


def _generators() -> list[torch.Generator]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
    return [torch.default_generator]


class Autocast(NamedTuple):
    """One device's autocast."""

    device: str
    on: bool
    dtype: torch.dtype


def autocasts(device: str) -> tuple[tuple[Autocast, ...], bool]:
    """What autocast does now on the CPU and on a kind of device, and whether it remembers casts."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device)) if torch.amp.is_autocast_available(kind)]
    each = (Autocast(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
    return tuple(each), torch.is_autocast_cache_enabled()


@contextmanager
def autocast_as(autocast: tuple[tuple[Autocast, ...], bool]) -> Iterator[None]:
    """Within it autocast does what it did."""
    with ExitStack() as stack:
        each, cache = autocast
        for one in each:
            stack.enter_context(torch.autocast(one.device, one.dtype, one.on, cache))
        yield


@contextmanager
def undrawn() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been drawn within."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.set()
