"""When memory that was freed too early is told: with communications, errors under way, hooks, cycles, and at the end."""

from __future__ import annotations

import gc

import pytest
import torch

from emu.spmd import BufferInFlight, Mesh
from emu.virtual.launch import run_virtual

from .early_frees import passes, side_by_side, told

HERE = r"test_use_after_free_told\.py:\d+"


# Communications.


def run_communication(rank, kind: str, x: torch.Tensor):
    group = rank.group("dp")
    if kind == "exchange":
        return group.exchange([("send", x, 1 - rank), ("recv", torch.empty(8), 1 - rank)], async_op=True)
    return getattr(group, kind)(x, async_op=True)


COMMUNICATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "exchange")


@pytest.mark.parametrize("order", ["program", "time", 0, 1, 2])
@pytest.mark.parametrize("kind", COMMUNICATIONS)
def test_a_work_keeps_its_buffers_until_it_is_waited_for(kind, order):
    def program(rank):
        work = run_communication(rank, kind, torch.ones(8))
        y = torch.ones(8).mul(2)
        work.wait()
        del work
        return y.sum().item()

    seconds = {"seconds": lambda event: 1.0} if order == "time" else {}
    assert passes(program, order=order, **seconds) == [16.0] * 2


@pytest.mark.parametrize("order", ["program", "time", 0, 1, 2])
@pytest.mark.parametrize("kind", COMMUNICATIONS)
def test_a_work_that_is_dropped_without_waiting_is_told(kind, order):
    def program(rank):
        run_communication(rank, kind, torch.ones(8))
        torch.ones(1)
        rank.group("dp").barrier()

    seconds = {"seconds": lambda event: 1.0} if order == "time" else {}
    with pytest.raises(BufferInFlight, match=rf"is freed.* while dp\.\w+ number 0 .*issued at {HERE}") as caught:
        run_virtual(program, Mesh(dp=2), order=order, **seconds)
    assert "call wait() on its work first" in caught.value.hint


def test_a_dropped_work_whose_stream_is_waited_for_is_none():
    def program(rank):
        x = torch.ones(8)
        rank.group("dp").all_reduce(x, async_op=True)
        rank.stream("default").wait_stream(rank.stream("dp"))
        rank.group("dp").barrier()
        del x
        torch.ones(1)

    passes(program)


def test_waiting_on_another_stream_is_not_waiting_on_the_owner():
    def program(rank, wait: bool):
        x = torch.ones(8)
        work = rank.group("dp").all_reduce(x, async_op=True)
        with rank.stream("comm") as comm:
            work.wait()
        if wait:
            rank.stream("default").wait_stream(comm)
        del x, work
        torch.ones(1)

    told(program, r"dp\.all_reduce number 0", streams=("dp", "default"), args=(False,))
    passes(program, args=(True,))


def test_gathering_ahead_must_not_reuse_a_layer_before_its_gather_came():
    """Unsharded layers are filled ahead and freed after use; one too eager frees what is still on its way."""

    def program(rank, eager: bool):
        group, ahead = rank.group("dp"), []
        shards = [torch.ones(4) * layer for layer in range(4)]
        wholes = [torch.empty(8) for _ in shards]
        for whole in wholes:
            whole.untyped_storage().resize_(0)
        total = 0.0
        for layer in range(5):
            if layer < 4:
                wholes[layer].untyped_storage().resize_(32)
                ahead.append(group.all_gather(shards[layer], out=wholes[layer], async_op=True))
            if layer:
                if not eager:
                    ahead[layer - 1].wait()
                    total += wholes[layer - 1].sum().item()
                wholes[layer - 1].untyped_storage().resize_(0)
        return total

    assert passes(program, args=(False,)) == [48.0] * 2
    told(program, "still writes it", streams=("dp", "default"), args=(True,))


# Errors under way, and the end.


def frees_and(rest):
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.neg()
        del x
        rest(rank)

    return program


def test_another_error_is_not_hidden():
    def fails(rank):
        raise ValueError("the real one")

    def cleans_up(rank):
        try:
            fails(rank)
        finally:
            torch.ones(1)

    for rest in (fails, cleans_up):
        with pytest.raises(ValueError, match="the real one"):
            run_virtual(frees_and(rest), Mesh(dp=2))


def test_a_rank_that_is_ended_is_told_of_nothing_else():
    def program(rank):
        if rank == 1:
            raise ValueError("the real one")
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        try:
            with comm:
                x.neg()
            rank.group("dp").barrier()
        finally:
            del x
            torch.ones(1)

    with pytest.raises(ValueError, match="the real one"):
        run_virtual(program, Mesh(dp=2))


def test_an_error_that_was_handled_does_not_excuse():
    def rest(rank):
        try:
            raise ValueError
        except ValueError:
            torch.ones(1)
        torch.ones(1)

    told(frees_and(rest))


def test_it_is_told_once():
    def rest(rank):
        with pytest.raises(BufferInFlight):
            torch.ones(1)
        torch.ones(1)

    passes(frees_and(rest))


def test_what_dies_with_the_program_is_no_fault():
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.neg()

    passes(program)
    passes(lambda rank: program(rank))
    told(lambda rank: (program(rank), torch.ones(1)))  # control: it goes on


def test_a_result_in_flight_is_told_as_a_result():
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            y = x * 2
        return y

    with pytest.raises(BufferInFlight, match="the result"):
        run_virtual(program, Mesh(dp=2))


def test_an_op_within_backward_tells():
    def program(rank):
        p = torch.ones(8, requires_grad=True)
        _, comm = side_by_side(rank)

        def hook(grad):
            copy = grad.clone()
            comm.wait_stream(rank.stream("default"))
            with comm:
                copy.neg()
            del copy
            return grad * 2

        p.register_hook(hook)
        p.sum().backward()

    told(program, "neg on stream 'comm'")


@pytest.mark.parametrize("wait", [False, True])
def test_cycles_die_when_they_are_collected(wait):
    def program(rank):
        main, comm = side_by_side(rank)
        ring = [torch.ones(8)]
        ring.append(ring)
        comm.wait_stream(main)
        with comm:
            ring[0].neg()
        del ring
        torch.ones(1)
        if wait:
            main.wait_stream(comm)
        gc.collect()
        torch.ones(1)

    passes(program) if wait else told(program)
