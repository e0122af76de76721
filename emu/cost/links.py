"""Links that several messages use at once share their bandwidth: max-min fair rates of fluid flows.

A flow is a collective, a transfer or a copy while it moves data. Alone it takes the seconds that the price list says, and
while it does it takes a share of each link on its way (see emu.cost.loads). Where the shares of all flows on a link add
up to more than the link, they are cut down by water filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2):
all flows get bandwidth alike until a link is full; those on it keep what they have, and the others go on. A flow moves at
the rate of its tightest link, on all links at once. Rates change when a flow starts or ends; until then progress is
linear, so the times are exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from emu.cost.clock import Clock, Task

FULL = 1 + 1e-9  # a link whose flows take less than this is not shared: what exceeds it is rounding; chosen


class Flow(Task):
    """Data that moves.

    Args:
        links: what it moves over.
        key: orders flows, whatever order they start in.
        seconds: how long it takes alone.
        shares: of each link that it uses, the share that it takes if it runs alone, above 0 and up to 1; it takes its
            `speed` times that.
    """

    __slots__ = ("end_s", "key", "left", "links", "seconds", "shares", "since_s", "speed")

    def __init__(
        self,
        links: Links,
        key: tuple[int, int],
        seconds: float,
        shares: Sequence[tuple[Hashable, float]],
    ) -> None:
        self.version = 0
        self.links = links
        self.key = key
        self.seconds = seconds
        self.shares = shares
        self.speed = 1.0  # 0-1, of what it would have alone
        self.left = 1.0  # share of its work that was left at since_s
        self.since_s = links.clock.now
        self.end_s = self.since_s + seconds

    def due(self) -> None:
        self.links.stop(self)
        self.ended()

    def ended(self) -> None:
        """It is done."""

    def changed(self) -> None:
        """Its speed changed."""

    def turn(self, speed: float) -> None:
        """It goes on at another speed from now on."""
        if speed == self.speed:
            return
        clock = self.links.clock
        self.left -= (clock.now - self.since_s) * self.speed / self.seconds
        self.since_s = clock.now
        self.speed = speed
        self.end_s = clock.now + max(self.left, 0.0) * self.seconds / speed
        clock.again(self.end_s, self)
        self.changed()


class Links:
    """All links that carry flows."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._flows: dict[Hashable, list[Flow]] = {}  # by link
        self._loads: dict[Hashable, float] = {}  # of each link: what its flows would take if each had it alone
        self._touched: dict[Flow, None] = {}  # whose speed may have changed

    def start(self, flow: Flow) -> None:
        """A flow begins to move now."""
        flows, loads = self._flows, self._loads
        shared = False
        for link, share in flow.shares:
            there = flows.get(link)
            if there is None:
                flows[link], loads[link] = [flow], share
            else:
                there.append(flow)
                loads[link] += share
                shared = shared or loads[link] > FULL
        if shared:
            self._touched[flow] = None
        self.clock.at(flow.end_s, flow)

    def stop(self, flow: Flow) -> None:
        """A flow is done."""
        flows, loads = self._flows, self._loads
        self._touched.pop(flow, None)
        for link, share in flow.shares:
            there = flows[link]
            if len(there) == 1:
                del flows[link], loads[link]
                continue
            there.remove(flow)
            loads[link] -= share
            for other in there:
                if other.speed < 1.0:
                    self._touched[other] = None

    def settle(self) -> bool:
        """Gives flows the speeds that they now have; False if nothing can have changed."""
        touched = self._touched
        if not touched:
            return False
        self._touched = {}
        while touched:
            joined = self._joined(next(iter(touched)))
            for flow, speed in zip(joined, fair(self._full_links(joined), [_widest(f) for f in joined])):
                touched.pop(flow, None)
                flow.turn(speed)
        return True

    def _joined(self, first: Flow) -> list[Flow]:
        """All flows whose speeds depend on each other's, as full links join them, in order of keys."""
        found, todo = {first: None}, [first]
        while todo:
            for link, _ in todo.pop().shares:
                if self._loads[link] > FULL:
                    for other in self._flows[link]:
                        if other not in found:
                            found[other] = None
                            todo.append(other)
        return sorted(found, key=lambda flow: flow.key)

    def _full_links(self, flows: Sequence[Flow]) -> list[list[tuple[int, float]]]:
        """Of each full link: which of these flows use it, and the share that each takes alone."""
        by_link: dict[Hashable, list[tuple[int, float]]] = {}
        for i, flow in enumerate(flows):
            for link, share in flow.shares:
                if self._loads[link] > FULL:
                    by_link.setdefault(link, []).append((i, share))
        return list(by_link.values())


def _widest(flow: Flow) -> float:
    return max(share for _, share in flow.shares)


def fair(links: Sequence[Sequence[tuple[int, float]]], widest: Sequence[float]) -> list[float]:
    """Max-min fair speeds of flows, as shares of what each would have alone.

    Args:
        links: of each link, which flows use it, and the share of it that each takes at full speed.
        widest: of each flow, its share of the link that it uses most. Of that, flows get equal parts.
    """
    speeds = [1.0] * len(widest)
    rising = set(range(len(widest)))
    room = [1.0] * len(links)  # of each link, less what flows take that rise no more
    while rising:
        # How far the water may rise until some link is full, or a flow has all that it can use.
        levels = []
        for link, free in zip(links, room):
            taken = sum(share / widest[i] for i, share in link if i in rising)
            levels.append(max(free, 0.0) / taken if taken else None)
        lowest = min([level for level in levels if level is not None] + [widest[i] for i in rising])
        reached = lowest * (1 + 1e-12)
        content = {i for i in rising if widest[i] <= reached}
        full = [link for link, level in zip(links, levels) if level is not None and level <= reached]
        held = {i for link in full for i, _ in link if i in rising} - content
        for i in held:
            speeds[i] = lowest / widest[i]
        rising -= content | held
        for n, link in enumerate(links):
            room[n] -= sum(share * speeds[i] for i, share in link if i in content or i in held)
    return speeds
