"""Shape runs: the same program on tensors that have shapes and no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emu.spmd.errors import DataDependent
from emu.trace.ops import Op, aten
from emu.virtual.lines import user_line

META = torch.device("meta")


def without_values(func: Any, op: Op, args: Any, kwargs: Any, rank: int, stepping: bool) -> tuple[Any, Any]:
    """Moves an op onto shapes: host data loses its values, factories make none, generators draw nothing.

    Single host numbers keep their values: a number written into an op is one, and so is an optimizer's count of its
    steps. A number made by torch.tensor(...) in the program stands for one on the device, and has no value.

    Raises:
        DataDependent: the op asks for a value.
    """
    if op.host_reads and any(isinstance(a, Tensor) and a.is_meta for a in args):
        raise DataDependent(
            f"rank {rank}: {op.name} at {user_line()} asks for a value, and a shape run has none",
            "decide from shapes, or run this program with backend='virtual'",
            rank=rank,
        )
    lifts = func.overloadpacket is aten.lift_fresh and not stepping

    def shape(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x if x.is_meta or not (x.dim() or lifts) else x.to(META)
        if type(x) in (list, tuple):
            return type(x)(shape(y) for y in x)
        return x

    kwargs = dict(kwargs or {})
    makes = "device" in kwargs or not any(isinstance(a, (Tensor, list, tuple)) for a in args)
    if makes and any(a.name == "device" for a in func._schema.arguments):
        kwargs["device"] = META
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    return tuple(shape(a) for a in args), {k: shape(v) for k, v in kwargs.items()}


def only_moves(op: Op, args: Any, kwargs: Any) -> bool:
    """Whether an op does nothing but move host data to the device, where a virtual run's host data already is."""
    if op.name != "_to_copy" or args[0].is_meta:
        return False
    dtype = (kwargs or {}).get("dtype")
    return dtype is None or dtype == args[0].dtype
