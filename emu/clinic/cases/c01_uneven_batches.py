"""Seven samples on three ranks: 3, 2 and 2."""

import torch

import emu
from emu.clinic.examined import Case

SIZES = (3, 2, 2)


def data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=g) for shape in ((7, 4), (7, 2), (4, 2))]


def broken(rank):
    x, y, w = data()
    x, y, w = x.split(SIZES)[rank], y.split(SIZES)[rank], w.requires_grad_()
    loss = ((x @ w - y) ** 2).mean()  # the fault: a rank's two samples weigh as much as another's three
    loss.backward()
    dp = rank.group("dp")
    dp.all_reduce(w.grad).div_(dp.size)
    return {"loss": dp.all_reduce(loss.detach()) / dp.size, "w": w.grad}


def mended(rank):
    x, y, w = data()
    n = y.numel()
    x, y, w = x.split(SIZES)[rank], y.split(SIZES)[rank], w.requires_grad_()
    loss = ((x @ w - y) ** 2).sum()
    loss.backward()
    dp = rank.group("dp")
    dp.all_reduce(w.grad).div_(n)
    return {"loss": dp.all_reduce(loss.detach()) / n, "w": w.grad}


def reference():
    x, y, w = data()
    loss = ((x @ w.requires_grad_() - y) ** 2).sum()
    loss.backward()
    return {"loss": loss.detach() / y.numel(), "w": w.grad / y.numel()}


CASE = Case(
    number=1,
    kind="data parallel",
    title="Ranks with fewer samples weigh as much as the others",
    report="A wrapper summed the ranks' gradients and divided by the number of ranks, also where their batches differed in "
    "size.",
    url="https://github.com/pytorch/pytorch/issues/67253",
    mesh=emu.Mesh(dp=3),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="A mean of means is no mean where shares are uneven. Sum losses and gradients, and divide once, late, by all that "
    "counts on all ranks.",
)
