"""The memory of one virtual device: every storage counted once, from its creation to its death.

A `Block` hangs on its storage as an attribute, so it dies exactly when the storage does, views and tensors saved for
backward included; no list of live tensors is kept, and nothing is kept alive.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from emu.spmd.errors import VirtualOutOfMemory
from emu.trace.events import CATEGORIES, Alloc, Event, Free, Recategorise

ROUND_BYTES = 512  # the CUDA caching allocator rounds requests up to this


class Block:
    """One live storage of a device. `writer` and `readers` say which streams touched it last; see streams.py."""

    __slots__ = ("__weakref__", "bytes", "category", "ledger", "number", "readers", "scope", "watched", "writer")

    def __init__(self, ledger: Ledger, number: int, bytes: int, category: str, scope: str) -> None:
        self.ledger = ledger
        self.number = number
        self.bytes = bytes
        self.category = category
        self.scope = scope
        self.writer: Any = None
        self.readers: Any = None
        self.watched = False

    def __del__(self) -> None:
        self.ledger.free(self)


class Ledger:
    """What lives in one device's memory.

    Args:
        rank: whose memory it is.
        capacity_bytes: None for a memory that never fills.
        events: the rank's record, to which allocations and frees are added.
    """

    def __init__(self, rank: int, capacity_bytes: int | None, events: list[Event]) -> None:
        self.rank = rank
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self.by_category = dict.fromkeys(CATEGORIES, 0)
        self.by_place: dict[tuple[str, str], int] = {}
        self.closed = False
        self._events = events
        self._count = 0
        self._temporaries: dict[int, weakref.ref[Block]] = {}

    def alloc(self, storage: Any, category: str, scope: str, stream: str) -> Block | None:
        """Counts a new storage. Returns None for one without bytes.

        Raises:
            VirtualOutOfMemory: it does not fit, even after a collection of garbage cycles.
        """
        size = storage.nbytes()
        if not size:
            return None
        self.make_room(size, scope)
        self._count += 1
        block = Block(self, self._count, size, category, scope)
        storage._emu = block
        self._add(block, size)
        self._events.append(Alloc(block.number, size, category, stream))
        if category == "temporary":
            self._temporaries[block.number] = weakref.ref(block)
        return block

    def _add(self, block: Block, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        self.by_category[block.category] += size
        place = (block.category, block.scope)
        self.by_place[place] = self.by_place.get(place, 0) + size

    def free(self, block: Block) -> None:
        if self.closed or not block.bytes:
            return
        self._add(block, -block.bytes)
        self._temporaries.pop(block.number, None)
        self._events.append(Free(block.number, block.bytes, block.category))

    def recategorise(self, block: Block, category: str, scope: str | None = None) -> None:
        """Moves a block to another category and, if given, another place."""
        if (block.category == category and scope in (None, block.scope)) or self.closed:
            return
        self._add(block, -block.bytes)
        old, block.category = block.category, category
        if scope is not None:
            block.scope = scope
        self._add(block, block.bytes)
        self._temporaries.pop(block.number, None)
        if old != category and block.bytes:
            self._events.append(Recategorise(block.number, block.bytes, old, category))

    def keep_temporaries(self) -> None:
        """Backward starts: a temporary that is still alive was kept for it, and is an activation."""
        for reference in list(self._temporaries.values()):
            if (block := reference()) is not None:
                self.recategorise(block, "activations")

    def make_room(self, size: int, scope: str) -> None:
        """Raises VirtualOutOfMemory if that many more bytes do not fit, even after a collection of garbage cycles."""
        if self.capacity_bytes is not None and self.bytes + size > self.capacity_bytes:
            gc.collect()
            if self.bytes + size > self.capacity_bytes:
                raise self._overflow(size, scope)

    def resized(self, block: Block, size: int, stream: str) -> None:
        """A storage changed its size in place: to the allocator, a new block is born, filled, and the old one dies."""
        old = block.bytes
        if size == old:
            return
        if size:
            self.make_room(size, block.scope)
            self._add(block, size)
            self._count += 1
            self._events.append(Alloc(self._count, size, block.category, stream))
        if old:
            self._add(block, -old)
            self._events.append(Free(block.number, old, block.category))
        self._temporaries.pop(block.number, None)
        block.number, block.bytes = self._count, size
        if size and block.category == "temporary":
            self._temporaries[block.number] = weakref.ref(block)

    def _overflow(self, size: int, scope: str) -> VirtualOutOfMemory:
        import humanize

        def human(n: int) -> str:
            return humanize.naturalsize(n, format="%.2f") if n >= 1000 else f"{n} bytes"

        capacity = self.capacity_bytes or 0
        free = capacity - self.bytes
        kinds = {c: n for c, n in sorted(self.by_category.items(), key=lambda item: -item[1]) if n}
        largest = sorted(((n, *place) for place, n in self.by_place.items() if n), reverse=True)[:5]
        held = ", ".join(f"{category} {human(n)}" for category, n in kinds.items()) or "nothing"
        places = ", ".join(
            f"{human(n)} of {category} in {place or 'code outside any module'}" for n, category, place in largest
        )
        cure = {
            "parameters": "shard parameters (ZeRO-3, tensor or pipeline parallelism)",
            "gradients": "shard gradients (ZeRO-2)",
            "optimizer": "shard optimizer states (ZeRO-1)",
            "activations": "use a smaller micro-batch, or activation checkpointing",
        }.get(next(iter(kinds), ""), "free tensors that are no longer needed")
        return VirtualOutOfMemory(
            f"rank {self.rank} is out of memory{' in ' + scope if scope else ''}: {human(size)} more do not "
            f"fit, {human(free)} of {human(capacity)} are free\n  it holds {held}\n  most of it: {places or 'nothing'}",
            cure,
            rank=self.rank,
            requested_bytes=size,
            free_bytes=free,
            capacity_bytes=capacity,
            by_category=dict(self.by_category),
            largest=largest,
        )
