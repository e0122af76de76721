"""Four microbatches on two ranks, and a wrapper that decides in forward whether backward will reduce."""

import torch

import emu
from emu.clinic.examined import Case


def data():
    g = torch.Generator().manual_seed(4)
    return [torch.randn(*shape, generator=g) for shape in ((16, 4), (16, 2), (4, 2))]


class Wrapped:
    """As DDP: while `sync` is off when forward is called, its backward reduces nothing."""

    def __init__(self, w, group):
        self.w, self.group, self.sync = w.requires_grad_(), group, True

    def forward(self, x, y):
        self.reduces = self.sync
        return ((x @ self.w - y) ** 2).sum()

    def backward(self, loss):
        loss.backward()
        if self.reduces:
            self.group.all_reduce(self.w.grad)


def broken(rank):
    x, y, w = data()
    x, y = x.chunk(2)[rank].chunk(4), y.chunk(2)[rank].chunk(4)
    ddp = Wrapped(w, rank.group("dp"))
    for m in range(4):
        loss = ddp.forward(x[m], y[m])
        ddp.sync = m == 3  # the fault: forward has decided already, so the first backward reduces, and not the last
        ddp.backward(loss)
    return {"w": w.grad / 16}


def mended(rank):
    x, y, w = data()
    x, y = x.chunk(2)[rank].chunk(4), y.chunk(2)[rank].chunk(4)
    ddp = Wrapped(w, rank.group("dp"))
    for m in range(4):
        ddp.sync = m == 3
        ddp.backward(ddp.forward(x[m], y[m]))
    return {"w": w.grad / 16}


def reference():
    x, y, w = data()
    ((x @ w.requires_grad_() - y) ** 2).sum().backward()
    return {"w": w.grad / 16}


CASE = Case(
    number=4,
    kind="gradient accumulation",
    title="Synchronisation is turned off around backward alone",
    report="A training loop switched the reduction of gradients off just before backward, but the wrapper looks at the "
    "switch in forward: what was accumulated was not the average.",
    url="https://github.com/karpathy/build-nanogpt/pull/30",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="Set the switch before forward, or put `with no_sync():` around both. emu.DataParallel takes its no_sync() around "
    "either, and reduces what was left in finish().",
)
