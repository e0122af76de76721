"""Collectives that ranks issue in different orders: a deadlock that needs no more than bad luck.

A device may carry out the collectives of two groups at once, or one after the other if it has no room for both; NCCL
promises neither. So all ranks must issue the collectives that they share in one order (NCCL user guide, "Using multiple
NCCL communicators concurrently"): it must be possible to number all collectives so that every rank issues them by
rising numbers. Where that cannot be, some ranks wait for each other in a circle if each carries out one at a time.

Messages between two ranks are left out: those that are posted together run together, and each direction is apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from emu.trace.events import At, Collective
from emu.trace.trace import Trace

MOST = 16  # circles that are told


class Call(NamedTuple):
    """One rank's part in a collective."""

    rank: int
    event: int  # position in its record
    what: str
    stream: str
    line: str


_Key = tuple[str, tuple[int, ...], int]
_Then = dict[_Key, dict[_Key, tuple[Call, Call]]]  # collective -> what some rank issues next -> its two calls


def circles(trace: Trace) -> Iterator[list[tuple[Call, Call]]]:
    """Circles of collectives: each is a list of two calls by one rank; the second is of the collective that is next.

    Two ranks that issue two collectives in opposite order are the shortest circle; every collective is in one at most.
    """
    then: _Then = defaultdict(dict)
    for rank, events in trace.events.items():
        before: tuple[_Key, Call] | None = None
        for i, event in enumerate(events):
            if type(event) is not Collective or len(event.members) < 2:
                continue
            after = events[i + 1] if i + 1 < len(events) else None
            line = after.line if type(after) is At else ""
            call = Call(rank, i, f"{event.group}.{event.kind} number {event.seq}", event.stream, line)
            key = (event.group, event.members, event.seq)
            if before is not None:
                then[before[0]].setdefault(key, (before[1], call))
            before = key, call
    for _ in range(MOST):
        _trim(then)
        if not then:
            return
        circle = _shortest(then)
        yield _by_rank([then[a][b] for a, b in zip(circle, [*circle[1:], circle[0]])])
        for key in circle:
            del then[key]


def _by_rank(steps: list[tuple[Call, Call]]) -> list[tuple[Call, Call]]:
    """Steps of one rank that follow each other are one."""
    joined: list[tuple[Call, Call]] = []
    for first, second in steps:
        if joined and joined[-1][1].rank == first.rank:
            joined[-1] = joined[-1][0], second
        else:
            joined.append((first, second))
    if joined[-1][1].rank == joined[0][0].rank:  # the circle was cut within a rank's steps
        joined[0] = joined.pop()[0], joined[0][1]
    return joined


def _trim(then: _Then) -> None:
    """Removes what is on no circle: collectives before all others, and those after all others, again and again."""
    into: dict[_Key, set[_Key]] = defaultdict(set)
    for key, following in then.items():
        for other in following:
            into[other].add(key)
    keys = {*then, *into}
    idle = deque(key for key in keys if not into[key] or not then.get(key))
    while idle:
        key = idle.popleft()
        if key not in keys:
            continue
        keys.discard(key)
        for other in then.pop(key, {}):
            into[other].discard(key)
            if not into[other]:
                idle.append(other)
        for other in into.pop(key, ()):
            if other in then:
                then[other].pop(key, None)
                if not then[other]:
                    idle.append(other)


def _shortest(then: _Then) -> list[_Key]:
    """The shortest circle through the first collective that is on any."""
    for start in then:
        came: dict[_Key, _Key] = {}
        queue = deque([start])
        while queue:
            key = queue.popleft()
            for other in then.get(key, ()):
                if other == start:
                    circle = [key]
                    while circle[-1] != start:
                        circle.append(came[circle[-1]])
                    return circle[::-1]
                if other not in came:
                    came[other] = key
                    queue.append(other)
    raise AssertionError("what is left after trimming has a circle")
