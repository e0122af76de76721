"""One rank's virtual device: its streams, its memory, its record, and its side of every communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emu.spmd.calls import Call, Message, Work
from emu.spmd.errors import CrossRankAccess
from emu.trace.events import Collective, Event, Free, HostWait, Mark, Transfer, Wait
from emu.virtual.hbm import Ledger
from emu.virtual.rendezvous import Half, Meeting, Rendezvous, user_line
from emu.virtual.scheduler import Waiting
from emu.virtual.streams import DEFAULT, VirtualEvent, VirtualStream, check_use

if TYPE_CHECKING:
    from emu.spmd.group import Group
    from emu.virtual.tracker import Tracker


class VirtualDevice:
    """A device that does not exist.

    Args:
        rank: its rank.
        capacity_bytes: its memory; None never fills.
        rendezvous: where it meets the others.
        meta: whether tensors have shapes only.
    """

    def __init__(self, rank: int, capacity_bytes: int | None, rendezvous: Rendezvous, meta: bool = False) -> None:
        self.rank = rank
        self.torch_device = torch.device("meta" if meta else "cpu")
        self.events: list[Event] = []
        self.ledger = Ledger(rank, capacity_bytes, self.events)
        self.channel = self
        self.rendezvous = rendezvous
        self.tracker: Tracker | None = None
        self.host_seen: dict[str, int] = {}
        self.alone_until = 0  # tick of the default stream up to which nobody noted who wrote what
        self.many_streams = False
        self._streams: dict[str, VirtualStream] = {}
        self.stream_now = self._streams[DEFAULT] = VirtualStream(DEFAULT, self)
        self._sequence: dict[Any, int] = {}
        self._works = self._event_count = 0
        self._on_current = False
        self.clock: Any = None  # prices events as they happen, for order="time"

    # The Device protocol.

    def stream(self, name: str) -> VirtualStream:
        if name not in self._streams:
            if not self.many_streams:
                self.many_streams = True
                self.alone_until = self._streams[DEFAULT].tick = 1
            self._streams[name] = VirtualStream(name, self)
        return self._streams[name]

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def next_event(self) -> int:
        self._event_count += 1
        return self._event_count

    @contextmanager
    def kernel(self, name: str, flops: int | None, bytes: int | None) -> Iterator[None]:
        if self.tracker is None:
            yield
            return
        with self.tracker.one_kernel(name, flops, bytes):
            yield

    def watch(self, module: nn.Module, name: str) -> None:
        if self.tracker is not None:
            self.tracker.names.watch(module, name)

    def mark(self, name: str) -> None:
        self.events.append(Mark(name))

    def synchronize(self) -> None:
        self.host_wait(None, "synchronize")

    def host_wait(self, stream: VirtualStream | None, reason: str) -> None:
        """The host waits for a stream, or for all: what it gives to any stream afterwards comes after that."""
        for s in self._streams.values() if stream is None else (stream,):
            self.host_sees(s.point())
        self.events.append(HostWait("" if stream is None else stream.name, reason))
        if self.clock is not None:
            self.clock(self.events[-1])

    def host_sees(self, point: dict[str, int]) -> None:
        for name, tick in point.items():
            if self.host_seen.get(name, -1) < tick:
                self.host_seen[name] = tick
        for s in self._streams.values():
            s.merge(self.host_seen)

    def end(self) -> None:
        """The program is over. What dies with its last frame is not part of the record: some of it may outlive it."""
        self.ledger.closed = True
        while self.events and type(self.events[-1]) is Free:
            self.events.pop()

    # The Channel protocol.

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.tracker is None:
            return like.new_empty(shape)
        self.tracker.category = "communication"
        try:
            return like.new_empty(shape)
        finally:
            self.tracker.category = None

    @contextmanager
    def synchronous(self) -> Iterator[None]:
        outer, self._on_current = self._on_current, True
        try:
            yield
        finally:
            self._on_current = outer

    def collective(self, group: Group, call: Call) -> Work:
        self.rendezvous.scheduler.before_op(self.rank)
        line = user_line()
        seq = self._sequence[group.key] = self._sequence.get(group.key, -1) + 1
        stream = self._communicates(group.label)
        what = f"{group.label}.{call.kind} number {seq}"
        self._works += 1
        work = self._works
        self._use(call.source, stream, call.target is call.source, what, line)
        if call.target is not call.source:
            self._use(call.target, stream, True, what, line)
        self.events.append(_recorded(group, call, seq, stream.name, self.stream_now.name, work))
        if self.clock is not None:
            self.clock(self.events[-1])
        meeting = self.rendezvous.join(group, seq, call, line)
        return CollectiveWork(self, meeting, what, line, work, stream, call)

    def messages(self, group: Group, messages: list[Message]) -> Work:
        self.rendezvous.scheduler.before_op(self.rank)
        line, parts = user_line(), []
        alone = self._on_current and len(messages) == 1
        for m in messages:
            me, peer = self.rank, group.members[m.peer]
            sends = m.kind == "send"
            # Each direction of a pair has its own queue, so that grouped and asynchronous messages do not wait for each other.
            stream = self.stream_now if alone else self._queue(f"{group.label}{'->' if sends else '<-'}{peer}")
            pair = (group.key, me, peer) if sends else (group.key, peer, me)
            seq = self._sequence[(*pair, m.kind)] = self._sequence.get((*pair, m.kind), -1) + 1
            self._works += 1
            what = f"{group.label}.{m.kind} number {seq} {'to' if sends else 'from'} rank {peer} of {_size(m.tensor)}"
            what += f" {m.name!r}" if m.name else ""
            self._use(m.tensor, stream, not sends, what, line)
            self.events.append(
                Transfer(
                    m.kind,
                    group.label,
                    pair[1],
                    pair[2],
                    seq,
                    m.tensor.nbytes,
                    _dtype(m.tensor),
                    stream.name,
                    self.stream_now.name,
                    self._works,
                    m.name,
                )
            )
            if self.clock is not None:
                self.clock(self.events[-1])
            parts.append((what, stream, stream.point() if self.many_streams else {}, self._works, m))
        halves = [self.rendezvous.post(group, m, line) for m in messages]
        return MessagesWork(self, [(half, *part) for half, part in zip(halves, parts)], line)

    def _communicates(self, label: str) -> VirtualStream:
        return self.stream_now if self._on_current else self._queue(label)

    def _queue(self, name: str) -> VirtualStream:
        """A communication stream, which waits for what the current stream was given before."""
        stream = self.stream(name)
        stream.merge(self.stream_now.point())
        return stream

    def _use(self, x: Tensor | None, stream: VirtualStream, writes: bool, what: str, line: str) -> None:
        if x is None or self.tracker is None:
            return
        block = getattr(x.untyped_storage(), "_emu", None)
        if block is None or block.ledger is not self.ledger:
            if x.numel():
                block = self.tracker.foreign(x, writes, what)
            if block is None:
                return
        if self.many_streams:
            stream.tick += 1
            check_use(self, block, stream, writes, what, line)


class CollectiveWork(Work):
    """A collective under way on this rank."""

    def __init__(
        self,
        device: VirtualDevice,
        meeting: Meeting,
        what: str,
        line: str,
        number: int,
        stream: VirtualStream,
        call: Call,
    ) -> None:
        self._device, self._meeting, self._call = device, meeting, call
        self._what, self._line, self._number, self._stream = what, line, number, stream.name
        self._point = stream.point() if device.many_streams else {}

    def done(self) -> bool:
        return self._meeting.done

    def wait(self) -> Any:
        _stand_still(self._device, self._meeting, self._what, self._line)
        _ordered(self._device, self._stream, self._number, self._point)
        return self._call.target


class MessagesWork(Work):
    """Some messages under way; the result is their tensors."""

    def __init__(self, device: VirtualDevice, parts: list[tuple[Any, ...]], line: str) -> None:
        self._device, self._parts, self._line = device, parts, line

    def done(self) -> bool:
        return all(part[0].done for part in self._parts)

    def wait(self) -> list[Tensor]:
        for half, what, *_ in self._parts:
            _stand_still(self._device, half, what, self._line)
        for _, _, stream, point, number, _ in self._parts:
            _ordered(self._device, stream.name, number, point)
        return [part[-1].tensor for part in self._parts]


def _stand_still(device: VirtualDevice, item: Meeting | Half, what: str, line: str) -> None:
    if item.done:
        return
    item.waiters.append(device.rank)
    scheduler = device.rendezvous.scheduler
    scheduler.block(device.rank, Waiting(what, line, item.missing), lambda: item.done)


def _ordered(device: VirtualDevice, stream: str, number: int, point: dict[str, int]) -> None:
    """The current stream waits for a work on another one."""
    if stream == device.stream_now.name:
        return
    device.stream_now.merge(point)
    device.events.append(Wait(number, device.stream_now.name))
    if device.clock is not None:
        device.clock(device.events[-1])


def _recorded(group: Group, call: Call, seq: int, stream: str, after: str, work: int) -> Collective:
    """The event for a call. Its bytes are the whole message: the larger of what is read and what is written."""
    tensor = call.source if call.source is not None else call.target
    read = call.source.nbytes if call.source is not None else 0
    written = call.target.nbytes if call.target is not None else 0
    size, sizes = max(read, written), ()
    if call.kind == "all_to_all":
        size = read
    elif call.kind == "gather":
        size = read * group.size if call.sizes is None else 0
    if tensor is not None and (call.sizes is not None or call.kind == "all_to_all"):
        length = tensor.shape[call.dim] if tensor.dim() else 1
        row = (
            read // length
            if length
            else (written // call.target.shape[call.dim] if written and call.target is not None else 0)
        )
        cut = call.sizes if call.sizes is not None else (length // group.size,) * group.size
        sizes = tuple(n * row for n in cut)
        if call.kind == "gather":
            size = sum(sizes)
    return Collective(
        call.kind,
        group.label,
        group.members,
        seq,
        size,
        sizes,
        "" if tensor is None else _dtype(tensor),
        call.op,
        call.algorithm,
        call.root,
        stream,
        after,
        work,
        call.name,
    )


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _size(x: Tensor) -> str:
    return f"{_dtype(x)}{list(x.shape)}"


def refuse_trainable(x: Tensor, rank: int, what: str) -> CrossRankAccess:
    return CrossRankAccess(
        f"rank {rank}: {what} uses a trainable tensor of shape {tuple(x.shape)} that was made outside of the program: "
        f"all ranks would share it, as no cluster can",
        "make the model inside the program, so that every rank has its own (a seed makes them alike)",
        rank=rank,
    )
