"""Causal self-attention whose scores never reach memory: one fused kernel, with grouped key and value heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.layers import Linear
from emu.models.rotary import Rotation, rotate


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(head_dim), causal) v in one kernel: FlashAttention, https://arxiv.org/abs/2205.14135.

    Query head i reads key and value head i // (heads / kv_heads). Differentiable once.

    Args:
        q: [batch, heads, seq, head_dim]; batch or seq may be 0.
        k, v: [batch, kv_heads, seq, head_dim], kv_heads a divisor of heads.

    Returns:
        [batch, heads, seq, head_dim], in the memory order [batch, seq, heads, head_dim].

    Raises:
        ValueError: the shapes do not fit each other.
    """
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if k.shape != v.shape or q.shape[-2:] != k.shape[-2:] or q.shape[:-3] != k.shape[:-3] or heads % kv_heads:
        raise ValueError(
            f"attention: queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit. All "
            "need equal [batch, _, seq, head_dim], keys and values equal shapes, and query heads a multiple of theirs."
        )
    if q.shape[-2] == 0:  # the CPU kernel divides by the number of queries
        return q + 0 * (k.sum() + v.sum())
    if q.device.type in ("cpu", "meta"):
        # F.scaled_dot_product_attention takes this kernel on a CPU but spells the softmax out on meta tensors.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)


class Attention(nn.Module):
    """The attention branch of a block: projections q, k, v, one kernel, projection o.

    The number of heads follows from what the projections return, so a shard of them is attention over fewer heads.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.width, queries, bias=config.bias)
        self.k = Linear(config.width, keys, bias=config.bias)
        self.v = Linear(config.width, keys, bias=config.bias)
        self.o = Linear(queries, config.width, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """x: [batch, seq, width] -> [batch, seq, width]; rotation: the model's rotary tables, or None."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, kv_heads, head_dim]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(mixed.transpose(1, 2).flatten(-2))
