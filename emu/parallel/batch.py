"""A global batch and every rank's share of it, and what a model must offer to be trained on one."""

from __future__ import annotations

from collections.abc import Sequence
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
        return self.part(checked_rank(rank, "batch.shard(rank, ...)").group(*axes), sizes)

    def part(self, group: Group, sizes: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """The rows of this rank of a group, as `shard` cuts them."""
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


def checked_rank(rank: Any, call: str) -> Rank:
    """The rank, if it is one; an EmuError that says how to make the call if not."""
    if not isinstance(rank, Rank):
        hint = f"pass the rank that the program gets, program(rank): {call}"
        raise EmuError(f"the rank is a {type(rank).__name__} ({rank!r})", hint)
    return rank


def checked_plain(model: Any, call: str) -> nn.Module:
    """The module, if it is one; an EmuError that says how to make the call if not, as for a model under a strategy."""
    if not isinstance(model, nn.Module):
        plain = f"pass the plain torch.nn.Module itself: {call}"
        if isinstance(getattr(model, "model", None), nn.Module):
            plain += f"; it takes the place of {type(model).__name__}, and does not go on top of it"
        raise EmuError(f"the model is a {type(model).__name__}, not a module", plain)
    if any(hasattr(module, "in_data_parallel") for module in model.modules()):
        raise EmuError(
            f"{type(model).__name__} is in a DataParallel already, which has taken its parameters over",
            f"a model is cut first, and then trained: shard_model, then DataParallel; here a plain one is wanted: {call}",
        )
    return uncut(model, call)


def uncut(model: nn.Module, call: str) -> nn.Module:
    """The module, if it is not cut inside its layers, where only its own parts would be seen; else an EmuError."""
    if any(hasattr(module, "cut_inside") for module in model.modules()):
        raise EmuError(
            f"{type(model).__name__} is cut inside its layers already, by shard_model",
            f"a model is cut once, and then trained by DataParallel(..., sharding=sharding); here a plain one is wanted: {call}",
        )
    return model


def _counted(y: Tensor) -> int:
    """How many labels count. Labels are host data: the host counts them, and the device does not notice."""
    if y.is_meta:
        raise EmuError("labels without values cannot be counted", "say how many count: Batch(x, y, tokens=...)")
    with torch._C._DisableTorchDispatch():
        return int((y != IGNORED).sum())


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
