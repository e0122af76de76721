"""How long a step of emu's own stack takes: its kernels by the price list of traces, joined without an event simulation.

What emu.parallel does: eager launches; tensor-parallel collectives wait, but in backward for those that run beside a
weight's gradient; gradients are reduced in float32 buckets beside backward; FSDP gathers one layer ahead; AdamW is one
kernel, after gradients are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from emu.cost.kernels import kernel_s
from emu.trace.events import Kernel

from .communication import hop_s
from .own import BACKWARD, FORWARD, backward_layer, first_stage, forward_layer, last_stage
from .params import embedding_params, layer_params
from .pipeline import hops_s, makespan_s
from .placing import in_node
from .prices import Prices
from .stages import StageTime, layers_of_stages
from .workload import Workload, WorkloadError

BUCKET_BYTES = 25 * 2**20  # of bfloat16 gradients, as emu.parallel.data fills them
REDUCED = 4  # bytes of a gradient's element as it is reduced: float32
SMALL = 13  # kernels of no size in a step, and tiny sums that all ranks make; counted in shape runs


class Segment(NamedTuple):
    """A part of a step: seconds of the device, and of the host that launches it."""

    device: float
    host: float


def supported(w: Workload) -> None:
    """Raises WorkloadError for what these kernels do not count."""
    for field, wrong, why in (
        ("gated", w.gated, "an MLP with a gate"),
        ("moe", w.moe is not None, "experts"),
        ("cp", w.cp > 1, "context parallelism"),
        ("vp", w.vp > 1, "stages of several chunks"),
        ("hsdp", w.hsdp not in (None, w.dp), "replicas of shard groups"),
        ("schedule", w.schedule not in ("1f1b", "gpipe") and w.pp > 1, f"schedule {w.schedule}"),
        ("recompute", w.recompute not in ("none", "full"), f"recompute {w.recompute}"),
        ("precision", w.precision != "bf16", w.precision),
        ("adapters", w.adapters, "adapters"),
    ):
        if wrong:
            raise WorkloadError(
                f"the kernels of emu's own stack are not counted for {why}",
                "simulate it (emu.simulate), or name another stack",
                field=field,
                value=getattr(w, field),
            )


def own_parts(w: Workload, prices: Prices, micro_batch: int) -> dict[str, float]:
    """Seconds of a step by what they go to."""
    supported(w)
    steps = w.microbatches(micro_batch)
    layers = layers_of_stages(w.layers, w.pp)
    forward = _longer(_segment(prices, forward_layer(w, micro_batch)), _tensor_s(w, prices, micro_batch, FORWARD))
    backward = _segment(prices, backward_layer(w, micro_batch, steps > 1))
    backward = _longer(backward, _tensor_s(w, prices, micro_batch, BACKWARD))
    again = forward if w.recompute == "full" else Segment(0.0, 0.0)
    backward = Segment(backward.device + again.device, backward.host + again.host)
    gathered = exposed = 0.0
    if w.gathered and w.dp > 1:
        forward, backward, exposed = _gathered(w, prices, forward, backward)
        gathered = exposed
    ends = [first_stage(w, micro_batch, steps > 1), last_stage(w, micro_batch, steps > 1)]
    messages_s = _ends_tensor_s(w, prices, micro_batch)
    segments = [_stage(prices, n, i, w, forward, backward, ends, messages_s) for i, n in enumerate(layers)]
    optimizer = _optimizer(w, prices, layers)
    stages = [StageTime(_joined(f), _joined(b), 0.0) for f, b in segments]
    slowest = max(range(w.pp), key=lambda i: stages[i].whole)
    reduced = _reduced_s(w, prices, layers, backward)
    if w.pp == 1:
        f, b = segments[0]
        whole = _joined([*f, *b] * steps + [optimizer])
        kernels = sum(segment.device for segment in (*f, *b)) * steps
        return {
            "kernels": kernels,
            "host": whole - kernels - optimizer.device,
            "fsdp": gathered,
            "data": reduced,
            "optimizer": optimizer.device,
        }
    pipeline = makespan_s(w, stages, steps, waits=True)  # sends meet their receivers
    return {
        "kernels": steps * stages[slowest].whole,
        "bubble": pipeline - steps * stages[slowest].whole,
        "sends": hops_s(w, stages, hop_s(w, prices, micro_batch), steps, overlapped=True),
        "data": reduced,
        "optimizer": _joined([optimizer]),
    }


def _joined(segments: Sequence[Segment]) -> float:
    """One stream whose host runs ahead: the device waits for the host up to some segment, and for itself from there on.

    So it is the longest, over where that is, of the host's time before and the device's after.
    """
    longest, host, device = 0.0, 0.0, sum(s.device for s in segments)
    for segment in segments:
        longest = max(longest, host + device)
        host += segment.host
        device -= segment.device
        longest = max(longest, host + device)
    return longest


def _segment(prices: Prices, kernels: Sequence[Kernel]) -> Segment:
    return Segment(sum(kernel_s(k, prices.chip) for k in kernels), len(kernels) * prices.cluster.host.launch_s)


def _longer(one: Segment, seconds: float) -> Segment:
    return Segment(one.device + seconds, one.host)


def _tensor_s(w: Workload, prices: Prices, micro_batch: int, phase: str) -> float:
    """Exposed seconds of a layer's tensor-parallel collectives in one direction."""
    if w.tp == 1:
        return 0.0
    tokens = w.seq * micro_batch
    whole, near = 2 * tokens * w.hidden, in_node(w, w.tp)
    gather, scatter = (prices.moving_s(kind, whole, w.tp, near) for kind in ("all_gather", "reduce_scatter"))
    summed = gather + scatter if w.sp else prices.moving_s("all_reduce", whole, w.tp, near)
    if phase == FORWARD:
        return 2 * summed
    # In backward the sum runs beside the weight's gradient, and so does the gathering of its input again.
    weights = [k for k in backward_layer(w, micro_batch) if k.dims and k.dims[-1] == tokens]
    seconds = [kernel_s(k, prices.chip) for k in weights]
    up, attention = seconds[1], sum(seconds[3:])
    beside = scatter if w.sp else summed
    loss = prices.chip.overlap_loss
    exposed = sum(max(0.0, beside - shadow) + loss * min(beside, shadow) for shadow in (up, attention))
    return exposed + (2 * gather if w.sp else 0.0)


def _ends_tensor_s(w: Workload, prices: Prices, micro_batch: int) -> tuple[float, float]:
    """What tensor parallelism adds to the first stage, and to the last: a cut vocabulary's embedding, head and loss."""
    if w.tp == 1:
        return 0.0, 0.0
    near = in_node(w, w.tp)
    whole = 2 * w.seq * micro_batch * w.hidden
    embedded = prices.moving_s("reduce_scatter" if w.sp else "all_reduce", whole, w.tp, near)
    per_token = prices.moving_s("all_reduce", 4 * w.seq * micro_batch, w.tp, near)
    gathered = 2 * prices.moving_s("all_gather", whole, w.tp, near) if w.sp else 0.0
    return embedded, 2 * per_token + gathered


def _gathered(w: Workload, prices: Prices, forward: Segment, backward: Segment) -> tuple[Segment, Segment, float]:
    """Layers under FSDP, whose parameters are gathered one layer ahead; and what of it nothing hides."""
    n = layer_params(w, expert=False).shared / w.tp
    near = in_node(w, w.dp, w.tp)
    gather = prices.moving_s("all_gather", 2 * n, w.dp, near)
    reduce = prices.moving_s("reduce_scatter", REDUCED * n, w.dp, near)
    ends = embedding_params(w) * (1 if w.tied else 2) / w.tp
    first = prices.moving_s("all_gather", 2 * ends, w.dp, near)
    last = prices.moving_s("reduce_scatter", REDUCED * ends, w.dp, near)
    loss = prices.chip.overlap_loss
    f = Segment(max(forward.device + loss * min(gather, forward.device), gather), forward.host)
    both = gather + reduce
    b = Segment(max(backward.device + loss * min(both, backward.device), both), backward.host)
    return f, b, first + last + max(0.0, first - backward.device)


def _stage(
    prices: Prices,
    layers: int,
    stage: int,
    w: Workload,
    forward: Segment,
    backward: Segment,
    ends: list[list[Kernel]],
    messages_s: tuple[float, float],
) -> tuple[list[Segment], list[Segment]]:
    """Forward and backward of a stage."""
    f, b = [forward] * layers, [backward] * layers
    first, last = (
        [_segment(prices, [k for k in end if k.phase == phase]) for phase in (FORWARD, BACKWARD)] for end in ends
    )
    if stage == 0:
        f, b = [_longer(first[0], messages_s[0]), *f], [*b, first[1]]
    if stage == w.pp - 1:
        f, b = [*f, _longer(last[0], messages_s[1])], [last[1], *b]
    return f, b


def _held(w: Workload, layers: tuple[int, ...]) -> int:
    """Parameters on a rank of the fullest stage."""
    one = layer_params(w, expert=False).shared / w.tp
    ends = embedding_params(w) / w.tp * (2 if w.pp == 1 and not w.tied else 1) + w.seq * w.hidden
    return int(max(layers) * one + ends)


def _optimizer(w: Workload, prices: Prices, layers: tuple[int, ...]) -> Segment:
    """Gradients to float32 and divided, AdamW, and weights back to bfloat16; buckets to float32 and back before."""
    n = _held(w, layers)
    shards = w.dp if w.zero >= 1 or w.gathered else 1
    written = 18 if w.zero >= 1 or w.gathered else 16 * max(layers) + 3  # one tensor or bucket after the other
    bytes_ = (6 + 8 + 28 + 6) * n / shards + 6 * n + (6 * n / shards)
    kernels = SMALL + 4 * max(1, round(2 * n / BUCKET_BYTES)) + written
    return Segment(prices.exact_s(bytes_, kernels), kernels * prices.cluster.host.launch_s)


def _reduced_s(w: Workload, prices: Prices, layers: tuple[int, ...], backward: Segment) -> float:
    """What gradients' reduction adds: what backward does not hide, the last bucket, and what it slows."""
    if w.dp == 1 or w.gathered:
        return 0.0
    n, near = _held(w, layers), in_node(w, w.dp, w.tp)
    kind = "reduce_scatter" if w.zero >= 1 else "all_reduce"
    buckets = max(1, round(2 * n / BUCKET_BYTES))
    one = prices.moving_s(kind, REDUCED * n / buckets, w.dp, near)
    beside = (buckets - 1) * one
    # A pipeline's gradients are reduced after its last backward.
    hidden = max(layers) * max(backward.device, backward.host) if w.pp == 1 else 0.0
    gathered = prices.moving_s("all_gather", 2 * n / buckets, w.dp, near) * buckets if w.zero >= 1 else 0.0
    slowed = prices.chip.overlap_loss * min(beside, hidden)
    return max(0.0, beside - hidden) + one + slowed + gathered
