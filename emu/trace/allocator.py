"""What a caching allocator holds for a rank's tensors: a replay of its allocations by the rules of torch's.

Three figures of one memory: what tensors ask for (`Memory`), what blocks for them take once sizes are rounded up
(allocated), and what the segments take that those blocks are cut from (reserved). Segments stay when blocks are freed, so
that holes between live blocks count, too.

Source: torch, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, with the default settings (no
expandable segments, no rounding to powers of two, one pool for every stream).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from emu.trace.events import Alloc, Event, Free

ROUND = 512  # sizes are multiples of this
SMALL = 1 << 20  # the largest request that is cut from a small segment
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for requests below LARGE
LARGE = 10 << 20
LARGE_ROUND = 2 << 20  # what larger segments are multiples of


class Held(NamedTuple):
    """The most that was held at once, in bytes."""

    allocated: int
    reserved: int


class _Chunk:
    """A part of a segment: a live block, or a hole."""

    __slots__ = ("after", "before", "free", "number", "size")

    def __init__(self, number: int, size: int, before: _Chunk | None, after: _Chunk | None) -> None:
        self.number, self.size, self.before, self.after = number, size, before, after
        self.free = False


class Allocator:
    """One device's.

    Args:
        capacity_bytes: what segments may take together; where a new one would not fit, segments without a live block are
            given back first. None: there is always room.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = 0
        self.peak = Held(0, 0)
        self._live: dict[int, tuple[_Chunk, tuple[str, bool]]] = {}
        self._holes: dict[
            tuple[str, bool], list[tuple[int, int, _Chunk]]
        ] = {}  # by pool: (size, number, chunk), sorted
        self._numbers = 0

    def alloc(self, block: int, size: int, stream: str) -> None:
        """A block of so many bytes begins to live, on a stream."""
        size = -(-size // ROUND) * ROUND
        small = size <= SMALL
        pool = stream, small
        holes = self._holes.setdefault(pool, [])
        at = bisect_left(holes, (size, 0))
        if at < len(holes):
            chunk = holes.pop(at)[2]
            chunk.free = False
        else:
            chunk = self._segment(size, small)
        rest = chunk.size - size
        if rest >= ROUND if small else rest > SMALL:
            hole = self._chunk(rest, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = hole
            chunk.after, chunk.size = hole, size
            hole.free = True
            insort(holes, (rest, hole.number, hole))
        self._live[block] = chunk, pool
        self.allocated += chunk.size
        self.peak = Held(max(self.peak.allocated, self.allocated), max(self.peak.reserved, self.reserved))

    def free(self, block: int) -> None:
        """A block dies: it becomes a hole, and one with the holes beside it."""
        chunk, pool = self._live.pop(block)
        self.allocated -= chunk.size
        holes = self._holes[pool]
        for beside in (chunk.before, chunk.after):
            if beside is None or not beside.free:
                continue
            del holes[bisect_left(holes, (beside.size, beside.number))]
            chunk.size += beside.size
            if beside is chunk.before:
                chunk.before = beside.before
                if chunk.before is not None:
                    chunk.before.after = chunk
            else:
                chunk.after = beside.after
                if chunk.after is not None:
                    chunk.after.before = chunk
        chunk.free = True
        insort(holes, (chunk.size, chunk.number, chunk))

    def _segment(self, size: int, small: bool) -> _Chunk:
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // LARGE_ROUND) * LARGE_ROUND
        if self.capacity_bytes is not None and self.reserved + whole > self.capacity_bytes:
            self._give_back()
        self.reserved += whole
        return self._chunk(whole, None, None)

    def _give_back(self) -> None:
        """Segments without a live block go."""
        for holes in self._holes.values():
            whole = [hole for hole in holes if hole[2].before is None and hole[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            gone = {number for _, number, _ in whole}
            holes[:] = [hole for hole in holes if hole[1] not in gone]

    def _chunk(self, size: int, before: _Chunk | None, after: _Chunk | None) -> _Chunk:
        self._numbers += 1
        return _Chunk(self._numbers, size, before, after)


def held(events: Iterable[Event], alive: Sequence[Alloc] = (), capacity_bytes: int | None = None) -> Held:
    """The most that a rank's allocator held while something was recorded.

    Args:
        events: of one rank.
        alive: the blocks that live when they begin. They are packed as they come: of what was freed before, nothing is
            reserved.
        capacity_bytes: of the device; see Allocator.
    """
    allocator = Allocator(capacity_bytes)
    for event in (*alive, *events):
        if type(event) is Alloc:
            if event.bytes:
                allocator.alloc(event.block, event.bytes, event.stream)
        elif type(event) is Free and event.bytes:
            allocator.free(event.block)
    return allocator.peak


def alive_after(events: Iterable[Event]) -> list[Alloc]:
    """The blocks that live when these events of a rank, its first ones, are over; in the order in which they came."""
    blocks: dict[int, Alloc] = {}
    for event in events:
        if type(event) is Alloc:
            blocks[event.block] = event
        elif type(event) is Free:
            blocks.pop(event.block, None)
    return list(blocks.values())
