"""A timeline: when everything in a trace happens on one cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from emu.cost.metrics import Metrics, measure
from emu.hardware import Cluster
from emu.trace.events import Collective, HostCopy, Kernel, Mark, Transfer
from emu.trace.trace import Trace, UnknownRank
from emu.trace.units import count_text, time_text


class Span(NamedTuple):
    """Something that occupies a stream of a device from start_s to end_s."""

    stream: str
    start_s: float
    end_s: float
    name: str  # the kernel's; of communication the name it was given, else its kind
    kind: str  # "kernel", "collective", "transfer" or "host copy"
    phase: str  # of a kernel; "" otherwise
    scope: str  # of a kernel; "" otherwise
    group: str  # label of the group of a collective or transfer; "" otherwise
    index: int  # position in trace.events[rank]
    moves_s: float  # when all members of a collective were there and data began to move; start_s of others
    alone_s: float  # how long it would have lasted from moves_s on if it had shared nothing with others

    @property
    def stretch_s(self) -> float:
        """How much longer it lasted because it shared its device or its links with others."""
        return max(self.end_s - self.moves_s - self.alone_s, 0.0)


@dataclass(frozen=True)
class Timeline:
    """What pricing a trace on a cluster gives. Times are in seconds from the start of the trace.

    Args:
        trace: what was priced.
        cluster: on what.
        launch_mode: how kernels were launched: "eager", "compiled" or "graph".
        contention: whether what runs at one time shared devices and links.
        stand_for: rank -> how many ranks it stands for, which do the same as it does; None: one each.
    """

    trace: Trace = field(repr=False)
    cluster: Cluster = field(repr=False)
    launch_mode: str
    contention: bool
    _starts: Mapping[int, Sequence[float]] = field(repr=False)  # by rank, for every event; 0 where untimed
    _ends: Mapping[int, Sequence[float]] = field(repr=False)
    _moves: Mapping[int, Mapping[int, float]] = field(repr=False)  # by rank and index, for collectives and transfers
    _hosts: Mapping[int, Sequence[float]] = field(repr=False)
    _costs: Mapping[int, Sequence[Any]] = field(
        repr=False
    )  # by rank, for every event: what it costs alone, as .seconds
    stand_for: Mapping[int, int] | None = field(default=None, repr=False)

    @cached_property
    def step_time_s(self) -> float:
        """The makespan: when the last stream and the last host are done."""
        ends = [max(ends) for ends in self._ends.values() if ends]
        return max([*ends, *(hosts[-1] for hosts in self._hosts.values() if hosts)], default=0.0)

    @cached_property
    def spans(self) -> dict[int, list[Span]]:
        """For every rank what its streams did, in program order."""
        return {rank: self._spans_of(rank) for rank in self.trace.events}

    def __repr__(self) -> str:
        what = f"{count_text(len(self.trace.events), 'rank')}, {count_text(len(self.trace), 'event')}"
        where = f"on {self.cluster.name}, launched {self.launch_mode}"
        return f"Timeline({time_text(self.step_time_s)} {where}: {what})"

    def _spans_of(self, rank: int) -> list[Span]:
        starts, ends, moves, costs = self._starts[rank], self._ends[rank], self._moves[rank], self._costs[rank]
        spans: list[Span] = []
        for i, event in enumerate(self.trace.events[rank]):
            phase = scope = group = ""
            if isinstance(event, Kernel):
                name, kind, phase, scope = event.name, "kernel", event.phase, event.scope
            elif isinstance(event, (Collective, Transfer)):
                name, group = event.name or event.kind, event.group
                kind = "collective" if isinstance(event, Collective) else "transfer"
            elif isinstance(event, HostCopy):
                name, kind = event.name or event.kind, "host copy"
            else:
                continue
            start_s, alone_s = starts[i], costs[i].seconds
            spans.append(
                Span(event.stream, start_s, ends[i], name, kind, phase, scope, group, i, moves.get(i, start_s), alone_s)
            )
        return spans

    def event_times(self, rank: int) -> Sequence[float]:
        """The host's time after every event of a rank, for instance to draw its memory over time."""
        return self._of(rank)

    def _of(self, rank: int) -> Sequence[float]:
        if rank not in self._hosts:
            raise UnknownRank(rank, self.trace.ranks)
        return self._hosts[rank]

    def marks(self, rank: int) -> list[tuple[str, float]]:
        """The points that the program named (rank.mark), with the host's time."""
        hosts = self._of(rank)
        return [(event.name, hosts[i]) for i, event in enumerate(self.trace.events[rank]) if isinstance(event, Mark)]

    def metrics(self, tokens: int | None = None) -> Metrics:
        """What the run achieves on this cluster.

        Args:
            tokens: tokens that all ranks together trained on, for tokens_per_s.
        """
        return measure(self, tokens, self.stand_for)
