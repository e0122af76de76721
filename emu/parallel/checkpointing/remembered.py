"""What modules remember from call to call: buffers, tensors and numbers among their attributes, generators of their own.

A layer that is computed again must find there what its first call found, though it, or others, wrote there since: spectral
norms and running averages read what they write. Afterwards everything is to be what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.checkpointing.keeping import Kept, in_place
from emu.spmd import EmuError

_NOTHING: Any = object()
_PLAIN = (int, float, str, tuple, type(None))


class _Seen(NamedTuple):
    """A tensor that the module could write into, its version, and its values then."""

    tensor: Tensor
    version: int
    values: Tensor


class _Change(NamedTuple):
    """An entry of a dict that a call changed: what it was."""

    place: dict[str, Any]
    name: str
    was: Any  # a Tensor: values to copy


class _Buffer(NamedTuple):
    """A buffer that a call left as it was."""

    place: dict[str, Any]
    name: str
    tensor: Tensor
    version: int


class Before:
    """What a module remembers right before a call.

    Args:
        module: which is about to be called.
        where: its name, for errors.
    """

    def __init__(self, module: nn.Module, where: str) -> None:
        self._module, self._where = module, where
        self._places = _places(module)
        self._seen: dict[int, _Seen] = {}
        self._random: list[tuple[torch.Generator, Tensor]] = []
        for _, was in self._places:
            for value in was.values():
                if isinstance(value, Tensor) and not value.requires_grad and id(value) not in self._seen:
                    self._seen[id(value)] = _Seen(value, value._version, _copy(value))
                elif isinstance(value, torch.Generator):
                    self._random.append((value, value.get_state()))

    def after(self) -> Memory:
        """What of it the call changed. Copies of all else go: a call that changes nothing keeps nothing."""
        copies: dict[int, Tensor] = {}
        changes: list[_Change] = []
        buffers: list[_Buffer] = []
        for now, was in self._places:
            # Norms write their statistics unseen, next to a buffer that counts: buffers of one part go together.
            together = "_buffers" not in was and any(self._written(now.get(name), b) for name, b in was.items())
            for name in {**was, **now}:
                old, seen = was.get(name, _NOTHING), self._seen.get(id(was.get(name)))
                same = now.get(name, _NOTHING) is old
                if seen is not None and (together or self._written(now.get(name), old)):
                    if id(old) not in copies:
                        with torch.no_grad():
                            copies[id(old)] = seen.values.clone()  # as part of the program, whose memory it takes
                    changes.append(_Change(now, name, copies[id(old)]))
                elif seen is not None:
                    if "_buffers" not in was:
                        buffers.append(_Buffer(now, name, old, seen.version))
                elif not same and (old is _NOTHING or isinstance(old, (Tensor, *_PLAIN))):
                    changes.append(_Change(now, name, _kept(old, f"{name} of {self._where}")))
        random = [(g, state) for g, state in self._random if not torch.equal(g.get_state(), state)]
        return Memory(self._module, self._where, changes, buffers, random)

    def _written(self, now: Any, was: Any) -> bool:
        """Whether the call wrote into a tensor, or put another in its place."""
        if now is not was:
            return True
        seen = self._seen.get(id(was))
        if seen is None or seen.tensor._version != seen.version:
            return seen is not None
        if seen.values.device.type != "cpu":
            return False
        with torch._C._DisableTorchDispatch():  # instance norms do not count at all
            return not torch.equal(seen.values, seen.tensor)


class Memory:
    """What one call of a module found there and changed, or found and left. Made by Before.after()."""

    def __init__(
        self,
        module: nn.Module,
        where: str,
        changes: list[_Change],
        buffers: list[_Buffer],
        random: list[tuple[torch.Generator, Tensor]],
    ) -> None:
        self._module, self._where = module, where
        self._changes, self._buffers, self._random = changes, buffers, random

    @contextmanager
    def back(self) -> Iterator[None]:
        """Within it the module finds what that call found; afterwards it remembers what it did before.

        Raises:
            EmuError: a buffer that the call only read was written since.
        """
        for one in self._buffers:
            if one.tensor._version != one.version:
                raise EmuError(
                    f"buffer {one.name} of {self._where} changed between its forward and its backward: computed again it "
                    "would be another",
                    "write into buffers after backward, or compute the loss again",
                )
        places = _places(self._module)
        random = [(generator, generator.get_state()) for generator, _ in self._random]
        copies: dict[int, Tensor] = {}
        for one in self._buffers:
            one.place[one.name] = one.tensor
        for place, name, was in self._changes:
            if was is _NOTHING:
                place.pop(name, None)
            else:
                place[name] = _fresh(was, copies)
        for generator, state in self._random:
            generator.set_state(state)
        try:
            yield
        finally:
            for now, was in places:
                now.clear()
                now.update(was)
            for generator, state in random:
                generator.set_state(state)


def _places(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The dicts in which its parts remember, and what these hold now."""
    return [
        (place, dict(place)) for part in module.modules() for place in (vars(part), part._buffers) if place is not None
    ]


def _copy(x: Tensor) -> Tensor:
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # no part of the program, until it turns out to be needed
        copy = x.clone()
    vars(copy).update(vars(x))  # whatever hangs on the tensor: the exact tier's marks
    return copy


def _kept(old: Any, where: str) -> Any:
    """What was replaced, without the graph that it may have."""
    if isinstance(old, Tensor):
        return Kept(old, in_place, where)
    return tuple(_kept(v, where) for v in old) if type(old) is tuple else old


def _fresh(was: Any, copies: dict[int, Tensor]) -> Any:
    """A value to compute with, into which the layer may write: it may be computed once more."""
    if isinstance(was, Kept):
        return was.again()
    if type(was) is tuple:
        return tuple(_fresh(v, copies) for v in was)
    if isinstance(was, Tensor):
        if id(was) not in copies:
            with torch.no_grad():
                copies[id(was)] = was.clone()
        return copies[id(was)]
    return was
