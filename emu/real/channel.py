"""A rank's communication over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from emu.real.agree import check_collective, check_message, move_message
from emu.real.board import Board, Waiting
from emu.real.lanes import Pending, StreamLane, ThreadLane
from emu.real.lines import user_line
from emu.real.links import Links
from emu.real.moves import move
from emu.real.records import collective_event, ends, transfer_event
from emu.spmd.calls import Call, DeviceWork, Message, Work
from emu.spmd.group import Group
from emu.trace.events import Wait

if TYPE_CHECKING:
    from emu.real.device import RealDevice

LOOK_S = 0.001  # between two looks at several works, of which the first is wanted


class RealChannel:
    """The Channel of a real device.

    Every group has a lane of its own, and so has each direction between two ranks of a group, as on virtual devices.
    The backend chooses its algorithm, and with it the order of sums: `algorithm` is compared and recorded, not obeyed.

    Args:
        device: whose it is; it keeps the streams and the record.
        links: how members connect.
        board: what ranks know of each other.
        checked: whether calls are compared between ranks before data moves (agree.py). Over NCCL each comparison
            makes the host wait for the other ranks.
    """

    def __init__(self, device: RealDevice, links: Links, board: Board, checked: bool) -> None:
        self.checked = checked
        self._device, self._links, self._board = device, links, board
        self._lanes: dict[Any, ThreadLane | StreamLane] = {}
        self._issued = board.issued
        self._works = 0
        self._on_current = False

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return like.new_empty(shape)

    @contextmanager
    def synchronous(self) -> Iterator[None]:
        outer, self._on_current = self._on_current, True
        try:
            yield
        finally:
            self._on_current = outer

    def collective(self, group: Group, call: Call) -> Work:
        line, key = user_line(), repr(group.key)
        seq = self._count(key)
        device = self._device
        stream = device.current if self._on_current else group.label
        self._works += 1
        device.events.append(collective_event(group, call, seq, stream, device.current, self._works))

        def job() -> None:
            if group.size == 1:
                if call.target is not None and call.target is not call.source and call.source is not None:
                    call.target.copy_(call.source)
                return
            link = self._links.of(key, group.members)
            if self.checked:
                check_collective(link, group, call, seq, line)
            move(link, call)

        waiting = Waiting(f"{group.label}.{call.kind} number {seq}", line, seq, dict.fromkeys(group.members, key))
        pending = self._give(key, stream, job)
        return self._under_way([(pending, waiting, stream, self._works)], lambda: call.target)

    def messages(self, group: Group, messages: list[Message]) -> Work:
        line, parts, device = user_line(), [], self._device
        alone = self._on_current and len(messages) == 1
        for m in messages:
            src, dst = ends(group, m)
            arrow, peer = ("->", dst) if m.kind == "send" else ("<-", src)
            stream = device.current if alone else f"{group.label}{arrow}{peer}"
            pair = f"{group.key!r} {src}->{dst} "
            other = pair + ("recv" if m.kind == "send" else "send")
            seq = self._count(pair + m.kind)
            self._works += 1
            device.events.append(transfer_event(group, m, seq, stream, device.current, self._works))
            what = f"{group.label}.{m.kind} number {seq} {'to' if m.kind == 'send' else 'from'} rank {peer}"
            pending = self._give(pair + m.kind, stream, self._message_job(group, m, src, dst, line))
            parts.append((pending, Waiting(what, line, seq, {peer: other}), stream, self._works))
        return self._under_way(parts, lambda: [m.tensor for m in messages])

    def tell(self, group: Group, words: list[int], dst: int) -> None:
        pair = f"{group.key!r} {group.members[group.rank]}->{group.members[dst]} "
        self._links.tell(f"{pair}{self._count(pair + 'tell')}", words)

    def told(self, group: Group, src: int) -> list[int]:
        peer = group.members[src]
        pair, heard = f"{group.key!r} {peer}->{group.members[group.rank]} ", list[int]()
        seq = self._count(pair + "told")
        if pair not in self._lanes:
            self._lanes[pair] = ThreadLane(pair)
        pending = self._lanes[pair].submit(lambda: heard.extend(self._links.told(f"{pair}{seq}")))
        waiting = Waiting(f"{group.label}: a shape from rank {peer}", user_line(), seq, {peer: pair + "tell"})
        self._board.wait(pending, waiting)
        return heard

    def _message_job(self, group: Group, m: Message, src: int, dst: int, line: str) -> Callable[[], None]:
        def job() -> None:
            link = self._links.of(f"{group.key!r} {src}->{dst}", sorted((src, dst)))
            if self.checked:
                check_message(link, group, m, line)
            move_message(link, group, m)

        return job

    def _count(self, key: str) -> int:
        self._issued[key] = self._issued.get(key, 0) + 1
        return self._issued[key] - 1

    def _give(self, key: str, stream: str, job: Callable[[], None]) -> Pending:
        if self._links.nccl:
            return StreamLane(self._device.stream(stream).cuda).submit(job)
        if key not in self._lanes:
            self._lanes[key] = ThreadLane(key)
        return self._lanes[key].submit(job)

    def _under_way(self, parts: list[Any], result: Callable[[], Any]) -> RealWork:
        work = RealWork(self._device, self._board, parts, result)
        if not self._on_current:
            for _, _, stream, _ in parts:
                self._device.occupy(stream, work)
        return work

    def close(self) -> None:
        """Ends the lanes; nothing may be under way."""
        for lane in self._lanes.values():
            lane.close()


class RealWork(DeviceWork):
    """Collectives or messages under way on this rank."""

    def __init__(self, device: RealDevice, board: Board, parts: list[Any], result: Callable[[], Any]) -> None:
        self._device, self._board, self._parts, self._result = device, board, parts, result

    def done(self) -> bool:
        return all(pending.finished(0) for pending, *_ in self._parts)

    def wait(self) -> Any:
        self.settle()
        for _, _, stream, number in self._parts:
            if stream != self._device.current:
                self._device.events.append(Wait(number, self._device.current))
        return self._result()

    def first(self, many: Sequence[Sequence[DeviceWork]]) -> int:
        """As it happens: which comes first may differ from run to run."""
        pending = FirstOf([[p for work in parts for p, *_ in cast(RealWork, work)._parts] for parts in many])
        # Who else is needed is left open: any one of them is enough, so none of them alone makes a deadlock.
        self._board.wait(pending, Waiting(f"wait_any of {len(many)}", self._parts[0][1].where, 0, {}))
        return pending.index

    def settle(self) -> None:
        """Waits without recording it."""
        for pending, waiting, stream, _ in self._parts:
            self._board.wait(pending, waiting)
            self._device.release(stream, self)


class FirstOf:
    """Some lists of jobs, of which one has to be finished."""

    def __init__(self, many: list[list[Pending]]) -> None:
        self._many = many
        self.index = -1

    def finished(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while self.index < 0:
            self.index = next((i for i, jobs in enumerate(self._many) if all(job.finished(0) for job in jobs)), -1)
            if time.monotonic() >= until:
                break
            if self.index < 0:
                time.sleep(LOOK_S)
        return self.index >= 0

    def result(self) -> None:
        """Nothing yet: the work that is chosen is waited for by itself."""
