"""What comes before what on one rank, however long everything lasts: vector clocks, worked out from its record alone.

A stream carries out what it is given one after the other; streams wait for each other only where the program says so. So
the order of two pieces of work on different streams is certain if a chain of waits leads from the one to the other, and
only then: what the clock says of one run is true of all of them (Lamport 1978; Fidge 1988, Mattern 1989). Every stream
counts its work (ticks), and knows of every other stream up to which tick that one's work is done before its own goes on.

Beside that it knows how much of it hangs on a single wait: up to which tick it would know without that one. That tells
which waits are needed, in the same pass.

Orders: events, works and the host's waits; a communication's stream after the stream that it was issued from. Not: that
another rank's answer arrived, which CUDA does not count either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import NamedTuple

from emu.trace.events import Collective, Event, EventRecord, EventWait, HostWait, Transfer, Use, Wait


class Known(NamedTuple):
    """How much of another stream's work comes before a stream's next.

    Args:
        tick: all up to this one.
        without: wait (its position in the record) -> only up to this tick, if that wait were not there. Waits without
            which it would be as much are left out.
    """

    tick: int
    without: Mapping[int, int]


NOTHING = Known(0, {})
HOST = "\0"  # in place of a stream: what comes before whatever the program issues from now on
Point = dict[str, Known]  # of every stream, how much comes before


class Order:
    """The clocks of one rank's streams. Give it the rank's events one by one, in order.

    Args:
        ignored: positions of waits that are read over, as if the program did not have them.
    """

    def __init__(self, ignored: Collection[int] = ()) -> None:
        self._ignored = ignored
        self._ticks: dict[str, int] = {}
        self._seen: dict[str, Point] = {HOST: {}}
        self._events: dict[int, Point] = {}
        self._works: dict[int, Point] = {}
        self._steps: dict[tuple[str, str], tuple[list[int], list[int]]] = {}

    def take(self, index: int, event: Event) -> None:
        """The next event of the record, and its position."""
        if isinstance(event, Use):
            if event.work not in self._works:
                self._advance(event.stream)
        elif isinstance(event, (Collective, Transfer)):
            if event.after != event.stream:
                self._merge(event.stream, self._point(event.after), index, None)
            self._advance(event.stream)
            self._works[event.work] = self._point(event.stream)
        elif isinstance(event, EventRecord):
            self._events[event.event] = self._point(event.stream)
        elif index in self._ignored:
            pass
        elif isinstance(event, Wait):
            self._merge(event.stream, self._works.get(event.work, {}), index, index)
        elif isinstance(event, EventWait):
            self._merge(event.stream, self._events.get(event.event, {}), index, index)
        elif isinstance(event, HostWait):
            self._host_waits(index, event)

    def tick(self, use: Use) -> int:
        """The place of a use, which was just taken, in the work of its stream."""
        if use.work in self._works:
            return self._works[use.work][use.stream].tick
        return self._ticks[use.stream]

    def known(self, stream: str, other: str) -> Known:
        """How much of another stream's work comes before what `stream` is given next."""
        return self._start(stream).get(other, NOTHING)

    def witness(self, stream: str, other: str, tick: int) -> int:
        """Where in the record the wait is (or the call of a communication) by which a stream came after that tick."""
        ticks, indices = self._steps[stream, other]
        return indices[bisect_left(ticks, tick)]

    def _start(self, stream: str) -> Point:
        seen = self._seen.get(stream)
        if seen is None:  # a new stream comes after all that the host has waited for
            seen = self._seen[stream] = {k: known for k, known in self._seen[HOST].items() if k != stream}
            self._ticks[stream] = 0
            for other in seen:
                ticks, indices = self._steps[HOST, other]
                self._steps[stream, other] = [*ticks], [*indices]
        return seen

    def _advance(self, stream: str) -> None:
        self._start(stream)
        self._ticks[stream] += 1

    def _point(self, stream: str) -> Point:
        """All that comes before what `stream` is given next, its own work included."""
        return {**self._start(stream), stream: Known(self._ticks[stream], {})}

    def _merge(self, stream: str, point: Point, index: int, wait: int | None) -> None:
        """The stream's next work comes after a point, too: because of a wait, or anyway (None)."""
        seen = self._start(stream)
        for other, known in point.items():
            had = seen.get(other, NOTHING)
            if other == stream or (known.tick <= had.tick and not had.without):
                continue
            now = seen[other] = _joined(had, _through(wait, known))
            if now.tick > had.tick:
                ticks, indices = self._steps.setdefault((stream, other), ([], []))
                ticks.append(now.tick)
                indices.append(index)

    def _host_waits(self, index: int, event: HostWait) -> None:
        """Whatever is issued from here on, on any stream, comes after what the host waited for."""
        what, _, number = event.reason.partition(" ")
        if what == "event":
            points = [self._events.get(int(number), {}) if number.isdecimal() else {}]
        else:
            points = [self._point(s) for s in ([event.stream] if event.stream else list(self._ticks))]
        for point in points:
            self._merge(HOST, point, index, index)
        for stream in self._ticks:
            self._merge(stream, self._seen[HOST], index, None)


def _through(wait: int | None, known: Known) -> Known:
    """What is known by way of a wait: nothing without it."""
    return known if wait is None else Known(known.tick, {**known.without, wait: 0})


def _joined(a: Known, b: Known) -> Known:
    """What is known in two ways."""
    most = max(a.tick, b.tick)
    less = {w: max(a.without.get(w, a.tick), b.without.get(w, b.tick)) for w in (*a.without, *b.without)}
    return Known(most, {w: tick for w, tick in less.items() if tick < most})
