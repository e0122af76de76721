"""The balance loss and the capacity of a mixture of experts where ranks hold parts of a sequence, or of a batch.

Both are sums over tokens. Each rank sums its own, and ranks add up what they have. Counts have no gradient; of the
probabilities' sums the twin depends on who reads them:

* over tp every rank computes the same loss from them, once: `reduce_from`, whose backward is the identity;
* over data ranks, and ranks that hold other tokens of the same sequences (cp), each has a loss of its own, of its own
  labels, and the sums are in all of them: then the gradient of a rank's probabilities comes from every rank's loss, and a
  `copy_to` after it adds them up. Without it the gradient is that of the rank's own loss, and falls short by the number of
  ranks (NVIDIA-NeMo/Automodel#1408).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from emu.spmd import EmuError, Group, copy_to, reduce_from


def become_shared_balance(
    module: nn.Module, group: Group, data: Group | None = None, context: Group | None = None
) -> None:
    """Makes a plain balance loss one over all ranks that hold parts of what it is over, in place.

    Args:
        module: with `over` ("sequence" or "batch") and totals(probabilities [batch, seq, experts], experts [batch, seq, k]),
            which gives choices [batch or 1, experts] int64, summed probabilities alike, and tokens.
        group: whose ranks hold parts of each sequence, and compute the same loss.
        data: whose ranks hold other tokens of the batch, and add their losses up.
        context: whose ranks, among those, hold other tokens of the same sequences.
    """
    _refuse_twice(module, SharedBalance)
    others = data if module.over == "batch" else context  # that have losses of their own of what it is over
    if group.size == 1 and (others is None or others.size == 1):
        return
    shared: Any = module
    shared.sequence, shared.others = group, others
    shared.__class__ = _shared(SharedBalance, type(module))


def become_shared_capacity(module: nn.Module, group: Group, tokens: Any = None) -> None:
    """Makes a plain capacity count the tokens of whole sequences of which ranks hold parts, in place.

    Args:
        module: with limit(seq, k) -> int or None, keep(experts, limit, before) and n_experts.
        group: whose ranks hold parts of each sequence, in order.
        tokens: knows the `length` of the whole sequence; None: ranks add up theirs, and the host reads the sum, which
            makes it wait.
    """
    _refuse_twice(module, SharedCapacity)
    if group.size == 1:
        return
    shared: Any = module
    shared.sequence, shared.tokens = group, tokens
    shared.__class__ = _shared(SharedCapacity, type(module))


@cache
def _shared(kind: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a module that is shared, and otherwise what it was."""
    return type(f"Shared{plain.__name__}", (kind, plain), {"__module__": plain.__module__})


def _refuse_twice(module: nn.Module, kind: type[nn.Module]) -> None:
    if isinstance(module, kind):
        raise EmuError(f"{type(module).__name__} is shared already", "name it once in the sharding map")


class SharedBalance(nn.Module):
    """A balance loss over the ranks that hold parts of a sequence or batch; see `become_shared_balance`."""

    sequence: Group
    others: Group | None
    totals: Any  # the plain module's
    over: str

    def forward(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        """probabilities: [batch, seq / ranks, experts]; experts: [batch, seq / ranks, k]. Returns what the plain one does."""
        choices, mass, _ = self.totals(probabilities, experts)  # of this rank's tokens
        if self.sequence.size > 1:
            choices = self.sequence.all_reduce(choices, name="balance choices")
            mass = reduce_from(mass, self.sequence, name="balance probabilities")
        others = self.others
        if others is not None and others.size > 1:
            choices = others.all_reduce(choices, name="balance choices")
            mass = copy_to(reduce_from(mass, others, name="balance probabilities"), others, name="balance gradients")
        total = choices.sum(-1, keepdim=True).clamp(min=1)  # k choices a token: nobody needs to know how many tokens
        used = choices.to(mass.dtype) * (mass.shape[1] / total.to(mass.dtype))
        tokens = total[:, 0].div(experts.shape[-1], rounding_mode="floor").clamp(min=1)
        return (used * mass).sum(-1).div(tokens.to(mass.dtype))


class SharedCapacity(nn.Module):
    """A capacity of whole sequences of which this rank has a part; see `become_shared_capacity`."""

    sequence: Group
    tokens: Any
    limit: Any  # the plain module's
    keep: Any
    n_experts: int

    def forward(self, experts: Tensor) -> Tensor | None:
        """experts: [batch, seq / ranks, k] int64. Returns which choices are kept, of the same shape; None: all are."""
        batch, _, k = experts.shape
        if self.limit(1, k) is None:
            return None
        chosen, group = experts.flatten(1), self.sequence
        mine = chosen.new_zeros(batch, self.n_experts).scatter_add_(1, chosen, torch.ones_like(chosen))
        every = group.all_gather(mine, name="capacity choices").view(group.size, batch, self.n_experts)
        return self.keep(experts, self.limit(self._length(experts, every), k), every[: group.rank].sum(0))

    def _length(self, experts: Tensor, every: Tensor) -> int:
        """Tokens of the whole sequence."""
        if self.tokens is not None:
            return self.tokens.length
        batch, seq, k = experts.shape
        if experts.is_meta or not batch:
            return seq * self.sequence.size
        return int(every[:, 0].sum()) // k
