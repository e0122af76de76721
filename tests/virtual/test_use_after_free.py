"""Freeing memory that another stream may still use is an error, however it is freed; after a wait it is none."""

from __future__ import annotations

import gc
import re

import pytest
import torch

import emu.virtual.hbm as hbm
import emu.virtual.tensors as tensors
from emu.spmd import BufferInFlight, Mesh
from emu.virtual.launch import run_virtual

HERE = r"test_use_after_free\.py:\d+"


def told(
    program, *parts: str, streams: tuple[str, str] = ("comm", "default"), ranks: int = 2, **options
) -> BufferInFlight:
    with pytest.raises(BufferInFlight) as caught:
        run_virtual(program, Mesh(dp=ranks), **options)
    text = str(caught.value)
    for part in (r"a buffer \(\d+ bytes of \w+\) is freed", f"belongs to stream '{streams[1]}'", *parts):
        assert re.search(part, text), f"{part!r} is not in: {text}"
    assert "wait" in caught.value.hint and "keep a reference" in caught.value.hint
    assert caught.value.streams == streams
    return caught.value


def passes(program, ranks: int = 2, **options):
    return run_virtual(program, Mesh(dp=ranks), **options).results


def side_by_side(rank):
    """The default stream, and one that comes after what it was given so far."""
    main, comm = rank.stream("default"), rank.stream("comm")
    comm.wait_stream(main)
    return main, comm


FREES = {
    "del": lambda held: held.__delitem__(0),
    "rebinding": lambda held: held.__setitem__(0, None),
    "clear": lambda held: held.clear(),
    "resize_(0)": lambda held: held[0].untyped_storage().resize_(0),
    "resize_ to less": lambda held: held[0].untyped_storage().resize_(4),
    "resize_ to more": lambda held: held[0].untyped_storage().resize_(64),
    "a larger tensor.resize_": lambda held: held[0].resize_(16),
    "set_": lambda held: held[0].set_(torch.zeros(1)),
    "data": lambda held: setattr(held[0], "data", torch.zeros(1)),
}
WAITS = {
    "wait_stream": lambda rank, main, comm, done: main.wait_stream(comm),
    "event": lambda rank, main, comm, done: done.wait(main),
    "event.synchronize": lambda rank, main, comm, done: done.synchronize(),
    "stream.synchronize": lambda rank, main, comm, done: comm.synchronize(),
    "rank.synchronize": lambda rank, main, comm, done: rank.synchronize(),
    "third stream": lambda rank, main, comm, done: (
        rank.stream("third").wait_event(done),
        main.wait_stream(rank.stream("third")),
    ),
}


def frees_while_read(how: str, wait: str | None):
    def program(rank):
        held = [torch.ones(8)]
        main, comm = side_by_side(rank)
        with comm:
            y = held[0] * 2
            done = rank.event().record()
        if wait is not None:
            WAITS[wait](rank, main, comm, done)
        FREES[how](held)
        main.wait_stream(comm)  # too late
        return y.sum().item()

    return program


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", FREES)
def test_every_way_to_free_is_seen(how, meta):
    error = told(frees_while_read(how, None), "mul on stream 'comm'", "still reads it", meta=meta)
    assert len(re.findall(HERE, str(error))) == 2, "where it was freed, and where the use was issued"


@pytest.mark.parametrize("how", FREES)
@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_before_it_makes_it_right(how, wait):
    assert passes(frees_while_read(how, wait)) == [16.0] * 2


def test_control_without_the_checks_it_goes_unseen(monkeypatch):
    monkeypatch.setattr(hbm, "freed", lambda *args: None)
    monkeypatch.setattr(tensors, "frees", lambda *args: None)
    for how in FREES:
        passes(frees_while_read(how, None))


def test_resizing_raises_at_its_line_and_dying_before_the_next_op():
    reached = []

    def resizes(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.neg()
        x.untyped_storage().resize_(0)
        reached.append("resized")

    def dies(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.neg()
        del x
        reached.append("died")
        torch.ones(1)
        reached.append("an op")

    told(resizes, r"is freed by resize_\(0\) \(" + HERE)
    told(dies, r"is freed \(" + HERE)
    assert reached == ["died"]


@pytest.mark.parametrize("how", ["communication", "the end", "synchronize and the end"])
def test_where_a_death_is_told(how):
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.neg()
        del x
        if how == "communication":
            rank.group("dp").barrier()
        elif how != "the end":
            rank.synchronize()

    told(program)


def test_writing_is_using_too():
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.add_(1)
        del x
        torch.ones(1)

    told(program, "still writes it")


def test_a_reference_that_outlives_the_wait_makes_it_right():
    def program(rank):
        main, comm = side_by_side(rank)
        kept = []
        for _ in range(3):
            x = torch.ones(8)
            comm.wait_stream(main)
            with comm:
                x.neg()
            kept.append(x)
            if len(kept) > 1:
                main.wait_stream(comm)
                kept.pop(0)
        comm.synchronize()

    passes(program)


@pytest.mark.parametrize("waited", [(), ("a",), ("b",), ("a", "b")])
def test_all_streams_that_use_it_are_to_be_waited_for(waited):
    def program(rank):
        x, main = torch.ones(8), rank.stream("default")
        for name in ("a", "b"):
            rank.stream(name).wait_stream(main)
            with rank.stream(name):
                x.neg()
        for name in waited:
            main.wait_stream(rank.stream(name))
        del x
        torch.ones(1)

    missing = [name for name in ("a", "b") if name not in waited]
    if missing:
        told(program, *(f"on stream '{name}'" for name in missing), streams=(missing[0], "default"))
    else:
        passes(program)


@pytest.mark.parametrize("wait", [False, True])
def test_memory_belongs_to_the_stream_it_was_allocated_on(wait):
    """What a side stream made and the default stream reads goes back to the side stream."""

    def program(rank):
        main, comm = side_by_side(rank)
        with comm:
            y = torch.ones(8)
        main.wait_stream(comm)
        z = y * 2
        if wait:
            comm.wait_stream(main)
        del y
        return z.sum().item()

    if wait:
        assert passes(program) == [16.0] * 2
    else:
        told(program, "mul on stream 'default'", streams=("default", "comm"))


def test_resizing_gives_new_memory_which_belongs_to_the_stream_of_the_day():
    def program(rank, back: bool):
        main, comm = side_by_side(rank)
        storage = (x := torch.ones(8)).untyped_storage()
        storage.resize_(0)
        with comm:
            storage.resize_(32)
            x.fill_(1.0)
        main.wait_stream(comm)
        x.neg()
        if back:
            comm.wait_stream(main)
        storage.resize_(0)

    told(program, streams=("default", "comm"), args=(False,))
    passes(program, args=(True,))


def test_a_storage_that_grows_on_another_stream_is_read_by_it():
    def program(rank):
        x = torch.ones(8)
        _, comm = side_by_side(rank)
        with comm:
            x.untyped_storage().resize_(64)

    told(program, "resize_ on stream 'comm'")


def test_one_kernel_made_of_many_ops_makes_memory_of_its_stream():
    def program(rank):
        _, comm = side_by_side(rank)
        with comm:
            with rank.kernel("fused"):
                y = torch.ones(8).mul(2)
            y.neg()
        del y
        return rank

    passes(program)


def test_a_view_keeps_the_memory():
    def program(rank, wait: bool):
        x = torch.ones(8)
        view = x[2:4]
        main, comm = side_by_side(rank)
        with comm:
            x.neg()
        del x
        torch.ones(1)
        if wait:
            main.wait_stream(comm)
        del view
        torch.ones(1)

    passes(program, args=(True,))
    told(program, "32 bytes", args=(False,))


def test_with_one_stream_and_without_tracking_there_is_nothing_to_tell():
    def program(rank):
        x = torch.ones(8)
        x.neg()
        x.untyped_storage().resize_(0)
        del x
        torch.ones(1)

    passes(program)
    passes(frees_while_read("del", None), track=False)


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
