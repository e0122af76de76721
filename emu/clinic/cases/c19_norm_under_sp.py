"""Six tokens, three on each of two ranks: each normalises its own, with weights that both have."""

import torch
import torch.nn.functional as F

import emu
from emu.clinic.examined import Case
from emu.spmd import gather_shards


def data():
    g = torch.Generator().manual_seed(19)
    return [torch.randn(*shape, generator=g) for shape in ((6, 4), (4,), (4,), (4, 6), (6, 6))]


def broken(rank):
    x, gamma, beta, w, c = data()
    tp = rank.group("tp")
    x, w, c = x.chunk(2)[rank], w.chunk(2, 1)[rank], c.chunk(2, 1)[rank]
    normed = F.layer_norm(x, (4,), gamma.requires_grad_(), beta.requires_grad_())
    ((gather_shards(normed, tp) @ w) * c).sum().backward()
    return {"gamma": gamma.grad, "beta": beta.grad}  # the fault: these are of this rank's three tokens


def mended(rank):
    x, gamma, beta, w, c = data()
    tp = rank.group("tp")
    x, w, c = x.chunk(2)[rank], w.chunk(2, 1)[rank], c.chunk(2, 1)[rank]
    normed = F.layer_norm(x, (4,), gamma.requires_grad_(), beta.requires_grad_())
    ((gather_shards(normed, tp) @ w) * c).sum().backward()
    return {"gamma": tp.all_reduce(gamma.grad), "beta": tp.all_reduce(beta.grad)}


def reference():
    x, gamma, beta, w, c = data()
    ((F.layer_norm(x, (4,), gamma.requires_grad_(), beta.requires_grad_()) @ w) * c).sum().backward()
    return {"gamma": gamma.grad, "beta": beta.grad}


CASE = Case(
    number=19,
    kind="sequence parallel",
    title="A norm's gradients are not summed over tensor-parallel ranks",
    report="With sequence parallelism the final norm's gradients differed between ranks; a later fix elsewhere averaged "
    "them instead of summing.",
    url="https://github.com/NVIDIA/Megatron-LM/issues/1446",
    mesh=emu.Mesh(tp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Where each rank sees some of the tokens, gradients of weights that all have are parts of a sum over all tokens: "
    "all-reduce them over tp, as a sum. An average is half of what it should be here.",
)
