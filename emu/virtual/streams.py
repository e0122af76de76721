"""Streams and events of a virtual device, and the races that a missing wait makes.

Every stream counts what it is given (its tick) and knows, for every other stream, up to which tick that one's work
comes before its own: a vector clock, merged by events and waits exactly where CUDA orders streams. A block remembers
who wrote and who read it last, so a use that nothing orders is an error at the line that makes it, whether or not the
bytes came out right this time; freed.py looks at the same notes when it dies. As long as a device has one stream there
is nothing to check and nothing is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from emu.spmd.errors import BufferInFlight
from emu.trace.events import EventRecord, EventWait, HostWait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from emu.virtual.device import VirtualDevice

DEFAULT = "default"
LISTED = 16  # uses of one stream that are listed before they are looked through


class VirtualStream:
    """A queue of kernels on a virtual device."""

    def __init__(self, name: str, device: VirtualDevice) -> None:
        self.name = name
        self.tick = 0
        self.seen: dict[str, int] = dict(device.host_seen)
        self._device = device
        self._outer: list[VirtualStream] = []

    def __enter__(self) -> VirtualStream:
        self._outer.append(self._device.stream_now)
        self._device.stream_now = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._device.stream_now = self._outer.pop()

    def point(self) -> dict[str, int]:
        """All that comes before whatever this stream is given next."""
        return {**self.seen, self.name: self.tick}

    def merge(self, point: dict[str, int]) -> None:
        seen = self.seen
        for name, tick in point.items():
            if name != self.name and seen.get(name, -1) < tick:
                seen[name] = tick

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self._device).record(self)

    def wait_event(self, event: VirtualEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: VirtualStream) -> None:
        other.record_event().wait(self)

    def synchronize(self) -> None:
        self._device.about_to("host", f"synchronize {self.name}")
        self._device.host_wait(self, "synchronize")

    def __repr__(self) -> str:
        return f"Stream({self.name!r} of rank {self._device.rank})"


class VirtualEvent:
    """A point on a stream. Waiting for one that was never recorded waits for nothing, as in CUDA."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._point: dict[str, int] | None = None
        self._stream: VirtualStream | None = None
        self.number = 0

    def record(self, stream: VirtualStream | None = None) -> VirtualEvent:
        stream = stream or self._device.stream_now
        self._device.about_to("event", f"record_event on {stream.name}")
        self._device.count_uses()
        self.number = self._device.next_event()
        self._point, self._stream = stream.point(), stream
        self._device.issue(EventRecord(self.number, stream.name))
        return self

    def wait(self, stream: VirtualStream | None = None) -> None:
        stream = stream or self._device.stream_now
        if self._point is not None:
            self._device.about_to("event", f"wait_event {self.number} on {stream.name}")
            self._device.settle(self._point)
            stream.merge(self._point)
            self._device.issue(EventWait(self.number, stream.name))

    def synchronize(self) -> None:
        if self._point is not None and self._stream is not None:
            self._device.about_to("event", f"synchronize event {self.number}")
            self._device.settle(self._point)
            self._device.host_sees(self._point)
            self._device.issue(HostWait(self._stream.name, f"event {self.number}"))


class Use(NamedTuple):
    """One use of some bytes of a block by a stream."""

    stream: str
    tick: int
    start: int  # the bytes that it may touch, within the storage
    end: int
    writes: bool
    what: str
    where: Any  # the line of the user's program, or None
    work: int = 0  # the communication that uses them; 0 for anything else


class Uses(list[Use]):
    """The uses of a block that count, and its owner: the stream that it was allocated on.

    As long as the owner is the only stream that used it (`alone`), which is so for most blocks all their lives, nothing
    can race: uses are only listed, and looked through when there are `most` of them, or another stream comes.
    """

    __slots__ = ("alone", "most", "owner")

    def __init__(self, owner: str, uses: Iterable[Use] = ()) -> None:
        super().__init__(uses)
        self.owner = owner
        self.alone = True
        self.most = LISTED

    def add(self, use: Use) -> None:
        """Lists a use, and drops those that it covers and that it comes after, being of the same stream or a write."""
        start, end, writes, name = use.start, use.end, use.writes, use.stream
        self[:] = [
            u
            for u in self
            if not (start <= u.start and u.end <= end and (writes or (u.stream == name and not u.writes)))
        ]
        self.append(use)

    def settle(self) -> None:
        """Drops what does not count from the list of a block that only its owner used."""
        listed = list(self)
        self.clear()
        for use in listed:
            self.add(use)
        self.most = LISTED + 2 * len(self)


def uses_of(block: Any, owner: str) -> Uses:
    """What a new block of a stream carries; a device that records has another such function."""
    return Uses(owner)


def extent(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor may touch, from the first to the last element."""
    item = x.element_size()
    start = int(x.storage_offset()) * item
    if x.is_contiguous():
        return (start, start + x.nbytes) if x.numel() else (0, 0)
    return start, start + item + item * sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))


def check_use(
    device: VirtualDevice,
    block: Any,
    stream: VirtualStream,
    x: Tensor | tuple[int, int],
    writes: bool,
    what: str,
    where: Any,
    work: int = 0,
) -> None:
    """Notes that `stream` uses a tensor of a block, and raises BufferInFlight if nothing orders it after an earlier use.

    Parts of one buffer that do not overlap do not disturb each other. A use that covers an earlier one, and comes after
    it, stands for it from then on.

    Args:
        x: the tensor, or from which byte of the block to which.
        what: the use in words, for this and later messages.
        where: the line of the user's program, or None.
        work: the communication that uses it; 0 for anything else.
    """
    start, end = x if isinstance(x, tuple) else extent(x)
    name = stream.name
    uses = block.uses
    if uses is None:
        block.uses = uses = device.uses_of(block, DEFAULT)
        uses.append(Use(DEFAULT, device.alone_until, 0, block.bytes, True, "an earlier kernel", None))
    new = tuple.__new__(Use, (name, stream.tick, start, end, writes, what, where, work))
    if uses.alone:
        if uses.owner == name:
            uses.append(new)
            if len(uses) > uses.most:
                uses.settle()
            return
        uses.settle()
        uses.alone = False
    seen = stream.seen
    for use in uses:
        apart = use.end <= start or end <= use.start
        if not apart and (writes or use.writes) and use.stream != name and seen.get(use.stream, 0) < use.tick:
            raise _race(device, block, stream, "writes" if writes else "reads", what, where, use)
    uses.add(new)


def _race(
    device: VirtualDevice, block: Any, stream: VirtualStream, verb: str, what: str, where: Any, before: Use
) -> BufferInFlight:
    here = f" ({where})" if where else ""
    return BufferInFlight(
        f"rank {device.rank}: {what}{here} on stream {stream.name!r} {verb} a buffer ({called(block)}) that "
        f"{in_words(before)}: nothing orders the two",
        cure(before, stream.name),
        rank=device.rank,
        streams=(before.stream, stream.name),
    )


def called(block: Any) -> str:
    """A block in messages."""
    return f"{block.bytes} bytes of {block.category}{' of ' + block.scope if block.scope else ''}"


def in_words(use: Use) -> str:
    there = f" (issued at {use.where})" if use.where else ""
    return f"{use.what} on stream {use.stream!r}{there} still {'writes' if use.writes else 'reads'}"


def cure(use: Use, waiting: str) -> str:
    """What makes a stream wait for a use."""
    if use.work:
        return "call wait() on its work first"
    return f"make stream {waiting!r} wait first, with wait_stream or an event recorded on {use.stream!r}"
