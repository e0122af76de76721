"""Thirteen tokens over four ranks: 4, 3, 3 and 3. Each gathers everyone's keys and values."""

import torch

import emu
from emu.clinic.examined import Case
from emu.spmd import gather_shards

SIZES = (4, 3, 3, 3)


def data():
    g = torch.Generator().manual_seed(37)
    return [torch.randn(13, 2, 5, generator=g).requires_grad_() for _ in "qkv"]  # [tokens, heads, head_dim]


def attend(q, k, v, first):
    scores = torch.einsum("ihd,jhd->hij", q, k) / 5**0.5
    later = torch.arange(len(k)) > torch.arange(first, first + len(q))[:, None]
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def cut(values):
    return emu.Grads(values, dict.fromkeys(values, emu.Layout({"cp": emu.Shard(0)})))


def broken(rank):
    cp = rank.group("cp")
    q, k, v = (x.detach().split(SIZES)[rank].requires_grad_() for x in data())
    keys, values = gather_shards(k, cp), gather_shards(v, cp)  # the fault: it takes all pieces for equally long
    out = attend(q, keys, values, sum(SIZES[:rank]))
    (out**2).sum().backward()
    return cut({"out": out, "q": q.grad, "k": k.grad, "v": v.grad})


def mended(rank):
    cp = rank.group("cp")
    q, k, v = (x.detach().split(SIZES)[rank].requires_grad_() for x in data())
    keys, values = gather_shards(k, cp, sizes=SIZES), gather_shards(v, cp, sizes=SIZES)
    out = attend(q, keys, values, sum(SIZES[:rank]))
    (out**2).sum().backward()
    return cut({"out": out, "q": q.grad, "k": k.grad, "v": v.grad})


def reference():
    q, k, v = data()
    out = attend(q, k, v, 0)
    (out**2).sum().backward()
    return {"out": out, "q": q.grad, "k": k.grad, "v": v.grad}


CASE = Case(
    number=37,
    kind="context parallel",
    title="A length that the ranks do not divide",
    report="Zigzag ring attention failed on 2999 tokens over 4 ranks, which twice the ranks do not divide.",
    url="https://github.com/jzhang38/EasyContext/issues/47",
    mesh=emu.Mesh(cp=4),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="State the lengths of all pieces, sizes=(4, 3, 3, 3), in forward, and backward sends each rank its own again. Who "
    "pads instead must hide the padding from all queries.",
)
