"""Two ranks exchange a tensor, and both send before they receive."""

import torch

import emu
from emu.clinic.examined import Case


def mine(rank):
    return torch.full((3,), float(rank + 1))


def broken(rank):
    group, other, got = rank.group("pp"), 1 - rank, torch.empty(3)
    group.send(mine(rank), other)  # the fault: each waits here for the other's recv, which comes after
    group.recv(got, other)
    return {"sum": got + mine(rank)}


def mended(rank):
    group, other, got = rank.group("pp"), 1 - rank, torch.empty(3)
    group.exchange([("send", mine(rank), other), ("recv", got, other)])
    return {"sum": got + mine(rank)}


def reference():
    return {"sum": mine(0) + mine(1)}


CASE = Case(
    number=27,
    kind="pipeline",
    title="Both peers send first",
    report="Two stages each blocked in a send before they posted the receive that the other needed.",
    url="https://github.com/pytorch/pytorch/issues/172668",
    mesh=emu.Mesh(pp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Post both at once, so that neither waits for the other (exchange here, batch_isend_irecv in torch), or let one "
    "rank receive first.",
)
