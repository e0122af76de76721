"""What a Pipeline is asked for, made sure of: a schedule for so many microbatches, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any

from emu.parallel.pipeline.actions import Action, F
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.lowering import lowered
from emu.parallel.pipeline.schedule import Generator, Schedule
from emu.parallel.pipeline.schedules import SCHEDULES, make
from emu.spmd import EmuError, PlanError, split_sizes


@lru_cache(maxsize=64)
def checked(schedule: Schedule) -> Schedule:
    """A schedule that can be, with sends and receives."""
    check(schedule)
    return lowered(schedule.compute())


def rows_of(rows: int, microbatches: Any) -> list[int]:
    """The rows of each of a rank's microbatches."""
    several = isinstance(microbatches, Sequence) and not isinstance(microbatches, str)
    each: list[Any] = list(microbatches) if several else [microbatches]
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) for n in each)
    if not whole or not each or not (several or each[0] >= 1):
        raise EmuError(
            f"microbatches={microbatches!r:.80}",
            "give their number, at least 1, or a list of the rows of each: whole numbers, none below 0",
        )
    return [int(n) for n in each] if several else split_sizes(rows, int(each[0]))


def maker(schedule: str | Schedule | Generator, ranks: int, chunks: int) -> Callable[[int], Schedule]:
    """Microbatches -> schedule. Raises a PlanError for what is none."""
    if not (isinstance(schedule, (str, Schedule)) or callable(schedule)):
        raise PlanError(
            f"schedule={schedule!r:.80} is no schedule",
            f"say its name ({', '.join(SCHEDULES)}), or pass a Schedule, or a generator of one",
            field="schedule",
        )

    def made(microbatches: int) -> Schedule:
        if isinstance(schedule, Schedule):
            if schedule.ranks != ranks or schedule.microbatches != microbatches:
                raise PlanError(
                    f"{schedule.name} is for {schedule.ranks} ranks and {schedule.microbatches} microbatches, but there are "
                    f"pp={ranks} ranks and {microbatches} microbatches",
                    f"say microbatches={schedule.microbatches} and pp={schedule.ranks}, or pass a generator of schedules",
                    field="schedule",
                )
            return schedule
        if isinstance(schedule, str):
            return make(schedule, ranks, microbatches, chunks)
        found = Schedule.of(schedule, ranks, microbatches, chunks)
        if found.microbatches != microbatches:
            surplus = next((place for place in found.places.items() if place[0][1] >= microbatches), None)
            which = f": rank {surplus[1]} would run {Action(surplus[0][0], F, surplus[0][1])}" if surplus else ""
            raise PlanError(
                f"{found.name} was asked for {microbatches} microbatches, and its actions are of {found.microbatches}{which}",
                f"yield actions of the microbatches 0 to {microbatches - 1}",
                field="microbatches",
            )
        return found

    return made
