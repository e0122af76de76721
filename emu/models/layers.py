"""Linear maps, embeddings, norms and dropout; weights are left to the model to draw, with draw_."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from emu.models.config import Config


class Linear(nn.Linear):
    """nn.Linear that draws nothing when it is made: torch would take its numbers from the global generator."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is; Decoder draws."""


class Embedding(nn.Embedding):
    """nn.Embedding that draws nothing when it is made."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is; Decoder draws."""


class Dropout(nn.Dropout):
    """nn.Dropout by one operator that keeps a mask of one byte for each element, as GPUs do.

    On a CPU, nn.Dropout keeps a mask as wide as its input.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: any shape; zeroed with probability p in training, the rest divided by 1 - p."""
        if not self.training or self.p == 0:
            return input
        return torch.native_dropout(input, self.p, True)[0]


def norm(config: Config) -> nn.Module:
    """The norm that the config asks for, over the last dim; scales are 1 and biases 0."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


@torch.no_grad()
def draw_(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill weight with normal numbers, the same on every device and, up to rounding, in every dtype.

    Args:
        weight: filled in place; a meta tensor has no numbers, so its draw only stands in the record.
        std: standard deviation.
        generator: on the CPU; the global one is not touched.
    """
    where = "meta" if weight.is_meta else "cpu"
    drawn = torch.empty(weight.shape, dtype=torch.float32, device=where).normal_(0.0, std, generator=generator)
    weight.copy_(drawn)
