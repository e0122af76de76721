"""Three ranks: two have three batches, one has two."""

import torch

import emu
from emu.clinic.examined import Case

STEPS = (3, 3, 2)


def batch(rank, step):
    return torch.full((4,), float(10 * step + rank))


def broken(rank):
    w = torch.zeros(4)
    for step in range(STEPS[rank]):  # the fault: rank 2 leaves while the others go on
        grad = batch(rank, step)
        rank.group("dp").all_reduce(grad, name="gradient")
        w -= grad
    return {"w": w}


def mended(rank):
    w = torch.zeros(4)
    for step in range(max(STEPS)):
        grad = batch(rank, step) if step < STEPS[rank] else torch.zeros(4)
        rank.group("dp").all_reduce(grad, name="gradient")
        w -= grad
    return {"w": w}


def reference():
    return {"w": -sum(batch(rank, step) for rank in range(3) for step in range(STEPS[rank]))}


CASE = Case(
    number=6,
    kind="a rank is missing",
    title="A rank runs out of batches before the others",
    report="Ranks with a batch more waited for ever in the reduction of its gradients.",
    url="https://github.com/pytorch/pytorch/issues/38174",
    mesh=emu.Mesh(dp=3),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Every rank takes part in every collective of its groups: who has no batch left adds nothing (zeros here, and no "
    "tokens to the divisor), or the longer ranks leave out what the others do not have.",
)
