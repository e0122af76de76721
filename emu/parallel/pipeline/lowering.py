"""Sends, receives, gathers and frees, added to a schedule that says only what is computed: they follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from emu.parallel.pipeline.actions import (
    BACKWARD,
    COMMUNICATION,
    RECV_B,
    RECV_F,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    F,
)
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.needs import Key, other_end, readable
from emu.parallel.pipeline.schedule import Schedule
from emu.parallel.pipeline.timing import timed

GIVES = BACKWARD | {F}  # actions with a result for another stage
GATHERED = 3  # stages at once: a forward's, a backward's, and the next one's while these run


def lowered(schedule: Schedule, gather: bool = False, blocking: bool = False) -> Schedule:
    """A schedule with everything that its ranks do besides computing.

    A send stands right after the action that makes what it sends. A receive stands before the action that precedes its
    use, so that what travels does so while that runs; one rank receives from another in the order in which that sends.
    Stages on one rank hand over without either. This order is for sends and receives that do not wait. Where they do,
    or where two ranks carry theirs out one at a time in the order posted, ranks that both send and receive end in a
    deadlock: say blocking=True.

    Args:
        schedule: any; what it has besides computing is left out and made anew.
        gather: for sharded parameters: a stage's are gathered before it is used, with those of the next stages that the
            rank comes to, and freed where it is none of the next three.
        blocking: receive when the other rank sends, by a clock of equal stages, rather than when it is soon used. All
            ranks then follow one order of transfers, so it is no deadlock even if each holds up both of its ranks; but
            what arrives early lies waiting in memory.

    Raises:
        ScheduleError: the schedule cannot be run.
    """
    readable(schedule)
    schedule = schedule.compute()
    check(schedule)
    rows = _together(schedule) if blocking else _ahead(schedule)
    return Schedule(tuple(tuple(_gathering(row) if gather else row) for row in rows), schedule.name)


def _sends(schedule: Schedule, rank: int, action: Action) -> list[tuple[Action, int, Action]]:
    """What leaves a rank after an action, as (send, to which rank, its receive)."""
    leaving = []
    for a in action.each():
        if a.kind in GIVES and a.microbatch is not None:
            send = Action(a.stage, SEND_F if a.kind == F else SEND_B, a.microbatch)
            receive = Action(*other_end(send))
            to = schedule.places.get((receive.stage, a.microbatch), rank)
            if to != rank:
                leaving.append((send, to, receive))
    return leaving


def _ahead(schedule: Schedule) -> list[list[Action]]:
    """Sends right after what makes them, receives one action before their use."""
    sends: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.rows]  # after each action
    receives: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.rows]  # before each action
    channels: dict[tuple[int, int], list[Action]] = {}
    used: dict[Key, int] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            for a in action.each():
                if a.kind in GIVES:
                    used[a.stage, RECV_F if a.kind == F else RECV_B, a.microbatch, ()] = position
            for send, to, receive in _sends(schedule, rank, action):
                sends[rank][position].append(send)
                channels.setdefault((rank, to), []).append(receive)
    for (_, rank), arriving in channels.items():
        position = len(schedule.rows[rank])
        for receive in reversed(arriving):  # none later than those sent after it
            position = min(position, max(used[receive] - 1, 0))
            receives[rank][position].insert(0, receive)
    return [
        [a for position, action in enumerate(row) for a in (*receives[rank][position], action, *sends[rank][position])]
        for rank, row in enumerate(schedule.rows)
    ]


def _together(schedule: Schedule) -> list[list[Action]]:
    """Both ends of a transfer at one place in an order of everything that all ranks do."""
    clocked = timed(schedule).rows
    events = [(start, 1, rank, action) for rank, row in enumerate(clocked) for start, _, action in row]
    events += [(stop, 0, rank, action) for rank, row in enumerate(clocked) for _, stop, action in row]
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for _, starts, rank, action in sorted(events, key=itemgetter(0, 1)):  # what stops, before what starts then
        if starts:
            rows[rank].append(action)
        else:
            for send, to, receive in _sends(schedule, rank, action):
                rows[rank].append(send)
                rows[to].append(receive)
    return rows


def _gathering(row: Sequence[Action]) -> list[Action]:
    """A row with gathers and frees: at every action, what it and the next ones need is gathered, GATHERED stages at most."""
    soon: list[tuple[int, ...]] = []  # of every action, the stages that are needed from there on, next first
    following: tuple[int, ...] = ()
    for action in reversed(row):
        if action.kind not in COMMUNICATION:
            now = tuple(a.stage for a in action.each())
            following = tuple(dict.fromkeys(now + following))[: max(GATHERED, len(now))]
        soon.append(following)
    gathered: tuple[int, ...] = ()
    actions: list[Action] = []
    for action, wanted in zip(row, reversed(soon)):
        if action.kind not in COMMUNICATION:
            actions += (Action(stage, RESHARD) for stage in gathered if stage not in wanted)
            actions += (Action(stage, UNSHARD) for stage in wanted if stage not in gathered)
            gathered = wanted
        actions.append(action)
    return actions + [Action(stage, RESHARD) for stage in gathered]
