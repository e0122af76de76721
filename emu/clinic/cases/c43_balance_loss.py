"""The loss that balances experts, over the twelve tokens of three ranks: E * sum of shares chosen times probabilities."""

import torch
import torch.nn.functional as F

import emu
from emu.clinic.examined import Case
from emu.spmd import copy_to, reduce_from

EXPERTS, COEFFICIENT, TOKENS = 4, 0.01, 12


def data():
    g = torch.Generator().manual_seed(43)
    return torch.randn(12, 3, generator=g), torch.randn(3, EXPERTS, generator=g)


def balance(chosen, p):
    """Sums over all tokens: how many chose each expert, and its probabilities."""
    return COEFFICIENT * EXPERTS * (chosen * p).sum() / TOKENS**2


def counts(p):
    return F.one_hot(p.argmax(-1), EXPERTS).to(p.dtype).sum(0)


def broken(rank):
    x, router = data()
    dp = rank.group("dp")
    p = (x.chunk(3)[rank] @ router.requires_grad_()).softmax(-1)
    total = copy_to(reduce_from(p.sum(0), dp), dp)  # the fault: backward adds up the same loss of three ranks
    balance(dp.all_reduce(counts(p)), total).backward()
    return {"router": dp.all_reduce(router.grad)}


def mended(rank):
    x, router = data()
    dp = rank.group("dp")
    p = (x.chunk(3)[rank] @ router.requires_grad_()).softmax(-1)
    total = reduce_from(p.sum(0), dp)
    balance(dp.all_reduce(counts(p)), total).backward()
    return {"router": dp.all_reduce(router.grad)}


def reference():
    x, router = data()
    p = (x @ router.requires_grad_()).softmax(-1)
    balance(counts(p), p.sum(0)).backward()
    return {"router": router.grad}


CASE = Case(
    number=43,
    kind="mixture of experts",
    title="The balance loss weighs more with more ranks",
    report="The gradient of the load-balancing loss never reached the router; once it did, its size depended on the number of "
    "data-parallel ranks or of tokens.",
    url="https://github.com/NVIDIA-NeMo/Automodel/issues/1408",
    mesh=emu.Mesh(dp=3),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="A loss of sums over all ranks is one loss, computed alike on each. The adjoint of its all-reduce is the identity: "
    "with an all-reduce backward as well every rank's copy of it counts, three times here.",
)
