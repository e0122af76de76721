"""Says why a trace never ends: who waits, in what, for whom."""

from __future__ import annotations

from emu.cost.engine import Engine
from emu.cost.errors import NeverCompletes
from emu.cost.streams import RankState
from emu.trace.events import Collective, Transfer

Key = tuple[object, ...]  # what the parts of one communication have in common, and whose part it is

SHOWN = 8  # lines of a message: a thousand ranks wait alike


def check_all_done(engine: Engine) -> None:
    """Raises NeverCompletes if some rank still waits for others after all hosts have gone as far as they can."""
    waiting: list[tuple[int, str, str, list[int]]] = []  # rank, stream, what it waits in, for whom
    missing: set[int] = set()
    states, parts = engine.states, _Parts()
    for meeting in engine.meetings.collectives.values():
        event: Collective = next(iter(meeting.parts.values()))[2]
        absent = [m for m in event.members if m in states and m not in meeting.parts]
        what = f"{event.kind} {event.seq} of group {event.group!r}"
        waiting += [(rank, part[0].stream, what, absent) for rank, part in meeting.parts.items()]
        missing.update(m for m in absent if not parts.has(states[m], event))
    for lane, posted in engine.meetings.halves.values():
        half = posted.event
        peer = half.dst if half.kind == "send" else half.src
        what = f"{half.kind} {half.seq} from rank {half.src} to {half.dst} (group {half.group!r})"
        waiting.append((lane.rank.id, lane.stream, what, [peer]))
        if not parts.has(states[peer], half):
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


class _Parts:
    """What ranks take part in, by their records; each is gone through once."""

    def __init__(self) -> None:
        self._of: dict[int, set[Key]] = {}

    def has(self, state: RankState, wanted: Collective | Transfer) -> bool:
        """True if the record of a rank holds its part of a collective, or its half of a transfer of which this is the other."""
        known = self._of.get(state.id)
        if known is None:
            known = self._of[state.id] = {_key(e) for e in state.events if isinstance(e, (Collective, Transfer))}
        if isinstance(wanted, Transfer):
            wanted = wanted._replace(kind="recv" if wanted.kind == "send" else "send")
        return _key(wanted) in known


def _key(event: Collective | Transfer) -> Key:
    if isinstance(event, Collective):
        return event.group, event.members, event.seq
    return event.group, event.src, event.dst, event.seq, event.kind
