"""Local SGD: every rank takes several steps of its own, then parameters are averaged.

Communication costs a step only every so often, and ranks drift apart in between: what comes out is data parallelism
only if they average after every step. Stich, arXiv 1805.09767; with an optimizer of its own for the averages, DiLoCo,
arXiv 2311.08105.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from emu.parallel.batch import checked_plain, checked_rank
from emu.spmd import EmuError, Rank

Outer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def averaging(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of plain local SGD: a step of length 1 leads to the average."""
    return torch.optim.SGD(parameters, lr=1.0)


class LocalSGD:
    """A model that every rank trains by itself, averaged over a group after every so many steps.

        local = LocalSGD(model, rank, "dp", every=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches:                                     # this rank's rows
            optimizer.zero_grad()
            (model.loss_sum(x, y) / tokens).backward()           # the mean over this rank's own tokens
            optimizer.step()
            local.step(tokens)
        local.average()

    Between averages a rank has moved by its own w - start; the model becomes start + sum(tokens * moved) / sum(tokens),
    so a rank counts by the tokens it has seen, and one without any (which should take no step) not at all. With
    `every=1` and plain SGD this is the step of synchronous data parallelism. The bits are the same where every
    operation is exact: in the exact tier, if the learning rate and all counts of tokens are powers of two and the
    parameters start on a grid. Otherwise a rank rounds when it divides by its own tokens, before the sum, and when it
    takes its own step, and the tier is float64.

    Optimizer states and buffers stay every rank's own. Each rank keeps one more copy of the parameters, which
    counts as optimizer state.

    Args:
        model: a plain module, the same on every rank.
        rank: the rank it runs on.
        axes: the mesh axes that span the group; none means all ranks.
        every: steps between averages.
        outer: makes an optimizer of the averaged parameters, whose gradient is start minus average. The default goes to
            the average; DiLoCo's is `lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)`.

    Raises:
        EmuError: no module or rank, `every` is no whole number from 1 on, or the model has no parameters to train.
    """

    def __init__(self, model: nn.Module, rank: Rank, *axes: str, every: int, outer: Outer = averaging) -> None:
        call = 'LocalSGD(model, rank, "dp", every=8)'
        checked_plain(model, call)
        checked_rank(rank, call)
        if type(every) is not int or every < 1:
            raise EmuError(f"every={every!r}", "give a whole number of steps between averages, 1 or more")
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise EmuError(f"{type(model).__name__} has no parameters to train", "give it some that require grad")
        self.model, self.group, self.every = model, rank.group(*axes), every
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.steps = self.tokens = 0  # since the last average
        rank.watch(model)
        self._start = [p.detach().clone() for p in self.parameters]
        for start in self._start:
            rank.account(start, "optimizer")
        self.outer = outer(self._start)

    def step(self, tokens: int) -> bool:
        """Counts one step of this rank. Returns whether parameters were averaged after it.

        Args:
            tokens: how many labels counted on this rank in this step; may be 0.

        Raises:
            EmuError: a count that cannot be.
        """
        if type(tokens) is not int or tokens < 0:
            raise EmuError(f"tokens={tokens!r}", "give a whole number, 0 for a rank without rows")
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        if self.steps < self.every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Averages now, if there was a step since the last time. Every rank of the group calls it, or none.

        Ranks without a token are where they started, so an average over none of them changes nothing.
        """
        if not self.steps:
            return
        seen = torch.full((1,), self.tokens, dtype=torch.int64, device=self.parameters[0].device)
        total = self.group.all_reduce(seen, name="tokens").clamp_(min=1)
        for name, p, start in zip(reversed(self.names), reversed(self.parameters), reversed(self._start)):
            back = (start - p).mul_(self.tokens)
            start.grad = self.group.all_reduce(back, name=name).div_(total)
        self.outer.step()
        for p, start in zip(self.parameters, self._start):
            p.copy_(start)
            start.grad = None
        self.steps = self.tokens = 0

    def __repr__(self) -> str:
        name = type(self.model).__name__
        return f"LocalSGD({name}, averaged over the {self.group.size} ranks of {self.group.label!r} every {self.every} steps)"
