"""One rank's virtual device: its streams, its memory, its record, and its side of every communication."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from emu.spmd.calls import Call, Message, Work
from emu.trace.events import Collective, Event, Free, HostFree, HostWait, Kernel, Mark, Transfer
from emu.virtual.clock import Clock
from emu.virtual.diagnosis import described
from emu.virtual.freed import tell_at_end
from emu.virtual.hbm import Ledger
from emu.virtual.host import HostBlock, copy_from_host, copy_to_host, device_memory
from emu.virtual.lines import handling
from emu.virtual.rendezvous import Half, Meeting, Rendezvous
from emu.virtual.streams import DEFAULT, VirtualEvent, VirtualStream, check_use, uses_of
from emu.virtual.thread import Stop
from emu.virtual.works import CollectiveWork, MessagesWork, dtype_name, recorded, stand_still, tensors_in

if TYPE_CHECKING:
    from emu.spmd.group import Group
    from emu.virtual.tracker import Tracker
    from emu.virtual.uses import Recorder


_ROOTED = ("broadcast", "reduce")  # in place, on a root


class _OnCurrent:
    """While it is entered, communication takes place on the current stream."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


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
        self.ledger.device = weakref.ref(self)
        self.channel = self
        self.rendezvous = rendezvous
        self.tracker: Tracker | None = None
        self.host_seen: dict[str, int] = {}
        self.alone_until = 0  # tick of the default stream up to which nobody noted who wrote what
        self.many_streams = False
        self._host_waited = 0  # how many events came before the host last waited
        self._streams: dict[str, VirtualStream] = {}
        self.stream_now = self._streams[DEFAULT] = VirtualStream(DEFAULT, self)
        self._sequence: dict[Any, int] = {}
        self._works = self._event_count = self._host_blocks = 0
        self._under_way: list[tuple[str, int, Meeting | Half, str, str]] = []  # stream, its tick, and what to wait for
        self._synchronous = _OnCurrent()
        # What a tier's arithmetic does inside a kernel.
        self.inside_kernel: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.clock: Clock | None = None  # for order="time"
        self.recorder: Recorder | None = None  # if uses are recorded
        self.uses_of = uses_of

    def issue(self, event: Event, line: str | None = None) -> None:
        """Adds to the record what the program calls; and at which line, if uses are recorded, too."""
        self.events.append(event)
        if self.recorder is not None:
            self.recorder.at(line)

    def about_to(self, kind: str, what: Any) -> None:
        """Where a stepper may stop a rank, besides ops and communications: a wait that is part of a call is none."""
        scheduler = self.rendezvous.scheduler
        if scheduler.stop is not None and not (kind == "wait" and self._synchronous.depth):
            scheduler.stop(self.rank, Stop(kind, what))

    # The Device protocol.

    def stream(self, name: str) -> VirtualStream:
        if name not in self._streams:
            self.count_uses()
            self._streams[name] = VirtualStream(name, self)
        return self._streams[name]

    def count_uses(self) -> None:
        """From here on the order of uses matters: there is a second stream, or an event that one will wait for."""
        if not self.many_streams:
            self.many_streams = True
            self.alone_until = self._streams[DEFAULT].tick = 1
            if not any(type(event) in (Kernel, Collective, Transfer) for event in self.events[self._host_waited :]):
                self.host_sees({DEFAULT: 1})  # the host has waited for all there is

    def event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def next_event(self) -> int:
        self._event_count += 1
        return self._event_count

    @contextmanager
    def kernel(self, name: str, flops: int | None, bytes: int | None, dtype: torch.dtype | None) -> Iterator[None]:
        self.about_to("kernel", name)
        tracked = self.tracker.one_kernel(name, flops, bytes, dtype) if self.tracker else nullcontext()
        with self.inside_kernel(), tracked:
            yield

    def watch(self, module: nn.Module, name: str) -> None:
        if self.tracker is not None:
            self.tracker.watch(module, name)

    def account(self, tensor: Tensor, category: str, scope: str) -> None:
        if self.tracker is not None:
            self.tracker.declare(tensor, category, scope)

    def mark(self, name: str) -> None:
        self.about_to("mark", name)
        self.events.append(Mark(name))

    @property
    def current_stream(self) -> str:
        return self.stream_now.name

    def copy_to_host(self, x: Tensor, name: str) -> HostBlock:
        self.about_to("host", f"to_host {name}".rstrip())
        self._host_blocks += 1
        return copy_to_host(self, x, self._host_blocks, name)

    def device_memory(self, memory: HostBlock) -> Tensor:
        return device_memory(self, memory)

    def copy_from_host(self, memory: HostBlock, x: Tensor, name: str) -> None:
        self.about_to("host", f"from_host {name}".rstrip())
        copy_from_host(self, memory, x, name)

    def synchronize(self) -> None:
        self.about_to("host", "synchronize")
        self.host_wait(None, "synchronize")

    def host_wait(self, stream: VirtualStream | None, reason: str) -> None:
        """The host waits for a stream, or for all: what it gives to any stream afterwards comes after that."""
        for s in list(self._streams.values()) if stream is None else (stream,):
            self.settle(s.point())
            self.host_sees(s.point())
        self._host_waited = len(self.events)
        self.issue(HostWait("" if stream is None else stream.name, reason))

    def settle(self, point: dict[str, int]) -> None:
        """The rank stands still until the communications up to this point of the streams have been carried out.

        A real host would run on, and its stream wait; here what comes next reads its operands at once.
        """
        if self._under_way:
            self.forget_done()
            for name, tick, item, what, line in self._under_way:
                if tick <= point.get(name, 0):
                    stand_still(self, item, what, line)

    def forget_done(self) -> None:
        """Communications that were carried out are under way no longer."""
        self._under_way = [entry for entry in self._under_way if not entry[2].done]

    def host_sees(self, point: dict[str, int]) -> None:
        for name, tick in point.items():
            if self.host_seen.get(name, -1) < tick:
                self.host_seen[name] = tick
        for s in self._streams.values():
            s.merge(self.host_seen)

    def hands_over(self, result: Any) -> None:
        """The program returns a result: what is still in flight in it would be read too early, or was freed too early."""
        if self.tracker is None or not self.many_streams:
            return
        for x in tensors_in(result):
            block = getattr(x.untyped_storage(), "_emu", None) if x.layout is torch.strided else None
            if block is not None and block.ledger is self.ledger:
                check_use(self, block, self.stream_now, x, False, "the result", None)
        tell_at_end(self)

    def end(self) -> None:
        """The program is over. What dies with its last frame is not part of the record: some of it may outlive it."""
        self.ledger.closed = True
        if self.recorder is not None:
            self.recorder.end()
        while self.events and type(self.events[-1]) in (Free, HostFree):
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

    def synchronous(self) -> _OnCurrent:
        return self._synchronous

    def collective(self, group: Group, call: Call) -> Work:
        self.rendezvous.scheduler.before_communication(self.rank, Stop("collective", group, call))
        line = self.rendezvous.line_of() + handling()
        seq = self._sequence[group.key] = self._sequence.get(group.key, -1) + 1
        stream = self._communicates(group.label, self._synchronous.depth > 0)
        what = f"{group.label}.{call.kind} number {seq}"
        self._works += 1
        work = self._works
        # In place, a broadcast's root only reads, and a reduction writes on its root alone.
        only_reads = (call.kind == "broadcast") is (call.root == group.rank) if call.kind in _ROOTED else False
        event = recorded(group, call, seq, stream.name, self.stream_now.name, work)
        self.issue(event, line)
        self._use(call.source, stream, call.target is call.source and not only_reads, what, line)
        if call.target is not call.source:
            self._use(call.target, stream, True, what, line)
        meeting = self.rendezvous.join(group, seq, call, line)
        self._issued(stream, meeting, what, line)
        return CollectiveWork(self, meeting, what, line, event, stream, call)

    def messages(self, group: Group, messages: list[Message]) -> Work:
        self.rendezvous.scheduler.before_communication(self.rank, Stop("messages", group, messages))
        line, parts, queues = self.rendezvous.line_of() + handling(), [], []
        alone = self._synchronous.depth > 0 and len(messages) == 1
        for m in messages:
            me, peer = self.rank, group.members[m.peer]
            sends = m.kind == "send"
            # Each direction of a pair has its own queue, so that grouped and asynchronous messages do not wait for each other.
            stream = self._communicates(f"{group.label}{'->' if sends else '<-'}{peer}", alone)
            pair = (group.key, me, peer) if sends else (group.key, peer, me)
            seq = self._sequence[(*pair, m.kind)] = self._sequence.get((*pair, m.kind), -1) + 1
            self._works += 1
            what = (
                f"{group.label}.{m.kind} number {seq} {'to' if sends else 'from'} rank {peer} of {described(m.tensor)}"
            )
            what += f" {m.name!r}" if m.name else ""
            after = self.stream_now.name
            event = Transfer(
                *(m.kind, group.label, pair[1], pair[2], seq, m.tensor.nbytes, dtype_name(m.tensor)),
                *(stream.name, after, self._works, m.name),
            )
            self.issue(event, line)
            self._use(m.tensor, stream, not sends, what, line)
            parts.append((what, event, stream.point() if self.many_streams else {}, m.tensor))
            queues.append(stream)
        halves = [self.rendezvous.post(group, m, line) for m in messages]
        for half, stream, (what, *_) in zip(halves, queues, parts):
            self._issued(stream, half, what, line)
        return MessagesWork(self, [(half, *part) for half, part in zip(halves, parts)], line)

    def tell(self, group: Group, words: list[int], dst: int) -> None:
        self.rendezvous.tell(group, words, dst)

    def told(self, group: Group, src: int) -> list[int]:
        return self.rendezvous.told(group, src)

    def _issued(self, stream: VirtualStream, item: Meeting | Half, what: str, line: str) -> None:
        if not item.done and not self._synchronous.depth:
            self._under_way.append((stream.name, stream.tick, item, what, line))

    def _communicates(self, name: str, here: bool) -> VirtualStream:
        """Where a communication takes place: here on the current stream, or on one that waits for what this was given.

        Each gets its own tick of its stream, whether or not it uses bytes that anyone notes: an empty tensor has none.
        Without a tick, whoever waited for what the stream was given before would wait for this, too.
        """
        stream = self.stream_now if here else self.stream(name)
        if not here:
            stream.merge(self.stream_now.point())
        if self.many_streams:
            stream.tick += 1
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
            check_use(self, block, stream, x, writes, what, line, self._works)
