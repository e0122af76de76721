"""Rows of a matrix in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Forward: row i of the result is row order[i] of x. Backward: the rows go back to where they came from.

    Backward copies, where that of x[order] adds: a permutation meets no row twice. So partial sums pass as they are.

    Args:
        x: [n, ...].
        order, inverse: [n] int64; a permutation and its inverse.
    """
    return _Reorder.apply(x, order, inverse)


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes a permutation, both [n] int64."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


class _Reorder(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return reorder(grad, inverse, order), None, None
