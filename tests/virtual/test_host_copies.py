"""Tensors that wait in the host's memory: values, memory of both kinds, order of streams, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu.spmd.host as host
from emu.spmd import BufferInFlight, CrossRankAccess, EmuError, HostCopy, Mesh, VirtualOutOfMemory
from emu.trace.compare import first_difference
from emu.trace.events import Alloc, EventRecord, EventWait, Free, HostFree, Kernel
from emu.trace.events import HostCopy as Copied
from emu.trace.memory import Memory
from emu.virtual.launch import run_virtual

HERE = r"test_host_copies\.py:\d+"


def run(program, **options):
    return run_virtual(program, Mesh(dp=1), **options)


def alone(program, **options):
    return run(program, **options).results[0]


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@given(shapes, dtypes, st.permutations(range(4)), st.booleans())
def test_what_comes_back_has_the_same_bits_shape_and_strides(shape, dtype, order, waits):
    def program(rank):
        x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        x = x.permute([d for d in order if d < x.dim()]).clone()
        kept = x.clone()
        copy = rank.to_host(x)
        if waits:
            copy.wait()
            x.zero_()  # the copy is of what it was
        y = copy.back()
        assert (y is x) is not waits
        assert y.dtype == kept.dtype and y.stride() == kept.stride() and torch.equal(y, kept)

    run(program)


def test_device_memory_is_free_from_wait_to_fetch_and_host_memory_is_taken_from_the_copy_to_the_way_back():
    def program(rank):
        kib = torch.ones(256)
        copies = rank.to_host([kib, torch.ones(512)])
        del kib
        seen = [device_bytes(rank)]
        for copy in copies:
            copy.wait()
            seen.append(device_bytes(rank))
        rank.fetch(copies)
        seen.append(device_bytes(rank))
        back = copies[0].back()
        seen.append(device_bytes(rank))
        rank.mark("end")  # what ends with the program is no part of the record; this is
        return seen, back.nbytes

    run_ = run(program)
    assert run_.results[0] == ([3072, 2048, 0, 3072, 3072], 1024)
    events = [(type(e).__name__, e.bytes) for e in run_.trace[0] if type(e) in (Copied, HostFree, Alloc, Free)]
    assert events[2:4] == [("HostCopy", 1024), ("HostCopy", 2048)]
    assert events[4:8] == [("Free", 1024), ("Free", 2048), ("Alloc", 1024), ("Alloc", 2048)]
    memory = Memory(run_.trace)
    assert memory.peak_host_bytes() == memory.peak_host_bytes(0) == 3072
    assert memory.host_series(0)[1] == [1024, 3072, 2048]  # the other's was not given back before the end
    assert memory.peak_bytes() == 3072, "the host's memory is none of the device's"


def device_bytes(rank) -> int:
    return rank._device.ledger.bytes


def test_memory_that_comes_back_has_its_old_category_and_place():
    def program(rank):
        x = torch.ones(8)
        rank.account(x, "optimizer", "blocks.3")
        copy = rank.to_host(x)
        copy.wait()
        del x
        y = copy.back()
        return rank._device.ledger.by_place, y is not None

    assert alone(program)[0] == {("optimizer", "blocks.3"): 32}


def test_a_fetch_that_does_not_fit_is_out_of_memory_at_its_line():
    def program(rank):
        copy = rank.to_host(torch.ones(100))
        copy.wait()
        full = torch.ones(200)
        copy.fetch()
        return full

    with pytest.raises(VirtualOutOfMemory, match=r"400 bytes more do not fit, 200 bytes of 1\.00 kB are free"):
        run(program, capacity_bytes=1000)
    # The negative control: without `wait` both never fit together, so it is `wait` that frees.
    with pytest.raises(VirtualOutOfMemory, match="800 bytes more"):
        run(lambda rank: (rank.to_host(torch.ones(100)), torch.ones(200)), capacity_bytes=1000)


def test_the_record_says_who_waits_for_whom():
    def program(rank):
        copies = rank.to_host([torch.ones(2), torch.ones(3)], "h")
        for _ in range(2):
            for copy in copies:
                copy.wait()  # one wait serves for all, and once
        rank.fetch(copies)
        return [copy.back() for copy in copies]

    events = [e for e in run(program).trace[0] if type(e) not in (Alloc, Free, Kernel)]
    assert events == [
        EventRecord(1, "default"),
        EventWait(1, "d2h"),
        Copied("to_host", 1, 8, "float32", "d2h", "h"),
        Copied("to_host", 2, 12, "float32", "d2h", "h"),
        EventRecord(2, "d2h"),
        EventWait(2, "default"),
        EventRecord(3, "default"),
        EventWait(3, "h2d"),
        EventWait(2, "h2d"),
        Copied("from_host", 1, 8, "float32", "h2d", "h"),
        Copied("from_host", 2, 12, "float32", "h2d", "h"),
        EventRecord(4, "h2d"),
        EventWait(4, "default"),
    ]  # their host memory is given back as the program ends, which is no part of the record


def test_a_shape_run_leaves_the_same_record():
    def program(rank):
        x = torch.ones(6, 5, device=rank.device) * 2
        copy = rank.to_host(x.t(), "x")
        copy.wait()
        del x
        y = copy.back() + 1
        del copy, y
        torch.ones(1, device=rank.device) * 2

    assert first_difference(run(program).trace, run(program, meta=True).trace) is None


def races(program, *parts: str) -> None:
    with pytest.raises(BufferInFlight) as caught:
        run(program)
    for part in (*parts, HERE):
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    assert "wait" in caught.value.hint


def test_writing_what_is_being_copied_is_a_race():
    def program(rank):
        x = torch.ones(4)
        copy = rank.to_host(x, "x")
        x.add_(1)
        return copy.back()

    races(program, "add_", "writes a buffer", "to_host of x on stream 'd2h'", "still reads")


def test_a_copy_that_is_dropped_with_its_tensor_before_the_wait_is_told():
    def program(rank):
        x = torch.ones(4)
        rank.to_host(x)
        del x
        torch.ones(4) + 1

    races(program, "is freed", "to_host on stream 'd2h'", "still reads")


def test_reading_on_a_stream_that_did_not_wait_is_a_race():
    def program(rank, waits):
        copy = rank.to_host(torch.ones(4))
        copy.wait()
        x = copy.back()
        side = rank.stream("side")
        if waits:
            side.wait_stream(rank.stream("default"))
        with side:
            total = x.sum()
        rank.synchronize()
        return total.item()

    races(lambda rank: program(rank, False), "sum .* on stream 'side' reads", "from_host on stream 'h2d'")
    assert alone(lambda rank: program(rank, True)) == 4


@pytest.mark.parametrize(
    "broken", ["before the copy out", "before the memory goes", "before the copy in", "before the read"]
)
def test_no_wait_of_this_file_can_be_left_out(broken, monkeypatch):
    """Negative controls: without each of the four waits of emu.spmd.host a program that is right is a race."""
    wait, init = host._Batch.wait, host._Batch.__init__

    def no_wait(batch, device, stream=None):
        out, default = batch.stream.name == host.TO_HOST, stream is None
        if broken != ("before the memory goes" if out else "before the read") or not default:
            wait(batch, device, stream)

    def no_order(batch, device, name):
        if broken == f"before the copy {'out' if name == host.TO_HOST else 'in'}":
            batch.stream, batch._event, batch._waited = device.stream(name), None, []
        else:
            init(batch, device, name)

    def program(rank):
        rank.stream(host.TO_HOST), rank.stream(host.FROM_HOST)  # streams that know of nothing later
        x = torch.ones(4) * 3
        copy = rank.to_host(x)
        y = x * 2
        copy.wait()
        del x, y
        z = copy.back() + 1
        del copy
        return z + 1

    assert torch.equal(alone(program), torch.full((4,), 5.0))
    monkeypatch.setattr(host._Batch, "wait", no_wait)
    monkeypatch.setattr(host._Batch, "__init__", no_order)
    with pytest.raises(BufferInFlight, match=r"d2h|h2d"):
        run(program)


def test_what_cannot_be_copied_is_refused_with_what_to_do():
    def refused(x, words):
        with pytest.raises(EmuError, match=words) as caught:
            run(lambda rank: rank.to_host(x(rank)))
        assert caught.value.hint

    refused(lambda rank: torch.ones(2, requires_grad=True), "requires grad")
    refused(lambda rank: [torch.ones(2), 3], "not a int")
    refused(lambda rank: torch.ones(2, 2).to_sparse(), "sparse|dense")


def test_a_copy_comes_back_once():
    def program(rank):
        copy = rank.to_host(torch.ones(2), "x")
        before = repr(copy)
        copy.wait()
        there = repr(copy)
        copy.back()
        assert "came back" in repr(copy)
        with pytest.raises(EmuError, match="came back before"):
            copy.back()
        assert isinstance(copy, HostCopy) and copy.bytes == 8 and not copy.here
        return before, there

    assert alone(program) == ("HostCopy(8 bytes: x, on the device, too)", "HostCopy(8 bytes: x, in host memory)")


def test_a_tensor_of_another_rank_is_refused():
    shared = []

    def program(rank):
        if rank == 0:
            shared.append(torch.ones(3))
        rank.group("dp").barrier()
        if rank == 1:
            rank.to_host(shared[0])

    with pytest.raises(CrossRankAccess, match=r"to_host uses a tensor .* lives on rank 0"):
        run_virtual(program, Mesh(dp=2))


def test_untracked_runs_copy_too():
    def program(rank):
        x = torch.ones(3)
        copy = rank.to_host(x)
        copy.wait()
        return copy.back()

    run_ = run(program, track=False)
    assert torch.equal(run_.results[0], torch.ones(3))
    assert [e.kind for _, e in run_.trace.of(Copied)] == ["to_host", "from_host"]
