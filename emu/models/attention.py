"""Causal self-attention with grouped key and value heads: one fused kernel, or spelled out step by step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.layers import Dropout, Linear
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
    heads, kv_heads = _check(q, k, v)
    if q.shape[-2] == 0:  # the CPU kernel divides by the number of queries
        return q + 0 * (k.sum() + v.sum())
    if q.device.type in ("cpu", "meta"):
        # F.scaled_dot_product_attention takes this kernel on a CPU but spells the softmax out on meta tensors.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)


def causal_mask(seq: int, device: torch.device | None = None) -> Tensor:
    """What a query must not see: [seq, seq] bool, True where the key comes later than the query."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    """The same attention, operator by operator: scores, softmax and dropped weights are matrices in memory.

    Of one layer it keeps for backward what https://arxiv.org/abs/2205.05198, section 4.1, counts: queries and keys,
    the softmax, the dropout's mask, the dropped weights, the values; and the mask, which layers share.

    Args:
        q, k, v: as for attention().
        mask: [seq, seq] bool, as causal_mask makes it.
        dropout: a module for the weights [batch, heads, seq, seq].

    Returns:
        [batch, heads, seq, head_dim].

    Raises:
        ValueError: the shapes do not fit each other.
    """
    heads, kv_heads = _check(q, k, v)
    batch, _, seq, head_dim = q.shape
    grouped = (batch * kv_heads, heads // kv_heads * seq, head_dim)  # a group's queries meet the same keys: one product
    queries = (q / math.sqrt(head_dim)).reshape(grouped)
    keys, values = (x.reshape(batch * kv_heads, seq, head_dim) for x in (k, v))
    shape = (batch, heads, seq, seq)  # scores get no name, which would hold on to them
    weights = dropout((queries @ keys.mT).view(shape).masked_fill(mask, -math.inf).softmax(-1))
    return (weights.view(*grouped[:2], seq) @ values).view(q.shape)


def _check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """The numbers of query heads and of key and value heads."""
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if k.shape != v.shape or q.shape[-2:] != k.shape[-2:] or q.shape[:-3] != k.shape[:-3] or heads % kv_heads:
        raise ValueError(
            f"attention: queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit. All "
            "need equal [batch, _, seq, head_dim], keys and values equal shapes, and query heads a multiple of theirs."
        )
    return heads, kv_heads


class Attention(nn.Module):
    """The attention branch of a block: projections q, k, v, attention, projection o.

    Names: q, k, v, o, dropout (of attention weights, where attention is spelled out).

    The number of heads follows from what the projections return, so a shard of them is attention over fewer heads.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.fused = config.fused
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.width, queries, bias=config.bias)
        self.k = Linear(config.width, keys, bias=config.bias)
        self.v = Linear(config.width, keys, bias=config.bias)
        self.o = Linear(queries, config.width, bias=config.bias)
        self.dropout = Dropout(config.attention_dropout)

    def forward(self, x: Tensor, rotation: Rotation | None = None, mask: Tensor | None = None) -> Tensor:
        """Attention of each sequence to itself.

        Args:
            x: [batch, seq, width].
            rotation: the model's rotary tables, or None.
            mask: [seq, seq] bool, the causal mask (None: it is made where it is needed). Fused attention reads none.

        Returns:
            [batch, seq, width].
        """
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, kv_heads, head_dim]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.fused:
            mixed = attention(q, k, v)
        else:
            mixed = spelled_out(q, k, v, causal_mask(x.shape[1], x.device) if mask is None else mask, self.dropout)
        return self.o(mixed.transpose(1, 2).flatten(-2))
