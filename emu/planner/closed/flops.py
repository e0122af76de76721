"""Floating point operations of a decoder, in closed form; a multiply-add is two.

Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix; Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, appendix A.
"""

from __future__ import annotations

from typing import Literal

from .params import attention_params
from .workload import Workload

Pairs = Literal["full", "causal", "causal half"]


def forward_flops(w: Workload, pairs: Pairs = "full") -> float:
    """Products of one sequence, forward: linear maps, attention and head.

    Args:
        pairs: of a query and a key: "full" counts all seq * seq, "causal" those that are attended to, seq * (seq + 1) / 2,
            "causal half" half of all.
    """
    matrices = 3 if w.gated else 2
    dense = matrices * w.hidden * w.ffn
    linear = w.layers * attention_params(w) + w.dense_layers * dense
    if w.moe is not None:
        per_token = matrices * w.hidden * w.moe.ffn * (w.moe.topk + w.moe.shared) + w.hidden * w.moe.experts
        linear += (w.layers - w.dense_layers) * per_token
    head = w.hidden * w.vocab
    return 2 * (linear + head) * w.seq + _attended_flops(w, pairs)


def _attended_flops(w: Workload, pairs: Pairs) -> float:
    """The two products of attention, of one sequence in all layers."""
    met = {"full": w.seq**2, "causal": w.seq * (w.seq + 1) / 2, "causal half": w.seq**2 / 2}[pairs]
    return 4 * w.layers * met * w.heads * attention_width(w)


def attention_width(w: Workload) -> float:
    """Mean width of a head in the two products of attention: 160 of MLA's 192 and 128."""
    return 160 if w.moe is not None and w.moe.mla else w.head_dim


def step_flops(w: Workload, pairs: Pairs = "full", recomputed: bool = False) -> float:
    """Products of a step on all devices: three times the forward pass.

    Args:
        recomputed: also count what is computed again, as sources do who print "hardware FLOPs": a forward of all layers;
            or, where it is attention alone, a forward and a backward of it (Korthikanti's equation 8: three times what
            is in fact computed again).
    """
    one = forward_flops(w, pairs) * w.global_batch
    if not recomputed or w.recompute == "none":
        return 3 * one
    head = 2 * w.hidden * w.vocab * w.seq * w.global_batch
    attended = _attended_flops(w, pairs) * w.global_batch
    again = {
        "full": one - head,
        "selective": 3 * attended,
        "every-other-layer": (one - head) / 2,
        "per-op": (one - head) / 2,
    }
    return 3 * one + again[w.recompute]
