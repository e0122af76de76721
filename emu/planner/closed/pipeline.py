"""How long a pipeline takes for all micro-batches: its slowest stage, and the bubble before and after it.

The closed forms are those of https://arxiv.org/abs/2104.04473 (GPipe, 1F1B, interleaved) and
https://arxiv.org/abs/2401.10241 (zero bubble), for stages that differ. Schedules that have none are walked for a few
micro-batches; each further one takes as long as the last ones walked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emu.parallel.pipeline import Times, timed

from .stages import WALKED, StageTime, in_order, laid, rows
from .workload import Workload

# Sends cost each micro-batch, both ways, a part of what they last: of 1F1B nearly all, for as many micro-batches are in
# flight as there are stages, and each passes all hops twice before the next can follow. Interleaved, others are in flight
# meanwhile; what is left was seen in published runs, and is assumed.
EXPOSED, HIDDEN_INTERLEAVED = 1.0, 0.15


def makespan_s(w: Workload, stages: Sequence[StageTime], microbatches: int, waits: bool = False) -> float:
    """Seconds from the first forward to the last backward, if messages between stages took no time.

    Args:
        stages: of the model; one a device, all its chunks together, where these lie in order (stages.in_order).
        waits: whether who sends waits until it is received, and so cannot run ahead of slower stages (1F1B without
            overlapped sends).
    """
    if not in_order(w):
        return _walked_s(w, stages, microbatches)
    slowest = max(stage.whole for stage in stages)
    if len(stages) == 1:
        return microbatches * slowest
    if waits and w.schedule == "1f1b" and w.vp == 1:
        return sum(stage.whole for stage in stages) + (microbatches - 1) * slowest
    if w.schedule == "1f1b" and w.vp > 1:
        return _interleaved_s(w, stages, microbatches)
    return FORMS[w.schedule](w, stages, microbatches)


def hops_s(w: Workload, stages: Sequence[StageTime], hop_s: float, microbatches: int, overlapped: bool) -> float:
    """What messages between stages add: once down the pipeline and back, and a share of each micro-batch's.

    Schedules without a closed form are walked with messages and without.
    """
    if w.pp == 1:
        return 0.0
    if not in_order(w):
        return _walked_s(w, stages, microbatches, hop_s) - _walked_s(w, stages, microbatches)
    once = 2 * (w.pp - 1) * hop_s
    if w.schedule in ("1f1b", "interleaved") and w.vp > 1:
        share = HIDDEN_INTERLEAVED if overlapped else EXPOSED
        return once + 2 * microbatches * w.vp * share * hop_s
    if w.schedule == "1f1b":
        share = (w.pp - 1) / w.pp if overlapped else EXPOSED
        return once + 2 * (microbatches - 1) * share * hop_s
    return once


def _gpipe_s(w: Workload, stages: Sequence[StageTime], microbatches: int) -> float:
    forward, backward = [s.forward for s in stages], [s.backward for s in stages]
    return sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))


def _one_f_one_b_s(w: Workload, stages: Sequence[StageTime], microbatches: int) -> float:
    """The longest that a stage is at work or waits, over stages.

    It waits for the stages before it, as they fill and as they empty. Before its first backward it waits for all stages
    behind it, less what its forwards in flight take; after its last forward likewise, less its backwards in flight. With
    so few micro-batches that all are in flight, backwards then come as the slowest stage behind it sends them.
    """
    longest, before, behind = 0.0, 0.0, sum(stage.whole for stage in stages)
    for i, stage in enumerate(stages):
        behind -= stage.whole
        meanwhile = min(microbatches, len(stages) - i) - 1
        filling = max(0.0, behind - meanwhile * stage.forward)
        emptying = max(0.0, behind - meanwhile * stage.backward)
        if microbatches <= len(stages) - i:
            slowest = max((other.whole for other in stages[i + 1 :]), default=0.0)
            emptying = meanwhile * max(0.0, slowest - stage.backward)
        longest = max(longest, before + microbatches * stage.whole + filling + emptying)
        before += stage.whole
    return longest


def _interleaved_s(w: Workload, stages: Sequence[StageTime], microbatches: int) -> float:
    """As 1F1B, but what the slowest stage waits for is one chunk of each other stage."""
    slowest = max(s.whole for s in stages)
    return microbatches * slowest + (sum(s.whole for s in stages) - slowest) / w.vp


def _zero_bubble_s(weights: int) -> Callable[[Workload, Sequence[StageTime], int], float]:
    """Bubbles filled by `weights` backward passes for weights a stage: 1 in ZB-H1, 2 in ZB-H2.

    Too few micro-batches have no such passes left when the bubble comes: these are walked.
    """

    def seconds(w: Workload, stages: Sequence[StageTime], microbatches: int) -> float:
        if microbatches < weights * len(stages):
            walked = timed(rows(w, microbatches), _times(stages))
            return walked.makespan if w.optimizer_sync else walked.cost
        slowest = max(stages, key=lambda s: s.whole)
        n = len(stages)
        mean = StageTime(*(sum(part) / n for part in zip(*stages)))
        bubble = max(0.0, (n - 1) * (mean.whole - (weights + 1) * mean.weight))
        spread = (n - 1) * mean.forward / 2 if w.optimizer_sync else 0.0
        return microbatches * slowest.whole + bubble + spread

    return seconds


FORMS: dict[str, Callable[[Workload, Sequence[StageTime], int], float]] = {
    "gpipe": _gpipe_s,
    "1f1b": _one_f_one_b_s,
    "interleaved": _interleaved_s,
    "zb-h1": _zero_bubble_s(1),
    "zb-h2": _zero_bubble_s(2),
}


def _walked_s(w: Workload, stages: Sequence[StageTime], microbatches: int, hop_s: float = 0.0) -> float:
    """A schedule without a closed form, walked by emu.parallel.pipeline for its first micro-batches.

    What further ones take is seen in the second half of these: in some schedules even the slowest device idles between.
    """
    times = _times(stages, hop_s)

    def walk(n: int) -> float:
        return timed(rows(w, n), times).makespan

    most = WALKED * w.pp + microbatches % 2  # of DualPipe's two directions, one has a micro-batch more if they are odd
    if microbatches <= most:
        return walk(microbatches)
    whole, half = walk(most), most - 2 * w.pp
    busiest = max(device.whole for device in laid(w).per_device(stages))
    return whole + (microbatches - most) * max(busiest, (whole - walk(half)) / (most - half))


def _times(stages: Sequence[StageTime], hop_s: float = 0.0) -> Times:
    inputs = [stage.backward - stage.weight for stage in stages]
    return Times([stage.forward for stage in stages], inputs, [stage.weight for stage in stages], hop_s)
