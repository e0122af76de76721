"""What surrounds a forward: random numbers, autocast, and what modules remember. A second forward must find the same of the
first two, and leave no trace in any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


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
def as_it_was(autocast: tuple[tuple[Autocast, ...], bool]) -> Iterator[None]:
    """Within it autocast does what it did; random numbers go on afterwards as if nothing had been drawn."""
    before = RandomState.now()
    try:
        with ExitStack() as stack:
            each, cache = autocast
            for one in each:
                stack.enter_context(torch.autocast(one.device, one.dtype, one.on, cache))
            yield
    finally:
        before.set()


def counted(module: nn.Module) -> list[tuple[nn.Module, list[int]]]:
    """The parts of a module that have buffers, and how often each of these was written."""
    return [
        (part, [b._version for b in part._buffers.values() if b is not None])
        for part in module.modules()
        if part._buffers
    ]


def written(before: list[tuple[nn.Module, list[int]]]) -> list[nn.Module]:
    """The parts whose buffers were written since, as batch norms' statistics are."""
    return [
        part for part, versions in before if versions != [b._version for b in part._buffers.values() if b is not None]
    ]


@contextmanager
def unremembered(module: nn.Module, writes: list[nn.Module]) -> Iterator[None]:
    """Within it a module may be called; afterwards its parts remember what they did before.

    Args:
        writes: the parts that write into their buffers in place.
    """
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    buffers = [(part._buffers, dict(part._buffers)) for part in module.modules() if part._buffers]
    for part in writes:
        with torch.no_grad():
            part._buffers.update({name: None if b is None else b.clone() for name, b in part._buffers.items()})
    try:
        yield
    finally:
        for now, was in (*attributes, *buffers):
            now.clear()
            now.update(was)
