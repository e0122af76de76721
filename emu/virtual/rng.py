"""What a process has one of and every rank needs its own: random generators (torch, random, numpy), the default dtype.

A hand-over between ranks exchanges all of it, so it is made cheap: numpy's generator is exchanged, not copied, and
Python's is copied as memory where its layout is the known one.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_python: Any = random._inst
_WORDS = 624  # of a Mersenne twister
_BYTES = 4 * (1 + _WORDS)
_ADDRESS = id(_python) + object.__basicsize__  # CPython: the object's head, the index, the words


def _layout_is_known() -> bool:
    if sys.implementation.name != "cpython" or object.__basicsize__ + _BYTES > type(_python).__basicsize__:
        return False
    *words, index = _python.getstate()[1]
    return ctypes.string_at(_ADDRESS, _BYTES) == b"".join(n.to_bytes(4, sys.byteorder) for n in (index, *words))


_AS_MEMORY = _layout_is_known()


class RandomState:
    """What they hold for one rank, or for the process outside of a launch.

    A fresh process seeds its generators from chance, so no two ranks of a real run draw alike; here every rank has a seed
    of its own instead, and the same one every time. A model that nobody seeds differs between ranks, as it would there.
    """

    __slots__ = ("_dtype", "_gauss", "_mark", "_numpy", "_python", "_torch", "_watched")

    def __init__(self, rank: int | None = None) -> None:
        self._torch = torch.default_generator.get_state() if rank is None else _seeded(rank)
        self._dtype = torch.get_default_dtype()
        self._python: Any = None if rank is None else random.Random(rank).getstate()
        self._numpy: Any = None if rank is None else _numpy_random().MT19937(rank)
        self._gauss: Any = None  # its whole state, if it holds the second half of a pair of normal values
        self._watched = _watched(self._numpy)
        self._mark: Any = None  # what was there when it was restored
        if rank is None:
            self.save()

    def save(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._dtype = torch.get_default_dtype()
        self._python = (ctypes.string_at(_ADDRESS, _BYTES), _python.gauss_next) if _AS_MEMORY else _python.getstate()
        numpy = _numpy_random()
        bits = numpy.get_bit_generator()
        if bits is self._numpy and self._gauss is None and self._mark == [word.value for word in self._watched] != []:
            return  # nothing was drawn since
        if bits is not self._numpy:
            self._numpy, self._watched = bits, _watched(bits)
        state = numpy.get_state(legacy=False)
        self._gauss = state if state["has_gauss"] else None

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        if len(self._python) == 2:
            words, _python.gauss_next = self._python
            ctypes.memmove(_ADDRESS, words, _BYTES)
        else:
            _python.setstate(self._python)
        numpy = _numpy_random()
        numpy.set_bit_generator(self._numpy)  # forgets a kept normal value
        if self._gauss is not None:
            numpy.set_state(self._gauss)
        self._mark = [word.value for word in self._watched]


def _seeded(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(1_000_003 * (rank + 1)).get_state()


def _numpy_random() -> Any:
    # numpy loads it on first use and seeds it from chance: it is loaded before any rank can.
    import numpy.random

    return numpy.random


def _watched(bits: Any) -> list[Any]:
    """Two words of a generator that tell together whether it was drawn from: none for kinds other than the default one."""
    if type(bits).__name__ != "MT19937":
        return []
    address = bits.ctypes.state_address
    return [ctypes.c_int32.from_address(address + 4 * _WORDS), ctypes.c_uint32.from_address(address)]
