"""Plain data parallelism: every rank holds the whole model and works on its share of the batch.

Losses are summed, gradients are summed over ranks, and one division by the global number of tokens comes last. So it
does not matter how the batch is cut: ranks with fewer rows, or none, weigh what their tokens weigh. (A mean of
per-rank means would weigh every rank alike; see pytorch/pytorch#67253.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emu.spmd import EmuError, Group, Rank, split_sizes

IGNORED = -100  # labels that do not count, as in torch's cross-entropy


class Batch:
    """One global batch, which every rank reads its rows from.

    Args:
        x: inputs, [rows, ...].
        y: labels, [rows, ...]; -100 marks those that do not count.
        tokens: how many labels count in the whole batch; None counts them.
    """

    def __init__(self, x: Tensor, y: Tensor, tokens: int | None = None) -> None:
        if len(x) != len(y):
            raise EmuError(f"a batch of {len(x)} inputs and {len(y)} labels", "give every input row its labels")
        self.x, self.y = x, y
        self.tokens = _counted(y) if tokens is None else tokens

    def shard(self, rank: Rank, *axes: str, sizes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """The rows of one rank, cut over the group along the given axes; a rank may get none.

        Args:
            axes: mesh axes that cut the batch; none means all ranks.
            sizes: rows of every rank in group order; balanced where not given.

        Raises:
            EmuError: sizes that are not one length per rank, or do not add up to the batch.
        """
        group = rank.group(*axes)
        cut = list(sizes) if sizes is not None else split_sizes(len(self.x), group.size)
        if len(cut) != group.size or min(cut) < 0 or sum(cut) != len(self.x):
            raise EmuError(
                f"sizes {cut} do not cut {len(self.x)} rows over the {group.size} ranks of {group.label!r}",
                "give one length per rank, adding up to the rows of the batch",
            )
        first = sum(cut[: group.rank])
        rows = slice(first, first + cut[group.rank])
        return self.x[rows], self.y[rows]


def _counted(y: Tensor) -> int:
    """How many labels count. Labels are host data: the host counts them, and the device does not notice."""
    if y.is_meta:
        raise EmuError("labels without values cannot be counted", "say how many count: Batch(x, y, tokens=...)")
    with torch._C._DisableTorchDispatch():
        return int((y != IGNORED).sum())


def sum_gradients(model: nn.Module, group: Group, tokens: int) -> None:
    """Sums every gradient over the group, then divides it by the global number of tokens.

    Gradients are reduced in backward order, the last parameter's first. A parameter that got none on this rank joins in
    with zeros, since others may have one.
    """
    if tokens < 1:
        raise EmuError("the batch has no tokens to learn from", "give at least one label that is not -100")
    for name, p in reversed(list(model.named_parameters())):
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        group.all_reduce(p.grad, name=name).div_(tokens)


class DataParallel:
    """A model under plain data parallelism.

    Args:
        model: a plain module with `loss_sum(x, y)`, the same on every rank.
        rank: the rank it runs on.
        axes: the mesh axes that cut the batch.
    """

    def __init__(self, model: nn.Module, rank: Rank, *axes: str) -> None:
        self.model, self.rank, self.axes = model, rank, axes
        self.group = rank.group(*axes)
        rank.watch(model)

    def backward(self, batch: Batch, sizes: Sequence[int] | None = None) -> Tensor:
        """Computes the gradients of the mean loss over all tokens of the batch, into `.grad`. Returns that loss."""
        x, y = batch.shard(self.rank, *self.axes, sizes=sizes)
        loss = self.model.loss_sum(x, y)  # type: ignore[operator]
        loss.backward()
        sum_gradients(self.model, self.group, batch.tokens)
        return self.group.all_reduce(loss.detach().clone(), name="loss").div_(batch.tokens)
