"""Each rank's virtual time while the program runs, for order="time": provisional, without contention or overlap.

Kernels advance the rank that launches them; a communication ends, for all who took part, its duration after the last
of them came. The timeline proper comes from pricing the whole trace afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emu.trace.events import Collective, Kernel, Transfer

if TYPE_CHECKING:
    from emu.virtual.scheduler import Scheduler


class Clock:
    """One rank's clock.

    Args:
        scheduler: which reads the clocks.
        rank: whose clock it is.
        seconds: what a kernel, collective or transfer lasts.
    """

    def __init__(
        self, scheduler: Scheduler, rank: int, seconds: Callable[[Kernel | Collective | Transfer], float]
    ) -> None:
        self._thread = scheduler.threads[rank]
        self._seconds = seconds

    def kernel(self, event: Kernel) -> None:
        self._thread.clock_s += self._seconds(event)

    def waited(self, item: Any, event: Collective | Transfer) -> None:
        """This rank has waited for a communication that everybody joined."""
        self._thread.clock_s = max(self._thread.clock_s, item.start_s + self._seconds(event))
