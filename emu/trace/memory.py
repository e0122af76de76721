"""Memory over time, read off a trace: how much of each category lives after every event of a rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from emu.trace.events import CATEGORIES, Alloc, Free, HostCopy, HostFree, Mark, Recategorise
from emu.trace.trace import Trace
from emu.trace.units import bytes_text


class Memory:
    """Device memory by category, in requested bytes; and apart from it, what its tensors occupy in the host's memory.

    Args:
        trace: the record whose allocations count.
        capacity_bytes: what a device has; None if it never fills.
        held: rank -> category -> bytes that live when the record begins.
        held_by_host: rank -> bytes that live in the host's memory then.
    """

    def __init__(
        self,
        trace: Trace,
        capacity_bytes: int | None = None,
        held: Mapping[int, Mapping[str, int]] | None = None,
        held_by_host: Mapping[int, int] | None = None,
    ) -> None:
        self.trace = trace
        self.capacity_bytes = capacity_bytes
        self.held = held or {}
        self.held_by_host = held_by_host or {}
        self._series: dict[int, tuple[list[int], dict[str, list[int]]]] = {}

    def series(self, rank: int) -> tuple[list[int], dict[str, list[int]]]:
        """(indices into the rank's events at which memory changed, category -> bytes alive after each of them).

        Raises:
            UnknownRank: a rank that was not recorded; names those that were.
        """
        if rank not in self._series:
            now = {**dict.fromkeys(CATEGORIES, 0), **self.held.get(rank, {})}
            indices: list[int] = [0] if any(now.values()) else []
            lines: dict[str, list[int]] = {category: [n] * len(indices) for category, n in now.items()}
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
        """Bytes alive after each change of a rank's memory."""
        return [sum(column) for column in zip(*self.series(rank)[1].values())]

    @property
    def fullest_rank(self) -> int:
        """The rank with the highest peak (the first, if several have it)."""
        if not self.trace.ranks:
            raise ValueError("no rank was recorded, so none has memory")
        return max(self.trace.ranks, key=lambda rank: (self.peak_bytes(rank), -rank))

    def peak_bytes(self, rank: int | None = None) -> int:
        """The most that a rank holds at once; None means the fullest rank."""
        return max(self.totals(self.fullest_rank if rank is None else rank), default=0)

    def at_peak(self, rank: int | None = None) -> dict[str, int]:
        """Category -> bytes at the moment of the peak (the first, if it is reached more than once).

        Args:
            rank: None means the fullest rank.

        Raises:
            UnknownRank: a rank that was not recorded; names those that were.
        """
        rank = self.fullest_rank if rank is None else rank
        totals = self.totals(rank)
        if not totals:
            return dict.fromkeys(CATEGORIES, 0)
        i = totals.index(max(totals))
        return {category: line[i] for category, line in self.series(rank)[1].items()}

    def host_series(self, rank: int) -> tuple[list[int], list[int]]:
        """(indices into the rank's events at which its host memory changed, bytes that live there after each of them).

        Raises:
            UnknownRank: a rank that was not recorded; names those that were.
        """
        now = self.held_by_host.get(rank, 0)
        indices, line = ([0], [now]) if now else ([], [])
        for i, event in enumerate(self.trace[rank]):
            if type(event) is HostCopy and event.kind == "to_host":
                now += event.bytes
            elif type(event) is HostFree:
                now -= event.bytes
            else:
                continue
            indices.append(i)
            line.append(now)
        return indices, line

    def peak_host_bytes(self, rank: int | None = None) -> int:
        """The most that a rank holds in host memory at once; None means the rank that holds most there."""
        ranks = self.trace.ranks if rank is None else [rank]
        return max((max(self.host_series(r)[1], default=0) for r in ranks), default=0)

    def window(self, start: str, end: str | None = None) -> Memory:
        """From one mark to another: what lived at the first, and all that changed until the second.

        Raises:
            ValueError: a rank did not make these marks in this order.
        """
        part = self.trace.window(start, end)
        held: dict[int, dict[str, int]] = {}
        held_by_host: dict[int, int] = {}
        for rank in part.ranks:
            first = max(i for i, e in enumerate(self.trace[rank]) if type(e) is Mark and e.name == start)
            indices, lines = self.series(rank)
            before = bisect_left(indices, first) - 1
            held[rank] = {category: line[before] if before >= 0 else 0 for category, line in lines.items()}
            indices, line = self.host_series(rank)
            before = bisect_left(indices, first) - 1
            held_by_host[rank] = line[before] if before >= 0 else 0
        return Memory(part, self.capacity_bytes, held, held_by_host)

    def __repr__(self) -> str:
        if not self.trace.ranks:
            return "Memory(of no rank)"
        rank, full = self.fullest_rank, self.capacity_bytes
        held = sorted(((n, category) for category, n in self.at_peak(rank).items() if n), reverse=True)
        of = f" of {bytes_text(full)}" if full else ""
        where = f"rank {rank}, the fullest of {len(self.trace.ranks)}" if len(self.trace.ranks) > 1 else f"rank {rank}"
        parts = ", ".join(f"{category} {bytes_text(n)}" for n, category in held) or "nothing was allocated"
        host = self.peak_host_bytes()
        host = f"; up to {bytes_text(host)} in host memory" if host else ""
        return f"Memory(peak {bytes_text(self.peak_bytes(rank))}{of} on {where}: {parts}{host})"
