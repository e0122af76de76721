"""What every action of a schedule needs from the others, and all ranks' actions in an order that respects it."""

from __future__ import annotations

from collections.abc import Iterator

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


class Needs:
    """What stands where in a schedule, and what has to happen before what.

    A forward needs the forward of the stage before; a backward (of inputs) its own forward and the backward of the
    stage after; a backward of weights the one of inputs. Where the giver is on another rank and the schedule says
    its sends and receives, the receive must have been posted and the send reached instead.

    Args:
        schedule: any, also one with mistakes.
        blocking: a send or a receive holds up its rank until the other rank has come to the other end of it.
        grouped: of blocking ones, those that stand next to each other in a row start together.

    Raises:
        ScheduleError: something in it is no action that can be.
    """

    def __init__(self, schedule: Schedule, blocking: bool = False, grouped: bool = False) -> None:
        _read(schedule)
        self.rows = schedule.rows
        self.blocking, self.grouped = blocking, grouped
        self.where: dict[Key, int] = {a: r for r, row in enumerate(self.rows) for x in row for a in x.parts or (x,)}
        self.last = max((a[0] for a in self.where if a[1] in COMPUTE), default=-1)
        self.kinds = {a[1] for a in self.where}
        self.explicit = blocking or not self.kinds.isdisjoint(COMMUNICATION)
        self.stuck: dict[int, tuple[int, Key]] = {}

    def gradient(self, stage: int, microbatch: int | None) -> Key:
        """What gives the gradient of a stage's input: its I, or the whole B."""
        of_input = (stage, I, microbatch, ())
        return of_input if of_input in self.where else (stage, B, microbatch, ())

    def position(self, action: Action | Key) -> int:
        """Where in its rank's row an action stands."""
        return next(n for n, other in enumerate(self.rows[self.where[action]]) if action in (other, *other.parts))

    def place(self, action: Action | Key) -> str:
        """Where an action stands, in words."""
        return f"rank {self.where[action]}, position {self.position(action)}"

    def of(self, action: Action, rank: int) -> list[Key]:
        """What must be done before this action of a rank can start; of a pair, before both parts can."""
        needs: list[Key] = []
        for stage, kind, microbatch, _ in action.parts or (action,):
            if kind == F:
                if stage > 0:
                    giver = (stage - 1, F, microbatch, ())
                    if self.explicit and self.where.get(giver) != rank:
                        needs += (stage, RECV_F, microbatch, ()), (stage - 1, SEND_F, microbatch, ())
                    else:
                        needs.append(giver)
            elif kind in BACKWARD:
                needs.append((stage, F, microbatch, ()))
                if stage < self.last:
                    giver = self.gradient(stage + 1, microbatch)
                    if self.explicit and self.where.get(giver) != rank:
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

    def walk(self) -> Iterator[tuple[int, Action, list[Key]]]:
        """Every action as (rank, action, what it needed): after what it needs, and in each rank's order.

        Where this ends before the rows do, `stuck` has for every rank that cannot go on its position and what it lacks.
        """
        done: set[Key] = set()
        waiting: dict[Key, list[int]] = {}
        at = [0] * len(self.rows)
        ready = list(range(len(self.rows)))
        while ready:
            rank = ready.pop()
            row = self.rows[rank]
            for position in range(at[rank], len(row)):
                action = row[position]
                needs = self.of(action, rank)
                if self.blocking:
                    needs += self._meetings(row, position)
                for key in needs:
                    if key not in done:
                        waiting.setdefault(key, []).append(rank)
                        at[rank] = position
                        break
                else:
                    yield rank, action, needs
                    for a in action.parts or (action,):
                        done.add(a)
                        if a in waiting:
                            ready += waiting.pop(a)
                    continue
                break
        self.stuck = {rank: (at[rank], key) for key, ranks in waiting.items() for rank in ranks}

    def _meetings(self, row: tuple[Action, ...], position: int) -> list[Key]:
        """The other ends of what blocks just before: whoever has come to a send or receive goes no further alone."""
        if self.grouped and row[position].kind in COMMUNICATION:
            return []
        ends: list[Key] = []
        while position > 0 and row[position - 1].kind in COMMUNICATION and (self.grouped or not ends):
            position -= 1
            ends.append(other_end(row[position]))
        return ends


def other_end(action: Action | Key) -> Key:
    """Of a send its receive, of a receive its send."""
    stage, kind, microbatch, _ = action
    answer, step = _ANSWERS[kind]
    return (stage + step, answer, microbatch, ())


_ANSWERS = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


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


def _read(schedule: Schedule) -> None:
    """Raises if something in a schedule is no action that can be."""
    if not isinstance(schedule, Schedule):
        raise EmuError(f"{schedule!r:.80} is no Schedule", "make one: make('1f1b', ranks=4, microbatches=8)")
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
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
    if kind in COMPUTE or kind in COMMUNICATION:
        if type(microbatch) is not int or microbatch < 0:
            return f"is of no microbatch, {microbatch!r}", "count microbatches from 0"
    elif microbatch is not None:
        return f"is of microbatch {microbatch!r}", f"leave that out: {kind} is of a whole stage"
    return None
