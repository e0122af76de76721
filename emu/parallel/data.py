"""Plain data parallelism: every rank holds the whole model and works on its share of the batch.

Losses are summed, gradients are summed over ranks, and one division by the global number of tokens comes last. So it
does not matter how the batch is cut: ranks with fewer rows, or none, weigh what their tokens weigh. (A mean of
per-rank means would weigh every rank alike; see pytorch/pytorch#67253.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
        for name, value in (("x", x), ("y", y)):
            if not isinstance(value, Tensor) or not value.dim():
                what = "a tensor without dimensions" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise EmuError(f"{name} of a batch is {what}", "pass tensors whose first dimension is the rows")
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
            EmuError: a rank that is none; sizes that are not one length per rank, or do not add up to the batch.
        """
        group = _checked(rank, "batch.shard(rank, ...)").group(*axes)
        cut = list(sizes) if sizes is not None else split_sizes(len(self.x), group.size)
        if len(cut) != group.size or min(cut) < 0 or sum(cut) != len(self.x):
            raise EmuError(
                f"sizes {cut} do not cut {len(self.x)} rows over the {group.size} ranks of {group.label!r}",
                "give one length per rank, adding up to the rows of the batch",
            )
        first = sum(cut[: group.rank])
        rows = slice(first, first + cut[group.rank])
        return self.x[rows], self.y[rows]

    def __repr__(self) -> str:
        return f"Batch(x {list(self.x.shape)}, y {list(self.y.shape)}, {self.tokens:,} tokens that count)"


def as_batch(data: Batch | tuple[Tensor, Tensor]) -> Batch:
    """A batch as it is, or made of (inputs, labels).

    Raises:
        EmuError: anything else.
    """
    if isinstance(data, Batch):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2:
        return Batch(*data)
    what = f"a {type(data).__name__}" + (f" of {len(data)}" if isinstance(data, (tuple, list)) else "")
    raise EmuError(f"the batch is {what}", "pass emu.Batch(x, y), or the tuple (x, y) of inputs and labels")


def _checked(rank: Any, call: str) -> Rank:
    if not isinstance(rank, Rank):
        hint = f"pass the rank that the program gets, program(rank): {call}"
        raise EmuError(f"the rank is a {type(rank).__name__} ({rank!r})", hint)
    return rank


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
    """A model under plain data parallelism. It is no module: `.model` is, with the same parameters on every rank.

    Args:
        model: a plain module with `loss_sum(x, y)`, the same on every rank.
        rank: the rank it runs on.
        axes: the mesh axes that cut the batch.

    Raises:
        EmuError: no module, one without loss_sum, or a rank that is none.
    """

    def __init__(self, model: nn.Module, rank: Rank, *axes: str) -> None:
        check_model(model)
        _checked(rank, "emu.DataParallel(model, rank, ...)")
        self.model, self.rank, self.axes = model, rank, axes
        self.group = rank.group(*axes)
        rank.watch(model)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, e.g. for an optimizer."""
        return self.model.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters with their names."""
        return self.model.named_parameters()

    def __getattr__(self, name: str) -> Any:  # only what is not found otherwise
        model = self.__dict__.get("model")
        where = f"; it is no module: its model is, so use .model.{name}" if hasattr(model, name) else ""
        raise AttributeError(f"DataParallel has no {name!r}{where}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise EmuError(
            "DataParallel is no module and cannot be called",
            "train it with .backward(batch), or call its model: .model(x)",
        )

    def __repr__(self) -> str:
        model, group = type(self.model).__name__, self.group
        return (
            f"DataParallel({model} on {self.rank!r}, batch cut over the {group.size} ranks of {group.label!r}; "
            "no module: .backward(batch) trains it, .model is the module)"
        )

    def backward(self, batch: Batch | tuple[Tensor, Tensor], sizes: Sequence[int] | None = None) -> Tensor:
        """Computes the gradients of the mean loss over all tokens of the batch, into `.grad`. Returns that loss."""
        batch = as_batch(batch)
        x, y = batch.shard(self.rank, *self.axes, sizes=sizes)
        loss = self.model.loss_sum(x, y)  # type: ignore[operator]
        loss.backward()
        sum_gradients(self.model, self.group, batch.tokens)
        return self.group.all_reduce(loss.detach().clone(), name="loss").div_(batch.tokens)


def check_model(model: object) -> None:
    """Raises an EmuError if this is not a module with `loss_sum`."""
    if not isinstance(model, nn.Module):
        raise EmuError(
            f"the model is a {type(model).__name__}, not a module", "pass a torch.nn.Module with loss_sum(x, y)"
        )
    if not callable(getattr(model, "loss_sum", None)):
        raise EmuError(
            f"{type(model).__name__} has no loss_sum(x, y)",
            "give the module a method that returns the sum of its loss over all labels that count",
        )
