"""How far a larger batch helps: a problem on which everything is known, trained to one goal at many batch sizes.

A noisy quadratic: directions of equal loss, curvatures h from 0.01 to 1, and examples whose gradients
h w + sqrt(h) deviation * normal are the noisier the steeper they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from emu.parallel import GradientNoise, Noise, Tradeoff, fit_tradeoff
from emu.run import launch
from emu.spmd import Mesh, Rank

H = torch.logspace(-2, 0, 16, dtype=torch.float64)
DEVIATION, GOAL = 2.0, 0.1
COPIES = 64  # trained side by side, and averaged, so that steps to the goal hardly vary
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
RANKS = 4
MIDDLE = 32  # the batch size whose training measures the noise scale


def expected_steps(batch: int, lr: float, deviation: float = DEVIATION) -> float:
    """Steps until the expected loss is GOAL times the first: E w^2 <- (1 - lr h)^2 E w^2 + lr^2 h deviation^2 / batch."""
    keep = (1 - lr * H) ** 2
    floor = lr**2 * H * deviation**2 / batch / (1 - keep)
    squares = floor + (1 / H - floor) * keep ** torch.arange(1500)[:, None]  # [steps, directions]
    there = (H * squares).sum(1) / 2 <= GOAL * len(H) / 2
    return int(there.int().argmax()) if there.any() else math.inf


def tuned(batch: int, deviation: float = DEVIATION) -> tuple[float, float]:
    """(the steps with the best learning rate, that rate)."""
    rates = torch.logspace(-1.5, math.log10(1.9), 40).tolist()
    return min((expected_steps(batch, lr, deviation), lr) for lr in rates)


class Quadratic(nn.Module):
    """COPIES of the problem, each from its own start."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (COPIES, len(H)), generator=g) * 2 - 1
        self.w = nn.Parameter(signs * H.rsqrt())

    def loss_sum(self, x: Tensor) -> Tensor:
        """x: the examples' noise, [rows, copies, directions]."""
        return 0.5 * len(x) * (H * self.w**2).sum() + (x.sum(0) * self.w).sum()

    def true_loss(self) -> float:
        """Without noise, of one copy on average."""
        return 0.5 * float((H * self.w.detach() ** 2).sum()) / COPIES


def train(rank: Rank, batch: int, lr: float) -> tuple[int, Noise]:
    """Data-parallel SGD to the goal. Returns the steps it took, and the noise measured on the way."""
    model, group = Quadratic(), rank.group("dp")
    noise = GradientNoise(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    goal, steps, rows = GOAL * model.true_loss(), 0, batch // group.size
    g = torch.Generator().manual_seed(1000 * batch + rank.id)
    while model.true_loss() > goal:
        optimizer.zero_grad()
        x = torch.randn(rows, COPIES, len(H), generator=g, dtype=torch.float64) * (DEVIATION * H.sqrt())
        model.loss_sum(x).backward()
        noise.small(rows)
        assert model.w.grad is not None
        group.all_reduce(model.w.grad).div_(batch)
        noise.large()
        optimizer.step()
        steps += 1
    return steps, noise.measured()


@dataclass(frozen=True)
class BatchSizes:
    """Steps to the goal by batch size, the trade-off fitted to them, and the noise scale measured at MIDDLE."""

    steps: dict[int, int]
    tradeoff: Tradeoff
    noise_scale: float


def measure(tick: Callable[[int], None] = lambda done: None) -> BatchSizes:
    """Trains at every batch size."""
    steps, scale = {}, math.nan
    for i, batch in enumerate(BATCHES):
        _, lr = tuned(batch)
        steps[batch], noise = launch(train, Mesh(dp=RANKS), args=(batch, lr), track=False, backend="virtual").results[0]
        scale = noise.scale if batch == MIDDLE else scale
        tick(i + 1)
    return BatchSizes(steps, fit_tradeoff(list(steps), list(steps.values())), scale)
