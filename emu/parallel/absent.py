"""Parameters whose values are elsewhere: they say so when they are used, where an empty tensor might give a wrong number.

Between uses a fully sharded parameter holds no elements. An empty tensor broadcasts: a penalty over all parameters would
silently be 0. So a parameter that is away has another class, which costs nothing until somebody asks it to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from emu.spmd import EmuError

_VALUES = ("data", "T", "H", "mT", "mH", "real", "imag")  # properties that are the values; all others may be read
_HARMLESS = (
    "__hash__",
    "data_ptr",
    "element_size",
    "is_complex",
    "is_floating_point",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "untyped_storage",
)
_SHAPE: dict[str, Callable[..., Any]] = {  # what is known all the same
    "dim": lambda shape: len(shape),
    "ndimension": lambda shape: len(shape),
    "numel": lambda shape: math.prod(shape),
    "nelement": lambda shape: math.prod(shape),
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    "__len__": lambda shape: shape[0],
}


class Absent(nn.Parameter):
    """A parameter that is not whole on this rank just now."""

    _emu_name: str
    _emu_unit: str
    _emu_shape: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        p = next((a for a in args if isinstance(a, Absent)), None)
        if p is not None and p is args[0]:
            if name in ("__get__", "__set__", "__delete__"):
                what = getattr(func, "__self__", None)
                if (what := getattr(what, "__name__", "")) in ("shape", "ndim"):
                    return p._emu_shape if what == "shape" else len(p._emu_shape)
                if what not in _VALUES:
                    return super().__torch_function__(func, types, args, kwargs)
            elif name in _HARMLESS:
                return super().__torch_function__(func, types, args, kwargs)
            elif name in _SHAPE:
                return _SHAPE[name](p._emu_shape, *args[1:], **kwargs)
            elif name in ("__repr__", "__format__"):
                return f"Parameter({p._emu_name}, of shape {tuple(p._emu_shape)}, in shards)"
        if p is None:
            p = _found((args, kwargs))
        unit = f"unit {p._emu_unit!r}" if p._emu_unit else "the model"
        raise EmuError(
            f"{p._emu_name} is in shards and not whole now, but {name} uses it: it is gathered while {unit} computes",
            "use it inside that module's forward, read it within `with dist.gathered():`, or keep it whole everywhere "
            f"with replicated=[{p._emu_name!r}]; DataParallel's units= chooses what is gathered together",
        )


def name_absent(parameters: Sequence[nn.Parameter], names: Sequence[str], unit: str) -> None:
    """Tells parameters what to say of themselves when they are away."""
    for p, name in zip(parameters, names):
        told: Any = p
        told._emu_name, told._emu_unit, told._emu_shape = name, unit, p.shape


def _found(value: Any) -> Any:
    """The first parameter that is away, in nested arguments."""
    if isinstance(value, Absent):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for item in items if (found := _found(item)) is not None), None)
