"""Gradients of 5, 4 and 3 values, sharded over two ranks, are clipped to a norm of 1."""

import torch

import emu
from emu.clinic.examined import Case


def gradients():
    g = torch.Generator().manual_seed(15)
    return torch.cat([torch.randn(n, generator=g) * 2 for n in (5, 4, 3)])


def broken(rank):
    shard = gradients().chunk(2)[rank]
    norm = shard.norm()  # the fault: of this rank's shard alone
    shard = shard * min(1.0, float(1 / (norm + 1e-6)))
    return {"norm": norm, "clipped": rank.group("dp").all_gather(shard)}


def mended(rank):
    shard = gradients().chunk(2)[rank]
    dp = rank.group("dp")
    norm = dp.all_reduce((shard**2).sum()).sqrt()
    shard = shard * min(1.0, float(1 / (norm + 1e-6)))
    return {"norm": norm, "clipped": dp.all_gather(shard)}


def reference():
    whole = gradients()
    norm = (whole**2).sum().sqrt()
    return {"norm": norm, "clipped": whole * min(1.0, float(1 / (norm + 1e-6)))}


CASE = Case(
    number=15,
    kind="clipping",
    title="Every rank clips by the norm of its own shard",
    report="Gradient clipping took the norm of the local shards for that of the whole gradient.",
    url="https://github.com/pytorch/pytorch/issues/170862",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Sum the squares over all ranks, and take one square root: 7.81 here, on every rank, so all scale alike. A sum of "
    "the ranks' norms is wrong, too.",
)
