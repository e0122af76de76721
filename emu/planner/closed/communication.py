"""Messages within a layer and between stages, and how much of each is exposed.

Volumes: formulas.md of the reference; tensor parallelism https://arxiv.org/abs/2104.04473, sequence parallelism
https://arxiv.org/abs/2205.05198, context parallelism as a ring https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from typing import NamedTuple

from .layer import ELEMENT
from .placing import crosses_nodes, in_node
from .prices import Prices
from .workload import Workload

# A ring of keys and values hides behind attention, but for its first steps and where it takes longer than attention. Assumed.
RING_EXPOSED = 0.1
# What a dispatcher does beside moving tokens: it meets, and learns who sends how much. Assumed.
DISPATCH_S = 30e-6


class LayerMessages(NamedTuple):
    """Exposed seconds of a layer's messages for one micro-batch.

    tensor_forward, tensor_backward: of tensor parallelism; context_forward, context_backward: of rings of keys and values;
    experts: of dispatch and combine, each of forward and backward.
    """

    tensor_forward: float
    tensor_backward: float
    context_forward: float
    context_backward: float
    experts: float


def layer_messages(
    w: Workload, prices: Prices, micro_batch: int, attention_s: tuple[float, float], weight_s: float, expert: bool
) -> LayerMessages:
    """What a layer's messages add to its time, given how long its attention (forward, backward) and weights' gradients take."""
    tokens = w.seq * micro_batch / w.cp
    forward, backward = _ring(w, prices, tokens, *attention_s)
    experts = 2 * all_to_all_s(w, prices, tokens) if expert else 0.0
    return LayerMessages(*tensor_s(w, prices, tokens, weight_s), forward, backward, experts)


def tensor_s(w: Workload, prices: Prices, tokens: float, weight_s: float) -> tuple[float, float]:
    """Exposed seconds of each direction: two all-reduces of a layer's activations, or all-gather and reduce-scatter twice.

    In backward, where software lets them ("weights"), the sums over ranks run beside the weights' gradients, which they
    slow.
    """
    if w.tp == 1:
        return 0.0, 0.0
    whole, near = tokens * w.hidden * ELEMENT, in_node(w, w.tp)
    gathered = 2 * prices.moving_s("all_gather", whole, w.tp, near) if w.sp else 0.0
    summed = 2 * prices.moving_s("reduce_scatter" if w.sp else "all_reduce", whole, w.tp, near)
    if "tensor" in prices.stack.overlaps:
        exposed = (gathered + summed) * prices.software["software.exposed_tensor"]
        return exposed, exposed
    if "weights" in prices.stack.overlaps:
        beside = max(0.0, summed - weight_s) + prices.chip.overlap_loss * min(summed, weight_s)
        return gathered + summed, gathered + beside
    return gathered + summed, gathered + summed


def _ring(w: Workload, prices: Prices, tokens: float, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Keys and values pass all ranks of a context-parallel group, beside attention; in backward their gradients, too."""
    if w.cp == 1:
        return 0.0, 0.0
    kv = 2 * tokens * max(w.kv_heads / w.tp, 1) * w.head_dim * ELEMENT
    passing = prices.moving_s("all_gather", kv * w.cp, w.cp, in_node(w, w.cp, w.tp))  # the volume of a ring's steps
    hidden_s = RING_EXPOSED * passing
    return max(0.0, passing - forward_s) + hidden_s, max(0.0, 2 * passing - backward_s) + 2 * hidden_s


def all_to_all_s(w: Workload, prices: Prices, tokens: float) -> float:
    """Exposed seconds of sending each token to its experts' ranks, once.

    A "nodewise" dispatcher sends a token at most once to a node, and on from there; some of it hides.
    """
    if w.ep == 1 or w.moe is None:
        return 0.0
    sent = tokens / w.tp * w.hidden * ELEMENT * w.moe.topk
    per_node = in_node(w, w.ep, w.expert_tp)
    if prices.stack.dispatcher == "plain" or not w.moe.dropless:
        return prices.moving_s("all_to_all", sent, w.ep, per_node) + DISPATCH_S
    nodes = -(-w.ep // per_node)
    inside = prices.moving_s("all_to_all", sent, per_node, per_node)
    met = nodes * (1 - (1 - 1 / nodes) ** w.moe.topk) / w.moe.topk  # nodes that a token goes to, over its experts
    across = prices.moving_s("all_to_all", sent * met, nodes, 1)
    return prices.software["software.exposed_all_to_all"] * max(inside, across) + DISPATCH_S


def hop_s(w: Workload, prices: Prices, micro_batch: int) -> float:
    """Seconds from one stage to the next."""
    if w.pp == 1:
        return 0.0
    whole = w.seq * micro_batch / w.cp * w.hidden * ELEMENT
    sliced = w.tp > 1 and (w.sp or prices.stack.sends_slices)
    piece = whole / w.tp if sliced else whole
    sent = prices.moving_s("ring_shift", piece, 2, 1 if crosses_nodes(w) else 2)
    gathered = prices.moving_s("all_gather", whole, w.tp, in_node(w, w.tp)) if sliced and not w.sp else 0.0
    return sent + gathered
