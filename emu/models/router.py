"""The router of a mixture of experts: which experts each token goes to, with which weights, and how evenly they are used."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        weights: [batch, seq, k], what each chosen expert's output is multiplied by, in the dtype of the tokens.
        experts: [batch, seq, k] int64, the chosen experts of each token, the likeliest first.
        probabilities: [batch, seq, experts], the softmax over all of them, in float32 at least.
    """

    weights: Tensor
    experts: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """Scores every expert for every token by a linear map without bias, and chooses the k best.

    https://arxiv.org/abs/1701.06538; softmax before choosing: https://arxiv.org/abs/2101.03961; after choosing:
    https://arxiv.org/abs/2401.04088, section 2.1. Both choose the same experts, since a softmax keeps the order; of
    equal scores, that of the lower number wins. Numbers narrower than float32 are widened before the softmax.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.top_k = config.top_k
        self.order = config.router
        self.renormalize = config.renormalize
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, x: Tensor) -> Routing:
        """x: [batch, seq, width]."""
        scores = F.linear(x, self.weight)  # [batch, seq, experts]
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        probabilities = scores.softmax(-1)
        ranking = scores.detach().argsort(dim=-1, descending=True, stable=True)
        experts = ranking[..., : self.top_k].contiguous()  # a view would keep the whole ranking until backward
        if self.order == "topk-softmax":
            weights = scores.gather(-1, experts).softmax(-1)
        else:
            weights = probabilities.gather(-1, experts)
            if self.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights.to(x.dtype), experts, probabilities)


class Balance(nn.Module):
    """A loss that is 1 where experts are used evenly, and up to experts / k where they are not.

    Of a sequence of T tokens: sum over experts i of f_i P_i, with f_i = experts / (k T) * (choices of i), which has no
    gradient, and P_i the mean probability of i. https://arxiv.org/abs/2412.19437, equations 17 to 20, without its
    coefficient. Over a batch, the same with all tokens of a forward: https://arxiv.org/abs/2101.03961, equations 4
    to 6, where k is 1. All tokens count, whatever their labels, and choices that a capacity then drops.

    Args:
        over: "sequence" or "batch".
        coefficient: what Decoder.loss_sum multiplies it by; at 0, nothing is computed.
    """

    def __init__(self, over: str = "sequence", coefficient: float = 0.0):
        super().__init__()
        self.over = over
        self.coefficient = coefficient

    def forward(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        """probabilities: [batch, seq, experts]; experts: [batch, seq, k] int64. Returns [batch], or [1] over a batch."""
        choices, mass, tokens = self.totals(probabilities, experts)
        used = choices.to(mass.dtype) * (mass.shape[1] / max(1, experts.shape[-1] * tokens))  # f
        return (used * mass).sum(-1).div(max(1, tokens))

    def totals(self, probabilities: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, int]:
        """What is summed over the tokens of each sequence, or of the batch: choices and probabilities of every expert, and 1.

        Returns:
            [batch or 1, experts] int64, [batch or 1, experts], and the number of tokens.
        """
        if self.over == "batch":  # all tokens are one sequence
            probabilities, experts = probabilities.flatten(0, 1)[None], experts.flatten(0, 1)[None]
        batch, seq, n_experts = probabilities.shape
        chosen = experts.flatten(1)  # [batch, seq * k]
        choices = chosen.new_zeros(batch, n_experts).scatter_add_(1, chosen, torch.ones_like(chosen))
        # Over a batch every probability is a term of its own, so that sums over parts add up.
        mass = probabilities[0].sum(0, keepdim=True) if self.over == "batch" else probabilities.sum(1)
        return choices, mass, seq


class Capacity(nn.Module):
    """How many choices an expert takes: at most ceil(factor * seq * k / experts) of a sequence; the rest is dropped.

    Earlier tokens come first, and of one token its earlier choices. It is counted for each sequence alone, so it does
    not depend on how a batch is cut. https://arxiv.org/abs/2006.16668, section 2.2, with a sequence as the group.

    Args:
        factor: None drops nothing.
        n_experts: how many experts there are.
    """

    def __init__(self, factor: float | None, n_experts: int):
        super().__init__()
        self.factor = factor
        self.n_experts = n_experts

    def limit(self, seq: int, top_k: int) -> int | None:
        """How many choices of a sequence an expert takes; None: all."""
        if self.factor is None:
            return None
        return math.ceil(round(self.factor * seq * top_k / self.n_experts, 9))  # 1.1 * 10 is 11, not 12

    def forward(self, experts: Tensor) -> Tensor | None:
        """experts: [batch, seq, k] int64. Returns [batch, seq, k] bool, the choices that are kept; None: all are."""
        limit = self.limit(*experts.shape[1:])
        return None if limit is None else self.keep(experts, limit)

    def keep(self, experts: Tensor, limit: int, before: Tensor | None = None) -> Tensor:
        """The choices that come first, up to a limit: [batch, seq, k] int64 -> the same shape, bool.

        Args:
            before: [batch, experts] int64, choices that each expert has of earlier tokens that are not among these.
        """
        chosen = experts.flatten(1)  # [batch, seq * k], in the order in which experts take them
        order = chosen.argsort(dim=-1, stable=True)
        counts = chosen.new_zeros(len(chosen), self.n_experts).scatter_add_(1, chosen, torch.ones_like(chosen))
        first = counts.cumsum(-1) - counts  # where each expert's choices begin in that order
        if before is not None:
            first = first - before
        places = torch.arange(chosen.shape[1], device=chosen.device) - first.gather(1, chosen.gather(1, order))
        return torch.empty_like(chosen, dtype=torch.bool).scatter_(1, order, places < limit).view_as(experts)
