"""Two ranks all-reduce: one of them five numbers, the other six."""

import torch

import emu
from emu.clinic.examined import Case


def broken(rank):
    x = torch.ones(5 + rank)
    return {"sum": rank.group("dp").all_reduce(x)}  # the fault: the ranks' tensors differ in shape


def mended(rank):
    x = torch.zeros(6)
    x[: 5 + rank] = 1
    return {"sum": rank.group("dp").all_reduce(x)}


def reference():
    return {"sum": torch.tensor([2.0, 2, 2, 2, 2, 1])}


CASE = Case(
    number=48,
    kind="collective mismatch",
    title="An all-reduce of different shapes",
    report="Sometimes it hung, and sometimes it returned wrong numbers at the end of the longer tensor.",
    url="https://github.com/NVIDIA/nccl/issues/1417",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="What is summed must have one shape, dtype, order and operation on all ranks: pad with zeros, or gather with "
    "sizes=. Before any data move emu compares what the ranks ask for.",
)
