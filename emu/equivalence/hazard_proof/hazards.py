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
from dataclasses import replace
from typing import Any

from emu.equivalence.hazard_proof.conflicts import Block, Pair, Reading, line_of, may_go
from emu.equivalence.hazard_proof.crossing import Call, circles
from emu.equivalence.hazard_proof.proof import Access, Hazard, Hazards, Waiting
from emu.spmd import EmuError, Mesh
from emu.spmd.programs import check_kinds
from emu.trace.events import At, Choice, Collective, EventWait, HostCopy, HostWait, Kernel, Transfer, Use, Wait
from emu.trace.trace import Trace
from emu.virtual.launch import Program, run_virtual


def hazards(
    program: Program, mesh: Mesh, args: Sequence[Any] = (), *, order: str | int = "program", shapes: bool = False
) -> Hazards:
    """Runs a program once, and proves that no wait is missing in any interleaving, or says which.

    Args:
        program: `program(rank, *args)`.
        order: which rank runs when several can; another one is another proof only where the program makes choices.
        shapes: without numbers, for programs that are too large to compute.

    Raises:
        EmuError: no program, or no Mesh; or whatever the program does wrong but races: those are found.
    """
    check_kinds(program, mesh)
    return prove(run_virtual(program, mesh, args=args, order=order, meta=shapes, uses=True).trace)


def prove(trace: Trace) -> Hazards:
    """The proof from a trace that was recorded with uses.

    Raises:
        EmuError: it was not, though its ranks did something.
    """
    reading = Reading(trace)
    recorded = any(True for _ in trace.of(Use, At))
    if not recorded and any(True for _ in trace.of(Kernel, Collective, Transfer, HostCopy)):
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
        f"issue them in one order on all ranks: {told}. A device without room for both at once carries out the one that "
        "was issued first, and the ranks wait for each other for ever"
    )
    ranks = tuple(sorted({a.rank for a, _ in circle}))
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
    assert may_go(event) and isinstance(event, (Wait, EventWait, HostWait))
    stream = "" if isinstance(event, HostWait) else event.stream
    if isinstance(event, Wait):
        what = f"work {event.work}"
    elif isinstance(event, EventWait):
        what = f"event {event.event}"
    else:
        assert isinstance(event, HostWait)
        what = event.reason if event.reason != "synchronize" else f"stream {event.stream!r}" if event.stream else "all"
    return Waiting(rank, index, what, stream, line_of(events, index))
