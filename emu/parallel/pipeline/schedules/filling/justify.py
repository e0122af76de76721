"""A schedule pushed to its end and back to its start: each step as late as it can be, then as early as it can be.

As in project scheduling (Valls, Ballestin and Quintanilla 2005): what was put off without need makes room for the rest.
"""

from __future__ import annotations

from heapq import heappop, heappush

from emu.parallel.pipeline.schedules.filling.clock import clocked
from emu.parallel.pipeline.schedules.filling.greedy import NEVER
from emu.parallel.pipeline.schedules.filling.problem import TOLERANCE, Problem, Row


def pushed(problem: Problem, rows: list[Row], late: bool, patience: float) -> list[Row] | None:
    """Rows in which a free rank takes, of the steps that may run, the one that was first; time runs backwards if `late`.

    Args:
        rows: what the order is taken from.
        late: begin with the last step of all.
        patience: what share of a step a rank rather waits for one that was before it.

    Returns:
        None where the memory does not allow it.
    """
    timed = clocked(problem, rows)
    assert timed is not None
    m, places, durations, lags, share = (
        problem.microbatches, problem.places, problem.durations, problem.lags, problem.share,
    )  # fmt: skip
    n = len(durations)
    when: list[list[float]] = [[] for _ in durations]  # the order
    for row, begun in zip(rows, timed.starts, strict=True):
        for step, start in zip(row, begun, strict=True):
            when[step].append(start)
    needs: list[float] = [0.0] * n  # room that a step must find
    if late:
        when = [[-start - durations[step] for start in reversed(starts)] for step, starts in enumerate(when)]
        user, source, holds = problem.sources, problem.users, [-by for by in problem.holds]
        lag = lags
        before = [step + 1 if step % 3 < 2 else -1 for step in range(n)]
        needs = [0.0, 1.0 - share, 1.0] * problem.stages  # a backward of weights leaves room for one of inputs
    else:
        user, source, holds = problem.users, problem.sources, problem.holds
        lag = [lags[step] if step >= 0 else 0.0 for step in user]
        before = [step - 1 if step % 3 else -1 for step in range(n)]
        for stages in problem.stages_of:
            for later, s in enumerate(
                reversed(stages)
            ):  # a forward leaves room for one on each later stage of the rank
                needs[3 * s] = 1.0 + later
    comes: list[list[float]] = [[] for _ in durations]
    counts = [0] * n
    steps_of = [[3 * s + kind for s in stages for kind in range(3)] for stages in problem.stages_of]
    room = [problem.limit + TOLERANCE] * problem.ranks
    free = [0.0] * problem.ranks
    asleep = [False] * problem.ranks
    out: list[Row] = [[] for _ in range(problem.ranks)]
    queue = [(0.0, rank) for rank in range(problem.ranks)]
    while queue:
        now, rank = heappop(queue)
        if now < free[rank]:
            continue
        best, best_when, wake, wake_when = -1, NEVER, NEVER, NEVER
        for step in steps_of[rank]:
            k = counts[step]
            if k >= m or (before[step] >= 0 and counts[before[step]] <= k) or room[rank] < needs[step]:
                continue
            if source[step] >= 0:
                if len(comes[step]) <= k:
                    continue
                if comes[step][k] > now:
                    if comes[step][k] < wake:
                        wake, wake_when = comes[step][k], when[step][k]
                    continue
            if when[step][k] < best_when:
                best, best_when = step, when[step][k]
        if best < 0 or (wake < now + patience * durations[best] and wake_when < best_when):
            asleep[rank] = True
            if wake < NEVER:
                heappush(queue, (wake, rank))
            continue
        asleep[rank] = False
        counts[best] += 1
        room[rank] -= holds[best]
        out[rank].append(best)
        end = free[rank] = now + durations[best]
        heappush(queue, (end, rank))
        if user[best] >= 0:
            comes[user[best]].append(end + lag[best])
            other = places[user[best] // 3]
            if asleep[other]:
                heappush(queue, (max(now, free[other]), other))
    if min(counts) < m:
        return None
    return [row[::-1] for row in out] if late else out
