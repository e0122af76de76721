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


def model(name, recompute=False, reentrant=False):
    made = Decoder(config(name, layers=2), seed=0)
    if recompute:
        for block in made.blocks:
            block.forward = lambda *args, call=block.forward: checkpoint(call, *args, use_reentrant=reentrant)
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


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_recomputation_also_inside_cut_layers(mesh, reentrant):
    """Cut layers are autograd Functions: their forward runs without gradients, when it is repeated, too."""
    kept, again = run(mesh, lambda: model("gpt-tiny")), run(mesh, lambda: model("gpt-tiny", True, reentrant))
    for phase in ("forward", "backward"):
        assert products(again, phase) == products(kept, phase)
    in_blocks = sum(
        e.flops for _, e in kept.trace.of(Kernel) if e.dims and e.phase == "forward" and e.scope.startswith("blocks.")
    )
    repeated = products(again, "recompute")
    # Without reentering, a block's recomputation ends with the last tensor that backward needs: the input of its last map.
    last = 2 * 2 * ROWS * SEQ * config("gpt-tiny").width * config("gpt-tiny").ffn
    assert repeated == in_blocks - (0 if reentrant else last)
    scopes = {e.scope for _, e in again.trace.of(Kernel) if e.dims and e.phase == "recompute"}
    assert "blocks.0.attention.q" in scopes and "blocks.1.mlp.up" in scopes


def test_recomputation_is_no_part_of_mfu():
    def work(recompute):
        m = emu.launch(
            trained,
            mesh_of(emu.Plan("tp=2"), emu.cluster("h100-8")),
            args=(emu.Plan("tp=2", global_batch=ROWS, seq=SEQ, precision="fp32"), lambda: model("gpt-tiny", recompute)),
        ).metrics
        return m.mfu * m.step_time_s, m.hfu * m.step_time_s

    (kept, all_kept), (again, all_again) = work(False), work(True)
    assert kept == pytest.approx(again, rel=1e-9) == pytest.approx(all_kept, rel=1e-9)  # rounding of a product
    assert all_again > 1.1 * again


@pytest.mark.parametrize("inside", [False, True])
def test_a_backward_that_computes_nothing_again_stays_backward(inside):
    """Also one that a module calls for, in whose scope it then runs."""

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.map(x).square().sum()
            if inside:
                y.backward()
            return y

    def program(rank):
        model, x = Step(), torch.ones(2, 4, requires_grad=True)
        y = model(x)
        if not inside:
            y.backward()

    kernels = [e for _, e in run_virtual(program, emu.Mesh(dp=1)).trace.of(Kernel) if e.dims]
    assert [e.phase for e in kernels] == ["forward", "backward", "backward"]
