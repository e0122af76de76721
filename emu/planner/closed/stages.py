"""How layers are dealt out to pipeline stages, and what each stage takes for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from emu.parallel.pipeline import Schedule, make

from .timing import LayerTime
from .workload import Workload

IN_ORDER = frozenset(("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"))  # see in_order
WALKED = 4  # micro-batches for each device that other schedules are looked at for: after that they repeat; chosen


class StageTime(NamedTuple):
    """Seconds of one stage, all its chunks together, for one micro-batch; `weight` is part of backward."""

    forward: float
    backward: float
    weight: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward


class Laid(NamedTuple):
    """Where stages of the model lie.

    layers: of each stage, first stage first; devices: the stages of each device of the pipeline.
    """

    layers: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> float:
        """On how many devices each stage lies: two of DualPipe, which share its micro-batches out, else one."""
        return sum(map(len, self.devices)) / len(self.layers)

    def per_device(self, stages: Sequence[StageTime]) -> tuple[StageTime, ...]:
        """What each device takes for a micro-batch, on average, from what each stage takes."""
        return tuple(
            StageTime(*(sum(stages[stage][part] for stage in held) / self.copies for part in range(3)))
            for held in self.devices
        )

    def worked(self, device: int) -> float:
        """Layers that a device works on for a micro-batch, on average."""
        return sum(self.layers[stage] for stage in self.devices[device]) / self.copies

    def ends(self, device: int) -> tuple[bool, bool]:
        """Whether a device has the first stage, and whether the last."""
        return 0 in self.devices[device], len(self.layers) - 1 in self.devices[device]

    @property
    def joined(self) -> bool:
        """Whether a device has both the first stage and the last."""
        return any(all(self.ends(device)) for device in range(len(self.devices)))


def in_order(w: Workload) -> bool:
    """Whether device i has stage i, with all its chunks taken as one, as closed forms of schedules take them."""
    return w.pp == 1 or (w.schedule in IN_ORDER and (w.vp == 1 or w.schedule in ("1f1b", "interleaved")))


def laid(w: Workload) -> Laid:
    """Where the workload's schedule has its stages.

    Raises:
        PlanError: a schedule that this many devices cannot do.
    """
    if in_order(w):
        return _in_order(w.layers, w.pp)
    schedule = rows(w, WALKED * w.pp)
    return Laid(layers_of_stages(w.layers, schedule.stages), schedule.stages_of)


@cache
def _in_order(layers: int, devices: int) -> Laid:
    return Laid(layers_of_stages(layers, devices), tuple((device,) for device in range(devices)))


def rows(w: Workload, microbatches: int) -> Schedule:
    """The workload's schedule, action by action, of so many micro-batches."""
    return make(w.schedule, w.pp, microbatches, *((w.vp,) if w.vp > 1 else ()))


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

    Half of the head's backward counts as its weight's gradient: one of two equal products; cross entropy is small beside.
    """
    stages = [StageTime(n * layer.forward, n * layer.backward, n * layer.weights) for n in layers]
    stages[0] = _more(stages[0], *first, 0.0)
    stages[-1] = _more(stages[-1], *last, last[1] / 2)
    return tuple(stages)


def _more(stage: StageTime, forward: float, backward: float, weight: float) -> StageTime:
    return StageTime(stage.forward + forward, stage.backward + backward, stage.weight + weight)
