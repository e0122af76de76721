"""A moment as plain data: what the pictures, the terminal, a widget and a page are drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emu.canvas.words import in_words, on_stream
from emu.cost import Timeline
from emu.stepping.ops import Op
from emu.stepping.situation import Situation, Stands, key_of

if TYPE_CHECKING:
    from emu.stepping.moment import Moment


def state_of(moment: Moment, timeline: Timeline | None) -> dict[str, Any]:
    """Everything at a moment but tensors' values. Sizes are in bytes, times in seconds from the start.

    Keys: index, known (steps so far known), ended, error, op (the next step), mesh, cluster, capacity_bytes, provisional_s (time
    so far; None where it cannot be priced), messages (in flight), collectives (that wait for somebody), and ranks: rank,
    coords, state ("next", "ready", "waiting", "ended", "not begun" or "failed"), line, waits_in, last and next (steps), steps,
    mark, hbm (category -> bytes), peak_bytes, streams (name, last, given, until_s), works (started and not waited for), host_s.
    """
    history, situation = moment.history, moment.situation()
    error = moment.error
    return {
        "index": moment.index,
        "known": len(history),
        "ended": moment.op is None,
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        "op": _op(moment.op),
        "mesh": dict(moment.mesh.axes),
        "cluster": moment.cluster.name,
        "capacity_bytes": moment.cluster.chip.hbm_bytes,
        "provisional_s": None if timeline is None else timeline.step_time_s,
        "messages": _messages(situation),
        "collectives": _collectives(situation),
        "ranks": [_rank(moment, situation, timeline, rank) for rank in history.ranks],
    }


def _op(op: Op | None) -> dict[str, Any] | None:
    return None if op is None else {**op._asdict(), "label": op.label, "code": op.code}


def _rank(moment: Moment, situation: Situation, timeline: Timeline | None, rank: int) -> dict[str, Any]:
    history, stands = moment.history, situation.ranks[rank]
    standing = stands.standing
    last = history.ops[stands.last] if stands.last >= 0 else None
    coming = history.next_of(rank, moment.index)  # it may stand before it only later
    state = standing.state
    if moment.op is not None and moment.op.rank == rank:
        state = "next"
    if moment.error is not None and rank == history.failed_rank:
        state = "failed"
    here = last if state == "failed" else coming or last
    line = standing.where or ("" if here is None or state == "ended" else here.line)
    return {
        "rank": rank,
        "coords": dict(moment.mesh.coords(rank)),
        "state": state,
        "line": line,
        "waits_in": standing.what,
        "last": _op(last),
        "next": _op(coming),
        "steps": stands.steps,
        "mark": stands.mark,
        "hbm": dict(stands.held),
        "peak_bytes": stands.peak_bytes,
        "streams": _streams(situation, timeline, rank, stands),
        "works": _works(situation, rank, stands),
        "host_s": _host_s(timeline, rank),
    }


def _host_s(timeline: Timeline | None, rank: int) -> float | None:
    times = list(timeline.event_times(rank)) if timeline is not None else []
    return times[-1] if times else None


def _streams(situation: Situation, timeline: Timeline | None, rank: int, stands: Stands) -> list[dict[str, Any]]:
    until: dict[str, float] = {}
    for span in timeline.spans[rank] if timeline is not None else ():
        until[span.stream] = max(until.get(span.stream, 0.0), span.end_s)
    return [
        {"name": name, "last": on_stream(situation.event(rank, i)), "given": given, "until_s": until.get(name)}
        for name, (i, given) in stands.streams.items()
    ]


def _works(situation: Situation, rank: int, stands: Stands) -> list[dict[str, Any]]:
    found = []
    for work, i in stands.works.items():
        event = situation.event(rank, i)
        waits_for = situation.absent(key_of(event)) if situation.is_open(event) else []
        found.append(
            {
                "work": work,
                "what": in_words(event),
                "name": event.name,
                "stream": event.stream,
                "bytes": event.bytes,
                "waits_for": waits_for,
            }
        )
    return found


def _messages(situation: Situation) -> list[dict[str, Any]]:
    """Messages of which one half is posted."""
    found = []
    for key, parts in situation.open.items():
        if key[0] == "transfer":
            rank, i = parts[0]
            event = situation.event(rank, i)
            found.append(
                {
                    "group": event.group,
                    "src": event.src,
                    "dst": event.dst,
                    "bytes": event.bytes,
                    "dtype": event.dtype,
                    "posted": event.kind,
                    "name": event.name,
                }
            )
    return found


def _collectives(situation: Situation) -> list[dict[str, Any]]:
    """Collectives to which not all members have come."""
    found = []
    for key, parts in situation.open.items():
        if key[0] == "collective":
            event = situation.event(*parts[0])
            found.append(
                {
                    "what": in_words(event),
                    "members": list(event.members),
                    "bytes": event.bytes,
                    "come": [rank for rank, _ in parts],
                    "waits_for": situation.absent(key),
                }
            )
    return found
