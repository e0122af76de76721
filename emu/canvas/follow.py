"""From events to rows: what memory, streams and communications of every rank come to, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from emu.canvas.record import Record
from emu.canvas.words import in_words, on_stream
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

PLACES = {name: i for i, name in enumerate(CATEGORIES)}
_MEMORY = (Alloc, Free, Recategorise)
_STREAM = (Kernel, HostCopy, EventRecord, EventWait)


class _Open:
    """A communication that has begun: who came, and who takes part and runs."""

    __slots__ = ("begin", "event", "left", "parts", "row", "works")

    def __init__(self, event: Collective | Transfer, begin: int, needed: int) -> None:
        self.event, self.begin, self.left, self.row = event, begin, needed, -1
        self.parts: list[tuple[int, int]] = []  # (rank, step), in the order in which they came
        self.works: list[tuple[int, int]] = []  # (rank, work) of the same


class Follow:
    """Reads every rank's events, and adds what they change to a record.

    Events that are seen between two calls of `settle` are seen from the step of the second on.

    Attributes:
        met: ranks whose communications were carried out since the step before: their data may have changed.

    Args:
        ranks: those that run.
        held: rank -> category -> bytes that live before the first event.
    """

    def __init__(
        self, record: Record, ranks: Iterable[int], held: Mapping[int, Mapping[str, int]] | None = None
    ) -> None:
        self.record, self.ranks = record, set(ranks)
        self.met: set[int] = set()
        before = held or {}
        self._held = {rank: [before.get(rank, {}).get(name, 0) for name in CATEGORIES] for rank in self.ranks}
        self._total = {rank: sum(each) for rank, each in self._held.items()}
        self._peak = dict.fromkeys(self.ranks, 0)
        self._open: dict[Any, _Open] = {}
        self._opened: list[_Open] = []  # since the step before, and the same of what follows
        self._closed: list[_Open] = []
        self._came: list[tuple[_Open, int]] = []
        self._works: dict[tuple[int, int], int] = {}  # (rank, work) -> row
        self._begun: dict[tuple[int, int], tuple[Any, Any]] = {}  # works without a row: event, and who waits with it
        self._given: dict[tuple[int, str], int] = {}
        self._memory: dict[tuple[int, int], None] = {}  # (rank, category) that changed
        self._peaks: dict[int, None] = {}
        self._streams: dict[tuple[int, str], str] = {}
        self._marks: dict[int, str] = {}
        for rank in self.ranks:
            if self._total[rank]:
                self._peaked(rank)
                self._memory.update(((rank, i), None) for i, size in enumerate(self._held[rank]) if size)

    def see(self, rank: int, event: Event, step: int) -> None:
        """One event more, in program order of its rank."""
        if isinstance(event, _MEMORY):
            self._lives(rank, event)
        elif isinstance(event, _STREAM):
            self._takes(rank, event.stream, on_stream(event))
        elif isinstance(event, (Collective, Transfer)):
            self._takes(rank, event.stream, on_stream(event))
            meeting = self._comes(rank, event, step)
            if event.stream != event.after:
                self._begun[rank, event.work] = event, meeting
        elif isinstance(event, Wait):
            self._takes(rank, event.stream, "wait")
            self._waited(rank, event.work, step)
        elif isinstance(event, Mark):
            self._marks[rank] = event.name

    def _lives(self, rank: int, event: Alloc | Free | Recategorise) -> None:
        held = self._held[rank]
        if isinstance(event, Recategorise):
            changes = ((PLACES[event.old], -event.bytes), (PLACES[event.new], event.bytes))
        else:
            changes = ((PLACES[event.category], event.bytes if isinstance(event, Alloc) else -event.bytes),)
        for category, size in changes:
            held[category] += size
            self._total[rank] += size
            self._memory[rank, category] = None
        if isinstance(event, Alloc):
            self._peaked(rank)

    def _peaked(self, rank: int) -> None:
        if self._total[rank] > self._peak[rank]:
            self._peak[rank] = self._total[rank]
            self._peaks[rank] = None

    def _takes(self, rank: int, stream: str, what: str) -> None:
        self._given[rank, stream] = self._given.get((rank, stream), 0) + 1
        self._streams[rank, stream] = what

    def _comes(self, rank: int, event: Collective | Transfer, step: int) -> _Open:
        if isinstance(event, Collective):
            key, members = ("collective", event.group, event.members, event.seq), event.members
        else:
            key, members = ("transfer", event.group, event.src, event.dst, event.seq), (event.src, event.dst)
        meeting = self._open.get(key)
        if meeting is None:
            meeting = self._open[key] = _Open(event, step, sum(member in self.ranks for member in members))
            self._opened.append(meeting)
        meeting.parts.append((rank, step))
        meeting.works.append((rank, event.work))
        meeting.left -= 1
        if meeting.left <= 0:
            del self._open[key]
            self._closed.append(meeting)
            self.met.update(came for came, _ in meeting.parts)
        if meeting.row >= 0:
            self._came.append((meeting, rank))
        return meeting

    def _waited(self, rank: int, work: int, step: int) -> None:
        if self._begun.pop((rank, work), None) is None:  # begun before this step, or not in the record
            row = self._works.pop((rank, work), None)
            if row is not None:
                self.record.end("works", row, step)

    def waiting(self) -> set[tuple[int, int]]:
        """(rank, work) of communications that wait for somebody."""
        return {work for meeting in self._open.values() for work in meeting.works}

    def settle(self, step: int) -> None:
        """Adds rows for whatever has changed: it is so from this step on."""
        record, tables, text = self.record, self.record.tables, self.record.text
        for rank, category in self._memory:
            tables["memory"].add(rank, category, step, self._held[rank][category])
        for rank in self._peaks:
            tables["peaks"].add(rank, step, self._peak[rank])
        for (rank, stream), what in self._streams.items():
            tables["streams"].add(rank, text(stream), step, text(what), self._given[rank, stream])
        for rank, name in self._marks.items():
            tables["marks"].add(rank, step, text(name))
        for meeting in self._opened:
            if meeting.left > 0:  # what began and was over between two steps is never seen
                self._open_row(meeting)
        for meeting, rank in self._came:
            tables["parts"].add(meeting.row, rank, step)
        for meeting in self._closed:
            if meeting.row >= 0:
                record.end("open", meeting.row, step)
        for (rank, work), (event, meeting) in self._begun.items():
            what, name, stream = text(in_words(event)), text(event.name), text(event.stream)
            row = tables["works"].add(rank, step, -1, work, what, name, stream, event.bytes, meeting.row)
            self._works[rank, work] = row
        for changed in (self._memory, self._peaks, self._streams, self._marks, self._begun):
            changed.clear()
        self._opened, self._came, self._closed = [], [], []

    def _open_row(self, meeting: _Open) -> None:
        event, record, text = meeting.event, self.record, self.record.text
        if isinstance(event, Transfer):
            ends, about = (event.src, event.dst), (text(event.group), event.src, event.dst)
            kind, posted = text(event.dtype), text(event.kind)
        else:
            ends, about, kind, posted = event.members, (0, -1, -1), 0, 0
        members = record.lists["members"].place(tuple(ends), list(ends))
        said, name = text(in_words(event)), text(event.name)
        meeting.row = record.tables["open"].add(
            *(meeting.begin, -1, isinstance(event, Transfer), said, *about, event.bytes, kind, posted, name, members)
        )
        for rank, step in meeting.parts:
            record.tables["parts"].add(meeting.row, rank, step)
