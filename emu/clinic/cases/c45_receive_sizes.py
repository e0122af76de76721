"""Three ranks exchange rows: 3, 2 and 1 go out from the first, 2, 2 and 2 from the second, 1, 2 and 3 from the third."""

import torch

import emu
from emu.clinic.examined import Case

SEND = ((3, 2, 1), (2, 2, 2), (1, 2, 3))


def rows(rank):
    return 100.0 * rank + torch.arange(6.0)


def broken(rank):
    got = rank.group("ep").all_to_all(rows(rank), SEND[rank], [2, 2, 2])  # the fault: taken to be even
    return {"received": rank.group("ep").all_gather(got)}


def mended(rank):
    receive = [sizes[rank] for sizes in SEND]
    got = rank.group("ep").all_to_all(rows(rank), SEND[rank], receive)
    return {"received": rank.group("ep").all_gather(got)}


def reference():
    parts = [rows(rank).split(sizes) for rank, sizes in enumerate(SEND)]
    return {"received": torch.cat([part[to] for to in range(3) for part in parts])}


CASE = Case(
    number=45,
    kind="all-to-all",
    title="Uneven rows are received as if they were even",
    report="An emulation of many ranks in one process cut what it received wrongly where splits were uneven.",
    url="https://github.com/pytorch/pytorch/pull/177381",
    mesh=emu.Mesh(dp=3, ep=3),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="What a rank receives is a column of the table of what is sent: [sizes[rank] for sizes in SEND]. Where "
    "ranks do not know each other's sizes, exchange them first.",
)
