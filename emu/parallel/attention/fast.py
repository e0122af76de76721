"""One rectangle of attention, forward and backward, by the processor's own fused kernel.

What was found of torch's CPU kernel (2.13, float32 and float64), and what is done about it here:

* is_causal with unlike lengths is aligned at the top left: query i sees keys 0 .. i, the rest of the queries see all;
* attn_mask works forward and backward, but must be of the queries' dtype (added to the scores), not bool;
* grouped heads, any head dim, and views along the sequence are right; the innermost dim must be dense;
* a query that sees no key gets output 0, which is right, and log-sum-exp 0, which is not: it is set to -inf here. Where
  only a mask hides keys that is known beforehand; where scores themselves are -inf, the host has to look;
* going back, exp(-inf - -inf) is nan, so such a row's log-sum-exp must come in as +inf;
* is_causal hides scores by -inf before it scales them, in the queries' dtype: a scale of 0 (there) makes them nan, one
  below 0 inf. Such scales are spelled out;
* without queries, keys or heads it divides by zero and takes the process down;
* with 16-bit inputs it rounds each result to 16 bits. Callers widen inputs to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from emu.parallel.attention import spelled

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of queries that meet keys: new tensors. Queries that see none: 0 and -inf.

    Args:
        q, k, v: [batch, heads or kv_heads, queries or keys, head_dim], float32 or float64.
        causal: query i sees keys 0 .. i.
        mask: [rows or 1, queries, keys] bool, True where a key is seen.
        scale: of the scores.
    """
    if not _has_kernel(q, k, scale):
        return spelled.forward(q, k, v, causal, mask, scale)
    q, k, v = (_dense(x) for x in (q, k, v))
    bias = _bias(mask, q)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1).unsqueeze(1), -math.inf)
    if _host_sees(lse, lambda: lse == 0) and _host_sees(lse, lambda: (out == 0).all(-1).logical_and_(lse == 0)):
        return spelled.forward(q, k, v, causal, mask, scale)
    return out, lse


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
    """dq, dk, dv of one rectangle.

    Args:
        grad, out, lse: of the whole rows of these queries; lse +inf for a row that sees no key in any rectangle.
        q, k, v, causal, mask, scale: as for forward().
    """
    if not _has_kernel(q, k, scale):
        return spelled.backward(grad, q, k, v, out, lse, causal, mask, scale)
    grad, q, k, v, out, lse = (_dense(x) for x in (grad, q, k, v, out, lse))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
    )
    # An infinite query or key whose every score is -inf has weight 0; the kernel multiplies it by 0 and gets nan.
    # Without a mask, the last query meets every key, and the first key every query.

    def broken() -> Tensor:
        probe = (dq, dk) if mask is not None else (dq[:, :, -1], dk[:, :, 0])
        return ~(probe[0].sum() + probe[1].sum()).isfinite()

    if _host_sees(dq, broken):
        return spelled.backward(grad, q, k, v, out, lse, causal, mask, scale)
    return dq, dk, dv


def _has_kernel(q: Tensor, k: Tensor, scale: float) -> bool:
    usual = scale >= torch.finfo(q.dtype).tiny
    return usual and q.device.type in ("cpu", "meta") and q.numel() > 0 and k.numel() > 0


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """What the kernel adds to scores: 0 where a key is seen, -inf elsewhere."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf).unsqueeze(1)


def _host_sees(x: Tensor, found: Callable[[], Tensor]) -> bool:
    """Whether any of `found()`, made of x, is True. A fused kernel would look itself: no device notices that the host does."""
    if x.device.type == "meta":
        return False
    with torch._C._DisableTorchDispatch():
        return bool(found().any())
