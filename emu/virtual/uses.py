"""Recording who uses which memory, on request: what proves that no wait is missing (emu/equivalence/hazard_proof).

While it records, a device looks for no races: all of them are to be found in the record, not the first one only. Blocks
then carry a `Recorded` in place of their Uses, which writes every use down and remembers none.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from emu.trace.events import At, Choice, Free, HostFree
from emu.trace.events import Use as UseEvent
from emu.virtual.hbm import Block
from emu.virtual.lines import user_line
from emu.virtual.streams import Use, Uses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from emu.virtual.device import VirtualDevice
    from emu.virtual.works import VirtualWork


class Recorder:
    """From its creation on, a device's record says who uses which memory, and where the program waits."""

    def __init__(self, device: VirtualDevice) -> None:
        self._events = device.events
        self._let_go: set[int] = set()  # positions of what was freed because a function ended
        device.recorder, device.uses_of = self, self.uses_of
        device.count_uses()

    def uses_of(self, block: Any, owner: str) -> Uses:
        """What a block carries in place of Uses. What is inside a kernel is no memory, and nobody else can use it."""
        return Recorded(self, block, owner) if type(block) is Block and block.bytes else Uses(owner)

    def note(self, block: Recorded, use: Use) -> None:
        block.shared = block.shared or use.stream != block.owner
        if use.start < use.end:
            kind = "write" if use.writes else "read"
            line = use.where or ""
            event = UseEvent(block.number, use.start, use.end, kind, use.stream, use.work, use.what, line, block.scope)
            self._events.append(event)

    def freed(self, block: Recorded, what: str, line: str, on_purpose: bool = True) -> None:
        """A block's memory is its stream's again. Where no other stream ever used it, nothing can come of that."""
        if not on_purpose:
            self._let_go.add(len(self._events))
        self._events.append(UseEvent(block.number, 0, block.bytes, "free", block.owner, 0, what, line, block.scope))

    def at(self, line: str | None = None) -> None:
        self._events.append(At(user_line() if line is None else line))

    def chose(self, kind: str, works: Iterable[VirtualWork], taken: int) -> None:
        """The program learned something that is a matter of time."""
        numbers = tuple(event.work for work in works for _, event in work.items())
        self._events.append(Choice(kind, numbers, taken, user_line()))

    def end(self) -> None:
        """The program is over: what dies with its last frames, with nothing after it, is not part of the record."""
        events, kept = self._events, []
        while events and type(events[-1]) in (Free, HostFree, UseEvent):
            if len(events) - 1 not in self._let_go and type(events[-1]) is UseEvent:
                kept.append(events[-1])
            events.pop()
        events.extend(reversed(kept))


class Recorded(Uses):
    """The uses of a block of which nobody but the record keeps any."""

    __slots__ = ("block", "bytes", "number", "recorder", "shared")

    def __init__(self, recorder: Recorder, block: Block, owner: str) -> None:
        super().__init__(owner)
        self.alone = False  # every use comes to add()
        self.shared = False
        self.recorder, self.number, self.bytes = recorder, block.number, block.bytes
        self.block = weakref.ref(block)

    def add(self, use: Use) -> None:
        self.recorder.note(self, use)

    append = add

    @property
    def scope(self) -> str:
        """Whose memory it is; of a block that died, nobody knows any more."""
        living = self.block()
        return "" if living is None else living.scope
