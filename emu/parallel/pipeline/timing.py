"""When a schedule does what, how long its ranks idle, and how many activations they hold: from given times, nothing run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from emu.parallel.pipeline.actions import COMPUTE, Action, B, F, I, W
from emu.parallel.pipeline.checks import check
from emu.parallel.pipeline.needs import Walk, needs_of, readable
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import EmuError

Durations = float | Sequence[float]  # of every stage, or one for each
AS_TIMES = "times=Times(forward=1.0, backward_input=1.0, weight=1.0)"


@dataclass(frozen=True)
class Times:
    """How long one stage takes for one microbatch, in seconds or any other unit.

    Args:
        forward, backward_input, weight: a number, or one per stage; a whole backward takes the last two together.
        communication: from the end of an action on one rank until another can use its result; occupies neither.
        overlapped: of a forward and a whole backward run as a pair; by default as long as one after the other.

    Raises:
        EmuError: a time that is no finite number of at least 0.
    """

    forward: Durations = 1.0
    backward_input: Durations = 1.0
    weight: Durations = 1.0
    communication: float = 0
    overlapped: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "weight"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                for stage, one in enumerate(value):
                    _time(f"Times({name}=...) of stage {stage}", one)
                object.__setattr__(self, name, tuple(value))
            else:
                _time(f"Times({name}=...)", value)
        _time("Times(communication=...)", self.communication)
        if self.overlapped is not None:
            _time("Times(overlapped=...)", self.overlapped)

    def of(self, schedule: Schedule) -> dict[str, Sequence[float]]:
        """How long F, B, I and W of each stage of a schedule take.

        Raises:
            EmuError: times for another number of stages.
        """
        lists = []
        for name in ("forward", "backward_input", "weight"):
            value = getattr(self, name)
            each = value if isinstance(value, tuple) else (value,) * schedule.stages
            if len(each) != schedule.stages:
                raise EmuError(
                    f"Times({name}=...) has {len(each)} times, but {schedule.name} has {schedule.stages} stages",
                    f"give one number for all stages, or {schedule.stages}, in the stages' order",
                )
            lists.append(each)
        forward, backward_input, weight = lists
        whole = tuple(map(sum, zip(backward_input, weight)))
        return {F: forward, B: whole, I: backward_input, W: weight}


@dataclass(frozen=True)
class Timed:
    """A schedule with times.

    Args:
        rows: for every rank its compute actions as (start, stop, action), a pair as one.
    """

    rows: tuple[tuple[tuple[float, float, Action], ...], ...]

    @property
    def makespan(self) -> float:
        """When the last action stops; the first starts at 0."""
        return max((row[-1][1] for row in self.rows if row), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(stop - start for start, stop, _ in self.rows[rank])

    def span(self, rank: int) -> float:
        """From a rank's first start to its last stop."""
        row = self.rows[rank]
        return row[-1][1] - row[0][0] if row else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time, mean over ranks: of 1F1B (p - 1) / (m + p - 1)."""
        whole = self.makespan * len(self.rows)
        return (whole - self._busy) / whole if whole else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle time over computing time: of 1F1B (p - 1) / m."""
        return (self.makespan * len(self.rows) - self._busy) / self._busy if self._busy else 0.0

    @property
    def cost(self) -> float:
        """The longest that any rank takes from its first start to its last stop.

        This is what a step costs where no rank waits for the others between steps (Zero Bubble, arXiv:2401.10241, section 4).
        """
        return max((self.span(rank) for rank in range(len(self.rows))), default=0.0)

    @property
    def _busy(self) -> float:
        return sum(self.busy(rank) for rank in range(len(self.rows)))


def timed(schedule: Schedule, times: Times | None = None) -> Timed:
    """When every action starts and stops if each starts as soon as it can, in its rank's order.

    Args:
        schedule: with or without sends and receives. A result travels as soon as its action stops, or, where there
            are sends, as soon as its rank comes to the send; and never holds up who computes.
        times: how long things take; by default 1 for each of F, I and W, 2 for B, nothing for communication.

    Raises:
        ScheduleError: an action never gets what it needs.
        EmuError: times for another number of stages, or that are no Times.
    """
    if times is not None and not isinstance(times, Times):
        raise EmuError(f"times={times!r:.60} are no Times", f"say {AS_TIMES}", value=times)
    needs = needs_of(schedule)
    if needs.late:
        check(schedule)  # which says what
    times = times or Times()
    duration = times.of(schedule)
    crossing, communication = needs.crossing, times.communication
    clock: list[float] = [0] * schedule.ranks
    stops: list[float] = [0] * (schedule.ranks * needs.stride)
    rows: list[list[tuple[float, float, Action]]] = [[] for _ in schedule.rows]
    walk = Walk(needs)
    for rank, place, action in walk:
        start = clock[rank]
        if place in crossing:
            for giver in crossing[place]:
                arrived = stops[giver] + communication
                if arrived > start:
                    start = arrived
        if action.parts:
            stop = start + _together(action, times, duration)
        elif action.kind in COMPUTE:
            stop = start + duration[action.kind][action.stage]
        else:  # asks for nothing of this rank's time
            stops[place] = start
            continue
        stops[place] = clock[rank] = stop
        rows[rank].append((start, stop, action))
    if walk.stuck:
        check(schedule)  # which says why
    return Timed(tuple(map(tuple, rows)))


def peak_activations(schedule: Schedule, weight_share: float = 0.5) -> list[float]:
    """The most activations that each rank holds at once, in those of one microbatch on one stage (chunk).

    Args:
        schedule: any.
        weight_share: of these, what the backward of inputs leaves for the one of weights: M_W / M_B.

    Raises:
        ScheduleError: something in the schedule is no action that can be.
        EmuError: weight_share is no number from 0 to 1.
    """
    readable(schedule)
    _share(weight_share)
    return [max((held for _, held in _held(row, weight_share)), default=0.0) for row in schedule.rows]


def activations(timed: Timed, weight_share: float = 0.5) -> list[list[tuple[float, float]]]:
    """How many activations each rank holds over time: per rank (time, held from then on), in order.

    A forward adds one when it starts. A backward takes it when it stops: the whole, or all but weight_share by I,
    that by W.

    Raises:
        EmuError: weight_share is no number from 0 to 1.
    """
    _share(weight_share)
    series = []
    for row in timed.rows:
        times = {False: [start for start, _, _ in row], True: [stop for _, stop, _ in row]}
        changes = _held([action for _, _, action in row], weight_share)
        series.append([(times[after][position], held) for (position, after), held in changes])
    return series


def _held(row: Sequence[Action], weight_share: float) -> Iterator[tuple[tuple[int, bool], float]]:
    """((position, whether after it), what is held from then on), at every change of a row."""
    whole = left = 0  # counted apart, so that nothing is rounded
    for position, action in enumerate(row):
        kinds = [a.kind for a in action.each()]
        if F in kinds:
            whole += kinds.count(F)
            yield (position, False), whole + left * weight_share
        if kinds != [F] and not COMPUTE.isdisjoint(kinds):
            whole -= kinds.count(B) + kinds.count(I)
            left += kinds.count(I) - kinds.count(W)
            yield (position, True), whole + left * weight_share


def _together(pair: Action, times: Times, duration: dict[str, Sequence[float]]) -> float:
    if times.overlapped is not None and sorted(a.kind for a in pair.parts) == [B, F]:
        return times.overlapped
    return sum(duration[a.kind][a.stage] for a in pair.parts)


def _time(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:  # nan is neither
        raise EmuError(f"{what} is {value!r}, which is no time", "give a finite number of at least 0", value=value)


def _share(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise EmuError(
            f"weight_share={value!r} is no share",
            "give a number from 0 to 1: of a microbatch's activations on a stage, what the backward of weights needs",
            value=value,
        )
