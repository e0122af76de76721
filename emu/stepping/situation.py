"""How all ranks stand before a step, worked out from their records: memory, streams, what is under way.

A situation moves on event by event. Every now and then a copy is kept, so that going back need not begin at the beginning:
copies are cheap, since they hold no tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from emu.stepping.history import History, Standing
from emu.trace.events import (
    CATEGORIES,
    Alloc,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    HostCopy,
    Kernel,
    Mark,
    Recategorise,
    Transfer,
    Wait,
)

EVERY = 256  # steps between two copies that are kept


@dataclass
class Stands:
    """One rank before a step.

    Attributes:
        seen: how many events of its record are counted here.
        held: category -> bytes of device memory that live.
        peak_bytes: the most that lived so far.
        streams: stream -> the last event that it was given, and how many it was given.
        works: work -> index of the event of a communication that was started and not waited for.
        mark: the last one.
    """

    standing: Standing
    seen: int = 0
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak_bytes: int = 0
    streams: dict[str, tuple[int, int]] = field(default_factory=dict)
    works: dict[int, int] = field(default_factory=dict)
    mark: str = ""
    steps: int = 0  # that it has taken
    last: int = -1  # the last of them

    def copy(self) -> Stands:
        """Itself, to be moved on apart."""
        other = copy.copy(self)
        other.held, other.streams, other.works = dict(self.held), dict(self.streams), dict(self.works)
        return other


Key = tuple[Any, ...]  # what the parts of one communication share


class Situation:
    """All ranks before a step.

    Attributes:
        index: the step.
        ranks: how each stands.
        open: communications that have begun and were not carried out: key -> (rank, index of its event) of those that came.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.index = -1
        self.ranks = {rank: Stands(Standing(rank, 0, "not begun", "", "")) for rank in history.ranks}
        self.open: dict[Key, list[tuple[int, int]]] = {}

    def copy(self) -> Situation:
        """Itself, to be moved on apart."""
        other = copy.copy(self)
        other.ranks = {rank: stands.copy() for rank, stands in self.ranks.items()}
        other.open = {key: list(parts) for key, parts in self.open.items()}
        return other

    def move_to(self, index: int) -> None:
        """On to a later step."""
        history = self.history
        while self.index < index:
            if self.index >= 0:
                stands = self.ranks[history.ops[self.index].rank]
                stands.steps, stands.last = stands.steps + 1, self.index
            self.index += 1
            for standing in history.changes[self.index]:
                stands = self.ranks[standing.rank]
                stands.standing = standing
                events = history.events[standing.rank]
                for i in range(stands.seen, min(standing.events, len(events))):
                    self._count(standing.rank, stands, i, events[i])
                stands.seen = max(stands.seen, standing.events)

    def _count(self, rank: int, stands: Stands, i: int, event: Event) -> None:
        match event:
            case Alloc():
                stands.held[event.category] += event.bytes
                stands.peak_bytes = max(stands.peak_bytes, sum(stands.held.values()))
            case Free():
                stands.held[event.category] -= event.bytes
            case Recategorise():
                stands.held[event.old] -= event.bytes
                stands.held[event.new] += event.bytes
            case Collective() | Transfer():
                self._given(stands, event.stream, i)
                if event.stream != event.after:
                    stands.works[event.work] = i
                self._comes(rank, i, event)
            case Kernel() | HostCopy() | EventRecord() | EventWait():
                self._given(stands, event.stream, i)
            case Wait():
                self._given(stands, event.stream, i)
                stands.works.pop(event.work, None)
            case Mark():
                stands.mark = event.name

    def _given(self, stands: Stands, stream: str, i: int) -> None:
        stands.streams[stream] = (i, stands.streams.get(stream, (0, 0))[1] + 1)

    def _comes(self, rank: int, i: int, event: Collective | Transfer) -> None:
        """A member has come to a communication; with the last, nothing of it is open any more."""
        key, needed = key_of(event), self.needed(event)
        parts = self.open.setdefault(key, [])
        parts.append((rank, i))
        if len(parts) >= len(needed):
            del self.open[key]

    def needed(self, event: Collective | Transfer) -> list[int]:
        """Who takes part in a communication and runs."""
        members = event.members if isinstance(event, Collective) else (event.src, event.dst)
        return [m for m in members if m in self.ranks]

    def absent(self, key: Key) -> list[int]:
        """Who has not come yet to a communication that is open."""
        parts = self.open[key]
        rank, i = parts[0]
        come = [r for r, _ in parts]
        event = self.history.events[rank][i]
        assert isinstance(event, (Collective, Transfer))
        left = self.needed(event)
        for r in come:
            if r in left:
                left.remove(r)
        return left

    def event(self, rank: int, i: int) -> Any:
        """One event of a rank's record."""
        return self.history.events[rank][i]

    def is_open(self, event: Collective | Transfer) -> bool:
        """Whether a communication waits for somebody."""
        return key_of(event) in self.open


def key_of(event: Collective | Transfer) -> Key:
    """What the parts of one communication share."""
    if isinstance(event, Collective):
        return ("collective", event.group, event.members, event.seq)
    return ("transfer", event.group, event.src, event.dst, event.seq)


class Situations:
    """The situation before any step of a history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._kept: list[Situation] = []  # before steps 0, EVERY, 2 EVERY, ...
        self._latest: Situation | None = None
        self._cuts = 0

    def at(self, index: int) -> Situation:
        """Before step `index`. The caller does not change it."""
        if self._cuts != len(self._history.cuts):  # another rank went first somewhere
            self._cuts, self._latest, self._kept = len(self._history.cuts), None, []
        latest = self._latest
        if latest is None or latest.index > index:
            latest = (
                self._kept[min(index // EVERY, len(self._kept) - 1)].copy() if self._kept else Situation(self._history)
            )
        while latest.index < index:
            latest.move_to(latest.index + 1)
            if latest.index % EVERY == 0 and latest.index // EVERY == len(self._kept):
                self._kept.append(latest.copy())
        self._latest = latest
        return latest


def so_far(situation: Situation) -> dict[int, list[Event]]:
    """Every rank's record up to this step, without communications that wait for somebody: what can be priced already."""
    history, found = situation.history, {}
    for rank, stands in situation.ranks.items():
        events: Sequence[Event] = history.events[rank][: stands.seen]
        gone: set[int] = set()
        if situation.open:
            gone = {e.work for e in _communications(events) if situation.is_open(e)}
        found[rank] = [e for e in events if not (gone and isinstance(e, (Collective, Transfer)) and e.work in gone)]
    return found


def _communications(events: Sequence[Event]) -> Iterator[Collective | Transfer]:
    for event in events:
        if isinstance(event, (Collective, Transfer)):
            yield event
