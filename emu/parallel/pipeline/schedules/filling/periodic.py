"""An order in which the same happens in every period: one microbatch laid out as tightly as the ranks' free time allows.

As compilers pipeline loops (Rau 1994): each step takes the first moment that is free on its rank in every period.
"""

from __future__ import annotations

from emu.parallel.pipeline.schedules.filling.problem import FORWARD, INPUT, TOLERANCE, WEIGHT, Problem, Row


def periodic(problem: Problem, period: float, weights_first: bool) -> list[Row] | None:
    """Rows in the order of such periods, each rank's steps as soon as they can be; best where memory is scarce.

    Args:
        period: seconds from a microbatch to the next.
        weights_first: lay a stage's backward of weights out at once after that of inputs, not when the chain has been.

    Returns:
        None where they take too much memory.
    """
    durations, places, lags = problem.durations, problem.places, problem.lags
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.ranks)]  # within a period
    starts = [0.0] * len(durations)

    def lay(step: int, ready: float) -> float:
        taken = busy[places[step // 3]]
        starts[step] = start = _free(taken, ready, durations[step], period)
        taken.append((start % period, durations[step]))
        return start + durations[step]

    now = 0.0
    for s in range(problem.stages):
        now = lay(3 * s + FORWARD, now + lags[3 * s])
    ends = {}
    for s in reversed(range(problem.stages)):
        now = ends[s] = lay(3 * s + INPUT, now + lags[3 * s + INPUT])
        if weights_first:
            lay(3 * s + WEIGHT, now)
    if not weights_first:
        for s, end in ends.items():
            lay(3 * s + WEIGHT, end)
    rows = []
    for stages in problem.stages_of:
        order = [
            (starts[step] + k * period, k, step)
            for step in range(3 * stages[0], 3 * stages[-1] + 3)
            if step // 3 in stages
            for k in range(problem.microbatches)
        ]
        rows.append([step for _, _, step in sorted(order)])
        held = 0.0
        for step in rows[-1]:
            held += problem.holds[step]
            if held > problem.limit + TOLERANCE:
                return None
    return rows


def _free(taken: list[tuple[float, float]], ready: float, duration: float, period: float) -> float:
    """The first moment from `ready` on that is free in every period; `ready` itself where none is."""
    moments = [ready, *(ready + (begin + lasts - ready) % period for begin, lasts in taken)]
    for moment in sorted(moments):
        if all(
            (begin - moment) % period >= duration - 1e-9 and (moment - begin) % period >= lasts - 1e-9
            for begin, lasts in taken
        ):
            return moment
    return ready
