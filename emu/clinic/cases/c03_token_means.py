"""Two ranks, three microbatches each, with 5, 0 and 3 labels that count on one rank, and 1, 4 and 2 on the other."""

import torch
import torch.nn.functional as F

import emu
from emu.clinic.examined import Case

VALID = ((5, 0, 3), (1, 4, 2))


def data():
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(2, 3, 5, 4, generator=g), torch.randn(4, 7, generator=g)  # [rank, microbatch, token, width]
    y = torch.randint(0, 7, (2, 3, 5), generator=g)
    for rank, counts in enumerate(VALID):
        for m, n in enumerate(counts):
            y[rank, m, n:] = -100
    return x, y, w


def ce(x, y, w):
    return F.cross_entropy(x.flatten(0, -2) @ w, y.flatten(), ignore_index=-100, reduction="sum")


def broken(rank):
    x, y, w = data()
    w.requires_grad_()
    for m in range(3):
        n = max(int((y[rank, m] != -100).sum()), 1)
        (ce(x[rank, m], y[rank, m], w) / n / 3).backward()  # the fault: a token counts more where there are few
    dp = rank.group("dp")
    return {"w": dp.all_reduce(w.grad) / dp.size}


def mended(rank):
    x, y, w = data()
    w.requires_grad_()
    for m in range(3):
        ce(x[rank, m], y[rank, m], w).backward()
    return {"w": rank.group("dp").all_reduce(w.grad) / int((y != -100).sum())}


def reference():
    x, y, w = data()
    w.requires_grad_()
    for some_x, some_y in zip(x.flatten(0, 1), y.flatten(0, 1)):
        ce(some_x, some_y, w).backward()
    return {"w": w.grad / int((y != -100).sum())}


CASE = Case(
    number=3,
    kind="gradient accumulation",
    title="Means over the tokens of each microbatch are averaged",
    report="With padded or masked labels, gradients accumulated over microbatches were not those of the large batch.",
    url="https://github.com/meta-pytorch/torchtune/pull/1875",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Every microbatch adds the sum over its tokens; at the end all is divided once, by the tokens of all microbatches "
    "on all ranks (15 here). So it does not matter how tokens are cut into microbatches.",
)
