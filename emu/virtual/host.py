"""The host's memory as a virtual device sees it: blocks that its tensors were copied into, apart from its own memory.

A block lives from the copy into it until nobody holds it any more, in program order, as the device's blocks do. The host
may give pinned memory out again as soon as copies that read it are done, which its allocator makes sure of; so a block
that dies is no fault, whatever is still under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emu.trace.events import HostCopy, HostFree
from emu.virtual.hbm import Block
from emu.virtual.streams import check_use

if TYPE_CHECKING:
    from emu.virtual.device import VirtualDevice


class HostBlock:
    """Host memory with the values of one tensor, and what of the device's memory they came from."""

    def __init__(self, device: VirtualDevice, number: int, values: Tensor, category: str, scope: str) -> None:
        self.number, self.values, self.category, self.scope = number, values, category, scope
        self._device = device

    def __del__(self) -> None:
        device = self._device
        if not device.ledger.closed:
            device.events.append(HostFree(self.number, self.values.nbytes))


def copy_to_host(device: VirtualDevice, x: Tensor, number: int, name: str) -> HostBlock:
    """Copies a tensor on the current stream; the values are there at once, races are told as of any other stream."""
    what = f"to_host{' of ' + name if name else ''}"
    block = _used(device, x, False, what)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        values = torch.empty_like(x).copy_(x)
    _record(device, "to_host", number, values, name)
    return HostBlock(device, number, values, *(("activations", "") if block is None else (block.category, block.scope)))


def device_memory(device: VirtualDevice, memory: HostBlock) -> Tensor:
    """New memory of the current stream, of the category and the place that the tensor had which was copied."""
    tracker, values = device.tracker, memory.values
    if tracker is None:
        return torch.empty_like(values)
    before, tracker.category = tracker.category, memory.category
    try:
        x = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)
    finally:
        tracker.category = before
    block = getattr(x.untyped_storage(), "_emu", None)
    if type(block) is Block:
        device.ledger.recategorise(block, memory.category, memory.scope)
    return x


def copy_from_host(device: VirtualDevice, memory: HostBlock, x: Tensor, name: str) -> None:
    """Copies host memory into a tensor, on the current stream."""
    _used(device, x, True, f"from_host{' of ' + name if name else ''}")
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        x.copy_(memory.values)
    _record(device, "from_host", memory.number, x, name)


def _record(device: VirtualDevice, kind: str, number: int, x: Tensor, name: str) -> None:
    dtype = str(x.dtype).removeprefix("torch.")
    device.events.append(HostCopy(kind, number, x.nbytes, dtype, device.stream_now.name, name))


def _used(device: VirtualDevice, x: Tensor, writes: bool, what: str) -> Block | None:
    """Notes the use of a tensor by the current stream, and raises on a race. Returns its block, if it has one."""
    stream, tracker = device.stream_now, device.tracker
    stream.tick += 1
    if tracker is None:
        return None
    block = getattr(x.untyped_storage(), "_emu", None)
    if type(block) is not Block or block.ledger is not device.ledger:
        block = tracker.foreign(x, writes, what) if x.numel() else None
    if block is not None:
        check_use(device, block, stream, x, writes, what, device.rendezvous.line_of())
    return block
