"""Ten values over four ranks, aligned to eight: 16 slots, of which 4, 4, 2 and 0 are real."""

import torch

import emu
from emu.clinic.examined import Case

REAL, SLOTS = 10, 4


def data():
    g = torch.Generator().manual_seed(13)
    return torch.randn(REAL, generator=g), torch.randn(REAL, generator=g)


def used_before(values):
    """A buffer of 16 slots; nobody cleans its end."""
    return torch.cat([values, torch.full((4 * SLOTS - REAL,), 3.0)])


def broken(rank):
    p, g = data()
    mine = used_before(g)[SLOTS * rank : SLOTS * (rank + 1)]
    squares = (mine[: 0 if rank == 3 else SLOTS] ** 2).sum()  # the fault: padding begins on the rank before
    squares = rank.group("dp").all_reduce(squares)
    return {"squares": squares, "p": p - 0.5 * g}


def mended(rank):
    p, g = data()
    real = min(max(REAL - SLOTS * rank, 0), SLOTS)  # 4, 4, 2, 0
    mine = used_before(g)[SLOTS * rank : SLOTS * rank + real]
    squares = rank.group("dp").all_reduce((mine**2).sum())
    return {"squares": squares, "p": p - 0.5 * g}


def reference():
    p, g = data()
    return {"squares": (g**2).sum(), "p": p - 0.5 * g}


CASE = Case(
    number=13,
    kind="padding",
    title="Padding is looked for on the last rank alone",
    report="A flat buffer was padded so far that the padding reached over two ranks, and only the last one's was left out.",
    url="https://github.com/deepspeedai/DeepSpeed/pull/6974",
    mesh=emu.Mesh(dp=4),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Work out what is real from the place of each rank's slots, not from its being the last: min(max(10 - 4 rank, 0), "
    "4). What is left over in padding would be counted in the norm of the gradients, by which they are clipped.",
)
