"""Streams are ordered by events and waits only; a use that nothing orders is an error that names buffer, streams and lines."""

from __future__ import annotations

import re

import pytest
import torch

import emu.virtual.tracker as tracker
from emu.spmd import BufferInFlight, Mesh
from emu.virtual.launch import run_virtual

HERE = r"test_races\.py:\d+"


def races(program, *parts: str, streams: tuple[str, str] | None = None, lines: int = 2) -> BufferInFlight:
    with pytest.raises(BufferInFlight) as caught:
        run_virtual(program, Mesh(dp=2))
    text = str(caught.value)
    for part in ("rank 0", "bytes of", "nothing orders the two", *parts):
        assert re.search(part, text), f"{part!r} is not in: {text}"
    assert len(re.findall(HERE, text)) == lines, f"uses have a line: {text}"
    assert "wait" in caught.value.hint
    if streams:
        assert caught.value.streams == streams
    return caught.value


def passes(program, n: int = 2):
    return run_virtual(program, Mesh(dp=n)).results


def test_writing_a_buffer_before_the_wait():
    def program(rank):
        bucket = torch.ones(4)
        work = rank.group("dp").all_reduce(bucket, async_op=True)
        bucket.mul_(2)
        work.wait()

    races(program, "mul_", "dp.all_reduce number 0", streams=("dp", "default"))


def test_reading_a_result_before_the_wait():
    def program(rank):
        work = rank.group("dp").all_gather(torch.ones(4), async_op=True)
        out = work._call.target  # what a program keeps when it allocates the output itself
        total = out.sum()
        work.wait()
        return total

    races(program, "sum", "reads", "dp.all_gather number 0", streams=("dp", "default"))


def test_reading_a_value_on_the_host_before_the_wait():
    def program(rank):
        x = torch.ones(1)
        work = rank.group("dp").all_reduce(x, async_op=True)
        return x.item(), work.wait()

    races(program, "_local_scalar_dense", "reads")


def test_overwriting_what_is_being_sent():
    def program(rank):
        x, out = torch.ones(4), torch.empty(4)
        other = 1 - rank
        work = rank.group().exchange([("send", x, other), ("recv", out, other)], async_op=True)
        x.zero_()
        work.wait()

    races(program, "zero_", "world.send number 0 to rank 1", "reads")


def test_two_collectives_of_two_groups_on_one_buffer():
    def program(rank):
        x = torch.ones(2)
        a = rank.group("dp").all_reduce(x, async_op=True)
        b = rank.group().all_reduce(x, async_op=True)
        return a.wait(), b.wait()

    races(program, "world.all_reduce number 0", "dp.all_reduce number 0", streams=("dp", "world"))


def producers(waits_for: tuple[str, ...]):
    """Two streams fill the halves of a bucket; a third reduces it."""

    def program(rank):
        bucket = torch.zeros(4)
        reducer = rank.stream("reduce")
        first, second = rank.stream("first"), rank.stream("second")
        ready = rank.event().record()
        for stream, half in ((first, bucket[:2]), (second, bucket[2:])):
            ready.wait(stream)
            if stream is second and "first" in waits_for:
                second.wait_stream(first)  # the halves are one buffer to the device
            with stream:
                half.add_(1.0)
        for name in waits_for:
            reducer.wait_event(rank.stream(name).record_event())
        with reducer:
            rank.group("dp").all_reduce(bucket)
        rank.stream("default").wait_stream(reducer)
        return bucket.tolist()

    return program


def test_two_producers_of_which_the_reducer_waits_for_one():
    def program(rank):
        a, b = torch.zeros(2), torch.zeros(2)
        ready = rank.event().record()
        first, second, reducer = (rank.stream(name) for name in ("first", "second", "reduce"))
        for stream, x in ((first, a), (second, b)):
            ready.wait(stream)
            with stream:
                x.add_(1.0)
        reducer.wait_stream(first)
        with reducer:
            return torch.cat([a, b])

    races(program, "cat", "add_", streams=("second", "reduce"))


def test_two_producers_that_are_both_waited_for():
    assert passes(producers(("first", "second"))) == [[2.0] * 4] * 2


def test_control_without_checks_the_race_goes_unseen(monkeypatch):
    def program(rank):
        bucket = torch.ones(4)
        work = rank.group("dp").all_reduce(bucket, async_op=True)
        bucket.mul_(2)
        work.wait()

    monkeypatch.setattr(tracker, "check_use", lambda *args: None)
    passes(program)


WRITES = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x[:1].zero_(),
    "as out=": lambda x: torch.add(x, 1, out=x),
    "by a list op": lambda x: torch._foreach_add_([x], 1.0),
    "as out= of cat": lambda x: torch.cat([torch.ones(2), torch.ones(2)], out=x),
    "by copy_": lambda x: x.copy_(torch.zeros(4)),
    "by index": lambda x: x.__setitem__(slice(0, 1), 3.0),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("ordered", [True, False])
def test_every_way_to_write_is_seen(how, ordered):
    def program(rank):
        x = torch.ones(4)
        side, main = rank.stream("side"), rank.stream("default")
        side.wait_stream(main)
        with side:
            WRITES[how](x)
        if ordered:
            main.wait_stream(side)
        return x.sum().item()

    if ordered:
        passes(program)
    else:
        races(program, "sum", "still writes", streams=("side", "default"))


def test_reading_at_once_on_two_streams_is_no_race():
    def program(rank):
        x = torch.ones(4)
        side = rank.stream("side")
        side.wait_stream(rank.stream("default"))
        with side:
            a = x * 2
        b = x * 3
        side.synchronize()
        return (a + b).sum().item()

    assert passes(program) == [20.0] * 2


def test_a_write_after_an_unordered_read_is_a_race():
    def program(rank):
        x = torch.ones(4)
        side = rank.stream("side")
        side.wait_stream(rank.stream("default"))
        with side:
            x.sum()
        x.zero_()

    races(program, "zero_", "still reads", streams=("side", "default"))


def test_memory_made_on_a_stream_belongs_to_it():
    def program(rank):
        with rank.stream("side"):
            return torch.empty(3).fill_(1.0).sum().item()

    assert passes(program) == [3.0] * 2


def test_a_broadcasting_root_may_go_on_reading_and_a_reducing_leaf_too():
    def program(rank):
        x = torch.ones(4)
        group = rank.group("dp")
        work = group.broadcast(x, async_op=True)
        seen = x.sum().item() if rank == 0 else 4.0
        work.wait()
        work = group.reduce(x, async_op=True)
        seen += x.sum().item() if rank == 1 else 4.0
        work.wait()
        return seen

    assert passes(program) == [8.0] * 2


@pytest.mark.parametrize(
    "how", ["event", "wait_stream", "synchronize", "event.synchronize", "item", "rank.synchronize"]
)
def test_what_orders_two_streams(how):
    def program(rank):
        x = torch.ones(4)
        side, main = rank.stream("side"), rank.stream("default")
        event = rank.event().record()
        side.wait_event(event)
        with side:
            y = x * 2
            done = rank.event().record()
            if how == "item":
                y.sum().item()
        if how == "event":
            done.wait()
        elif how == "wait_stream":
            main.wait_stream(side)
        elif how == "synchronize":
            side.synchronize()
        elif how == "event.synchronize":
            done.synchronize()
        elif how == "rank.synchronize":
            rank.synchronize()
        return (y + x).sum().item()

    assert passes(program) == [12.0] * 2


@pytest.mark.parametrize("again", [False, True])
def test_the_host_waiting_before_there_is_a_second_stream_orders_what_came_before(again):
    def program(rank):
        x = torch.ones(4)
        rank.synchronize()
        if again:
            x.add_(1)
        with rank.stream("side") as side:
            y = x * 2
        side.synchronize()
        return y

    if again:
        races(program, "mul", "an earlier kernel", streams=("default", "side"), lines=1)
    else:
        passes(program)


def test_an_event_recorded_too_early_orders_nothing():
    def program(rank):
        x = torch.ones(4)
        side = rank.stream("side")
        side.wait_stream(rank.stream("default"))
        early = side.record_event()
        with side:
            x.add_(1)
        early.wait()
        return x.sum()

    races(program, "add_", streams=("side", "default"))


def test_double_buffering_with_waits_is_right():
    """Two buckets in turn: each is filled again only after the reduction that used it."""

    def program(rank):
        group = rank.group("dp")
        buckets, works, totals = [torch.zeros(4), torch.zeros(4)], [None, None], []
        for step in range(6):
            i = step % 2
            if works[i] is not None:
                totals.append(works[i].wait().sum().item())
            buckets[i].fill_(step + rank)
            works[i] = group.all_reduce(buckets[i], async_op=True)
        return totals + [work.wait().sum().item() for work in works]

    assert passes(program) == [[4.0 * (2 * step + 1) for step in range(6)]] * 2


def test_forgetting_the_wait_of_double_buffering_is_a_race():
    def program(rank):
        buckets = [torch.zeros(4), torch.zeros(4)]
        for step in range(3):
            buckets[step % 2].fill_(step)
            rank.group("dp").all_reduce(buckets[step % 2], async_op=True)

    races(program, "fill_", "dp.all_reduce number 0")
