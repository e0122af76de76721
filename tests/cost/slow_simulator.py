"""A second, slow simulator of streams that share devices and links: an oracle for emu.cost.price.

It steps from one change to the next, and at each works out anew, for everything that runs anywhere, how fast it goes. It
knows no queues of times, no runs of kernels and no connected links. Prices and the water filling of one instant are the
package's own; they have tests of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emu.cost import collective_s
from emu.cost.devices import KernelCost
from emu.cost.links import fair
from emu.cost.loads import CORES, CORES_BETWEEN_NODES, Load, collective_load, held_share, host_copy_load, transfer_load
from emu.trace.events import Collective, EventRecord, EventWait, HostCopy, HostWait, Kernel, Transfer, Wait


@dataclass(eq=False)
class Job:
    """Something that a stream does."""

    rank: int
    index: int
    event: Any
    launched_s: float
    needs: list[Job] = field(default_factory=list)
    start_s: float = -1.0
    end_s: float = -1.0
    group: Any = None  # what all members share

    @property
    def done(self) -> bool:
        return self.end_s >= 0


@dataclass(eq=False)
class Message:
    load: Load
    key: tuple
    left: float = 1.0
    speed: float = 1.0


class Slow:
    """Prices a trace; `ends` has when each event of each rank ended."""

    def __init__(self, trace, cluster, shared: bool = True):
        self.trace, self.cluster, self.shared = trace, cluster, shared
        self.now = 0.0
        self.streams: dict[tuple[int, str], list[Job]] = {}
        self.hosts = dict.fromkeys(trace.ranks, 0.0)
        self.at = dict.fromkeys(trace.ranks, 0)  # the host's next event
        self.held: dict[int, list[Job]] = {r: [] for r in trace.ranks}  # what the host waits for
        self.names: dict[tuple, list[Job]] = {}  # of works and marks: the jobs that they stand for
        self.kernels: dict[Job, float] = {}  # what is left of those that run
        self.met: dict[tuple, list[Job]] = {}
        self.messages: dict[Message, list[Job]] = {}
        while self.settle() or self.step():
            pass

    @property
    def ends(self):
        return {(j.rank, j.index): j.end_s for jobs in self.streams.values() for j in jobs}

    @property
    def makespan(self):
        return max([*(j.end_s for jobs in self.streams.values() for j in jobs), *self.hosts.values()], default=0.0)

    def settle(self) -> bool:
        """All that happens at this time without any passing; True if something did."""
        moved = False
        for rank in self.trace.ranks:
            moved |= self.host(rank)
        for jobs in self.streams.values():
            job = next((j for j in jobs if not j.done), None)
            if job is None or job.start_s >= 0 or job.launched_s > self.now or not all(n.done for n in job.needs):
                continue
            job.start_s, moved = self.now, True
            self.begin(job)
        return moved

    def host(self, rank: int) -> bool:
        events, began = self.trace[rank], self.at[rank]
        while self.at[rank] < len(events):
            if self.held[rank]:
                if not all(j.done for j in self.held[rank]):
                    break
                self.hosts[rank] = max(self.hosts[rank], *(j.end_s for j in self.held[rank]))
                self.held[rank] = []
                self.at[rank] += 1
                continue
            index, event = self.at[rank], events[self.at[rank]]
            if isinstance(event, HostWait):
                self.held[rank] = [
                    jobs[-1] for (r, s), jobs in self.streams.items() if r == rank and event.stream in ("", s) and jobs
                ]
                if self.held[rank]:
                    continue
            elif isinstance(event, EventRecord):
                self.names[rank, "mark", event.event] = self.streams.get((rank, event.stream), [])[-1:]
            elif isinstance(event, (Kernel, Collective, Transfer, HostCopy, Wait, EventWait)):
                free = isinstance(event, (Wait, EventWait)) or (
                    isinstance(event, Collective) and len(event.members) == 1
                )
                self.hosts[rank] += 0.0 if free else self.cluster.host.launch_s
                job = Job(rank, index, event, 0.0 if isinstance(event, (Wait, EventWait)) else self.hosts[rank])
                if isinstance(event, Wait):
                    job.needs = self.names[rank, "work", event.work]
                elif isinstance(event, EventWait):
                    job.needs = self.names[rank, "mark", event.event]
                elif isinstance(event, (Collective, Transfer)):
                    job.needs = self.streams.get((rank, event.after), [])[-1:]
                    self.names[rank, "work", event.work] = [job]
                self.streams.setdefault((rank, event.stream), []).append(job)
            self.at[rank] += 1
        return self.at[rank] > began

    def begin(self, job: Job) -> None:
        event = job.event
        if isinstance(event, (Wait, EventWait)):
            job.end_s = self.now
        elif isinstance(event, Kernel):
            self.kernels[job] = 1.0
        elif isinstance(event, HostCopy):
            self.messages[Message(host_copy_load(event, job.rank, self.cluster), (job.rank, job.index))] = [job]
        else:
            one = isinstance(event, Collective)
            group = (event.group, event.members, event.seq) if one else (event.group, event.src, event.dst, event.seq)
            members = event.members if one else (event.src, event.dst)
            there = self.met.setdefault(group, [])
            there.append(job)
            if len(there) == sum(m in self.trace.ranks for m in members):
                del self.met[group]
                if one:
                    load = collective_load(event, self.cluster, collective_s(event, self.cluster))
                else:
                    load = transfer_load(event, self.cluster, event.bytes)
                self.messages[Message(load, min((j.rank, j.index) for j in there))] = there

    def taken(self, rank: int) -> tuple[float, float]:
        if not self.shared:
            return 0.0, 0.0
        here = [m for m, jobs in self.messages.items() if any(j.rank == rank for j in jobs)]
        waiting = [self.held_share(j.event) for js in self.met.values() for j in js if j.rank == rank]
        compute = max([*waiting, *(m.load.compute for m in here)], default=0.0)
        return compute, min(sum(m.load.memory * m.speed for m in here), 0.5)

    def held_share(self, event: Collective | Transfer) -> float:
        far = isinstance(event, Transfer) and self.cluster.crosses_nodes((event.src, event.dst))
        return held_share(self.cluster.chip, CORES_BETWEEN_NODES if far else CORES)

    def rates(self) -> dict[Job, float]:
        """Shares of a kernel done a second, for all that run; sets the speeds of messages."""
        flows = [m for m in self.messages if m.load.shares and self.shared]
        by_link: dict = {}
        for i, message in enumerate(flows):
            for link, share in message.load.shares:
                by_link.setdefault(link, []).append((i, share))
        for message, speed in zip(flows, fair([*by_link.values()], [max(s for _, s in m.load.shares) for m in flows])):
            message.speed = speed
        rates: dict[Job, float] = {}
        for rank in self.trace.ranks:
            jobs = [j for j in self.kernels if j.rank == rank]
            costs = [KernelCost(j.event, self.cluster.chip) for j in jobs]
            taken = self.taken(rank)
            demands = [c.demand(taken) for c in costs]
            speeds = [1.0] * len(jobs)
            if self.shared and any(demands):
                some = [i for i, d in enumerate(demands) if d]
                for i, s in zip(
                    some, fair([[(n, demands[i]) for n, i in enumerate(some)]], [demands[i] for i in some])
                ):
                    speeds[i] = s
            for job, cost, speed in zip(jobs, costs, speeds):
                seconds = cost.beside(taken)
                rates[job] = speed / seconds if seconds else float("inf")
        return rates

    def step(self) -> bool:
        """Lets time pass until something ends or is launched; False if nothing will."""
        rates = self.rates()
        ends_s = {job: left / rates[job] for job, left in self.kernels.items()}
        arrive_s = {m: m.left * m.load.seconds / m.speed for m in self.messages}
        launches = [
            j.launched_s - self.now
            for jobs in self.streams.values()
            for j in jobs
            if j.launched_s > self.now and not j.done
        ]
        if not (ends_s or arrive_s or launches):
            return False
        passed = min([*ends_s.values(), *arrive_s.values(), *launches])
        near = passed * (1 + 1e-9) + 1e-15
        self.now += passed
        for job in list(self.kernels):
            if ends_s[job] <= near:
                del self.kernels[job]
                job.end_s = self.now
            else:
                self.kernels[job] -= passed * rates[job]
        for message in list(self.messages):
            if arrive_s[message] <= near:
                for job in self.messages.pop(message):
                    job.end_s = self.now
            else:
                message.left -= passed * message.speed / message.load.seconds
        return True
