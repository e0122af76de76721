"""What data parallelism costs: gathering parameters and reducing gradients, layer by layer or once a step."""

from __future__ import annotations

from typing import NamedTuple

from .params import LayerParams, embedding_params, layer_params, on_rank
from .placing import crosses_nodes, data_parallel, in_node
from .prices import Prices
from .stages import StageTime
from .workload import Workload

GATHER_BYTES = 2  # an element of a gathered parameter
HIDDEN_AT_MOST = 0.92  # the first bucket's reduction, or the last one's, has nothing to hide behind
USABLE = 0.9  # of a backward pass, until whose end gradients keep coming


class Sharded(NamedTuple):
    """Seconds of a layer's messages under FSDP: gathering in forward; gathering and reducing in backward."""

    gather: float
    reduce: float

    @property
    def backward(self) -> float:
        return self.gather + self.reduce


def fsdp_layer(w: Workload, prices: Prices, microbatches: int) -> Sharded:
    """A layer of FSDP: parameters are gathered before each use, gradients reduced for every micro-batch.

    Under HSDP each copy's gradients are summed with the other copies' once a step.
    """
    stack = prices.stack
    expert = w.dense_layers < w.layers
    shared, experts = on_rank(w, layer_params(w, expert))
    size = stack.gathers_fp8 and w.precision == "fp8"
    gather_bytes, reduce_bytes = 1 if size else GATHER_BYTES, stack.sharded_gradient_bytes
    shard = min(w.hsdp or w.dp, w.dp) * w.cp
    near = in_node(w, shard, w.tp)
    groups = [(shared, shard, near)]
    if experts:
        group = max(1, w.dp * w.cp * w.tp // (w.ep * w.expert_tp)) if w.ep > 1 else shard
        groups.append((experts, group, in_node(w, group, w.ep * w.expert_tp) if w.ep > 1 else near))
    gather = sum(prices.moving_s("all_gather", n * gather_bytes, size, node) for n, size, node in groups)
    reduce = sum(prices.moving_s("reduce_scatter", n * reduce_bytes, size, node) for n, size, node in groups)
    copies = w.dp * w.cp // shard
    if copies > 1:
        reduce += prices.moving_s("all_reduce", shared * 4 / shard, copies, 1) / microbatches
    return Sharded(gather, reduce)


def beside_s(compute_s: float, message_s: float, loss: float) -> float:
    """Compute and a message side by side: the longer, if the message slows what runs beside it by `loss`."""
    if compute_s <= 0:
        return message_s
    return max(compute_s * (1 + loss * min(1.0, message_s / compute_s)), message_s)


def params_on_rank(w: Workload) -> tuple[float, float]:
    """Parameters of a mean stage's layers on one rank, those that dp shares and those of experts; ends apart."""
    total = [0.0, 0.0]
    for expert, n in ((False, w.dense_layers), (True, w.layers - w.dense_layers)):
        shared, experts = on_rank(w, layer_params(w, expert) if n else LayerParams(0, 0))
        total[0] += shared * n / w.pp
        total[1] += experts * n / w.pp
    return total[0], total[1]


def ends_on_rank(w: Workload) -> float:
    """Parameters of embedding and head on a rank of the first or last stage; of both, where there is one stage."""
    return embedding_params(w) / w.tp * (1 if w.pp > 1 or w.tied else 2)


def reduction_s(w: Workload, prices: Prices, stage: StageTime) -> float:
    """Exposed seconds of reducing gradients, and of gathering updated parameters, once a step without FSDP.

    Where they overlap, they hide behind the last backward and the first forward of a stage, which they slow.
    """
    stack = prices.stack
    if w.fsdp or w.adapters:
        return 0.0
    shared, experts = params_on_rank(w)
    n, near = data_parallel(w)
    expert_n = max(1, n * w.tp // (w.ep * w.expert_tp)) if w.ep > 1 else n
    expert_near = in_node(w, expert_n, w.ep * w.expert_tp) if w.ep > 1 else near
    groups = [(shared + ends_on_rank(w), n, near), (experts, expert_n, expert_near)]
    sharded = w.zero >= 1
    kind = "reduce_scatter" if sharded and not stack.reduces_whole else "all_reduce"
    reduce = sum(prices.moving_s(kind, size * stack.gradient_bytes, group, node) for size, group, node in groups)
    gather = 0.0
    if sharded:
        gather = sum(prices.moving_s("all_gather", size * GATHER_BYTES, group, node) for size, group, node in groups)
    if "data" not in stack.overlaps:
        return reduce + gather
    exposed = 0.0
    for message, compute in ((reduce, stage.backward), (gather, stage.forward)):
        exposed += max(message - USABLE * compute, message * (1 - HIDDEN_AT_MOST))
        exposed += prices.chip.overlap_loss * min(message, compute)
    return exposed


def tied_s(w: Workload, prices: Prices) -> float:
    """Summing a shared embedding's gradients between the first and the last stage."""
    if w.pp == 1 or not w.tied or not prices.stack.tied_reduce:
        return 0.0
    size = embedding_params(w) / w.tp * prices.stack.gradient_bytes
    return prices.moving_s("all_reduce", size, 2, 1 if crosses_nodes(w) else 2)


def optimizer_s(w: Workload, prices: Prices) -> float:
    """Adam: master weights and two moments are read and written, gradients read, parameters written.

    Gradients of what data parallelism does not cut are read once more, to clip them.
    """
    if w.adapters:
        return 0.0
    n = sum(params_on_rank(w)) + ends_on_rank(w)
    shards = w.dp if w.zero >= 1 or w.fsdp else 1
    return prices.exact_s(34 * n / shards + (0 if w.fsdp else 4 * n))
