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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emu.parallel.attention import fast
from emu.parallel.attention.pieces import Piece, causal_pairs

STRIP = 256  # keys
MOST_CUT = 1024  # beyond it the kernel's own blocks leave out enough


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
    for piece in _cut_for(q, pieces):
        at, _ = _places(piece)
        rows, keys, values = some(q, piece.q), some(k, piece.k), some(v, piece.k)
        part = Partial(*fast.forward(rows, keys, values, piece.causal, _on(piece.mask, q), _scale(q, scale)))
        if whole is None and piece.queries == q.shape[2]:
            whole = part
        else:
            whole = nothing(q) if whole is None else whole
            merge_into(Partial(whole.out[at], whole.lse[at]), part)
    return nothing(q) if whole is None else whole


def nothing(q: Tensor) -> Partial:
    """The partial result of queries that have met no key: merged with another, it gives that."""
    batch, heads, queries, head_dim = q.shape
    out = torch.zeros(batch, queries, heads, head_dim, dtype=_dtype(q), device=q.device).transpose(1, 2)  # as kernels
    return Partial(out, torch.full(q.shape[:-1], -math.inf, dtype=out.dtype, device=q.device))


def merged(a: Partial, b: Partial) -> Partial:
    """What the keys of both give together. Not associative to the last bit: state the order."""
    lse, weight_a, weight_b = _weights(a, b)
    return Partial((a.out * weight_a).addcmul_(b.out, weight_b), lse)


def merge_into(a: Partial, b: Partial) -> None:
    """merged(), written over the first, to the same bits."""
    lse, weight_a, weight_b = _weights(a, b)
    a.out.mul_(weight_a).addcmul_(b.out, weight_b)
    a.lse.copy_(lse)


def _weights(a: Partial, b: Partial) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.logaddexp(a.lse, b.lse)
    shift = lse.masked_fill(lse == -math.inf, 0.0)  # where neither saw a key: exp(-inf - 0) = 0
    return lse, (a.lse - shift).exp_().unsqueeze(-1), (b.lse - shift).exp_().unsqueeze(-1)


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
    for piece in _cut_for(q, pieces):
        at, seen = _places(piece)
        mask = _on(piece.mask, q)
        given, rows, outs, lses = (some(x, piece.q) for x in (grad, q, out, lse))
        keys, values = some(k, piece.k), some(v, piece.k)
        parts = fast.backward(given, rows, keys, values, outs, lses, piece.causal, mask, _scale(q, scale))
        sums = [_sum(s, part, x, place) for s, part, x, place in zip(sums, parts, (q, k, v), (at, seen, seen))]
    dq, dk, dv = (torch.zeros_like(x) if s is None else s for s, x in zip(sums, (q, k, v)))
    return dq, dk, dv


def _sum(so_far: Tensor | None, part: Tensor, like: Tensor, place: tuple[slice, ...]) -> Tensor:
    """A gradient with the part of one piece added at its place."""
    if so_far is not None:
        so_far[place].add_(part)
    elif part.shape == like.shape:
        so_far = part
    else:
        so_far = torch.zeros_like(like)
        so_far[place].copy_(part)
    return so_far


def some(x: Tensor, tokens: slice) -> Tensor:
    """Some tokens of [batch, heads, tokens, ...]: itself, if they are all."""
    n = tokens.stop - tokens.start
    return x if n == x.shape[2] else x.narrow(2, tokens.start, n)


def _places(piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a piece's queries and keys lie in [batch, heads, tokens, ...]."""
    return (slice(None), slice(None), piece.q), (slice(None), slice(None), piece.k)


def _cut_for(q: Tensor, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The same pieces, small causal ones in strips of keys.

    torch's CPU kernel takes keys in blocks of 512 and computes every block that any query of 32 to 256 sees, whole: of
    a causal square of 512 it saves nothing. A strip meets only the queries from its own first on.
    """
    for piece in pieces:
        if not (piece.causal and q.device.type == "cpu" and STRIP < piece.keys <= MOST_CUT):
            yield piece
            continue
        for first in range(0, piece.keys, STRIP):
            q0, k0, k1 = piece.q.start + first, piece.k.start + first, min(piece.k.start + first + STRIP, piece.k.stop)
            pairs = causal_pairs(piece.q.stop - q0, k1 - k0)
            yield Piece(slice(q0, piece.q.stop), slice(k0, k1), k1 - k0 > 1, None, pairs)


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.to(_dtype(x))


def _scale(q: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1] or 1)


def _on(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.device == q.device else mask.to(q.device)
