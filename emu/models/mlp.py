"""The MLP branch of a block, with one activation between two matrices, or gated by a third."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.layers import Linear


class MLP(nn.Module):
    """down(gelu(up(x))): https://arxiv.org/abs/1606.08415."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = Linear(config.width, config.ffn, bias=config.bias)
        self.down = Linear(config.ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]."""
        return self.down(F.gelu(self.up(x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = Linear(config.width, config.ffn, bias=config.bias)
        self.up = Linear(config.width, config.ffn, bias=config.bias)
        self.down = Linear(config.ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(config: Config) -> nn.Module:
    """The MLP that the config's activation asks for."""
    return GatedMLP(config) if config.activation == "swiglu" else MLP(config)
