"""A trace: what every rank of one run did, as lists of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from emu.trace.events import Collective, Event, Kernel, Mark, Transfer


@dataclass(frozen=True)
class Trace:
    """The record of one run.

    Args:
        axes: mesh axes and their sizes, outermost first.
        events: for every rank that ran, its events in program order. Ranks of a symbolic group that did not run
            are absent; members of a collective may name them all the same.
    """

    axes: Mapping[str, int]
    events: Mapping[int, Sequence[Event]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return list(self.events)

    def __getitem__(self, rank: int) -> Sequence[Event]:
        return self.events[rank]

    def __len__(self) -> int:
        return sum(len(events) for events in self.events.values())

    def of(self, *types: type, rank: int | None = None) -> Iterator[tuple[int, Event]]:
        """Yields (rank, event) for the events of the given types, rank by rank in program order."""
        for r in self.events if rank is None else (rank,):
            for event in self.events[r]:
                if isinstance(event, types):
                    yield r, event

    def flops(self, rank: int, *phases: str) -> int:
        """Floating point operations that a rank executed, in the given phases (all of them by default)."""
        return sum(e.flops for _, e in self.of(Kernel, rank=rank) if not phases or e.phase in phases)  # type: ignore[union-attr]

    def counts(self, rank: int) -> Counter[str]:
        """How often each kernel name, collective kind and transfer kind occurs on a rank."""
        return Counter(
            e.name if isinstance(e, Kernel) else f"{e.group}.{e.kind}"  # type: ignore[union-attr]
            for _, e in self.of(Kernel, Collective, Transfer, rank=rank)
        )

    def marks(self) -> list[str]:
        """The names that the first rank marked, in order."""
        return [e.name for _, e in self.of(Mark, rank=self.ranks[0])] if self.events else []  # type: ignore[union-attr]

    def window(self, start: str, end: str | None = None) -> Trace:
        """What every rank did from one mark up to another, or to the end.

        Raises:
            ValueError: a rank did not mark them in that order; lists the marks there are.
        """
        cut: dict[int, Sequence[Event]] = {}
        for rank, events in self.events.items():
            at = {e.name: i for i, e in enumerate(events) if type(e) is Mark}
            last = len(events) if end is None else at.get(end, -1)
            if start not in at or last < at[start]:
                raise ValueError(
                    f"rank {rank} has no marks {start!r} to {end or 'the end'!r}; it marked {', '.join(at) or 'nothing'}: "
                    "call rank.mark(name) in the program"
                )
            cut[rank] = events[at[start] : last]
        return Trace(self.axes, cut)

    def without(self, pattern: str) -> Trace:
        """The same trace with the matching collectives and transfers free of charge: removed, with their waits.

        Args:
            pattern: a shell pattern over "group.kind" or the name a call was given, e.g. "dp.all_reduce" or "dp.*".

        Raises:
            ValueError: nothing matches; the message lists what there is.
        """
        from fnmatch import fnmatchcase

        from emu.trace.events import Wait

        kept: dict[int, list[Event]] = {}
        removed = 0
        for rank, events in self.events.items():
            gone: set[int] = set()
            out: list[Event] = []
            for event in events:
                if isinstance(event, (Collective, Transfer)):
                    labels = (f"{event.group}.{event.kind}", event.name or "\0")
                    if any(fnmatchcase(label, pattern) for label in labels):
                        gone.add(event.work)
                        continue
                elif isinstance(event, Wait) and event.work in gone:
                    continue
                out.append(event)
            removed += len(gone)
            kept[rank] = out
        if not removed:
            there = sorted({f"{e.group}.{e.kind}" for _, e in self.of(Collective, Transfer)})  # type: ignore[union-attr]
            raise ValueError(f"no collective matches {pattern!r}; this run has {', '.join(there) or 'none'}")
        return Trace(self.axes, kept)
