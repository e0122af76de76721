"""What a pipeline's pictures show, before anything is drawn: when each rank does what, of a schedule or of a run."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from emu.parallel.pipeline import Action, Schedule, Timed, Times, parse, timed
from emu.parallel.pipeline.actions import COMPUTE, B, F, I, W
from emu.trace.events import Free, Mark

if TYPE_CHECKING:
    from emu.cost.timeline import Timeline
    from emu.trace.memory import Memory

_NO_ACTIONS = (
    "no action of a pipeline is marked in this timeline: it needs a run in which emu.parallel.Pipeline computed "
    "a batch, and if it is a window of one, a window around that"
)
_ACTION = re.compile(r"\d+[FBIW]\d+", re.ASCII)
# Of kernels. What runs outside of modules may follow the last action: sums of gradients, clipping.
_PHASES = {F: ("forward", "recompute"), B: ("backward", "recompute")}


def as_timed(what: Schedule | Timed, times: Times | None = None) -> Timed:
    """A schedule with times.

    Raises:
        ValueError: times for what has its times, or something that is no schedule.
        ScheduleError: the schedule cannot run.
    """
    if isinstance(what, Timed):
        if times is not None:
            raise ValueError("this schedule has its times; give times with a Schedule, not with what timed() returned")
        return what
    if not isinstance(what, Schedule):
        raise ValueError(
            f"{type(what).__name__} is no schedule: give one, as of make('1f1b', 4, 8), or what timed(schedule) returned"
        )
    return timed(what, times)


def unit_of(schedule: Any, times: Times | None) -> str:
    """What an axis of a pure schedule counts in."""
    given = "in the unit of the given times"
    return given if times is not None or isinstance(schedule, Timed) else "a forward of one microbatch on one stage = 1"


def as_timeline(what: Any) -> Timeline:
    """A timeline; of a run, its own.

    Raises:
        ValueError: it is neither.
    """
    from emu.cost.timeline import Timeline

    if isinstance(what, Timeline):
        return what
    if not hasattr(what, "timeline"):
        raise ValueError(
            f"{type(what).__name__} is no timeline: give run.timeline(), or the run (a window of it) itself"
        )
    return what.timeline()


def check_ran(schedule: Any, timeline: Timeline) -> None:
    """Refuses what is no schedule, and one of which this was no run: every rank must have done its row's actions, once.

    Pairs count as their parts, one after the other.

    Raises:
        ValueError: says which rank did what else.
    """
    ranks = pipeline_ranks(timeline)
    did = [_marked(timeline, rank) for rank in ranks]
    if not any(did):
        raise ValueError(_NO_ACTIONS)
    if not isinstance(schedule, Schedule):
        microbatches = len({re.split("[FBIW]", one)[1] for row in did for one in row})
        what = repr(schedule) if isinstance(schedule, str) else type(schedule).__name__
        name = schedule if isinstance(schedule, str) else "1f1b"
        raise ValueError(
            f"{what} is no Schedule: give the one that was run, as pipe.schedule or "
            f"make({name!r}, {len(ranks)}, {microbatches})"
        )
    if len(ranks) != schedule.ranks:
        raise ValueError(
            f"{schedule.name} has {schedule.ranks} ranks, and the timeline's pipeline {len(ranks)}, {ranks}: "
            "give the schedule that was run"
        )
    for rank, row, want in zip(ranks, did, schedule.rows):
        said = [str(part) for action in want for part in action.each() if part.kind in COMPUTE]
        if row == said:
            continue
        if said and len(row) > len(said) and row == said * (len(row) // len(said)):
            raise ValueError(
                f"the timeline has {len(row) // len(said)} steps of {schedule.name}, and a picture is of one: give a window "
                "of the run, run.window(mark, next_mark).timeline(), where the program says rank.mark(...) before each step"
            )
        at = next((i for i, (a, b) in enumerate(zip(row, said)) if a != b), min(len(row), len(said)))
        ran, asked = (words[at] if at < len(words) else "nothing more" for words in (row, said))
        raise ValueError(
            f"this was no run of {schedule.name}: as action {at} (counted from 0) rank {rank} did {ran}, and the schedule "
            f"says {asked}. Give the schedule that was run, with its microbatches and chunks, and a window of one whole step"
        )


def pipeline_ranks(timeline: Timeline) -> list[int]:
    """The ranks of one pipeline, in its order: those at 0 along all other axes of the mesh, as far as they were recorded."""
    axes, stride, size = timeline.trace.axes, 1, 1
    for axis, n in reversed(list(axes.items())):
        if axis == "pp":
            size = n
            break
        stride *= n
    return [rank for rank in range(0, stride * size, stride) if rank in timeline.trace.events]


def timed_run(timeline: Timeline, ranks: Sequence[int] | None = None) -> Timed:
    """When each action of a pipeline's run was done: from its first kernel's start to its last one's end, in seconds.

    Kernels are an action's if they lie between its mark and the next one. The first action of all starts at 0.

    Args:
        timeline: of a run, or of a window of one, in which a Pipeline was at work.
        ranks: those of a pipeline, in its order; None: of the first one.

    Raises:
        ValueError: nothing in it is an action of a pipeline; or a rank that it does not have.
    """
    rows = _rows(timeline, ranks)
    first = _first(rows)
    return Timed(tuple(tuple((start - first, stop - first, action) for start, stop, action in row) for row in rows))


def run_start_s(timeline: Timeline, ranks: Sequence[int] | None = None) -> float:
    """When the first action of a pipeline's run starts, from the timeline's start on.

    Raises:
        ValueError: as `timed_run`.
    """
    return _first(_rows(timeline, ranks))


def _rows(timeline: Timeline, ranks: Sequence[int] | None) -> list[list[tuple[float, float, Action]]]:
    ranks = pipeline_ranks(timeline) if ranks is None else list(ranks)
    _known(timeline, ranks)
    rows = [_row(timeline, rank) for rank in ranks]
    if not any(rows):
        raise ValueError(_NO_ACTIONS)
    return rows


def _first(rows: Sequence[Sequence[tuple[float, float, Action]]]) -> float:
    return min(row[0][0] for row in rows if row)


def _known(timeline: Timeline, ranks: Sequence[int]) -> None:
    for rank in ranks:
        if rank not in timeline.trace.events:
            raise ValueError(f"the timeline has no rank {rank}; it has {sorted(timeline.trace.events)}")


def _marked(timeline: Timeline, rank: int) -> list[str]:
    """The actions that a rank's marks name, in order: also those without a kernel."""
    events = timeline.trace.events[rank]
    return [event.name for event in events if type(event) is Mark and _ACTION.fullmatch(event.name)]


def _row(timeline: Timeline, rank: int) -> list[tuple[float, float, Action]]:
    marks = [(i, event.name) for i, event in enumerate(timeline.trace.events[rank]) if type(event) is Mark]
    spans = [span for span in timeline.spans[rank] if span.kind == "kernel"]  # in program order
    row, at = [], 0
    for (begin, name), (end, _) in zip(marks, [*marks[1:], (len(timeline.trace.events[rank]), "")]):
        if not _ACTION.fullmatch(name):
            continue
        while at < len(spans) and spans[at].index < begin:
            at += 1
        action, start, stop = parse(name), None, 0.0
        phases = _PHASES.get(action.kind, _PHASES[B])
        while at < len(spans) and spans[at].index < end:
            span, at = spans[at], at + 1
            if span.phase in phases:
                start = span.start_s if start is None else min(start, span.start_s)
                stop = max(stop, span.end_s)
        if start is not None:
            row.append((start, stop, action))
    return row


def measured_times(run: Timed, schedule: Schedule) -> Times:
    """How long the actions of every stage took in a run: the median over microbatches. Communication is left at 0.

    Where a run took no backward apart, the whole counts as that of inputs, which changes nothing in a schedule of whole ones.

    Args:
        run: as `timed_run` gives it.
        schedule: what was run.
    """
    lasted: dict[tuple[int, str], list[float]] = {}
    for row in run.rows:
        for start, stop, action in row:
            lasted.setdefault((action.stage, action.kind), []).append(stop - start)

    def each(*kinds: str) -> tuple[float, ...]:
        found = (
            next((lasted[s, kind] for kind in kinds if (s, kind) in lasted), [0.0]) for s in range(schedule.stages)
        )
        return tuple(map(median, found))

    return Times(each(F), each(I, B), each(W))


def held_bytes(
    memory: Memory, timeline: Timeline, rank: int, category: str = "activations"
) -> tuple[list[float], list[int]]:
    """What a rank's memory holds of one category: (device times in seconds, bytes from then on).

    The host runs ahead of its device, so that its time would tell little: what is allocated counts from the start of the
    next kernel, and what is freed until the end of the last one.

    Args:
        memory, timeline: of one run, or of one window.
    """
    events, (indices, lines) = timeline.trace.events[rank], memory.series(rank)
    spans = [span for span in timeline.spans[rank] if span.kind == "kernel"]
    at, ends, latest = [span.index for span in spans], [], 0.0
    for span in spans:
        ends.append(latest := max(latest, span.end_s))
    times, held, now, before = [], [], 0.0, None
    for index, n in zip(indices, lines.get(category, [0] * len(indices))):
        if n == before:
            continue
        if not index:  # what a window holds when it begins
            time = 0.0
        elif type(events[index]) is Free:
            place = bisect_right(at, index) - 1
            time = ends[place] if place >= 0 else 0.0
        else:
            place = bisect_left(at, index)
            time = spans[place].start_s if place < len(spans) else latest
        now, before = max(now, time), n
        times.append(now)
        held.append(n)
    return times, held


def chunks_of(row: Sequence[tuple[float, float, Any]]) -> dict[int, int]:
    """stage -> which of the rank's stages it is, counted from 0."""
    stages = sorted({part.stage for _, _, action in row for part in action.each() if part.kind in COMPUTE})
    return {stage: chunk for chunk, stage in enumerate(stages)}
