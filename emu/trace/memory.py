"""Memory over time, read off a trace: how much of each category lives after every event of a rank."""

from __future__ import annotations

from emu.trace.events import CATEGORIES, Alloc, Free, Recategorise
from emu.trace.trace import Trace


class Memory:
    """Device memory by category, in requested bytes.

    Args:
        trace: the record whose allocations count.
        capacity_bytes: what a device has; None if it never fills.
    """

    def __init__(self, trace: Trace, capacity_bytes: int | None = None) -> None:
        self.trace = trace
        self.capacity_bytes = capacity_bytes
        self._series: dict[int, tuple[list[int], dict[str, list[int]]]] = {}

    def series(self, rank: int) -> tuple[list[int], dict[str, list[int]]]:
        """(indices into the rank's events at which memory changed, category -> bytes alive after each of them)."""
        if rank not in self._series:
            now = dict.fromkeys(CATEGORIES, 0)
            indices: list[int] = []
            lines: dict[str, list[int]] = {category: [] for category in CATEGORIES}
            for i, event in enumerate(self.trace[rank]):
                if type(event) is Alloc:
                    now[event.category] += event.bytes
                elif type(event) is Free:
                    now[event.category] -= event.bytes
                elif type(event) is Recategorise:
                    now[event.old] -= event.bytes
                    now[event.new] += event.bytes
                else:
                    continue
                indices.append(i)
                for category, line in lines.items():
                    line.append(now[category])
            self._series[rank] = (indices, lines)
        return self._series[rank]

    def totals(self, rank: int) -> list[int]:
        """Bytes alive after each change."""
        return [sum(column) for column in zip(*self.series(rank)[1].values())]

    def peak_bytes(self, rank: int) -> int:
        return max(self.totals(rank), default=0)

    def at_peak(self, rank: int) -> dict[str, int]:
        """Category -> bytes at the moment of the peak (the first, if it is reached more than once)."""
        totals = self.totals(rank)
        if not totals:
            return dict.fromkeys(CATEGORIES, 0)
        i = totals.index(max(totals))
        return {category: line[i] for category, line in self.series(rank)[1].items()}
