"""One rectangle of attention, forward and backward, operator by operator: right for anything, scores in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of queries that meet keys; see emu.parallel.attention.fast.forward."""
    scores = _scores(q, k, causal, mask, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    return (weights.view(*_grouped(q, k)[:3], k.shape[2]) @ v).view(q.shape), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one rectangle; see emu.parallel.attention.fast.backward."""
    grouped = _grouped(q, k)
    weights = (_scores(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp_()
    inner = (grad.reshape(grouped) @ v.mT).view(weights.shape)
    scores_grad = (weights * (inner - (grad * out).sum(-1, keepdim=True)) * scale).view(*grouped[:3], k.shape[2])
    dq = (scores_grad @ _finite(k)).view(q.shape)
    dk = scores_grad.mT @ _finite(q).reshape(grouped)
    return dq, dk, weights.view(scores_grad.shape).mT @ grad.reshape(grouped)


def _grouped(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Query heads of one group lie below each other: they meet the same keys in one product."""
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    return batch, kv_heads, heads * queries // kv_heads if kv_heads else 0, head_dim


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """[batch, heads, queries, keys], -inf where a key is not seen."""
    queries, keys = q.shape[2], k.shape[2]
    scores = ((q * scale).reshape(_grouped(q, k)) @ k.mT).view(*q.shape[:3], keys)
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask.unsqueeze(1), -math.inf)
    return scores


def _finite(x: Tensor) -> Tensor:
    """Infinite numbers become 0: any score they make is -inf or nan, so they meet a gradient that is 0 or nan anyway."""
    return x.nan_to_num(0.0, 0.0, 0.0)
