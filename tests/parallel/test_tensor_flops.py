"""Cutting layers over ranks divides their products: all ranks together compute what one device does, in each phase."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import emu
from emu.models import Decoder, config
from emu.parallel import as_batch, mesh_of, parallelize
from emu.trace.events import Kernel
from emu.virtual.launch import run_virtual

ROWS, SEQ = 2, 8


def model(name, recompute=False):
    made = Decoder(config(name, layers=2), seed=0)
    if recompute:
        for block in made.blocks:
            block.forward = lambda *args, call=block.forward: checkpoint(call, *args, use_reentrant=False)
    return made


def trained(rank, plan, made):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 64, (ROWS, SEQ), generator=g) for _ in range(2))
    parallelize(made(), plan, rank).backward(as_batch((x, y)))


def run(mesh, made, **fields):
    plan = emu.Plan(mesh, global_batch=ROWS, seq=SEQ, precision="fp32", **fields)
    return run_virtual(trained, mesh_of(plan), args=(plan, made))


def products(run, *phases):
    """Flops of matrix products and attention, over all ranks."""
    return sum(e.flops for _, e in run.trace.of(Kernel) if e.dims and e.phase in phases)


@pytest.mark.parametrize("fields", [{}, {"sp": True}], ids=str)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_all_ranks_together_compute_one_devices_products(name, fields):
    one, cut = run("tp=1", lambda: model(name)), run("tp=2", lambda: model(name), **fields)
    for phase in ("forward", "backward"):
        assert products(one, phase) == products(cut, phase) > 0
    assert products(one, "backward") > products(one, "forward")
    assert not products(cut, "recompute")
    every = sum(e.flops for _, e in cut.trace.of(Kernel) if e.dims)
    assert every == products(cut, "forward", "backward")  # and none is in another phase
