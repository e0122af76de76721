"""Nothing is left of a launch: no thread, no tensor, no hook in torch, whether it ends well, fails, sticks or is interrupted."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch

import emu.virtual.launch as launch
from emu.spmd import EmuError, Mesh
from emu.virtual.launch import run_virtual


@pytest.fixture(autouse=True)
def what_other_tests_left_is_not_looked_through():
    """Garbage is looked for hundreds of times here, and a process that ran thousands of tests holds a lot."""
    gc.collect()
    gc.freeze()


ENDS = ("well", "fails", "deadlocks", "mismatches", "out of memory", "interrupted")


def work(rank, end: str, launch_number: int):
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    model.itself = [model]  # a cycle, as programs have them
    optimizer = torch.optim.Adam(model.parameters())
    group = rank.group()
    model(torch.randn(4, 8)).sum().backward()
    for p in model.parameters():
        group.all_reduce(p.grad, async_op=True).wait()
    optimizer.step()
    if end == "fails" and rank == launch_number % 8:
        raise ValueError(launch_number)
    if end == "deadlocks" and rank == 3:
        return None
    if end == "mismatches" and rank == 5:
        group.broadcast(torch.ones(2))
    if end == "out of memory":
        torch.empty(1 << 20)
    if end == "interrupted" and rank == 6:
        _thread.interrupt_main()
        time.sleep(0.001)
    group.all_reduce(torch.ones(2))
    return torch.ones(3)


def once(i: int) -> None:
    end = ENDS[i % len(ENDS)]
    with suppress(ValueError, EmuError, KeyboardInterrupt):
        run_virtual(
            work,
            Mesh(ranks=8),
            args=(end, i),
            order=("program", i)[i % 2],
            capacity_bytes=100_000 if end == "out of memory" else None,
        )
    with suppress(KeyboardInterrupt):  # it may come late
        time.sleep(0.001)


def tensor_bytes() -> int:
    gc.collect()
    return sum(o.untyped_storage().nbytes() for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def hooks() -> tuple:
    return (
        dict(nn_module._global_forward_hooks),
        dict(nn_module._global_forward_pre_hooks),
        dict(nn_module._global_parameter_registration_hooks),
        dict(nn_module._global_buffer_registration_hooks),
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
        torch.UntypedStorage.resize_,
        torch.UntypedStorage.clone,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        len(_python_dispatch._get_current_dispatch_mode_stack()),
        gc.isenabled(),
        gc.get_threshold(),
    )


def test_three_hundred_launches_leave_nothing():
    for i in range(60):
        once(i)
    before = threading.active_count(), hooks(), tensor_bytes(), len(gc.get_objects()), resident_bytes()
    for i in range(300):
        once(i)
    assert threading.active_count() == before[0]
    assert hooks() == before[1]
    assert tensor_bytes() == before[2]
    assert len(gc.get_objects()) - before[3] < 1000, "three objects a launch would be a leak"
    if os.path.exists("/proc/self/statm"):
        assert resident_bytes() - before[4] < 60e6, "a leak of one rank's tensors and record a launch would show"


def test_control_a_kept_result_shows():
    once(0)
    before = tensor_bytes()
    kept = run_virtual(work, Mesh(ranks=8), args=("well", 0)).results
    assert tensor_bytes() - before == sum(t.nbytes for t in kept) == 8 * 12


def test_control_hooks_left_behind_show(monkeypatch):
    before = hooks()
    monkeypatch.setattr(launch.TorchHooks, "__exit__", lambda self, *exc: None)
    once(0)
    left = hooks()
    monkeypatch.undo()
    launch.TorchHooks().__exit__()
    assert left != before and hooks() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_garbage_is_as_it_was(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        for i in range(len(ENDS)):
            once(i)
            assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_failed_launch_is_freed_with_its_error_not_by_the_collector():
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes_uncollected()

        def program(rank):
            x = torch.ones(1000)
            rank.group().barrier()
            if rank == 1:
                raise ValueError(x)

        with suppress(ValueError):
            run_virtual(program, Mesh(ranks=3))
        assert tensor_bytes_uncollected() == before
    finally:
        gc.enable()


def tensor_bytes_uncollected() -> int:
    """Of the programs' tensors; the scheduler's few generator states may wait for the collector."""
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype != torch.uint8]
    return sum(t.untyped_storage().nbytes() for t in tensors)
