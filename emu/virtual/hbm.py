"""The memory of one virtual device: every storage counted once, from its creation to its death.

A `Block` hangs on its storage as an attribute, so it dies exactly when the storage does, views and tensors saved for
backward included; no list of live tensors is kept, and nothing is kept alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emu.spmd.errors import VirtualOutOfMemory
from emu.trace.events import CATEGORIES, Alloc, Event, Free, Recategorise
from emu.virtual.freed import freed
from emu.virtual.lines import user_line

if TYPE_CHECKING:
    from emu.virtual.device import VirtualDevice

_new = tuple.__new__  # a named tuple's own constructor takes twice as long


class Block:
    """One live storage of a device. `uses` (Uses, or None) says which streams touched it; see streams.py."""

    __slots__ = (
        "__weakref__",
        "bytes",
        "category",
        "ledger",
        "number",
        "place",
        "scope",
        "uses",
        "watched",
    )

    def __init__(self, ledger: Ledger, number: int, bytes: int, category: str, scope: str, place: list[int]) -> None:
        self.ledger = ledger
        self.number = number
        self.bytes = bytes
        self.category = category
        self.scope = scope
        self.place = place
        self.uses: Any = None
        self.watched = False

    def __del__(self) -> None:
        # Written out, and not a call of the ledger's: every storage that dies comes by here.
        ledger = self.ledger
        size = self.bytes
        if ledger.closed or not size:
            return
        ledger.bytes -= size
        self.place[0] -= size
        if ledger._temporaries:
            ledger._temporaries.pop(self.number, None)
        ledger._events.append(_new(Free, (self.number, size, self.category)))
        uses = self.uses
        if uses is not None and not uses.alone and (device := ledger.device()) is not None:
            freed(device, self)


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
        self.closed = False
        self.device: Callable[[], VirtualDevice | None] = lambda: None  # a weak reference to whose memory it is
        self._places: dict[tuple[str, str], list[int]] = {}  # (category, scope) -> [bytes]
        self._events = events
        self._count = 0
        self._temporaries: dict[int, weakref.ref[Block]] = {}

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes alive, by category."""
        sizes = dict.fromkeys(CATEGORIES, 0)
        for (category, _), place in self._places.items():
            sizes[category] += place[0]
        return sizes

    @property
    def by_place(self) -> dict[tuple[str, str], int]:
        """Bytes alive, by category and scope."""
        return {key: place[0] for key, place in self._places.items() if place[0]}

    def alloc(self, storage: Any, category: str, scope: str, stream: str, may_be_kept: bool = True) -> Block | None:
        """Counts a new storage. Returns None for one without bytes.

        Args:
            may_be_kept: whether a temporary may still be alive when backward starts.

        Raises:
            VirtualOutOfMemory: it does not fit, even after a collection of garbage cycles.
        """
        size = storage.nbytes()
        if not size:
            return None
        total = self.bytes + size
        if self.capacity_bytes is not None and total > self.capacity_bytes:
            self.make_room(size, scope)
            total = self.bytes + size
        self.bytes = total
        if total > self.peak_bytes:
            self.peak_bytes = total
        place = self._places.get((category, scope)) or self._place(category, scope)
        place[0] += size
        self._count = number = self._count + 1
        storage._emu = block = Block(self, number, size, category, scope, place)
        self._events.append(_new(Alloc, (number, size, category, stream)))
        if may_be_kept and category == "temporary":
            self._temporaries[number] = weakref.ref(block)
        return block

    def _place(self, category: str, scope: str) -> list[int]:
        return self._places.setdefault((category, scope), [0])

    def _add(self, block: Block, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
        block.place[0] += size

    def recategorise(self, block: Block, category: str, scope: str | None = None) -> None:
        """Moves a block to another category and, if given, another place."""
        if (block.category == category and scope in (None, block.scope)) or self.closed:
            return
        self._add(block, -block.bytes)  # to another place, and back at once: the peak does not notice
        old, block.category = block.category, category
        if scope is not None:
            block.scope = scope
        block.place = self._place(category, block.scope)
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
        largest = sorted(((n, *place) for place, n in self.by_place.items()), reverse=True)[:5]
        held = ", ".join(f"{category} {human(n)}" for category, n in kinds.items()) or "nothing"
        places = ", ".join(
            f"{human(n)} of {category} in {place or 'code outside any module'}" for n, category, place in largest
        )
        cure = (
            "cut the tensor over ranks: it is larger than the device"
            if size > capacity
            else {
                "parameters": "shard parameters (ZeRO-3, tensor or pipeline parallelism); a model is whole while it is "
                "made: where it is sharded already, make it with fewer layers",
                "gradients": "shard gradients (ZeRO-2)",
                "optimizer": "shard optimizer states (ZeRO-1)",
                "activations": "use a smaller micro-batch, or activation checkpointing",
                "communication": "gather less ahead of its use, and free what was gathered after it",
            }.get(next(iter(kinds), ""), "free tensors that are no longer needed")
        )
        return VirtualOutOfMemory(
            f"rank {self.rank} is out of memory{' in ' + scope if scope else ''}: {human(size)} more do not "
            f"fit, {human(free)} of {human(capacity)} are free\n  it holds {held}\n  most of it: {places or 'nothing'}"
            f"\n  asked for at {user_line()}",
            cure,
            rank=self.rank,
            requested_bytes=size,
            free_bytes=free,
            capacity_bytes=capacity,
            by_category=dict(self.by_category),
            largest=largest,
        )
