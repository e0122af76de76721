"""The tensors that a rank holds while it stands still, by the names that its program has for them.

Nobody keeps a list of live tensors, and none is kept here: they are found through the modules that were named, and through
the variables of the program's own functions. What autograd alone holds has no name; memory by category counts it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emu.spmd import Layout
from emu.stepping.names import Names
from emu.stepping.ops import described
from emu.virtual.hbm import Block
from emu.virtual.kernel import name_of
from emu.virtual.lines import is_emus, user_frame

if TYPE_CHECKING:
    from emu.stepping.execution import Execution
    from emu.virtual.device import VirtualDevice

_FAST_LOCALS = 1  # CO_OPTIMIZED: the variables of a function, not a module's


@dataclass(frozen=True)
class Held:
    """A tensor that a rank holds.

    Attributes:
        name: what the program calls it: "layers.0.w", "layers.0.w.grad", "x", "optimizer state of w: exp_avg".
        shape, dtype, bytes: of it; views share memory, which is counted once in `RankMoment.hbm`. Of a parameter whose memory
            is freed, because it is in shards and its unit does not compute just now, the bytes are 0.
        category: of its memory; "host" if it is none of the device's.
        layout: how it relates to the whole, where the program's wrappers say so.
        requires_grad: whether it learns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    category: str
    layout: str
    requires_grad: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "shape": list(self.shape)}

    def __str__(self) -> str:
        layout = f" {self.layout}" if self.layout else ""
        gone = ", in shards and not whole now" if self.shape and not self.bytes and 0 not in self.shape else ""
        return f"{self.name}: {self.dtype}{list(self.shape)} {self.category}{layout}{gone}"


def held(execution: Execution, rank: int) -> dict[str, tuple[Held, Tensor]]:
    """What a rank that stands still holds, by name; tensors themselves, so the caller drops them before it goes on."""
    device = execution.devices.get(rank)
    if device is None or execution.scheduler.threads[rank].done:  # what is left of an ended one waits to be collected
        return {}
    frames = frames_of(execution, rank)
    scopes = [(frame.f_code.co_name, _variables(frame)) for frame in frames]
    paths = dict(device.tracker.names._paths.items()) if device.tracker is not None else {}
    names = Names(scopes, paths)
    layouts: dict[str, Layout] = {}
    for _, variables in scopes:
        for value in variables.values():
            layouts.update(_layouts(value))
    with torch._C.DisableTorchFunctionSubclass():  # an absent parameter refuses every use
        return {name: (about, t) for name, t in names.found.items() if (about := _about(device, name, t, layouts))}


def _about(device: VirtualDevice, name: str, t: Tensor, layouts: Mapping[str, Layout]) -> Held | None:
    """What to say of a tensor; None of one that is not this rank's."""
    if t.layout is not torch.strided:
        return None
    block = getattr(t.untyped_storage(), "_emu", None)
    if block is not None and block.ledger is not device.ledger:
        return None  # another rank's, through a closure
    gone = is_freed(t)
    category = block.category if type(block) is Block else "temporary" if block is not None else "host"
    if gone and isinstance(t, nn.Parameter):
        category = "parameters"
    size = 0 if gone else t.nbytes
    layout = layout_text(layouts.get(name.removesuffix(".grad")))
    return Held(name, shape_of(t), name_of(t.dtype), size, category, layout, t.requires_grad)


def is_freed(t: Tensor) -> bool:
    """Whether its memory is given back, though somebody still has it: a parameter in shards, outside of its unit."""
    return 0 not in shape_of(t) and not t.is_meta and not t.untyped_storage().nbytes()


def shape_of(t: Tensor) -> tuple[int, ...]:
    """Its shape; of a parameter in shards, that of the whole."""
    return tuple(getattr(t, "_emu_shape", None) or t.shape)


def copied(t: Tensor) -> Tensor | None:
    """The values of a tensor, apart from it; None where its memory is freed."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # an absent parameter refuses every use
        return None if is_freed(t) else t.detach().clone()


def frames_of(execution: Execution, rank: int) -> list[FrameType]:
    """The functions of the program that a rank is in, the innermost first."""
    if execution.failed_rank == rank and execution.failure is not None:
        trace, raised = execution.failure.__traceback__, []
        while trace is not None:
            raised.append(trace.tb_frame)
            trace = trace.tb_next
        return [frame for frame in reversed(raised) if _is_users(frame)]
    worker = execution.scheduler.threads[rank].worker
    frame = sys._current_frames().get(worker.ident or 0) if worker is not None else None
    found = []
    while frame is not None:
        if _is_users(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def _is_users(frame: FrameType) -> bool:
    return user_frame(start=frame) is frame and not is_emus(frame.f_code.co_filename)


def _variables(frame: FrameType) -> dict[str, Any]:
    """A function's variables. Python before 3.13 keeps the dict that it makes of them, and all in it alive: it is emptied."""
    made = frame.f_locals
    variables = dict(made)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & _FAST_LOCALS:
        made.clear()
    return variables


def _layouts(value: Any) -> Mapping[str, Layout]:
    """What a wrapper of the program knows of layouts: a Sharding, Grads, or what has one of them."""
    for owner in (value, getattr(value, "__dict__", {}).get("sharding")):
        layouts = getattr(owner, "layouts", None) if owner is not None and not isinstance(owner, type) else None
        if isinstance(layouts, Mapping):
            return {name: layout for name, layout in layouts.items() if isinstance(layout, Layout)}
    return {}


def layout_text(layout: Layout | None) -> str:
    """ "tp: Shard(dim=0)"; "" where it is not known."""
    if layout is None:
        return ""
    return ", ".join(f"{axis}: {placement}" for axis, placement in layout.placements.items()) or "Replicate()"


def shown(t: Tensor) -> str:
    """A tensor for people: what it is, and its numbers if they are few."""
    text = described(t.dtype, t.shape)
    return text if t.is_meta else f"{text}\n{t}"
