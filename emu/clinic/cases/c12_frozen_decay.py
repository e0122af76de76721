"""100 frozen and 20 trainable values in one flat vector, sharded over two ranks."""

import torch

import emu
from emu.clinic.examined import Case

RULE = {"lr": 0.1, "weight_decay": 0.1}


def data():
    g = torch.Generator().manual_seed(12)
    return torch.randn(100, generator=g), torch.randn(20, generator=g), torch.randn(2, 20, generator=g)


def broken(rank):
    frozen, trained, grads = data()
    shard = torch.cat([frozen, trained]).chunk(2)[rank].clone()
    optimizer = torch.optim.AdamW([shard], **RULE)
    for grad in grads:
        shard.grad = torch.cat([torch.zeros(100), grad]).chunk(2)[rank]
        optimizer.step()  # the fault: what is frozen has a gradient, of 0, and so it decays
    whole = rank.group("dp").all_gather(shard)
    return {"frozen": whole[:100], "trained": whole[100:]}


def mended(rank):
    frozen, trained, grads = data()
    shard = trained.chunk(2)[rank].clone()
    optimizer = torch.optim.AdamW([shard], **RULE)
    for grad in grads:
        shard.grad = grad.chunk(2)[rank]
        optimizer.step()
    kept = frozen.chunk(2)[rank].clone()
    dp = rank.group("dp")
    return {"frozen": dp.all_gather(kept), "trained": dp.all_gather(shard)}


def reference():
    frozen, trained, grads = data()
    optimizer = torch.optim.AdamW([trained], **RULE)
    for grad in grads:
        trained.grad = grad
        optimizer.step()
    return {"frozen": frozen, "trained": trained}


CASE = Case(
    number=12,
    kind="frozen parameters",
    title="Frozen parameters decay in a shared flat vector",
    report="A flat parameter with frozen and trainable tensors in one was refused, or held gradients for the frozen part, "
    "too.",
    url="https://github.com/pytorch/pytorch/issues/104690",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Give the optimizer a vector of trainable values alone: a gradient of zero is not no gradient, AdamW decays what "
    "has one. It also saves memory: gradients and states for 10 values a rank, not for 60.",
)
