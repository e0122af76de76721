"""What every action of a schedule needs from the others, and all ranks' actions in an order that respects it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from emu.parallel.pipeline.actions import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    KINDS,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    B,
    F,
    I,
    W,
)
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import EmuError, ScheduleError

Key = tuple  # (stage, kind, microbatch, ()): equal to the Action, and much cheaper to make ten thousands of
NUMBERED = COMPUTE | COMMUNICATION  # kinds of one microbatch; others are of a whole stage


class Needs:
    """What stands where in a schedule, and what has to happen before what.

    A forward needs the forward of the stage before; a backward (of inputs) its own forward and the backward of the
    stage after; a backward of weights the one of inputs. Where the giver is on another rank and the schedule says
    its sends and receives, the receive must have been posted and the send reached instead.

    Attributes:
        rows: the schedule's.
        where: place of everything; a place is a number, rank * stride + position in the row.
        last: the last stage.
        kinds: all kinds there are.
        explicit: whether sends and receives are in the rows.
        crossing: of every place, what must be done on other ranks before it can start.
        late: places that need something that is nowhere, or later in their own row.

    Raises:
        ScheduleError: something in the schedule is no action that can be.
    """

    def __init__(self, schedule: Schedule) -> None:
        readable(schedule)
        self.rows = schedule.rows
        self.stride = 1 + max(map(len, self.rows), default=0)
        self.where: dict[Key, int] = {
            a: place
            for rank, row in enumerate(self.rows)
            for place, action in enumerate(row, rank * self.stride)
            for a in action.parts or (action,)
        }
        self.kinds = {a[1] for a in self.where}
        self.last = max((a[0] for a in self.where if a[1] in COMPUTE), default=-1)
        self.explicit = not self.kinds.isdisjoint(COMMUNICATION)
        self.crossing: dict[int, tuple[int, ...]] = {}
        self.late: list[int] = []
        where = self.where
        for rank, row in enumerate(self.rows):
            first = rank * self.stride
            after = first + self.stride
            for place, action in enumerate(row, first):
                if action[1] in (RECV_F, RECV_B):  # the most frequent, and needs nothing
                    continue
                for key in self.of(action, rank):
                    giver = where.get(key, place)
                    if not first <= giver < after:
                        self.crossing[place] = (*self.crossing.get(place, ()), giver)
                    elif giver >= place:
                        self.late.append(place)

    def at(self, place: int) -> Action:
        """What stands at a place."""
        rank, position = divmod(place, self.stride)
        return self.rows[rank][position]

    def rank(self, action: Action | Key) -> int | None:
        """The rank that has an action, or None."""
        place = self.where.get(action)
        return None if place is None else place // self.stride

    def position(self, action: Action | Key) -> int:
        """Where in its rank's row an action stands."""
        return self.where[action] % self.stride

    def place(self, action: Action | Key) -> str:
        """Where an action stands, in words."""
        return f"rank {self.rank(action)}, position {self.position(action)}"

    def gradient(self, stage: int, microbatch: int | None) -> Key:
        """What gives the gradient of a stage's input: its I, or the whole B."""
        of_input = (stage, I, microbatch, ())
        return of_input if of_input in self.where else (stage, B, microbatch, ())

    def of(self, action: Action, rank: int) -> list[Key]:
        """What must be done before this action of a rank can start; of a pair, before both parts can."""
        needs: list[Key] = []
        where, first, after = self.where, rank * self.stride, (rank + 1) * self.stride
        for stage, kind, microbatch, _ in action.parts or (action,):
            if kind == F:
                if stage > 0:
                    giver = (stage - 1, F, microbatch, ())
                    if self.explicit and not first <= where.get(giver, -1) < after:
                        needs += (stage, RECV_F, microbatch, ()), (stage - 1, SEND_F, microbatch, ())
                    else:
                        needs.append(giver)
            elif kind in BACKWARD:
                needs.append((stage, F, microbatch, ()))
                if stage < self.last:
                    giver = self.gradient(stage + 1, microbatch)
                    if self.explicit and not first <= where.get(giver, -1) < after:
                        needs += (stage, RECV_B, microbatch, ()), (stage + 1, SEND_B, microbatch, ())
                    else:
                        needs.append(giver)
            elif kind == W:
                needs.append((stage, I, microbatch, ()))
            elif kind == SEND_F:
                needs.append((stage, F, microbatch, ()))
            elif kind == SEND_B:
                needs.append(self.gradient(stage, microbatch))
        return needs


class Walk:
    """All ranks' actions in an order in which everything comes after what it needs.

    Args:
        needs: of any schedule.
        blocking: a send or a receive holds up its rank until the other rank has come to the other end of it.
        grouped: of blocking ones, those that stand next to each other in a row start together.

    Iterating gives (rank, place, action). Where it ends before the rows do, `stuck` has for every rank that cannot go on
    its place and the place that it waits for.
    """

    def __init__(self, needs: Needs, blocking: bool = False, grouped: bool = False) -> None:
        self.needs, self.blocking, self.grouped = needs, blocking, grouped
        self.stuck: dict[int, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        rows, stride, crossing = self.needs.rows, self.needs.stride, self.needs.crossing
        done = bytearray(len(rows) * stride)
        waiting: dict[int, list[int]] = {}
        at = [rank * stride for rank in range(len(rows))]
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            row = rows[rank]
            for place in range(at[rank], rank * stride + len(row)):
                action = row[place % stride]
                givers = crossing.get(place, ())
                if self.blocking:
                    givers = [*givers, *self._meetings(row, place)]
                for giver in givers:
                    if not done[giver]:
                        waiting.setdefault(giver, []).append(rank)
                        at[rank] = place
                        break
                else:
                    yield rank, place, action
                    done[place] = True
                    if place in waiting:
                        ready += waiting.pop(place)
                    continue
                break
        self.stuck = {rank: (at[rank], giver) for giver, ranks in waiting.items() for rank in ranks}

    def _meetings(self, row: tuple[Action, ...], place: int) -> list[int]:
        """The other ends of what blocks just before: whoever has come to a send or receive goes no further alone."""
        position = place % self.needs.stride
        if self.grouped and row[position].kind in COMMUNICATION:
            return []
        ends: list[int] = []
        while position > 0 and row[position - 1].kind in COMMUNICATION and (self.grouped or not ends):
            position -= 1
            ends.append(self.needs.where[other_end(row[position])])
        return ends


def other_end(action: Action | Key) -> Key:
    """Of a send its receive, of a receive its send."""
    stage, kind, microbatch, _ = action
    answer, step = _ANSWERS[kind]
    return (stage + step, answer, microbatch, ())


_ANSWERS = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


def needs_of(schedule: Schedule) -> Needs:
    """The needs of a schedule, kept for the last few: who checks a schedule also times it.

    Raises:
        ScheduleError: something in it is no action that can be.
    """
    try:
        return _kept(schedule)
    except TypeError:  # not hashable, so no schedule, or with something else than actions
        return Needs(schedule)


@lru_cache(maxsize=4)
def _kept(schedule: Schedule) -> Needs:
    return Needs(schedule)


def error(
    problem: str,
    message: str,
    hint: str,
    action: Action | None = None,
    rank: int | None = None,
    position: int | None = None,
    waiting: dict[int, int] | None = None,
) -> ScheduleError:
    """A ScheduleError with all its fields."""
    name = None if action is None else str(action)
    fields = {"problem": problem, "rank": rank, "position": position, "action": name, "waiting": waiting or {}}
    return ScheduleError(message, hint, **fields)


def readable(schedule: Schedule) -> None:
    """Raises unless everything in a schedule is an action that can be.

    Raises:
        ScheduleError: something is not. EmuError: it is no schedule at all.
    """
    if not isinstance(schedule, Schedule):
        raise EmuError(f"{schedule!r:.80} is no Schedule", "make one: make('1f1b', ranks=4, microbatches=8)")
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if type(action) is Action and action.kind in NUMBERED and not action.parts:  # quickly past what is usual
                stage, _, microbatch, _ = action
                if type(stage) is int and type(microbatch) is int and stage >= 0 <= microbatch:
                    continue
            if wrong := _wrong(action):
                message = f"rank {rank}, position {position}: {action!s:.80} {wrong[0]}"
                raise error("unreadable", message, wrong[1], action, rank, position)


def _wrong(action: Action) -> tuple[str, str] | None:
    """What is wrong with one action taken alone, and what to write instead."""
    if not isinstance(action, Action):
        return "is no action", 'write Action(2, "F", 0), or parse("2F0")'
    stage, kind, microbatch, parts = action
    if parts or kind == OVERLAP_F_B:
        if kind != OVERLAP_F_B or len(parts) < 2:
            return "is no pair", 'write overlap(Action(2, "F", 3), Action(2, "B", 0))'
        if not all(isinstance(a, Action) and a.kind in COMPUTE for a in parts):
            return "puts together what cannot be: only F, B, I and W can", "write sends, receives and the like apart"
        return next(filter(None, map(_wrong, parts)), None)
    if kind not in KINDS:
        return f"is of no known kind, {kind!r}", f"kinds are {' '.join(KINDS)}"
    if type(stage) is not int or stage < 0:
        return f"is of no stage, {stage!r}", "count stages from 0"
    if kind in NUMBERED:
        if type(microbatch) is not int or microbatch < 0:
            return f"is of no microbatch, {microbatch!r}", "count microbatches from 0"
    elif microbatch is not None:
        return f"is of microbatch {microbatch!r}", f"leave that out: {kind} is of a whole stage"
    return None
