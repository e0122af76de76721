"""Why a schedule cannot go on: the cycle of ranks that wait for each other, a line each."""

from __future__ import annotations

from emu.parallel.pipeline.actions import COMMUNICATION, Action
from emu.parallel.pipeline.needs import Needs, Walk, error, other_end
from emu.spmd import ScheduleError

LINES = 12  # of a longer cycle, the first and the last


def deadlock(walk: Walk) -> ScheduleError:
    """The error that says why a schedule that has everything got stuck.

    Args:
        walk: one that did, or of a schedule in which something comes before what it needs in its own row.
    """
    needs = walk.needs
    if needs.late:
        return _late(needs, min(needs.late, key=lambda place: place % needs.stride))
    cycle: list[int] = []
    rank = min(walk.stuck)
    while rank not in cycle:
        cycle.append(rank)
        rank = walk.stuck[rank][1] // needs.stride
    cycle = cycle[cycle.index(rank) :]
    lines = [_line(walk, rank) for rank in cycle]
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"  ... {len(lines) - LINES} more ranks ..."]
    hint = "on one of these ranks, put what another waits for before what it waits in"
    if walk.blocking:
        hint += (
            "; or do not wait in a send (blocking=False), or start neighbours together (grouped=True), or take an order in "
            "which nobody waits in a circle: lowered(schedule, blocking=True)"
        )
    place = _halt(walk, cycle[0])
    return error(
        "deadlock",
        f"deadlock: ranks {_some(sorted(cycle))} wait for each other, and none can go on:\n" + "\n".join(lines),
        hint,
        needs.at(place),
        cycle[0],
        place % needs.stride,
        {rank: walk.stuck[rank][1] // needs.stride for rank in cycle},
    )


def _late(needs: Needs, place: int) -> ScheduleError:
    """The error that says that something comes before what it needs in its own row."""
    rank, position = divmod(place, needs.stride)
    action = needs.at(place)
    lacks = next(
        Action(*key) for key in needs.of(action, rank) if place <= needs.where[key] < (rank + 1) * needs.stride
    )
    later = needs.position(lacks)
    same = "which runs at the same time" if later == position else f"which comes only at position {later}"
    return error(
        "order",
        f"rank {rank} can never run {action} (position {position}): it needs its own {lacks}, {same}",
        f"put {lacks} before {action} in the row of rank {rank}",
        action,
        rank,
        position,
    )


def _halt(walk: Walk, rank: int) -> int:
    """The place where a stuck rank waits: of a blocking send or receive, or of the next action."""
    place, giver = walk.stuck[rank]
    end = walk.needs.at(giver)
    return walk.needs.where[other_end(end)] if walk.blocking and end.kind in COMMUNICATION else place


def _line(walk: Walk, rank: int) -> str:
    needs = walk.needs
    place, giver = _halt(walk, rank), walk.stuck[rank][1]
    other, position = divmod(giver, needs.stride)
    before = _halt(walk, other)
    after = "" if before == giver else f", which comes after {needs.at(before)} (position {before % needs.stride})"
    return (
        f"  rank {rank} waits at {needs.at(place)} (position {place % needs.stride}) "
        f"for rank {other}'s {needs.at(giver)} (position {position}){after}"
    )


def _some(ranks: list[int]) -> str:
    """Ranks in words, not all of many."""
    if len(ranks) > LINES:
        return f"{', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more"
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
