"""The loss of a language model: how surprised it is by each token that follows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that asks for nothing: torch's convention


class CrossEntropy(nn.Module):
    """The sum of the cross-entropies of all labels that count, in nats.

    With smoothing s, the label y of a vocabulary of V asks for the probabilities (1 - s) [i = y] + s / V:
    https://arxiv.org/abs/1512.00567, section 7, as torch.nn.CrossEntropyLoss defines it.

    Args:
        label_smoothing: s, from 0 to 1.
        ignore_index: the label that does not count.
    """

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = IGNORED):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits: [..., vocab]; labels: [...] int64. Returns a scalar in float32 at least, 0 if no label counts."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()  # a long sum in 8 or 11 bits would lose most of its terms
        return F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            reduction="sum",
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
