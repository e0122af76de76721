"""An embedding and a head that share a table lie on the two stages of a pipeline: each has a copy."""

import torch
import torch.nn.functional as F

import emu
from emu.clinic.examined import Case

IDS, LABELS = torch.tensor([0, 1, 5, 3]), torch.tensor([1, 5, 3, 2])
RULE = {"lr": 0.05, "weight_decay": 0.1}


def data():
    g = torch.Generator().manual_seed(31)
    return torch.randn(6, 3, generator=g).requires_grad_(), torch.randn(3, 3, generator=g)


def step(rank, table, a):
    """Stage 0 embeds, stage 1 computes logits and the loss; both have a gradient of their own use of the table."""
    pp, table.grad = rank.group("pp"), None
    if rank == 0:
        hidden = torch.tanh(table[IDS] @ a)
        pp.send(hidden.detach(), 1)
        hidden.backward(pp.recv(torch.empty(4, 3), 1))
    else:
        hidden = pp.recv(torch.empty(4, 3), 0).requires_grad_()
        F.cross_entropy(hidden @ table.T, LABELS).backward()
        pp.send(hidden.grad, 0)


def broken(rank):
    table, a = data()
    optimizer = torch.optim.AdamW([table], **RULE)
    for _ in range(3):
        step(rank, table, a)
        optimizer.step()  # the fault: each copy learns from its own use alone
    return {"table": table}


def mended(rank):
    table, a = data()
    optimizer = torch.optim.AdamW([table], **RULE)
    for _ in range(3):
        step(rank, table, a)
        rank.group("pp").all_reduce(table.grad)
        optimizer.step()
    return {"table": table}


def reference():
    table, a = data()
    optimizer = torch.optim.AdamW([table], **RULE)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(torch.tanh(table[IDS] @ a) @ table.T, LABELS).backward()
        optimizer.step()
    return {"table": table}


CASE = Case(
    number=31,
    kind="pipeline",
    title="Copies of a tied table drift apart",
    report="The embedding's copies on the first and the last stage were not kept in step.",
    url="https://github.com/uw-syfi/piper/issues/13",
    mesh=emu.Mesh(pp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="The gradient of a tied table is the sum (not the mean) over its uses: all-reduce it between the stages that have "
    "a copy, before every step. The same states and the same gradient keep the copies equal.",
)
