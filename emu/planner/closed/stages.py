"""How layers are dealt out to pipeline stages, and what each stage takes for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from .timing import LayerTime


class StageTime(NamedTuple):
    """Seconds of one stage, all its chunks together, for one micro-batch; `weight` is part of backward."""

    forward: float
    backward: float
    weight: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward


def layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage.

    Where they do not divide evenly, embedding and head are counted as a layer each if that helps, as Megatron and
    DeepSpeed do (Llama 3 405B has 126 layers for that reason, https://arxiv.org/abs/2407.21783, section 3.3.2); else the
    first stages have one more.
    """
    each, rest = divmod(layers, stages)
    if rest and not (layers + 2) % stages and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return tuple(each + (stage < rest) for stage in range(stages))


def stage_times(
    layers: tuple[int, ...], layer: LayerTime, first: tuple[float, float], last: tuple[float, float]
) -> tuple[StageTime, ...]:
    """Each stage's time from its layers; `first` and `last`: what embedding and head add, forward and backward.

    A third of the head's backward counts as its weight's gradient: half of two equal products, and cross entropy.
    """
    stages = [StageTime(n * layer.forward, n * layer.backward, n * layer.weight) for n in layers]
    stages[0] = _more(stages[0], *first, 0.0)
    stages[-1] = _more(stages[-1], *last, last[1] / 2)
    return tuple(stages)


def _more(stage: StageTime, forward: float, backward: float, weight: float) -> StageTime:
    return StageTime(stage.forward + forward, stage.backward + backward, stage.weight + weight)
