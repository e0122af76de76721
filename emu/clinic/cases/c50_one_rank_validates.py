"""A wrapper broadcasts a module's buffers in forward, as DDP does; then one rank alone validates."""

import torch

import emu
from emu.clinic.examined import Case


def wrapped(module, group, x):
    for buffer in module.buffers():
        group.broadcast(buffer)
    return module(x)


def train(rank):
    module, dp = torch.nn.BatchNorm1d(2), rank.group("dp")
    wrapped(module, dp, torch.ones(4, 2) * (1 + rank))
    return module, dp


def broken(rank):
    module, dp = train(rank)
    if rank == 0:
        wrapped(module.eval(), dp, torch.ones(4, 2))  # the fault: nobody else takes part in its broadcasts
    dp.barrier()
    return {"mean": dp.broadcast(module.running_mean)}


def mended(rank):
    module, dp = train(rank)
    if rank == 0:
        module.eval()(torch.ones(4, 2))
    dp.barrier()
    return {"mean": dp.broadcast(module.running_mean)}


def reference():
    module = torch.nn.BatchNorm1d(2)
    module(torch.ones(4, 2))
    return {"mean": module.running_mean}


CASE = Case(
    number=50,
    kind="a rank is missing",
    title="Rank 0 validates alone, through the wrapped model",
    report="Validation on rank 0 alone called the wrapped model, whose forward communicates: the ranks were in different "
    "collectives.",
    url="https://github.com/pytorch/pytorch/issues/54059",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Call the module itself where one rank works alone, or let all ranks validate. Look for collectives inside `if rank "
    "== 0`, and inside what is called there.",
)
