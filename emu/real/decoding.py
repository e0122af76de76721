"""Makes a result again of what emu.real.results.encode took apart. It comes from elsewhere, so nothing of it is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from emu.spmd.errors import EmuError
from emu.spmd.layout import Layout, Only, Partial, Replicate, Shard
from emu.spmd.rank import Grads
from emu.spmd.slices import Slices

MOST_LEVELS = 100  # of lists in lists: what is deeper is no result, and would end the stack that reads it
SHOWN = 60  # characters of a value that a message quotes
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def decode(data: Any, tensors: Iterable[Tensor], path: str = "result") -> Any:
    """The value that `encode` took apart.

    Args:
        data: its structure, as JSON gives it.
        tensors: its tensors, in order; an iterator is left behind the last one that was used.
        path: what to call it in an error.

    Raises:
        EmuError: something that encode does not write; names its place.
    """
    return _Reader(iter(tensors)).value(data, path, 0)


class _Reader:
    def __init__(self, tensors: Iterator[Tensor]) -> None:
        self._tensors = tensors
        self._of: dict[str, Callable[[Any, str, int], Any]] = {
            "float": _float,
            "tensor": self._tensor,
            "meta": _meta,
            "list": self._list,
            "tuple": lambda inner, path, level: tuple(self._list(inner, path, level)),
            "dict": self._pairs,
            "grads": self._grads,
            "layout": self._layout,
            "shard": lambda inner, path, level: Shard(_whole(inner, path)),
            "slices": _slices,
            "only": lambda inner, path, level: Only(tuple(_whole(at, path, 0) for at in _list(inner, path))),
            "replicate": lambda inner, path, level: Replicate(),
            "partial": lambda inner, path, level: Partial(_text(inner, path)),
        }

    def value(self, data: Any, path: str, level: int) -> Any:
        if data is None or type(data) in (bool, int, str):
            return data
        if level > MOST_LEVELS:
            raise _wrong(f"{path[:SHOWN]}...", f"is nested more than {MOST_LEVELS} levels deep")
        if type(data) is not dict or len(data) != 1:
            raise _wrong(path, f"is {_shown(data)}, which is no value")
        ((kind, inner),) = data.items()
        if kind not in self._of:
            raise _wrong(path, f"is of unknown kind {_shown(kind)}")
        return self._of[kind](inner, path, level + 1)

    def _list(self, inner: Any, path: str, level: int) -> list[Any]:
        return [self.value(v, f"{path}[{i}]", level) for i, v in enumerate(_list(inner, path))]

    def _pairs(self, inner: Any, path: str, level: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for pair in _list(inner, path):
            if type(pair) is not list or len(pair) != 2:
                raise _wrong(path, f"has {_shown(pair)} where a key and its value should be")
            key = self.value(pair[0], f"a key of {path}", level)
            try:
                twice = key in made
            except TypeError:
                raise _wrong(path, f"has a key that is a {type(key).__name__}") from None
            if twice:
                raise _wrong(path, f"has the key {_shown(key)} twice")
            made[key] = self.value(pair[1], f"{path}[{_shown(key)}]", level)
        return made

    def _grads(self, inner: Any, path: str, level: int) -> Grads:
        if type(inner) is not list or len(inner) != 2:
            raise _wrong(path, "is no gradients with their layouts")
        values = self._pairs(inner[0], path, level)
        layouts = self._pairs(inner[1], f"{path}.layouts", level)
        for what, named, kind in ((path, values, Tensor), (f"{path}.layouts", layouts, Layout)):
            for name, value in named.items():
                if type(name) is not str or not isinstance(value, kind):
                    raise _wrong(what, f"has a {type(value).__name__} named {_shown(name)}, not a {kind.__name__}")
        return Grads(values, layouts)

    def _layout(self, inner: Any, path: str, level: int) -> Layout:
        placements = self._pairs(inner, path, level)
        for axis, placement in placements.items():
            if type(axis) is not str or not isinstance(placement, (Shard, Slices, Replicate, Partial, Only)):
                raise _wrong(path, f"places axis {_shown(axis)} by a {type(placement).__name__}")
        return Layout(placements)

    def _tensor(self, inner: Any, path: str, level: int) -> Tensor:
        dtype, shape = _dtype_and_shape(inner, path)
        tensor = next(self._tensors, None)
        if tensor is None:
            raise _wrong(path, "is a tensor, of which the values are missing")
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            said, found = f"{dtype}{shape}", f"{tensor.dtype}{list(tensor.shape)}"
            raise _wrong(path, f"is said to be a {said[:SHOWN]}, but its values are a {found[:SHOWN]}")
        return tensor


def _float(inner: Any, path: str, level: int) -> float:
    try:
        return float.fromhex(_text(inner, path))
    except (ValueError, OverflowError):
        raise _wrong(path, f"is {_shown(inner)}, which is no number") from None


def _meta(inner: Any, path: str, level: int) -> Tensor:
    dtype, shape = _dtype_and_shape(inner, path)
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError):
        raise _wrong(path, f"has the shape {str(shape)[:SHOWN]}, which no tensor has") from None


def _slices(inner: Any, path: str, level: int) -> Slices:
    if type(inner) is not list or len(inner) != 2 or not _is_ranges(inner[1]):
        raise _wrong(path, f"is {_shown(inner)}, which are no slices")
    return Slices(_whole(inner[0], path), inner[1])


def _is_ranges(said: Any) -> bool:
    pairs = (
        [pair for some in said for pair in some] if type(said) is list and all(type(s) is list for s in said) else None
    )
    return pairs is not None and all(
        type(pair) is list and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs
    )


def _dtype_and_shape(inner: Any, path: str) -> tuple[torch.dtype, list[int]]:
    if type(inner) is not list or len(inner) != 2:
        raise _wrong(path, f"is {_shown(inner)}, not a tensor's dtype and shape")
    dtype = DTYPES.get(_text(inner[0], path))
    if dtype is None:
        raise _wrong(path, f"has the dtype {_shown(inner[0])}, which there is not")
    return dtype, [_whole(n, path, 0) for n in _list(inner[1], path)]


def _list(said: Any, path: str) -> list[Any]:
    if type(said) is not list:
        raise _wrong(path, f"holds {_shown(said)}, not a list")
    return said


def _text(said: Any, path: str) -> str:
    if type(said) is not str:
        raise _wrong(path, f"holds {_shown(said)}, not a text")
    return said


def _whole(said: Any, path: str, least: int = -(1 << 63)) -> int:
    if type(said) is not int or not least <= said < 1 << 63:
        raise _wrong(path, f"holds {_shown(said)}, not a whole number{' from 0' if not least else ''}")
    return said


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    return ascii(value)[:SHOWN]


def _wrong(path: str, problem: str) -> EmuError:
    return EmuError(f"{path} {problem}", "run the same emu on every rank, and save the run again")
