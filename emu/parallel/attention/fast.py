"""One rectangle of attention, forward and backward: by the processor's fused kernel where it is right, else spelled out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of queries that meet keys; both are new tensors.

    Args:
        q, k, v: [batch, heads or kv_heads, queries or keys, head_dim], float32 or float64.
        causal: query i sees keys 0 .. i.
        mask: [rows or 1, queries, keys] bool, True where a key is seen.
        scale: of the scores.
    """
    return spelled_forward(q, k, v, causal, mask, scale)


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
    """dq, dk, dv of one rectangle, given the row's out and lse (+inf for a row without any weight)."""
    return spelled_backward(grad, q, k, v, out, lse, causal, mask, scale)


def spelled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """forward(), operator by operator."""
    grouped = _grouped(q, k)
    scores = _scores(q, k, causal, mask, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    return (weights.view(*grouped[:3], -1) @ v).view(q.shape), lse


def spelled_backward(
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
    """backward(), operator by operator."""
    grouped = _grouped(q, k)
    weights = (_scores(q, k, causal, mask, scale) - lse.unsqueeze(-1)).exp_()
    inner = (grad.reshape(grouped) @ v.mT).view(weights.shape)
    scores_grad = weights * (inner - (grad * out).sum(-1, keepdim=True)) * scale
    flat = scores_grad.view(*grouped[:3], -1)
    dq = (flat @ k).view(q.shape)
    return dq, flat.mT @ q.reshape(grouped), weights.view(flat.shape).mT @ grad.reshape(grouped)


def _grouped(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Query heads of one group lie below each other: they meet the same keys in one product."""
    batch, heads, queries, head_dim = q.shape
    kv_heads = k.shape[1]
    return batch, kv_heads, (heads // kv_heads if kv_heads else 0) * queries, head_dim


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
