"""What one event lasts by itself, before a run is priced as a whole: for ranks that take turns by virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emu.cost.collectives import collective_s, transfer_s
from emu.cost.kernels import kernel_s
from emu.hardware import Cluster
from emu.trace.events import Collective, Kernel


def event_seconds(where: Cluster) -> Callable[[Any], float]:
    """Of a kernel, a collective or a transfer on a cluster."""

    def seconds(event: Any) -> float:
        if type(event) is Kernel:
            return max(kernel_s(event, where.chip), where.host.launch_s)
        if type(event) is Collective:
            return collective_s(event, where)
        return transfer_s(event, where)

    return seconds
