"""Two sequences over dp, each cut in two over cp; the ranks have 4, 1, 2 and 3 labels that count."""

import torch
import torch.nn.functional as F

import emu
from emu.clinic.examined import Case


def data():
    g = torch.Generator().manual_seed(34)
    x, w = torch.randn(2, 8, 4, generator=g), torch.randn(4, 6, generator=g)
    y = torch.randint(0, 6, (2, 8), generator=g)
    counts = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 1]]).bool()
    return x, y.masked_fill(~counts, -100), w.requires_grad_()


def loss_sum(x, y, w):
    return F.cross_entropy((x @ w).flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)


def part(rank):
    x, y, w = data()
    dp, cp = rank.coords["dp"], slice(4 * rank.coords["cp"], 4 * rank.coords["cp"] + 4)
    return x[dp, cp], y[dp, cp], w


def broken(rank):
    x, y, w = part(rank)
    dp = rank.group("dp")
    loss = loss_sum(x, y, w) / dp.all_reduce((y != -100).sum())  # the fault: half of a sequence is on cp
    loss.backward()
    world = rank.group("dp", "cp")
    return {"loss": world.all_reduce(loss.detach()), "w": world.all_reduce(w.grad)}


def mended(rank):
    x, y, w = part(rank)
    world = rank.group("dp", "cp")
    n = world.all_reduce((y != -100).sum())
    loss = loss_sum(x, y, w)
    loss.backward()
    return {"loss": world.all_reduce(loss.detach()) / n, "w": world.all_reduce(w.grad) / n}


def reference():
    x, y, w = data()
    loss, n = loss_sum(x, y, w), (y != -100).sum()
    loss.backward()
    return {"loss": loss.detach() / n, "w": w.grad / n}


CASE = Case(
    number=34,
    kind="context parallel",
    title="Tokens are counted over the wrong group",
    report="Loss and gradients were scaled by the number of context-parallel ranks, or by tokens counted over the wrong "
    "group.",
    url="https://github.com/NVIDIA/Megatron-LM/issues/906",
    mesh=emu.Mesh(dp=2, cp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Labels lie on all ranks of dp and cp together, so they are counted, and gradients summed, over both: "
    'rank.group("dp", "cp"), ten tokens here.',
)
