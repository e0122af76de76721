"""Communications under way on a rank: waiting for the others, and the record of what was called.

A work holds the tensors of its call, as NCCL's process group holds them until wait(): a program may drop them before. If
it drops the work, too, without waiting, they die while the communication may still use them, which freed.py tells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from emu.spmd.calls import Call, DeviceWork
from emu.trace.events import Collective, Transfer, Wait
from emu.virtual.lines import user_line
from emu.virtual.rendezvous import Half, Meeting
from emu.virtual.thread import Waiting

if TYPE_CHECKING:
    from emu.spmd.group import Group
    from emu.virtual.device import VirtualDevice
    from emu.virtual.streams import VirtualStream


class VirtualWork(DeviceWork):
    """A work of a virtual device: meetings and halves of messages, each with its event."""

    _device: VirtualDevice
    _line: str

    @abstractmethod
    def items(self) -> list[tuple[Meeting | Half, Collective | Transfer]]: ...

    def asked(self, done: bool) -> bool:
        """The program asks whether it is done. It hears how things stood when it asked, and others go on if they can."""
        device = self._device
        if device.recorder is not None:
            device.recorder.chose("done", [self], int(done))
        if not done:
            what = f"done() of {', '.join(self.told())}"
            device.rendezvous.scheduler.asks(device.rank, Waiting(what, user_line(), self.missing))
        return done

    @abstractmethod
    def told(self) -> list[str]:
        """What is under way, in words."""

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return sorted({rank for item, _ in self.items() if not item.done for rank in item.missing()})

    def first(self, many: Sequence[Sequence[DeviceWork]]) -> int:
        device, line = self._device, self._line
        works = [[item for work in parts for item in cast(VirtualWork, work).items()] for parts in many]
        scheduler, rank = device.rendezvous.scheduler, device.rank

        def done() -> list[int]:
            return [i for i, items in enumerate(works) if all(item.done for item, _ in items)]

        def ends_s(i: int) -> float:
            if device.clock is None:
                return 0.0
            return max(item.start_s + device.clock._seconds(event) for item, event in works[i])

        def missing() -> list[int]:
            return sorted({peer for items in works for item, _ in items if not item.done for peer in item.missing()})

        device.about_to("wait", f"wait_any of {len(works)}")
        scheduler.before_op(rank)
        if not done():
            for items in works:
                for item, _ in items:
                    if not item.done and rank not in item.waiters:
                        item.waiters.append(rank)
            scheduler.block(rank, Waiting(f"wait_any of {len(works)}", line, missing), lambda: bool(done()))
        # What was posted first need not end first: whoever is behind that end goes on before it is decided.
        thread = scheduler.threads[rank]
        now, thread.clock_s = thread.clock_s, max(thread.clock_s, min(map(ends_s, done())))
        scheduler.before_op(rank)
        thread.clock_s = now
        taken = min(done(), key=ends_s)
        if device.recorder is not None:
            device.recorder.chose("wait_any", [cast(VirtualWork, work) for parts in many for work in parts], taken)
        return taken


class CollectiveWork(VirtualWork):
    """A collective under way on this rank."""

    def __init__(
        self,
        device: VirtualDevice,
        meeting: Meeting,
        what: str,
        line: str,
        event: Collective,
        stream: VirtualStream,
        call: Call,
    ) -> None:
        self._device, self._meeting, self._call = device, meeting, call
        self._what, self._line, self._event = what, line, event
        self._point = stream.point() if device.many_streams else {}

    def done(self) -> bool:
        return self.asked(self._meeting.done)

    def items(self) -> list[tuple[Meeting | Half, Collective | Transfer]]:
        return [(self._meeting, self._event)]

    def told(self) -> list[str]:
        return [self._what]

    def wait(self) -> Any:
        self._device.about_to("wait", self)
        stand_still(self._device, self._meeting, self._what, self._line)
        _ordered(self._device, self._meeting, self._event, self._point)
        return self._call.target


class MessagesWork(VirtualWork):
    """Some messages under way; the result is their tensors."""

    def __init__(
        self, device: VirtualDevice, parts: list[tuple[Half, str, Transfer, dict[str, int], Tensor]], line: str
    ) -> None:
        self._device, self._parts, self._line = device, parts, line

    def done(self) -> bool:
        return self.asked(all(part[0].done for part in self._parts))

    def items(self) -> list[tuple[Meeting | Half, Collective | Transfer]]:
        return [(half, event) for half, _, event, *_ in self._parts]

    def told(self) -> list[str]:
        return [what for _, what, *_ in self._parts]

    def wait(self) -> list[Tensor]:
        self._device.about_to("wait", self)
        for half, what, *_ in self._parts:
            stand_still(self._device, half, what, self._line)
        for half, _, event, point, _ in self._parts:
            _ordered(self._device, half, event, point)
        self._device.forget_done()  # or what was sent would live on with it
        return [part[-1] for part in self._parts]


def stand_still(device: VirtualDevice, item: Meeting | Half, what: str, line: str) -> None:
    """The rank waits until all that take part have come."""
    if item.done:
        return
    item.waiters.append(device.rank)
    scheduler = device.rendezvous.scheduler
    scheduler.block(device.rank, Waiting(what, line, item.missing, item), lambda: item.done)


def _ordered(device: VirtualDevice, item: Meeting | Half, event: Collective | Transfer, point: dict[str, int]) -> None:
    """The current stream waits for a work, if that is on another one."""
    if device.clock is not None:
        device.clock.waited(item, event)
    if event.stream != device.stream_now.name:
        device.stream_now.merge(point)
        device.issue(Wait(event.work, device.stream_now.name))


def recorded(group: Group, call: Call, seq: int, stream: str, after: str, work: int) -> Collective:
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
        "" if tensor is None else dtype_name(tensor),
        call.op,
        call.algorithm,
        call.root,
        stream,
        after,
        work,
        call.name,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
