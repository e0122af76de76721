"""The order in which streams go on, in time.

A host fills its streams far ahead of them; each stream then does what stands next when its time has come. All ranks
advance together in time, because what runs at one time slows each other down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from emu.cost.clock import Clock
from emu.cost.devices import settle
from emu.cost.links import Links
from emu.cost.meetings import Meetings
from emu.cost.streams import MARK, TRANSFERS, WAIT, Lane, RankState, Token
from emu.hardware import Cluster


class Engine:
    """All streams of a trace; `run` lets them go on until all they were given is done.

    Args:
        cluster: what they run on.
        states: of the ranks that have a record.
        shared: False lets everything run as if it shared nothing.
    """

    def __init__(self, cluster: Cluster, states: Mapping[int, RankState], shared: bool) -> None:
        self.cluster = cluster
        self.states = states
        self.shared = shared
        self.clock = Clock()
        self.links = Links(self.clock)
        self.meetings = Meetings(self)
        self.runnable: deque[RankState] = deque()  # ranks whose host was waiting and need not any more
        self.ready: list[Lane] = []  # streams that may go on
        self._touched: list[RankState] = []

    def lane(self, rank: RankState, stream: str) -> Lane:
        """A stream of a rank."""
        lane = rank.lanes.get(stream)
        if lane is None:
            lane = rank.lanes[stream] = Lane(rank, stream, self)
        return lane

    def wake(self, rank: RankState) -> None:
        """Lets the streams go on that stood idle and have been given work."""
        for lane in rank.lanes.values():
            if lane.idle and lane.position < len(lane.queue):
                lane.idle = False
                self.ready.append(lane)

    def touch(self, rank: RankState) -> None:
        """Something began or ended on a device: if kernels run there, they may run faster or slower from now on."""
        if rank.running and not rank.touched:
            rank.touched = True
            self._touched.append(rank)

    def resolve(self, token: Token, value: float) -> None:
        """A time is known: who waited for it goes on."""
        token.value = value
        for waiter in token.waiters:
            if isinstance(waiter, Lane):
                self.ready.append(waiter)
            else:
                waiter.unknown -= 1
                if not waiter.unknown:
                    self.runnable.append(waiter)

    def run(self) -> None:
        """Goes on until hosts must be heard (`runnable`), or nothing is left to do.

        All that happens at one time happens before anything is timed anew, so its order does not matter.
        """
        ready, clock, links = self.ready, self.clock, self.links
        while True:
            while ready:
                self.advance(ready.pop())
            if self.runnable:
                return
            if clock.run_now() or links.settle():
                continue
            if self._touched:
                touched, self._touched = self._touched, []
                for rank in touched:
                    rank.touched = False
                    settle(rank, self.shared)
            elif not clock.go_on():
                return

    def advance(self, lane: Lane) -> None:
        """Takes up what stands next on a stream that has done all before."""
        queue, position, tail = lane.queue, lane.position, lane.tail
        now = self.clock.now
        while position < len(queue):
            item = queue[position]
            if type(item) is int:  # a kernel
                host_s = lane.rank.hosts[item]
                lane.position = position
                lane.tail = tail = host_s if host_s > tail else tail
                if tail > now:
                    self.clock.at(tail, lane)
                    return
                lane.runs, lane.left, lane.alone = True, -1.0, None
                lane.rank.running.append(lane)
                self.touch(lane.rank)
                return
            code, needed = item[0], item[1]
            if code == MARK:
                self.resolve(needed, tail)
                position += 1
                continue
            if type(needed) is Token:
                if needed.value is None:
                    needed.waiters.append(lane)
                    lane.position, lane.tail = position, tail
                    return
                needed = needed.value
            if needed > tail:
                tail = needed
            if code == WAIT:
                position += 1
                continue
            if code != TRANSFERS and item[3] > tail:  # launched by the host then; of transfers, each by itself
                tail = item[3]
            lane.position, lane.tail = position, tail
            if tail > now:
                self.clock.at(tail, lane)
            else:
                self.meetings.take_up(lane, item)
            return
        lane.position, lane.tail = position, tail
        lane.idle = True
