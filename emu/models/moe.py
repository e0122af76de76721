"""A mixture of experts in place of a block's MLP: many MLPs, of which each token meets a few.

Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; shared experts: Dai et al. 2024, https://arxiv.org/abs/2401.06066.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.mlp import mlp
from emu.models.router import Balance, Capacity, Router
from emu.models.routing import UnknownRouting, declared
from emu.models.rows import put, take


class Experts(nn.Module):
    """Equal MLPs without biases, stacked: gate (SwiGLU only) and up [experts, ffn, width], down [experts, width, ffn].

    Attributes:
        declared: how tokens are taken to be spread where tensors have no values: see emu.models.routing.
        dropped: choices of the last forward that found their expert full.
    """

    dropped: int = 0

    def __init__(self, config: Config):
        super().__init__()
        self.declared = config.routing
        self.top_k = config.top_k
        inward = (config.experts, config.ffn, config.width)
        if config.activation == "swiglu":
            self.gate = nn.Parameter(torch.empty(inward))
        else:
            self.register_parameter("gate", None)
        self.up = nn.Parameter(torch.empty(inward))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.ffn))

    def forward(self, x: Tensor, expert: Tensor, counts: list[int] | None = None) -> Tensor:
        """Every row's output of its expert.

        Args:
            x: [n, width], rows in any order; n may be 0.
            expert: [n] int64, the expert of each row.
            counts: how many rows each expert has, where the host knows (None: it reads them, or takes the declared
                routing on meta tensors).

        Returns:
            [n, width], in the order of x.
        """
        if counts is None:
            counts = self.count(expert)
        order = expert.argsort(stable=True)
        return put(self.grouped(take(x, order), counts), order)

    def count(self, expert: Tensor) -> list[int]:
        """How many rows each expert has: [n] int64 -> one number per expert. The host waits for it."""
        n_experts = len(self.up)
        counts = expert.new_zeros(n_experts).scatter_add_(0, expert, torch.ones_like(expert))
        if counts.is_meta and self.declared is not None:
            return self.expected(len(expert), n_experts)
        return counts.tolist()

    def expected(self, n: int, n_experts: int) -> list[int]:
        """How many of n rows each of n_experts is taken to have, by the declared routing."""
        if self.declared is None:
            raise UnknownRouting("no routing was declared, and tensors without values have none")
        return list(declared(self.declared, n, n_experts, -(-n // self.top_k)))  # a token chooses no expert twice

    def grouped(self, x: Tensor, counts: list[int]) -> Tensor:
        """The same for rows that lie expert by expert: counts[0] rows of the first, counts[1] of the second, ..."""
        # Experts without rows take part, with empty products: so their gradients are zeros, not None.
        ups, downs = self.up.unbind(), self.down.unbind()
        gates = ups if self.gate is None else self.gate.unbind()
        outputs = []
        for rows, gate, up, down in zip(x.split(counts), gates, ups, downs, strict=True):
            hidden = F.linear(rows, up)  # [rows, ffn]
            hidden = F.gelu(hidden) if self.gate is None else F.silu(F.linear(rows, gate)) * hidden
            outputs.append(F.linear(hidden, down))
        return torch.cat(outputs)


class MoE(nn.Module):
    """The sum of the outputs of the k experts that a token's router chose, by its weights, and of a shared MLP.

    Names: router, experts, shared (None if there is none), balance, capacity.

    Attributes:
        balance_loss: [batch] or [1], what balance said of the last forward; None before, if its coefficient is 0, and once
            Decoder.loss_sum has added it up.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = mlp(config, config.shared_ffn) if config.shared_ffn else None
        self.balance = Balance(config.balance_over, config.balance)
        self.capacity = Capacity(config.capacity, config.experts)
        self.balance_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]. A token whose experts are all full gets zeros from them."""
        weights, experts, probabilities = self.router(x)
        self.balance_loss = self.balance(probabilities, experts) if self.balance.coefficient else None
        kept = self.capacity(experts)
        k = experts.shape[-1]
        tokens = x.flatten(0, 1)
        out = tokens.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)  # [tokens * k, width], a row for each choice
        if kept is None:
            out = self.experts(out, experts.flatten())
        else:
            counts, n = self.count(experts, kept), len(out)
            self.experts.dropped = n - sum(counts)  # for the statistics of whoever shares the experts out
            first = kept.flatten().logical_not().argsort(stable=True)[: sum(counts)]  # the choices that are kept
            out = put(self.experts(take(out, first, some=True), experts.flatten()[first], counts), first, n)
        # Outputs are weighed, not inputs: an expert that is spread over ranks then sums the same numbers.
        mixed = (out.unflatten(0, (len(tokens), k)) * weights.flatten(0, 1).unsqueeze(-1)).sum(1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def count(self, experts: Tensor, kept: Tensor) -> list[int]:
        """How many kept choices each expert has: both [batch, seq, k] -> one number per expert."""
        batch, seq, k = experts.shape
        n_experts = self.capacity.n_experts
        flat = experts.flatten()
        counts = flat.new_zeros(n_experts).scatter_add_(0, flat, kept.flatten().to(flat.dtype))
        if counts.is_meta and self.experts.declared is not None:
            limit = self.capacity.limit(seq, k)
            each = declared(self.experts.declared, seq * k, n_experts, seq)
            return [batch * (n if limit is None else min(n, limit)) for n in each]
        return counts.tolist()
