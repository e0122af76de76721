"""Bytes of activations that a layer keeps for one micro-batch on one rank, until its backward.

Source: https://arxiv.org/abs/2205.05198, table 2; for gated MLPs and grouped queries the count of the reference's
formulas.md, section 1. Activations have 2 bytes, dropout masks 1.
"""

from __future__ import annotations

from .flops import attention_width
from .stacks import Stack
from .workload import Workload


def residual_split(w: Workload, stack: Stack) -> int:
    """Into how many parts tensor parallelism cuts what lies between its regions."""
    return w.tp if w.sp or stack.cuts_residuals else 1


def layer_bytes(w: Workload, stack: Stack, micro_batch: int, recompute: str | None = None) -> float:
    """What one layer keeps.

    Args:
        recompute: instead of the workload's own: "none" is what a layer holds while it is computed again.
    """
    recompute = w.recompute if recompute is None else recompute
    tokens = w.seq / w.cp * micro_batch
    split = residual_split(w, stack)
    if recompute == "full":
        return 2 * tokens * w.hidden / split
    if recompute == "every-other-layer":
        return (2 * tokens * w.hidden / split + layer_bytes(w, stack, micro_batch, "none")) / 2
    if w.gated or w.moe is not None or stack.products_alone:
        return _gated(w, stack, tokens, split, recompute)
    return tokens * w.hidden * _table_2(w, stack, split, recompute != "none")


def _table_2(w: Workload, stack: Stack, split: int, selective: bool) -> float:
    """Bytes per element of the hidden state: norms, residuals and inputs; what tensor parallelism cuts; and scores."""
    dropped = 2 if stack.dropout else 0  # masks of the two residual branches
    own = (8 + dropped) / split
    inner = (16 * w.ffn / (4 * w.hidden) + 8 * w.heads * w.head_dim / w.hidden) / w.tp
    if selective or stack.attention != "unfused":
        return own + inner
    kept = (
        5 if stack.dropout else 4
    )  # softmax's output 2, the dropped one 2 and its mask 1; without dropout, scores 2 and 2
    return own + inner + kept * w.heads * w.seq / (w.hidden * w.tp)


def _gated(w: Workload, stack: Stack, tokens: float, split: int, recompute: str) -> float:
    queries, keys = w.heads * attention_width(w), w.kv_heads * w.head_dim
    ffn, gates = _ffn(w), 2 if w.gated else 1
    if stack.products_alone and recompute in ("none", "per-op"):
        # The layer's input and its two outputs; queries, keys, values; and gates, unless they are computed again.
        gate = gates * ffn if recompute == "none" else 0
        return tokens * 2 * (3 * w.hidden / split + (queries + 2 * keys + gate) / w.tp)
    if recompute == "per-op":  # every second matrix product's output, and attention's
        return tokens * 2 * (w.hidden / split + (2 * queries + keys + ffn + w.hidden) / w.tp)
    inside = 4 * queries + 4 * keys + 4 * w.heads + 2 * (gates + 1) * ffn
    if not stack.fused:
        inside += 2 * ffn  # the activation's output and its product with the gate, apart
    scores = 4 * w.heads * w.seq if stack.attention == "unfused" and recompute == "none" else 0
    return tokens * (8 * w.hidden / split + (inside + scores) / w.tp)


def _ffn(w: Workload) -> float:
    """Width of the hidden layers that a token passes, on one tensor-parallel rank times tp."""
    if w.moe is None:
        return w.ffn
    own = w.moe.topk * w.moe.ffn + w.moe.shared * w.moe.ffn
    return (w.dense_layers * w.ffn + (w.layers - w.dense_layers) * own) / w.layers
