"""Waiting for the first of several communications: it is the one that ends first, and nothing is seen before it can be."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import emu
from emu.spmd import CollectiveError, Deadlock, Mesh, wait_any
from emu.trace.events import Kernel
from emu.virtual.launch import run_virtual


def seconds(event):
    """A kernel lasts as long as it says, a message one second a byte."""
    return float(event.flops if type(event) is Kernel else event.bytes)


def clock_of(rank):
    return rank._device.rendezvous.scheduler.threads[rank.id].clock_s


def collector(rank, delays, sizes):
    """Rank 0 takes what the others send after their delays, as it comes: [(worker, the clock then), ...]."""
    world = rank.group()
    if rank != 0:
        with rank.kernel("compute", flops=delays[rank - 1], bytes=0):
            pass
        world.send(torch.full((sizes[rank - 1],), rank.id, dtype=torch.int8), 0)
        return None
    buffers = {w: torch.empty(sizes[w - 1], dtype=torch.int8) for w in range(1, world.size)}
    works = {w: world.recv(buffer, w, async_op=True) for w, buffer in buffers.items()}
    came = []
    while works:
        workers = list(works)
        w = workers[wait_any([works[w] for w in workers])]
        assert works.pop(w).wait().tolist() == [w] * sizes[w - 1]
        came.append((w, clock_of(rank)))
    return came


def collected(delays, sizes, order="time"):
    mesh = Mesh(ranks=len(delays) + 1)
    options = {"seconds": seconds} if order == "time" else {}
    return run_virtual(collector, mesh, order=order, args=(delays, sizes), **options).results[0]


workers = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6)


@given(workers)
@example([(10, 8), (12, 1)])  # posted first, and yet it ends last
@example([(5, 3), (5, 3), (3, 5)])  # equal: in the order of the list
def test_messages_are_taken_in_the_order_in_which_they_end_and_never_before(workers):
    delays, sizes = zip(*workers)
    ends = sorted((delay + size, w) for w, (delay, size) in enumerate(workers, 1))
    assert collected(delays, sizes) == [(w, end) for end, w in ends]


def test_without_a_clock_all_come_once_in_an_order_that_is_the_same_every_time():
    """The control: what ends first is not what comes first where nobody keeps time."""
    delays, sizes = (30, 20, 10), (1, 1, 1)
    assert [w for w, _ in collected(delays, sizes)] == [3, 2, 1]
    assert [w for w, _ in collected(delays, sizes, "program")] == [1, 2, 3]
    for seed in range(5):
        once, again = collected(delays, sizes, seed), collected(delays, sizes, seed)
        assert once == again and sorted(w for w, _ in once) == [1, 2, 3]


def test_a_receiver_that_is_late_takes_what_came_first_first():
    def program(rank):
        world = rank.group()
        if rank != 0:
            with rank.kernel("compute", flops=10 * (4 - rank.id), bytes=0):
                pass
            world.send(torch.zeros(1, dtype=torch.int8), 0)
            return None
        works = [world.recv(torch.empty(1, dtype=torch.int8), w, async_op=True) for w in (1, 2, 3)]
        with rank.kernel("busy", flops=100, bytes=0):
            pass
        first = wait_any(works)
        works[first].wait()
        at = clock_of(rank)
        for work in works:
            work.wait()
        return first + 1, at

    assert run_virtual(program, Mesh(ranks=4), order="time", seconds=seconds).results[0] == (3, 100)


def test_collectives_and_grouped_messages_are_waited_for_alike():
    def program(rank):
        world, pair = rank.group(), rank.group(members=[0, 1]) if rank < 2 else None
        if rank == 2:
            with rank.kernel("compute", flops=100, bytes=0):
                pass
        slow = world.all_reduce(torch.ones(1), async_op=True)
        if pair is None:
            return int(slow.wait())
        a, b = torch.zeros(2), torch.zeros(3)
        kind = "send" if rank == 0 else "recv"
        fast = pair.exchange([(kind, a, 1 - rank), (kind, b, 1 - rank)], async_op=True)
        shifted = pair.ring_shift([torch.zeros(2), torch.zeros(3)], async_op=True)
        order = [wait_any([slow, fast]), wait_any([slow, shifted])]
        return order, int(slow.wait()), len(fast.wait()), len(shifted.wait())

    results = run_virtual(program, Mesh(ranks=3), order="time", seconds=seconds).results
    assert results == [([1, 1], 3, 2, 2), ([1, 1], 3, 2, 2), 3]


def test_waiting_for_no_work_or_for_what_is_none_is_refused():
    with pytest.raises(CollectiveError, match=r"no work to wait for\n.*async_op=True"):
        wait_any([])
    with pytest.raises(CollectiveError, match=r"Tensor is not a work"):
        wait_any([torch.ones(1)])  # type: ignore[list-item]


def test_works_of_which_none_can_end_are_a_deadlock_and_not_a_hang():
    def program(rank):
        world = rank.group()
        if rank == 0:
            wait_any([world.recv(torch.empty(1), w, async_op=True) for w in (1, 2)])
        else:
            world.recv(torch.empty(1), 0)

    with pytest.raises(Deadlock, match="wait_any of 2"):
        emu.launch(program, emu.Mesh(ranks=3))
