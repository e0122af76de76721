"""The most memory that a device of each pipeline stage holds at once: states, activations in flight, and one layer's work.

Source: ZeRO's table 1 (https://arxiv.org/abs/1910.02054), activations in flight by https://arxiv.org/abs/2104.04473
(1F1B), https://arxiv.org/abs/2205.05198 (interleaved) and https://arxiv.org/abs/2401.10241 (zero bubble).
"""

from __future__ import annotations

from emu.parallel.pipeline import peak_activations

from .activations import layer_bytes, residual_split
from .params import embedding_params, layer_params, on_rank
from .placing import cut
from .stacks import Stack
from .stages import WALKED, Laid, in_order, rows
from .workload import Workload

# torch's allocator reserves more than is allocated, in blocks that do not fit what comes next: from memory of runs.
RESERVED = 1.08
# A process's CUDA context and kernels, and a communicator's buffers (1 to 2 GB in all, from memory).
CONTEXT_BYTES, GROUP_BYTES = 1.5e9, 0.5e9
BUCKET = 5e8  # elements, DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
GATHERED_LAYERS = 3  # FSDP: the layer at work, the one gathered ahead, and gradients not reduced yet; assumed
WEIGHT_BYTES = 32  # per element of the hidden state, what backward of weights alone needs (arXiv:2401.10241)


def state_bytes(params: float, zero: int, ranks: int, gradient: float = 2, optimizer: float = 12) -> float:
    """Model states of `params` parameters: 2 bytes each of weights and gradients, 12 of Adam's float32 states.

    Source: ZeRO's table 1: stage 1 cuts the optimizer's, 2 the gradients, too, 3 the parameters, too.
    """
    parts = (optimizer, gradient, 2)
    return params * sum(part / ranks if zero > cut else part for cut, part in enumerate(parts))


def peak_bytes(w: Workload, stack: Stack, micro_batch: int, lies: Laid) -> tuple[float, ...]:
    """Of each device of the pipeline, that of the first stage first, as the stack's published figures count it."""
    allocated = [_stage_bytes(w, stack, micro_batch, device, lies) for device in range(w.pp)]
    if stack.counted == "allocated":
        return tuple(allocated)
    beside = _beside_bytes(w) if stack.counted == "device" else 0.0
    return tuple(RESERVED * one + beside for one in allocated)


def needed_bytes(w: Workload, stack: Stack, micro_batch: int, lies: Laid) -> tuple[float, ...]:
    """What each device must have room for: what is allocated at once, and what lies outside torch's allocator.

    Blocks that the allocator holds and does not use are given back where memory is short (torch's notes on CUDA
    semantics, memory management), so RESERVED does not count. XLA plans all of it before, with no context beside.
    """
    beside = _beside_bytes(w) if stack.launch else 0.0
    return tuple(_stage_bytes(w, stack, micro_batch, device, lies) + beside for device in range(w.pp))


def _beside_bytes(w: Workload) -> float:
    """A process's context and the buffers of its communicators."""
    return CONTEXT_BYTES + GROUP_BYTES * sum(n > 1 for n in (w.tp, w.pp, w.dp, w.cp))


def _stage_bytes(w: Workload, stack: Stack, micro_batch: int, device: int, lies: Laid) -> float:
    first, last = lies.ends(device)
    tokens = w.seq * micro_batch / w.cp
    split = residual_split(w, stack)
    held = _in_flight(w, stack, micro_batch, device, sum(lies.layers[stage] for stage in lies.devices[device]))
    working = layer_bytes(w, stack, micro_batch, "none") if w.recompute != "none" else 0.0
    gradients = 2 * tokens * max((3 if w.gated else 2) * _widest(w) / w.tp, w.hidden)
    if stack.attention == "unfused":
        gradients += 4 * w.heads / w.tp * micro_batch * w.seq / w.cp * w.seq
    boundary = 2 * tokens * w.hidden / split
    ends = boundary if first else 0.0
    if stack.keeps_outputs and w.pp > 1:
        ends += boundary * min(w.microbatches(micro_batch), w.pp - device)
    logits = 0.0
    if last:
        logits = stack.logit_bytes * tokens * w.vocab / w.tp
        if w.schedule == "gpipe" and w.pp > 1:  # the last stage, too, has all forwards before it
            held += (w.microbatches(micro_batch) - 1) * stack.kept_logit_bytes * tokens * w.vocab / w.tp
    return _states(w, stack, device, lies) + _bucket_bytes(w, stack) + held + ends + max(working + gradients, logits)


def _states(w: Workload, stack: Stack, device: int, lies: Laid) -> float:
    """Weights, gradients and the optimizer's, of the device's layers and ends; and what is gathered of one layer."""
    total = largest = 0.0
    for expert, n in zip((False, True), _kinds(w, device, lies)):
        if n:
            shared, experts = on_rank(w, layer_params(w, expert))
            total += _state(w, stack, n * shared, cut(w).ranks) + _state(w, stack, n * experts, cut(w, True).ranks)
            largest = max(largest, shared + experts)
    vocabulary = embedding_params(w) / w.tp
    ends = sum(lies.ends(device))
    if ends == 2 and w.tied:
        ends = 1
    total += _state(w, stack, ends * vocabulary, cut(w).ranks)
    return total + (GATHERED_LAYERS * 2 * largest + 4 * vocabulary if w.gathered else 0.0)


def _kinds(w: Workload, device: int, lies: Laid) -> tuple[int, int]:
    """Layers of a device with an ordinary MLP, which are the model's lowest, and with experts."""
    dense = total = 0
    for stage in lies.devices[device]:
        below, here = sum(lies.layers[:stage]), lies.layers[stage]
        dense += max(0, min(here, w.dense_layers - below))
        total += here
    return dense, total - dense


def _state(w: Workload, stack: Stack, params: float, ranks: int) -> float:
    if w.adapters:
        return 2 * params
    if w.gathered:
        return 16 * params / ranks
    if stack.deepspeed:
        return params * _deepspeed_bytes(w, ranks)
    return state_bytes(params, w.zero, ranks, stack.accumulator_bytes)


def _deepspeed_bytes(w: Workload, ranks: int) -> float:
    """Bytes a parameter of DeepSpeed's optimizers for 16-bit training, beside ZeRO's stage 1 at most.

    bf16 (deepspeed/runtime/bf16_optimizer.py): weights and gradients, and float32 sums of gradients, which no rank's share
    cuts. fp16 (from memory): gradients become float32 at the step, once more than the optimizer keeps them where they are
    not cut: each tensor first, then all in one.
    """
    if w.precision == "bf16":
        return 2 + 2 + 4 + 12 / ranks
    return 2 + 2 + (16 / ranks if w.zero else 12 + 4 + 4)


def _bucket_bytes(w: Workload, stack: Stack) -> float:
    """The copy that DeepSpeed makes of a bucket of gradients to reduce them, larger than any block set free before.

    Source: allreduce_bucket and allreduce_no_retain of deepspeed/runtime/engine.py, float32 in bf16 training. In fp16 what
    the step makes float32 comes later, and takes more.
    """
    return 4.0 * BUCKET if stack.deepspeed and w.precision == "bf16" and w.dp > 1 else 0.0


def _widest(w: Workload) -> float:
    return w.ffn if w.moe is None else max(w.ffn, w.moe.topk * w.moe.ffn)


def _in_flight(w: Workload, stack: Stack, micro_batch: int, device: int, layers: int) -> float:
    """Activations that a device with so many layers holds at its fullest, all micro-batches together."""
    m, p = w.microbatches(micro_batch), w.pp
    one = layers * layer_bytes(w, stack, micro_batch)
    if p == 1:
        return one
    if w.schedule == "gpipe":
        return m * one
    weight = min(one, layers * WEIGHT_BYTES * w.seq * micro_batch / w.cp * w.hidden / w.tp)
    if not in_order(w):
        stages = rows(w, WALKED * p).stages_of[device]
        held = peak_activations(rows(w, min(m, WALKED * p)), weight / one if layers else 0.0)[device]
        return held * one / len(stages)
    if w.vp > 1:
        chunks = min(m * w.vp, w.vp * p + p - 1 - 2 * device)
        return one * max(1.0, chunks / w.vp)
    if w.schedule == "zb-h1":
        return min(m, p - device) * one + min(max(0, m - (p - device)), device) * weight
    if w.schedule == "zb-h2":
        return min(m, 2 * (p - device) - 1) * one + min(m, 2 * device) * weight
    return min(m, p - device) * one
