"""Sends and receives: every result that crosses ranks has both, in the right rows, and in the same order at both ends."""

from __future__ import annotations

from emu.parallel.pipeline.actions import COMMUNICATION, RECV_B, RECV_F, SEND_B, SEND_F, Action, F
from emu.parallel.pipeline.needs import Needs, error, other_end
from emu.spmd import ScheduleError


def ends(needs: Needs) -> None:
    """Raises unless every result that another rank needs has a send where it is made and a receive where it is used.

    Args:
        needs: of a schedule whose computing is complete.

    Raises:
        ScheduleError: one is missing, stands in another row, or moves nothing.
    """
    where, stride = needs.where, needs.stride
    right = 0
    for (stage, kind, microbatch, _), place in where.items():
        if kind == F and stage < needs.last:
            rank = place // stride
            after = where[stage + 1, F, microbatch, ()] // stride
            if after != rank:
                right += 4
                for end, holder in (
                    ((stage, SEND_F, microbatch, ()), rank),
                    ((stage + 1, RECV_F, microbatch, ()), after),
                    ((stage + 1, SEND_B, microbatch, ()), after),
                    ((stage, RECV_B, microbatch, ()), rank),
                ):
                    if where.get(end, -1) // stride != holder:
                        raise _missing(needs, Action(*end), holder)
    if right < sum(a[1] in COMMUNICATION for a in where):
        raise _idle(needs)


def _missing(needs: Needs, end: Action, rank: int) -> ScheduleError:
    forwards = end.kind in (SEND_F, RECV_F)
    of = Action(end.stage, F, end.microbatch) if forwards else Action(*needs.gradient(end.stage, end.microbatch))
    there = f"it stands in the row of {needs.place(end)}" if end in needs.where else "no rank has it"
    side = "after" if end.kind in (SEND_F, SEND_B) else "before"
    return error(
        "misplaced" if end in needs.where else "missing",
        f"rank {rank} needs {end} {side} its {of} ({needs.place(of)}), and {there}",
        f"put {end} into the row of rank {rank}; or write compute actions only, and let lowered(schedule) add the rest",
        end,
        rank,
    )


def _idle(needs: Needs) -> ScheduleError:
    """The first send or receive that is one too many."""
    for rank, row in enumerate(needs.rows):
        for position, action in enumerate(row):
            if action.kind in COMMUNICATION:
                one, other = sorted((action.stage, other_end(action)[0]))
                giver, taker = (needs.rank((stage, F, action.microbatch, ())) for stage in (one, other))
                if giver is None or taker is None or giver == taker:
                    why = f"no rank runs microbatch {action.microbatch} on both stages {one} and {other}"
                    if giver == taker is not None:
                        why = f"stages {one} and {other} are on one rank, {giver}"
                    wrong = f"rank {rank} has {action} (position {position}), which moves nothing: {why}"
                    return error("misplaced", wrong, "leave it out", action, rank, position)
    raise AssertionError("all sends and receives move something")


def channels(needs: Needs) -> None:
    """Raises unless a rank receives from another in the order in which that sends, outputs and gradients apart.

    Raises:
        ScheduleError: the orders differ.
    """
    where, stride = needs.where, needs.stride
    for rank, row in enumerate(needs.rows):
        latest: dict[
            tuple[int, str], tuple[int, Action]
        ] = {}  # of each channel, the place of the last send, and its receive
        for action in row:
            if action.kind in (RECV_F, RECV_B):
                send = where[other_end(action)]
                channel = send // stride, action.kind
                sent, before = latest.get(channel, (-1, action))
                if send < sent:
                    source = channel[0]
                    raise error(
                        "order",
                        f"rank {rank} receives {before} ({needs.place(before)}) before {action} ({needs.place(action)}), "
                        f"but rank {source} sends {needs.at(send)} (position {send % stride}) before {needs.at(sent)} "
                        f"(position {sent % stride}): the data of one would be taken for the other's",
                        f"receive in the order in which rank {source} sends, or let lowered(schedule) add both ends",
                        before,
                        rank,
                        needs.position(before),
                    )
                latest[channel] = send, action
