"""The MLP branch of a block, with one activation between two matrices, or gated by a third."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.layers import Linear


class MLP(nn.Module):
    """down(gelu(up(x))): https://arxiv.org/abs/1606.08415."""

    def __init__(self, config: Config, ffn: int):
        super().__init__()
        self.up = Linear(config.width, ffn, bias=config.bias)
        self.down = Linear(ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]."""
        return self.down(F.gelu(self.up(x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config, ffn: int):
        super().__init__()
        self.gate = Linear(config.width, ffn, bias=config.bias)
        self.up = Linear(config.width, ffn, bias=config.bias)
        self.down = Linear(ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(config: Config, ffn: int | None = None) -> nn.Module:
    """The MLP that the config's activation asks for, with a hidden layer of width ffn (None: the config's)."""
    kind = GatedMLP if config.activation == "swiglu" else MLP
    return kind(config, config.ffn if ffn is None else ffn)
