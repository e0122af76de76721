"""Streams that wait: queues of work whose start is not known yet, and the meetings of ranks that settle it.

A stream is a first-in first-out queue. Its *tail* is the time when all it was given so far is done. The tail is not
known while the stream waits for other ranks; then what follows queues up behind, and the host of the rank runs on, as
on a real device. Nothing is resolved earlier than it must be, so ranks may issue collectives of different streams in
different orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from emu.cost.collectives import Placement, collective_s, place, transfer_s
from emu.cost.errors import PricingError
from emu.hardware import Cluster
from emu.trace.events import Collective, Transfer

KERNEL, WAIT, MARK, COLLECTIVE, TRANSFERS = range(5)  # what a queue holds


class Token:
    """A time that is not known yet, and who waits for it."""

    __slots__ = ("value", "waiters")

    def __init__(self) -> None:
        self.value: float | None = None
        self.waiters: list[Lane | RankState] = []


class Lane:
    """One stream of one rank, while it cannot go on at once."""

    __slots__ = ("open_transfers", "queue", "rank", "stream", "tail")

    def __init__(self, rank: RankState, stream: str) -> None:
        self.rank = rank
        self.stream = stream
        self.tail = 0.0  # when what it finished so far was done
        self.queue: deque[tuple] = deque()
        self.open_transfers = 0


class RankState:
    """Where the simulation of one rank stands, and the times of its events."""

    __slots__ = (
        "ends",
        "events",
        "host",
        "hosts",
        "id",
        "index",
        "lanes",
        "marks",
        "moves",
        "starts",
        "tails",
        "unknown",
        "until",
        "works",
    )

    def __init__(self, rank: int, events: list) -> None:
        self.id = rank
        self.events = events
        self.index = 0  # the next event
        self.host = 0.0  # the host's clock
        self.hosts: list[float] = []  # the host's clock after every event
        self.starts = [0.0] * len(events)
        self.ends = [0.0] * len(events)
        self.moves: dict[int, float] = {}  # when a collective or transfer found all others there
        self.tails: dict[str, float | None] = {}  # of each stream; None while unknown: then its lane holds the queue
        self.lanes: dict[str, Lane] = {}
        self.works: dict[int, float | Token] = {}
        self.marks: dict[int, float | Token] = {}
        self.until: list[Token] = []  # what the host waits for
        self.unknown = 0  # how many of those are not known

    def lane(self, stream: str) -> Lane:
        """The lane of a stream, brought up to date."""
        lane = self.lanes.get(stream)
        if lane is None:
            lane = self.lanes[stream] = Lane(self, stream)
        tail = self.tails.get(stream, 0.0)
        if tail is not None:
            lane.tail = tail
        return lane

    def position(self, stream: str) -> float | Token:
        """When all that a stream was given so far is done."""
        tail = self.tails.get(stream, 0.0)
        if tail is not None:
            return tail
        token = Token()
        self.lanes[stream].queue.append((MARK, token))
        return token


class Half(NamedTuple):
    """One rank's half of a transfer, as it is posted."""

    index: int  # position in the rank's record
    host_s: float  # when the host had launched it
    event: Transfer
    done: Token
    total_bytes: int  # all that is posted together in this direction, and shares the device's link


class Meeting:
    """A collective that some members have reached."""

    __slots__ = ("latest_s", "needs", "parts")

    def __init__(self, needs: int) -> None:
        self.needs = needs
        self.parts: dict[int, tuple[Lane, int, Collective, Token]] = {}
        self.latest_s = 0.0


class Streams:
    """All waiting streams of a trace; `settle` lets them go as far as they can."""

    def __init__(self, cluster: Cluster, states: Mapping[int, RankState]) -> None:
        self.cluster = cluster
        self.states = states
        self.runnable: deque[RankState] = deque()  # ranks whose host was waiting and need not any more
        self._work: list[Lane] = []
        self.meetings: dict[tuple[int, int], Meeting] = {}  # collectives some members have reached, by group and seq
        self.halves: dict[tuple[str, int, int, int], tuple[Lane, Half, float]] = {}  # transfers one rank has reached
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        # by label and identity of members, as hashing many members for every event is slow
        self._group_of: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self._present: list[int] = []
        self._places: list[Placement] = []
        self._seconds: dict[tuple, float] = {}

    def give(self, lane: Lane, item: tuple) -> None:
        """Adds an item to a stream's queue; it starts at once if nothing is in the way."""
        lane.queue.append(item)
        if lane.rank.tails.get(lane.stream, 0.0) is not None:
            lane.rank.tails[lane.stream] = None
            self._work.append(lane)
            self._settle()

    def _settle(self) -> None:
        work = self._work
        while work:
            self._drain(work.pop())

    def _drain(self, lane: Lane) -> None:
        rank, queue, tail = lane.rank, lane.queue, lane.tail
        while queue:
            item = queue[0]
            code = item[0]
            if code == KERNEL:
                _, index, host_s, duration_s = item
                if host_s > tail:
                    tail = host_s
                rank.starts[index] = tail
                tail += duration_s
                rank.ends[index] = tail
            elif code == MARK:
                self._resolve(item[1], tail)
            else:
                needed = item[1]
                if type(needed) is Token:
                    if needed.value is None:
                        needed.waiters.append(lane)
                        lane.tail = tail
                        return
                    needed = needed.value
                if needed > tail:
                    tail = needed
                if code != WAIT:
                    queue.popleft()
                    lane.tail = tail
                    (self._arrive if code == COLLECTIVE else self._post)(lane, *item[2:])
                    return  # the meeting lets the lane go on, now or later
            queue.popleft()
        lane.tail = tail
        rank.tails[lane.stream] = tail

    def _resolve(self, token: Token, value: float) -> None:
        token.value = value
        for waiter in token.waiters:
            if isinstance(waiter, Lane):
                self._work.append(waiter)
            else:
                waiter.unknown -= 1
                if not waiter.unknown:
                    self.runnable.append(waiter)

    def _group(self, event: Collective) -> int:
        """A number for the group: label and members."""
        members = event.members
        known = self._group_of.get((event.group, id(members)))
        if known is None:
            group = self._groups.get((event.group, members))
            if group is None:
                group = self._groups[event.group, members] = len(self._groups)
                self._present.append(sum(m in self.states for m in members))
                self._places.append(place(members, self.cluster))
            known = self._group_of[event.group, id(members)] = group, members  # keeps members, so its id stays theirs
        return known[0]

    def _arrive(self, lane: Lane, index: int, host_s: float, event: Collective, token: Token) -> None:
        """A member's kernel of a collective starts; the last one settles it for all."""
        rank, group = lane.rank, self._group(event)
        if host_s > lane.tail:
            lane.tail = host_s
        rank.starts[index] = lane.tail
        meeting = self.meetings.get((group, event.seq))
        if meeting is None:
            meeting = self.meetings[group, event.seq] = Meeting(self._present[group])
        elif rank.id in meeting.parts:
            raise _twice(rank.id, f"collective {event.seq} of group {event.group!r}")
        meeting.parts[rank.id] = lane, index, event, token
        if lane.tail > meeting.latest_s:
            meeting.latest_s = lane.tail
        if len(meeting.parts) < meeting.needs:
            return
        del self.meetings[group, event.seq]
        start_s = meeting.latest_s
        end_s = start_s + self._collective_s(group, meeting.parts)
        for other, number, _, done in meeting.parts.values():
            other.rank.moves[number] = start_s
            other.rank.ends[number] = other.tail = end_s
            self._resolve(done, end_s)
            self._work.append(other)

    def _collective_s(self, group: int, parts: Mapping[int, tuple]) -> float:
        first = next(iter(parts))
        event: Collective = parts[first][2]
        for rank, (_, _, part, _) in parts.items():
            if part.kind != event.kind:
                raise PricingError(
                    f"ranks disagree about collective {event.seq} of group {event.group!r}: "
                    f"rank {first} calls {event.kind}, rank {rank} calls {part.kind}",
                    "all members of a group must call the same collectives in the same order",
                    group=event.group,
                    seq=event.seq,
                )
            if part.bytes > event.bytes:  # off the root, a rank may know its own piece only
                event = part
        key: tuple = (group, event.kind, event.bytes, event.sizes, event.algorithm, event.root)
        others = None
        if event.kind == "all_to_all":  # members send different amounts
            others = {rank: part[2] for rank, part in parts.items()}
            key += tuple((rank, other.bytes, other.sizes) for rank, other in others.items())
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = collective_s(event, self.cluster, others, self._places[group])
        return seconds

    def _post(self, lane: Lane, halves: list[Half]) -> None:
        """Transfers posted together on one stream: each starts when both ranks are there."""
        rank, base_s = lane.rank, lane.tail
        lane.open_transfers = len(halves)
        for half in halves:
            event = half.event
            arrival_s = rank.starts[half.index] = max(base_s, half.host_s)
            mine = lane, half, arrival_s
            key = (event.group, event.src, event.dst, event.seq)
            theirs = self.halves.pop(key, None)
            if theirs is not None and theirs[1].event.kind == event.kind:
                raise _twice(rank.id, f"{event.kind} {event.seq} from rank {event.src} to rank {event.dst}")
            if theirs is None and (event.dst if event.kind == "send" else event.src) in self.states:
                self.halves[key] = mine
            else:  # both are there, or the other is symbolic and on time
                self._meet(mine, theirs)

    def _meet(self, mine: tuple[Lane, Half, float], theirs: tuple[Lane, Half, float] | None) -> None:
        both = (mine,) if theirs is None else (mine, theirs)
        event = mine[1].event
        start_s = max(arrival_s for _, _, arrival_s in both)
        busiest_bytes = max(half.total_bytes for _, half, _ in both)
        key = ("transfer", event.src, event.dst, event.bytes, busiest_bytes)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = transfer_s(event, self.cluster, busiest_bytes)
        end_s = start_s + seconds
        for lane, half, _ in both:
            lane.rank.moves[half.index] = start_s
            lane.rank.ends[half.index] = end_s
            if end_s > lane.tail:
                lane.tail = end_s
            self._resolve(half.done, end_s)
            lane.open_transfers -= 1
            if not lane.open_transfers:
                self._work.append(lane)


def _twice(rank: int, what: str) -> PricingError:
    return PricingError(
        f"rank {rank} has {what} twice", "sequence numbers count the calls of a group: the trace is damaged", rank=rank
    )
