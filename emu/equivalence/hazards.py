"""The hazard proof: from one run, whether a wait is missing in any interleaving, though this one came out right.

A run with `uses=True` records who uses which memory. Two uses of the same bytes of which one writes must be ordered by
the program's own waits (emu/trace/order.py); if all are, no timing of kernels, links and ranks can change what they read.
If two are not, that is a hazard, whatever this run computed.

What is proved is proved of all runs that issue the same work in the same order. Only a program that asks how far its
communications are (`wait_any`, `done()`) may do other things another time: such choices are listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from emu.equivalence.conflicts import Block, Pair, Reading, line_of, may_go
from emu.equivalence.crossing import Call, circles
from emu.spmd import EmuError, Mesh
from emu.trace.events import Choice, Collective, EventWait, HostWait, Transfer, Use, Wait
from emu.trace.trace import Trace
from emu.trace.units import count_text
from emu.virtual.launch import Program, run_virtual

SHOWN = 8  # hazards, choices and waits that are told in full


@dataclass(frozen=True)
class Access:
    """One of the two uses of a hazard, or one of the two calls. `event` is its position in the rank's record."""

    what: str
    stream: str
    line: str
    event: int

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.line})' if self.line else ''} on stream {self.stream!r}"


@dataclass(frozen=True)
class Hazard:
    """Two uses that nothing orders, or two collectives that ranks issue in different orders.

    Attributes:
        kind: "read after write", "write after read", "write after write", "freed in flight" or "opposite order".
        rank: where it was found first; `ranks` are all, and `times` is how often the same two lines meet so.
        bytes, category, scope: the memory that is used; nothing of "opposite order".
        first, second: the uses, in the order in which the program issues them.
        cure: what to do, with both lines.
    """

    kind: str
    rank: int
    bytes: int
    category: str
    scope: str
    first: Access
    second: Access
    cure: str
    ranks: tuple[int, ...] = ()
    times: int = 1

    def __str__(self) -> str:
        ranks = f"rank {self.rank}" if len(self.ranks) < 2 else f"ranks {', '.join(map(str, self.ranks))}"
        times = f", {self.times} times" if self.times > len(self.ranks) else ""
        if self.kind == "opposite order":
            here = f"{ranks}{times}: opposite order: {self.first} comes before {self.second}, elsewhere after"
            return f"{here}\n  hint: {self.cure}"
        memory = f"{self.bytes} bytes of {self.category}{' of ' + self.scope if self.scope else ''}"
        then = "may still use it" if self.kind == "freed in flight" else "nothing orders the two"
        return f"{ranks}{times}: {self.kind} of {memory}: {self.first}, then {self.second}: {then}\n  hint: {self.cure}"


@dataclass(frozen=True)
class Waiting:
    """A wait of the program: for what, by which stream ("" is the host), and where. `event` is its position on record."""

    rank: int
    event: int
    what: str
    stream: str
    line: str

    def __str__(self) -> str:
        who = f"stream {self.stream!r}" if self.stream else "the host"
        return f"{who} waits for {self.what}{f' ({self.line})' if self.line else ''}"


@dataclass(frozen=True, repr=False)
class Hazards:
    """What the proof found: True if no wait is missing.

    Attributes:
        found: the hazards, the same two lines told once.
        n_ranks, n_uses: what was looked at.
        pairs: every two uses that must be ordered and are, each with the wait (its position) that does it.
        needed: waits without which some pair would not be ordered.
        redundant: waits each of which could go without a hazard, the others left as they are.
        choices: (what, line, times): where the program asks how far its communications are.
    """

    found: list[Hazard]
    n_ranks: int
    n_uses: int
    pairs: list[Pair] = field(repr=False)
    needed: list[Waiting]
    redundant: list[Waiting]
    choices: list[tuple[str, str, int]]
    trace: Trace = field(repr=False)

    @property
    def n_ordered(self) -> int:
        return len(self.pairs)

    @cached_property
    def spare(self) -> list[tuple[str, int]]:
        """Lines all of whose waits could go together, and how many waits they make: advice, as far as memory goes."""
        lines: dict[str, list[Waiting]] = {}
        for wait in self.redundant:
            lines.setdefault(wait.line, []).append(wait)
        needed = {wait.line for wait in self.needed}
        gone: set[tuple[int, int]] = set()
        spare = []
        for line, waits in lines.items():
            if line and line not in needed and self:
                without = gone | {(wait.rank, wait.event) for wait in waits}
                if not Reading(self.trace, without).unordered:
                    gone = without
                    spare.append((line, len(waits)))
        return spare

    def __bool__(self) -> bool:
        return not self.found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the findings whole, of the proof its figures and the waits that it does not need."""
        return {
            "free": bool(self),
            "ranks": self.n_ranks,
            "uses": self.n_uses,
            "ordered": self.n_ordered,
            "hazards": [asdict(hazard) for hazard in self.found],
            "needed": len(self.needed),
            "redundant": [asdict(wait) for wait in self.redundant],
            "spare": [{"line": line, "waits": n} for line, n in self.spare],
            "choices": [{"what": what, "line": line, "times": n} for what, line, n in self.choices],
        }

    def __str__(self) -> str:
        where = f"on {count_text(self.n_ranks, 'rank')}"
        if self.found:
            told = [f"{count_text(len(self.found), 'hazard')} {where}:", *map(str, self.found[:SHOWN])]
            more = len(self.found) - SHOWN
            return "\n".join([*told, *([f"and {more} more"] if more > 0 else []), *self._chosen()])
        streams = f"{count_text(self.n_ordered, 'pair')} across streams"
        how = f", each ordered by one of {count_text(len({(p.rank, p.witness) for p in self.pairs}), 'wait')}"
        told = [f"no hazard {where}: {count_text(self.n_uses, 'use')} of memory, {streams}{how if self.pairs else ''}"]
        if self.spare:
            lines = ", ".join(f"{line} ({count_text(n, 'wait')})" for line, n in self.spare[:SHOWN])
            told.append(f"no memory needs the waits at {lines}")
        return "\n".join([*told, *self._chosen()])

    __repr__ = __str__

    def _chosen(self) -> list[str]:
        if not self.choices:
            return []
        lines = ", ".join(f"{what} ({line})" for what, line, _ in self.choices[:SHOWN])
        return [f"of other choices nothing is proved: what it does depends on time at {lines}"]


def hazards(
    program: Program, mesh: Mesh, args: Sequence[Any] = (), *, order: str | int = "program", shapes: bool = False
) -> Hazards:
    """Runs a program once, and proves that no wait is missing in any interleaving, or says which.

    Args:
        program: `program(rank, *args)`.
        order: which rank runs when several can; another one is another proof only where the program makes choices.
        shapes: without numbers, for programs that are too large to compute.

    Raises:
        EmuError: whatever the program does wrong but races: those are found.
    """
    return prove(run_virtual(program, mesh, args=args, order=order, meta=shapes, uses=True).trace)


def prove(trace: Trace) -> Hazards:
    """The proof from a trace that was recorded with uses.

    Raises:
        EmuError: it was not, though its ranks did something.
    """
    reading = Reading(trace)
    if not reading.n_uses and any(
        isinstance(e, (Collective, Transfer)) and e.bytes for _, e in trace.of(Collective, Transfer)
    ):
        raise EmuError(
            "this trace does not say who uses which memory", "record it: emu.launch(program, mesh, uses=True)"
        )
    found = [_hazard(trace, pair, block) for pair, block in reading.unordered]
    found += [_crossing(circle) for circle in circles(trace)]
    waits = [_waiting(trace, *wait) for wait in reading.waits]
    chosen = Counter((event.kind, event.line) for _, event in trace.of(Choice) if isinstance(event, Choice))
    return Hazards(
        _alike(found),
        len(trace.ranks),
        reading.n_uses,
        reading.pairs,
        [wait for wait in waits if (wait.rank, wait.event) in reading.needed],
        [wait for wait in waits if (wait.rank, wait.event) not in reading.needed],
        [(what, line, n) for (what, line), n in chosen.items()],
        trace,
    )


def _hazard(trace: Trace, pair: Pair, block: Block) -> Hazard:
    events = trace[pair.rank]
    a, b = events[pair.first], events[pair.second]
    assert isinstance(a, Use) and isinstance(b, Use)
    kind = "freed in flight" if b.kind == "free" else f"{b.kind} after {a.kind}"
    first = Access(a.what, a.stream, a.line, pair.first)
    second = Access(b.what, b.stream, b.line, pair.second)
    return Hazard(
        kind, pair.rank, block.bytes, block.category, b.scope, first, second, _cure(events, a, b), (pair.rank,)
    )


def _cure(events: Any, first: Use, second: Use) -> str:
    """Which wait is missing, in words."""
    before = f"{second.what}{f' at {second.line}' if second.line else ''}"
    there = f" at {first.line}" if first.line else ""
    issued = next((e.after for e in events if isinstance(e, (Collective, Transfer)) and e.work == second.work), None)
    waiting = second.stream if issued is None else issued
    late = "" if second.kind != "free" else ", or keep a reference to the buffer until after that wait"
    if first.work:
        return f"on stream {waiting!r}, call wait() on the work of {first.what}{there} before {before}{late}"
    if waiting == first.stream:  # an event is recorded already, of what came before
        return f"issue {before} after {first.what}{there}{late}"
    return (
        f"make stream {waiting!r} wait, before {before}, for {first.what}{there}: "
        f"wait_stream, or an event recorded on {first.stream!r} after it{late}"
    )


def _crossing(circle: list[tuple[Call, Call]]) -> Hazard:
    (first, second), *others = circle
    one, two = (Access(call.what, call.stream, call.line, call.event) for call in (first, second))
    told = "; ".join(
        f"rank {a.rank} calls {a.what}{f' ({a.line})' if a.line else ''} before {b.what}{f' ({b.line})' if b.line else ''}"
        for a, b in others
    )
    cure = (
        f"issue them in one order on all ranks, or wait for the first before the second: {told}. "
        f"A device with no room for both at once waits for ever"
    )
    ranks = tuple(dict.fromkeys(a.rank for a, _ in circle))
    return Hazard("opposite order", first.rank, 0, "", "", one, two, cure, ranks)


def _operation(access: Access) -> str:
    return re.sub(r" number \d+| (?:to|from) rank \d+", "", access.what)


def _alike(found: list[Hazard]) -> list[Hazard]:
    """The same two operations at the same two lines are told once."""
    told: dict[Any, Hazard] = {}
    for hazard in found:
        first, second = hazard.first, hazard.second
        key = (hazard.kind, first.line, _operation(first), second.line, _operation(second))
        if (before := told.get(key)) is not None:
            ranks = tuple(sorted({*before.ranks, *hazard.ranks}))
            hazard = replace(before, ranks=ranks, times=before.times + 1)
        told[key] = hazard
    return list(told.values())


def _waiting(trace: Trace, rank: int, index: int) -> Waiting:
    events = trace[rank]
    event = events[index]
    assert may_go(event)
    stream = "" if isinstance(event, HostWait) else event.stream  # type: ignore[union-attr]
    if isinstance(event, Wait):
        what = f"work {event.work}"
    elif isinstance(event, EventWait):
        what = f"event {event.event}"
    else:
        assert isinstance(event, HostWait)
        what = event.reason if event.reason != "synchronize" else f"stream {event.stream!r}" if event.stream else "all"
    return Waiting(rank, index, what, stream, line_of(events, index))
