"""Asking whether a communication is done, again and again: others go on meanwhile, and what cannot end is a deadlock."""

import pytest
import torch

import emu
from emu.spmd import Deadlock


def polls(rank):
    group = rank.group()
    x = torch.full((2,), float(rank.id + 1))
    if rank.id == 0:
        x = x * 1  # it is behind the others in time
    work = group.all_reduce(x, async_op=True)
    n = 0
    while not work.done():
        n += 1
    work.wait()
    return float(x[0]), n


@pytest.mark.parametrize("order", ["program", "time", 0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_rank_that_asks_until_it_is_done_ends(order, ranks):
    run = emu.launch(polls, emu.Mesh(dp=ranks), order=order)
    assert {total for total, _ in run.results} == {ranks * (ranks + 1) / 2}
    assert sum(n for _, n in run.results) > 0  # somebody asked in vain


def test_messages_may_be_asked_for_too():
    def program(rank):
        group, out = rank.group(), torch.zeros(2)
        if rank.id == 0:
            work = group.recv(out, 1, async_op=True)
            while not work.done():
                pass
            work.wait()
        else:
            group.send(torch.ones(2), 0)
        return out

    assert emu.launch(program, emu.Mesh(dp=2)).results[0].tolist() == [1, 1]


@pytest.mark.parametrize("other", ["leaves", "asks, too", "waits"])
def test_what_nobody_can_complete_is_a_deadlock_that_names_the_line(other):
    def program(rank):
        one, two = rank.group(), rank.group("dp")
        if rank.id == 0:
            work = one.all_reduce(torch.ones(2), async_op=True)
            while not work.done():
                pass  # the line above asks
        elif other == "waits":
            two.send(torch.ones(2), 0)
        elif other == "asks, too":
            work = two.recv(torch.ones(2), 0, async_op=True)
            while not work.done():
                pass

    with pytest.raises(Deadlock, match=r"done\(\) of \S+\.all_reduce number 0 \(test_asking\.py:\d+\)|finished"):
        emu.launch(program, emu.Mesh(dp=2))


def test_what_is_asked_hears_how_things_stood():
    def program(rank):
        group = rank.group()
        if rank.id == 0:
            work = group.all_reduce(torch.ones(2), async_op=True)
            before, after = work.done(), work.done()
            work.wait()
            return before, after
        group.all_reduce(torch.ones(2))
        return None

    assert emu.launch(program, emu.Mesh(dp=2)).results[0] == (False, True)
