"""What one call of a layer would have saved for backward: empty places, filled when the layer is computed again.

Built on torch's hooks for saved tensors, as torch.utils.checkpoint(use_reentrant=False) is: autograd's graph is that of the
first forward, so gradients are added up in its order, to the last bit. A frame is of one layer's call, whereas what is
computed again may be many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from emu.spmd import EmuError


class Holder:
    """In the place of one saved tensor. It dies with the graph that saved it."""

    __slots__ = ("__weakref__", "frame", "value", "version")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None
        self.version = 0


class _Look(NamedTuple):
    """What a tensor that is saved looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Frame:
    """The tensors that one call saves.

    Args:
        where: the layer, for errors.
        compute: fills this frame, and others, by computing again.
    """

    def __init__(self, where: str, compute: Callable[[], None]) -> None:
        self.where, self.compute = where, compute
        self._holders: list[weakref.ref[Holder]] = []
        self._looks: list[_Look] = []
        self._at = 0

    def empty(self) -> saved_tensors_hooks:
        """Within it, places are saved, and no tensors."""

        def pack(x: Tensor) -> Holder:
            holder = Holder(self)
            self._holders.append(weakref.ref(holder))
            self._looks.append(_Look(x.shape, x.dtype, x.device))
            return holder

        return saved_tensors_hooks(pack, _unpack)

    def filled(self) -> saved_tensors_hooks:
        """Within it, what is saved goes to the places of the first time."""
        self._at = 0

        def pack(x: Tensor) -> Tensor:
            i, self._at = self._at, self._at + 1
            if i >= len(self._holders):
                raise self._differs(f"it saves more than the {len(self._holders)} tensors of the first time")
            if (look := _Look(x.shape, x.dtype, x.device)) != self._looks[i]:
                raise self._differs(f"its tensor {i} is {_told(look)}, and was {_told(self._looks[i])}")
            if x.requires_grad:
                with torch._C._DisableTorchDispatch():
                    x = x.detach()
            if (holder := self._holders[i]()) is not None:
                holder.value, holder.version = x, x._version
            return x

        return saved_tensors_hooks(pack, _same)

    def check(self) -> None:
        """Raises an EmuError if the second time saved less than the first."""
        if self._at != len(self._holders):
            raise self._differs(f"it saves {self._at} tensors, and the first time saved {len(self._holders)}")

    def forget(self) -> None:
        """Backward is over: what it did not ask for goes."""
        for reference in self._holders:
            if (holder := reference()) is not None:
                holder.value = None

    def _differs(self, how: str) -> EmuError:
        return EmuError(
            f"{self.where} computes something else the second time: {how}",
            "let what a layer does depend on its arguments and torch's random numbers alone: no counters, no numbers of "
            "Python's or numpy's generators, no change of mode between forward and backward",
        )


def _told(look: _Look) -> str:
    return f"{tuple(look.shape)} {str(look.dtype).removeprefix('torch.')} on {look.device}"


def _unpack(holder: Holder) -> Tensor:
    if holder.value is None:
        holder.frame.compute()
    value: Any = holder.value
    if value is None:
        raise EmuError(f"{holder.frame.where}: a tensor of its forward was not computed again", "report this")
    if value._version != holder.version:
        raise EmuError(
            f"{holder.frame.where}: a tensor that its backward needs was overwritten in place by a later layer",
            "let layers write elsewhere (x = x + y, not x += y; inplace=False)",
        )
    return value


def _same(x: Tensor) -> Tensor:
    return x
