"""Communication: ranks that meet for a collective or a transfer, and the data that then moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from emu.cost.clock import Task
from emu.cost.collectives import Placement, collective_s, place
from emu.cost.errors import PricingError
from emu.cost.links import Flow
from emu.cost.loads import (
    CORES,
    CORES_BETWEEN_NODES,
    Load,
    collective_load,
    held_share,
    host_copy_load,
    transfer_load,
)
from emu.cost.streams import COLLECTIVE, COPY, Lane, RankState, Token
from emu.trace.events import Collective, HostCopy, Transfer

if TYPE_CHECKING:
    from emu.cost.engine import Engine


class Half(NamedTuple):
    """One rank's half of a transfer, as it is posted."""

    index: int  # position in the rank's record
    host_s: float  # when the host had launched it
    event: Transfer
    done: Token
    total_bytes: int  # all that is posted together in this direction, and shares the device's link


class Posting(Task):
    """A half that its host is still launching."""

    __slots__ = ("half", "lane", "meetings")

    def __init__(self, meetings: Meetings, lane: Lane, half: Half) -> None:
        self.version = 0
        self.meetings = meetings
        self.lane = lane
        self.half = half

    def due(self) -> None:
        self.meetings.post(self.lane, self.half)


class Meeting:
    """A collective that some members have reached."""

    __slots__ = ("needs", "parts")

    def __init__(self, needs: int) -> None:
        self.needs = needs
        self.parts: dict[int, tuple[Lane, int, Collective, Token]] = {}


class Moving(Flow):
    """Data that moves for events of some ranks, which are done when it is.

    Args:
        engine: that all this runs on.
        load: what it takes.
        parts: the stream, the event and what waits for it, of each rank.
    """

    __slots__ = ("engine", "load", "parts")

    def __init__(self, engine: Engine, load: Load, parts: Sequence[tuple[Lane, int, Token | None]]) -> None:
        key = min((lane.rank.id, index) for lane, index, _ in parts)
        super().__init__(engine.links, key, load.seconds, load.shares if engine.shared else ())
        self.engine = engine
        self.load = load
        self.parts = parts
        now = engine.clock.now
        for lane, index, _ in parts:
            rank = lane.rank
            rank.moves[index] = now
            rank.costs[index] = load
            rank.moving.append(self)
            engine.touch(rank)
        engine.links.start(self)

    def ended(self) -> None:
        engine, now = self.engine, self.links.clock.now
        for lane, index, done in self.parts:
            rank = lane.rank
            rank.ends[index] = now
            rank.moving.remove(self)
            engine.touch(rank)
            if done is not None:
                engine.resolve(done, now)
            lane.done()

    def changed(self) -> None:
        for lane, _, _ in self.parts:
            self.engine.touch(lane.rank)


class Meetings:
    """All communication of a trace."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collectives: dict[tuple[int, int], Meeting] = {}  # that some members have reached, by group and seq
        self.halves: dict[tuple[str, int, int, int], tuple[Lane, Half]] = {}  # transfers that one rank has reached
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        # by label and identity of members, as hashing many members for every event is slow
        self._group_of: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self._present: list[int] = []
        self._places: list[Placement] = []
        self._loads: dict[tuple, Load] = {}
        chip = engine.cluster.chip
        self._held, self._held_between_nodes = held_share(chip, CORES), held_share(chip, CORES_BETWEEN_NODES)

    def take_up(self, lane: Lane, item: tuple) -> None:
        """A stream comes to a collective, a copy or to transfers, now: see Engine.advance."""
        if item[0] == COLLECTIVE:
            lane.open = 1
            self._arrive(lane, *item[2:])
        elif item[0] == COPY:
            lane.open = 1
            self._copy(lane, *item[2:])
        else:
            now, halves = self.engine.clock.now, item[2]
            lane.open = len(halves)
            for half in halves:
                if half.host_s > now:
                    self.engine.clock.at(half.host_s, Posting(self, lane, half))
                else:
                    self.post(lane, half)

    def _hold(self, rank: RankState, key: object, share: float) -> None:
        """A kernel waits for other ranks."""
        if share:
            rank.waiting[key] = share
            self.engine.touch(rank)

    def _copy(self, lane: Lane, index: int, host_s: float, event: HostCopy) -> None:
        rank = lane.rank
        key = ("copy", rank.id, event.kind, event.bytes)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = host_copy_load(event, rank.id, self.engine.cluster)
        rank.starts[index] = self.engine.clock.now
        Moving(self.engine, load, [(lane, index, None)])

    # Collectives.

    def _group(self, event: Collective) -> int:
        """A number for the group: label and members."""
        members = event.members
        known = self._group_of.get((event.group, id(members)))
        if known is None:
            group = self._groups.get((event.group, members))
            if group is None:
                group = self._groups[event.group, members] = len(self._groups)
                self._present.append(sum(m in self.engine.states for m in members))
                self._places.append(place(members, self.engine.cluster))
            known = self._group_of[event.group, id(members)] = group, members  # keeps members, so its id stays theirs
        return known[0]

    def _arrive(self, lane: Lane, index: int, host_s: float, event: Collective, token: Token) -> None:
        """A member's kernel of a collective starts; the last one sets data going."""
        rank, group = lane.rank, self._group(event)
        rank.starts[index] = self.engine.clock.now
        meeting = self.collectives.get((group, event.seq))
        if meeting is None:
            meeting = self.collectives[group, event.seq] = Meeting(self._present[group])
        elif rank.id in meeting.parts:
            raise _twice(rank.id, f"collective {event.seq} of group {event.group!r}")
        meeting.parts[rank.id] = lane, index, event, token
        if len(meeting.parts) < meeting.needs:
            self._hold(rank, meeting, self._held)
            return
        del self.collectives[group, event.seq]
        for other, _, _, _ in meeting.parts.values():
            other.rank.waiting.pop(meeting, None)
        load = self._collective_load(group, meeting.parts)
        Moving(self.engine, load, [(lane, index, token) for lane, index, _, token in meeting.parts.values()])

    def _collective_load(self, group: int, parts: Mapping[int, tuple]) -> Load:
        first = min(parts)
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
            others = {rank: parts[rank][2] for rank in sorted(parts)}
            key += tuple((rank, other.bytes, other.sizes) for rank, other in others.items())
        load = self._loads.get(key)
        if load is None:
            cluster, place = self.engine.cluster, self._places[group]
            seconds = collective_s(event, cluster, others, place)
            load = self._loads[key] = collective_load(event, cluster, seconds, others, self.engine.states)
        return load

    # Transfers.

    def post(self, lane: Lane, half: Half) -> None:
        """One rank is there for a transfer; data moves when both are."""
        rank, event = lane.rank, half.event
        rank.starts[half.index] = self.engine.clock.now
        key = (event.group, event.src, event.dst, event.seq)
        theirs = self.halves.pop(key, None)
        if theirs is not None and theirs[1].event.kind == event.kind:
            raise _twice(rank.id, f"{event.kind} {event.seq} from rank {event.src} to rank {event.dst}")
        if theirs is None and (event.dst if event.kind == "send" else event.src) in self.engine.states:
            self.halves[key] = lane, half
            if event.src != event.dst:
                far = self.engine.cluster.crosses_nodes((event.src, event.dst))
                self._hold(rank, half.done, self._held_between_nodes if far else self._held)
            return
        both = [(lane, half)] if theirs is None else [theirs, (lane, half)]  # else the other is symbolic and on time
        for other, posted in both:
            other.rank.waiting.pop(posted.done, None)
        busiest_bytes = max(posted.total_bytes for _, posted in both)
        load_key = ("transfer", event.src, event.dst, event.bytes, busiest_bytes)
        load = self._loads.get(load_key)
        if load is None:
            load = self._loads[load_key] = transfer_load(event, self.engine.cluster, busiest_bytes)
        Moving(self.engine, load, [(other, posted.index, posted.done) for other, posted in both])


def _twice(rank: int, what: str) -> PricingError:
    return PricingError(
        f"rank {rank} has {what} twice", "sequence numbers count the calls of a group: the trace is damaged", rank=rank
    )
