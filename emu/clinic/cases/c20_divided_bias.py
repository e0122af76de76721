"""A row-parallel linear map: each of four ranks multiplies two of eight inputs, and the products are summed."""

import torch

import emu
from emu.clinic.examined import Case
from emu.spmd import reduce_from


def data():
    g = torch.Generator().manual_seed(20)
    return [torch.randn(*shape, generator=g) for shape in ((5, 8), (8, 3), (3,), (5, 3))]


def broken(rank):
    x, w, b, c = data()
    tp = rank.group("tp")
    b.requires_grad_()
    part = x.chunk(4, 1)[rank] @ w.chunk(4)[rank] + b / tp.size  # the fault: so is its gradient
    y = reduce_from(part, tp)
    (y * c).sum().backward()
    return {"y": y, "b": b.grad}


def mended(rank):
    x, w, b, c = data()
    tp = rank.group("tp")
    b.requires_grad_()
    y = reduce_from(x.chunk(4, 1)[rank] @ w.chunk(4)[rank], tp) + b
    (y * c).sum().backward()
    return {"y": y, "b": b.grad}


def reference():
    x, w, b, c = data()
    y = x @ w + b.requires_grad_()
    (y * c).sum().backward()
    return {"y": y, "b": b.grad}


CASE = Case(
    number=20,
    kind="tensor parallel",
    title="A bias is divided by the ranks before it is summed",
    report="The bias of a row-parallel layer was divided by the number of ranks, so that the sum has it once; its gradient "
    "came out as many times too small.",
    url="https://github.com/pytorch/torchtitan/pull/4332",
    mesh=emu.Mesh(tp=4),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Add the bias once, after the sum, on every rank: y = reduce(x W) + b. Added before it on each rank, it would be "
    "in y four times.",
)
