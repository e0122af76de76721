"""How long a layer takes in each direction: its kernels, its messages, its host, and what is computed again."""

from __future__ import annotations

from typing import NamedTuple

from .communication import layer_messages
from .host import AGAIN, WEIGHTS, host_s, joined_s, launch_s
from .prices import Prices
from .work import Attention, Work
from .workload import Workload

WHOLE = frozenset(("gpipe", "1f1b", "interleaved"))  # schedules whose backward is one part; others launch it in two
PER_OP_AGAIN = 0.45  # of a layer's forward, where every second matrix product is kept; assumed


class LayerTime(NamedTuple):
    """Seconds of one layer and one micro-batch.

    forward, backward: all there is, recomputation included; weights: of backward, what gradients of weights take;
    kernels_forward, input, weight: its kernels alone; tensor, context, experts: exposed messages of both directions;
    again: recomputation on the device; host: what host-bound layers add to the device's time.
    """

    forward: float
    backward: float
    weights: float
    kernels_forward: float
    input: float
    weight: float
    tensor: float
    context: float
    experts: float
    again: float
    host: float


def layer_time(w: Workload, prices: Prices, work: tuple[Work, ...], micro_batch: int, expert: bool) -> LayerTime:
    """A layer's time from its kernels."""
    forward, into, weight = (prices.all_s(work, phase) for phase in ("forward", "input", "weight"))
    attention = _attention_s(prices, work)
    messages = layer_messages(w, prices, micro_batch, attention, weight, expert)
    device_f = forward + messages.tensor_forward + messages.context_forward + messages.experts
    device_b = into + weight + messages.tensor_backward + messages.context_backward + messages.experts
    again = {
        "none": 0.0,
        "full": device_f,
        "every-other-layer": device_f / 2,
        "selective": attention[0],
        "per-op": PER_OP_AGAIN * forward,
    }[w.recompute]
    host_f, host_b = host_s(w, prices, expert)
    power = prices.software["software.host_overlap"]
    # Dropless experts: how many tokens each gets goes to the host, which therefore cannot run ahead.
    counted = 0.0
    if expert and w.moe is not None and w.moe.dropless:
        counted = prices.software["software.expert_launches"] * launch_s(w, prices)
    total_f = joined_s(device_f + counted, host_f, power)
    of_weights, host_b = WEIGHTS * host_b, host_b + AGAIN[w.recompute] * host_f
    weights = joined_s(weight, of_weights, power)
    if w.pp > 1 and w.schedule not in WHOLE:
        total_b = joined_s(device_b - weight + again, host_b - of_weights, power) + weights
    else:
        total_b = joined_s(device_b + again, host_b, power)
    return LayerTime(
        total_f,
        total_b,
        weights,
        forward,
        into,
        weight,
        messages.tensor_forward + messages.tensor_backward,
        messages.context_forward + messages.context_backward,
        2 * messages.experts,
        again,
        total_f + total_b - device_f - device_b - again,
    )


def mixed(w: Workload, dense: LayerTime | None, expert: LayerTime | None) -> LayerTime:
    """The mean layer of a model some of whose layers have experts."""
    if expert is None or dense is None:
        one = expert or dense
        assert one is not None
        return one
    share = w.dense_layers / w.layers
    return LayerTime(*(share * d + (1 - share) * e for d, e in zip(dense, expert)))


def _attention_s(prices: Prices, work: tuple[Work, ...]) -> tuple[float, float]:
    """Attention's core: what selective recomputation repeats, and what rings hide behind."""
    core = [one for one in work if isinstance(one, Attention) or one.name in CORE]
    forward = prices.all_s(core, "forward")
    return forward, prices.all_s(core, "input")


CORE = frozenset(("attention.scores", "attention.softmax", "attention.values"))
