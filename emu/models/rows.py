"""Rows that travel: taken out of a matrix, and put back where they came from.

torch's own x[index] adds in its backward, since an index may name a row twice. Here none does, so the backward of
taking is putting, and nothing is added that could be added in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def take(x: Tensor, index: Tensor, some: bool = False) -> Tensor:
    """Forward: the rows x[index]. Backward: each gradient goes back to its row; rows not taken get zeros.

    Args:
        x: [n, width].
        index: [m] int64, no number twice.
        some: the index may leave rows out; otherwise it is a permutation.

    Returns:
        [m, width].
    """
    return _Take.apply(x, index, some)


def put(x: Tensor, index: Tensor, n: int | None = None) -> Tensor:
    """Forward: row i of x becomes row index[i] of n; the others are zeros. Backward: take.

    Args:
        x: [m, width].
        index: [m] int64, no number twice, all below n.
        n: how many rows there are (None: m, and the index is a permutation).

    Returns:
        [n, width].
    """
    return _Put.apply(x, index, n)


def _placed(x: Tensor, index: Tensor, n: int | None) -> Tensor:
    into = torch.empty_like(x) if n is None else x.new_zeros(n, *x.shape[1:])  # a permutation leaves no row unwritten
    return into.index_copy_(0, index, x)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, some: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.n = len(x) if some else None
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _placed(grad, ctx.saved_tensors[0], ctx.n), None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, n: int | None) -> Tensor:
        ctx.save_for_backward(index)
        return _placed(x, index, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
