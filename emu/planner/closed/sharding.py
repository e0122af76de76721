"""What data parallelism costs: gathering parameters and reducing gradients, layer by layer or once a step."""

from __future__ import annotations

from typing import NamedTuple

from .params import LayerParams, embedding_params, layer_params, on_rank
from .placing import Cut, crosses_nodes, cut, in_node
from .prices import Prices
from .stages import StageTime, laid
from .workload import Workload

GATHER_BYTES = 2  # an element of a gathered parameter: bfloat16
SUMMED_BYTES = 4  # an element of a gradient that copies under HSDP sum: float32
HIDDEN_AT_MOST = 0.92  # the first bucket's reduction, or the last one's, has nothing to hide behind; assumed
USABLE = 0.9  # of a backward pass, until whose end gradients keep coming; assumed


class Sharded(NamedTuple):
    """Seconds of a layer's messages under FSDP: gathering in forward; gathering and reducing in backward."""

    gather: float
    reduce: float

    @property
    def backward(self) -> float:
        return self.gather + self.reduce


def fsdp_layer(w: Workload, prices: Prices, microbatches: int) -> Sharded:
    """The mean layer of FSDP: parameters are gathered before each use, gradients reduced for every micro-batch.

    Under HSDP each copy's gradients are summed with the other copies' once a step.
    """
    kinds = ((w.dense_layers, False), (w.layers - w.dense_layers, True))
    each = [(n / w.layers, _gathered(w, prices, microbatches, expert)) for n, expert in kinds if n]
    return Sharded(sum(share * one.gather for share, one in each), sum(share * one.reduce for share, one in each))


def _gathered(w: Workload, prices: Prices, microbatches: int, expert: bool) -> Sharded:
    """A layer with experts or with an ordinary MLP."""
    stack = prices.stack
    shared, experts = on_rank(w, layer_params(w, expert))
    size = stack.gathers_fp8 and w.precision == "fp8"
    gather_bytes, reduce_bytes = 1 if size else GATHER_BYTES, stack.sharded_gradient_bytes
    gather = reduce = 0.0
    for n, (ranks, stride, copies) in ((shared, cut(w)), (experts, cut(w, experts=True))):
        if not n:
            continue
        near = in_node(w, ranks, stride)
        gather += prices.moving_s("all_gather", n * gather_bytes, ranks, near)
        reduce += prices.moving_s("reduce_scatter", n * reduce_bytes, ranks, near)
        if copies > 1:
            beside = in_node(w, copies, stride * ranks)
            reduce += prices.moving_s("all_reduce", n * SUMMED_BYTES / ranks, copies, beside) / microbatches
    return Sharded(gather, reduce)


def beside_s(compute_s: float, message_s: float, loss: float) -> float:
    """Compute and a message side by side: the longer, if the message slows what runs beside it by `loss`."""
    if compute_s <= 0:
        return message_s
    return max(compute_s * (1 + loss * min(1.0, message_s / compute_s)), message_s)


def params_on_rank(w: Workload) -> tuple[float, float]:
    """Parameters of a mean device's layers on one rank, those that dp shares and those of experts; ends apart."""
    total, copies = [0.0, 0.0], laid(w).copies
    for expert, n in ((False, w.dense_layers), (True, w.layers - w.dense_layers)):
        shared, experts = on_rank(w, layer_params(w, expert) if n else LayerParams(0, 0))
        total[0] += copies * shared * n / w.pp
        total[1] += copies * experts * n / w.pp
    return total[0], total[1]


def ends_on_rank(w: Workload) -> float:
    """Parameters of embedding and head on a rank of the first or last stage; of both, where one device has both."""
    return embedding_params(w) / w.tp * (2 if laid(w).joined and not w.tied else 1)


def _held(w: Workload) -> tuple[tuple[float, Cut], ...]:
    """Parameters on a rank, and what their states are cut over: of what data parallelism shares, and of experts."""
    shared, experts = params_on_rank(w)
    return ((shared + ends_on_rank(w), cut(w)), (experts, cut(w, experts=True)))


def reduction_s(w: Workload, prices: Prices, stage: StageTime) -> float:
    """Exposed seconds of reducing gradients, and of gathering updated parameters, once a step without FSDP.

    Where they overlap, they hide behind the last backward and the first forward of a stage, which they slow.
    """
    stack = prices.stack
    if w.gathered or w.adapters:
        return 0.0
    groups = [(n, ranks, in_node(w, ranks, stride)) for n, (ranks, stride, _) in _held(w)]
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
    if laid(w).joined or not w.tied or not prices.stack.tied_reduce:
        return 0.0
    size = embedding_params(w) / w.tp * prices.stack.gradient_bytes
    return prices.moving_s("all_reduce", size, 2, 1 if crosses_nodes(w) else 2)


def mirrored_s(w: Workload, prices: Prices) -> float:
    """Summing gradients of stages that lie on two devices (DualPipe), between these; of what each keeps, if they are cut.

    After the sums over data parallelism, as emu.parallel does it, beside nothing.
    """
    if w.adapters or laid(w).copies == 1:
        return 0.0
    sharded = w.zero >= 1 or w.gathered
    size = sum(n / by.ranks if sharded else n for n, by in _held(w)) * prices.stack.gradient_bytes
    return prices.moving_s("all_reduce", size, 2, 1 if crosses_nodes(w) else 2)


def optimizer_s(w: Workload, prices: Prices) -> float:
    """Adam: master weights and two moments are read and written, gradients read, parameters written.

    Gradients of what data parallelism does not cut are read once more, to clip them.
    """
    if w.adapters:
        return 0.0
    whole = sum(n for n, _ in _held(w))
    sharded = w.zero >= 1 or w.gathered
    own = sum(n / by.ranks for n, by in _held(w)) if sharded else whole
    return prices.exact_s(34 * own + (0 if w.gathered else 4 * whole))
