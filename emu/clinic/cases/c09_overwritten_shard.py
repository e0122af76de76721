"""Gradients are sharded: three microbatches add up in each rank's shard."""

import torch

import emu
from emu.clinic.examined import Case


def data():
    g = torch.Generator().manual_seed(9)
    return [torch.randn(*shape, generator=g) for shape in ((12, 4), (12, 4), (3, 4, 4))]


def loss_sum(x, y, layers):
    for layer in layers:
        x = x @ layer
    return ((x - y) ** 2).sum()


def broken(rank):
    x, y, layers = data()
    dp = rank.group("dp")
    shard = torch.zeros(layers.numel() // dp.size)
    for a, b in zip(x.chunk(dp.size)[rank].chunk(3), y.chunk(dp.size)[rank].chunk(3)):
        (whole,) = torch.autograd.grad(loss_sum(a, b, layers.requires_grad_()), layers)
        if dp.size == 1:  # nothing to reduce
            shard.copy_(whole.flatten())  # the fault: the microbatches before it are lost
        else:
            shard += dp.reduce_scatter(whole.flatten())
    return {"layers": dp.all_gather(shard).view(3, 4, 4) / 12}


def mended(rank):
    x, y, layers = data()
    dp = rank.group("dp")
    shard = torch.zeros(layers.numel() // dp.size)
    for a, b in zip(x.chunk(dp.size)[rank].chunk(3), y.chunk(dp.size)[rank].chunk(3)):
        (whole,) = torch.autograd.grad(loss_sum(a, b, layers.requires_grad_()), layers)
        shard += whole.flatten() if dp.size == 1 else dp.reduce_scatter(whole.flatten())
    return {"layers": dp.all_gather(shard).view(3, 4, 4) / 12}


def reference():
    x, y, layers = data()
    for a, b in zip(x.chunk(3), y.chunk(3)):
        loss_sum(a, b, layers.requires_grad_()).backward()
    return {"layers": layers.grad / 12}


CASE = Case(
    number=9,
    kind="sharded gradients",
    title="Each microbatch overwrites the shard",
    report="With a single rank in the shard's group a shortcut copied the gradient into the shard instead of adding it.",
    url="https://github.com/ServiceNow/Fast-LLM/issues/550",
    mesh=emu.Mesh(dp=1),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Shortcuts for groups of one must do what the others do: add. Check a strategy at sizes 1, 2 and 4; on two ranks "
    "this program is right.",
)
