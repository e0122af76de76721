"""Device memory as a snapshot of torch's, which torch.cuda._memory_viz and pytorch.org/memory_viz read.

What was allocated and freed, in order and in the bytes that were asked for, is the trace's. Where blocks lie is not in a
trace: each stream of a rank gets one segment, in which a block takes the smallest hole that fits. So segments tell
how much must fit, not what torch's allocator would reserve (that is `emu.trace.allocator`).

Source: torch, torch/cuda/_memory_viz.py and torch/csrc/cuda/memory_snapshot.cpp.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emu.trace.events import Alloc, At, Event, Free, Kernel, Recategorise
from emu.trace.memory import Memory

if TYPE_CHECKING:
    from emu.cost.timeline import Timeline

ROUND = 512  # bytes: addresses are multiples of this
FIRST = 1 << 32  # the lowest address; segments of all ranks lie behind it, since readers know blocks by address alone
PROTOCOL = 4  # of pickle

Frame = dict[str, Any]


def snapshot_bytes(memory: Memory, timeline: Timeline | None = None) -> bytes:
    """The snapshot as torch.cuda.memory._dump_snapshot writes it. Emu itself never reads such a file."""
    return pickle.dumps(memory_snapshot(memory, timeline), protocol=PROTOCOL)


def memory_snapshot(memory: Memory, timeline: Timeline | None = None) -> dict[str, Any]:
    """The snapshot at the end of a record, with everything that led to it. A device is the rank of its number.

    Args:
        memory: of a run.
        timeline: of the same trace, for times; None leaves them out.
    """
    segments: list[dict[str, Any]] = []
    ranks = memory.trace.ranks
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    base = FIRST
    for rank in ranks:
        device = _Device(rank, memory, timeline.event_times(rank) if timeline is not None else None)
        base = device.settle(base)
        traces[rank] = [*device.actions, device.end()] if device.actions else []
        segments += device.segments()
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }


class _Arena:
    """The addresses of one stream's blocks: each lies in the smallest hole that takes it, else at the end.

    They count from 0 until it is known how large segments are.
    """

    def __init__(self, number: int) -> None:
        self.number, self.base = number, 0
        self.size = 0  # the most that was ever needed
        self._top = 0
        self._holes: list[tuple[int, int]] = []  # (start, size), sorted; they never touch
        self._by_size: list[tuple[int, int]] = []  # the same as (size, start)

    def take(self, size: int) -> int:
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            start, self._top = self._top, self._top + size
            self.size = max(self.size, self._top)
            return start
        found, start = self._by_size[at]
        self._fill(start, found)
        if found > size:
            self._open(start + size, found - size)
        return start

    def give_back(self, start: int, size: int) -> None:
        at = bisect_left(self._holes, (start, 0))
        beside = self._holes[max(at - 1, 0) : at + 1]
        for hole, hole_size in beside:
            if hole + hole_size == start or start + size == hole:
                self._fill(hole, hole_size)
                start, size = min(start, hole), size + hole_size
        if start + size == self._top:
            self._top = start
        else:
            self._open(start, size)

    def _open(self, start: int, size: int) -> None:
        insort(self._holes, (start, size))
        insort(self._by_size, (size, start))

    def _fill(self, start: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (start, size))]
        del self._by_size[bisect_left(self._by_size, (size, start))]


class _Device:
    """A rank's blocks, as its events come."""

    def __init__(self, rank: int, memory: Memory, times_s: Sequence[float] | None) -> None:
        self.rank, self.times_s = rank, times_s
        self.actions: list[dict[str, Any]] = []
        self._arenas: dict[str, _Arena] = {}
        self._live: dict[int, dict[str, Any]] = {}  # by block
        self._events = memory.trace[rank]
        self._hold_what_was_there(memory.held.get(rank, {}))
        for i, event in enumerate(self._events):
            if type(event) is Alloc:
                self._place(event, _frames(self._events, i))
                self._act("alloc", event.block, i)
            elif type(event) is Free and event.block in self._live:
                self._dies(event.block, i)
                block = self._live.pop(event.block)
                if block["taken"]:
                    self._arenas[block["stream"]].give_back(block["addr"], block["taken"])
            elif type(event) is Recategorise and event.block in self._live:
                # Only an allocation has a category: it ends, and another begins where it lay.
                self._dies(event.block, i)
                self._live[event.block]["category"] = event.new
                self._act("alloc", event.block, i)

    def settle(self, base: int) -> int:
        """Puts its segments from an address on; returns the next one that is free."""
        arenas = list(self._arenas.values())
        for arena in arenas:
            arena.base, base = base, base + arena.size
        for action in self.actions:
            action["addr"] += arenas[action["stream"]].base
        for block in self._live.values():
            block["addr"] += self._arenas[block["stream"]].base
        return base

    def end(self) -> dict[str, Any]:
        """The snapshot itself, which torch writes as the last of its actions.

        Pages of pytorch.org/memory_viz know of categories if actions name them, and then want that one is "unknown": in
        MemoryViz.js, annotate_snapshot would add it by a misspelt name, and end there.
        """
        done = {"action": "snapshot", "addr": 0, "size": 0, "frames": [], "stream": 0, "category": "unknown"}
        return done if self.times_s is None else {**done, "time_us": round(self.times_s[-1] * 1e6)}

    def segments(self) -> list[dict[str, Any]]:
        """One for each stream, with the blocks that live at the end and the holes between them."""
        found: list[dict[str, Any]] = []
        for stream, arena in self._arenas.items():
            blocks: list[dict[str, Any]] = []
            live = [block for block in self._live.values() if block["stream"] == stream and block["taken"]]
            at = arena.base
            for block in sorted(live, key=lambda block: block["addr"]):
                if block["addr"] > at:
                    blocks.append(_hole(at, block["addr"] - at))
                at = block["addr"] + block["taken"]
                blocks.append(
                    {
                        "address": block["addr"],
                        "size": block["taken"],
                        "requested_size": block["size"],
                        "state": "active_allocated",
                        "frames": block["frames"],
                        "category": block["category"],
                    }
                )
            if arena.base + arena.size > at:
                blocks.append(_hole(at, arena.base + arena.size - at))
            used = sum(block["taken"] for block in live)
            found.append(
                {
                    "device": self.rank,
                    "address": arena.base,
                    "total_size": arena.size,
                    "allocated_size": used,
                    "active_size": used,
                    "requested_size": sum(block["size"] for block in live),
                    "stream": arena.number,
                    "segment_type": "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [_frame(f"stream {stream}")],
                    "blocks": blocks,
                }
            )
        return [segment for segment in found if segment["blocks"]]

    def _hold_what_was_there(self, held: Any) -> None:
        """Blocks of before the record: those that it frees or renames one by one, the rest of a category as one block."""
        rest = dict(held)
        if not any(rest.values()):
            return
        known: set[int] = set()
        there: list[Alloc] = []
        for event in self._events:
            if type(event) is Alloc:
                known.add(event.block)
            elif isinstance(event, (Free, Recategorise)) and event.block not in known:
                known.add(event.block)
                category = event.category if isinstance(event, Free) else event.old
                there.append(Alloc(event.block, event.bytes, category, "default"))
                rest[category] = rest.get(category, 0) - event.bytes
        there += [Alloc(-1 - i, n, category, "default") for i, (category, n) in enumerate(rest.items()) if n > 0]
        for alloc in there:
            self._place(alloc, [_frame("held before the record begins")])

    def _place(self, event: Alloc, frames: list[Frame]) -> None:
        if event.stream not in self._arenas:
            self._arenas[event.stream] = _Arena(len(self._arenas))
        arena = self._arenas[event.stream]
        taken = -(-event.bytes // ROUND) * ROUND
        self._live[event.block] = {
            "addr": arena.take(taken) if taken else 0,
            "size": event.bytes,
            "taken": taken,
            "stream": event.stream,
            "category": event.category,
            "frames": frames,
        }

    def _dies(self, block: int, i: int) -> None:
        self._act("free_requested", block, i)
        self._act("free_completed", block, i)

    def _act(self, action: str, block: int, i: int) -> None:
        it = self._live[block]
        if not it["size"]:
            return  # torch gives tensors without elements no memory
        done = {"action": action, "addr": it["addr"], "size": it["size"], "frames": it["frames"]}
        done |= {"stream": self._arenas[it["stream"]].number, "category": it["category"]}
        if self.times_s is not None:
            done["time_us"] = round(self.times_s[i] * 1e6)
        self.actions.append(done)


def _frames(events: Sequence[Event], i: int) -> list[Frame]:
    """Who asked for a block, innermost first: the kernel that is launched next, the modules around it, the phase."""
    for event in events[i + 1 : i + 9]:
        if isinstance(event, Kernel):
            scope = event.scope.split(".") if event.scope else []
            modules = [".".join(scope[:n]) for n in range(len(scope), 0, -1)]
            return [_frame(name) for name in (event.name, *modules, event.phase) if name]
        if not isinstance(event, (Alloc, Recategorise, At)):
            break
    return [_frame("allocated outside any kernel")]


def _frame(name: str) -> Frame:
    # Flame graphs part frames by semicolons and stacks by lines.
    return {"filename": "", "line": 0, "name": " ".join(name.splitlines()).replace(";", ",")}


def _hole(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
