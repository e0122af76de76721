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


NORMS = ("native_layer_norm", "native_batch_norm")


def statistics_as_on_cpu(out: Any, inputs: Any) -> Any:
    """A norm's results with mean and deviation in the dtype that a virtual run, on the CPU, keeps them in.

    In 16 bits that is the scale's dtype (the input's, where it has none); torch's shapes follow other devices instead.

    Args:
        out: what the operator returned: result, mean, deviation.
        inputs: its tensors: the input first, then the scale, if there is one.
    """
    dtype = inputs[min(1, len(inputs) - 1)].dtype
    result, *statistics = out
    return (result, *(torch.empty_like(t, dtype=dtype) for t in statistics))
