"""Why a schedule cannot go on: the cycle of ranks that wait for each other, a line each."""

from __future__ import annotations

from emu.parallel.pipeline.actions import COMMUNICATION, Action
from emu.parallel.pipeline.needs import Needs, error, other_end
from emu.spmd import ScheduleError

LINES = 12  # of a longer cycle, the first and the last


def deadlock(needs: Needs) -> ScheduleError:
    """The error that says why a walk got stuck.

    Args:
        needs: of a complete schedule, after a walk that left ranks stuck.
    """
    cycle: list[int] = []
    rank = min(needs.stuck)
    while rank not in cycle:
        cycle.append(rank)
        rank = needs.where[needs.stuck[rank][1]]
    cycle = cycle[cycle.index(rank) :]
    lines = [_line(needs, rank) for rank in cycle]
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"  ... {len(lines) - LINES} more ranks ..."]
    position, action = _halt(needs, cycle[0])
    _, lacks = needs.stuck[cycle[0]]
    if len(cycle) == 1:
        return error(
            "order",
            f"rank {cycle[0]} can never go on:\n{lines[0]}",
            f"put {Action(*lacks)} before {action} in its row",
            action,
            cycle[0],
            position,
            {cycle[0]: cycle[0]},
        )
    hint = "on one of these ranks, put what another waits for before what it waits in"
    if needs.blocking:
        hint += "; or start the two together (grouped=True), or do not wait in a send (blocking=False)"
    return error(
        "deadlock",
        f"deadlock: ranks {', '.join(map(str, sorted(cycle)))} wait for each other, and none can go on:\n"
        + "\n".join(lines),
        hint,
        action,
        cycle[0],
        position,
        {rank: needs.where[needs.stuck[rank][1]] for rank in cycle},
    )


def _halt(needs: Needs, rank: int) -> tuple[int, Action]:
    """Where a stuck rank waits: in a blocking send or receive, or before the next action."""
    position, lacks = needs.stuck[rank]
    if needs.blocking and lacks[1] in COMMUNICATION and needs.where[lacks] != rank:
        end = Action(*other_end(lacks))
        return needs.position(end), end
    return position, needs.rows[rank][position]


def _line(needs: Needs, rank: int) -> str:
    position, action = _halt(needs, rank)
    lacks = Action(*needs.stuck[rank][1])
    giver = needs.where[lacks]
    there = needs.position(lacks)
    start = f"  rank {rank} waits at {action} (position {position}) for"
    if giver == rank:
        later = "the other half of the same pair" if there == position else f"which comes later (position {there})"
        return f"{start} its own {lacks}, {later}"
    halt, before = _halt(needs, giver)
    after = "" if halt == there else f", which comes after {before} (position {halt})"
    return f"{start} rank {giver}'s {lacks} (position {there}){after}"
