"""Causal self-attention with grouped key and value heads: one fused kernel, or spelled out step by step.

Packed documents do not see each other: a mask says what is hidden. Whoever cuts sequences over ranks passes an object in its
place, whose attend(q, k, v, scale) does what the kernel would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emu.models.config import Config
from emu.models.layers import Dropout, Linear
from emu.models.rotary import Rotation, rotate


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """softmax(q k' / sqrt(head_dim), masked) v in one kernel: FlashAttention, https://arxiv.org/abs/2205.14135.

    Query head i reads key and value head i // (heads / kv_heads). Differentiable once.

    Args:
        q: [batch, heads, seq, head_dim]; batch or seq may be 0.
        k, v: [batch, kv_heads, seq, head_dim], kv_heads a divisor of heads.
        hidden: bool, True where a query must not see a key, [batch, 1, seq, seq] or [seq, seq]; every query sees some.
            None: causal.

    Returns:
        [batch, heads, seq, head_dim], in the memory order [batch, seq, heads, head_dim].

    Raises:
        ValueError: the shapes do not fit each other.
    """
    heads, kv_heads = _check(q, k, v)
    if q.shape[-2] == 0:  # the CPU kernel divides by the number of queries
        return q + 0 * (k.sum() + v.sum())
    bias = None if hidden is None else torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
    if q.device.type in ("cpu", "meta"):
        # F.scaled_dot_product_attention takes this kernel on a CPU but spells the softmax out on meta tensors.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, True)[0] if bias is None else kernel(q, k, v, 0.0, False, attn_mask=bias)[0]
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, enable_gqa=heads != kv_heads)


def causal_mask(seq: int, device: torch.device | None = None) -> Tensor:
    """What a query must not see: [seq, seq] bool, True where the key comes later than the query."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)


def document_mask(documents: Tensor) -> Tensor:
    """The same where tokens see those of their own document only.

    Args:
        documents: [batch, seq], a number for every token, the same for tokens of one document.

    Returns:
        [batch, 1, seq, seq] bool.
    """
    others = documents[:, None, :, None] != documents[:, None, None, :]
    return others | causal_mask(documents.shape[1], documents.device)


def spelled_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    """The same attention, operator by operator: scores, softmax and dropped weights are matrices in memory.

    Of one layer it keeps for backward what https://arxiv.org/abs/2205.05198, section 4.1, counts: queries and keys,
    the softmax, the dropout's mask, the dropped weights, the values; and the mask, which layers share.

    Args:
        q, k, v: as for attention().
        mask: [seq, seq] bool, as causal_mask makes it, or [batch, 1, seq, seq], as document_mask does.
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


class Fused(nn.Module):
    """Attention's core as one kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """As attention(); mask: what is hidden, None for what is causal, or what attends in its place."""
        return mask.attend(q, k, v, None) if hasattr(mask, "attend") else attention(q, k, v, mask)


class SpelledOut(nn.Module):
    """Attention's core operator by operator. Names: dropout (of attention weights)."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """As spelled_out(); mask: what is hidden, None for what is causal, or what attends in its place."""
        if hasattr(mask, "attend"):
            return mask.attend(q, k, v, None)
        return spelled_out(q, k, v, causal_mask(q.shape[-2], q.device) if mask is None else mask, self.dropout)


class Attention(nn.Module):
    """The attention branch of a block: projections q, k, v, the core, projection o.

    Names: q, k, v, core, o.

    The number of heads follows from what the projections return, so a shard of them is attention over fewer heads.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.width, queries, bias=config.bias)
        self.k = Linear(config.width, keys, bias=config.bias)
        self.v = Linear(config.width, keys, bias=config.bias)
        self.core = Fused() if config.fused else SpelledOut(config.attention_dropout)
        self.o = Linear(queries, config.width, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation | None = None, mask: Any = None) -> Tensor:
        """Attention of each sequence to itself.

        Args:
            x: [batch, seq, width].
            rotation: the model's rotary tables, or None.
            mask: a bool tensor, True where a query must not see a key; None: all that is causal; or an object whose
                attend(q, k, v, scale) takes the core's place.

        Returns:
            [batch, seq, width].
        """
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, heads, head_dim]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, kv_heads, head_dim]
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o(mixed.transpose(1, 2).flatten(-2))
