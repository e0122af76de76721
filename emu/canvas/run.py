"""The record of a run that is over: its steps are its events, in the order in which the ranks' hosts came to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from emu.canvas.follow import Follow
from emu.canvas.priced import price_record
from emu.canvas.record import Record
from emu.canvas.words import as_step, in_words
from emu.trace.events import Collective, Event, Transfer, Wait


def run_record(run: Any) -> Record:
    """The record of a whole run.

    A step is a kernel, a communication, a wait, a copy, an event or a mark. Memory that lives or dies, and whatever else the
    record of a rank has between two of them, counts with the step before it.

    Args:
        run: with mesh, cluster, trace, memory, has_memory and timeline().
    """
    mesh, trace, timeline = run.mesh, run.trace, run.timeline()
    ranks = trace.ranks
    coords = [mesh.coords(rank) for rank in ranks]
    title = f"{mesh} on {run.cluster.name}"
    record = Record("run", title, mesh.axes, ranks, coords, run.cluster.name, run.cluster.chip.hbm_bytes)
    follow = Follow(record, ranks, run.memory.held if run.has_memory else None)
    steps = {rank: _Steps(record, trace.events[rank]) for rank in ranks}
    seen: dict[int, list[int]] = {rank: [] for rank in ranks}

    def see(rank: int, index: int) -> None:
        for event in steps[rank].take():
            follow.see(rank, event, index)
            seen[rank].append(index)
        if index == 0 or steps[rank].is_over:
            state = record.text("ended" if steps[rank].is_over else "ready")
            record.tables["standing"].add(rank, index, state, 0, 0)

    for rank in ranks:
        see(rank, 0)
    follow.settle(0)
    for index, rank in enumerate(_in_order(ranks, steps, timeline), 1):
        record.step(rank, steps[rank].op)
        see(rank, index)
        follow.settle(index)
    record.ended = True
    price_record(record, timeline, seen, provisional=False)
    record.note("the record of a run has no tensors: they are seen by stepping through its program")
    if not run.has_memory:
        record.note("memory was not recorded")
    if timeline.stand_for is not None:
        record.note(f"{len(ranks)} of {mesh.size:,} ranks ran, for all")
    return record


class _Steps:
    """The steps of one rank, one after the other.

    Attributes:
        at: index of each step in the rank's events.
    """

    def __init__(self, record: Record, events: Sequence[Event]) -> None:
        self._record, self._events = record, events
        self._words: dict[int, str] = {}  # work -> what it is called
        self.at = [i for i, event in enumerate(events) if as_step(event) is not None]
        self._taken, self._begun = 0, False

    @property
    def op(self) -> int:
        """The row of the step that is next."""
        event = self._events[self.at[self._taken]]
        awaited = self._words.get(event.work, "") if isinstance(event, Wait) else ""
        texts = as_step(event, awaited)
        assert texts is not None
        if isinstance(event, (Collective, Transfer)):
            self._words[event.work] = event.name or in_words(event)
        return self._record.op(texts, *texts, "")  # its program is not there to be read

    @property
    def is_over(self) -> bool:
        return self._taken >= len(self.at)

    def take(self) -> Iterator[Event]:
        """Takes a step: it and what follows until the next. The first time, what stands before all."""
        start = self.at[self._taken] if self._begun else 0
        self._taken, self._begun = self._taken + self._begun, True
        end = len(self._events) if self.is_over else self.at[self._taken]
        yield from self._events[start:end]


def _in_order(ranks: Sequence[int], steps: dict[int, _Steps], timeline: Any) -> list[int]:
    """Whose step is next, by where the hosts stand in time when they have come to it."""
    times = [np.asarray(timeline.event_times(rank), dtype=float)[steps[rank].at] for rank in ranks]
    whose = np.repeat(np.asarray(ranks, dtype=np.int64), [len(each) for each in times])
    order = np.lexsort((whose, np.concatenate(times) if times else np.empty(0)))  # stable: a rank's own stay in order
    return whose[order].tolist()
