"""Trainings whose numbers no layout rounds otherwise: without stopping, up to a save, and on from it."""

from __future__ import annotations

import torch
from torch import nn

import emu
from emu.parallel.state import load, save

ROWS = 12


class Part(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sizes))
        self.bias = nn.Parameter(torch.randn(sizes[:1]))

    def forward(self, x):
        total = 0
        for i, p in enumerate((self.weight, self.bias)):
            factors = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) - 3
            total = total + (p * factors).sum() * x[:, i].sum()
        return total


class Sums(nn.Module):
    """A model whose gradients are sums of small whole numbers: the same in any order, so that no layout rounds otherwise.

    It has what awkward models have: odd sizes, a single number, a frozen parameter, buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList((Part(5, 3), Part(1, 1), Part(7, 1)))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("made", torch.zeros(2), persistent=False)

    def loss_sum(self, x, y):
        with torch.no_grad():
            self.seen += 1
        return x[:, 2].sum() * self.number + self.frozen.sum() * 0 + sum(part(x) for part in self.parts)


def batch(step: int) -> emu.Batch:
    g = torch.Generator().manual_seed(step)
    x = torch.randint(-4, 5, (ROWS, 3), generator=g).float()
    return emu.Batch(x, torch.zeros(ROWS, dtype=torch.int64))


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
}


def made(rank, how, optimizer, seed=0, scale=None):
    dist = emu.DataParallel(Sums(), rank, "dp", **how)
    if seed:  # not what was saved
        for piece in dist.pieces():
            piece.tensor.fill_(seed)
        dist.model.seen.fill_(seed)
    kind, options = OPTIMIZERS[optimizer]
    return dist, dist.optimizer(kind, scale=scale, **options)


def steps(dist, optimizer, some):
    for step in some:
        dist.backward(batch(step), scale=optimizer.scale)
        optimizer.step()


def results(dist, optimizer):
    """Whole parameters, and what is drawn next."""
    with dist.gathered() as model:
        used = {name: p.detach().clone() for name, p in model.named_parameters()}
    return used, dist.gather_parameters(), dist.model.seen.clone()


def never_stopped(rank, how, optimizer, before, after):
    dist, opt = made(rank, how, optimizer)
    steps(dist, opt, range(before + after))
    return results(dist, opt)


def saves(rank, how, optimizer, before, path):
    dist, opt = made(rank, how, optimizer)
    steps(dist, opt, range(before))
    save(path, dist, opt, {"steps": before})


def resumes(rank, how, optimizer, after, path):
    dist, opt = made(rank, how, optimizer, seed=7)
    first = load(path, dist, opt)["steps"]
    steps(dist, opt, range(first, first + after))
    return results(dist, opt)
