"""A value that another stage computes. It has a shape, and no numbers.

Every stage runs the plain model's own forward from the start. What modules of earlier stages would return is elsewhere,
and so is what code between modules makes of it, at no cost. What depends on the batch alone (masks, rotations) is
computed as it is. So one sees what a stage lacks: just what the stage before must send. Once that is here, what stood for it
becomes it: x + layer(x) goes on with what was received.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor

from emu.spmd import EmuError


class Elsewhere(Tensor):
    """A tensor without numbers; operations on it give more of the kind. Made by `elsewhere`."""

    _where: torch.device
    _whose: str
    _received: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = here(args), here(kwargs or {})
        one = next((t for t in _tensors((args, kwargs)) if isinstance(t, Elsewhere)), None)
        if one is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__" and func == _DEVICE:
            return one._where
        if name in _READ:
            raise EmuError(
                f"{name} reads numbers of {one._whose}, which another stage computes",
                "keep what depends on a layer's output inside a module, so that it belongs to that layer's stage",
            )
        written = args[0] if args and name.endswith("_") and not name.endswith("__") else kwargs.get("out")
        if name == "__setitem__":
            written = args[0]
        if isinstance(written, Tensor) and not isinstance(written, Elsewhere):
            raise EmuError(
                f"{name} writes {one._whose}, which another stage computes, into a tensor of this stage",
                "keep code that writes into tensors inside a module, so that it belongs to one stage",
            )
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch(), torch.no_grad():
            key = func, torch.get_default_dtype(), _known(args), _known(kwargs)
            try:
                like = _likes.get(key)
            except TypeError:  # something that cannot be looked up
                return _marked(func(*_on_meta(args), **_on_meta(kwargs)), one)
            if like is not None:
                return _marked(torch.empty_strided(*like[:2], dtype=like[2], device="meta"), one)
            first = "torch._dynamo" not in sys.modules
            out = func(*_on_meta(args), **_on_meta(kwargs))
            if first and "torch._dynamo" in sys.modules:
                # Imported by torch, it leaves this call's frames in a cycle, which would hold on to the program's tensors: a
                # first run would free them later than others.
                gc.collect()
            if type(out) is Tensor:
                if len(_likes) >= MOST:
                    _likes.clear()
                _likes[key] = out.shape, out.stride(), out.dtype
        return _marked(out, one)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"Elsewhere({list(self.shape)} {self.dtype}, {self._whose})"


# What a call gave, by what it was given: torch takes a millisecond to think of a shape, once a microbatch and operation.
_likes: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
MOST = 4096

_DEVICE: Any = vars(torch._C.TensorBase)["device"].__get__
_READ = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero"})


def elsewhere(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device, whose: str) -> Elsewhere:
    """Such a value.

    Args:
        shape, dtype, device: as the value has them where it is.
        whose: what it is, in words: "the output of blocks.0".
    """
    with torch._C._DisableTorchDispatch():
        out: Any = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Elsewhere)
    out._where, out._whose = device, whose
    return out


def becomes(value: Any, received: Tensor) -> Tensor:
    """What stood for a value is that value from now on. Returns it."""
    if isinstance(value, Elsewhere):
        value._received = received
    return received


def here(value: Any) -> Any:
    """The same, nested, with what was received in place of what stood for it."""
    if isinstance(value, Elsewhere):
        return value if value._received is None else value._received
    if type(value) in (list, tuple):
        return type(value)(here(v) for v in value)
    if type(value) is dict:
        return {k: here(v) for k, v in value.items()}
    return value


def _on_meta(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.as_subclass(Tensor)
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {k: torch.device("meta") if k == "device" else _on_meta(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_meta(v) for v in value)
    return value


def _known(value: Any) -> Any:
    """What the shape of a result depends on; equal for equal ones."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((k, _known(v)) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value), tuple(map(_known, value))
    return type(value), value


def _marked(value: Any, like: Elsewhere) -> Any:
    if isinstance(value, Tensor):
        out: Any = value.as_subclass(Elsewhere)
        out._where, out._whose = like._where, like._whose
        return out
    if isinstance(value, (list, tuple)):
        parts = [_marked(v, like) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
