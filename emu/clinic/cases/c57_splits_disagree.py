"""Two ranks exchange rows, and do not agree on how many."""

import torch

import emu
from emu.clinic.examined import Case


def broken(rank):
    receive = ([1, 1], [3, 1])[rank]  # rank 1 takes three rows from rank 0
    got = rank.group().all_to_all(torch.ones(2), [1, 1], receive)  # the fault: rank 0 sends it one
    return {"rows": got.sum()}


def mended(rank):
    sizes = torch.tensor([1, 1])
    receive = rank.group().all_to_all(sizes, [1, 1], [1, 1]).tolist()  # asked of those who send
    got = rank.group().all_to_all(torch.ones(2), sizes.tolist(), receive)
    return {"rows": got.sum()}


def reference():
    return {"rows": torch.ones(2).sum()}


CASE = Case(
    number=57,
    kind="all-to-all",
    title="Sender and receiver disagree on sizes",
    report="An all-to-all whose split sizes differ between sender and receiver hung, or passed where the totals happened to "
    "fit.",
    url="https://github.com/pytorch/pytorch/issues/117486",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Exchange the sizes first, with an all-to-all of their own, and receive what the others say they send. emu compares "
    "every pair before anything moves.",
)
