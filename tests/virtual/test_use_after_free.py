"""Freeing memory that another stream may still use is an error, however it is freed; after a wait it is none."""

from __future__ import annotations

import re

import pytest
import torch

import emu.virtual.hbm as hbm
import emu.virtual.tensors as tensors

from .early_frees import passes, side_by_side, told

HERE = r"test_use_after_free\.py:\d+"


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
