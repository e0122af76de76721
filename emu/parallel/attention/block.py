"""The maths of blockwise attention: attend to some keys, merge partial results, go back.

Some queries meet keys block by block. Each block gives its output as if there were no other keys, and the log-sum-exp
of its scores; two such partial results merge into what both blocks together would have given:

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Going back, a block needs the log-sum-exp and the output of the whole row: its weights are exp(scores - lse), and the row
sum of grad * out stands for what all blocks together subtract. FlashAttention does both over tiles within a chip
(https://arxiv.org/abs/2205.14135), ring attention over the ranks of a group (https://arxiv.org/abs/2310.01889).

All of it is computed in float32 at least, whatever the inputs are: a partial result that were rounded to bfloat16 would
add its own error with every block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emu.parallel.attention import fast
from emu.parallel.attention.pieces import Piece


class Partial(NamedTuple):
    """Attention over some of the keys. Queries that saw none: out 0, lse -inf."""

    out: Tensor  # [batch, heads, queries, head_dim], float32 at least
    lse: Tensor  # [batch, heads, queries], likewise: natural logarithm of the sum of exp(scores)


def attend(q: Tensor, k: Tensor, v: Tensor, pieces: Sequence[Piece], scale: float | None = None) -> Partial:
    """Attention of queries to the keys that pieces let them see. Knows no autograd: see backward().

    Args:
        q: [batch, heads, queries, head_dim]. Any size may be 0.
        k, v: [batch, kv_heads, keys, head_dim]; query head i reads key and value head i // (heads / kv_heads).
        pieces: which queries see which keys; a mask has as many rows as the batch, or one.
        scale: of the scores; 1 / sqrt(head_dim) where not given.

    Returns:
        out and lse in float32, or in float64 where q is.
    """
    q, k, v = (_wide(x) for x in (q, k, v))
    whole: Partial | None = None
    for piece in pieces:
        at = slice(None), slice(None), piece.q
        seen = slice(None), slice(None), piece.k
        part = Partial(*fast.forward(q[at], k[seen], v[seen], piece.causal, _on(piece.mask, q), _scale(q, scale)))
        if piece.queries == q.shape[2]:
            whole = part if whole is None else merged(whole, part)
            continue
        if whole is None:
            whole = nothing(q)
        both = merged(Partial(whole.out[at], whole.lse[at]), part)
        whole.out[at] = both.out
        whole.lse[at] = both.lse
    return nothing(q) if whole is None else whole


def nothing(q: Tensor) -> Partial:
    """The partial result of queries that have met no key: merged with another, it gives that."""
    dtype = _dtype(q)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return Partial(out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device))


def merged(a: Partial, b: Partial) -> Partial:
    """What the keys of both give together. Not associative to the last bit: state the order."""
    lse = torch.logaddexp(a.lse, b.lse)
    shift = lse.masked_fill(lse == -math.inf, 0.0)  # where neither saw a key: exp(-inf - 0) = 0
    weight_a, weight_b = (a.lse - shift).exp_().unsqueeze(-1), (b.lse - shift).exp_().unsqueeze(-1)
    return Partial((a.out * weight_a).addcmul_(b.out, weight_b), lse)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that go through these pieces, given the whole row's result.

    Args:
        grad: of the whole row's output, [batch, heads, queries, head_dim].
        q, k, v: as for attend().
        out, lse: of the whole row: all blocks merged, in float32 at least.
        pieces, scale: as for attend().

    Returns:
        dq like q, dk and dv like k, in float32 at least: this block's part of each.
    """
    grad, q, k, v, out, lse = (_wide(x) for x in (grad, q, k, v, out, lse))
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row that sees no key has no weight: exp(score - inf) = 0
    sums: list[Tensor | None] = [None, None, None]
    for piece in pieces:
        at = slice(None), slice(None), piece.q
        seen = slice(None), slice(None), piece.k
        parts = fast.backward(
            grad[at], q[at], k[seen], v[seen], out[at], lse[at], piece.causal, _on(piece.mask, q), _scale(q, scale)
        )
        for i, (part, like, where) in enumerate(zip(parts, (q, k, v), (at, seen, seen))):
            if part.shape == like.shape:
                sums[i] = part if sums[i] is None else sums[i] + part  # pyright: ignore[reportOptionalOperand]
            else:
                if sums[i] is None:
                    sums[i] = torch.zeros_like(like)
                sums[i][where] += part  # pyright: ignore[reportOptionalSubscript]
    dq, dk, dv = (torch.zeros_like(x) if s is None else s for s, x in zip(sums, (q, k, v)))
    return dq, dk, dv


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.to(_dtype(x))


def _scale(q: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1] or 1)


def _on(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.device == q.device else mask.to(q.device)
