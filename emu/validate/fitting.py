"""What a run did that a row leaves out, where its usual value does not fit the device: a run that was timed did fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from emu.planner.closed import Workload, predict
from emu.planner.closed.workload import Recompute

from .goals import MEMORY_ERROR

# What costs no time first, and then recomputation by how much it repeats.
ZERO = (0, 1, 2)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "per-op", "every-other-layer", "full")
assert set(RECOMPUTE) == set(get_args(Recompute))


def fitting(workload: Workload, zero: bool, recompute: bool) -> tuple[Workload, str]:
    """The workload with the cheapest of what is not stated that fits.

    Args:
        workload: with the usual values.
        zero, recompute: whether its stage of ZeRO, its recomputation are open.

    Returns:
        It as it was, and "", where it fits or nothing that is open makes it fit; else another, and what was taken.
    """
    if not (zero or recompute) or predict(_roomy(workload)).fits:
        return workload, ""
    for other in _others(workload, zero, recompute):
        if predict(_roomy(other)).fits:
            taken = [
                f"{name}={getattr(other, name)}"
                for name in ("zero", "recompute")
                if getattr(other, name) != getattr(workload, name)
            ]
            return other, f"{', '.join(taken)}: it ran, and with less it would not fit"
    return workload, ""


def _roomy(w: Workload) -> Workload:
    """On devices that hold as much more as predictions of memory may be off: what they lack within that proves nothing."""
    chip = replace(w.cluster.chip, hbm_bytes=int(w.cluster.chip.hbm_bytes * (1 + MEMORY_ERROR)))
    return replace(w, cluster=replace(w.cluster, chip=chip))


def _others(w: Workload, zero: bool, recompute: bool) -> Iterator[Workload]:
    for kind in RECOMPUTE[RECOMPUTE.index(w.recompute) :] if recompute else (w.recompute,):
        for stage in ZERO[w.zero :] if zero and not w.fsdp else (w.zero,):
            yield replace(w, zero=stage, recompute=kind)
