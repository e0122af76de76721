"""Tensors that autograd saved, on their way to the host's memory and back: one journey for each storage.

Saved tensors are views of storages: queries, keys and values are often parts of one, and what a layer returns the next one
keeps, too. So storages travel, whole and once; a `Ticket` says which part of one a saved tensor is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emu.parallel.checkpointing.keeping import alias, counting
from emu.spmd import EmuError, HostCopy


class Luggage:
    """One storage. It lives as long as a ticket for it."""

    __slots__ = ("__weakref__", "_flat", "_own", "copy", "version")

    def __init__(self, x: Tensor) -> None:
        with torch._C._DisableTorchDispatch(), counting():
            self._flat: Tensor | None = x.detach().as_strided((_length(x),), (1,), 0)
        self._own = True  # whether _flat is what was saved, into which the program may still write
        self.copy: HostCopy | None = None
        self.version = 0  # of what was copied

    def send(self) -> Tensor:
        """What is to be copied to the host; `copy` is to be the copy."""
        flat, self._flat = self._flat, None
        assert flat is not None
        self.version = flat._version
        return flat

    @property
    def may_leave(self) -> bool:
        return self.copy is None and self._flat is not None and self._own

    def version_now(self, x: Tensor) -> int:
        """The version of the values that come back, if x is a view of the storage."""
        return x._version if self.copy is None and self._own else self.version

    def values(self, version: int, where: str) -> Tensor:
        """Its bytes on the device, as one dimension; the current stream waits for them.

        Args:
            version: of the tensor that was saved.
            where: whose it is, for the error.

        Raises:
            EmuError: the program wrote into it since.
        """
        if self._flat is None:
            assert self.copy is not None
            self._own = self.copy.here_all_along
            self._flat, self.copy = self.copy.back(), None
        if version != (self._flat._version if self._own else self.version):
            raise overwritten(where)
        return self._flat


class Ticket:
    """In the place of one saved tensor. It dies with the graph that saved it."""

    __slots__ = ("_dtype", "_look", "_marks", "_version", "luggage", "opened", "where")

    def __init__(self, x: Tensor, luggage: Luggage, where: str, opened: Callable[[], None]) -> None:
        self.luggage, self.where, self.opened = luggage, where, opened
        self._look, self._dtype, self._version = (x.shape, x.stride(), x.storage_offset()), x.dtype, x._version
        self._marks = dict(vars(x))  # whatever hangs on the tensor: the exact tier's marks

    def tensor(self) -> Tensor:
        flat = self.luggage.values(self._version, self.where)
        with torch._C._DisableTorchDispatch():
            x = (flat if flat.dtype == self._dtype else flat.view(self._dtype)).as_strided(*self._look)
        vars(x).update(self._marks)
        return x


class Seat:
    """In the place of a saved tensor that does not travel."""

    __slots__ = ("_tensor", "_version", "opened", "where")

    def __init__(self, x: Tensor, where: str, opened: Callable[[], None]) -> None:
        self.where, self.opened = where, opened
        self._tensor = x if x.grad_fn is None else alias(x)  # or its graph would keep itself alive
        self._version = x._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:  # which torch does not look at where there are hooks
            raise overwritten(self.where)
        return self._tensor


class Registry:
    """Which storages have luggage already."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, weakref.ref[Luggage]] = weakref.WeakKeyDictionary()

    def luggage(self, x: Tensor) -> tuple[Luggage, bool]:
        """That of a tensor's storage, and whether it is new."""
        storage = x.untyped_storage()
        known = self._of.get(storage)
        luggage = None if known is None else known()
        if luggage is not None and luggage.version_now(x) == x._version:
            return luggage, False
        luggage = Luggage(x)
        self._of[storage] = weakref.ref(luggage)
        return luggage, True


def travels(x: Tensor) -> bool:
    """Whether a tensor's bytes say all of it."""
    plain = type(x) is Tensor and x.layout is torch.strided and not x.is_conj() and not x.is_neg()
    return plain and x.numel() > 0 and x.untyped_storage().nbytes() % x.element_size() == 0


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def overwritten(where: str) -> EmuError:
    return EmuError(
        f"a tensor that the backward of {where} needs was overwritten in place since its forward",
        "write elsewhere (x = x + y, not x += y; inplace=False); step the optimizer after backward",
    )


def _length(x: Tensor) -> int:
    return x.untyped_storage().nbytes() // x.element_size()
