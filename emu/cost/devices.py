"""Kernels on a device: what each costs alone, and what it costs beside others.

Alone, a kernel lasts what the price list says: a fixed part (the chip's shortest kernel), and its work. Beside others:

* While communication moves data on the device, or its kernel waits for others and holds cores, arithmetic runs at what is
  left of the compute, and memory traffic at what is left of the bandwidth (see emu.cost.loads). Of several communications
  the one that takes most compute counts, as their blocks fit on the same cores (640 threads, of the 2,048 that a core
  holds: NVIDIA/nccl, src/include/device.h); bandwidth adds up.
* Kernels of several streams get equal parts of what is left, or what they can use if that is less: a matrix product of
  few tiles leaves cores idle, and what is in its fixed part does not compute. That the parts are equal is assumed: real
  devices place whole blocks, the older kernel's first, for the same work in all.

Kernels that follow each other on one stream with nothing beside them are timed in one go, and again from where they are
when something begins or ends beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.cost.kernels import is_attention, kernel_s
from emu.cost.links import fair
from emu.hardware import Chip
from emu.trace.events import Kernel

if TYPE_CHECKING:
    from emu.cost.streams import Lane, RankState

# Share of compute and of memory bandwidth that communication takes where there is none: by definition.
QUIET = (0.0, 0.0)


class KernelCost:
    """What a kernel costs alone, and how it is slowed down.

    Fields:
        seconds: alone.
        compute_s, memory_s: of its work, the time that arithmetic and memory traffic take at least; the longer is the
            whole work.
        work_s: the longer of these: all but its fixed part.
        part: share of the device that it fills on average, 0-1.
    """

    __slots__ = ("compute_s", "memory_s", "part", "seconds", "work_s")

    def __init__(self, event: Kernel, chip: Chip) -> None:
        self.seconds = seconds = kernel_s(event, chip)
        self.work_s = work_s = max(seconds - chip.kernel_s, 0.0)
        self.memory_s = min(event.bytes / chip.memory_bytes_per_s, work_s)
        product = bool(event.dims) and not is_attention(event)
        best_s = (
            min(event.flops / chip.flops_per_s(event.dtype), work_s) if product else 0.0
        )  # on all cores, at their best
        bound_by_memory = self.memory_s >= work_s * (1 - 1e-9)
        self.compute_s = best_s if bound_by_memory else work_s
        filled_s = max(best_s, self.memory_s) if product else work_s
        self.part = filled_s / seconds if seconds else 0.0

    def beside(self, taken: tuple[float, float]) -> float:
        """Seconds beside communication that takes these shares of compute and of memory bandwidth."""
        slowed_s = max(self.compute_s / (1 - taken[0]), self.memory_s / (1 - taken[1]))
        return self.seconds + (slowed_s - self.work_s) if slowed_s > self.work_s else self.seconds

    def demand(self, taken: tuple[float, float]) -> float:
        """Share that it fills of what communication leaves of the device."""
        seconds = self.beside(taken)
        if not self.part:
            return 0.0
        left = self.work_s / (self.work_s + (seconds - self.seconds))
        return min(1.0, self.part * self.seconds / seconds / left)


def settle(rank: RankState, shared: bool) -> None:
    """Times the kernels that run on a device from now on, by what runs beside them now.

    Args:
        rank: whose device it is.
        shared: False lets every kernel have the device to itself.
    """
    taken = rank.taken() if shared else QUIET
    running = rank.running
    if not shared or len(running) == 1:
        for lane in list(running):
            if lane.alone != taken and _catch_up(lane):
                _run(lane, taken)
        return
    lanes = sorted((lane for lane in list(running) if _catch_up(lane)), key=lambda lane: lane.stream)
    if len(lanes) == 1:
        _run(lanes[0], taken)
        return
    costs = [lane.cost() for lane in lanes]
    demands = [cost.demand(taken) for cost in costs]
    some = [i for i, demand in enumerate(demands) if demand > 0]
    speeds = dict(zip(some, fair([[(n, demands[i]) for n, i in enumerate(some)]], [demands[i] for i in some])))
    for i, lane in enumerate(lanes):
        _step(lane, costs[i].beside(taken) / speeds.get(i, 1.0))


def _catch_up(lane: Lane) -> bool:
    """Settles what the stream has done up to now, so that the rest can be timed anew; False if nothing of it runs now."""
    queue, position, stop, now = lane.queue, lane.position, lane.stop, lane.clock.now
    if lane.left < 0:  # nothing was timed yet
        lane.left, lane.stop = 1.0, position + 1
        lane.rank.starts[queue[position]] = now
        return True
    ends = lane.rank.ends
    since_s = lane.since_s
    left = lane.left
    while position < stop:
        index = queue[position]
        if type(index) is int:
            if ends[index] > now:
                break
            since_s = -1.0
        position += 1
    lane.position = position
    if position == stop:
        return False  # done, and due now
    starts = lane.rank.starts
    index = queue[position]
    if since_s < 0:
        since_s, left = starts[index], 1.0
    if starts[index] > now:  # the host has not launched it yet
        lane.pause(starts[index])
        return False
    lane.left = left * (ends[index] - now) / (ends[index] - since_s)
    lane.stop = position + 1
    return True


def _step(lane: Lane, seconds: float) -> None:
    """Times one kernel that takes so long as a whole."""
    now = lane.clock.now
    lane.since_s = now
    lane.alone = None
    index = lane.queue[lane.position]
    lane.rank.ends[index] = lane.tail = now + lane.left * seconds
    lane.clock.again(lane.tail, lane)


def _run(lane: Lane, taken: tuple[float, float]) -> None:
    """Times the kernels that stand next on a stream, one after the other, with no others beside them.

    As KernelCost.beside, but written out: this loop is much of the price of a trace.
    """
    rank, queue, position = lane.rank, lane.queue, lane.position
    costs, hosts, starts, ends = rank.costs, rank.hosts, rank.starts, rank.ends
    quiet, compute, memory = taken == QUIET, 1 - taken[0], 1 - taken[1]
    lane.since_s = now = lane.clock.now
    lane.alone = taken
    index = queue[position]
    tail = now + lane.left * costs[index].beside(taken)
    ends[index] = tail
    position += 1
    count = len(queue)
    while position < count:
        index = queue[position]
        if type(index) is int:
            host_s = hosts[index]
            if host_s > tail:
                tail = host_s
            starts[index] = tail
            cost = costs[index]
            if quiet:
                tail += cost.seconds
            else:
                work_s = cost.work_s
                slowed_s = cost.compute_s / compute
                slower_s = cost.memory_s / memory
                if slower_s > slowed_s:
                    slowed_s = slower_s
                tail += cost.seconds + (slowed_s - work_s) if slowed_s > work_s else cost.seconds
            ends[index] = tail
        elif not lane.passes(index):
            break
        position += 1
    lane.stop = position
    lane.tail = tail
    lane.clock.again(tail, lane)
