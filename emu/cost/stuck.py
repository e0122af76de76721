"""Says why a trace never ends: who waits, in what, for whom."""

from __future__ import annotations

from emu.cost.engine import Engine
from emu.cost.errors import NeverCompletes
from emu.cost.streams import RankState
from emu.trace.events import Collective, Transfer

SHOWN = 8  # lines of a message: a thousand ranks wait alike


def check_all_done(engine: Engine) -> None:
    """Raises NeverCompletes if some rank still waits for others after all hosts have gone as far as they can."""
    waiting: list[tuple[int, str, str, list[int]]] = []  # rank, stream, what it waits in, for whom
    missing: set[int] = set()
    states = engine.states
    for meeting in engine.meetings.collectives.values():
        event: Collective = next(iter(meeting.parts.values()))[2]
        absent = [m for m in event.members if m in states and m not in meeting.parts]
        what = f"{event.kind} {event.seq} of group {event.group!r}"
        waiting += [(rank, part[0].stream, what, absent) for rank, part in meeting.parts.items()]
        missing.update(m for m in absent if not _takes_part(states[m], event))
    for lane, posted in engine.meetings.halves.values():
        half = posted.event
        peer = half.dst if half.kind == "send" else half.src
        what = f"{half.kind} {half.seq} from rank {half.src} to {half.dst} (group {half.group!r})"
        waiting.append((lane.rank.id, lane.stream, what, [peer]))
        if not _takes_part(states[peer], half):
            missing.add(peer)
    if not waiting:
        return
    waiting.sort()
    lines = [
        f"  rank {rank} waits on stream {stream!r} in {what} for rank {_some(absent)}"
        for rank, stream, what, absent in waiting[:SHOWN]
    ]
    if len(waiting) > SHOWN:
        lines.append(f"  and {len(waiting) - SHOWN} more")
    if missing:
        cause = f"the record of rank {_some(sorted(missing))} ends without its part"
        hint = "the trace is cut short, or these ranks left early: record the whole run again"
    else:
        cause = "the ranks wait for each other in a circle"
        hint = "issue what runs on one stream in the same order on every rank, or use one stream a group"
    raise NeverCompletes(
        "\n".join([f"this trace never ends: {cause}", *lines]),
        hint,
        waiting=[w[:3] for w in waiting],
        missing=sorted(missing),
    )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")


def _takes_part(state: RankState, wanted: Collective | Transfer) -> bool:
    """True if the record of a rank holds its part of a collective or transfer."""
    if isinstance(wanted, Collective):
        group = wanted.group, wanted.members, wanted.seq
        return any(isinstance(e, Collective) and (e.group, e.members, e.seq) == group for e in state.events)
    key = wanted.group, wanted.src, wanted.dst, wanted.seq
    return any(
        isinstance(e, Transfer) and e.kind != wanted.kind and (e.group, e.src, e.dst, e.seq) == key
        for e in state.events
    )
