"""Waiting for a stream waits for the communications that it was given, as waiting for their works does."""

import pytest
import torch

import emu
from emu.spmd import Deadlock
from emu.virtual.device import VirtualDevice

WAITS = {
    "work": lambda rank, work: work.wait(),
    "wait_stream": lambda rank, work: rank.stream("default").wait_stream(rank.stream("dp")),
    "event": lambda rank, work: rank.stream("dp").record_event().wait(),
    "event on the host": lambda rank, work: rank.stream("dp").record_event().synchronize(),
    "stream": lambda rank, work: rank.stream("dp").synchronize(),
    "all": lambda rank, work: rank.synchronize(),
}


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("order", ["program", 0, 1, 2, "time"])
@pytest.mark.parametrize("wait", WAITS)
def test_what_is_read_after_a_wait_is_what_everyone_gave(wait, order, track):
    def program(rank):
        x = torch.full((2,), float(rank + 1))
        work = rank.group("dp").all_reduce(x, async_op=True)
        WAITS[wait](rank, work)
        got = (x * 1).tolist()
        return got

    assert emu.launch(program, emu.Mesh(dp=3), order=order, track=track).results == [[6.0, 6.0]] * 3


@pytest.mark.parametrize("track", [True, False])
def test_messages_are_waited_for_too_and_what_was_issued_later_is_not(track):
    def program(rank):
        x, dp = torch.full((2,), float(rank)), rank.group("dp")
        early = rank.stream("dp").record_event()  # nothing was issued yet
        if rank == 0:
            work = dp.recv(x, src=1, async_op=True)
            early.wait()  # or this would wait for a message that comes only after the next one
            dp.send(torch.ones(1), dst=1)
            rank.stream("default").wait_stream(rank.stream("dp<-1"))
            return (x * 1).tolist(), work.done()
        dp.recv(torch.zeros(1), src=0)
        dp.send(x, dst=0)
        return None

    assert emu.launch(program, emu.Mesh(dp=2), track=track).results[0] == ([1.0, 1.0], True)


KINDS = {
    "message": lambda group, x: (
        group.recv(x, 1 - group.rank, async_op=True) if group.rank else group.send(x, 1, async_op=True)
    ),
    "messages": lambda group, x: group.exchange(
        [("recv" if group.rank else "send", part, 1 - group.rank) for part in (x, x.clone())], async_op=True
    ),
    "broadcast": lambda group, x: group.broadcast(x, async_op=True),
    "all_reduce": lambda group, x: group.all_reduce(x, async_op=True),
    "all_gather": lambda group, x: group.all_gather(x, async_op=True),
    "all_to_all": lambda group, x: group.all_to_all(x, async_op=True),
}


def reads_beside(rank, kind, rows, before):
    """Rank 1 reads on the host while a communication is in flight for which rank 0 comes only afterwards."""
    pp = rank.group("pp")
    for _ in range(before):  # what the stream was given before, and the host has waited for
        KINDS[kind](pp, torch.ones(2, 6)).wait()
        rank.synchronize()
    if rank == 0:
        pp.recv(torch.empty(1), 1)
        KINDS[kind](pp, torch.ones(rows, 6)).wait()
        return True
    work = KINDS[kind](pp, torch.ones(rows, 6))
    total = float(torch.ones(3).sum())
    beside = not work.done()
    pp.send(torch.ones(1), 0)
    rank.synchronize()
    return total == 3 and beside and work.done()  # whoever waits for all waits for it


@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_beside_what_is_in_flight_with_or_without_elements(kind, rows, before, track):
    assert emu.launch(reads_beside, emu.Mesh(pp=2), args=(kind, rows, before), track=track).results == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tick_of_its_own_it_would_hold_up_the_host(kind, monkeypatch):
    communicates = VirtualDevice._communicates

    def no_tick(self, name, here):
        stream = communicates(self, name, here)
        stream.tick -= self.many_streams
        return stream

    monkeypatch.setattr(VirtualDevice, "_communicates", no_tick)
    with pytest.raises(Deadlock):
        emu.launch(reads_beside, emu.Mesh(pp=2), args=(kind, 0, 0))


def test_a_stream_that_will_never_be_done_is_a_deadlock_told_as_such():
    def program(rank):
        if rank == 0:
            rank.group("dp").all_reduce(torch.ones(1), async_op=True)
            rank.synchronize()

    with pytest.raises(emu.EmuError, match=r"rank 0 waits in dp.all_reduce number 0 .* for rank 1 \(finished\)"):
        emu.launch(program, emu.Mesh(dp=2))
