"""rank.kernel: many ops are one kernel; its inner temporaries are not memory, what survives it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emu.spmd import Mesh
from emu.trace.events import Alloc, Free, Kernel
from emu.virtual.launch import run_virtual


def record(program, **options):
    return run_virtual(program, Mesh(ranks=1), **options).trace[0]


@given(depth=st.integers(1, 6), width=st.integers(1, 40), survivors=st.integers(1, 3))
def test_one_kernel_whose_survivors_alone_take_memory(depth, width, survivors):
    def program(rank):
        x = torch.ones(width)
        with rank.kernel("fused"):
            kept = []
            for _ in range(survivors):
                y = x
                for _ in range(depth):
                    y = (y * 2).add_(1)
                kept.append(y)
            del y
        rank.mark("end")
        return kept

    events = record(program)
    kernels = [e for e in events if isinstance(e, Kernel)]
    assert [k.name for k in kernels] == ["ones", "fused"]
    assert [e.bytes for e in events if isinstance(e, Alloc)] == [4 * width] * (1 + survivors)
    assert kernels[1].flops == 2 * depth * survivors * width
    assert kernels[1].bytes == 4 * width * (1 + survivors), "reads x once, writes the survivors once"


def test_control_without_a_kernel_every_op_and_temporary_counts():
    def program(rank):
        x = torch.ones(8)
        y = ((x * 2) * 2) * 2
        rank.mark("end")
        return y

    events = record(program)
    assert [e.name for e in events if isinstance(e, Kernel)] == ["ones", "mul", "mul", "mul"]
    assert len([e for e in events if isinstance(e, Alloc)]) == 4
    assert len([e for e in events if isinstance(e, Free)]) == 2


def test_stated_work_is_what_is_recorded():
    def program(rank):
        with rank.kernel("flash_attention", flops=1000, bytes=64):
            torch.ones(4, 4) @ torch.ones(4, 4)

    (kernel,) = (e for e in record(program) if isinstance(e, Kernel))
    assert (kernel.name, kernel.flops, kernel.bytes) == ("flash_attention", 1000, 64)


@pytest.mark.parametrize(("said", "recorded"), [(None, "float32"), (torch.bfloat16, "bfloat16")])
def test_a_kernel_that_widens_inside_says_in_which_dtype_it_computes(said, recorded):
    def program(rank):
        x = torch.ones(4, dtype=torch.bfloat16)
        with rank.kernel("wide", flops=8, dtype=said):
            return x.float() * 2

    assert [e.dtype for e in record(program) if isinstance(e, Kernel) and e.name == "wide"] == [recorded]


def test_temporaries_of_a_kernel_need_no_room():
    def program(rank):
        x = torch.ones(256)
        with rank.kernel("fused"):
            return (x.repeat(1000).view(1000, 256) * 2).sum(0)

    run = run_virtual(program, Mesh(ranks=1), capacity_bytes=4096)
    assert run.peak_bytes == [2048] and torch.equal(run.results[0], torch.full((256,), 2000.0))


def test_autograd_through_kernels_and_kernels_inside_kernels():
    def program(rank):
        w = torch.nn.Parameter(torch.ones(3))
        with rank.kernel("outer"), rank.kernel("inner"):
            y = (w * 2).sin().add_(1)
            z = y * y
        z.sum().backward()
        v = torch.ones(3, requires_grad=True)
        ((v * 2).sin() + 1).square().sum().backward()
        return torch.equal(w.grad, v.grad)

    run = run_virtual(program, Mesh(ranks=1))
    assert run.results == [True]
    names = [e.name for e in run.trace[0] if isinstance(e, Kernel)]
    assert "outer" in names and "inner" not in names and "sin" in names


def test_a_kernel_that_raises_leaves_no_kernel_open():
    def program(rank):
        with pytest.raises(ValueError), rank.kernel("bad"):
            torch.ones(3)
            raise ValueError
        torch.ones(2)

    assert record(program)[-1].__class__ in (Kernel, Alloc, Free)
    assert "ones" in [e.name for e in record(program) if isinstance(e, Kernel)]


def test_without_tracking_a_kernel_is_only_its_ops():
    def program(rank):
        with rank.kernel("fused"):
            return torch.ones(2) * 3

    run = run_virtual(program, Mesh(ranks=1), track=False)
    assert run.results[0].tolist() == [3.0, 3.0] and not run.trace[0]
