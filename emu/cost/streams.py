"""Streams, first-in first-out queues of work, and the ranks that have them: where the simulation of each stands."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any

from emu.cost.clock import Task
from emu.cost.loads import MOST_MEMORY

if TYPE_CHECKING:
    from emu.cost.devices import KernelCost
    from emu.cost.engine import Engine
    from emu.cost.meetings import Moving

# What a queue holds besides kernels, which stand there as their numbers in the record.
WAIT, MARK, COLLECTIVE, TRANSFERS, COPY = range(5)


class Token:
    """A time that is not known yet, and who waits for it."""

    __slots__ = ("value", "waiters")

    def __init__(self) -> None:
        self.value: float | None = None
        self.waiters: list[Lane | RankState] = []


class Lane(Task):
    """One stream of one rank.

    While it runs kernels, those from `position` to `stop` are timed, the first of them from `since_s` on, when the share
    `left` of it was left (below 0: none is timed yet). `alone` says what communication took beside them; None where
    other kernels did.
    """

    __slots__ = (
        "alone",
        "clock",
        "engine",
        "idle",
        "left",
        "open",
        "position",
        "queue",
        "rank",
        "runs",
        "since_s",
        "stop",
        "stream",
        "tail",
    )

    def __init__(self, rank: RankState, stream: str, engine: Engine) -> None:
        self.version = 0
        self.rank = rank
        self.stream = stream
        self.engine = engine
        self.clock = engine.clock
        self.queue: list[Any] = []
        self.position = 0  # of what stands next, or runs
        self.tail = 0.0  # when all before that was done
        self.idle = True  # nothing stands next
        self.runs = False  # a kernel
        self.open = 0  # what is left of the communication that it runs: messages
        self.stop = 0
        self.since_s = 0.0
        self.left = -1.0
        self.alone: tuple[float, float] | None = None

    def due(self) -> None:
        if self.runs:  # and is done
            rank = self.rank
            self.runs = False
            self.position = self.stop
            rank.running.remove(self)
            if rank.running:
                self.engine.touch(rank)
        self.engine.advance(self)

    def cost(self) -> KernelCost:
        """Of the kernel that runs."""
        return self.rank.costs[self.queue[self.position]]

    def passes(self, item: tuple) -> bool:
        """True for what stands between kernels, but does not hold them up: a wait for what is done."""
        return item[0] == WAIT and (type(item[1]) is not Token or item[1].value is not None)

    def pause(self, until_s: float) -> None:
        """The kernel that stands next is not launched before then."""
        self.runs = False
        self.tail = until_s
        self.rank.running.remove(self)
        self.clock.again(until_s, self)

    def done(self) -> None:
        """A part of the communication that it runs is done; the last one lets it go on."""
        self.open -= 1
        if not self.open:
            self.position += 1
            self.tail = self.clock.now
            self.engine.ready.append(self)


class RankState:
    """Where the simulation of one rank stands, and the times of its events."""

    __slots__ = (
        "costs",
        "ends",
        "events",
        "host",
        "hosts",
        "id",
        "index",
        "lanes",
        "marks",
        "moves",
        "moving",
        "running",
        "starts",
        "touched",
        "unknown",
        "until",
        "waiting",
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
        self.costs: list[Any] = [None] * len(events)  # KernelCost or Load: what each costs alone
        self.moves: dict[int, float] = {}  # when a collective or transfer found all others there
        self.lanes: dict[str, Lane] = {}
        self.works: dict[int, Token] = {}
        self.marks: dict[int, float | Token] = {}
        self.until: list[Token] = []  # what the host waits for
        self.unknown = 0  # how many of those are not known
        self.running: list[Lane] = []  # streams that run a kernel
        self.waiting: dict[object, float] = {}  # share of compute that communication takes which waits for others
        self.moving: list[Moving] = []  # communication that moves data
        self.touched = False  # its kernels must be timed anew

    def taken(self) -> tuple[float, float]:
        """What communication takes now: share of compute, and of memory bandwidth."""
        compute = max(self.waiting.values(), default=0.0)
        moving = self.moving
        if not moving:
            return compute, 0.0
        compute = max(compute, max([flow.load.compute for flow in moving]))
        return compute, min(fsum([flow.load.memory * flow.speed for flow in moving]), MOST_MEMORY)

    def position(self, stream: str) -> float | Token:
        """When all that a stream was given so far is done."""
        lane = self.lanes.get(stream)
        if lane is None:
            return 0.0
        queue = lane.queue
        if lane.position == len(queue):
            return lane.tail
        last = queue[-1]
        if type(last) is tuple and last[0] == MARK:
            return last[1]
        token = Token()
        queue.append((MARK, token))
        return token
