"""Loss scaling with sharded gradients: if any rank finds an overflow, all must skip the step."""

import math

import torch

import emu
from emu.clinic.examined import Case

SCALE = 1024.0


def data():
    g = torch.Generator().manual_seed(54)
    p, grad = torch.randn(6, generator=g), torch.randn(6, generator=g) * SCALE
    grad[4] = math.inf  # in rank 1's shard
    return p, grad


def broken(rank):
    p, grad = (x.chunk(2)[rank] for x in data())
    flag = (~grad.isfinite()).any().float()
    work = rank.group("dp").all_reduce(flag, "max", async_op=True)
    skip = bool(flag)  # the fault: the other rank's flag is still on its way
    work.wait()
    return {"p": rank.group("dp").all_gather(p if skip else p - grad / SCALE), "scale": SCALE / 2 if skip else SCALE}


def mended(rank):
    p, grad = (x.chunk(2)[rank] for x in data())
    flag = (~grad.isfinite()).any().float()
    skip = bool(rank.group("dp").all_reduce(flag, "max", async_op=True).wait())
    return {"p": rank.group("dp").all_gather(p if skip else p - grad / SCALE), "scale": SCALE / 2 if skip else SCALE}


def reference():
    return {"p": data()[0], "scale": SCALE / 2}


CASE = Case(
    number=54,
    kind="loss scaling",
    title="The overflow flag is read before its reduction is done",
    report="The flag was copied to the host while it was being reduced, so that only the rank with the overflow skipped the "
    "step; elsewhere gradients were clipped before they were unscaled.",
    url="https://github.com/pytorch/pytorch/pull/115710",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Wait for the flag before reading it: all ranks skip, and all halve their scale. Where nothing overflows, unscale "
    "first and clip then.",
)
