"""Two experts on two ranks, three tokens a rank. Tokens travel to their experts, and back."""

import torch

import emu
from emu.clinic.examined import Case
from emu.spmd import exchange_shards

EXPERTS = (0, 1, 1, 0, 0, 1)  # of each token; a rank's three are in the order of experts
SEND = ((1, 2), (2, 1))  # tokens from each rank to each
RECEIVE = tuple(zip(*SEND))


def data():
    g = torch.Generator().manual_seed(41)
    return [torch.randn(*shape, generator=g) for shape in ((6, 4), (2, 4, 4), (6, 4))]


def loss_sum(rank, w):
    """Over this rank's tokens, whose experts may be elsewhere: backward takes their gradients there."""
    x, _, c = (t.chunk(2)[rank] for t in data())
    ep = rank.group("ep")
    there = exchange_shards(x, ep, SEND[rank], RECEIVE[rank])
    back = exchange_shards(torch.tanh(there @ w), ep, RECEIVE[rank], SEND[rank])
    return (back * c).sum()


def of_experts(gradient):
    return emu.Grads({"experts": gradient[None]}, {"experts": emu.Layout({"ep": emu.Shard(0)})})


def broken(rank):
    w = data()[1][rank].requires_grad_()
    loss_sum(rank, w).backward()
    return of_experts(w.grad / 3)  # the fault: the mean over a rank's tokens, but this sum is over both ranks'


def mended(rank):
    w = data()[1][rank].requires_grad_()
    loss_sum(rank, w).backward()
    return of_experts(w.grad / 6)


def reference():
    x, w, c = data()
    w.requires_grad_()
    y = torch.cat([torch.tanh(x[t : t + 1] @ w[e]) for t, e in enumerate(EXPERTS)])
    (y * c).sum().backward()
    return {"experts": w.grad / 6}


CASE = Case(
    number=41,
    kind="mixture of experts",
    title="Experts' gradients are as many times too large as ranks share them",
    report="An expert sees the tokens of the whole expert-parallel group, so its gradients are sums over the group already; "
    "averaged over the ranks that hold the same expert alone, they are that many times too large.",
    url="https://github.com/databricks/megablocks/issues/86",
    mesh=emu.Mesh(dp=2, ep=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Divide gradients of experts by what those of all other parameters are divided by: the tokens of the whole batch.",
)
