"""Attention across a cut, for autograd: one entry for all kinds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from emu.parallel.context import gathered, mixed, ring
from emu.parallel.context.cut import Cut
from emu.parallel.context.place import Kept, Place
from emu.spmd import EmuError, Group, Rank


def attention(
    q: Tensor, k: Tensor, v: Tensor, cut: Cut, group: Group, rank: Rank, scale: float | None = None
) -> Tensor:
    """softmax(q k' * scale, causal, within documents) v, where each rank has its own tokens of every sequence.

    Differentiable once. All ranks of the group call it alike. For backward it keeps q, k, v, the result, and the
    log-sum-exp of every row of scores (of the heads that it got, where heads are exchanged).

    Args:
        q: [batch, heads, n, head_dim], this rank's tokens in the cut's order.
        k, v: [batch, kv_heads, n, head_dim]; query head i reads key and value head i // (heads / kv_heads).
        cut: of the sequences over the group, made by make_cut.
        group: the ranks that share the sequences.
        rank: this rank.
        scale: of the scores, any finite number; None: 1 / sqrt(head_dim).

    Returns:
        [batch, heads, n, head_dim], in the dtype of q.

    Raises:
        EmuError: tensors that do not fit each other, the cut or the group; a scale that is inf or nan.
        PlanError: more ranks that exchange heads than there are heads.
    """
    device = "cpu" if q.is_meta else q.device.type
    if torch.is_autocast_enabled(device):  # as torch's own attention: it leaves float64 alone
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    _check(q, k, v, cut, group)
    if scale is not None and not math.isfinite(scale):
        raise EmuError(
            f"a scale {scale} of scores is no finite number: weights would be nan",
            "give a finite scale, or None for 1 / sqrt(head_dim)",
        )
    with torch.autocast(device, enabled=False):
        return _Attention.apply(q, k, v, Place(cut, group, rank, scale))


class _Attention(Function):
    """forward: attention across ranks. backward: across them again, given the result and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, here: Place) -> Tensor:
        ctx.here, ctx.kv_heads = here, k.shape[1]
        q, k, v = q.detach(), k.detach(), v.detach()
        if here.cut.kind == "all-gather":
            out, kept = gathered.forward(here, q, k, v)
        elif here.cut.ring is not here.cut:
            out, kept = mixed.forward(here, q, k, v)
        else:
            out, kept = ring.forward(here, q, k, v)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        here, kept = ctx.here, Kept(*ctx.saved_tensors)
        if here.cut.kind == "all-gather":
            found = gathered.backward(here, grad, kept)
        elif here.cut.ring is not here.cut:
            found = mixed.backward(here, grad, kept, ctx.kv_heads)
        else:
            found = ring.backward(here, grad, kept)
        return *(x.to(grad.dtype) for x in found), None


def _check(q: Tensor, k: Tensor, v: Tensor, cut: Cut, group: Group) -> None:
    shapes = f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[3:] != k.shape[3:]:
        raise EmuError(
            f"{shapes} do not fit each other",
            "give queries [batch, heads, n, head_dim], keys and values [batch, kv_heads, n, head_dim]",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1] or not q.shape[1] or len({q.dtype, k.dtype, v.dtype}) > 1:
        raise EmuError(
            f"{shapes} of {q.dtype}, {k.dtype}, {v.dtype}: heads or dtypes do not fit each other",
            "let query heads be a multiple of key and value heads, and all of one dtype",
        )
    if group.size != cut.ranks or q.shape[2] != cut.sizes[group.rank]:
        raise EmuError(
            f"{shapes} are not what rank {group.rank} of {group!r} holds by {cut}: {cut.sizes} tokens",
            "make the cut for this group's size and the whole length, and cut x by cut.own(x, group.rank)",
        )
    if cut.documents is not None and len(cut.documents) != q.shape[0]:
        raise EmuError(
            f"{shapes} have other rows than the cut's documents, {tuple(cut.documents.shape)}",
            "make the cut of the documents of these rows",
        )
