"""How long a training step takes: layers, ends, pipeline, data parallelism and optimizer put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .communication import hop_s
from .ends import Ends, end_work
from .flops import step_flops
from .layer import layer_work
from .memory import needed_bytes, peak_bytes
from .own_step import own_parts
from .pipeline import hops_s, makespan_s
from .prices import Prices
from .sharding import beside_s, ends_on_rank, fsdp_layer, mirrored_s, optimizer_s, params_on_rank, reduction_s, tied_s
from .stacks import stack
from .stages import Laid, StageTime, laid, stage_times
from .timing import LayerTime, layer_time, mixed
from .work import Work
from .workload import Prediction, Workload

TUNED = (1, 2, 4, 8)  # micro-batches tried where a source states none; chosen
# Of what passes over the whole vocabulary each micro-batch: the embedding's; the rest is the head's. Assumed.
FIRST_SHARE = 0.45


class Prepared(NamedTuple):
    """A workload as kernels, which no constant changes: what a fit builds once and prices often.

    dense, expert: a layer of each kind, () where there is none.
    """

    workload: Workload
    micro_batch: int
    dense: tuple[Work, ...]
    expert: tuple[Work, ...]
    ends: Ends


def predict(workload: Workload, constants: Mapping[str, float] | None = None) -> Prediction:
    """How long a step takes and what it holds.

    Args:
        workload: what runs; see Workload.
        constants: other values for some of emu.hardware.fitted(), by name.

    Raises:
        WorkloadError: its software is not known. HardwareError: the chip cannot compute in its precision, or no such
        constant.
    """
    return fastest([priced(prepared, constants) for prepared in prepare(workload)])


def prepare(w: Workload) -> list[Prepared]:
    """The workload with its micro-batch; where that is not stated, with each that those who tuned it may have chosen."""
    sizes = [w.micro_batch] if w.micro_batch else [n for n in TUNED if not w.global_batch % (n * w.dp)] or [1]
    return [_prepared(w, size) for size in sizes]


def fastest(predictions: list[Prediction]) -> Prediction:
    """The fastest of those that fit; where none does, the one that lacks least."""
    fitting = [prediction for prediction in predictions if prediction.fits]
    if fitting:
        return min(fitting, key=lambda prediction: prediction.step_s)
    return min(predictions, key=lambda prediction: max(prediction.peak_bytes))


def _prepared(w: Workload, micro_batch: int) -> Prepared:
    software = stack(w.stack)
    dense = layer_work(w, software, micro_batch) if w.dense_layers else ()
    expert = layer_work(w, software, micro_batch, expert=True) if w.dense_layers < w.layers else ()
    return Prepared(w, micro_batch, dense, expert, end_work(w, software, micro_batch))


def priced(
    prepared: Prepared, constants: Mapping[str, float] | None = None, prices: Prices | None = None
) -> Prediction:
    """The prediction for a prepared workload; `prices` saves building them again."""
    w, micro_batch = prepared.workload, prepared.micro_batch
    prices = prices or Prices(w.cluster, stack(w.stack), constants, w.power_w)
    lies = laid(w)
    parts, detail = (own_parts(w, prices, micro_batch), {}) if prices.stack.recorded else _parts(prepared, prices, lies)
    return Prediction(
        step_s=sum(parts.values()),
        parts=parts,
        peak_bytes=peak_bytes(w, prices.stack, micro_batch, lies),
        params_per_rank=sum(params_on_rank(w)) + ends_on_rank(w),
        flops=step_flops(w),
        micro_batch=micro_batch,
        detail=detail,
        fits=max(needed_bytes(w, prices.stack, micro_batch, lies)) <= w.cluster.chip.hbm_bytes,
    )


def _parts(prepared: Prepared, prices: Prices, lies: Laid) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step by what they go to, which add up to it; and figures of one layer."""
    w, micro_batch = prepared.workload, prepared.micro_batch
    steps = w.microbatches(micro_batch)
    layer = _layer(prepared, prices)
    gathered = 0.0
    beside = layer
    if w.gathered and w.dp * w.cp > 1:
        sharded = fsdp_layer(w, prices, steps)
        loss = prices.chip.overlap_loss
        forward = beside_s(layer.forward, sharded.gather, loss)
        beside = layer._replace(forward=forward, backward=beside_s(layer.backward, sharded.backward, loss))
        gathered = sharded.gather + sharded.reduce  # before the first layer, and after the last
    first, last = _ends_s(prepared, prices)
    stages = stage_times(lies.layers, beside, first, last)
    devices = lies.per_device(stages)
    slowest = max(range(w.pp), key=lambda i: devices[i].whole)
    overlapped = "pipeline" in prices.stack.overlaps
    pipeline = makespan_s(w, stages, steps, waits=not overlapped)
    hop = hop_s(w, prices, micro_batch)
    each = w.layers / w.pp
    mean = StageTime(each * beside.forward, each * beside.backward, each * beside.weights)
    n, repeated = lies.worked(slowest), steps
    ends = devices[slowest].whole - n * (beside.forward + beside.backward)
    parts = {
        "kernels": repeated * n * (layer.kernels_forward + layer.input + layer.weight),
        "recompute": repeated * n * layer.again,
        "tensor": repeated * n * layer.tensor,
        "context": repeated * n * layer.context,
        "experts": repeated * n * layer.experts,
        "host": repeated * n * layer.host,
        "fsdp": repeated * n * (beside.forward + beside.backward - layer.forward - layer.backward) + gathered,
        "ends": repeated * ends,
        "bubble": pipeline - repeated * devices[slowest].whole,
        "sends": hops_s(w, stages, hop, steps, overlapped),
        "data": reduction_s(w, prices, mean) + tied_s(w, prices) + mirrored_s(w, prices),
        "optimizer": optimizer_s(w, prices),
        "step": prices.software["software.step_s"],
    }
    return parts, {**layer._asdict(), "hop": hop, "first": sum(first), "last": sum(last)}


def _layer(prepared: Prepared, prices: Prices) -> LayerTime:
    w, size = prepared.workload, prepared.micro_batch
    dense = layer_time(w, prices, prepared.dense, size, False) if prepared.dense else None
    expert = layer_time(w, prices, prepared.expert, size, True) if prepared.expert else None
    return mixed(w, dense, expert)


def _ends_s(prepared: Prepared, prices: Prices) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of the first and the last stage's extra work, each as (forward, backward)."""
    ends, software = prepared.ends, prices.software
    logit = prices.stack.moved_logit_bytes or software["software.cross_entropy_bytes"]
    entropy = prices.exact_s(ends.logits * logit, 6) / 2
    vocabulary = prices.exact_s(ends.vocabulary * software["software.embedding_gradient_bytes"])
    message = prices.message_s(ends.message)
    embedding = [prices.work_s(work) for work in ends.first]
    head = [prices.work_s(work) for work in ends.last]
    return (
        (embedding[0], embedding[1] + FIRST_SHARE * vocabulary),
        (head[0] + entropy + message, sum(head[1:]) + entropy + message + (1 - FIRST_SHARE) * vocabulary),
    )
