"""What a step costs in electrical energy: of the devices alone, from how long they are busy.

A rough model with two constants: a device draws one share of its rated power while a kernel runs on it, and another while
none does, or while only communication does. Hosts, fans and switches draw more besides: `cluster.summary().power_w` has
them. What a kernel does is not looked at.
"""

from __future__ import annotations

from emu.hardware import Chip

# The most that eight H100s with their host drew in training, near full utilization: 8.4 of 10.2 kW (arXiv 2412.08602).
# That devices draw the same share of theirs is an assumption.
BUSY_SHARE = 0.82
# Unverified: an H100 of 700 W that waits is said to draw about 70 W.
IDLE_SHARE = 0.1


def energy_j(chip: Chip, devices: int, step_s: float, busy_fraction: float) -> float | None:
    """Joules that the devices take for a step; None where the chip's power is not known.

    Args:
        devices: how many take part.
        busy_fraction: the share of the step in which a kernel runs, mean over devices.
    """
    if chip.tdp_w is None:
        return None
    share = BUSY_SHARE * busy_fraction + IDLE_SHARE * (1 - busy_fraction)
    return chip.tdp_w * share * devices * step_s
