"""Whether the events of a record fit each other and the mesh: what a trace's text alone cannot tell.

Pricing, memory and pictures take a record as it comes from a run. One that comes from a file is gone through once, event by
event, before anybody works with it: every rank is one of the mesh, every wait has something before it to wait for, and
memory that is given back had been taken. What ranks must agree about (who takes part in a collective) pricing finds.

What runs at one time shares what it runs on, and the time that pricing takes grows with the square of how much does. So a
rank has no more than MOST_STREAMS streams, and posts no more than MOST_TOGETHER messages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from emu.cost.collectives import ALGORITHMS, KINDS
from emu.cost.simulate import NO_TIME
from emu.real.decoding import DTYPES
from emu.runfiles.errors import Refused, quoted
from emu.runfiles.head import MOST_BYTES, MOST_HELD
from emu.trace.events import (
    CATEGORIES,
    PHASES,
    Alloc,
    Choice,
    Collective,
    EventRecord,
    EventWait,
    Free,
    HostCopy,
    HostFree,
    HostWait,
    Kernel,
    Recategorise,
    Transfer,
    Use,
    Wait,
)
from emu.trace.trace import Trace

MOST_STREAMS = 128  # of a rank; torch itself has 32 of each priority, and hands them out again and again
MOST_TOGETHER = 1024  # messages that a rank posts with nothing between them
RESERVED = ("", "\0")  # no stream's name: all streams, and the host
COPIES = ("to_host", "from_host")
USES = ("read", "write", "free")
CHOICES = ("wait_any", "done")


def check_events(
    trace: Trace, ranks: int, held: Mapping[int, Mapping[str, int]], held_by_host: Mapping[int, int]
) -> None:
    """Goes through a record once.

    Args:
        ranks: of the mesh.
        held, held_by_host: what lived when the record began, as of emu.trace.memory.Memory.

    Raises:
        Refused: the first event that cannot be, with its line in the text.
    """
    line = 1  # of the text, whose first line is its header
    for rank, events in trace.events.items():
        if rank >= ranks:
            raise Refused("trace.jsonl, line 1", f"it has a record of rank {rank}, but the mesh has {ranks:,} ranks")
        record = _Record(rank, ranks, held.get(rank, {}), held_by_host.get(rank, 0))
        for event in events:
            line += 1
            problem = record.problem(event)
            if problem:
                raise Refused(f"trace.jsonl, line {line}", f"{type(event).__name__} of rank {rank} {problem}")


class _Record:
    """What a rank has done so far. Every method says what is wrong with an event, or nothing."""

    def __init__(self, rank: int, ranks: int, held: Mapping[str, int], held_by_host: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._streams: set[str] = set()
        self._works: set[int] = set()
        self._marks: set[int] = set()  # events that were recorded
        self._blocks: dict[int, tuple[int, str]] = {}  # that live
        self._known: set[int] = set()  # all that ever lived
        self._bytes = {**dict.fromkeys(CATEGORIES, 0), **held}
        self._held = any(held.values())
        self._on_host = held_by_host
        self._groups: dict[int, tuple[int, ...]] = {}  # members that were looked at, by identity; keeps them
        self._kernels: dict[int, Kernel] = {}
        self._together = 0  # messages that were posted last, with nothing between them
        self._of: dict[type, Callable[[Any], str | None]] = {
            Kernel: self._kernel,
            Collective: self._collective,
            Transfer: self._transfer,
            HostCopy: self._copy,
            HostFree: self._host_free,
            Wait: self._wait,
            EventRecord: self._record,
            EventWait: self._event_wait,
            HostWait: self._host_wait,
            Alloc: self._alloc,
            Free: self._free,
            Recategorise: self._recategorise,
            Use: self._use,
            Choice: self._choice,
        }

    def problem(self, event: Any) -> str | None:
        """What is wrong with the next event, in words that follow its name."""
        kind = type(event)
        if kind is not Transfer and kind not in NO_TIME:
            self._together = 0
        look = self._of.get(kind)
        return look(event) if look is not None else None

    def _stream(self, name: str) -> str | None:
        if name not in self._streams:
            if name in RESERVED:
                return f"has {quoted(name)} for a stream"
            self._streams.add(name)
            if len(self._streams) > MOST_STREAMS:
                return f"uses more than {MOST_STREAMS} streams"
        return None

    def _kernel(self, event: Kernel) -> str | None:
        if id(event) in self._kernels:  # equal lines are one event
            return None
        self._kernels[id(event)] = event
        if event.phase not in PHASES:
            return f"is of phase {quoted(event.phase)}"
        if event.dtype not in DTYPES:
            return f"computes in {quoted(event.dtype)}"
        if event.dims and (len(event.dims) != 4 or (event.flops and not all(event.dims))):
            return f"of {event.flops:,} flops has the sizes {quoted(event.dims)}, which no matrix product (batch, m, n, k) has"
        return self._stream(event.stream)

    def _collective(self, event: Collective) -> str | None:
        members = event.members
        if event.kind not in KINDS or (event.algorithm and event.algorithm not in ALGORITHMS):
            return f"is a {quoted(event.kind)} by algorithm {quoted(event.algorithm)}, which emu does not have"
        if id(members) not in self._groups:
            if len({*members}) < len(members) or not members or max(members) >= self._ranks:
                return f"has the members {quoted(members)}, which are no group of the mesh's {self._ranks:,} ranks"
            if self._rank not in members:
                return f"has the members {quoted(members)}, of which this rank is none"
            self._groups[id(members)] = members
        if len(event.sizes) not in (0, len(members)):
            return f"has {len(event.sizes)} sizes for {len(members)} members"
        if sum(event.sizes) > MOST_BYTES:
            return f"moves more than {MOST_BYTES:,} bytes"
        if not -1 <= event.root < len(members):
            return f"has the root {event.root}, but {len(members)} members"
        return self._stream(event.stream) or self._stream(event.after) or self._work(event.work)

    def _transfer(self, event: Transfer) -> str | None:
        own = {"send": event.src, "recv": event.dst}.get(event.kind)
        if own != self._rank or event.src == event.dst or max(event.src, event.dst) >= self._ranks:
            return f"is a {quoted(event.kind)} from rank {event.src} to rank {event.dst}, which it cannot have"
        self._together += 1
        if self._together > MOST_TOGETHER:
            return f"is one of more than {MOST_TOGETHER} that are posted at once"
        return self._stream(event.stream) or self._stream(event.after) or self._work(event.work)

    def _work(self, number: int) -> str | None:
        if number in self._works:
            return f"has the number {number}, which another communication has"
        self._works.add(number)
        return None

    def _copy(self, event: HostCopy) -> str | None:
        if event.kind not in COPIES:
            return f"is a {quoted(event.kind)}, which is no copy"
        if event.kind == "to_host":
            self._on_host += event.bytes
        if self._on_host > MOST_BYTES:
            return f"makes the host hold more than {MOST_BYTES:,} bytes"
        return self._stream(event.stream)

    def _host_free(self, event: HostFree) -> str | None:
        self._on_host -= event.bytes
        return f"gives back {event.bytes:,} bytes, which the host does not hold" if self._on_host < 0 else None

    def _wait(self, event: Wait) -> str | None:
        if event.work not in self._works:
            return f"waits for work {event.work}, which nothing before it started"
        return self._stream(event.stream)

    def _record(self, event: EventRecord) -> str | None:
        self._marks.add(event.event)
        return self._stream(event.stream)

    def _event_wait(self, event: EventWait) -> str | None:
        if event.event not in self._marks:
            return f"waits for event {event.event}, which nothing before it recorded"
        return self._stream(event.stream)

    def _host_wait(self, event: HostWait) -> str | None:
        what, _, number = event.reason.partition(" ")
        if what == "event" and (not number.isascii() or not number.isdecimal() or len(number) > len(str(MOST_BYTES))):
            return f"waits for {quoted(event.reason)}"
        return self._stream(event.stream) if event.stream else None

    def _alloc(self, event: Alloc) -> str | None:
        if event.block in self._known:
            return f"has the number {event.block}, which another block has"
        self._known.add(event.block)
        self._blocks[event.block] = event.bytes, event.category
        return self._change(event.category, event.bytes) or self._stream(event.stream)

    def _free(self, event: Free) -> str | None:
        return self._lives(event.block, event.bytes, event.category) or self._change(event.category, -event.bytes)

    def _recategorise(self, event: Recategorise) -> str | None:
        problem = self._lives(event.block, event.bytes, event.old) or self._change(event.old, -event.bytes)
        self._known.add(event.block)
        self._blocks[event.block] = event.bytes, event.new
        return problem or self._change(event.new, event.bytes)

    def _lives(self, block: int, size: int, category: str) -> str | None:
        """Whether a block is there, as what it is said to be; it then is there no more. One of before may be anything."""
        known = self._blocks.pop(block, None)
        if known is None and (block in self._known or not self._held):
            return f"is of block {block}, which does not live"
        if known is not None and known != (size, category):
            return f"is of block {block} with {size:,} bytes of {quoted(category)}; it has {known[0]:,} of {known[1]}"
        self._known.add(block)
        return None

    def _change(self, category: str, size: int) -> str | None:
        if category not in self._bytes:
            return f"is of {quoted(category)}, which is no kind of memory"
        self._bytes[category] = now = self._bytes[category] + size
        if now < 0:
            return f"gives back more {category} than there are"
        return f"makes {category} larger than {MOST_HELD:,} bytes" if now > MOST_HELD else None

    def _use(self, event: Use) -> str | None:
        if event.kind not in USES or event.start > event.end:
            return f"is a {quoted(event.kind)} of the bytes {event.start:,} to {event.end:,}"
        if event.block not in self._known and not self._held:
            return f"is of block {event.block}, which never lived"
        if event.work and event.work not in self._works:
            return f"is by communication {event.work}, which nothing before it started"
        return self._stream(event.stream)

    def _choice(self, event: Choice) -> str | None:
        if event.kind not in CHOICES or not self._works.issuperset(event.works):
            return f"is a {quoted(event.kind)} among the communications {quoted(event.works)}"
        return None
