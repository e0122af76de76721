"""Where ranks meet: collectives and messages are matched here, checked against each other, and carried out.

The last to arrive carries the operation out, on everyone's buffers, outside of every rank's accounting. Nobody's data
moves before all have arrived and agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from emu.spmd.calls import Call, Message
from emu.spmd.errors import CollectiveMismatch, DataDependent
from emu.virtual.causes.likely import Cause, of_lengths
from emu.virtual.diagnosis import called, cure, deadlock, described, left_open, named, parted
from emu.virtual.lines import user_line
from emu.virtual.maths import carry_out, cuts_of
from emu.virtual.scheduler import Scheduler
from emu.virtual.thread import Waiting

if TYPE_CHECKING:
    from emu.spmd.group import Group


class Meeting:
    """One collective of one group, from its first arrival to its completion."""

    __slots__ = ("calls", "done", "group", "lines", "present", "seq", "start_s", "waiters")

    def __init__(self, group: Group, seq: int, present: list[int]) -> None:
        self.group = group
        self.seq = seq
        self.present = present  # group ranks that run
        self.calls: dict[int, Call] = {}  # by group rank
        self.lines: dict[int, str] = {}
        self.waiters: list[int] = []  # global ranks to wake
        self.done = False
        self.start_s = 0.0  # when, by the ranks' clocks, the last of them came

    def missing(self) -> list[int]:
        return [self.group.members[i] for i in self.present if i not in self.calls]


class Half:
    """One half of a message, until the other half comes."""

    __slots__ = ("done", "line", "message", "peer", "rank", "start_s", "waiters")

    def __init__(self, message: Message, rank: int, peer: int, line: str) -> None:
        self.message, self.rank, self.peer, self.line = message, rank, peer, line
        self.waiters: list[int] = []
        self.done = False
        self.start_s = 0.0

    def missing(self) -> list[int]:
        return [] if self.done else [self.peer]


class Rendezvous:
    """All meetings of one launch. `line_of` tells where a communication was called, for messages."""

    line_of = staticmethod(user_line)

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._meetings: dict[tuple[Any, int], Meeting] = {}
        self._halves: dict[tuple[Any, int, int], tuple[deque[Half], deque[Half]]] = {}
        self._presents: dict[Any, list[int]] = {}
        self._words: dict[tuple[Any, int, int], deque[list[int]]] = {}
        self._calls: defaultdict[int, Counter[Any]] = defaultdict(Counter)  # of each rank, from which lines, by group
        scheduler.describe = partial(deadlock, calls=self._calls)

    def join(self, group: Group, seq: int, call: Call, line: str) -> Meeting:
        """Adds a rank's call to the seq-th collective of its group; the last one carries it out.

        Raises:
            CollectiveMismatch: it does not agree with what another member called.
        """
        self._calls[group.members[group.rank]][group.key, line.partition(" ")[0]] += 1
        key = (group.key, seq)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(group, seq, self._present(group))
        else:
            self._agree(meeting, group, call, line)
        meeting.calls[group.rank] = call
        meeting.lines[group.rank] = line
        meeting.start_s = max(meeting.start_s, self.scheduler.threads[group.members[group.rank]].clock_s)
        if len(meeting.calls) == len(meeting.present):
            del self._meetings[key]
            calls = [meeting.calls[i] for i in meeting.present]
            tensor = next((t for c in calls for t in (c.source, c.target) if t is not None), None)
            if tensor is not None and not tensor.is_meta:
                with torch.no_grad(), torch._C._DisableTorchDispatch():
                    self.carry_out(group, calls, line)
            self._complete(meeting)
            meeting.calls.clear()  # the buffers belong to the ranks again
        return meeting

    def _present(self, group: Group) -> list[int]:
        """Group ranks that run; the others are symbolic, and taken to do their part in time."""
        present = self._presents.get(group.key)
        if present is None:
            threads = self.scheduler.threads
            present = self._presents[group.key] = [i for i, m in enumerate(group.members) if m in threads]
        return present

    def post(self, group: Group, message: Message, line: str) -> Half:
        """Posts one half of a message; with both halves there, the data moves.

        Raises:
            CollectiveMismatch: the halves disagree in shape, dtype or name.
        """
        me, peer = group.members[group.rank], group.members[message.peer]
        sends = message.kind == "send"
        pair = (group.key, me, peer) if sends else (group.key, peer, me)
        queues = self._halves.setdefault(pair, (deque(), deque()))
        half = Half(message, me, peer, line)
        half.start_s = self.scheduler.threads[me].clock_s
        if peer not in self.scheduler.threads:  # symbolic: its half is taken for granted
            half.done = True
            return half
        mine, theirs = queues if sends else queues[::-1]
        if not theirs:
            mine.append(half)
            return half
        other = theirs.popleft()
        source, target = (half, other) if sends else (other, half)
        a, b = source.message.tensor, target.message.tensor
        if a.shape != b.shape or a.dtype != b.dtype or source.message.name != target.message.name:
            cause = self._out_of_order(half, other, theirs)
            raise CollectiveMismatch(
                f"message {pair[1]}->{pair[2]} in group {group.label!r}: rank {pair[1]} sends {described(a)}"
                f"{named(source.message.name)} ({source.line}), rank {pair[2]} expects {described(b)}"
                f"{named(target.message.name)} ({target.line}){cause or ''}",
                "make both sides name the same shape and dtype, and post messages of a pair in the same order",
                ranks=(pair[1], pair[2]),
                sites={pair[1]: source.line, pair[2]: target.line},
                cause=cause,
            )
        if not a.is_meta:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                self.deliver(group, b, a, source.line)
        half.start_s = other.start_s = max(half.start_s, other.start_s)
        for end in (half, other):
            self._complete(end)
        return half

    def _out_of_order(self, half: Half, other: Half, queue: Sequence[Half]) -> Cause | None:
        """A later message of the other side is the one that this half belongs to."""
        mine = half.message
        for later in queue:
            x = later.message
            if (x.tensor.shape, x.tensor.dtype, x.name) == (mine.tensor.shape, mine.tensor.dtype, mine.name):
                verb = "sends" if x.kind == "send" else "expects"
                return Cause(
                    "order",
                    later.line,
                    f"the two sides post their messages in another order: what fits {half.line} is what rank {later.rank} "
                    f"{verb} at {later.line}, after {other.line}",
                )
        return None

    def tell(self, group: Group, words: list[int], dst: int) -> None:
        me, peer = group.members[group.rank], group.members[dst]
        self._words.setdefault((group.key, me, peer), deque()).append(words)
        if peer in self.scheduler.threads:
            self.scheduler.wake(peer)

    def told(self, group: Group, src: int) -> list[int]:
        """What a member tells this rank next.

        Raises:
            DataDependent: a member that does not run, and so tells nothing.
        """
        me, peer = group.members[group.rank], group.members[src]
        if peer not in self.scheduler.threads:
            raise DataDependent(
                f"rank {me} must hear from rank {peer} what shape it sends, but rank {peer} does not run",
                f"let it run, too: emu.launch(..., ranks=[{peer}, {me}])",
            )
        words = self._words.setdefault((group.key, peer, me), deque())
        if not words:
            waiting = Waiting(f"{group.label}: a shape from rank {peer}", self.line_of(), lambda: [peer])
            self.scheduler.block(me, waiting, lambda: bool(words))
        return words.popleft()

    def carry_out(self, group: Group, calls: Sequence[Call], line: str) -> None:
        """Moves the data of a collective, outside of every rank's accounting. `line` is the last caller's."""
        carry_out(calls)

    def deliver(self, group: Group, target: torch.Tensor, source: torch.Tensor, line: str) -> None:
        """Moves the data of a message. `line` is the sender's."""
        target.copy_(source)

    def _complete(self, item: Meeting | Half) -> None:
        item.done = True
        for rank in sorted(item.waiters):
            self.scheduler.wake(rank)
        item.waiters.clear()

    def _agree(self, meeting: Meeting, group: Group, call: Call, line: str) -> None:
        i, other = next(iter(meeting.calls.items()))
        if call.kind != "all_to_all" and _alike(call, other):
            return
        mine, theirs = _signature(call), _signature(other)
        me, them = group.members[group.rank], group.members[i]
        for field, value in mine.items():
            if value != theirs.get(field):
                what = f"{group.label}.{call.kind}" if call.kind == other.kind else f"group {group.label!r}"
                cause = parted(me, line, them, meeting.lines[i], self.scheduler.threads[them], meeting, self._calls)
                if cause is None and field == "shape":
                    cause = of_lengths(mine["shape"], theirs["shape"], group.rank, i, group.size)
                raise CollectiveMismatch(
                    f"{what}: collective number {meeting.seq} of {list(group.members)} differs between ranks in its "
                    f"{field}: rank {them} called {called(other)} ({meeting.lines[i]}), "
                    f"rank {me} called {called(call)} ({line}){cause or ''}",
                    cure(field),
                    ranks=(them, me),
                    field=field,
                    sites={them: meeting.lines[i], me: line},
                    cause=cause,
                )
        if call.kind == "all_to_all":
            for j, other in meeting.calls.items():
                self._splits(meeting, group, call, line, j, other)

    def _splits(self, meeting: Meeting, group: Group, call: Call, line: str, j: int, other: Call) -> None:
        """What one rank sends another must be what that one expects."""
        for (a, i), (b, k) in (((call, group.rank), (other, j)), ((other, j), (call, group.rank))):
            assert a.source is not None and b.target is not None
            sent = cuts_of(a, a.source.shape[a.dim], group.size)[k]
            expected = b.recv_sizes[i] if b.recv_sizes is not None else b.target.shape[b.dim] // group.size
            if sent != expected:
                src, dst = group.members[i], group.members[k]
                raise CollectiveMismatch(
                    f"{group.label}.all_to_all number {meeting.seq}: pair ({src}->{dst}): rank {src} sent {sent} "
                    f"({line if a is call else meeting.lines[j]}), rank {dst} expected {expected} "
                    f"({line if b is call else meeting.lines[j]})",
                    "recv_sizes on one side must be send_sizes on the other, transposed",
                    ranks=(src, dst),
                    sent=sent,
                    expected=expected,
                )

    def close(self) -> None:
        """Every rank has ended well.

        Raises:
            RankLeft: a communication that was started and never waited for is one that not all members joined.
        """
        open_: list[tuple[str, str, list[int], list[int]]] = []
        for meeting in self._meetings.values():
            i, call = next(iter(meeting.calls.items()))
            what = f"{meeting.group.label}.{call.kind} number {meeting.seq}"
            open_.append((what, meeting.lines[i], [meeting.group.members[j] for j in meeting.calls], meeting.missing()))
        for (key, *_), queues in self._halves.items():
            for half in (*queues[0], *queues[1]):
                toward = "to" if half.message.kind == "send" else "from"
                what = f"{key[0]}.{half.message.kind} {toward} rank {half.peer} of {described(half.message.tensor)}"
                open_.append((what, half.line, [half.rank], half.missing()))
        if open_:
            raise left_open(open_)


def _alike(a: Call, b: Call) -> bool:
    """Whether two calls agree in everything: the usual case, told cheaply."""
    x, y = a.source, b.source
    return (
        a.kind == b.kind
        and a.op == b.op
        and a.name == b.name
        and (a.dim, a.sizes, a.root, a.by, a.algorithm) == (b.dim, b.sizes, b.root, b.by, b.algorithm)
        and (x is y if x is None or y is None else x.shape == y.shape and x.dtype == y.dtype)
    )


def _signature(call: Call) -> dict[str, Any]:
    """What every member must say alike. A shape counts only as far as members share it."""
    x = call.source
    shape: Any = tuple(x.shape) if x is not None else ()
    if (call.kind in ("all_gather", "gather", "ring_shift") and call.sizes is not None) or call.kind == "all_to_all":
        shape = (*shape[: call.dim], "any", *shape[call.dim + 1 :])
    return {
        "kind": call.kind,
        "shape": shape,
        "dtype": None if x is None else x.dtype,
        "op": call.op,
        "root": call.root,
        "dim": call.dim,
        "sizes": None if call.kind == "all_to_all" else call.sizes,
        "shift": call.by,
        "algorithm": call.algorithm,
        "name": call.name,
    }
