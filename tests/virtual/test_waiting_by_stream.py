"""Waiting for a stream waits for the communications that it was given, as waiting for their works does."""

import pytest
import torch

import emu

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


def test_a_stream_that_will_never_be_done_is_a_deadlock_told_as_such():
    def program(rank):
        if rank == 0:
            rank.group("dp").all_reduce(torch.ones(1), async_op=True)
            rank.synchronize()

    with pytest.raises(emu.EmuError, match=r"rank 0 waits in dp.all_reduce number 0 .* for rank 1 \(finished\)"):
        emu.launch(program, emu.Mesh(dp=2))
