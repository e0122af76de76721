"""A second opinion on memory: torch's own allocator events, counted without any of emu's code.

torch's profiler reports every call of the CPU allocator (address, bytes, sign) on the thread that started it, in one
time line with markers that a dispatch mode of ours sets after every op. Replaying the line gives the bytes that are
alive at every op boundary.

Two things the allocator holds are not device memory: torch wraps a Python number (the 2 in `x * 2`) in a host tensor of
8 bytes for as long as the op runs, and the state of torch's random generator, saved while other ranks run, is a host
tensor. Both are made outside of any op, which the profiler's tree shows, and are left out by their sizes; programs under
test make no storages of those sizes outside of ops themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from emu.spmd.mesh import Mesh
from emu.virtual.launch import VirtualRun, run_virtual

HOST_BYTES = {8, torch.get_rng_state().nbytes}
STEP_BYTES = 4  # an optimizer counts its steps in tensors of one number, which torch keeps in the host's memory
MARK = "op boundary "


class Boundary(NamedTuple):
    """What each side says is alive after one op."""

    op: str
    by_category: dict[str, int]
    bytes: int  # the ledger's own total
    position: int  # how many events the rank's trace had
    allocated: int  # torch's


class Markers(TorchDispatchMode):
    """Sets a mark after every op, outside of the tracker, and notes what the ledger says there."""

    def __init__(self, ledger: Any, events: list) -> None:
        super().__init__()
        self.ledger, self.events = ledger, events
        self.seen: list[tuple[str, dict[str, int], int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.mark(str(func))

    def mark(self, what: str) -> None:
        with _RecordFunctionFast(f"{MARK}{len(self.seen)}"):
            pass
        self.seen.append((what, dict(self.ledger.by_category), self.ledger.bytes, len(self.events)))


def watched(program: Any, *, ranks: int = 1, watch: int = 0, **options: Any) -> tuple[list[Boundary], VirtualRun]:
    """Runs a program and returns what one of its ranks held at every op boundary, by both counts."""
    boundaries: list[Boundary] = []

    def inside(rank: Any) -> Any:
        if rank != watch:
            return program(rank)
        device = rank._device
        markers = Markers(device.ledger, device.events)
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with profiler:
            with markers:
                result = program(rank)
            markers.mark("the end")
        alive = _replay(profiler)
        boundaries.extend(Boundary(*seen, alive[i]) for i, seen in enumerate(markers.seen))
        return result

    run = run_virtual(inside, Mesh(dp=ranks), **options)
    return boundaries, run


def disagreements(boundaries: list[Boundary]) -> list[Boundary]:
    """Boundaries at which the sum of categories, the ledger's total and torch's allocator are not all equal."""
    return [b for b in boundaries if not sum(b.by_category.values()) == b.bytes == b.allocated]


def _replay(profiler: Any) -> dict[int, int]:
    line: list[tuple[int, bool, Any]] = []

    def walk(node: Any, in_op: bool, in_step: bool = False) -> None:
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            if not (in_step and fields.alloc_size == STEP_BYTES):
                line.append((node.start_time_ns, in_op, (fields.ptr, fields.alloc_size)))
        elif node.name.startswith(MARK):
            line.append((node.start_time_ns, in_op, int(node.name[len(MARK) :])))
        for child in node.children:
            walk(child, node.name.startswith("aten::"), in_step or node.name.startswith("Optimizer.step"))

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        walk(root, False)
    live: dict[int, int] = {}
    total, at = 0, {}
    for _, in_op, item in sorted(line, key=lambda entry: entry[0]):
        if isinstance(item, int):
            at[item] = total
            continue
        address, size = item
        if size < 0:
            total -= live.pop(address, 0)
        elif in_op or size not in HOST_BYTES:
            live[address] = size
            total += size
    return at
