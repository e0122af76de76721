"""A trace: what every rank of one run did, as lists of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emu.trace.events import At, Collective, Event, HostCopy, Kernel, Mark, Transfer, Use, Wait
from emu.trace.units import count_text, ranks_text


class UnknownRank(KeyError, ValueError):
    """A rank that was not recorded. Fields: rank, ranks (those that were), hint (str)."""

    def __init__(self, rank: object, ranks: list[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self.hint = f"name one of the ranks {ranks_text(ranks)}"
        super().__init__(f"there is no record of rank {rank!r}\n  hint: {self.hint}")

    def __str__(self) -> str:  # a KeyError would quote it
        return str(self.args[0])


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
        try:
            return self.events[rank]
        except (KeyError, TypeError):  # a TypeError is a rank that cannot be a key, say a list of them
            raise UnknownRank(rank, self.ranks) from None

    def __len__(self) -> int:
        return sum(len(events) for events in self.events.values())

    def __repr__(self) -> str:
        kinds = Counter(type(event).__name__ for events in self.events.values() for event in events)
        mesh = " ".join(f"{axis}={size}" for axis, size in self.axes.items()) or "one device"
        named = {"kernel": kinds["Kernel"], "collective": kinds["Collective"], "transfer": kinds["Transfer"]}
        parts = ", ".join(count_text(n, kind) for kind, n in named.items() if n)
        parts = f", among them {parts}" if parts else ""
        return f"Trace({mesh}, {count_text(len(self.events), 'rank')}, {count_text(len(self), 'event')}{parts})"

    def of(self, *types: type, rank: int | None = None) -> Iterator[tuple[int, Event]]:
        """Yields (rank, event) for the events of the given types, rank by rank in program order."""
        for r in self.events if rank is None else (rank,):
            for event in self[r]:
                if isinstance(event, types):
                    yield r, event

    def flops(self, rank: int, *phases: str) -> int:
        """Floating point operations that a rank executed, in the given phases (all of them by default)."""
        return sum(e.flops for e in self[rank] if isinstance(e, Kernel) and (not phases or e.phase in phases))

    def counts(self, rank: int) -> Counter[str]:
        """How often each kernel name, and each kind of collective, transfer and host copy, occurs on a rank."""
        return Counter(
            e.name if isinstance(e, Kernel) else _label(e)
            for _, e in self.of(Kernel, Collective, Transfer, HostCopy, rank=rank)
        )

    def marks(self) -> list[str]:
        """The names that the first rank marked, in order."""
        return [e.name for e in self[self.ranks[0]] if isinstance(e, Mark)] if self.events else []

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
        """The same trace with the matching communications free of charge: removed, with their waits.

        Args:
            pattern: a shell pattern over "group.kind" or the name a call was given, e.g. "dp.all_reduce" or "dp.*".
                Copies to host memory and back are "host.to_host" and "host.from_host".

        Raises:
            ValueError: nothing matches; the message lists what there is.
        """
        from fnmatch import fnmatchcase

        kept: dict[int, list[Event]] = {}
        removed = 0
        for rank, events in self.events.items():
            gone: set[int] = set()
            out: list[Event] = []
            dropped = False
            for event in events:
                if isinstance(event, (Collective, Transfer, HostCopy)):
                    labels = (_label(event), event.name or "\0")
                    if any(fnmatchcase(label, pattern) for label in labels):
                        removed += 1
                        dropped = True
                        if not isinstance(event, HostCopy):
                            gone.add(event.work)
                        continue
                elif isinstance(event, (Wait, Use)) and event.work in gone:
                    dropped = True
                    continue
                elif isinstance(event, At) and dropped:  # of what was removed
                    continue
                dropped = False
                out.append(event)
            kept[rank] = out
        if not removed:
            there = sorted({_label(e) for _, e in self.of(Collective, Transfer, HostCopy)})
            raise ValueError(f"no collective matches {pattern!r}; this run has {', '.join(there) or 'none'}")
        return Trace(self.axes, kept)


def _label(event: Any) -> str:
    """A communication in patterns and counts: "dp.all_reduce", "pp.send", "host.to_host"."""
    return f"{'host' if isinstance(event, HostCopy) else event.group}.{event.kind}"
